"""Functions on trees with boxes as leaves: walks, the leaves that take a gradient, unboxing and boxing."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import DictKey, keystr

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.dim_names import reader
from xlstm_jax.distributed.data_parallel.leaf import (
    Sharded,
    is_box,
    is_library_box,
    leaf_of,
    rebox,
    split_by_model,
    stored_value,
    true_value,
)
from xlstm_jax.distributed.data_parallel.unconstrained_boxes import with_flax_box

OneLeaf = Callable[[Any], bool]  # returns whether a node counts as one leaf although it is a pytree


def flatten_with_path(tree: PyTree, one_leaf: OneLeaf = is_box) -> tuple[list[tuple[str, Any]], Any]:
    """Returns (path, leaf) for all leaves, with paths as ``blocks/mlp/kernel``, and the tree structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=one_leaf)
    return [(path_string(path), leaf) for path, leaf in leaves], treedef


def leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns (path, leaf) for all leaves, in tree order; a box is a leaf."""
    return flatten_with_path(tree)[0]


def sharded_leaves(tree: PyTree) -> list[tuple[str, Sharded]]:
    """Returns (path, leaf) for all leaves; bare arrays and boxes of Flax are converted to ``Sharded``."""
    return [(path, leaf_of(leaf)) for path, leaf in leaves_with_path(tree)]


def map_leaves(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree, one_leaf: OneLeaf = is_box) -> PyTree:
    """Applies ``jax.tree.map`` with boxes as leaves; ``other_trees`` has a box or a bare value for each leaf."""
    return jax.tree.map(fn, tree, *other_trees, is_leaf=one_leaf)


def with_leaves(tree: PyTree, leaves: Iterable[Any]) -> PyTree:
    """Returns ``leaves``, in tree order, in the structure of ``tree``; a box in ``tree`` is a leaf."""
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_box), leaves)


def map_leaves_with_path(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree) -> PyTree:
    """Returns the tree of ``fn(path, leaf, *other_trees)``, with boxes as leaves; see ``map_leaves``."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        return fn(path_string(path), *leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *other_trees, is_leaf=is_box)


def map_sharded(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree) -> PyTree:
    """Returns the tree of ``fn(leaf, *other_trees)``, with each leaf converted to a ``Sharded`` first."""
    return jax.tree.map(lambda leaf, *others: fn(leaf_of(leaf), *others), tree, *other_trees, is_leaf=is_box)


def map_values(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree) -> PyTree:
    """Returns the tree with ``fn(leaf, *other_trees)`` as the value of each leaf, in the leaf's box if there is a box.

    ``fn`` gets the leaf converted by ``leaf_of``, and the leaves of ``other_trees`` unchanged.
    """
    return jax.tree.map(
        lambda leaf, *others: rebox(leaf, fn(leaf_of(leaf), *others)), tree, *other_trees, is_leaf=is_box
    )


def map_values_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Applies ``map_values`` with ``fn(path, leaf, *other_trees)``."""
    return map_leaves_with_path(lambda path, leaf, *others: rebox(leaf, fn(path, leaf_of(leaf), *others)), tree, *rest)


def path_string(path: tuple[Any, ...]) -> str:
    """Converts a key path of JAX to text, as ``blocks/mlp/kernel``; ``.`` for the empty path of a bare leaf."""
    # Nearly all keys are names in dicts, and this runs often: JAX's function takes five times as long.
    names = [key.key if type(key) is DictKey and type(key.key) is str else keystr((key,), simple=True) for key in path]
    return "/".join(names) or "."


def named_leaf(argument: str, path: str) -> str:
    """Returns the expression for a leaf of an argument: ``batch['x']``; ``batch`` if the argument is a single leaf."""
    return argument if path == "." else f"{argument}['{path}']"


def unbox(tree: PyTree) -> PyTree:
    """Returns the tree without boxes and without padding (``uneven="pad"``): leaves have the plain model's shapes.

    (``nn.meta.unbox`` refuses shards, or constrains their sharding.) Inside ``shard_map`` a leaf is this device's shard
    in its stored form.

    >>> unbox({"w": nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp"))})["w"].shape
    (16, 32)
    """

    # JAX's error about a donated array contains neither leaf nor cause.
    check_alive(tree, "unbox")

    def bare(leaf: Sharded) -> Any:
        if leaf.stores_value:
            return leaf.value
        return jax.eval_shape(true_value, leaf) if isinstance(leaf.value, jax.ShapeDtypeStruct) else true_value(leaf)

    return map_sharded(bare, tree)


def with_mesh_names(variables: PyTree) -> PyTree:
    """Returns variables of ``model.init`` with the logical names of dims replaced by axes of the current mesh.

    ``init`` must run under ``boxes_without_constraints``. Parameters get boxes with axes, by ``split_by_model``. Leaves
    of other collections are replicated, and lose their boxes of logical names.
    """

    def named(leaf: Any, is_param: bool) -> Any:
        if is_param:
            return split_by_model(with_flax_box(leaf))
        return leaf.unbox() if reader().has_rules_for(leaf) else with_flax_box(leaf)

    names = reader().names_from_collections(variables)
    return {name: map_leaves(partial(named, is_param=name == "params"), tree) for name, tree in names.items()}


def readable(tree: PyTree) -> PyTree:
    """Returns the tree for a model inside ``shard_map``, where a leaf in a box of Flax reads as this device's shard.

    A box of Flax constrains its sharding when it is read, which is an error inside ``shard_map``. The library's boxes
    stay: the leaves are parameters of a second model, which gathers.
    """

    def shard(leaf: Any) -> Any:
        return leaf if is_library_box(leaf) or not is_box(leaf) else leaf_of(leaf).replace(read_as_stored=True)

    return map_leaves(shard, tree)


def check_alive(tree: PyTree, reader: str) -> None:
    """Raises a ``ValueError`` if an array of the tree was donated; ``reader`` names the function in the error."""
    for path, leaf in sharded_leaves(tree):
        value = leaf.value
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
            raise ValueError(
                f"{reader}: '{path}' of shape {value.shape} is gone: a step that was given this state reused its "
                "memory. Continue with the state that the step returned; to keep the old state, pass the step a copy, "
                "jax.tree.map(jnp.copy, state)."
            )


def stored_values(tree: PyTree) -> PyTree:
    """Returns the tree without boxes, with values in their stored form."""
    return map_sharded(lambda leaf: leaf.value, tree)


def without_frozen(tree: PyTree) -> PyTree:
    """Returns the tree with ``None`` for frozen leaves."""
    return map_leaves(lambda leaf: leaf if leaf_of(leaf).trainable else None, tree)


def differentiable(tree: PyTree) -> list[Sharded]:
    """Returns the leaves that take a gradient, converted by ``leaf_of``, in the order of ``split_differentiable``."""
    return [leaf for _, leaf in sharded_leaves(tree) if leaf.is_differentiable]


def split_differentiable(tree: PyTree) -> tuple[list[Any], Callable[..., PyTree]]:
    """Returns the leaves that take a gradient (boxes are leaves), and a function to rebuild the tree.

    Returns:
      The list, and ``put_back(leaves, fill_other=...)``, which returns the tree with ``leaves`` in place of the listed
      leaves, and ``fill_other(leaf)`` in place of every other leaf (default: unchanged).
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_box)
    # Computed once, from the original leaves: the leaves that are put back may be gradients, or None.
    takes = [leaf_of(leaf).is_differentiable for leaf in leaves]

    def put_back(new_leaves: Iterable[Any], fill_other: Callable[[Any], Any] = lambda leaf: leaf) -> PyTree:
        new = iter(new_leaves)
        merged = [next(new) if take else fill_other(leaf) for take, leaf in zip(takes, leaves, strict=True)]
        return jax.tree.unflatten(treedef, merged)

    return [leaf for take, leaf in zip(takes, leaves, strict=True) if take], put_back


def box_like(tree: PyTree, boxed: PyTree) -> PyTree:
    """Puts the boxes of ``boxed`` around the values of ``tree``: the inverse of ``unbox``, after a restore, say.

    >>> box_like({"w": jnp.zeros((16, 32))}, {"w": nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp"))})["w"].names
    (None, 'fsdp')

    Args:
      tree: bare values, of true or of padded shapes.
      boxed: a tree of the same structure with boxes, of arrays or ``ShapeDtypeStruct``.
    """

    def stored(box: Sharded, value: Any) -> Any:
        # A value of the stored shape is stored unchanged; a value of the true shape is converted by the box.
        if box.stores_value or np.shape(value) != box.true_shape:
            return value
        if isinstance(value, jax.ShapeDtypeStruct):
            return jax.eval_shape(partial(stored_value, box), value)
        return stored_value(box, value)

    return map_values(stored, boxed, tree)


def split_arrays(tree: PyTree, *array_types: type[Any]) -> tuple[dict[int, Any], Callable[[dict[int, Any]], PyTree]]:
    """Returns the arrays of a tree by their positions among the leaves, and a function from new arrays to the tree.

    Instances of the classes ``array_types`` count as arrays. The remaining leaves stay unchanged.
    """
    with_paths, treedef = flatten_with_path(tree, lambda node: isinstance(node, array_types))
    leaves = [leaf for _, leaf in with_paths]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, *array_types))}
    # The function below keeps `other_leaves`, so it must not contain arrays: a tracer would outlive its trace.
    other_leaves = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
    return arrays, lambda arrays: jax.tree.unflatten(
        treedef, [arrays.get(i, leaf) for i, leaf in enumerate(other_leaves)]
    )

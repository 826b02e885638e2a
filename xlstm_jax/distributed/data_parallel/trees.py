"""Trees with boxes as leaves: walks them, splits off the leaves that take a gradient, unboxes and boxes them."""

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
    is_ours,
    leaf_of,
    rebox,
    split_by_model,
    stored_value,
    true_value,
)
from xlstm_jax.distributed.data_parallel.unconstrained_boxes import as_flax_has_it

OneLeaf = Callable[[Any], bool]  # which nodes count as one leaf although JAX could take them apart


def flatten_with_path(tree: PyTree, one_leaf: OneLeaf = is_box) -> tuple[list[tuple[str, Any]], Any]:
    """All leaves with their paths, as in ``blocks/mlp/kernel``, and the structure to put them back."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=one_leaf)
    return [(path_string(path), leaf) for path, leaf in found], treedef


def leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    """All leaves with their paths, a box being one leaf, in the order of the tree."""
    return flatten_with_path(tree)[0]


def sharded_leaves(tree: PyTree) -> list[tuple[str, Sharded]]:
    """Returns all leaves with their paths, each as ``leaf_of`` reads it: bare arrays and boxes of others, too."""
    return [(path, leaf_of(leaf)) for path, leaf in leaves_with_path(tree)]


def map_leaves(fn: Callable[..., Any], tree: PyTree, *rest: PyTree, one_leaf: OneLeaf = is_box) -> PyTree:
    """``jax.tree.map`` with boxes as leaves; ``rest`` has a box or a bare value for each leaf."""
    return jax.tree.map(fn, tree, *rest, is_leaf=one_leaf)


def map_leaves_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Like ``map_leaves``; ``fn`` gets the leaf's path before the leaf."""

    def named(path: tuple[Any, ...], *leaves: Any) -> Any:
        return fn(path_string(path), *leaves)

    return jax.tree_util.tree_map_with_path(named, tree, *rest, is_leaf=is_box)


def map_sharded(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Returns the tree with ``fn(leaf, *rest)`` in place of each leaf, which ``fn`` gets as ``leaf_of`` reads it."""
    return jax.tree.map(lambda leaf, *others: fn(leaf_of(leaf), *others), tree, *rest, is_leaf=is_box)


def map_values(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Returns the tree with ``fn(leaf, *rest)`` as the value of each leaf, which keeps its box.

    ``fn`` gets the leaf as ``leaf_of`` reads it, and those of ``rest`` as they are.
    """
    return jax.tree.map(lambda leaf, *others: rebox(leaf, fn(leaf_of(leaf), *others)), tree, *rest, is_leaf=is_box)


def map_values_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Like ``map_values``; ``fn`` gets the leaf's path before the leaf."""
    return map_leaves_with_path(lambda path, leaf, *others: rebox(leaf, fn(path, leaf_of(leaf), *others)), tree, *rest)


def path_string(path: tuple[Any, ...]) -> str:
    """A key path as people write it: ``blocks/mlp/kernel``; ``.`` for a tree that is one leaf."""
    # Nearly all are names in dicts, and there are many: JAX takes five times as long.
    names = [key.key if type(key) is DictKey and type(key.key) is str else keystr((key,), simple=True) for key in path]
    return "/".join(names) or "."


def named_leaf(argument: str, path: str) -> str:
    """A leaf of an argument as one writes it: ``batch['x']``; the argument itself where it is one leaf."""
    return argument if path == "." else f"{argument}['{path}']"


def unbox(tree: PyTree) -> PyTree:
    """The tree without boxes, and without the padding of ``uneven="pad"``: leaves have the shapes of the plain model.

    (``nn.meta.unbox`` refuses shards, or constrains their sharding.) Inside ``shard_map`` a leaf is this device's shard
    as it is stored.

    >>> unbox({"w": nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp"))})["w"].shape
    (16, 32)
    """

    # JAX's own error of a donated array names neither leaf nor cause.
    check_alive(tree, "unbox")

    def bare(leaf: Sharded) -> Any:
        if leaf.stores_value:
            return leaf.value
        return jax.eval_shape(true_value, leaf) if isinstance(leaf.value, jax.ShapeDtypeStruct) else true_value(leaf)

    return map_sharded(bare, tree)


def with_mesh_names(variables: PyTree) -> PyTree:
    """Returns the variables of ``model.init``, with logical names as axes of the mesh that is set.

    ``init`` runs under ``boxes_without_constraints``. Parameters are boxed with these axes; other collections are
    replicated, and lose their logical boxes.
    """

    def named(leaf: Any, is_param: bool) -> Any:
        if not reader().has_rules_for(leaf):
            return as_flax_has_it(leaf)
        return split_by_model(leaf) if is_param else leaf.unbox()

    found = reader().names_from_collections(variables)
    return {name: map_leaves(partial(named, is_param=name == "params"), tree) for name, tree in found.items()}


def readable(tree: PyTree) -> PyTree:
    """Returns the tree as a model reads it inside ``shard_map``: a leaf in a box of Flax is the shard of this device.

    A box of Flax is replaced: when such a box is read it constrains its sharding, which is an error inside
    ``shard_map``. The library's own boxes stay: they hold parameters of a second model, gathered where they are read.
    """

    def shard(leaf: Any) -> Any:
        return leaf if is_ours(leaf) or not is_box(leaf) else leaf_of(leaf).replace(read_as_stored=True)

    return map_leaves(shard, tree)


def check_alive(tree: PyTree, reader: str) -> None:
    """Raises a ``ValueError`` if an array that ``reader`` wants to read was donated, most likely to a step."""
    for path, leaf in sharded_leaves(tree):
        value = leaf.value
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
            raise ValueError(
                f"{reader}: '{path}' of shape {value.shape} is gone: a step that was given this state took over its "
                "memory. Go on with the state that the step returned. To keep the one before, hand the step a copy, "
                "jax.tree.map(jnp.copy, state)."
            )


def stored_values(tree: PyTree) -> PyTree:
    """The tree without boxes, values untouched."""
    return map_sharded(lambda leaf: leaf.value, tree)


def without_frozen(tree: PyTree) -> PyTree:
    """The tree with None for leaves that their boxes say are frozen."""
    return map_leaves(lambda leaf: leaf if leaf_of(leaf).trainable else None, tree)


def differentiable(tree: PyTree) -> list[Sharded]:
    """Returns the leaves that take a gradient, as ``leaf_of`` reads them, in the order of ``split_differentiable``."""
    return [leaf for _, leaf in sharded_leaves(tree) if leaf.is_differentiable]


def split_differentiable(tree: PyTree) -> tuple[list[Any], Callable[..., PyTree]]:
    """The leaves that take a gradient (a box being one leaf), and a function that puts other leaves in their places.

    Returns:
      The list, and ``put_back(leaves, rest=...)``, which builds the tree with ``leaves`` in the places of the list, and
      with ``rest(leaf)`` for every other leaf; by default these stay as they are.
    """
    found, treedef = flatten_with_path(tree)
    leaves = [leaf for _, leaf in found]
    # Asked once, and not of the leaves that are put back: these may be gradients, or None.
    takes = [leaf_of(leaf).is_differentiable for leaf in leaves]

    def put_back(new_leaves: Iterable[Any], rest: Callable[[Any], Any] = lambda leaf: leaf) -> PyTree:
        new = iter(new_leaves)
        merged = [next(new) if take else rest(leaf) for take, leaf in zip(takes, leaves, strict=True)]
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
        # A value of the stored shape is what is stored; one of the true shape is stored as the box stores values.
        if box.stores_value or np.shape(value) != box.true_shape:
            return value
        if isinstance(value, jax.ShapeDtypeStruct):
            return jax.eval_shape(partial(stored_value, box), value)
        return stored_value(box, value)

    return map_values(stored, boxed, tree)


def split_arrays(tree: PyTree, *others: type[Any]) -> tuple[dict[int, Any], Callable[[dict[int, Any]], PyTree]]:
    """The arrays of a tree by position, and a function that puts other arrays in their places; all else stays.

    Instances of the classes ``others`` count as arrays.
    """
    found, treedef = flatten_with_path(tree, lambda node: isinstance(node, others))
    leaves = [leaf for _, leaf in found]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, *others))}
    # Without the arrays, since the function below keeps `rest`: a tracer in it would outlive its trace.
    rest = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
    return arrays, lambda arrays: jax.tree.unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(rest)])

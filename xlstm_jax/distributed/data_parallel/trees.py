"""Functions on trees with boxes as leaves: walks, trained leaves, unboxing and boxing, shardings, norms."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, keystr

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.boxes import FLAX_BOX_OF, in_box_of, reader
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
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import (
    AxisEntry,
    axes_entry,
    entry_axes,
    size_if_bound,
    value_dtype,
    wide_dtype,
)


def flatten_with_path(
    tree: PyTree, one_leaf: Callable[[Any], bool] | type[Any] = is_box
) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the list of (path, leaf) in tree order, with paths as ``blocks/mlp/kernel``, and the tree structure.

    ``one_leaf`` is a predicate of nodes, or the class of the nodes, that count as one leaf: boxes by default.
    """
    # Of a class this method is ``isinstance``, as a function of the instance.
    is_leaf = one_leaf.__instancecheck__ if isinstance(one_leaf, type) else one_leaf
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(path_string(path), leaf) for path, leaf in leaves], treedef


def leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    """Returns (path, leaf) for all leaves, in tree order, with paths as ``blocks/mlp/kernel``; a box is one leaf."""
    return flatten_with_path(tree)[0]


def sharded_leaves(tree: PyTree) -> list[tuple[str, Sharded]]:
    """Returns (path, leaf) for all leaves, in tree order, with each leaf as a ``Sharded``, the library's box.

    Bare values and boxes of Flax are converted by ``leaf_of``; the tree is unchanged. Paths are as
    ``blocks/mlp/kernel``.
    """
    return [(path, leaf_of(leaf)) for path, leaf in flatten_with_path(tree)[0]]


def paths_of_replicated(tree: PyTree, mesh: Mesh | AbstractMesh) -> list[str]:
    """Returns the paths of the leaves that no axis splits, in tree order; [] on a mesh of a single device.

    A leaf that is split over an axis of size 1 counts as split.
    """
    return [] if mesh.size == 1 else [path for path, leaf in sharded_leaves(tree) if not leaf.axes]


def map_leaves(
    fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree, one_leaf: Callable[[Any], bool] = is_box
) -> PyTree:
    """Returns ``jax.tree.map(fn, tree, *other_trees)`` with boxes as leaves, or the nodes that ``one_leaf`` selects.

    ``fn`` gets the boxes themselves; ``other_trees`` have a box or a bare value for each leaf of ``tree``.
    """
    return jax.tree.map(fn, tree, *other_trees, is_leaf=one_leaf)


def map_leaves_with_path(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree) -> PyTree:
    """Returns the tree of ``fn(path, leaf, *others)``: the leaf of ``tree`` and its counterparts in ``other_trees``.

    Boxes are leaves, and are passed to ``fn`` as they are. Paths are as ``blocks/mlp/kernel``.
    """
    leaves, treedef = flatten_with_path(tree)
    others = zip(*map(treedef.flatten_up_to, other_trees), strict=True) if other_trees else [()] * len(leaves)
    return jax.tree.unflatten(treedef, [fn(*leaf, *rest) for leaf, rest in zip(leaves, others, strict=True)])


def map_sharded(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree) -> PyTree:
    """Returns the tree of ``fn(leaf, *others)``: each leaf of ``tree`` as a ``Sharded``, and its counterparts.

    The counterparts in ``other_trees`` are passed unchanged. Results are put into the tree without a box.
    """
    return jax.tree.map(lambda leaf, *others: fn(leaf_of(leaf), *others), tree, *other_trees, is_leaf=is_box)


def map_values(fn: Callable[..., Any], tree: PyTree, *other_trees: PyTree) -> PyTree:
    """Returns the tree with ``fn(leaf, *others)`` as the value of each leaf, in the leaf's box if there is a box.

    ``fn`` gets the leaf converted by ``leaf_of``, and its counterparts in ``other_trees`` unchanged.
    """
    return jax.tree.map(
        lambda leaf, *others: rebox(leaf, fn(leaf_of(leaf), *others)), tree, *other_trees, is_leaf=is_box
    )


def map_values_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Returns the tree with ``fn(path, leaf, *others)`` as the value of each leaf, in the leaf's box if there is a box.

    ``fn`` gets the path, as ``blocks/mlp/kernel``, the leaf as a ``Sharded`` (the library's box), and its counterparts
    in the trees ``rest`` unchanged.
    """
    return map_leaves_with_path(lambda path, leaf, *others: rebox(leaf, fn(path, leaf_of(leaf), *others)), tree, *rest)


def path_string(path: tuple[Any, ...]) -> str:
    """Converts a key path of JAX to text, as ``blocks/mlp/kernel``; ``.`` for the empty path of a bare leaf."""
    # Nearly all keys are names in dicts, and this runs often: JAX's function takes five times as long.
    names = [key.key if type(key) is DictKey and type(key.key) is str else keystr((key,), simple=True) for key in path]
    return "/".join(names) or "."


def named_leaf(argument: str, path: str) -> str:
    """Returns a text that names a leaf of an argument: "batch['x']" for the path "x", "batch" for the path "."."""
    return argument if path == "." else f"{argument}['{path}']"


def unbox(tree: PyTree) -> PyTree:
    """Returns the tree without boxes and without padding (``uneven="pad"``): leaves have the plain model's shapes.

    (``nn.meta.unbox`` refuses shards, or constrains their sharding.) Inside ``shard_map`` a leaf is this device's shard
    in its stored form. Raises a ``ValueError`` if an array was donated to an earlier step.

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

    ``variables`` is a dict of collections, made under ``boxes_without_constraints``. A leaf of "params" in a box with
    axes gets a ``Sharded`` box with these axes; a leaf whose logical names map to no axis becomes bare. Leaves of other
    collections lose boxes of logical names, and are replicated; boxes with axes stay, as boxes of Flax.
    """
    # Names in collections belong to parameters: without a further collection there are none.
    variables = reader().names_from_collections(variables) if len(variables) > 1 else variables
    named = {}
    for name, tree in variables.items():
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_box)
        for i, leaf in enumerate(leaves):
            # In a box of Flax again, if ``boxes_without_constraints`` has made the box.
            of_flax = in_box_of(FLAX_BOX_OF[type(leaf)], leaf) if type(leaf) in FLAX_BOX_OF else leaf
            if name == "params":
                leaves[i] = split_by_model(of_flax)
            else:
                leaves[i] = leaf.unbox() if reader().has_rules_for(leaf) else of_flax
        named[name] = jax.tree.unflatten(treedef, leaves)
    return named


def readable(tree: PyTree) -> PyTree:
    """Converts the boxes of Flax in the tree, for a model that runs inside ``shard_map``, and returns the tree.

    Each becomes a ``Sharded`` whose ``unbox`` returns this device's shard: the ``unbox`` of a box of Flax would
    constrain the sharding, which is an error inside ``shard_map``. Boxes of the library stay unchanged, and gather when
    read: such leaves are parameters of a second model. Bare values stay unchanged.
    """

    def shard(leaf: Any) -> Any:
        return leaf if is_library_box(leaf) or not is_box(leaf) else leaf_of(leaf).replace(read_as_stored=True)

    return map_leaves(shard, tree)


def check_alive(tree: PyTree, reader: str) -> None:
    """Raises a ``ValueError`` if an array of the tree was donated to a step (deleted); names the first such leaf.

    ``reader`` is the name of the calling function for the error.
    """
    for path, leaf in sharded_leaves(tree):
        value = leaf.value
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
            raise ValueError(
                f"{reader}: '{path}' of shape {value.shape} is gone: a step that was given this state reused its "
                "memory. Continue with the state that the step returned; to keep the old state, pass the step a copy, "
                "jax.tree.map(jnp.copy, state)."
            )


def stored_values(tree: PyTree) -> PyTree:
    """Returns the tree without boxes; values stay in their stored form (a shard inside ``shard_map``, with padding)."""
    return map_sharded(lambda leaf: leaf.value, tree)


def without_frozen(tree: PyTree) -> PyTree:
    """Returns the tree with ``None`` in place of frozen leaves (``trainable=False``); other leaves keep their boxes."""
    return map_leaves(lambda leaf: leaf if leaf_of(leaf).trainable else None, tree)


def differentiable(tree: PyTree) -> list[Sharded]:
    """Returns the leaves that take a gradient (floats that are not frozen), each as a ``Sharded``, in tree order.

    ``split_differentiable`` returns the same leaves in the same order, as boxed in the tree.
    """
    return [leaf for _, leaf in sharded_leaves(tree) if leaf.is_differentiable]


def split_differentiable(tree: PyTree) -> tuple[list[Any], Callable[..., PyTree]]:
    """Returns the leaves that take a gradient, in tree order, and a function that puts other leaves in their place.

    The leaves that take a gradient are floats that are not frozen; a box is a leaf. Boxes are returned as they are.

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
      tree: bare values, with the plain model's shapes or with padding.
      boxed: a tree of the same structure with boxes, of arrays or ``ShapeDtypeStruct``; its values are not used.
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
    """Returns the arrays of a tree, by their index among its leaves, and a function from new arrays to the tree.

    Arrays are JAX and NumPy arrays, and instances of the classes ``array_types``, which count as one leaf. The function
    takes a dict like the first result, and returns the tree with these arrays; the remaining leaves stay unchanged.
    """
    with_paths, treedef = flatten_with_path(tree, lambda node: isinstance(node, array_types))
    leaves = [leaf for _, leaf in with_paths]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, *array_types))}
    # The function below keeps `other_leaves`, so it must not contain arrays: a tracer would outlive its trace.
    other_leaves = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
    return arrays, lambda arrays: jax.tree.unflatten(
        treedef, [arrays.get(i, leaf) for i, leaf in enumerate(other_leaves)]
    )


# ------------------------------------------------------------------------------ specs, shardings, and bytes of a device


def spread_spec(names: Iterable[AxisEntry], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the ``PartitionSpec`` for ``names``, the axes of each dim, without axes that have size 1 on ``mesh``.

    ``None`` entries at the end are dropped: (None, "fsdp", None) gives P(None, "fsdp").
    """
    # Axes of size 1 in a spec would cost collectives on a mesh of one device: under check_vma=True a value declared
    # varying becomes equal only by an all-reduce, which is compiled and run.
    entries: list[AxisEntry] = []
    for entry in names:
        axes = () if entry is None else tuple([axis for axis in entry_axes(entry) if mesh.shape[axis] > 1])
        entries.append(axes_entry(axes) if axes else None)
    # Trailing None is dropped, as in the shardings that jit reports: else a second call would compile again.
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def stored_shape(leaf: Sharded) -> tuple[int, ...]:
    """Returns the global shape of the array in ``leaf``, with padding; also for a shard, inside ``shard_map``."""
    # Inside shard_map the value is a shard, and its axes are bound. Elsewhere axes count as 1: the value is global.
    counts = [math.prod(map(size_if_bound, entry_axes(entry))) for entry in leaf.names]
    return tuple(map(operator.mul, leaf.value.shape, counts))


def partition_specs(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the tree with a ``PartitionSpec`` per leaf (a box is one leaf): the specs for ``shard_map`` and ``jit``.

    >>> partition_specs({"w": nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp")), "b": jnp.ones(32)}, mesh)
    {'b': P(), 'w': P(None, 'fsdp')}

    Args:
      tree: boxed arrays or ``ShapeDtypeStruct``.
      mesh: a ``Mesh`` or ``AbstractMesh`` with all axes in the boxes.
    Raises:
      ValueError: a box contains a name that is not an axis of the mesh; names the leaf.
    """

    # The mesh is set because logical names are resolved to axes of the current mesh.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        try:
            leaves, treedef = jax.tree.flatten(tree, is_leaf=is_box)
            return jax.tree.unflatten(treedef, [spread_spec(leaf_of(leaf).names, mesh) for leaf in leaves])
        except KeyError:  # an axis that the mesh does not have
            raise _unknown_axis(sharded_leaves(tree), mesh) from None


def _unknown_axis(leaves: Iterable[tuple[str, Sharded]], mesh: Mesh | AbstractMesh) -> ValueError:
    path, leaf = next(named for named in leaves if not mesh.shape.keys() >= set(named[1].axes))
    axis = next(axis for axis in leaf.axes if axis not in mesh.shape)
    return ValueError(
        f"'{path}' is boxed with names {leaf.names}, but the mesh has the axes {tuple(mesh.shape)} "
        f"and no {axis!r}. Name a mesh axis, or None for a dim that is not split (in metadata_params for "
        "a layer dim of nn.scan); initialise a model with logical names under nn.logical_axis_rules."
    )


def check_divides(path: str, leaf: Sharded, sizes: Mapping[str, int]) -> None:
    """Raises a ``ValueError`` if the axes in the box of ``leaf`` do not divide a dim of its global value.

    ``sizes`` has the sizes of the mesh axes by name. ``path`` names the leaf in the error.
    """
    for dim, (size, entry) in enumerate(zip(leaf.value.shape, leaf.names, strict=True)):
        parts = 1 if entry is None else math.prod([sizes[axis] for axis in entry_axes(entry)])
        if size % parts:
            raise ValueError(
                f"'{path}' of shape {tuple(leaf.value.shape)} is boxed as {leaf.names}: {parts} shards do not divide "
                f"dim {dim} of size {size}. Give the dim another size, or name another axis for it."
            )


def shardings(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the tree with a ``NamedSharding`` per leaf: the specs of ``partition_specs``, on ``mesh``.

    Arguments and errors are as for ``partition_specs``.

    >>> shardings(nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp")), mesh).shard_shape((16, 32))
    (16, 8)
    """
    return jax.tree.map(cache(partial(NamedSharding, mesh)), partition_specs(tree, mesh))


def is_on_host(value: Any) -> bool:
    """Returns whether ``value`` is a JAX array (or tracer) in host memory, as an offloaded array is."""
    # Read from the type, which tracers have, too.
    return isinstance(value, jax.Array) and jax.typeof(value).memory_space == jax.memory.Space.Host


def bytes_per_device(tree: PyTree) -> int:
    """Returns the bytes of a tree that a device stores: of each ``jax.Array`` a shard, of other leaves the full array.

    >>> w = jax.device_put(jnp.ones((16, 32)), jax.NamedSharding(mesh, jax.P(None, "fsdp")))
    >>> bytes_per_device({"w": w, "b": jnp.ones(32)})  # 16 * 8 values and 32, of 4 bytes
    640
    """

    def nbytes(value: Any) -> int:
        shape = value.sharding.shard_shape(value.shape) if isinstance(value, jax.Array) else np.shape(value)
        return math.prod(shape) * value_dtype(value).itemsize

    return sum(nbytes(leaf.value) for _, leaf in sharded_leaves(tree))


# --------------------------------------------------------------------------------------------------------------- norms


def l2_norm(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the L2 norm over all entries of the arrays, a scalar of float32 or a wider float; 0 without arrays."""
    total: Any = 0
    for squares in map(sum_of_squares, arrays):
        # Operations of ``jnp`` take three times as long to trace as operations of ``lax``, which need equal dtypes.
        total = jax.lax.add(total, squares) if getattr(total, "dtype", 0) == squares.dtype else total + squares
    return jnp.sqrt(jnp.float32(0) + total)


def sum_of_squares(value: jax.Array) -> jax.Array:
    """Returns the sum of the squares of an array's entries, a scalar of float32 or a wider float.

    Of complex entries the absolute values are squared. Inside ``shard_map`` the sum is over the local shard.
    """
    wide = value.astype(wide_dtype(value.dtype))
    squares = jax.lax.square(jax.lax.abs(wide) if jnp.iscomplexobj(wide) else wide)
    return jax.lax.reduce_sum(squares, range(squares.ndim))


def carry_axes(tree: PyTree) -> list[str]:
    """Returns the mesh axes, sorted, over which the carry of a recurrent module varies by type (``check_vma=True``).

    ``tree`` has the inputs and parameters of the module. The axes are those over which an array in ``tree`` varies, and
    the bound axes that split a leaf: after a gather, a split leaf varies over its axes.
    """
    leaves = [leaf for _, leaf in sharded_leaves(tree)]
    arrays = [leaf.value for leaf in leaves if isinstance(leaf.value, jax.Array)]
    split = {axis for leaf in leaves for axis in leaf.axes if collectives.is_bound(axis)}
    return sorted(split.union(*map(collectives.varying_axes, arrays)))

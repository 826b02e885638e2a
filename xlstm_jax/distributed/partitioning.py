"""Boxed trees: which mesh axes split which dim of a parameter, and how that is decided.

A parameter that is split over mesh axes is a leaf in a box, ``nn.Partitioned(value, names)``. ``names`` has an entry
for each dim of the value, which is ``None`` (the dim is whole), a mesh axis, or a tuple of axes, outermost first:
``("dp", "fsdp")`` on a dim of size 8 over a 2x4 mesh gives device (i, j) the row ``4 i + j``, as in ``PartitionSpec``.

Everything that must know about boxes asks here: one function chooses the dim (``choose_shard_dim``: sharding, the plan
and its explanations all call it), one walks trees with boxes as leaves (``map_leaves``), one reads a leaf's axes.
No function here looks at a device or calls a collective.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree

DEFAULT_MIN_WEIGHT_SIZE = 2**18

AxisEntry = None | str | tuple[str, ...]


class Sharded(nn.Partitioned):
    """The box that this library makes: an ``nn.Partitioned`` that is at home inside ``shard_map``.

    It differs from its parent in two places. ``nn.scan`` and ``nn.vmap`` add their layer dim without being told a
    ``metadata_params`` name for it (the layer dim is whole, unless they say otherwise). And ``unbox``, which is how
    Linen reads a parameter, refuses a slice that was not gathered. (The parent would constrain its sharding, which is
    an error where the mesh axes are manual.) This file's ``unbox`` reads slices.
    """

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        split = [axis for axis in leaf_axes(self) if size_if_bound(axis) > 1]
        if split:
            raise ValueError(
                f"a parameter of shape {np.shape(self.value)} on this device, split as {leaf_names(self)}, is used "
                f"where it was not gathered over {split[0]!r}. Wrap the module that owns it with shard_module_params "
                "and enter that through a public method of the wrapped class: not its submodules, private methods, "
                "or functions of the plain class. (To read slices on purpose, use xlstm_jax.distributed.unbox.)"
            )
        return self.value

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        return super().add_axis(index % (len(self.names) + 1), params)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        return super().remove_axis(index % len(self.names), params)

    def _get_partition_name(self, params: dict[Any, Any]) -> str | None:
        return params.get(nn.PARTITION_NAME)


class Part(Sharded):
    """The box of what stays split after a gather over other axes: its module computes on its part (tensor parallel)."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        return self.value


def size_if_bound(axis: str) -> int:
    """The size of an axis that is bound here (in ``shard_map``, say), else 1: values are global then."""
    try:
        return jax.lax.axis_size(axis)
    except NameError:
        return 1


class ShardChoice(NamedTuple):
    """What ``choose_shard_dim`` decided. ``dim`` is None where the leaf stays whole; ``reason`` says why, in words."""

    dim: int | None
    reason: str


def as_axis_names(axis_name: AxisNames) -> tuple[str, ...]:
    """One axis or a sequence of axes as a tuple of axes; a string is one axis, never its letters.

    Raises:
      ValueError: no axis at all, an axis twice, something that is not a string, or a set, which has no order.
    """
    if isinstance(axis_name, set | frozenset):
        raise ValueError(f"axis_name={axis_name!r}: a set has no order, and axes do; pass a tuple, outermost first.")
    sequence = isinstance(axis_name, Sequence) and not isinstance(axis_name, str)
    names = tuple(axis_name) if sequence else (axis_name,)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"axis_name={axis_name!r} names no mesh axis; pass one, as 'fsdp', or several, as ('dp', 'fsdp')."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice; name each mesh axis once.")
    return names


def entry_axes(entry: AxisEntry) -> tuple[str, ...]:
    """The axes of one entry of ``names``: ``None`` -> (), ``"a"`` -> ("a",), ``("a", "b")`` -> itself."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_entry(axes: tuple[str, ...]) -> AxisEntry:
    """The shortest entry for these axes: the inverse of ``entry_axes``."""
    if not axes:
        return None
    return axes[0] if len(axes) == 1 else axes


def is_box(leaf: Any) -> bool:
    """Whether ``leaf`` is a value in a box that carries axis names."""
    return isinstance(leaf, nn.Partitioned)


def leaf_value(leaf: Any) -> Any:
    """The array of a leaf, in a box or not."""
    return leaf.value if is_box(leaf) else leaf


def leaf_names(leaf: Any) -> tuple[AxisEntry, ...]:
    """The leaf's names, one for each dim of its value.

    Names that are shorter than the value are filled up with ``None``. Where they are longer, as around the scalar that
    an optimizer keeps for each leaf of a boxed tree, those that have no dim are left out.
    """
    names, ndim = tuple(leaf.names) if is_box(leaf) else (), np.ndim(leaf_value(leaf))
    return (names + (None,) * ndim)[:ndim]


def leaf_axes(leaf: Any) -> tuple[str, ...]:
    """All mesh axes that a leaf is split over, in the order of its dims; () for a leaf without a box."""
    return tuple(axis for entry in leaf_names(leaf) for axis in entry_axes(entry))


def rebox(leaf: Any, value: Any) -> Any:
    """``value`` in the box of ``leaf``, or bare where ``leaf`` has none."""
    return leaf.replace_boxed(value) if is_box(leaf) else value


def map_leaves(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """``jax.tree.map`` where a box is one leaf; in ``rest`` a box or a bare value may stand in its place."""
    return jax.tree.map(fn, tree, *rest, is_leaf=is_box)


def map_leaves_with_path(fn: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Like ``map_leaves``; ``fn`` gets the leaf's path, as in ``blocks/mlp/kernel``, before the leaf."""

    def with_path(path, *leaves):
        return fn(path_string(path), *leaves)

    return jax.tree_util.tree_map_with_path(with_path, tree, *rest, is_leaf=is_box)


def leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    """All leaves with their paths, a box being one leaf, in the order of the tree."""
    return [(path_string(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]]


def path_string(path: tuple[Any, ...]) -> str:
    """A key path as people write it: ``blocks/mlp/kernel``; ``.`` for a tree that is one leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "."


def unbox(tree: PyTree) -> PyTree:
    """The tree without boxes, values untouched (``nn.meta.unbox`` refuses slices, or constrains their sharding)."""
    return map_leaves(leaf_value, tree)


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf takes a gradient: real or complex floats do; integers, bools and PRNG keys do not."""
    return jnp.issubdtype(value_dtype(leaf_value(leaf)), jnp.inexact)


def split_differentiable(tree: PyTree) -> tuple[list[Any], Callable[..., PyTree]]:
    """The leaves that take a gradient (a box being one leaf), and the way to put others in their places.

    Returns:
      The list, and ``put_back(leaves, rest=...)``, which builds the tree with ``leaves`` in the places of the list and
      ``rest(leaf)`` in those of the other leaves, which stay as they are by default.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_box)
    takes = [is_differentiable(leaf) for leaf in leaves]

    def put_back(new_leaves, rest=lambda leaf: leaf):
        new = iter(new_leaves)
        return treedef.unflatten([next(new) if take else rest(leaf) for take, leaf in zip(takes, leaves, strict=True)])

    return [leaf for take, leaf in zip(takes, leaves, strict=True) if take], put_back


def is_prng_key(value: Any) -> bool:
    """Whether ``value`` is an array of typed PRNG keys."""
    return jnp.issubdtype(value_dtype(value), jax.dtypes.prng_key)


def value_dtype(value: Any) -> Any:
    """The dtype of an array, an abstract array, or a Python number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which sums run that nobody asked to narrow: float32 for narrower floats, else the dtype itself."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def owner_of_state(path: str, params: dict[str, Any]) -> Any | None:
    """The parameter that a leaf of an optimizer's state belongs to: the one whose path its own path ends with.

    Args:
      path: the path of the state's leaf, as ``0/mu/dense/kernel``.
      params: parameters by their paths, as ``dict(leaves_with_path(params))``.
    """
    parts = path.split("/")
    endings = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((params[ending] for ending in endings if ending in params), params.get("."))


def box_like(tree: PyTree, boxed: PyTree) -> PyTree:
    """Puts the boxes of ``boxed`` around the values of ``tree``: the inverse of ``unbox``, after a restore, say.

    Args:
      tree: bare values.
      boxed: a tree of the same structure with boxes, of arrays or ``ShapeDtypeStruct``.
    """
    return map_leaves(rebox, boxed, tree)


def choose_shard_dim(
    shape: tuple[int, ...], names: tuple[AxisEntry, ...], axis_sizes: dict[str, int], min_weight_size: int
) -> ShardChoice:
    """Decides which dim of a leaf is split over the axes: the largest that they divide and that is still whole.

    Of equal dims the last is taken, which is the output dim of a Linen kernel.

    Args:
      shape: the leaf's shape as this device sees it.
      names: its entry for each dim, ``(None,) * len(shape)`` for a leaf without a box.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      min_weight_size: leaves with fewer values stay whole; one of exactly this size is split.
    Returns:
      The dim, or None with the reason.
    """
    held = [axis for entry in names for axis in entry_axes(entry) if axis in axis_sizes]
    size, parts = math.prod(shape), math.prod(axis_sizes.values())
    if held:
        return ShardChoice(None, f"already split over {', '.join(map(repr, held))}")
    if size == 0:
        return ShardChoice(None, f"holds no values (shape {shape})")
    if size < min_weight_size:
        return ShardChoice(None, f"{size} values are fewer than min_weight_size={min_weight_size}")
    free = [dim for dim, entry in enumerate(names) if entry is None]
    fitting = [dim for dim in free if shape[dim] % parts == 0]
    if fitting:
        dim = max(fitting, key=lambda dim: (shape[dim], dim))
        return ShardChoice(dim, f"dim {dim} of size {shape[dim]} is the largest that {parts} divides")
    if not free:
        return ShardChoice(None, f"every dim of shape {shape} is taken by {names}" if shape else "is a scalar")
    return ShardChoice(None, f"{parts} divides no free dim of shape {shape}")


def box_dim(leaf: Any, value: Any, dim: int, axes: tuple[str, ...]) -> Sharded:
    """``value`` in a box that splits ``dim`` over ``axes`` and keeps what the box of ``leaf`` says of other dims."""
    names = list(leaf_names(leaf))
    names[dim] = axes_entry(axes)
    return Sharded(value, tuple(names))


def leaf_spec(leaf: Any, mesh: Any) -> PartitionSpec:
    """The ``PartitionSpec`` of one leaf on ``mesh``; axes of size 1 split nothing and are left out.

    Leaving them out keeps a mesh of one device free of collectives: under ``check_vma=True`` only a (compiled and paid)
    all-reduce turns a value that a spec declared varying back into one that is not.
    """
    axes = [tuple(axis for axis in entry_axes(names) if mesh.shape[axis] > 1) for names in leaf_names(leaf)]
    # Trailing None is dropped, as jit does where it reports a sharding: else a second call would compile again.
    while axes and not axes[-1]:
        axes.pop()
    return PartitionSpec(*map(axes_entry, axes))


def partition_specs(tree: PyTree, mesh: Any) -> PyTree:
    """A ``PartitionSpec`` in place of every leaf (a box being one leaf): the specs for ``shard_map`` and ``jit``.

    Args:
      tree: boxed arrays or ``ShapeDtypeStruct`` of them.
      mesh: a ``Mesh`` or ``AbstractMesh`` with all the axes that the boxes name.
    Raises:
      ValueError: a box names something that is not an axis of the mesh; says which leaf.
    """

    def spec(path, leaf):
        unknown = [axis for axis in leaf_axes(leaf) if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"'{path}' is boxed with names {leaf_names(leaf)}, but the mesh has the axes {tuple(mesh.shape)} "
                f"and no {unknown[0]!r}. Name a mesh axis, or None for a dim that is not split (a layer dim of "
                "nn.scan: leave metadata_params out, or give {nn.PARTITION_NAME: None})."
            )
        return leaf_spec(leaf, mesh)

    return map_leaves_with_path(spec, tree)


def shardings(tree: PyTree, mesh: jax.sharding.Mesh) -> PyTree:
    """A ``NamedSharding`` in place of every leaf: ``partition_specs`` on a mesh of devices."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition_specs(tree, mesh),
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of the tree that lie on the first of its devices; the whole size of arrays that are not on a mesh."""

    def nbytes(value):
        shape = value.sharding.shard_shape(value.shape) if isinstance(value, jax.Array) else np.shape(value)
        return math.prod(shape) * value_dtype(value).itemsize

    return sum(nbytes(leaf_value(leaf)) for _, leaf in leaves_with_path(tree))

"""Converts the axis names of boxed trees to ``PartitionSpec`` and ``NamedSharding``, and counts bytes per device."""

import math
import operator
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.trees import map_leaves, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes, size_if_bound
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype


def spread_spec(names: Iterable[AxisEntry], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the ``PartitionSpec`` for ``names``, the axes of each dim, without axes that have size 1 on ``mesh``."""
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
    """Returns the global shape of a leaf, including padding; also for a shard, inside ``shard_map``."""
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
            return map_leaves(lambda leaf: spread_spec(leaf_of(leaf).names, mesh), tree)
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
    """Raises a ``ValueError`` if the axes in a box do not divide a dim of its global value."""
    for dim, (size, entry) in enumerate(zip(leaf.value.shape, leaf.names, strict=True)):
        parts = 1 if entry is None else math.prod([sizes[axis] for axis in entry_axes(entry)])
        if size % parts:
            raise ValueError(
                f"'{path}' of shape {tuple(leaf.value.shape)} is boxed as {leaf.names}: {parts} shards do not divide "
                f"dim {dim} of size {size}. Give the dim another size, or name another axis for it."
            )


def shardings(tree: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns the tree with a ``NamedSharding`` per leaf: ``partition_specs`` on a mesh of devices.

    >>> shardings(nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp")), mesh).shard_shape((16, 32))
    (16, 8)
    """
    return jax.tree.map(cache(partial(NamedSharding, mesh)), partition_specs(tree, mesh))


def is_on_host(value: Any) -> bool:
    """Returns whether an array is in host memory."""
    # Read from the type, which tracers have, too.
    return isinstance(value, jax.Array) and jax.typeof(value).memory_space == jax.memory.Space.Host


def bytes_per_device(tree: PyTree) -> int:
    """Returns the tree's bytes on its first device; arrays outside of a mesh count with the full size.

    >>> w = jax.device_put(jnp.ones((16, 32)), jax.NamedSharding(mesh, jax.P(None, "fsdp")))
    >>> bytes_per_device({"w": w, "b": jnp.ones(32)})  # 16 * 8 values and 32, of 4 bytes
    640
    """

    def nbytes(value: Any) -> int:
        shape = value.sharding.shard_shape(value.shape) if isinstance(value, jax.Array) else np.shape(value)
        return math.prod(shape) * value_dtype(value).itemsize

    return sum(nbytes(leaf.value) for _, leaf in sharded_leaves(tree))

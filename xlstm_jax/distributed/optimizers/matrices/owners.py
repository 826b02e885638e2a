"""The way of matrices to their owners and back, inside ``shard_map``.

  shards     [M, d, f / n]      stacked from the leaves of the group
  places     [n, p, d, f / n]   p = ceil(M / n) for each owner, zeros where there is no matrix
  received   [n, p, d, f / n]   all-to-all: the first dim is now the device that a slice comes from
  whole      [p, d, f]

Several groups that have fewer matrices than owners in all travel together, a matrix to each owner, in rows that are as
long as the longest: places [n, longest of d * f / n].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, MatrixLeaf

OnMatrices = Callable[[jax.Array], jax.Array]


def to_owners(group: MatrixGroup, shards: Mapping[str, jax.Array], exchange_dtype: Any = None) -> jax.Array:
    """The matrices that this device owns, [places, rows, columns] with rows <= columns, from its shards by path."""
    stacked = _as_stacks(group, shards)
    return _flat(group, _to_places(group, stacked.astype(exchange_dtype or stacked.dtype)).astype(stacked.dtype))


def from_owners(group: MatrixGroup, matrices: jax.Array, exchange_dtype: Any = None) -> dict[str, jax.Array]:
    """The inverse of ``to_owners``: this device's shards by path."""
    sent = _unflat(group, matrices).astype(exchange_dtype or matrices.dtype)
    return _from_stacks(group, _to_shards(group, sent).astype(matrices.dtype))


def by_owners(
    fn: OnMatrices, groups: Sequence[MatrixGroup], shards: Mapping[str, jax.Array], exchange_dtype: Any = None
) -> dict[str, jax.Array]:
    """The shards of ``fn`` of all matrices of a round (``groups.in_rounds``), by path: two all-to-alls."""
    if len(groups) == 1:
        return from_owners(groups[0], fn(to_owners(groups[0], shards, exchange_dtype)), exchange_dtype)
    stacks = [_as_stacks(group, shards) for group in groups]
    dtype, axes = stacks[0].dtype, groups[0].axes
    rows = _in_rows(stacks, groups[0].owners).astype(exchange_dtype or dtype)
    received = collectives.all_to_all(rows, axes)

    def of_one(group: MatrixGroup, received: jax.Array) -> jax.Array:
        """What this device sends back, from what it has received as an owner of the group."""
        slices = (group.owners, 1, *_slice_shape(group))
        own = received[:, : math.prod(slices[1:])].reshape(slices).astype(dtype)
        whole = _unflat(group, fn(_flat(group, _merged(group, own))))
        return _as_long_as(received, _cut(group, whole).reshape(group.owners, -1).astype(received.dtype))

    own = collectives.axis_index(axes)
    mine = sum((own >= group.first + group.count).astype(jnp.int32) for group in groups)
    sent = jax.lax.switch(mine, [*(partial(of_one, group) for group in groups), lambda received: received], received)
    back = collectives.all_to_all(sent, axes).astype(dtype)
    new: dict[str, jax.Array] = {}
    for group, stack in zip(groups, stacks, strict=True):
        of_group = back[group.first : group.first + group.count, : stack[0].size]
        new |= _from_stacks(group, of_group.reshape(stack.shape))
    return new


def _in_rows(stacks: Sequence[jax.Array], owners: int) -> jax.Array:
    """[owners, longest]: the shard of one matrix in each row, zeros behind shorter shards and in rows without one."""
    rows = [stack.reshape(stack.shape[0], -1) for stack in stacks]
    longest = max(rows, key=lambda row: row.shape[1])
    filled = jnp.concatenate([_as_long_as(longest, row) for row in rows])
    return jnp.pad(filled, ((0, owners - filled.shape[0]), (0, 0)))


def _as_long_as(longest: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, longest.shape[1] - rows.shape[1])))


def _slice_shape(group: MatrixGroup) -> tuple[int, ...]:
    """The shape of what one device sends of a matrix, padding included."""
    parts = {dim: count for (dim, _), count in zip(group.splits, _parts(group), strict=True)}
    return tuple(size // parts.get(dim, 1) for dim, size in enumerate(group.form.stored))


def _as_stacks(group: MatrixGroup, shards: Mapping[str, jax.Array]) -> jax.Array:
    """[M, stored dims / n]: the part of the group's shards that this device sends."""
    stacked = jnp.concatenate([_as_stack(leaf, shards[leaf.path]) for leaf in group.leaves])
    if group.copies_dim is None:
        return stacked
    return collectives.own_shard(stacked, 1 + group.copies_dim, group.copies)


def _from_stacks(group: MatrixGroup, back: jax.Array) -> dict[str, jax.Array]:
    """The inverse of ``_as_stacks``: the shards by path, those of copies gathered."""
    if group.copies_dim is not None:
        back = collectives.all_gather_equal(back, 1 + group.copies_dim, group.copies)
    counts = [leaf.count for leaf in group.leaves]
    ends = [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
    parts = zip(group.leaves, jnp.split(back, ends), strict=True)
    return {leaf.path: _as_leaf(leaf, part) for leaf, part in parts}


def _as_stack(leaf: MatrixLeaf, value: jax.Array) -> jax.Array:
    """[dims of the leaf] -> [count, dims of the shorter side, dims of the longer side]"""
    ordered = value.transpose(leaf.order)
    return ordered.reshape(leaf.count, *ordered.shape[len(leaf.stack) :])


def _as_leaf(leaf: MatrixLeaf, stacked: jax.Array) -> jax.Array:
    """The inverse of ``_as_stack``."""
    inverse = sorted(range(len(leaf.order)), key=lambda dim: leaf.order[dim])
    return stacked.reshape(*leaf.stack, *stacked.shape[1:]).transpose(inverse)


def _to_places(group: MatrixGroup, shards: jax.Array) -> jax.Array:
    """[M, ...] -> [places, stored dims]"""
    places = group.owners * group.per_owner
    padded = jnp.pad(shards, [(0, places - group.count)] + [(0, 0)] * (shards.ndim - 1))
    received = collectives.all_to_all(padded.reshape(group.owners, group.per_owner, *shards.shape[1:]), group.axes)
    return _merged(group, received)


def _to_shards(group: MatrixGroup, whole: jax.Array) -> jax.Array:
    """The inverse of ``_to_places``."""
    received = collectives.all_to_all(_cut(group, whole), group.axes)
    return received.reshape(-1, *received.shape[2:])[: group.count]


def _merged(group: MatrixGroup, received: jax.Array) -> jax.Array:
    """[n, p, ...] -> [p, ...]: puts the slices of the n senders together, each dim in the order of its axes."""
    sizes = [collectives.axis_size([axis]) for axis in group.axes]
    by_axis = received.reshape(*sizes, *received.shape[1:])
    order = [group.axes.index(axis) for axis in group.split_axes]
    by_axis = by_axis.transpose(*order, *range(len(order), by_axis.ndim))
    sliced = by_axis.reshape(*_parts(group), *received.shape[1:])
    for dim, _ in reversed(group.splits):  # the last one first, which leaves the positions before it as they are
        count = sliced.ndim - (len(group.form.stored) + 1)  # dims in front
        sliced = jnp.moveaxis(sliced, count - 1, count + dim)
        at = count + dim
        sliced = sliced.reshape(*sliced.shape[:at], -1, *sliced.shape[at + 2 :])
    return sliced


def _cut(group: MatrixGroup, whole: jax.Array) -> jax.Array:
    """The inverse of ``_merged``."""
    front = 0
    for (dim, _), count in zip(group.splits, _parts(group), strict=True):
        at = front + 1 + dim
        whole = whole.reshape(*whole.shape[:at], count, whole.shape[at] // count, *whole.shape[at + 1 :])
        whole = jnp.moveaxis(whole, at, front)
        front += 1
    sizes = [collectives.axis_size([axis]) for axis in group.split_axes]
    by_axis = whole.reshape(*sizes, *whole.shape[front:])
    order = [group.split_axes.index(axis) for axis in group.axes]
    by_axis = by_axis.transpose(*order, *range(len(order), by_axis.ndim))
    return by_axis.reshape(-1, *whole.shape[front:])


def _parts(group: MatrixGroup) -> list[int]:
    """Into how many parts each split dim is cut."""
    return [collectives.axis_size(axes) for _, axes in group.splits]


def _flat(group: MatrixGroup, whole: jax.Array) -> jax.Array:
    """[p, stored dims] -> [p, rows, columns] without padding."""
    true = (*group.form.short, *group.form.long)
    unpadded = whole[(slice(None), *(slice(size) for size in true))]
    return unpadded.reshape(whole.shape[0], group.form.rows, group.form.columns)


def _unflat(group: MatrixGroup, matrices: jax.Array) -> jax.Array:
    """The inverse of ``_flat``, zeros where there was padding."""
    true = (*group.form.short, *group.form.long)
    shaped = matrices.reshape(matrices.shape[0], *true)
    return jnp.pad(shaped, [(0, 0), *((0, size - own) for size, own in zip(group.form.stored, true, strict=True))])

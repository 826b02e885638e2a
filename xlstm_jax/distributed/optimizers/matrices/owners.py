"""The way of a group of matrices to their owners and back, inside ``shard_map``.

shards     [M, d, f / n]      stacked from the leaves of the group
places     [n, p, d, f / n]   p = ceil(M / n) for each owner, zeros in those left over
received   [n, p, d, f / n]   all-to-all: the first dim is now the device that a slice comes from
whole      [p, d, f]
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, MatrixLeaf

OnMatrices = Callable[[jax.Array], jax.Array]


def to_owners(group: MatrixGroup, shards: Mapping[str, jax.Array], exchange_dtype: Any = None) -> jax.Array:
    """The matrices that this device owns, [places, rows, columns] with rows <= columns, from its shards by path."""
    stacked = jnp.concatenate([_as_stack(leaf, shards[leaf.path]) for leaf in group.leaves])
    sent = _own_part(group, stacked).astype(exchange_dtype or stacked.dtype)
    return _flat(group, _to_places(group, sent).astype(stacked.dtype))


def from_owners(group: MatrixGroup, matrices: jax.Array, exchange_dtype: Any = None) -> dict[str, jax.Array]:
    """The inverse of ``to_owners``: this device's shards by path."""
    sent = _unflat(group, matrices).astype(exchange_dtype or matrices.dtype)
    back = _to_shards(group, sent).astype(matrices.dtype)
    if group.copies_dim is not None:
        back = collectives.all_gather_equal(back, 1 + group.copies_dim, group.copies)
    counts = [leaf.count for leaf in group.leaves]
    ends = [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
    parts = zip(group.leaves, jnp.split(back, ends), strict=True)
    return {leaf.path: _as_leaf(leaf, part) for leaf, part in parts}


def on_own_matrices(fn: OnMatrices, groups: Sequence[MatrixGroup], matrices: Sequence[jax.Array]) -> list[jax.Array]:
    """``fn`` of the matrices of each group; of several groups, side by side, each device of the one that it is in."""
    if len(groups) == 1:
        return [fn(matrices[0])]

    def of_one(index: int, matrices: Sequence[jax.Array]) -> list[jax.Array]:
        return [fn(own) if i == index else _nothing_of(own) for i, own in enumerate(matrices)]

    own = collectives.axis_index(groups[0].axes)
    mine = sum((own >= group.first + group.count).astype(jnp.int32) for group in groups)
    return jax.lax.switch(mine, [partial(of_one, index) for index in range(len(groups) + 1)], matrices)


def _nothing_of(matrices: jax.Array) -> jax.Array:
    return collectives.to_varying(jnp.zeros_like(matrices), sorted(collectives.varying_axes(matrices)))


def _as_stack(leaf: MatrixLeaf, value: jax.Array) -> jax.Array:
    """[dims of the leaf] -> [count, dims of the shorter side, dims of the longer side]"""
    ordered = value.transpose(leaf.order)
    return ordered.reshape(leaf.count, *ordered.shape[len(leaf.stack) :])


def _as_leaf(leaf: MatrixLeaf, stacked: jax.Array) -> jax.Array:
    """The inverse of ``_as_stack``."""
    inverse = sorted(range(len(leaf.order)), key=lambda dim: leaf.order[dim])
    return stacked.reshape(*leaf.stack, *stacked.shape[1:]).transpose(inverse)


def _own_part(group: MatrixGroup, stacked: jax.Array) -> jax.Array:
    """Of shards that other devices have too, the part that this one sends."""
    if group.copies_dim is None:
        return stacked
    return collectives.own_shard(stacked, 1 + group.copies_dim, group.copies)


def _to_places(group: MatrixGroup, shards: jax.Array) -> jax.Array:
    """[M, ...] -> [places, stored dims]"""
    places = group.owners * group.per_owner
    left_over = (group.first, places - group.first - group.count)
    padded = jnp.pad(shards, [left_over] + [(0, 0)] * (shards.ndim - 1))
    received = collectives.all_to_all(padded.reshape(group.owners, group.per_owner, *shards.shape[1:]), group.axes)
    return _merged(group, received)


def _to_shards(group: MatrixGroup, whole: jax.Array) -> jax.Array:
    """The inverse of ``_to_places``."""
    received = collectives.all_to_all(_cut(group, whole), group.axes)
    return received.reshape(-1, *received.shape[2:])[group.first :][: group.count]


def _merged(group: MatrixGroup, received: jax.Array) -> jax.Array:
    """[n, p, ...] -> [p, ...]: slices in the places that their senders' index along each axis says."""
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

"""The way of matrices to their owners and back, inside ``shard_map``.

  shards     [M, d, f / n]      stacked from the leaves of the group
  places     [n, p, d, f / n]   p = ceil(M / n) for each owner, zeros where there is no matrix
  received   [n, p, d, f / n]   all-to-all: the first dim now counts the devices that slices come from
  whole      [p, d, f]

Groups that together have fewer matrices than owners travel together, a matrix to each owner. Their rows are padded to
the longest: places [n, longest of d * f / n].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup

OnMatrices = Callable[[jax.Array], jax.Array]


def to_owners(group: MatrixGroup, shards: Mapping[str, jax.Array], exchange_dtype: str | None = None) -> jax.Array:
    """The matrices that this device owns, [places, rows, columns] with rows <= columns, from its shards by path."""
    stacked = _as_stacks(group, shards)
    empty = group.owners * group.per_owner - group.count
    # Narrow on the wire alone: the rule computes in the dtype of the leaves.
    sent = jnp.pad(stacked.astype(exchange_dtype or stacked.dtype), [(0, empty)] + [(0, 0)] * (stacked.ndim - 1))
    received = collectives.all_to_all(sent.reshape(group.owners, group.per_owner, *sent.shape[1:]), group.axes)
    return _merged(group, received).astype(stacked.dtype)


def from_owners(group: MatrixGroup, matrices: jax.Array, exchange_dtype: str | None = None) -> dict[str, jax.Array]:
    """The inverse of ``to_owners``: this device's shards by path."""
    sent = matrices.astype(exchange_dtype or matrices.dtype)
    received = collectives.all_to_all(_cut(group, sent), group.axes)
    stacked = received.reshape(-1, *received.shape[2:])[: group.count]
    return _from_stacks(group, stacked.astype(matrices.dtype))


def by_owners(
    fn: OnMatrices, groups: Sequence[MatrixGroup], shards: Mapping[str, jax.Array], exchange_dtype: str | None
) -> dict[str, jax.Array]:
    """``fn`` of all matrices of a round (``groups.in_rounds``), as shards by path: two all-to-alls."""
    if len(groups) == 1:
        return from_owners(groups[0], fn(to_owners(groups[0], shards, exchange_dtype)), exchange_dtype)
    stacks = [_as_stacks(group, shards) for group in groups]
    dtype, axes = stacks[0].dtype, groups[0].axes
    # [owners, longest]: the shard of one matrix in each row, zeros behind shorter shards and in rows without one.
    each = [stack.reshape(stack.shape[0], -1) for stack in stacks]
    longest = max(row.shape[1] for row in each)
    filled = jnp.concatenate([_of_length(longest, row) for row in each])
    rows = jnp.pad(filled, ((0, groups[0].owners - len(filled)), (0, 0))).astype(exchange_dtype or dtype)
    received = collectives.all_to_all(rows, axes)

    def of_one(group: MatrixGroup, received: jax.Array) -> jax.Array:
        """The updates that this device sends back as an owner of the group, from the slices that it received."""
        slices = (group.owners, 1, *_slice_shape(group))
        own = received[:, : math.prod(slices[1:])].reshape(slices).astype(dtype)
        new = _cut(group, fn(_merged(group, own)))
        return _of_length(longest, new.reshape(group.owners, -1).astype(received.dtype))

    # Groups lie one after the other, so the number that end before this device is the index of its own group, or one
    # past the last for a device without a matrix. A switch runs that branch alone; no branch has a collective.
    own = collectives.axis_index(axes)
    mine = sum((own >= group.first + group.count).astype(jnp.int32) for group in groups)
    sent = jax.lax.switch(mine, [*(partial(of_one, group) for group in groups), lambda received: received], received)
    back = collectives.all_to_all(sent, axes).astype(dtype)
    new: dict[str, jax.Array] = {}
    for group, stack in zip(groups, stacks, strict=True):
        of_group = back[group.first : group.first + group.count, : stack[0].size]
        new |= _from_stacks(group, of_group.reshape(stack.shape))
    return new


def _of_length(length: int, rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, length - rows.shape[1])))


def _slice_shape(group: MatrixGroup) -> tuple[int, ...]:
    """The shape of what one device sends of a matrix, padding included."""
    by_dim = dict(group.splits)
    return tuple(size // collectives.axis_size(by_dim.get(dim, ())) for dim, size in enumerate(group.form.stored))


def _as_stacks(group: MatrixGroup, shards: Mapping[str, jax.Array]) -> jax.Array:
    """[M, stored dims / n]: the part of the group's shards that this device sends."""
    ordered = [(leaf, shards[leaf.path].transpose(leaf.order)) for leaf in group.leaves]
    stacked = jnp.concatenate([value.reshape(leaf.count, *value.shape[len(leaf.stack) :]) for leaf, value in ordered])
    if group.copies_dim is None:
        return stacked
    # Devices with equal shards send a part each, so that nothing travels twice.
    return collectives.own_shard(stacked, 1 + group.copies_dim, group.copies)


def _from_stacks(group: MatrixGroup, back: jax.Array) -> dict[str, jax.Array]:
    """The inverse of ``_as_stacks``: the shards by path, with the parts of copies gathered."""
    if group.copies_dim is not None:
        back = collectives.all_gather_equal(back, 1 + group.copies_dim, group.copies)
    ends = np.cumsum([leaf.count for leaf in group.leaves])[:-1]
    parts = zip(group.leaves, jnp.split(back, ends), strict=True)
    ordered = {leaf: part.reshape(*leaf.stack, *part.shape[1:]) for leaf, part in parts}
    return {leaf.path: value.transpose(np.argsort(leaf.order)) for leaf, value in ordered.items()}


def _merged(group: MatrixGroup, received: jax.Array) -> jax.Array:
    """[n, p, slice dims] -> [p, rows, columns]: the slices of the n senders put together, without padding."""
    form, (shape, order) = group.form, _by_axis(group, received.shape[1])
    stored = received.reshape(shape).transpose(order).reshape(received.shape[1], *form.stored)
    # Without padding: a rule may count rows, and zeros would widen the Gram matrix.
    return stored[(slice(None), *map(slice, form.true))].reshape(-1, form.rows, form.columns)


def _cut(group: MatrixGroup, matrices: jax.Array) -> jax.Array:
    """The inverse of ``_merged``, zeros where there was padding."""
    form, (shape, order) = group.form, _by_axis(group, matrices.shape[0])
    padding = [(0, size - own) for size, own in zip(form.stored, form.true, strict=True)]
    stored = jnp.pad(matrices.reshape(-1, *form.true), [(0, 0), *padding])
    by_axis = stored.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))
    return by_axis.reshape(group.owners, *shape[len(group.axes) :])


def _by_axis(group: MatrixGroup, places: int) -> tuple[tuple[int, ...], list[int]]:
    """The shape of slices with a dim for each axis in front, [axes ..., p, ...], and the order that merges its dims.

    In that order the axes that split a dim stand directly before a device's part of that dim.
    """
    sizes = [collectives.axis_size([axis]) for axis in group.axes]
    order, by_dim = [len(sizes)], dict(group.splits)
    for dim in range(len(group.form.stored)):
        order += [*map(group.axes.index, by_dim.get(dim, ())), len(sizes) + 1 + dim]
    return (*sizes, places, *_slice_shape(group)), order

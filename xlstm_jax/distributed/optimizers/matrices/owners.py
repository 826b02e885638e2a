"""All-to-alls that bring unsharded matrices to their owner devices, and shards of results back, in ``shard_map``.

  shards     [M, d, f / n]      stacked from the leaves of the group
  places     [n, p, d, f / n]   p = ceil(M / n) for each owner, zeros in empty places
  received   [n, p, d, f / n]   all-to-all: the first dim now counts the senders of slices
  unsharded  [p, d, f]

Several groups with at most as many matrices in total as owners are sent together, at most one matrix to each owner. The
shards are flattened and padded to the longest shard: places [n, longest d * f / n].
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
    """Sends this device's shards of a group's matrices to their owners; returns the matrices that this device owns.

    Runs inside ``shard_map``. The result is [places, rows, columns], unsharded, with rows <= columns. Each owner has
    the same number of places for matrices; places without a matrix hold zeros.

    Args:
      group: matrices of equal form, with their owner devices.
      shards: this device's shards of the leaves with the matrices, by path.
      exchange_dtype: dtype in which values are sent; None: the dtype of the shards. The result has the dtype of the
        shards.
    """
    stacked = _as_stacks(group, shards)
    empty = group.num_owners * group.places_per_owner - group.count
    # Narrow in the exchange only: the rule computes in the dtype of the leaves.
    sent = jnp.pad(stacked.astype(exchange_dtype or stacked.dtype), [(0, empty)] + [(0, 0)] * (stacked.ndim - 1))
    received = collectives.all_to_all(
        sent.reshape(group.num_owners, group.places_per_owner, *sent.shape[1:]), group.axes
    )
    return _merged(group, received).astype(stacked.dtype)


def from_owners(group: MatrixGroup, matrices: jax.Array, exchange_dtype: str | None = None) -> dict[str, jax.Array]:
    """Sends the matrices that this device owns back as shards; returns this device's shards of the leaves, by path.

    Runs inside ``shard_map``, after ``to_owners`` has sent the shards to the owners, which update unsharded matrices.

    Args:
      group: matrices of equal form, with their owner devices.
      matrices: [places, rows, columns], as ``to_owners`` returns them; matrices in empty places are dropped.
      exchange_dtype: dtype in which values are sent; None: unchanged. The result has the dtype of ``matrices``.
    """
    sent = matrices.astype(exchange_dtype or matrices.dtype)
    received = collectives.all_to_all(_in_slices(group, sent), group.axes)
    stacked = received.reshape(-1, *received.shape[2:])[: group.count]
    return _from_stacks(group, stacked.astype(matrices.dtype))


def by_owners(
    fn: OnMatrices, groups: Sequence[MatrixGroup], shards: Mapping[str, jax.Array], exchange_dtype: str | None
) -> dict[str, jax.Array]:
    """Applies ``fn`` to unsharded matrices on their owner devices; returns this device's shards of the results.

    Runs inside ``shard_map``. An all-to-all sends shards to the owners, and a second sends results back. The result is
    by path.

    Args:
      fn: takes matrices [n, rows, columns], of a single group; returns matrices of the same shape.
      groups: the groups of matrices of a round, which ``in_rounds`` sends together.
      shards: this device's shards, by path.
      exchange_dtype: dtype in which values are sent; None: the dtype of the shards.
    """
    if len(groups) == 1:
        return from_owners(groups[0], fn(to_owners(groups[0], shards, exchange_dtype)), exchange_dtype)
    stacks = [_as_stacks(group, shards) for group in groups]
    dtype, axes = stacks[0].dtype, groups[0].axes
    # [owners, longest]: the shard of a matrix in each row, zeros after shorter shards and in empty rows.
    each = [stack.reshape(stack.shape[0], -1) for stack in stacks]
    longest = max(row.shape[1] for row in each)
    filled = jnp.concatenate([_of_length(longest, row) for row in each])
    rows = jnp.pad(filled, ((0, groups[0].num_owners - len(filled)), (0, 0))).astype(exchange_dtype or dtype)
    received = collectives.all_to_all(rows, axes)

    def of_one(group: MatrixGroup, received: jax.Array) -> jax.Array:
        """Returns the result of ``fn`` for the single matrix of ``group`` that this device owns, in rows to send back.

        ``received`` [owners, longest] has a flattened slice of the matrix from each device, with zeros up to the length
        of the longest slice of any group. The result has the same shape: in each row the slice for a device.
        """
        slices = (group.num_owners, 1, *_slice_shape(group))
        index = received[:, : math.prod(slices[1:])].reshape(slices).astype(dtype)
        new = _in_slices(group, fn(_merged(group, index)))
        return _of_length(longest, new.reshape(group.num_owners, -1).astype(received.dtype))

    # Groups are consecutive, so the number of groups that end before this device is the index of the device's group, or
    # one past the last for a device without a matrix. The switch runs a single branch; no branch has a collective.
    index = collectives.axis_index(axes)
    group_index = sum((index >= group.first_place + group.count).astype(jnp.int32) for group in groups)
    sent = jax.lax.switch(
        group_index, [*(partial(of_one, group) for group in groups), lambda received: received], received
    )
    back = collectives.all_to_all(sent, axes).astype(dtype)
    new: dict[str, jax.Array] = {}
    for group, stack in zip(groups, stacks, strict=True):
        of_group = back[group.first_place : group.first_place + group.count, : stack[0].size]
        new |= _from_stacks(group, of_group.reshape(stack.shape))
    return new


def _of_length(length: int, rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, 0), (0, length - rows.shape[1])))


def _slice_shape(group: MatrixGroup) -> tuple[int, ...]:
    """Returns the shape of the slice that a device sends of each matrix of the group, with padding.

    Dims are those of a matrix: dims of the shorter side, then of the longer side.
    """
    by_dim = dict(group.splits_when_sent)
    return tuple(size // collectives.axis_size(by_dim.get(dim, ())) for dim, size in enumerate(group.form.stored))


def _as_stacks(group: MatrixGroup, shards: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the slices of the group's matrices that this device sends to the owners, [matrices, *slice dims].

    ``shards`` has this device's shards of the leaves, by path. A slice is this device's shard of a matrix; or a part of
    the shard if several devices have equal shards. Matrices are in the order of ``group.leaves``. Slice dims are the
    dims of a matrix: of the shorter side, then of the longer side.
    """
    ordered = [(leaf, shards[leaf.path].transpose(leaf.order)) for leaf in group.leaves]
    stacked = jnp.concatenate([value.reshape(leaf.count, *value.shape[len(leaf.stack) :]) for leaf, value in ordered])
    if group.copy_axes_dim is None:
        return stacked
    # Devices with equal shards send a part each, so that nothing is sent twice.
    return collectives.local_shard(stacked, 1 + group.copy_axes_dim, group.copy_axes)


def _from_stacks(group: MatrixGroup, back: jax.Array) -> dict[str, jax.Array]:
    """Returns this device's shards of the group's leaves, by path, from the slices that the owners have sent back.

    ``back`` is [matrices, *slice dims], with matrices in the order of ``group.leaves``. A slice is this device's shard
    of a matrix; if several devices have equal shards, a slice is a part of a shard, and an all-gather combines the
    parts. The result has the shapes of the leaves, and their order of dims.
    """
    if group.copy_axes_dim is not None:
        back = collectives.all_gather_equal(back, 1 + group.copy_axes_dim, group.copy_axes)
    ends = np.cumsum([leaf.count for leaf in group.leaves])[:-1]
    parts = zip(group.leaves, jnp.split(back, ends), strict=True)
    ordered = {leaf: part.reshape(*leaf.stack, *part.shape[1:]) for leaf, part in parts}
    return {leaf.path: value.transpose(np.argsort(leaf.order)) for leaf, value in ordered.items()}


def _merged(group: MatrixGroup, received: jax.Array) -> jax.Array:
    """Merges the slices of p matrices from n senders and removes padding: [n, p, *slice dims] -> [p, rows, columns].

    The n senders are the devices along the mesh axes of the group; each has sent a slice of every matrix. ``group`` has
    the dims along which the slices are joined, and the size of a matrix without padding.
    """
    form, (shape, order) = group.form, _by_axis(group, received.shape[1])
    stored = received.reshape(shape).transpose(order).reshape(received.shape[1], *form.stored)
    # Without padding: a rule may count rows, and zeros would enlarge the Gram matrix.
    return stored[(slice(None), *map(slice, form.true))].reshape(-1, form.rows, form.columns)


def _in_slices(group: MatrixGroup, matrices: jax.Array) -> jax.Array:
    """Cuts p matrices into the slices for the n devices: [p, rows, columns] -> [n, p, *slice dims].

    The n devices are those along the mesh axes of the group; each gets a slice of every matrix. The dims of a matrix
    are first padded with zeros at the end, to sizes that the axes divide.
    """
    form, (shape, order) = group.form, _by_axis(group, matrices.shape[0])
    padding = [(0, size - true_size) for size, true_size in zip(form.stored, form.true, strict=True)]
    stored = jnp.pad(matrices.reshape(-1, *form.true), [(0, 0), *padding])
    by_axis = stored.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))
    return by_axis.reshape(group.num_owners, *shape[len(group.axes) :])


def _by_axis(group: MatrixGroup, places: int) -> tuple[tuple[int, ...], list[int]]:
    """Returns the shape to which slices of p matrices are reshaped before a merge, and the permutation of its dims.

    The shape is [size of each axis of the owners, p, *slice dims]. The permutation puts p first, and the axes that
    split a dim directly before the slice's part of this dim, so that a reshape merges them. ``places`` is p.
    """
    sizes = [collectives.axis_size([axis]) for axis in group.axes]
    order, by_dim = [len(sizes)], dict(group.splits_when_sent)
    for dim in range(len(group.form.stored)):
        order += [*map(group.axes.index, by_dim.get(dim, ())), len(sizes) + 1 + dim]
    return (*sizes, places, *_slice_shape(group)), order

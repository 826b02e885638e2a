"""Looks up rows of a split table without gathering the table: devices exchange indices and the requested rows.

An ``nn.Embed`` reads t rows of a table [V, d] on each of N devices. A gather would send V rows to each device.
Here the devices along the innermost axes of the table form groups of G. Each device of a group gets w = d / G columns
of all rows:

  columns   W[V_fsdp, d]  -- all-to-all within the group -->  -- all-gather over the other axes -->  W[V, w]
            W[V, d_fsdp]                                      -- all-gather over the other axes -->  W[V, w]
  indices   [t]           -- all-gather within the group -->  [G, t]
  rows      [G, t, w], looked up in the columns               -- all-to-all within the group -->     [t, d]

All devices look up the same number of values, whatever the tokens are: shapes are static, and no device has more work
because it owns frequent rows. The gradient is sent in the opposite direction. A device sums the returned rows in
float32, repeated rows too, before narrowing. With a table over one axis (G = N) a device sends V d / N and t d values,
while a gather sends V d values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import term_of_mean, wide_dtype, widened
from xlstm_jax.distributed.data_parallel.wire.communication import (
    Communication,
    PrimalType,
    gradient_of_shard,
    shard_as_sent,
)
from xlstm_jax.distributed.data_parallel.wire.wrong_gradients import (
    check_one_gradient_of_one_batch,
    differentiated_once,
)

# Narrower columns waste the lanes of a TPU, which works on rows of this many values.
LANES = 128


@dataclass(frozen=True)
class RowLookup:
    """Layout of a row lookup in one table; chosen by ``by_rows``.

    Attributes:
      shape: (V, d), without padding.
      stored: (V, d) with padding.
      dim: the split dim.
      outer, group: the axes that split the dim, outermost first; columns are gathered over ``outer``.
      outer_count, group_count: the number of devices along ``outer``, and along ``group``.
      communication: dtypes and copies.
      path: path of the leaf, for errors.
    """

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dim: int
    outer: tuple[str, ...]
    group: tuple[str, ...]
    outer_count: int
    group_count: int
    communication: Communication
    path: str = ""

    @property
    def parts(self) -> int:
        """Number of devices over which the table is split: each holds one shard."""
        return self.outer_count * self.group_count

    @property
    def width(self) -> int:
        """Number w of columns of the table that a device holds during the lookup, for every row; with padding."""
        return -(-self.stored[1] // self.group_count)

    @property
    def blocks(self) -> tuple[int, int]:
        """Pair (n, c): in a row of the table, the w columns of a device are n blocks of c contiguous columns.

        If the columns are split, n is the number of devices along ``outer``: in a row, a block of the group's first
        device is followed by a block of the second device, and so on, n times. (A group is the devices along
        ``self.group``.) If the rows are split, a device has one block of w columns.
        """
        # A dim of columns is split over (outer, group), outermost first. So device g of a group has, after the gather
        # over `outer`, the blocks g, G + g, 2 G + g, ... of the row.
        return (self.outer_count, self.stored[1] // self.parts) if self.dim else (1, self.width)

    def sent_bytes(self, tokens: int, index_bytes: int, table_bytes: float, row_bytes: float) -> float:
        """Returns the bytes that one device sends when each device looks up ``tokens`` rows.

        The sum of three parts: columns of the table (so that a device holds its columns of every row), indices, and
        looked-up rows. ``index_bytes`` are the bytes of an index, ``table_bytes`` of a value of the table, and
        ``row_bytes`` of a value of a looked-up row.
        """
        outer, group = (1 - 1 / count for count in (self.outer_count, self.group_count))
        columns = self.stored[0] * self.width * outer
        columns += 0 if self.dim else self.stored[0] // self.parts * self.width * self.group_count * group
        rows = tokens * self.group_count * group
        return columns * table_bytes + rows * (self.width * row_bytes + index_bytes)


def by_rows(
    shape: tuple[int, ...],
    stored: tuple[int, ...],
    dim: int,
    axis_sizes: Sequence[tuple[str, int]],
    communication: Communication,
    path: str = "",
    *,
    tokens: int,
    index_bytes: int,
    table_bytes: float,
    row_bytes: float,
) -> RowLookup | None:
    """Returns the ``RowLookup`` (layout of a row lookup) that sends the fewest bytes; None if a gather sends no more.

    Layouts differ in the group, the devices that exchange rows: the devices along one or more of the innermost axes.
    Several axes form a group only if a device's columns still fill the lanes of a TPU.

    Args:
      shape, stored: (V, d) of the table, without and with padding.
      dim: the split dim.
      axis_sizes: the axes that split the dim, outermost first, with their numbers of devices, each 2 or more.
      communication, path: options and path of the leaf, for the result.
      tokens: the number of rows that each device needs.
      index_bytes: the bytes of an index.
      table_bytes, row_bytes: the bytes per value of the table, and of a row, forward and backward together.
    """

    def split_at(first: int) -> RowLookup:
        names, sizes = [name for name, _ in axis_sizes], [size for _, size in axis_sizes]
        outer, group = math.prod(sizes[:first]), math.prod(sizes[first:])
        return RowLookup(
            shape, stored, dim, tuple(names[:first]), tuple(names[first:]), outer, group, communication, path
        )

    lookups = [split_at(first) for first in range(len(axis_sizes))]
    fitting = [lookup for lookup in lookups if lookup.width >= LANES] or lookups[-1:]
    best = min(fitting, key=lambda lookup: lookup.sent_bytes(tokens, index_bytes, table_bytes, row_bytes))
    gathered = math.prod(stored) * (1 - 1 / best.parts) * table_bytes
    return best if best.sent_bytes(tokens, index_bytes, table_bytes, row_bytes) < gathered else None


def look_up(shard: jax.Array, indices: jax.Array, lookup: RowLookup) -> jax.Array:
    """Returns ``jnp.take(table, indices, axis=0)``, given this device's shard of the table; inside ``shard_map``.

    Args:
      shard: [V / N, d] or [V, d / N], as stored.
      indices: integers [...]. As for ``jnp.take``, negative indices count from the end; indices out of range give NaN.
    Returns:
      [..., d] in the gather dtype. The gradient of the shard is the mean over the N devices, and over copies.
    """
    # Cast to varying here, outside of the custom rule: JAX transposes the cast to a sum, as for a gathered table. The
    # cast over the copies' axes is made inside the rule, which takes the mean over copies.
    others = collectives.varying_axes(indices).difference(collectives.spread_axes(lookup.communication.copied_axes))
    return _look_up(collectives.to_varying(shard, sorted(others)), indices, lookup)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(shard: jax.Array, indices: jax.Array, lookup: RowLookup) -> jax.Array:
    return _look_up_fwd(shard, indices, lookup)[0]


def _look_up_fwd(
    shard: jax.Array, indices: jax.Array, lookup: RowLookup
) -> tuple[jax.Array, tuple[PrimalType, jax.Array]]:
    """Returns (rows, residuals) of the forward pass: the table's rows [..., d] at this device's ``indices`` [...].

    Each device of a group (the devices along ``lookup.group``) holds w columns of all rows. The device looks up the
    rows that all devices of the group ask for in these columns, and sends each device its rows. The residuals for the
    backward pass are (type of the shard, indices of all devices of the group).
    """
    columns = _columns(shard_as_sent(shard, lookup.communication), lookup)
    asked = collectives.all_gather(indices.ravel(), 0, lookup.group)
    # Tokens are sent in their narrow dtype; a scatter counts in this dtype, which may not hold the number of rows.
    asked = asked.astype(jnp.int32) if asked.dtype.itemsize < 4 else asked
    # Without the rows of the padding, so that an index beyond the table gives NaN, and -1 means the last true row.
    rows = jnp.take(columns[: lookup.shape[0]], asked, axis=0)
    # Each device of the group gets the rows of its indices: [G t, w] -> [G, t, w].
    by_device = rows.reshape(lookup.group_count, -1, lookup.width)
    rows = _in_one(collectives.all_to_all(by_device, lookup.group), lookup)
    return rows[:, : lookup.shape[1]].reshape(*indices.shape, -1), (PrimalType.of(shard), asked)


def _look_up_bwd(
    lookup: RowLookup, residuals: tuple[PrimalType, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    """Returns (gradient of this device's shard of the table, None for the indices): the backward pass of ``_look_up``.

    ``residuals`` are (type of the shard, indices of all devices of the group). ``cotangent`` is the gradient of the
    rows [..., d] that this device has looked up. As in the forward pass, each device of the group (the devices that
    share the table) computes some columns of all rows of the table: it receives these columns of the gradients from
    every device, and adds the gradients of equal indices. The result is the mean over all devices of the group, and
    over the devices with copies of the shard.
    """
    (primal, asked), communication, axes = residuals, lookup.communication, (*lookup.outer, *lookup.group)
    check_one_gradient_of_one_batch(lookup.path, primal, cotangent, axes)
    summed = communication.dtypes(primal)[1]
    # Rows are sent in the narrower of both dtypes. A term that is narrowed is divided first, since in float16 the sum
    # may overflow where the mean does not; otherwise the sum is divided, below.
    rows, count = cotangent.reshape(-1, lookup.shape[1]), lookup.parts
    if jnp.dtype(summed).itemsize < rows.dtype.itemsize:
        rows, count = term_of_mean(rows, count, summed), 1
    rows = collectives.all_to_all(_in_parts(rows, lookup), lookup.group).reshape(-1, lookup.width)
    varying = collectives.varying_axes(rows) | collectives.varying_axes(asked)
    zeros = jnp.zeros((lookup.shape[0], lookup.width), wide_dtype(rows.dtype))
    zeros, rows = collectives.to_varying((zeros, widened(rows)), sorted(varying))
    # "drop": an index beyond the table returned NaN, and has no row. The sum is wide, since a frequent token adds
    # thousands of rows to one row.
    columns = zeros.at[asked].add(rows, mode="drop") / count
    # Narrowed only if the columns are sent.
    travels = not lookup.dim or lookup.outer_count > 1
    grad = _shard_of_columns(columns.astype(summed) if travels else columns, lookup)
    return differentiated_once(gradient_of_shard(widened(grad), communication, primal), axes), None


_look_up.defvjp(_look_up_fwd, _look_up_bwd)


def _columns(shard: jax.Array, lookup: RowLookup) -> jax.Array:
    """Returns this device's w columns of all V rows of the table, [V, w] with padding, from the shards of all devices.

    ``shard`` is this device's shard. ``lookup.outer`` and ``lookup.group`` are the axes that split the table; the
    devices along ``group`` together hold every column. A table split by rows is exchanged by an all-to-all within the
    group. Then, for rows or columns, shards are gathered over ``outer``.
    """
    if lookup.dim == 0:
        pieces = _in_parts(shard, lookup)
        shard = collectives.all_to_all(pieces, lookup.group).reshape(-1, lookup.width)
    return collectives.all_gather(shard, lookup.dim, lookup.outer)


def _shard_of_columns(columns: jax.Array, lookup: RowLookup) -> jax.Array:
    """Returns the gradient of this device's shard of the table, in the shape of the shard, from gradients of columns.

    ``columns`` is the gradient of this device's w columns of all V rows, [V, w], without padding rows. The gradients
    are summed over the axes ``lookup.outer`` by a reduce-scatter. For a table split by rows, an all-to-all over the
    axes ``lookup.group`` then joins the columns of the shard's rows.
    """
    columns = jnp.pad(columns, [(0, lookup.stored[0] - lookup.shape[0]), (0, 0)])
    shard = collectives.reduce_scatter(columns, lookup.dim, lookup.outer)
    if lookup.dim:
        return shard
    pieces = shard.reshape(lookup.group_count, -1, lookup.width)
    return _in_one(collectives.all_to_all(pieces, lookup.group), lookup)[:, : lookup.stored[1]]


def _in_parts(rows: jax.Array, lookup: RowLookup) -> jax.Array:
    """Splits rows [t, d] into the columns of each of the G devices of a group: [G, t, w]; padding columns are zeros.

    A group is the devices along ``lookup.group``. Entry g has the w columns that device g holds during the lookup, in
    their order in the table (see ``RowLookup.blocks``).
    """
    (count, size), group = lookup.blocks, lookup.group_count
    padded = jnp.pad(rows, [(0, 0), (0, group * lookup.width - rows.shape[1])])
    parts = padded.reshape(-1, count, group, size)
    return parts.transpose(2, 0, 1, 3).reshape(group, -1, lookup.width)


def _in_one(parts: jax.Array, lookup: RowLookup) -> jax.Array:
    """Joins the columns of the G devices of a group into rows, the inverse of ``_in_parts``: [G, t, w] -> [t, G w].

    A group is the devices along ``lookup.group``. Columns are in the order of the table; padding columns, at the end of
    a row, are kept.
    """
    (count, size), group = lookup.blocks, lookup.group_count
    rows = parts.reshape(group, -1, count, size).transpose(1, 2, 0, 3)
    return rows.reshape(-1, group * lookup.width)

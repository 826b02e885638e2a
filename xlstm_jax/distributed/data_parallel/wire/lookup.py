"""Rows of a table that is split, without the table: what travels are indices, and the rows that they ask for.

An ``nn.Embed`` reads t rows of its table [V, d] on each of N devices. A gather brings all V to each of them. Here each
device of a group of G, the innermost axes of the table, gets some columns of all rows, w = d / G of them:

  columns   W[V_fsdp, d]  -- all-to-all within the group -->  -- all-gather over the other axes -->  W[V, w]
            W[V, d_fsdp]                                      -- all-gather over the other axes -->  W[V, w]
  indices   [t]           -- all-gather within the group -->  [G, t]
  rows      [G, t, w], looked up in the columns               -- all-to-all within the group -->     [t, d]

Each device looks up as many values as it needs, whatever the tokens are: shapes are equal, and no owner of frequent
rows is asked for more than another. The gradient takes the same ways back. A device sums the rows that come back to it
in float32, repeated rows too, before anything is narrowed. With a table over one axis (G = N) a device sends V d / N
and t d values, where a gather sends V d.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Communication, term_of_mean, wide_dtype, widened
from xlstm_jax.distributed.data_parallel.wire.gather_array import (
    Primal,
    check_one_gradient_of_one_batch,
    gradient_of_shard,
    shard_as_sent,
)

LOOKUP_SCOPE = "lookup_rows"  # the name by which forecasts and profiles know lookups by rows

# Columns that are narrower waste the lanes of a TPU, which works on rows of this many values.
LANES = 128


@dataclass(frozen=True)
class RowLookup:
    """How rows of one table are looked up; ``by_rows`` chooses it.

    Attributes:
      shape: (V, d), without padding.
      stored: the same with padding.
      dim: the dim that is split.
      outer, group: the axes that split it, outermost first; columns are gathered over ``outer``.
      outer_count, group_count: the devices along each.
      how: dtypes and copies.
      path: of the leaf, for errors.
    """

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dim: int
    outer: tuple[str, ...]
    group: tuple[str, ...]
    outer_count: int
    group_count: int
    how: Communication
    path: str = ""

    @property
    def parts(self) -> int:
        """The number of shards."""
        return self.outer_count * self.group_count

    @property
    def width(self) -> int:
        """w, the columns that a device has of all rows."""
        return -(-self.stored[1] // self.group_count)

    @property
    def blocks(self) -> tuple[int, int]:
        """How the columns of a device lie in a row: so many blocks, of so many columns each."""
        return (self.outer_count, self.stored[1] // self.parts) if self.dim else (1, self.width)

    def sent_bytes(self, tokens: int, index_bytes: int, table_bytes: float, row_bytes: float) -> float:
        """What a device sends: of its table with ``table_bytes`` for each value, of its rows with ``row_bytes``."""
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
    how: Communication,
    path: str = "",
    *,
    tokens: int,
    index_bytes: int,
    table_bytes: float,
    row_bytes: float,
) -> RowLookup | None:
    """The lookup of so many tokens that sends least; None where a gather of the table sends as little.

    The group is made of the innermost axes, of which there may be as many as leave columns that fill a TPU's lanes,
    and of the innermost axis in any case.

    Args:
      shape, stored, dim, how, path: see ``RowLookup``.
      axis_sizes: the axes that split the dim, outermost first, with the devices along each; none of size 1.
      tokens: the rows that each device needs.
      index_bytes, table_bytes, row_bytes: those of an index, and of a value of the table and of a row, in forward and
        backward together.
    """

    def split_at(first: int) -> RowLookup:
        names, sizes = [name for name, _ in axis_sizes], [size for _, size in axis_sizes]
        outer, group = math.prod(sizes[:first]), math.prod(sizes[first:])
        return RowLookup(shape, stored, dim, tuple(names[:first]), tuple(names[first:]), outer, group, how, path)

    lookups = [split_at(first) for first in range(len(axis_sizes))]
    fitting = [lookup for lookup in lookups if lookup.width >= LANES] or lookups[-1:]
    best = min(fitting, key=lambda lookup: lookup.sent_bytes(tokens, index_bytes, table_bytes, row_bytes))
    gathered = math.prod(stored) * (1 - 1 / best.parts) * table_bytes
    return best if best.sent_bytes(tokens, index_bytes, table_bytes, row_bytes) < gathered else None


def look_up(shard: jax.Array, indices: jax.Array, lookup: RowLookup) -> jax.Array:
    """``jnp.take(whole, indices, axis=0)`` of a table of which this device has a shard; inside ``shard_map``.

    Args:
      shard: [V / N, d] or [V, d / N], as stored.
      indices: integers [...]. As for ``jnp.take``, negative ones count from the end; others that are none give NaN.
    Returns:
      [..., d] in the gather dtype. The gradient of the shard is the mean over the N devices, and over copies.
    """
    # Cast to varying here, outside of the custom rule: JAX transposes the cast to the sum that it would take of a
    # gathered table. The cast over copies is made within, where their mean is taken.
    others = collectives.varying_axes(indices).difference(lookup.how.copied_axes)
    return _look_up(collectives.to_varying(shard, sorted(others)), indices, lookup)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(shard: jax.Array, indices: jax.Array, lookup: RowLookup) -> jax.Array:
    return _look_up_fwd(shard, indices, lookup)[0]


def _look_up_fwd(shard: jax.Array, indices: jax.Array, lookup: RowLookup) -> tuple[jax.Array, tuple[Primal, jax.Array]]:
    columns = _columns(shard_as_sent(shard, lookup.how), lookup)
    asked = collectives.all_gather(indices.ravel(), 0, lookup.group)
    rows = jnp.take(columns[: lookup.shape[0]], asked, axis=0)
    rows = _in_one(collectives.all_to_all(_for_each(rows, lookup), lookup.group), lookup)
    return rows[:, : lookup.shape[1]].reshape(*indices.shape, -1), (Primal.of(shard), asked)


def _look_up_bwd(lookup: RowLookup, kept: tuple[Primal, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    (primal, asked), how = kept, lookup.how
    check_one_gradient_of_one_batch(lookup.path, primal, cotangent, (*lookup.outer, *lookup.group))
    summed = how.dtypes(primal)[1]
    rows, count = cotangent.reshape(-1, lookup.shape[1]), lookup.parts
    if jnp.dtype(summed).itemsize < rows.dtype.itemsize:
        rows, count = term_of_mean(rows, count, summed), 1
    rows = collectives.all_to_all(_in_parts(rows, lookup), lookup.group).reshape(-1, lookup.width)
    axes = collectives.varying_axes(rows) | collectives.varying_axes(asked)
    zeros = jnp.zeros((lookup.shape[0], lookup.width), wide_dtype(rows.dtype))
    zeros, rows = collectives.to_varying((zeros, widened(rows)), sorted(axes))
    columns = zeros.at[asked].add(rows, mode="drop") / count
    travels = not lookup.dim or lookup.outer_count > 1
    grad = _shard_of_columns(columns.astype(summed) if travels else columns, lookup)
    return gradient_of_shard(widened(grad), how, primal), None


_look_up.defvjp(_look_up_fwd, _look_up_bwd)


def _columns(shard: jax.Array, lookup: RowLookup) -> jax.Array:
    """This device's columns of all rows, [V, w], with padding."""
    if lookup.dim == 0:
        pieces = _in_parts(shard, lookup)
        shard = collectives.all_to_all(pieces, lookup.group).reshape(-1, lookup.width)
    return collectives.all_gather(shard, lookup.dim, lookup.outer)


def _shard_of_columns(columns: jax.Array, lookup: RowLookup) -> jax.Array:
    """The transpose of ``_columns``, of values without padding of rows: sums over ``outer``."""
    columns = jnp.pad(columns, [(0, lookup.stored[0] - lookup.shape[0]), (0, 0)])
    shard = collectives.reduce_scatter(columns, lookup.dim, lookup.outer)
    if lookup.dim:
        return shard
    pieces = shard.reshape(lookup.group_count, -1, lookup.width)
    return _in_one(collectives.all_to_all(pieces, lookup.group), lookup)[:, : lookup.stored[1]]


def _for_each(rows: jax.Array, lookup: RowLookup) -> jax.Array:
    """[G t, w] -> [G, t, w]: what each device of the group has asked for."""
    return rows.reshape(lookup.group_count, -1, lookup.width)


def _in_parts(rows: jax.Array, lookup: RowLookup) -> jax.Array:
    """[t, d] -> [G, t, w]: for each device of the group its columns, those of the padding zeros."""
    (count, size), group = lookup.blocks, lookup.group_count
    padded = jnp.pad(rows, [(0, 0), (0, group * lookup.width - rows.shape[1])])
    parts = padded.reshape(-1, count, group, size)
    return parts.transpose(2, 0, 1, 3).reshape(group, -1, lookup.width)


def _in_one(parts: jax.Array, lookup: RowLookup) -> jax.Array:
    """[G, t, w] -> [t, G w]: the inverse of ``_in_parts``."""
    (count, size), group = lookup.blocks, lookup.group_count
    rows = parts.reshape(group, -1, count, size).transpose(1, 2, 0, 3)
    return rows.reshape(-1, group * lookup.width)

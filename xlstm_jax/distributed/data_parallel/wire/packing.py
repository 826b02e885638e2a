"""Packed arrays on the wire: a shard that is gathered, and the mean of a gradient over copies.

  gather   W[d_fsdp, f] -- pack --> rows of bytes -- all-gather, each stage --> -- unpack --> W[d, f]
  stored   W[d_fsdp, f] -- pack --> bytes[d_fsdp, p] -- all-gather --> bytes[d, p] -- unpack --> W[d, f]
  mean     dW on each of R copies -- pack --> all-to-all --> unpack, float32 sum of one part of R
                                  -- pack --> all-gather --> unpack: the same bits on all copies

What was packed once stays packed through all stages, and is unpacked where it is read. Each value of a gather is
rounded once; each of a mean by every copy, and once more as the mean.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.quantized import BLOCK_SIZE, FORMATS, pack, packed_size, unpack

_MOST_PADDING = 1 / 128  # of a row: a share that keeps 8 bits below 0.52 of bfloat16's bytes, and 4 bits below 0.27


class PackedAlong(NamedTuple):
    """How an array is packed that is stored so: along a dim that no axis splits, all others staying as they are.

    Each of its rows is packed by itself. So shards are those of the unpacked array, on any mesh.
    """

    format_name: str
    dim: int  # from the end, so that layers in front of it change nothing
    size: int  # of the dim, unpacked
    dtype: str  # of the values

    def pack(self, value: jax.Array) -> jax.Array:
        """[..., size, ...] -> uint8 [..., packed_size(size), ...]."""
        return jnp.moveaxis(pack(jnp.moveaxis(value, self.dim, -1), self.format_name), -1, self.dim)

    def unpack(self, packed: jax.Array, how: Communication | None = None) -> jax.Array:
        """The inverse; of values that were gathered in their ``arrival_dtype``."""
        rows = jnp.moveaxis(packed, self.dim, -1)
        return jnp.moveaxis(unpack(rows, self.format_name, self.size, self.arrival_dtype(how)), -1, self.dim)

    def arrival_dtype(self, how: Communication | None) -> Any:
        """The dtype of the values, or the one in which they would be gathered if they were not packed."""
        values = jax.ShapeDtypeStruct((), self.dtype)
        return how.dtypes(values)[0] if how else values.dtype

    def true_shape(self, packed_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the values."""
        dim = len(packed_shape) + self.dim
        return (*packed_shape[:dim], self.size, *packed_shape[dim + 1 :])


def dim_to_pack(shape: Sequence[int], is_split: Sequence[bool]) -> int | None:
    """The last of the dims of a matrix that is not split and that blocks fill, from the end; None where there is none.

    Dims in front of the last two may be those of layers, which are taken apart.
    """
    dims = [dim for dim in (-1, -2) if len(shape) >= 2 and not is_split[dim] and _fills_blocks(shape[dim])]
    return dims[0] if dims and any(is_split) else None


class Packing(NamedTuple):
    """How shards of one shape and dtype are packed, to be gathered along a dim.

    A row is what a shard holds at one index of the dim: rows keep the layouts of TPUs, where to flatten the shard would
    copy the gathered weight several times. Where the blocks do not fill such rows, the whole shard is one.
    """

    format_name: str
    shape: tuple[int, ...]  # of a shard
    dtype: Any
    dim: int

    @property
    def matrix(self) -> tuple[int, int]:
        """The shard as rows of values."""
        rows, size = self.shape[self.dim], math.prod(self._rest)
        return (rows, size) if _fills_blocks(size) else (1, rows * size)

    @property
    def sent_bytes(self) -> int:
        """Bytes of a packed shard."""
        rows, size = self.matrix
        return rows * packed_size(size, self.format_name)

    def pack(self, shard: jax.Array) -> jax.Array:
        """The shard as uint8 [rows, bytes]: gathered along dim 0, in as many stages as there are."""
        return pack(jnp.moveaxis(shard, self.dim, 0).reshape(self.matrix), self.format_name)

    def unpack(self, gathered: jax.Array) -> jax.Array:
        """Any number of packed shards, one below the other, as one array of their dtype."""
        rows, size = self.matrix
        values = unpack(gathered, self.format_name, size, self.dtype)
        whole = values.reshape(gathered.shape[0] // rows * self.shape[self.dim], *self._rest)
        return jnp.moveaxis(whole, 0, self.dim)

    @property
    def _rest(self) -> tuple[int, ...]:
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]


def sent_bytes(shape: Sequence[int], dim: int, dtype: str) -> int:
    """Bytes of what each device puts into a gather along ``dim``, of a shard of this shape in a gather dtype."""
    if dtype in FORMATS:
        return Packing(dtype, tuple(shape), None, dim).sent_bytes
    return math.prod(shape) * np.dtype(dtype).itemsize


def sent_itemsize(dtype: str) -> float:
    """Bytes of a value in a gather dtype; of a packed one with its part of the scale of its block."""
    return packed_size(BLOCK_SIZE, dtype) / BLOCK_SIZE if dtype in FORMATS else np.dtype(dtype).itemsize


def packed_mean(term: jax.Array, axes: Sequence[str], format_name: str) -> jax.Array:
    """The sum of float32 terms over devices, equal on all of them bit by bit, and by type; each device sends bytes.

    Device i sums part i of R. Terms of a mean are divided by R before they come here.
    """
    count = collectives.axis_size(axes)
    rows, size = _matrix_of_parts(term.shape, count)
    padded = jnp.pad(term.ravel(), (0, rows * size - term.size)).reshape(count, rows // count, size)
    received = collectives.all_to_all(pack(padded, format_name), axes)
    mean = jnp.sum(unpack(received, format_name, size, jnp.float32), 0)
    whole = collectives.all_gather_equal(pack(mean, format_name), 0, axes)
    return unpack(whole, format_name, size, jnp.float32).ravel()[: term.size].reshape(term.shape)


def _matrix_of_parts(shape: Sequence[int], count: int) -> tuple[int, int]:
    """Rows and their size, for values of this shape: whole dims where ``count`` divides the rows, else padded."""
    for dim in range(1, len(shape)):
        rows, size = math.prod(shape[:dim]), math.prod(shape[dim:])
        if rows and rows % count == 0 and _fills_blocks(size):
            return rows, size
    return count, -(-math.prod(shape) // count)


def _fills_blocks(size: int) -> bool:
    return 0 < -size % BLOCK_SIZE + size <= size * (1 + _MOST_PADDING)

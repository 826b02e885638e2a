"""Sends arrays in 8 bits, in blocks with scales (``quantized``): gathers of parameters, and means over copies.

  gather   W[d_fsdp, f] -- pack --> rows of bytes -- all-gather, each stage --> all rows -- unpack --> W[d, f]

A packed shard stays packed through all stages of a gather: each value is rounded once.

  mean     term on each of R copies -- pack --> all-to-all --> unpack, float32 sum of one part of R
                                    -- pack --> all-gather --> unpack: the same bits on all copies
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.quantized import (
    BLOCK_SIZE,
    FORMATS,
    fills_blocks,
    pack,
    packed_size,
    unpack,
)
from xlstm_jax.distributed.data_parallel.wire.wire import Wire, WireFormat


@jax.tree_util.register_static
@dataclass(frozen=True)
class InBlocks:
    """Conversions of a shard for a gather along ``dim`` in blocks of 8-bit codes; shards have this shape and dtype.

    A row is the part of a shard at one index of the dim. Rows keep the layouts of TPUs; flattening the shard would copy
    the gathered weight several times. If blocks do not fill the rows, the entire shard is a single row.
    """

    rounds_again: ClassVar[bool] = True

    format_name: str
    shape: tuple[int, ...]  # of a shard
    dtype: DType
    dim: int

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (rows, values per row) of the matrix to which a shard is reshaped before packing.

        A row has the values at one index of ``self.dim``, the gathered dim. If such a row, in blocks of 64, would need
        more than 1/128 of padding, the entire shard is one row: (1, number of values).
        """
        rows, size = self.shape[self.dim], math.prod(self._rest)
        return (rows, size) if fills_blocks(size) else (1, rows * size)

    @property
    def sent_bytes(self) -> int:
        """Number of bytes of one packed shard: codes, padding codes and scales."""
        rows, size = self.matrix
        return rows * packed_size(size)

    def send(self, shard: jax.Array) -> jax.Array:
        """Packs this device's shard: returns 8-bit codes and scales as uint8 [rows, bytes of a packed row].

        The shard is reshaped to the shape ``self.matrix``, with the gathered dim moved to the front: a row for each
        index of this dim, or a single row.
        """
        return pack(jnp.moveaxis(shard, self.dim, 0).reshape(self.matrix), self.format_name)

    def along(self, dim: int) -> int:
        """Returns 0 for any ``dim``: packed shards [rows, bytes] of all devices are concatenated along their rows."""
        return 0

    def receive(self, arrived: jax.Array) -> jax.Array:
        """Unpacks ``arrived``, uint8 [n rows, bytes]: the packed shards of n devices, one after the other, for any n.

        Returns the n shards concatenated along ``self.dim``, in ``self.dtype``; other dims have their size in
        ``self.shape``.
        """
        rows, size = self.matrix
        values = unpack(arrived, self.format_name, size, self.dtype)
        full = values.reshape(arrived.shape[0] // rows * self.shape[self.dim], *self._rest)
        return jnp.moveaxis(full, 0, self.dim)

    @property
    def _rest(self) -> tuple[int, ...]:
        return self.shape[: self.dim] + self.shape[self.dim + 1 :]


@dataclass(frozen=True)
class Blocks(WireFormat):
    """Format of 8-bit codes in blocks, with a scale per block; ``name`` is a format of ``quantized``, as "int8"."""

    averages: ClassVar[bool] = True

    name: str

    def wire(self, shape: tuple[int, ...], dtype: DType, dim: int) -> Wire:
        return InBlocks(self.name, shape, dtype, dim)

    @property
    def itemsize(self) -> float:
        """Bytes sent per value, if blocks are full: 1 byte of the code and the value's part of the block's scale."""
        return packed_size(BLOCK_SIZE) / BLOCK_SIZE

    def nbytes(self, shape: tuple[int, ...], dim: int) -> int:
        return InBlocks(self.name, shape, np.dtype(np.float32), dim).sent_bytes

    def mean_of_terms(self, term: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the sum of the devices' ``term`` over the mesh ``axes``: float32, in the shape of ``term``.

        Each device has divided its term by the number of devices, so the sum is the mean. Terms and sums are sent in 8
        bits: each device rounds each value of its term once, and the mean is rounded once more. The result is bitwise
        equal on these devices.
        """
        count = collectives.axis_size(axes)
        rows, size = matrix_of_parts(term.shape, count)
        padded = jnp.pad(term.ravel(), (0, rows * size - term.size)).reshape(count, rows // count, size)
        received = collectives.all_to_all(pack(padded, self.name), axes)
        mean = jnp.sum(unpack(received, self.name, size, jnp.float32), 0)
        packed = collectives.all_gather_equal(pack(mean, self.name), 0, axes)
        return unpack(packed, self.name, size, jnp.float32).ravel()[: term.size].reshape(term.shape)

    def mean_error(self, terms: np.ndarray) -> np.ndarray:
        blocks = np.pad(terms, (0, -terms.size % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
        # A device's term may be larger than the mean of all.
        return FORMATS[self.name].error_bound(blocks, 2 * blocks.max(-1, keepdims=True))


def matrix_of_parts(shape: Sequence[int], count: int) -> tuple[int, int]:
    """Returns (rows, row size) of the matrix to which values of this ``shape`` are reshaped before 8-bit packing.

    ``count``, a number of devices, divides the rows: each device sums an equal part of the rows. A row has the values
    at one index of the leading dims: of as few leading dims as possible, such that ``count`` divides the rows and a row
    needs at most 1/128 of padding. Shape (8, 4, 64) gives (8, 256) for ``count`` 8, and (32, 64) for 16. Without such
    dims each device has one row, and the caller pads the values: (count, ceil(values / count)).
    """
    for dim in range(1, len(shape)):
        rows, size = math.prod(shape[:dim]), math.prod(shape[dim:])
        if rows and rows % count == 0 and fills_blocks(size):
            return rows, size
    return count, -(-math.prod(shape) // count)

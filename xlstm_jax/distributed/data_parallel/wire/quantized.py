"""Packs rows of floats into bytes, block by block; ``blocks`` sends arrays in this form.

  pack     x[..., r]                   -->  uint8[..., packed_size(r)]    codes of the values, then scales of the blocks
  unpack   uint8[..., packed_size(r)]  -->  x[..., r]                     code times scale

Each row (last dim) is packed by itself, in blocks of ``BLOCK_SIZE`` consecutive values. A scale is the largest absolute
value of its block, divided by the largest code. The scale is rounded to bfloat16 *before* the codes are computed, so
``unpack`` multiplies by exactly this scale. A row takes r + 2 r / 64 bytes, 0.516 of the bytes in bfloat16. (A row of
fewer than 64 values is a shorter block.) A single array holds codes and scales, so a gather stays a single collective.

The error of a value x in a block with the largest absolute value m is at most ``error_bound``. Zeros stay zeros. A
block with m below ``smallest`` becomes zero. A block with a non-finite m becomes NaN, so that no NaN is lost.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

BLOCK_SIZE = 64
_SCALE_BYTES = 2
_MOST_PADDING = 1 / 128  # share of a row; keeps a row below 0.52 of its bytes in bfloat16
_HALF_ULP = 2.0**-8  # of bfloat16, the dtype of scales
_TINY = float(np.finfo(np.float32).tiny)  # smaller scales would be flushed to zero on some platforms


class Format(NamedTuple):
    """Codes of a format: the largest code, and the spacing of codes relative to the code and next to zero."""

    largest: float
    relative_spacing: float
    least_spacing: float

    def error_bound(self, value: ArrayLike, block_largest: ArrayLike) -> np.ndarray:
        """Returns, for each x in ``value``, the largest error of ``unpack(pack(x))`` in float32; shapes broadcast.

        The bound is half the distance of two neighbouring codes, times the scale. An x may have either sign;
        ``block_largest`` has the largest absolute value of the block of each x, and broadcasts with ``value``. A few
        float32 roundings are left out. In an integer format the error is at most a fraction of the block's largest
        value; in a floating format at most a fraction of the value, down to the format's smallest numbers.
        """
        scale = np.asarray(block_largest, np.float64) / self.largest * (1 + _HALF_ULP)
        return np.maximum(np.abs(value) * self.relative_spacing, scale * self.least_spacing) / 2

    @property
    def smallest(self) -> float:
        """Smallest block maximum that is kept: blocks with a smaller largest absolute value become zero."""
        return _TINY * self.largest


FORMATS = {
    "int8": Format(127.0, 0.0, 1.0),
    "float8_e4m3fn": Format(448.0, 2.0**-3, 2.0**-9),
}


def packed_size(size: int) -> int:
    """Returns the number of bytes of a packed row of ``size`` values: one byte per code, and two per scale.

    A block has 64 codes and one scale; the last block is padded. A row of fewer than 64 values is one shorter block.
    """
    blocks, block = _blocks_of(size)
    return blocks * (block + _SCALE_BYTES)


def pack(values: jax.Array, format_name: str) -> jax.Array:
    """Packs real floats [..., r] into uint8 [..., packed_size(r)], in the format "int8" or "float8_e4m3fn".

    A packed row has the codes of all values (padded to full blocks of 64), then the high bytes of the scales of all
    blocks, then the low bytes.
    """
    with jax.named_scope(f"pack_{format_name}"):
        return _packed(values, format_name)


def _packed(values: jax.Array, format_name: str) -> jax.Array:
    *lead, size = values.shape
    count, block = _blocks_of(size)
    values = jnp.pad(values.astype(jnp.float32), [(0, 0)] * len(lead) + [(0, count * block - size)])
    blocks = values.reshape(*lead, count, block)
    scales = _scales_of(blocks, FORMATS[format_name].largest)
    # No clipping: rounding changes a scale by 2^-8 of it at most, so the largest value becomes 127.498 at most, and
    # rounds to 127 (449.8 to 448 in float8).
    scaled = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    return jnp.concatenate([_encoded(scaled.reshape(*lead, count * block), format_name), *_scale_bytes(scales)], -1)


def unpack(packed: jax.Array, format_name: str, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Unpacks the result of ``pack``, uint8 [..., packed_size(size)], to values [..., size] of ``dtype``.

    A value is its code times the scale of its block, multiplied in float32. ``size`` is the number of values per row
    before packing. A block with a NaN scale becomes NaN.
    """
    with jax.named_scope(f"unpack_{format_name}"):
        return _unpacked(packed, format_name, size, dtype)


def _unpacked(packed: jax.Array, format_name: str, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    *lead, packed_bytes = packed.shape
    count, block = _blocks_of(size)
    codes, high, low = jnp.split(packed, [packed_bytes - 2 * count, packed_bytes - count], -1)
    scales = lax.bitcast_convert_type((high.astype(jnp.uint32) << 24) | (low.astype(jnp.uint32) << 16), jnp.float32)
    values = _decoded(codes, format_name).reshape(*lead, count, block) * scales[..., None]
    return values.astype(dtype).reshape(*lead, count * block)[..., :size]


def fills_blocks(size: int) -> bool:
    """Returns whether a row of ``size`` values, packed in blocks of 64, needs at most 1/128 of padding; False for 0."""
    return 0 < -size % BLOCK_SIZE + size <= size * (1 + _MOST_PADDING)


def _blocks_of(size: int) -> tuple[int, int]:
    """Returns (number of blocks, values per block) for a row of ``size`` values that is packed in an 8-bit format.

    Blocks have 64 values, and the last block is padded. A row of 1 to 63 values is a single block without padding.
    Size 100 -> (2, 64), 10 -> (1, 10), 0 -> (0, 64).
    """
    block = min(BLOCK_SIZE, size)
    return (-(-size // block), block) if block else (0, BLOCK_SIZE)


def _scales_of(blocks: jax.Array, largest_code: float) -> jax.Array:
    """Returns a scale per block, [..., b], for blocks of values [..., b, values per block].

    A scale is the largest absolute value of the block divided by ``largest_code``, rounded to bfloat16, and held in
    float32. A scale too small for float32 (denormal) becomes 0. The scale is NaN if the block has an inf or a NaN.
    """
    largest = lax.reduce_max(jnp.abs(blocks), [blocks.ndim - 1])
    # Not by a cast to bfloat16 and back, which XLA may remove: the codes would then not match the scale that is sent.
    scales = lax.reduce_precision(largest / largest_code, exponent_bits=8, mantissa_bits=7)
    return jnp.where(jnp.isfinite(largest), jnp.where(scales < _TINY, 0, scales), jnp.nan)


def _scale_bytes(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (high bytes, low bytes) of ``scales``, bfloat16 values in float32, as two uint8 arrays of equal shape.

    The bytes are the upper two bytes of each float32. They are separate arrays, since TPUs cannot cheaply interleave
    single bytes.
    """
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    return (bits >> 24).astype(jnp.uint8), (bits >> 16 & 0xFF).astype(jnp.uint8)


def _encoded(scaled: jax.Array, format_name: str) -> jax.Array:
    """Rounds values [..., r], already divided by their scales, to codes uint8 [..., r]: the bits of int8 or float8."""
    if format_name == "float8_e4m3fn":
        return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
    # Rounded first: the cast to an integer truncates.
    return lax.bitcast_convert_type(jnp.round(scaled).astype(jnp.int8), jnp.uint8)


def _decoded(codes: jax.Array, format_name: str) -> jax.Array:
    """Returns the numbers that uint8 codes [..., r] stand for, as float32 [..., r]; the inverse of ``_encoded``.

    The numbers are not yet multiplied by the scales.
    """
    if format_name == "float8_e4m3fn":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)

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
        """Returns the largest distance of ``unpack(pack(x))`` in float32 from x: half the distance of two codes.

        A few float32 roundings are added. In an integer format the error is at most a fraction of the block's largest
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
    """Returns the bytes of a packed row of ``size`` values: codes (padded to full blocks) and scales."""
    blocks, block = _blocks_of(size)
    return blocks * (block + _SCALE_BYTES)


def pack(values: jax.Array, format_name: str) -> jax.Array:
    """Packs real floats [..., r] into uint8 [..., packed_size(r)]."""
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
    """Unpacks uint8 [..., packed_size(size)] to [..., size] of ``dtype``; multiplies by scales in float32."""
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
    """Returns whether rows of this size have little padding if each row is packed by itself."""
    return 0 < -size % BLOCK_SIZE + size <= size * (1 + _MOST_PADDING)


def _blocks_of(size: int) -> tuple[int, int]:
    """Returns the number of blocks of a row, and the number of values in each."""
    block = min(BLOCK_SIZE, size)
    return (-(-size // block), block) if block else (0, BLOCK_SIZE)


def _scales_of(blocks: jax.Array, largest_code: float) -> jax.Array:
    """Returns scales [..., b] of blocks [..., b, 64]: bfloat16 values in float32; NaN if a block has inf or NaN."""
    largest = lax.reduce_max(jnp.abs(blocks), [blocks.ndim - 1])
    # Not by a cast to bfloat16 and back, which XLA may remove: the codes would then not match the scale that is sent.
    scales = lax.reduce_precision(largest / largest_code, exponent_bits=8, mantissa_bits=7)
    return jnp.where(jnp.isfinite(largest), jnp.where(scales < _TINY, 0, scales), jnp.nan)


def _scale_bytes(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns high and low bytes of scales separately, since TPUs cannot cheaply interleave single bytes."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    return (bits >> 24).astype(jnp.uint8), (bits >> 16 & 0xFF).astype(jnp.uint8)


def _encoded(scaled: jax.Array, format_name: str) -> jax.Array:
    """Returns uint8 codes [..., r] of values [..., r] in the range of the codes."""
    if format_name == "float8_e4m3fn":
        return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
    # Rounded first: the cast to an integer truncates.
    return lax.bitcast_convert_type(jnp.round(scaled).astype(jnp.int8), jnp.uint8)


def _decoded(codes: jax.Array, format_name: str) -> jax.Array:
    """Returns the values of uint8 codes, as float32 of the same shape [..., r], not yet times the scales."""
    if format_name == "float8_e4m3fn":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)

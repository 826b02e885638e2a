"""Floats packed into bytes, block by block: for what is sent or stored in 8 or 4 bits.

  pack     x[..., r]                   -->  uint8[..., packed_size(r)]    codes of the values, then scales of the blocks
  unpack   uint8[..., packed_size(r)]  -->  x[..., r]                     code times scale

Each row, along the last dim, is packed by itself, in blocks of ``BLOCK_SIZE`` values that follow each other. A scale is
the largest absolute value of its block, divided by the largest code; it is rounded to bfloat16 *before* the codes are
computed, so that it is exactly what ``unpack`` multiplies by. A row takes

  int8, float8_e4m3fn   r + 2 r / 64 bytes: 0.516 of bfloat16's
  int4                  r / 2 + 2 r / 64 bytes: 0.266 of bfloat16's

(a row of fewer than 64 values is one shorter block), and one array holds it all, so that a gather stays one collective.
Two 4-bit codes share a byte by arithmetic, not by a dtype of 4 bits, which some compilers widen on the wire.

The error of a value x in a block with the largest absolute value m is at most ``error_bound``. Zeros stay zeros. Where
m is below ``smallest``, all of the block becomes zero; where it is not finite, all of the block becomes NaN, so that a
NaN is never lost.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

BLOCK_SIZE = 64
_SCALE_BYTES = 2
_HALF_ULP = 2.0**-8  # of bfloat16, in which scales are rounded
_TINY = float(np.finfo(np.float32).tiny)  # smaller scales would be flushed to zero on some platforms, not on others


class Format(NamedTuple):
    """The codes of a format: their bits, the largest one, and the spacing relative to a code and next to zero."""

    bits: int
    largest: float
    relative_spacing: float
    least_spacing: float

    def error_bound(self, value: ArrayLike, block_largest: ArrayLike) -> np.ndarray:
        """How far ``unpack(pack(x))`` in float32 may be from x at most: half the distance of two codes.

        Beyond it lie a few float32 roundings. An integer format errs by at most a part of the block's largest value; a
        floating one by a part of the value itself, down to its smallest numbers.
        """
        scale = np.asarray(block_largest, np.float64) / self.largest * (1 + _HALF_ULP)
        return np.maximum(np.abs(value) * self.relative_spacing, scale * self.least_spacing) / 2

    @property
    def smallest(self) -> float:
        """Blocks whose largest absolute value is below this become zero."""
        return _TINY * self.largest


FORMATS = {
    "int8": Format(8, 127.0, 0.0, 1.0),
    "float8_e4m3fn": Format(8, 448.0, 2.0**-3, 2.0**-9),
    "int4": Format(4, 7.0, 0.0, 1.0),
}

# What ``pack`` and ``unpack`` are called in compiled programs, and the format of each.
PACK_SCOPES = {f"{way}_{name}": name for way in ("pack", "unpack") for name in FORMATS}


def packed_size(size: int, format_name: str) -> int:
    """Bytes of a row of ``size`` values, packed: their codes, up to a whole number of blocks, and the scales."""
    blocks, block = _blocks_of(size)
    return blocks * (block * FORMATS[format_name].bits // 8 + _SCALE_BYTES)


def pack(values: jax.Array, format_name: str) -> jax.Array:
    """Real floats [..., r] -> uint8 [..., packed_size(r)]."""
    with jax.named_scope(f"pack_{format_name}"):
        return _packed(values, format_name)


def _packed(values: jax.Array, format_name: str) -> jax.Array:
    *lead, size = values.shape
    count, block = _blocks_of(size)
    values = jnp.pad(values.astype(jnp.float32), [(0, 0)] * len(lead) + [(0, count * block - size)])
    blocks = values.reshape(*lead, count, block)
    scales = _scales_of(blocks, FORMATS[format_name].largest)
    scaled = blocks / jnp.where(scales == 0, 1, scales)[..., None]
    return jnp.concatenate([_encoded(scaled.reshape(*lead, count * block), format_name), *_scale_bytes(scales)], -1)


def unpack(packed: jax.Array, format_name: str, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """uint8 [..., packed_size(size)] -> [..., size] of ``dtype``; the product with the scale is taken in float32."""
    with jax.named_scope(f"unpack_{format_name}"):
        return _unpacked(packed, format_name, size, dtype)


def _unpacked(packed: jax.Array, format_name: str, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    *lead, packed_bytes = packed.shape
    count, block = _blocks_of(size)
    codes, high, low = jnp.split(packed, [packed_bytes - 2 * count, packed_bytes - count], -1)
    scales = lax.bitcast_convert_type((high.astype(jnp.uint32) << 24) | (low.astype(jnp.uint32) << 16), jnp.float32)
    values = _decoded(codes, format_name).reshape(*lead, count, block) * scales[..., None]
    return values.astype(dtype).reshape(*lead, count * block)[..., :size]


def _blocks_of(size: int) -> tuple[int, int]:
    """How many blocks a row has, and of how many values: an even number, as two 4-bit codes share a byte."""
    block = min(BLOCK_SIZE, size + size % 2)
    return (-(-size // block), block) if block else (0, BLOCK_SIZE)


def _scales_of(blocks: jax.Array, largest_code: float) -> jax.Array:
    """[..., b, 64] -> [..., b]: bfloat16 values in float32; NaN for a block with a value that is not finite."""
    largest = lax.reduce_max(jnp.abs(blocks), [blocks.ndim - 1])
    # No cast there and back, which XLA may leave out: codes would then belong to another scale than the one sent.
    scales = lax.reduce_precision(largest / largest_code, exponent_bits=8, mantissa_bits=7)
    return jnp.where(jnp.isfinite(largest), jnp.where(scales < _TINY, 0, scales), jnp.nan)


def _scale_bytes(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The high bytes and the low bytes of scales, apart: TPUs have no cheap way to lay single bytes side by side."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    return (bits >> 24).astype(jnp.uint8), (bits >> 16 & 0xFF).astype(jnp.uint8)


def _encoded(scaled: jax.Array, format_name: str) -> jax.Array:
    """[..., r], each within the codes' range -> uint8 [..., r] or, for 4 bits, [..., r / 2]."""
    if format_name == "float8_e4m3fn":
        return lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
    codes = lax.bitcast_convert_type(jnp.round(scaled).astype(jnp.int8), jnp.uint8)
    if format_name == "int8":
        return codes
    first, second = jnp.split(codes & 0xF, 2, -1)  # halves of the row: neighbours would have to change places
    return first | (second << 4)


def _decoded(codes: jax.Array, format_name: str) -> jax.Array:
    """The inverse of ``_encoded``: float32 [..., r]."""
    if format_name == "float8_e4m3fn":
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    if format_name == "int8":
        return lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    nibbles = jnp.concatenate([codes & 0xF, codes >> 4], -1).astype(jnp.int32)
    return ((nibbles ^ 8) - 8).astype(jnp.float32)  # the upper bit is the sign

"""Checksums of arrays, computed on the devices that hold them.

The words of an array, 32 bits each, are scrambled together with their positions, and summed modulo 2^32:

    checksum = sum_i  scramble(word_i, i)      scramble(., i) is one-to-one, so one changed word changes the sum

A sum modulo 2^32 is exact in every order. So the checksum does not depend on how an array is split over devices, each
device needs its shard alone, and what travels is one number. The two sums of two scrambles make 64 bits: other changes
(words exchanged, several words changed) go unseen in one of 2^64 cases. It guards against accidents, not intent.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.distributed.optimizers.offload import is_on_host

# The finalizer of MurmurHash3 (Austin Appleby, public domain), and a second one with the constants of "lowbias32" by
# Chris Wellons (public domain): (shift, factor, shift, factor, shift), each step one-to-one on 32 bits.
_SCRAMBLES = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x21F0AAAD, 15, 0x735A2D97, 15))
_STRIDE = 0x9E3779B9  # 2^32 over the golden ratio: it moves neighbouring positions far apart


def checksum(x: Any) -> jax.Array:
    """The checksum of an array of any dtype, typed PRNG keys included: uint32 [2]. Works on shards and global arrays.

    It depends on the bits: 0.0 and -0.0 differ, as do two NaN with different payloads. An array of no values has 0.
    """
    words = _words(x)
    return _sums(words, _positions(words.shape))


def checksum_of_part(x: Any, origin: jax.Array, strides: jax.Array) -> jax.Array:
    """What a part of an array, as a shard, adds to the checksum of the whole.

    Args:
      x: the part; it may have further dims for the words of an entry.
      origin: where in the array it begins, uint32 [ndim]; ``strides`` are those of the array, in entries modulo 2^32.
    """
    words = _words(x)
    own = words.shape[origin.size :]
    positions = jnp.broadcast_to(_positions(own), words.shape)
    for dim in range(origin.size):
        here = lax.broadcasted_iota(jnp.uint32, words.shape, dim) + origin[dim]
        positions += here * (strides[dim] * jnp.uint32(math.prod(own) % 2**32))
    return _sums(words, positions)


def _sums(words: jax.Array, positions: jax.Array) -> jax.Array:
    positions = positions * jnp.uint32(_STRIDE)
    return jnp.stack([jnp.sum(_scrambled(words + positions, steps), dtype=jnp.uint32) for steps in _SCRAMBLES])


def _scrambled(words: jax.Array, steps: tuple[int, ...]) -> jax.Array:
    """One-to-one on uint32. The first step keeps a word of 0 at position 0 from counting as nothing."""
    first, factor, second, other, last = steps
    words = words ^ jnp.uint32(factor)
    words = (words ^ (words >> first)) * jnp.uint32(factor)
    words = (words ^ (words >> second)) * jnp.uint32(other)
    return words ^ (words >> last)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """The position of every entry in row-major order, modulo 2^32."""
    positions = jnp.zeros(shape, jnp.uint32)
    for dim in range(len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        positions += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    return positions


def _words(x: Any) -> jax.Array:
    """The bits of an array as uint32, with one dim more where an entry has several words."""
    x = jnp.asarray(x)
    x = jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits
    if bits >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)

"""Checksums of arrays, computed on the devices of the arrays.

The 32-bit words of an array are scrambled together with their positions, and summed modulo 2^32:

    checksum = sum_i  scramble(word_i, i)      scramble(., i) is one-to-one, so one changed word changes the sum

A sum modulo 2^32 is exact in every order. So the checksum does not depend on the sharding of an array: each device
sums its shard, and only the sum is sent. Two sums with different scrambles make 64 bits: a change of several words
(for example two exchanged words) is missed with probability 2^-64. The checksum guards against accidents, not intent.

``checksum_each`` is for arrays that are not donated during the call. ``SavedSums`` sums the arrays of a save without
blocking the training thread:

  in save        captures the bits of each shard that this process stores
                   on an accelerator   the device starts to compute the checksum, and finishes before any later step
                   on a CPU            a view of the memory: donation does not overwrite memory that has a view
  in background  computes the checksums of the views and sums the checksums of this process, modulo 2^32; process 0
                 adds the sums of every process, and writes the record

Each shard of an array has one copy with ``replica_id`` 0, which is summed by the process of the copy. No collective is
used: the devices may already run the next step, with whose collectives a concurrent collective could deadlock.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from xlstm_jax.distributed.checkpoint.backend import Arrays
from xlstm_jax.distributed.data_parallel.trees import is_on_host
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.distributed.processes.store import KeyValueStore, digest, named
from xlstm_jax.private_names import job

Sums = dict[str, list[int]]  # by path

# The finalizer of MurmurHash3 (Austin Appleby, public domain), and the same steps with the constants of "lowbias32" by
# Chris Wellons (public domain): (shift, factor, shift, factor, shift). Each step is one-to-one on 32 bits.
_SCRAMBLES = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x21F0AAAD, 15, 0x735A2D97, 15))
_STRIDE = 0x9E3779B9  # 2^32 divided by the golden ratio, to spread neighbouring positions


def checksum(x: Any) -> jax.Array:
    """Returns the checksum of an array, uint32 [2]. Any dtype is accepted, PRNG keys included.

    Inside ``shard_map`` the result is the checksum of the local shard. The checksum depends on the bits: 0.0 and -0.0
    differ, and so do two NaN with different payloads. The checksum of an empty array is [0, 0].
    """
    return checksum_of_part(x, np.zeros(jnp.ndim(x), np.uint32), _strides(jnp.shape(x)))


def checksum_of_part(x: Any, origin: Any, strides: Any) -> jax.Array:
    """Returns the summand of a part, such as a shard, in the checksum of the global array: uint32 [2].

    The summands of parts that cover each entry once add up, modulo 2^32, to ``checksum`` of the global array.

    Args:
      x: the part. If ``x`` has more than ``origin.size`` dims, the further dims contain the 32-bit words of each entry.
      origin: index of the first entry of the part in the global array, uint32 [ndim].
      strides: row-major strides of the global array, in entries modulo 2^32.
    """
    words = _words(x)
    word_dims = words.shape[origin.size :]  # dims of the words of one entry
    begins = [*origin, *[jnp.uint32(0) for _ in word_dims]]
    strides = [*(strides * np.uint32(math.prod(word_dims))), *_strides(word_dims)]
    positions = jnp.zeros(words.shape, jnp.uint32)  # in row-major order, modulo 2^32
    for dim in range(words.ndim):
        positions += (lax.broadcasted_iota(jnp.uint32, words.shape, dim) + begins[dim]) * strides[dim]
    # With positions 0, 1, ... the words (5, 5) and (6, 4) would have equal checksums: `word + position` is {5, 6} for
    # both.
    positions = positions * jnp.uint32(_STRIDE)
    return jnp.stack([jnp.sum(_scrambled(words + positions, steps), dtype=jnp.uint32) for steps in _SCRAMBLES])


def _strides(shape: Sequence[int]) -> np.ndarray:
    return np.array([math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))], np.uint32)


def _scrambled(words: jax.Array, steps: tuple[int, ...]) -> jax.Array:
    """Scrambles each uint32 word by xor, shifts and products; returns an array of the same shape.

    The map from word to result is one-to-one. ``steps`` is (shift, factor, shift, factor, shift), an entry of
    ``_SCRAMBLES``.
    """
    first, factor, second, other, last = steps
    # Without this line a word 0 at position 0 would contribute 0, and its loss would be undetected.
    words = words ^ jnp.uint32(factor)
    words = (words ^ (words >> first)) * jnp.uint32(factor)
    words = (words ^ (words >> second)) * jnp.uint32(other)
    return words ^ (words >> last)


def _words(x: Any) -> jax.Array:
    """Returns the bits of an array as uint32 words, in the shape of the array.

    Entries of 8 or 16 bits, and bools, become one word each. If an entry has several words (64 bits, a complex number,
    a PRNG key), additional trailing dims contain the words of the entry.
    """
    x = jnp.asarray(x)
    # XLA computes only in device memory, and the arrays of an offloaded optimizer are in host memory.
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
    # Through integers of the same width: a bitcast from 8 or 16 to 32 bits would combine several values.
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def checksum_each(arrays: Arrays) -> Sums:
    """Returns the checksum of each array, two integers below 2^32, by path; computed on the devices.

    A program on all devices of an array computes the checksum of the global array, and each device gets a result.
    Results differ if devices hold different replicas: if the results of the devices of this process differ, the
    checksum is []. Every process must call this function with the same paths, unless all arrays are local to the
    process, such as NumPy arrays.
    """
    # One program per dtype, shape and sharding, run one after the other. A single program for every leaf would compile
    # each leaf of a deep model separately; several programs in flight can deadlock on simulated devices.
    sums: Sums = {}
    for path, array in arrays.items():
        checksums = checksum_program(array)(_as_words(array))
        # Each device sums its local copy, which may have been read from a local disk of its host.
        first, *others = [np.asarray(shard.data).tolist() for shard in checksums.addressable_shards]
        sums[path] = [] if any(other != first for other in others) else first
    return sums


def checksum_program(array: Any) -> Callable[[Any], jax.Array]:
    """Returns a jitted function from an array to its ``checksum``, for arrays on the same devices as ``array``.

    The result of the function is the checksum of the global array, uint32 [2], replicated on the devices of ``array``.
    If ``array`` is a NumPy array, the function runs on the default device.
    """
    # Replicated, because each process reads the result from its local devices.
    sharding = array.sharding if isinstance(array, jax.Array) else None
    return _checksum_to(
        NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    )


@lru_cache(maxsize=16)
def _checksum_to(sharding: Sharding | None) -> Callable[[Any], jax.Array]:
    return jax.jit(checksum, out_shardings=sharding)


def _as_words(array: Any) -> Any:
    """Converts a NumPy array with entries above 4 bytes to uint32 words; returns any other array unchanged.

    The words of an entry are in an additional trailing dim: float64 [3] becomes uint32 [3, 2]. The conversion is needed
    because JAX without x64 truncates values of 64 bits.
    """
    if isinstance(array, jax.Array) or array.dtype.itemsize <= 4:
        return array
    return np.ascontiguousarray(array[..., None]).view(np.uint32)


# ---------------------------------------------------------------------------------------------- what is being saved


class _Part(NamedTuple):
    path: str
    held: Any  # a view of memory, or a (pending) checksum on a device
    origin: np.ndarray
    strides: np.ndarray
    is_view: bool


class SavedSums:
    """Checksums of arrays at construction time; later donation of the buffers does not change the checksums.

    The background thread of the save calls ``result``, which waits until the training thread has called ``begin``.

    Args:
      arrays: placed arrays, by path.
      timeout_s: seconds to wait for the sums of other processes.
      place: name of the target directory, equal in every process. Saves to different places run concurrently, and in
        an order that may differ between processes; saves to the same place run one after the other.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], timeout_s: float, place: str) -> None:
        self._paths, self._timeout_s = list(arrays), timeout_s
        several = jax.process_count() > 1
        kind = f"checksums/{digest(place)}"
        self._store = KeyValueStore(kind, job.process_id, range(job.num_processes)) if several else None
        self._parts = [part for path, array in arrays.items() for part in _parts(path, array)]
        self._begun = threading.Event()

    def begin(self) -> None:
        """Unblocks ``result``. Call ``begin`` when the backend has copied the shards to the host.

        Before, the computation of checksums would compete with these copies for CPU cores.
        """
        self._begun.set()

    def result(self) -> Sums:
        """Returns checksums by path, two integers below 2^32 each; waits for ``begin`` before.

        In process 0 the checksums are of the global arrays. In any other process they are sums over the shards that
        this process saves, which the process has sent to process 0. Every process must call ``result``, once.

        Raises:
          TimeoutError: in process 0, the sums of a process did not arrive in time.
        """
        self._begun.wait()
        sums = {path: [0, 0] for path in self._paths}
        while self._parts:
            # Removed from the list, to release the view: JAX cannot reuse the memory of a buffer that has a view.
            part = self._parts.pop()
            summand = _sums_of_part(_as_words(part.held), part.origin, part.strides) if part.is_view else part.held
            _add(sums, part.path, np.asarray(summand).tolist())
        return sums if self._store is None else self._of_all(sums, self._store)

    def _of_all(self, sums: Sums, store: KeyValueStore) -> Sums:
        """Returns the checksums of the global arrays in process 0: the ``sums`` of every process, added modulo 2^32.

        Any other process posts ``sums`` to the key-value store of the job, and returns ``sums``. Process 0 changes
        ``sums`` in place, and raises a ``TimeoutError`` if the sums of a process do not arrive in time.
        """
        # Through the key-value store of the job, because training steps with collectives are in flight.
        deadline = time.monotonic() + self._timeout_s

        if store.me != 0:
            store.post(f"sums/{store.me}", json.dumps(sums))
            return sums
        for process in store.processes[1:]:
            text = store.read(f"sums/{process}", deadline)
            if text is None:
                raise TimeoutError(f"the checksums of {named([process])} did not come within {self._timeout_s:g} s.")
            for path, addends in json.loads(text).items():
                _add(sums, path, addends)
        store.delete_previous()
        return sums


def _add(sums: Sums, path: str, addends: list[int]) -> None:
    sums[path] = [(ours + other) % 2**32 for ours, other in zip(sums[path], addends, strict=True)]


_sums_of_part = jax.jit(checksum_of_part)


def is_in_host_memory(device: Device) -> bool:
    return device.platform == "cpu"


def _parts(path: str, array: jax.Array) -> list[_Part]:
    """Returns a ``_Part`` (data of a shard, and its position in the array) for each shard that this process sums.

    These are the local shards of ``array`` with ``replica_id`` 0, without shards of size 0. On a CPU the data are a
    view of the shard's memory. On an accelerator the data are the summand of the shard in the checksum, uint32 [2],
    whose computation on the device has been started. ``path``, the path of the array, is a field of each ``_Part``.
    """
    parts, strides = [], _strides(array.shape)
    for shard in array.addressable_shards:
        # Only the copy of a shard with replica_id 0 counts, so that each word is summed once in the job.
        if shard.replica_id == 0 and shard.data.size:
            # Modulo 2^32, like positions: NumPy raises for a uint32 of a larger Python number.
            origin = np.array([place.start or 0 for place in shard.index], np.uint64).astype(np.uint32)
            is_view = is_in_host_memory(shard.device)
            view_or_sums = np.asarray(shard.data) if is_view else _sums_of_part(shard.data, origin, strides)
            parts.append(_Part(path, view_or_sums, origin, strides, is_view))
    return parts

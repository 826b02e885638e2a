"""Checksums of arrays, computed on the devices that hold them.

The words of an array, 32 bits each, are scrambled together with their positions, and summed modulo 2^32:

    checksum = sum_i  scramble(word_i, i)      scramble(., i) is one-to-one, so one changed word changes the sum

A sum modulo 2^32 is exact in every order. So the checksum does not depend on how an array is split over devices: each
device sums its own shard, and only this sum travels. Two sums with different scrambles make 64 bits: other changes
(words exchanged, several words changed) go unseen in one of 2^64 cases. It guards against accidents, not intent.

``checksum_each`` is for arrays that nobody donates. ``SavedSums`` sums the arrays of a save without holding up the
training thread:

  in save        the bits of each shard that this process stores are held as they are now
                   on an accelerator   the device starts to compute the checksum, and ends before any later step
                   on a CPU            a view of its memory: no donation overwrites memory that has a view
  in background  the checksums of the views; the sum of all checksums of this process, modulo 2^32; process 0 adds up
                 the sums of all processes, and writes the record

Each part of an array has one copy with ``replica_id`` 0, and the process that holds this copy sums it. There is no
collective: the devices may be in the next step, whose collectives wait for each other.
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
from xlstm_jax.distributed.data_parallel.placement import is_on_host
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.distributed.processes.store import KeyValueStore, digest, named
from xlstm_jax.private_names import job

Sums = dict[str, list[int]]  # by path

# The finalizer of MurmurHash3 (Austin Appleby, public domain), and a second one with the constants of "lowbias32" by
# Chris Wellons (public domain): (shift, factor, shift, factor, shift), each step one-to-one on 32 bits.
_SCRAMBLES = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x21F0AAAD, 15, 0x735A2D97, 15))
_STRIDE = 0x9E3779B9  # 2^32 over the golden ratio: it moves neighbouring positions far apart


def checksum(x: Any) -> jax.Array:
    """The checksum of an array of any dtype, typed PRNG keys included: uint32 [2]. Works on shards and global arrays.

    It depends on the bits: 0.0 and -0.0 differ, as do two NaN with different payloads. An array of no values has 0.
    """
    return checksum_of_part(x, np.zeros(jnp.ndim(x), np.uint32), _strides(jnp.shape(x)))


def checksum_of_part(x: Any, origin: Any, strides: Any) -> jax.Array:
    """What a part of an array (a shard, say) adds to the checksum of the whole array.

    Args:
      x: the part; it may have further dims for the words of an entry.
      origin: where in the array the part begins, uint32 [ndim].
      strides: those of the whole array, in entries modulo 2^32.
    """
    words = _words(x)
    own = words.shape[origin.size :]  # the dims of the words of one entry
    begins = [*origin, *[jnp.uint32(0) for _ in own]]
    strides = [*(strides * np.uint32(math.prod(own))), *_strides(own)]
    positions = jnp.zeros(words.shape, jnp.uint32)  # in row-major order, modulo 2^32
    for dim in range(words.ndim):
        positions += (lax.broadcasted_iota(jnp.uint32, words.shape, dim) + begins[dim]) * strides[dim]
    # With positions 0, 1, ... the words (5, 5) and (6, 4) would have one checksum, since both give {5, 6} as `word +
    # position`.
    positions = positions * jnp.uint32(_STRIDE)
    return jnp.stack([jnp.sum(_scrambled(words + positions, steps), dtype=jnp.uint32) for steps in _SCRAMBLES])


def _strides(shape: Sequence[int]) -> np.ndarray:
    return np.array([math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))], np.uint32)


def _scrambled(words: jax.Array, steps: tuple[int, ...]) -> jax.Array:
    """A mapping of uint32 to uint32 that is one-to-one."""
    first, factor, second, other, last = steps
    # Without this line a word of 0 at position 0 would add nothing, and its loss would go unseen.
    words = words ^ jnp.uint32(factor)
    words = (words ^ (words >> first)) * jnp.uint32(factor)
    words = (words ^ (words >> second)) * jnp.uint32(other)
    return words ^ (words >> last)


def _words(x: Any) -> jax.Array:
    """The bits of an array as uint32, with one dim more where an entry has several words."""
    x = jnp.asarray(x)
    # XLA computes in device memory only, and the arrays of an offloaded optimizer lie in host memory.
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
    # Through integers of the same width: a bitcast from 8 or 16 to 32 bits would take several values together.
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def checksum_each(arrays: Arrays) -> Sums:
    """The checksum of every array, from shards where they are; [] where devices have read copies that differ."""
    # One program for each dtype, shape and sharding, run one after the other. A single program for all leaves would
    # compile each leaf of a deep model anew; several in flight can wait for each other for ever on simulated devices.
    sums: Sums = {}
    for path, array in arrays.items():
        found = checksum_program(array)(_as_words(array))
        # Each device sums the copy that it has read itself, perhaps from the disk of its own host.
        first, *others = [np.asarray(shard.data).tolist() for shard in found.addressable_shards]
        sums[path] = [] if any(other != first for other in others) else first
    return sums


def checksum_program(array: Any) -> Callable[[Any], jax.Array]:
    """``checksum``, compiled for an array: its result goes to all devices of the array."""
    # To all, since each process reads the result on its own devices.
    sharding = array.sharding if isinstance(array, jax.Array) else None
    return _checksum_to(
        NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    )


@lru_cache(maxsize=16)
def _checksum_to(sharding: Sharding | None) -> Callable[[Any], jax.Array]:
    return jax.jit(checksum, out_shardings=sharding)


def _as_words(array: Any) -> Any:
    """A NumPy array of 64-bit values as pairs of 32 bits: JAX would cut the values, unless it has 64 bits enabled."""
    if isinstance(array, jax.Array) or array.dtype.itemsize <= 4:
        return array
    return np.ascontiguousarray(array[..., None]).view(np.uint32)


# ---------------------------------------------------------------------------------------------- what is being saved


class _Part(NamedTuple):
    path: str
    held: Any  # a view of memory, or a checksum that a device computes
    origin: np.ndarray
    strides: np.ndarray
    is_view: bool


class SavedSums:
    """The checksums of arrays as they are when this object is made, whatever becomes of their buffers afterwards.

    The save's background thread calls ``result``, which waits until the training thread has called ``begin``.

    Args:
      arrays: placed arrays, by path.
      timeout_s: how long processes wait for the sums of the others.
      place: where the arrays are saved, by a name that all processes have. Saves to several places go on at once, and
        not in the same order in all processes; those to one place go on one after the other.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], timeout_s: float, place: str) -> None:
        self._paths, self._timeout_s = list(arrays), timeout_s
        several = jax.process_count() > 1
        kind = f"checksums/{digest(place)}"
        self._store = KeyValueStore(kind, job.process_id, range(job.num_processes)) if several else None
        self._parts = [part for path, array in arrays.items() for part in _parts(path, array)]
        self._begun = threading.Event()

    def begin(self) -> None:
        """Lets ``result`` go on. Earlier it would take cores from the thread that copies shards to the host."""
        self._begun.set()

    def result(self) -> Sums:
        """The checksums: in process 0 of the arrays, elsewhere of the shards held there. All call it, once."""
        self._begun.wait()
        sums = {path: [0, 0] for path in self._paths}
        while self._parts:
            # Popped, to let go of the view: JAX cannot reuse a buffer's memory while it has one.
            part = self._parts.pop()
            found = _sums_of_part(_as_words(part.held), part.origin, part.strides) if part.is_view else part.held
            _add(sums, part.path, np.asarray(found).tolist())
        return sums if self._store is None else self._of_all(sums, self._store)

    def _of_all(self, own: Sums, store: KeyValueStore) -> Sums:
        # Through the job's store, not a collective: training steps with collectives of their own are in flight.
        deadline = time.monotonic() + self._timeout_s

        if store.me != 0:
            store.post(f"sums/{store.me}", json.dumps(own))
            return own
        for process in store.processes[1:]:
            text = store.read(f"sums/{process}", deadline)
            if text is None:
                raise TimeoutError(f"the checksums of {named([process])} did not come within {self._timeout_s:g} s.")
            for path, found in json.loads(text).items():
                _add(own, path, found)
        store.delete_previous()
        return own


def _add(sums: Sums, path: str, found: list[int]) -> None:
    sums[path] = [(one + other) % 2**32 for one, other in zip(sums[path], found, strict=True)]


_sums_of_part = jax.jit(checksum_of_part)


def is_in_host_memory(device: Device) -> bool:
    return device.platform == "cpu"


def _parts(path: str, array: jax.Array) -> list[_Part]:
    parts, strides = [], _strides(array.shape)
    for shard in array.addressable_shards:
        # Of all copies of a shard the one with replica_id 0 counts, so that each word is summed once in the job.
        if shard.replica_id == 0 and shard.data.size:
            # Cut modulo 2^32, as positions are: NumPy refuses to make a uint32 of a larger number.
            origin = np.array([place.start or 0 for place in shard.index], np.uint64).astype(np.uint32)
            is_view = is_in_host_memory(shard.device)
            held = np.asarray(shard.data) if is_view else _sums_of_part(shard.data, origin, strides)
            parts.append(_Part(path, held, origin, strides, is_view))
    return parts

"""Checksums of the arrays that are being saved, without holding up the training thread.

  in save        the bits of each shard that this process stores are held as they are now
                   on an accelerator   the device starts to compute the checksum, and ends before any later step
                   on a CPU            a view of its memory: no donation overwrites memory that has a view
  in background  the checksums of the views; the sum of all checksums of this process, modulo 2^32; process 0 adds up
                 the sums of all processes

Each part of an array has one copy with ``replica_id`` 0, and the process that holds this copy sums it. There is no
collective: the devices may be in the next step, whose collectives wait for each other.
"""

import json
import math
import threading
import time
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed

from xlstm_jax.distributed.checkpoint.checksums import checksum_of_part
from xlstm_jax.distributed.checkpoint.record import as_words
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.distributed.processes.store import Store, named

Sums = dict[str, list[int]]  # by path


class _Part(NamedTuple):
    path: str
    held: Any  # a view of memory, or a checksum that a device computes
    origin: np.ndarray
    strides: np.ndarray
    is_view: bool


class SavedSums:
    """Holds what is to be summed from its making on; ``begin`` lets the background begin, ``result`` waits for it.

    Args:
      arrays: placed arrays, by path.
      timeout_s: how long process 0 waits for the sums of the others.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], timeout_s: float) -> None:
        self._paths, self._timeout_s = list(arrays), timeout_s
        self._parts = [part for path, array in arrays.items() for part in _parts(path, array)]
        self._begun = threading.Event()

    def begin(self) -> None:
        """Lets ``result`` begin; until then it would take cores from a thread that copies shards to the host."""
        self._begun.set()

    def result(self) -> Sums:
        """The checksums of the arrays; in process 0, the others have their own part of them. Called once."""
        self._begun.wait()
        sums = {path: [0, 0] for path in self._paths}
        while self._parts:
            part = self._parts.pop()  # and let go of the view
            found = _program()(as_words(part.held), part.origin, part.strides) if part.is_view else part.held
            _add(sums, part.path, np.asarray(found).tolist())
        return sums if jax.process_count() == 1 else self._of_all(sums)

    def _of_all(self, own: Sums) -> Sums:
        state: Any = distributed.global_state
        store = Store("checksums", state.process_id, range(state.num_processes))
        if state.process_id != 0:
            store.post(f"sums/{state.process_id}", json.dumps(own))
            return own
        deadline = time.monotonic() + self._timeout_s
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


@cache
def _program() -> Any:
    return jax.jit(checksum_of_part)


def _is_in_host_memory(device: Device) -> bool:
    return device.platform == "cpu"


def _parts(path: str, array: jax.Array) -> list[_Part]:
    shape = array.shape
    strides = np.array([math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))], np.uint32)
    parts = []
    for shard in array.addressable_shards:
        if shard.replica_id == 0 and shard.data.size:
            origin = np.array([place.start or 0 for place in shard.index], np.uint64).astype(np.uint32)
            is_view = _is_in_host_memory(shard.device)
            held = np.asarray(shard.data) if is_view else _program()(shard.data, origin, strides)
            parts.append(_Part(path, held, origin, strides, is_view))
    return parts

"""The backend of near checkpoints: each process writes the shards of its devices to a folder of its own.

    <step>/shards.zip     each shard once: its bits, named "<path>@<begin>:<end>,..."; the zip has a CRC-32 of each
    <step>/record.json    the record, the same in all processes, with the checksums of whole leaves

The bits of any dtype are stored as they are, neither compressed nor copied once more: a save holds the shards and
nothing else. A step is written under another name and renamed when it is on disk.
"""

import json
import shutil
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from xlstm_jax.distributed.checkpoint.backend import Arrays, Directory, Json
from xlstm_jax.distributed.checkpoint.checksums import is_in_host_memory
from xlstm_jax.distributed.checkpoint.folders import RECORD, SHARDS, UNFINISHED, keep_newest, new_folder, steps_of

_PIECE_BYTES = 2**22  # read at once
Bounds = tuple[tuple[int, int], ...]  # of a shard in its array: begin and end along each dim


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(place.indices(size)[:2] for place, size in zip(index, shape, strict=True))


class ShardFiles:
    """A ``Backend`` whose directory is another one in each process.

    ``copy`` is called with a step as soon as it is on disk; the save is over when it returns.
    """

    record_file = RECORD

    def __init__(
        self,
        directory: Directory,
        max_to_keep: int | None,
        timeout_s: int,
        *,
        copy: Callable[[int], None] = lambda step: None,
    ) -> None:
        del timeout_s
        self._directory, self._max_to_keep, self._copy = Path(directory), max_to_keep, copy
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f"*{UNFINISHED}"):
            shutil.rmtree(left)

    def check_dtypes(self, arrays: Arrays) -> None:
        del arrays  # bits are bits

    def save(self, step: int, arrays: Arrays, record: Callable[[], Json]) -> None:
        # By name, so that a shard that several devices hold is written once.
        shards: dict[str, np.ndarray | jax.Array] = {}
        for path, array in arrays.items():
            if isinstance(array, jax.Array):
                parts = {bounds_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
            else:
                parts = {tuple((0, size) for size in array.shape): array}
            shards |= {_name(path, bounds): data for bounds, data in parts.items()}
        # All copies begin before the first is waited for.
        for data in shards.values():
            if not isinstance(data, np.ndarray) and not all(map(is_in_host_memory, data.devices())):
                data.copy_to_host_async()
        # On a CPU a view of the device's memory, which a donation then leaves alone; else a copy on the host.
        held = [(name, np.asarray(data)) for name, data in shards.items()]
        self._thread = threading.Thread(target=self._write, args=(step, held, record), daemon=True)
        self._thread.start()

    def _write(self, step: int, held: list[tuple[str, np.ndarray]], record: Callable[[], Json]) -> None:
        try:
            with new_folder(self._directory / str(step)) as folder:
                with zipfile.ZipFile(folder / SHARDS, "w") as file:
                    # Popped, so that the memory of a shard is free again when the shard is written.
                    while held:
                        name, data = held.pop()
                        with file.open(name, "w", force_zip64=True) as member:
                            member.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
                (folder / RECORD).write_text(json.dumps(record()))
            self._copy(step)
            keep_newest(self._directory, self._max_to_keep)
        except BaseException as error:  # `wait` raises it
            self._error = error

    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._thread = None

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        return steps_of(self._directory)

    def read_record(self, step: int) -> Json:
        return json.loads((self._directory / str(step) / RECORD).read_text())

    def read_arrays(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        with zipfile.ZipFile(self._directory / str(step) / SHARDS) as file:

            def read(path: str, like: jax.ShapeDtypeStruct, index: tuple[slice, ...]) -> np.ndarray:
                bounds = bounds_of(index, like.shape)
                shard = np.empty([end - begin for begin, end in bounds], like.dtype)
                into, begin = shard.reshape(-1).view(np.uint8), 0
                with file.open(_name(path, bounds)) as member:
                    while piece := member.read(_PIECE_BYTES):  # the end of the member compares its CRC-32
                        into[begin : begin + len(piece)] = np.frombuffer(piece, np.uint8)
                        begin += len(piece)
                if begin != shard.nbytes:
                    raise ValueError(f"'{path}' has {begin} bytes and not the {shard.nbytes} of its shard")
                return shard

            def array(path: str, like: jax.ShapeDtypeStruct) -> np.ndarray | jax.Array:
                if like.sharding is None:
                    return read(path, like, tuple(slice(None) for _ in like.shape))
                shards: dict[Bounds, np.ndarray] = {}  # several devices may have one shard

                def part(index: tuple[slice, ...] | None) -> np.ndarray:
                    assert index is not None
                    bounds = bounds_of(index, like.shape)
                    shards[bounds] = shards[bounds] if bounds in shards else read(path, like, index)
                    return shards[bounds]

                return jax.make_array_from_callback(like.shape, like.sharding, part)

            return {path: array(path, like) for path, like in wanted.items()}


def _name(path: str, bounds: Bounds) -> str:
    return f"{path}@{','.join(f'{begin}:{end}' for begin, end in bounds)}"

"""Backend that stores steps with orbax: the arrays in ``<step>/state``, the record in ``<step>/leaves``."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from xlstm_jax.distributed.checkpoint.backend import Arrays, Directory, Json
from xlstm_jax.formatting import how_to_install

# Size of a chunk of a saved array. A device reads full chunks. With small chunks a device reads little more than its
# shard, even of a leaf that was saved unsharded.
CHUNK_BYTES = 2**24
# Limits of host memory of a save in addition to the shards: leaves being encoded, and files being written. The defaults
# of orbax are 96 GB of leaves, and files of 2 GB.
ENCODED_BYTES = 2**26
FILE_BYTES = 2**26
SLICED_BYTES = 2**20  # devices that hold the same shard each write a slice, if a slice has as many bytes or more
OTHER_READS_TIMEOUT_S = 10.0  # maximum time that a failed read waits for concurrent reads


def orbax() -> Any:
    """Returns the module ``orbax.checkpoint``, an optional dependency whose import takes a second.

    Raises an ``ImportError`` with instructions to install orbax if orbax is missing.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"checkpoints are made with orbax: {how_to_install('checkpoint')}.") from error
    return orbax.checkpoint


class OrbaxBackend:
    """A ``Backend`` that saves with orbax's ``CheckpointManager``, which writes in the background.

    Reads use orbax's handlers directly, independently in each process: the manager would wait for every process at a
    barrier, and a process that could not read its shards would never reach the barrier.
    """

    record_file = "leaves/metadata"  # named by orbax's JSON handler

    def __init__(self, directory: Directory, max_to_keep: int | None, timeout_s: int) -> None:
        self._directory, self._max_to_keep, self._timeout_s = directory, max_to_keep, timeout_s
        self._manager: Any = None

    def open(self) -> None:
        """Opens orbax's ``CheckpointManager``, before a save.

        If the manager is already open, it lists the steps of the directory again.
        """
        if self._manager is not None:
            self._manager.reload()
            return
        options = orbax().CheckpointManagerOptions(
            max_to_keep=self._max_to_keep,
            cleanup_tmp_directories=True,
            # The manager skips step metadata, which are unused here and may be missing in a damaged step.
            lightweight_initialize=True,
            async_options=orbax().options.AsyncOptions(timeout_secs=self._timeout_s),
        )
        writers = orbax().PyTreeCheckpointHandler(type_handler_registry=_throttled_writers())
        handlers = {"state": writers, "leaves": _deferred_json().handler()}
        self._manager = orbax().CheckpointManager(self._directory, options=options, item_handlers=handlers)

    def check_dtypes(self, arrays: Arrays) -> None:
        """Raises a ``TypeError`` for an array whose dtype TensorStore cannot store; names the path of the array.

        Without this check orbax would raise in the background.
        """
        import tensorstore  # a dependency of orbax

        for path, array in arrays.items():
            try:
                tensorstore.dtype(str(array.dtype))
            except (TypeError, ValueError) as error:
                raise TypeError(f"'{path}' has the dtype {array.dtype}, which cannot be stored; cast it.") from error

    def save(self, step: int, arrays: Arrays, record: Callable[[], Json]) -> None:
        args, tree = orbax().args, unflatten_dict(arrays, sep="/")
        chunks = jax.tree.map(lambda _: orbax().SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
        state = args.PyTreeSave(tree, save_args=chunks, ocdbt_target_data_file_size=FILE_BYTES)
        parts = args.Composite(state=state, leaves=_deferred_json().args(record))
        # The checkpointer decides which steps are due; without `force` the manager might skip a step.
        self._manager.save(step, args=parts, force=True)

    def is_saving(self) -> bool:
        saving: bool = self._manager.is_saving_in_progress()
        return saving

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def latest_step(self) -> int | None:
        newest: int | None = self._manager.latest_step()
        return newest

    def steps(self) -> list[int]:
        if not self._directory.exists():
            return []
        return [entry.step for entry in orbax().step.standard_name_format().find_all(self._directory)]

    def read_record(self, step: int) -> Json:
        return orbax().JsonCheckpointHandler().restore(self._directory / str(step) / "leaves")

    def read_arrays(self, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
        """Returns the arrays of a step at the paths of ``wanted``, by path.

        Each array has the sharding of its ``ShapeDtypeStruct``; without a sharding the result is a NumPy array.
        """
        if not wanted:
            return {}

        def restore_args(struct: jax.ShapeDtypeStruct) -> Any:
            if struct.sharding is None:
                return orbax().RestoreArgs(restore_type=np.ndarray)
            # Without a sharding orbax would use the sharding in the checkpoint, whose mesh may not exist here.
            return orbax().ArrayRestoreArgs(sharding=struct.sharding, global_shape=struct.shape, dtype=struct.dtype)

        tree = unflatten_dict(wanted, sep="/")
        restore = orbax().args.PyTreeRestore(tree, restore_args=jax.tree.map(restore_args, tree), partial_restore=True)
        handler = orbax().PyTreeCheckpointHandler(type_handler_registry=_retrying_readers())
        return flatten_dict(handler.restore(self._directory / str(step) / "state", args=restore), sep="/")


class _DeferredJson(NamedTuple):
    handler: type[Any]
    args: type[Any]


@cache
def _deferred_json() -> _DeferredJson:
    """Returns two classes for orbax that write JSON which a function computes in the background: (handler, arguments).

    ``arguments(item=f)`` is passed to orbax's save. The handler calls ``f()`` in the background, and writes the JSON
    value that ``f`` returns. The library writes the record of a step so: the record has checksums, and ``save`` does
    not have to wait for their computation.
    """
    ocp = orbax()
    json_handler: type[Any] = ocp.JsonCheckpointHandler
    checkpoint_args: type[Any] = ocp.args.CheckpointArgs

    class DeferredJsonHandler(json_handler):  # type: ignore[misc]  # mypy: a variable
        async def _save_fn(self, content: Callable[[], Json], directory: Directory) -> None:
            await super()._save_fn(content(), directory)

    @ocp.args.register_with_handler(DeferredJsonHandler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class DeferredJsonSave(checkpoint_args):  # type: ignore[misc]  # mypy: a variable
        item: Callable[[], Json]

    return _DeferredJson(DeferredJsonHandler, DeferredJsonSave)


class _ConcurrentReads:
    """Concurrent reads in an event loop."""

    def __init__(self) -> None:
        self.others = asyncio.all_tasks()  # tasks that wait for the readers
        self.readers = 0  # number of running readers, which may start further reads

    async def finish(self) -> None:
        deadline = time.monotonic() + OTHER_READS_TIMEOUT_S
        while (self.readers or asyncio.all_tasks() - self.others) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


@cache
def _retrying_readers() -> Any:
    """Returns orbax's readers of arrays, changed so that a failed reader waits for concurrent reads and then raises.

    The result is a registry of orbax's type handlers, for ``jax.Array`` and NumPy arrays. A failed reader waits at most
    ``OTHER_READS_TIMEOUT_S``. Without the change, orbax closes the event loop while concurrent reads are running, and
    each running read then writes to stderr: a damaged file shared by many leaves produced a hundred lines. To wait only
    for the tasks that exist at the failure is not enough, because the second reader may start further tasks.
    """
    handlers, reads_of = orbax().type_handlers, WeakKeyDictionary[asyncio.AbstractEventLoop, _ConcurrentReads]()

    def patient(reader: type[Any]) -> Any:
        class Retrying(reader):  # type: ignore[misc]  # mypy: a variable
            async def deserialize(self, infos: Any, args: Any = None) -> Any:
                reads = reads_of.setdefault(asyncio.get_running_loop(), _ConcurrentReads())
                reads.readers += 1
                try:
                    arrays = await super().deserialize(infos, args)
                except Exception:
                    reads.readers -= 1
                    await reads.finish()
                    raise
                reads.readers -= 1
                return arrays

        return Retrying()

    readers = (jax.Array, patient(handlers.ArrayHandler)), (np.ndarray, patient(handlers.NumpyHandler))
    return handlers.create_type_handler_registry(*readers)


class _InFlight:
    """Byte limiter: a leaf waits until leaves in flight leave room for its bytes, or until no leaf is in flight."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes, self._changed = limit, 0, asyncio.Condition()

    async def wait_for_bytes(self, size: int) -> None:
        async with self._changed:
            # A leaf larger than the limit is encoded alone. (Orbax's limiter would reject the leaf.)
            await self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= self._limit)
            self._bytes += size

    async def release_bytes(self, size: int) -> None:
        async with self._changed:
            self._bytes -= size
            self._changed.notify_all()


@cache
def _throttled_writers() -> Any:
    """Returns orbax's writers of arrays, changed to encode at most ``ENCODED_BYTES`` of ``jax.Array`` leaves at a time.

    The result is a registry of orbax's type handlers, for ``jax.Array`` and NumPy arrays.
    """
    handlers = orbax().type_handlers
    writer: type[Any] = handlers.ArrayHandler

    class Throttled(writer):  # type: ignore[misc]  # mypy: a variable
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            limit = _InFlight(ENCODED_BYTES)
            for info in infos:
                info.byte_limiter = limit
            return await super().serialize(values, infos, args)

    # Orbax lets devices that hold the same shard write a slice each, and compiles a program for each slice.
    arrays = Throttled(min_slice_bytes_for_replica_parallel=SLICED_BYTES)
    return handlers.create_type_handler_registry((jax.Array, arrays), (np.ndarray, handlers.NumpyHandler()))

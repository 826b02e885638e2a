"""What this library asks of orbax: where and which bytes are written, and which each device reads."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from xlstm_jax.distributed.checkpoint.record import Entry, Record, data_struct, from_json, reads_whole, to_json
from xlstm_jax.wording import how_to_install

# A device reads whole chunks. With small ones it reads little more than its shard, also of a leaf that was not split.
CHUNK_BYTES = 2**24
RECORD_FILE = "leaves/metadata"  # of a step, as orbax's handler of JSON names it
OTHER_READS_TIMEOUT_S = 10.0  # after one has failed


def orbax() -> Any:
    """The module ``orbax.checkpoint``, which takes a second to import, and which not everybody has."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"checkpoints are made with orbax: {how_to_install('checkpoint')}.") from error
    return orbax.checkpoint


def is_url(directory: Any) -> bool:
    return "://" in os.fspath(directory)


def directory_path(directory: str | os.PathLike[str]) -> Any:
    """The directory as orbax takes it; refuses what can hold no folders."""
    from etils import epath  # which orbax brings along; it has no types

    if not os.fspath(directory):
        raise ValueError("the directory of the checkpoints is ''; name a folder ('.' for the working directory).")
    if is_url(directory):
        try:
            return epath.Path(directory)
        except KeyError as error:
            known = "gs://, s3:// and az://"
            raise ValueError(
                f"the directory {os.fspath(directory)!r} has the scheme {error.args[0]!r}, which orbax does not know. "
                f"It takes {known}; name a local folder by its path."
            ) from None
    path = Path(os.path.abspath(directory))
    for link in (path, *path.parents):
        if link.is_symlink() and not link.exists():  # a run would find no steps there, and start anew
            raise ValueError(
                f"the directory {path} is not to be found: {link} is a link to {os.readlink(link)}, which leads "
                "nowhere. Mount what it leads to, or mend or remove the link."
            )
    inside = next(parent for parent in (path, *path.parents) if parent.exists())
    if not inside.is_dir():
        where = "is" if inside == path else f"lies beneath {inside}, which is"
        raise ValueError(f"the directory {path} {where} a file, and can hold no checkpoints. Name another folder.")
    return epath.Path(path)


def new_manager(directory: Any, save_interval_steps: int, max_to_keep: int | None, timeout_s: int) -> Any:
    """Orbax's manager of a directory, which saves there in the background; removes what was left half written."""
    options = orbax().CheckpointManagerOptions(
        save_interval_steps=save_interval_steps,
        max_to_keep=max_to_keep,
        cleanup_tmp_directories=True,
        lightweight_initialize=True,
        async_options=orbax().options.AsyncOptions(timeout_secs=timeout_s),
    )
    return orbax().CheckpointManager(directory, options=options)


def check_dtypes(arrays: dict[str, Any]) -> None:
    """Refuses dtypes that orbax cannot store: it would do so later, in the background."""
    import tensorstore  # which orbax brings along

    for path, array in arrays.items():
        try:
            tensorstore.dtype(str(array.dtype))
        except (TypeError, ValueError) as error:
            raise TypeError(f"'{path}' has the dtype {array.dtype}, which cannot be stored; cast it.") from error


def save_args(arrays: dict[str, Any], record: Callable[[], Record], step: int) -> Any:
    """What orbax is to write for a step: the arrays that have values (it refuses others), and the record.

    ``record`` is called in the background, in each process.
    """
    ocp = orbax()
    tree = unflatten_dict({path: array for path, array in arrays.items() if array.size}, sep="/")
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(tree, save_args=chunks),
        leaves=_late_json()(lambda: to_json(record(), step)),
    )


@cache
def _late_json() -> Any:
    """Arguments to write a JSON of what a function returns, which is called once the save goes on in the background."""
    ocp = orbax()
    json_handler: type[Any] = ocp.JsonCheckpointHandler
    checkpoint_args: type[Any] = ocp.args.CheckpointArgs

    class LateJsonHandler(json_handler):  # type: ignore[misc]  # mypy: a variable
        async def _save_fn(self, content: Callable[[], Any], directory: Any) -> None:
            await super()._save_fn(content(), directory)

    @ocp.args.register_with_handler(LateJsonHandler, for_save=True, for_restore=True)
    @dataclasses.dataclass
    class LateJsonSave(checkpoint_args):  # type: ignore[misc]  # mypy: a variable
        item: Callable[[], Any]

    return LateJsonSave


def read_record(folder: Any, step: int) -> Record:
    try:
        return from_json(orbax().JsonCheckpointHandler().restore(folder), step)
    except ValueError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from None


def read_arrays(folder: Any, record: Record, likes: dict[str, Any]) -> dict[str, Any]:
    """What is stored for each leaf of ``record``, which may be a part of what was saved.

    Of a placed leaf, each device reads the shard that it has in the target.

    The handler reads for this process alone. (A ``CheckpointManager`` would wait at a barrier for the other processes,
    which never come if they could not read their shards.)
    """
    ocp = orbax()
    data = {path: data_struct(entry) for path, entry in record.items()}
    wanted = {path: struct for path, struct in data.items() if struct.size}
    empty = {path: np.zeros(struct.shape, struct.dtype) for path, struct in data.items() if not struct.size}
    if not wanted:
        return empty
    args = {path: _restore_args(struct, record[path], likes[path]) for path, struct in wanted.items()}
    tree, restore_args = unflatten_dict(wanted, sep="/"), unflatten_dict(args, sep="/")
    restore = ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=True)
    read = ocp.PyTreeCheckpointHandler(type_handler_registry=_patient_readers()).restore(folder, args=restore)
    return empty | flatten_dict(read, sep="/")


class _Reads:
    """The reads that go on in one event loop."""

    def __init__(self) -> None:
        self.others = asyncio.all_tasks()  # which wait for the readers
        self.readers = 0  # that have not failed, and may begin to read more

    async def finish(self) -> None:
        deadline = time.monotonic() + OTHER_READS_TIMEOUT_S
        while (self.readers or asyncio.all_tasks() - self.others) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


@cache
def _patient_readers() -> Any:
    """Orbax's readers of arrays, which after a failure wait for the reads that go on beside it.

    By themselves they close the event loop under those, and each says so on stderr: one damaged file that many leaves
    share gave a hundred lines.
    """
    handlers, reads_of = orbax().type_handlers, WeakKeyDictionary[asyncio.AbstractEventLoop, _Reads]()

    def patient(reader: type[Any]) -> Any:
        class Patient(reader):  # type: ignore[misc]  # mypy: a variable
            async def deserialize(self, infos: Any, args: Any = None) -> Any:
                reads = reads_of.setdefault(asyncio.get_running_loop(), _Reads())
                reads.readers += 1
                try:
                    arrays = await super().deserialize(infos, args)
                except Exception:
                    reads.readers -= 1
                    await reads.finish()
                    raise
                reads.readers -= 1
                return arrays

        return Patient()

    readers = (jax.Array, patient(handlers.ArrayHandler)), (np.ndarray, patient(handlers.NumpyHandler))
    return handlers.create_type_handler_registry(*readers)


def _restore_args(struct: jax.ShapeDtypeStruct, entry: Entry, like: Any) -> Any:
    ocp = orbax()
    if reads_whole(entry, like):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=struct.shape, dtype=struct.dtype)

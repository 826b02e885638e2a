"""What this library asks of orbax: which bytes are written, and which each device reads."""

from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from xlstm_jax.distributed.checkpoint.record import Entry, Record, data_struct, from_json, reads_whole, to_json
from xlstm_jax.wording import how_to_install

# A device reads whole chunks. With small ones it reads little more than its shard, also of a leaf that was not split.
CHUNK_BYTES = 2**24


def orbax() -> Any:
    """The module ``orbax.checkpoint``, which takes a second to import, and which not everybody has."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"checkpoints are made with orbax: {how_to_install('checkpoint')}.") from error
    return orbax.checkpoint


def check_dtypes(arrays: dict[str, Any]) -> None:
    """Refuses dtypes that orbax cannot store: it would do so later, in the background."""
    import tensorstore  # which orbax brings along

    for path, array in arrays.items():
        try:
            tensorstore.dtype(str(array.dtype))
        except (TypeError, ValueError) as error:
            raise TypeError(f"'{path}' has the dtype {array.dtype}, which cannot be stored; cast it.") from error


def save_args(arrays: dict[str, Any], record: Record) -> Any:
    """What orbax is to write for a step: the arrays that have values (it refuses others), and the record."""
    ocp = orbax()
    tree = unflatten_dict({path: array for path, array in arrays.items() if array.size}, sep="/")
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(tree, save_args=chunks),
        leaves=ocp.args.JsonSave(to_json(record)),
    )


def read_record(folder: Any) -> Record:
    try:
        return from_json(orbax().JsonCheckpointHandler().restore(folder))
    except ValueError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from None


def read_arrays(folder: Any, record: Record, likes: dict[str, Any]) -> dict[str, Any]:
    """What is stored for each leaf; of a placed leaf, each device reads the shard that it has in the target.

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
    restore = ocp.args.PyTreeRestore(unflatten_dict(wanted, sep="/"), restore_args=unflatten_dict(args, sep="/"))
    read = ocp.PyTreeCheckpointHandler().restore(folder, args=restore)
    return empty | flatten_dict(read, sep="/")


def _restore_args(struct: jax.ShapeDtypeStruct, entry: Entry, like: Any) -> Any:
    ocp = orbax()
    if reads_whole(entry, like):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=struct.shape, dtype=struct.dtype)

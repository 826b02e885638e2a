"""What this library asks of orbax: which bytes are written, and which each device reads."""

from typing import Any

import jax
import numpy as np

from xlstm_jax.distributed.checkpoint import record as checkpoint_leaves

# A device reads whole chunks. Small ones keep a share small also where the leaf was written by one device.
CHUNK_BYTES = 2**24


def _orbax() -> Any:
    """The module ``orbax.checkpoint``, which takes a second to import, and which not everybody has."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints are made with orbax: pip install xlstm_jax[checkpoint]") from error
    return orbax.checkpoint


# -------------------------------------------------------------------------------------------------------------- files


def _check_dtypes(arrays: dict[str, Any]) -> None:
    """Refuses at once what would fail in the background."""
    import tensorstore  # which orbax brings along

    for path, array in arrays.items():
        try:
            tensorstore.dtype(str(array.dtype))
        except (TypeError, ValueError) as error:
            raise TypeError(f"'{path}' has the dtype {array.dtype}, which cannot be stored; cast it.") from error


def _save_args(arrays: dict[str, Any], record: checkpoint_leaves.Record) -> Any:
    ocp = _orbax()
    tree = _nested({path: array for path, array in arrays.items() if array.size})  # orbax takes none without values
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(tree, save_args=chunks),
        leaves=ocp.args.JsonSave(checkpoint_leaves.to_json(record)),
    )


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}, the tree as other tools of orbax show it."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return tree


def _read_record(folder: Any) -> checkpoint_leaves.Record:
    try:
        return checkpoint_leaves.from_json(_orbax().JsonCheckpointHandler().restore(folder))
    except ValueError as error:
        raise ValueError(f"{folder} cannot be read: {error}") from None


def _read_arrays(folder: Any, record: checkpoint_leaves.Record, likes: dict[str, Any]) -> dict[str, Any]:
    """What is stored for each leaf; of a placed one, each device reads the share that the target gives it.

    The handler reads for this process alone. (A ``CheckpointManager`` would wait for the others at a barrier, where
    they never come if they could not read their part.)
    """
    ocp = _orbax()
    data = {path: checkpoint_leaves.data_struct(entry) for path, entry in record.items()}
    wanted = {path: struct for path, struct in data.items() if struct.size}
    args = {path: _restore_args(struct, record[path], likes[path]) for path, struct in wanted.items()}
    if wanted:
        restore = ocp.args.PyTreeRestore(item=_nested(wanted), restore_args=_nested(args))
        read = ocp.PyTreeCheckpointHandler().restore(folder, args=restore)
    return {path: _at(read, path) if path in wanted else np.zeros(s.shape, s.dtype) for path, s in data.items()}


def _restore_args(struct: jax.ShapeDtypeStruct, entry: checkpoint_leaves.Entry, like: Any) -> Any:
    ocp = _orbax()
    if checkpoint_leaves.reads_whole(entry, like):
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=like.sharding, global_shape=struct.shape, dtype=struct.dtype)


def _at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree

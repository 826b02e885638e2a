"""What a checkpoint holds of a state: bare arrays by path, and a record of what each must be when it is read.

  state    {"train": TrainState(params={"w": box(W)}), "rng": key, "data": {"position": 7}}

  arrays   train/params/w  W            rng  uint32 [2]          data/position  int64 []
  record   train/params/w  shape, dtype, checksum    ...

No boxes are saved and no padding, and keys as their data. Paths are those of the plain model, so a state that was split
in one way can be read into any other. The record is a JSON object with a digest of its own: a checksum that changed on
disk is then damage like any other.

Whole arrays. A leaf that is placed (a committed ``jax.Array``) is stored and read shard by shard. All others are local:
Python numbers, NumPy arrays, ``jax.Array`` that were never placed, and, where there are several processes, arrays that
only one of them can reach. They are small, whole in every process, and stored by the first.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checksums import checksum
from xlstm_jax.distributed.data_parallel.boxes import (
    is_padded,
    leaf_value,
    leaves_with_path,
    rebox,
    true_shape,
    true_value,
    with_padding,
)
from xlstm_jax.distributed.data_parallel.communication import is_prng_key
from xlstm_jax.distributed.wording import listed

Entry = dict[str, Any]  # of a record: "shape", "dtype", "checksum", and "impl" for keys
Record = dict[str, Entry]

PYTHON_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64, "complex": np.complex128}
_KINDS = {"bool": np.bool_, "int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating}


def bare_leaves(state: PyTree) -> dict[str, Any]:
    """The leaves without boxes, by path.

    Raises:
      ValueError: there are none, or two paths are written alike.
      TypeError: a leaf is no number and no array of numbers.
    """
    leaves, taken = {}, {}
    for path, leaf in leaves_with_path(state):
        leaves[path] = _checked(path, _unpadded(leaf))
        other = taken.setdefault(path.replace("/", "."), path)
        if len(leaves) > len(taken):
            raise ValueError(f"the leaves {other!r} and {path!r} would have one name on disk; rename one of them.")
    if not leaves:
        raise ValueError("the state has no leaves; there is nothing to save or restore.")
    if len(leaves) < len(leaves_with_path(state)):
        raise ValueError("two leaves of the state have the same path (the keys 0 and '0' of a dict, say); rename one.")
    return leaves


def _unpadded(leaf: Any) -> Any:
    """The value in its true shape. What was padded cannot be split in that shape: it is whole on every device."""
    value = leaf_value(leaf)
    if not is_padded(leaf):
        return value
    whole = NamedSharding(value.sharding.mesh, PartitionSpec()) if isinstance(value.sharding, NamedSharding) else None
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(true_shape(leaf), value.dtype, sharding=whole)
    return jax.jit(true_value, out_shardings=whole)(leaf)


def boxed_as(like: Any, value: Any) -> Any:
    """The inverse for one leaf: ``value`` in the box of ``like``, padded and placed as it is there."""
    if not is_padded(like):
        return rebox(like, value)
    place = leaf_value(like).sharding
    return rebox(like, jax.jit(lambda value: with_padding(like, value), out_shardings=place)(value))


def _checked(path: str, leaf: Any) -> Any:
    if type(leaf).__name__ in PYTHON_DTYPES:
        if type(leaf) is int and not -(2**63) <= leaf < 2**63:
            raise ValueError(f"'{path}' is the integer {leaf}, which has more than the 64 bits that are stored.")
        return leaf
    dtype = getattr(leaf, "dtype", None)
    kinds = (jnp.number, np.bool_, jax.dtypes.prng_key)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(
            f"'{path}' is {f'an array of {dtype}' if dtype is not None else type(leaf).__name__}; a checkpoint holds "
            "numbers, arrays of numbers and PRNG keys. Keep other things beside it, or out of the pytree."
        )
    return leaf


def is_local(leaf: Any) -> bool:
    """Whether every process has a leaf whole, for itself; see the top of this file."""
    if isinstance(leaf, jax.Array):
        return not leaf.committed or (jax.process_count() > 1 and leaf.is_fully_addressable)
    sharding = getattr(leaf, "sharding", None)
    return sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable)


def stored_arrays(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What is written for each leaf: a ``jax.Array``, or a NumPy array of a local one."""
    return {path: _stored(leaf) for path, leaf in leaves.items()}


def _stored(leaf: Any) -> Any:
    if (kind := type(leaf).__name__) in PYTHON_DTYPES:
        return np.asarray(leaf, PYTHON_DTYPES[kind])
    local = is_local(leaf)
    leaf = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
    return np.asarray(leaf) if local else leaf


# ---------------------------------------------------------------------------------------------------------- the record


def record_of(leaves: Mapping[str, Any], arrays: Mapping[str, Any]) -> Record:
    """The record of a state; ``arrays`` are its ``stored_arrays``."""
    sums = checksum_each(arrays)
    return {
        path: _description(leaf)
        | {"checksum": sums[path]}
        | ({"impl": str(jax.random.key_impl(leaf))} if is_prng_key(leaf) else {})
        for path, leaf in leaves.items()
    }


def _description(leaf: Any) -> Entry:
    kind = type(leaf).__name__
    if kind in PYTHON_DTYPES:
        return {"shape": [], "dtype": kind}
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def to_json(record: Record) -> dict[str, Any]:
    """The record with a digest of itself."""
    return {"leaves": record, "digest": _digest(record)}


def from_json(content: Any) -> Record:
    """The inverse of ``to_json``.

    Raises:
      ValueError: the content does not have its digest.
    """
    record = content.get("leaves") if isinstance(content, dict) else None
    if record is None or content.get("digest") != _digest(record):
        raise ValueError("the record of leaves does not have its digest")
    return record


def _digest(record: Record) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def checksum_each(arrays: Mapping[str, Any]) -> dict[str, list[int]]:
    """The checksum of every array, of placed ones where they lie."""

    # One program for each kind of leaf. (One for all would compile each of a deep model's hundreds of leaves by itself;
    # several in flight can wait for each other for ever on simulated devices, see device_mesh.)
    def found(array):
        return np.asarray(_checksum_to(_sums_place(array))(_words(array))).tolist()

    return {path: found(array) for path, array in arrays.items()}


def _sums_place(array: Any) -> Any:
    """Where the checksum of an array goes: to all devices of its mesh, or beside an array on one device."""
    if not isinstance(array, jax.Array):
        return None
    sharding = array.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


@functools.lru_cache(maxsize=16)
def _checksum_to(place: Any) -> Any:
    return jax.jit(checksum, out_shardings=place)


def _words(array: Any) -> Any:
    """64-bit values of the host as pairs of 32 bits: JAX would cut them unless it runs with 64 bits itself."""
    if isinstance(array, jax.Array) or array.dtype.itemsize <= 4:
        return array
    return np.ascontiguousarray(array[..., None]).view(np.uint32)


def check_sound(record: Record, arrays: Mapping[str, Any]) -> None:
    """Checks arrays that were read against the record.

    Raises:
      ValueError: some are not what was saved; names them.
    """
    structs = {path: data_struct(entry) for path, entry in record.items()}
    bad = [path for path, s in structs.items() if (arrays[path].shape, arrays[path].dtype) != (s.shape, s.dtype)]
    if bad:
        raise ValueError(f"{listed(bad)}: what was read does not have the shape and dtype of what was saved")
    sums = checksum_each(arrays)
    bad = [path for path, entry in record.items() if sums[path] != entry["checksum"]]
    if bad:
        raise ValueError(f"{listed(bad)}: what was read does not have the checksum of what was saved")


# ------------------------------------------------------------------------------------------------------ into the target


def check_fits(record: Record, likes: Mapping[str, Any], where: str) -> None:
    """Checks the leaves of a target against a record.

    Raises:
      ValueError: a leaf is missing on either side, or has another shape or dtype; names it, and both.
    """
    missing, extra = sorted(likes.keys() - record.keys()), sorted(record.keys() - likes.keys())
    if missing or extra:
        parts = [f"it has no {listed(missing)}"] if missing else []
        parts += [f"it has {listed(extra)}, which the abstract state has not"] if extra else []
        raise ValueError(
            f"{where} does not fit the abstract state: {'; and '.join(parts)}. Restore into a state of the structure "
            "that was saved (same model and optimizer), and take from it what is needed."
        )
    unlike = [path for path, like in likes.items() if not _fits(record[path], _description(like))]
    if unlike:
        path = unlike[0]
        raise ValueError(
            f"{where} does not fit the abstract state: '{path}' was saved as {_shown(record[path])}, and the abstract "
            f"state has {_shown(_description(likes[path]))}{f' (and {len(unlike) - 1} more)' if unlike[1:] else ''}. "
            "Was it another model or optimizer? A metric's Local state has a row for each device: save "
            "metric.sync of it."
        )


def _shown(entry: Entry) -> str:
    return f"{entry['dtype']}{entry['shape']}"


def _fits(saved: Entry, like: Entry) -> bool:
    if saved["shape"] != like["shape"]:
        return False
    names = {saved["dtype"], like["dtype"]}
    # A step counter is a Python int before the first step, and an array after it: numbers of one kind fit.
    return len(names) == 1 or (bool(names & PYTHON_DTYPES.keys()) and len(set(map(_kind, names))) == 1)


def _kind(dtype: str) -> str:
    if dtype in _KINDS or dtype.startswith("key<"):
        return dtype
    return next((kind for kind, of in _KINDS.items() if jnp.issubdtype(jnp.dtype(dtype), of)), dtype)


def check_placed(likes: Mapping[str, Any]) -> None:
    """Checks that the target says where each leaf goes.

    Raises:
      ValueError: an abstract leaf has no sharding though there are several devices, or one that does not divide it.
    """
    for path, like in likes.items():
        if isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None and jax.device_count() > 1:
            raise ValueError(
                f"the abstract leaf '{path}' of shape {like.shape} has no sharding, and there are "
                f"{jax.device_count()} devices. Make the target with abstract_train_state, or give each "
                "ShapeDtypeStruct a sharding."
            )
        if getattr(like, "sharding", None) is not None:
            like.sharding.shard_shape(like.shape)


def reads_whole(entry: Entry, like: Any) -> bool:
    """Whether a leaf is read to the host, whole, before it is placed."""
    return is_local(like) or entry["dtype"] in PYTHON_DTYPES or 0 in entry["shape"]


def data_struct(entry: Entry) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is stored for a leaf, as ``stored_arrays`` makes it."""
    shape = tuple(entry["shape"])
    if "impl" in entry:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=entry["impl"])))
        return jax.ShapeDtypeStruct((*shape, *data.shape), data.dtype)
    return jax.ShapeDtypeStruct(shape, np.dtype(PYTHON_DTYPES.get(entry["dtype"], entry["dtype"])))


def as_like(array: Any, entry: Entry, like: Any, path: str) -> Any:
    """An array that was read, as the kind of leaf that the target has in its place, and where that lies.

    Raises:
      ValueError: a Python number that has no exact counterpart in the dtype of the target.
    """
    if (kind := type(like).__name__) in PYTHON_DTYPES:
        return type(like)(array.item()) if kind != "bool" else bool(array)
    if not reads_whole(entry, like):
        return _as_keys(array, entry, like.sharding) if "impl" in entry else array
    if "impl" not in entry:
        array = _exactly(array, like.dtype, path)
    if isinstance(like, np.ndarray | np.generic):
        return array[()] if isinstance(like, np.generic) else array
    placed = getattr(like, "committed", True) and like.sharding is not None
    value = _placed(array, like.sharding) if placed else jnp.array(array)
    return _as_keys(value, entry, like.sharding if placed else None) if "impl" in entry else value


def _placed(array: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _as_keys(data: jax.Array, entry: Entry, sharding: Any) -> jax.Array:
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=entry["impl"]), out_shardings=sharding)(data)


def _exactly(array: np.ndarray, dtype: Any, path: str) -> np.ndarray:
    if array.dtype == dtype:
        return array
    cast = array.astype(dtype)
    if cast != array:
        raise ValueError(f"'{path}' was saved as the Python number {array.item()!r}, which is not a {dtype}.")
    return cast

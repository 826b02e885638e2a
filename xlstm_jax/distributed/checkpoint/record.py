"""What a checkpoint holds of a state: arrays by path, without boxes, and a record that says what each of them is.

  state    {"train": TrainState(params={"w": box(W)}), "rng": key, "data": {"position": 7}}

  arrays   train/params/w  W            rng  uint32 [2]          data/position  int64 []
  record   train/params/w  shape, dtype, checksum    ...

Boxes and padding are not saved; of a PRNG key its data are. Paths are the paths of the plain model, so a state that was
split in one way can be restored split in any other. The record is a JSON object with two digests: one shows damage to
the record, the other, of the step's number, shows that a folder was renamed or copied. (Version 0.1 wrote no number,
and a record without one is read.)

A leaf that is *placed* (a committed ``jax.Array``) is stored and read shard by shard. All other leaves are *local*:
Python numbers, NumPy arrays, uncommitted ``jax.Array``, and, in a run of several processes, arrays on devices of one of
them. Every process has them whole, and process 0 stores them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Set
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checksums import checksum
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox, true_value, with_padding
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.communication import is_prng_key
from xlstm_jax.wording import listed

PARTS_SHOWN = 8  # of a state, in an error
OPTIMIZER = "optimizer"
Entry = dict[str, Any]  # of a record: "shape", "dtype", "checksum"; "impl" of keys; OPTIMIZER of one leaf of its state
Record = dict[str, Entry]
_ORDER = ("shape", "dtype", "checksum", "impl", OPTIMIZER)

PYTHON_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64, "complex": np.complex128}
_KINDS = {"bool": np.bool_, "int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating}


def bare_leaves(state: PyTree) -> dict[str, Any]:
    """The leaves without boxes, by path; refuses leaves that are no numbers, and two with the same name on disk."""
    pairs = leaves_with_path(state)
    leaves = {path: _checked(path, _unpadded(leaf)) for path, leaf in pairs}
    if not leaves:
        raise ValueError("the state has no leaves; there is nothing to save or restore.")
    if len(leaves) < len(pairs):
        raise ValueError("two leaves of the state have the same path (the keys 0 and '0' of a dict, say); rename one.")
    names = {path.replace("/", "."): path for path in leaves}
    for path in leaves:
        if (other := names[path.replace("/", ".")]) != path:
            raise ValueError(f"the leaves {path!r} and {other!r} would have one name on disk; rename one of them.")
        if beneath := [above for above in _above(path) if above in leaves]:
            raise ValueError(f"the leaf {path!r} lies beneath the leaf {beneath[0]!r}; rename one of them.")
    return leaves


def _above(path: str) -> list[str]:
    """The paths that a path lies beneath: a/b/c -> [a, a/b]."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _unpadded(leaf: Any) -> Any:
    """The value in its true shape; if it is padded, whole on every device: the axes do not divide that shape."""
    found = leaf_of(leaf)
    value = found.value
    if not found.is_padded:
        return value
    whole = NamedSharding(value.sharding.mesh, PartitionSpec()) if isinstance(value.sharding, NamedSharding) else None
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(found.true_shape, value.dtype, sharding=whole)
    return jax.jit(true_value, out_shardings=whole)(leaf)


def boxed_like(target: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    """The inverse of ``bare_leaves``: the leaves in the structure and boxes of ``target``, with its padding."""

    def boxed(path: str, like: Any) -> Any:
        if not leaf_of(like).is_padded:
            return rebox(like, leaves[path])
        pad = jax.jit(partial(with_padding, like), out_shardings=leaf_of(like).value.sharding)
        return rebox(like, pad(leaves[path]))

    return map_leaves_with_path(boxed, target)


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
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"'{path}' is a masked array, whose mask would be lost; keep its data and its mask as two leaves."
        )
    return leaf


def is_local(leaf: Any) -> bool:
    """Whether every process has a leaf whole, for itself; see the top of this file."""
    if isinstance(leaf, jax.Array):
        return not leaf.committed or (jax.process_count() > 1 and leaf.is_fully_addressable)
    sharding = getattr(leaf, "sharding", None)
    return sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable)


def stored_arrays(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """What is written for each leaf: a ``jax.Array`` for a placed leaf, a NumPy array for a local one."""

    def stored(leaf: Any) -> Any:
        if (kind := type(leaf).__name__) in PYTHON_DTYPES:
            return np.asarray(leaf, PYTHON_DTYPES[kind])
        data = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
        return np.asarray(data) if is_local(leaf) else data

    return {path: stored(leaf) for path, leaf in leaves.items()}


# ---------------------------------------------------------------------------------------------------------- the record


def record_without_sums(leaves: Mapping[str, Any]) -> Record:
    """The record of a state without checksums, which keeps nothing of its values."""
    impls = {path: str(jax.random.key_impl(leaf)) for path, leaf in leaves.items() if is_prng_key(leaf)}
    return {
        path: _description(leaf) | ({"impl": impls[path]} if path in impls else {}) for path, leaf in leaves.items()
    }


def with_sums(record: Record, sums: Mapping[str, list[int]]) -> Record:
    """The entries of a record that have checksums in ``sums``, with these; names in the order of version 0.1."""
    found = {path: entry | {"checksum": sums[path]} for path, entry in record.items() if path in sums}
    return {path: {name: entry[name] for name in sorted(entry, key=_ORDER.index)} for path, entry in found.items()}


def _description(leaf: Any) -> Entry:
    kind = type(leaf).__name__
    if kind in PYTHON_DTYPES:
        return {"shape": [], "dtype": kind}
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def to_json(record: Record, step: int) -> dict[str, Any]:
    """The record of a step with a digest of itself, and one of the step's number with it."""
    digest = _digest(record)
    return {"leaves": record, "digest": digest, "step": step, "step_digest": _digest([step, digest])}


def from_json(content: Any, step: int) -> Record:
    """The inverse of ``to_json``.

    Raises:
      ValueError: a digest is wrong, the record is that of another step, or an entry is none that ``to_json`` writes.
    """
    record = content.get("leaves") if isinstance(content, dict) else None
    if record is None or content.get("digest") != _digest(record):
        raise ValueError("the record of leaves does not have its digest")
    if not (isinstance(record, dict) and record):
        raise ValueError("the record has its digest, and holds no leaves")
    if wrong := [path for path, entry in record.items() if not _is_entry(entry)]:
        raise ValueError(f"{listed(wrong)}: the record has its digest, and does not describe an array there")
    if content.keys() == {"leaves", "digest"}:  # of version 0.1
        return record
    check_number(saved_as(content), step)
    return record


def saved_as(content: Any) -> int | None:
    """The step that a record was saved as; None where it does not say so, with the digest of that."""
    if not isinstance(content, dict) or type(number := content.get("step")) is not int:
        return None
    return number if content.get("step_digest") == _digest([number, content.get("digest")]) else None


def check_number(number: int | None, name: int) -> None:
    """Raises a ``ValueError`` where a folder of this name was not saved as that step."""
    if number is None:
        raise ValueError("the record's number of the step does not have its digest")
    if number != name:
        raise ValueError(
            f"it was saved as step {number}, and its folder was renamed, copied or linked to {name}; give it its own "
            "number back"
        )


def _is_entry(entry: Any) -> bool:
    """Whether shape, dtype, checksum and the kind of a key are there, and make sense together."""
    try:
        shape, sums, dtype = entry["shape"], entry["checksum"], entry["dtype"]
        numbers = [*shape, *sums]
        is_key = isinstance(dtype, str) and dtype.startswith("key<")
        if not all(type(number) is int and number >= 0 for number in numbers) or len(sums) != 2:
            return False
        if entry.keys() - {"impl", OPTIMIZER} != {"shape", "dtype", "checksum"} or is_key != ("impl" in entry):
            return False
        if not isinstance(entry.get(OPTIMIZER, ""), str):
            return False
        data_struct(entry)
    except Exception:  # NumPy and JAX raise whatever they like of a dtype or a kind of key that they do not know
        return False
    return True


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checksum_each(arrays: Mapping[str, Any]) -> dict[str, list[int]]:
    """The checksum of every array; those of placed arrays are computed on their devices, from the shards."""
    # One program for each dtype, shape and sharding, run one after the other. A single program for all leaves would
    # compile each leaf of a deep model anew; several in flight can wait for each other for ever on simulated devices.
    return {path: np.asarray(checksum_program(array)(as_words(array))).tolist() for path, array in arrays.items()}


def checksum_program(array: Any) -> Callable[[Any], jax.Array]:
    """``checksum``, compiled for an array: its result goes to all devices of the array."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    return _checksum_to(
        NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    )


@lru_cache(maxsize=16)
def _checksum_to(sharding: Sharding | None) -> Callable[[Any], jax.Array]:
    return jax.jit(checksum, out_shardings=sharding)


def as_words(array: Any) -> Any:
    """A NumPy array of 64-bit values as pairs of 32 bits: JAX would cut the values, unless it has 64 bits enabled."""
    if isinstance(array, jax.Array) or array.dtype.itemsize <= 4:
        return array
    return np.ascontiguousarray(array[..., None]).view(np.uint32)


def check_sound(record: Record, arrays: Mapping[str, Any]) -> None:
    """Checks arrays that were read against the record; raises a ``ValueError`` that names those that differ."""
    sums = checksum_each(arrays)

    def is_sound(path: str, entry: Entry) -> bool:
        struct, array = data_struct(entry), arrays[path]
        return (array.shape, array.dtype, sums[path]) == (struct.shape, struct.dtype, entry["checksum"])

    if bad := [path for path, entry in record.items() if not is_sound(path, entry)]:
        raise ValueError(f"{listed(bad)}: what was read does not have the checksum or dtype of what was saved")


# ---------------------------------------------------------------------------------------------------------- the target


def check_fits(record: Record, likes: Mapping[str, Any], where: str) -> None:
    """Checks that the leaves of a target have the paths, shapes and dtypes of a record; a ``ValueError`` names both."""
    if problem := names_problem(record.keys(), likes.keys(), "the abstract state has"):
        raise ValueError(
            f"{where} does not fit the abstract state: {problem}. Restore into a state of the structure "
            "that was saved (same model, optimizer and frozen parameters). Parameters without an optimizer are read by "
            "restore_params."
        )
    unlike = [path for path, like in likes.items() if not fits(record[path], _description(like))]
    if unlike:
        entries = record[unlike[0]], _description(likes[unlike[0]])
        saved, wanted = (f"{entry['dtype']}{entry['shape']}" for entry in entries)
        raise ValueError(
            f"{where} does not fit the abstract state: '{unlike[0]}' was saved as {saved}, and the abstract state has "
            f"{wanted}{f' (and {len(unlike) - 1} more)' if unlike[1:] else ''}. Was it another model, "
            "optimizer or frozen_dtype? "
            "A metric's Local state has a row for each device: save metric.sync of it."
        )


def part_of(record: Record, where: str, *, names: Set[str], path: str | None) -> str:
    """What the paths of parameters called ``names`` begin with in a record: ``path`` and a slash, or "" for all of it.

    With ``path`` None it is the part called "params" that has these leaves, or all of the record if that has them.
    """
    if path is not None:
        part = f"{path.strip('/')}/" if path else ""
        if not any(saved.startswith(part) for saved in record):
            raise ValueError(f"{where} has no part {path!r}; it has {listed(_parts(record), PARTS_SHOWN)}.")
        return part
    called = [f"{part}/" for part in _parts(record) if part.rpartition("/")[2] == "params"]
    fitting = [
        part for part in ("", *called) if {part + name for name in names} == {p for p in record if p.startswith(part)}
    ]
    found = fitting or called
    if len(found) != 1:
        several = f"more than one part called 'params': {listed(found, PARTS_SHOWN)}" if found else "no part 'params'"
        raise ValueError(
            f"{where} has {several}. Say with path= which part to read, of {listed(_parts(record), PARTS_SHOWN)}."
        )
    return found[0]


def _parts(record: Record) -> list[str]:
    """The paths of everything that has leaves below it."""
    return sorted({above for path in record for above in _above(path)}, key=lambda path: (path.count("/"), path))


def names_problem(saved: Set[str], wanted: Set[str], target_has: str) -> str:
    """Which names of ``wanted`` were not saved, and which are not wanted; "" where both are the same."""
    missing, extra = sorted(wanted - saved), sorted(saved - wanted)
    problems = [f"it has no {listed(missing)}"] if missing else []
    problems += [f"it has {listed(extra)}, which {target_has} not"] if extra else []
    return "; and ".join(problems)


def fits(saved: Entry, like: Entry) -> bool:
    """A Python number fits any dtype of its kind: a step counter is an int before the first step, then an array."""
    names = {saved["dtype"], like["dtype"]}
    same_kind = bool(names & PYTHON_DTYPES.keys()) and len(set(map(_kind, names))) == 1
    return saved["shape"] == like["shape"] and (len(names) == 1 or same_kind)


def _kind(dtype: str) -> str:
    if dtype in _KINDS or dtype.startswith("key<"):
        return dtype
    return next((kind for kind, of in _KINDS.items() if jnp.issubdtype(jnp.dtype(dtype), of)), dtype)


def check_placed(likes: Mapping[str, Any]) -> None:
    """Checks that each leaf of the target has a sharding, which divides it; on one device it needs none."""
    for path, like in likes.items():
        if isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None and jax.device_count() > 1:
            raise ValueError(
                f"the abstract leaf '{path}' of shape {like.shape} has no sharding, and there are "
                f"{jax.device_count()} devices. Make the target with abstract_train_state, or give each "
                "ShapeDtypeStruct a sharding."
            )
        if (sharding := getattr(like, "sharding", None)) is not None:
            sharding.shard_shape(like.shape)


def reads_whole(entry: Entry, like: Any) -> bool:
    """Whether each process reads a leaf whole into the memory of its host."""
    return is_local(like) or entry["dtype"] in PYTHON_DTYPES or 0 in entry["shape"]


def data_struct(entry: Entry) -> jax.ShapeDtypeStruct:
    """Shape and dtype of what is stored for a leaf, as ``stored_arrays`` makes it."""
    shape = tuple(entry["shape"])
    if "impl" in entry:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=entry["impl"])))
        return jax.ShapeDtypeStruct((*shape, *data.shape), data.dtype)
    return jax.ShapeDtypeStruct(shape, np.dtype(PYTHON_DTYPES.get(entry["dtype"], entry["dtype"])))


def read_structs(record: Record, likes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """What is read for each leaf, with the sharding by which each device reads its shard, or none: see ``Backend``."""
    return {
        path: data_struct(entry).update(sharding=None if reads_whole(entry, likes[path]) else likes[path].sharding)
        for path, entry in record.items()
    }


def as_like(array: Any, entry: Entry, like: Any, path: str) -> Any:
    """An array that was read as what the leaf is in the target: a Python number, NumPy array, ``jax.Array`` or key."""
    if type(like).__name__ in PYTHON_DTYPES:
        return type(like)(array.item())
    if "impl" in entry:
        data = placed_like(array, like) if reads_whole(entry, like) else array
        wrap = partial(jax.random.wrap_key_data, impl=entry["impl"])
        return jax.jit(wrap, out_shardings=data.sharding if data.committed else None)(data)
    if not reads_whole(entry, like):
        return array
    with np.errstate(all="ignore"):  # what does not fit is told below
        cast = array.astype(like.dtype)
    if array.dtype != like.dtype and not np.array_equal(cast, array, equal_nan=True):
        raise ValueError(f"'{path}' was saved as the Python number {array.item()!r}, which is not a {like.dtype}.")
    return placed_like(cast, like)


def placed_like(array: np.ndarray, like: Any) -> Any:
    """A copy of an array of the host: as a NumPy array where ``like`` is one, else with the sharding of ``like``."""
    if isinstance(like, np.ndarray | np.generic):
        return np.array(array) if isinstance(like, np.ndarray) else array[()]
    if like.sharding is None or not getattr(like, "committed", True):
        return jnp.array(array)
    return jax.make_array_from_callback(array.shape, like.sharding, lambda index: np.array(array[index]))

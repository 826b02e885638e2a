"""Content of a checkpoint: the arrays of a state by path, without boxes, and a record that describes each array.

  state    {"train": TrainState(params={"w": box(W)}), "rng": key, "data": {"position": 7}}

  arrays   train/params/w  W            rng  uint32 [2]          data/position  int64 []
  record   train/params/w  shape, dtype, checksum    ...

Boxes and padding are not saved; a PRNG key is saved as its key data. Paths are the paths of the plain model, so a state
can be restored with a sharding different from the saved sharding. The record is a JSON object with two digests: the
first digest detects damage to the record; the second digest, which covers the step number, detects a folder that was
renamed or copied.

A *placed* leaf (a committed ``jax.Array``) is stored and read shard by shard. Every other leaf is *local*: Python
numbers, NumPy arrays, uncommitted ``jax.Array`` and, in a run of several processes, arrays on the devices of a single
process. Every process has a full copy of each local leaf, and process 0 stores the copy.

The moments of Adam have the same paths and shapes as the moments of NAdam, RAdam or Yogi, so a restore could mix them
up. Therefore the record names the optimizer at the first leaf of each ``opt_state``:
``chain(scale_by_adam, scale) of optax 0.2.6``. Two experiments are distinguished by their trees: a directory contains
steps with equal trees.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.backend import Arrays, Json
from xlstm_jax.distributed.checkpoint.checksums import checksum_each
from xlstm_jax.distributed.data_parallel.leaf import Sharded, stored_value, true_value
from xlstm_jax.distributed.data_parallel.trees import flatten_with_path, map_values_with_path, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.optimizers.transforms import name_of
from xlstm_jax.distributed.processes.collective_errors import interruptions_go_on
from xlstm_jax.explicit_axes import on_auto_axes
from xlstm_jax.formatting import listed
from xlstm_jax.introspection import warn_user

PARTS_SHOWN = 8  # number of parts of a state that an error lists
ALIGNMENT = 64  # bytes
OPTIMIZER = "optimizer"
Entry = dict[str, Any]  # "shape", "dtype", "checksum"; "impl" for PRNG keys; OPTIMIZER for the first opt_state leaf
Record = dict[str, Entry]
Leaves = Mapping[str, Any]  # by path: arrays, abstract arrays, NumPy arrays, Python numbers and PRNG keys

PYTHON_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64, "complex": np.complex128}
_KINDS = {"bool": np.bool_, "int": jnp.integer, "float": jnp.floating, "complex": jnp.complexfloating}


def bare_leaves(state: PyTree, value_of: Callable[[Sharded], Any] | None = None) -> Leaves:
    """Returns the values of a state's leaves without boxes and padding, by path; or ``value_of(leaf)`` for each leaf.

    Paths are as ``blocks/mlp/kernel``. ``value_of``, if not None, gets every leaf, boxed or not, as a ``Sharded`` (the
    library's box).

    Raises:
      TypeError: a leaf is not numeric.
      ValueError: the state has no leaves, an integer needs more than 64 bits, or two leaves have the same name on disk.
    """
    pairs = sharded_leaves(state)
    leaves = {path: _checked(path, (value_of or unpadded)(leaf)) for path, leaf in pairs}
    if not leaves:
        raise ValueError("the state has no leaves; there is nothing to save or restore.")
    if len(leaves) < len(pairs):
        raise ValueError("two leaves of the state have the same path (the keys 0 and '0' of a dict, say); rename one.")
    # Orbax names the files of a leaf by its path with dots for slashes, so {"a": {"b": x}} and {"a.b": y} collide.
    names = {path.replace("/", "."): path for path in leaves}
    for path in leaves:
        if (other := names[path.replace("/", ".")]) != path:
            raise ValueError(f"the leaves {path!r} and {other!r} would have one name on disk; rename one of them.")
        if beneath := [above for above in _above(path) if above in leaves]:
            raise ValueError(f"the leaf {path!r} lies beneath the leaf {beneath[0]!r}; rename one of them.")
    return leaves


def _above(path: str) -> list[str]:
    """Returns the proper prefixes of a path: a/b/c -> [a, a/b]."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def unpadded(leaf: Sharded) -> Any:
    """Returns the value of a leaf without box and padding, in the shape of the plain model.

    If the leaf stores its value unchanged, the result is the stored array itself. For a leaf that is stored padded or
    packed, a jitted program computes the value, with the sharding ``evenly_split``. If the stored array is abstract,
    the result is abstract, too: a ``ShapeDtypeStruct`` with this sharding.
    """
    if leaf.stores_value:
        return leaf.value
    sharding = evenly_split(leaf.true_shape, leaf.value.sharding)
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.true_shape, leaf.value.dtype, sharding=sharding)
    return jax.jit(true_value, out_shardings=sharding)(leaf)


def evenly_split(shape: tuple[int, ...], stored: Any) -> NamedSharding | None:
    """Returns a sharding for an unpadded array of shape ``shape``, whose padded form has the sharding ``stored``.

    JAX has no sharding for a dim that the axes of a mesh do not divide. Here the devices are grouped anew, so that as
    many as possible hold different parts: [768, 768] on 512 devices is split into 256 x 2 parts, [6, 7] on 8 devices
    into 2 parts. Returns None if ``stored`` is no ``NamedSharding``, and a replicated sharding if its mesh is abstract.

    >>> evenly_split((12, 6), NamedSharding(mesh, PartitionSpec())).shard_shape((12, 6))
    (3, 3)
    """
    if not isinstance(stored, NamedSharding):
        return None
    if not isinstance(stored.mesh, Mesh):
        return NamedSharding(stored.mesh, PartitionSpec())
    # The dim that is split in the padded array comes first: then only neighbouring devices exchange values.
    is_split = dict(enumerate(stored.spec))
    order = sorted(range(len(shape)), key=lambda dim: (not is_split.get(dim), -math.gcd(shape[dim], stored.mesh.size)))
    counts = [1] * len(shape)
    left = stored.mesh.size
    for dim in order:
        counts[dim] = math.gcd(shape[dim], left)
        left //= counts[dim]
    names = [f"dim_{dim}" for dim in range(len(shape))]
    devices = stored.mesh.devices.reshape(*(counts[dim] for dim in order), left)
    in_order = *(names[dim] for dim in order), "replica"
    return NamedSharding(Mesh(devices, in_order, axis_types=(AxisType.Auto,) * devices.ndim), PartitionSpec(*names))


def boxed_like(target: PyTree, leaves: Leaves, in_store: Set[str] = frozenset()) -> PyTree:
    """Returns the tree ``target`` with the values ``leaves`` in its boxes, converted to the form that devices store.

    The stored form has padding, for example. A leaf that is stored unchanged is not converted.

    Args:
      target: the tree to imitate, with arrays or abstract arrays as leaves.
      leaves: the new values by path, in the shapes of the plain model.
      in_store: paths of leaves that are already in the stored form, and are not converted.
    """

    def stored(path: str, like: Sharded) -> Any:
        if like.stores_value or path in in_store:
            return leaves[path]
        return jax.jit(on_auto_axes(partial(_written, like)), out_shardings=like.value.sharding)(leaves[path])

    return map_values_with_path(stored, target)


def _written(like: Sharded, value: Any) -> Any:
    """Converts a value in the shape of the plain model to the array that devices store for the leaf ``like``.

    Runs inside ``jit``. For a padded leaf, zeros are appended. If the number of dims stays, the result is constrained
    to the sharding ``evenly_split``, so that each device computes only a part. (Without such a sharding there is no
    constraint.)
    """
    stored, split = stored_value(like, value), evenly_split(like.true_shape, like.value.sharding)
    if split is None or stored.ndim != value.ndim:
        return stored
    # Zeros are appended first, then parts are exchanged: in one step XLA would replicate the value.
    return lax.with_sharding_constraint(stored, split)


def _checked(path: str, leaf: Any) -> Any:
    """Returns ``leaf`` unchanged after a check that a checkpoint can store the leaf; ``path`` names the leaf in errors.

    Raises:
      TypeError: the leaf is neither a Python number, an array of numbers or bools, nor a PRNG key; or is a masked
        array.
      ValueError: the leaf is a Python integer of more than 64 bits.
    """
    if type(leaf).__name__ in PYTHON_DTYPES:
        if type(leaf) is int and not -(2**63) <= leaf < 2**63:
            raise ValueError(f"'{path}' is the integer {leaf}, which has more than the 64 bits that are stored.")
        return leaf
    dtype = getattr(leaf, "dtype", None)
    kinds = (jnp.number, np.bool_, jax.dtypes.prng_key)
    if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise TypeError(
            f"'{path}' is {f'an array of {dtype}' if dtype is not None else type(leaf).__name__}; a checkpoint holds "
            "numbers, arrays of numbers and PRNG keys. Save other objects separately, or keep them out of the pytree."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"'{path}' is a masked array, whose mask would be lost; keep its data and its mask as two leaves."
        )
    return leaf


def is_local(leaf: object) -> bool:
    """Returns whether every process has a full copy of a leaf, so that process 0 alone stores the leaf.

    True for Python numbers, NumPy arrays, uncommitted ``jax.Array``, abstract arrays without a sharding and, in a run
    of several processes, arrays on the devices of a single process. False for other arrays, which are stored shard by
    shard.
    """
    if isinstance(leaf, jax.Array):
        return not leaf.committed or (jax.process_count() > 1 and leaf.is_fully_addressable)
    sharding = getattr(leaf, "sharding", None)
    return sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable)


def stored_arrays(leaves: Leaves) -> Arrays:
    """Converts each leaf to the array to write, by path: a NumPy array for a local leaf, else a ``jax.Array``.

    Local leaves are those of which every process has a full copy (``is_local``). A Python number becomes an array
    without dims of 64 bits (bool stays bool), a PRNG key becomes its key data, uint32.
    """

    def stored(leaf: Any) -> Any:
        if (kind := type(leaf).__name__) in PYTHON_DTYPES:
            return np.asarray(leaf, PYTHON_DTYPES[kind])
        data = jax.random.key_data(leaf) if is_prng_key(leaf) else leaf
        return np.asarray(data) if is_local(leaf) else data

    return {path: stored(leaf) for path, leaf in leaves.items()}


# ---------------------------------------------------------------------------------------------------------- the record


def record_without_sums(leaves: Leaves, state: PyTree = None) -> Record:
    """Returns the record of a state without checksums: an entry with shape and dtype for each of ``leaves``, by path.

    The entry of a PRNG key also has the name of the key implementation. For each ``opt_state`` in ``state``, the entry
    of the leaf with the first path in alphabetical order also has the name of the optimizer; with ``state=None`` no
    entry has an optimizer. The record references no array.
    """
    record = {path: _description(leaf) for path, leaf in leaves.items()}
    for path, leaf in leaves.items():
        if is_prng_key(leaf):  # `key_impl` takes only concrete keys; the dtype of abstract keys has the implementation
            record[path]["impl"] = str(jax.random.key_impl(leaf))
    for begin, name in _optimizers_of(state).items():
        if (first := _first(record, begin)) is not None:
            record[first][OPTIMIZER] = name
    return record


def _description(leaf: Any) -> Entry:
    if (kind := type(leaf).__name__) in PYTHON_DTYPES:
        return {"shape": [], "dtype": kind}
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def with_sums(record: Record, sums: Mapping[str, list[int]]) -> Record:
    """Returns only the record entries whose paths are in ``sums``, each with its checksum from ``sums`` added."""
    return {path: entry | {"checksum": sums[path]} for path, entry in record.items() if path in sums}


def to_json(record: Record, step: int) -> Json:
    """Returns a record as JSON, a dict: "leaves" (the record), "digest" (of the record), "step", and "step_digest".

    Digests are SHA-256 in hexadecimal digits; "step_digest" is the digest of the list [step, "digest"].
    """
    digest = _digest(record)
    return {"leaves": record, "digest": digest, "step": step, "step_digest": _digest([step, digest])}


def from_json(content: Json, step: int) -> Record:
    """Returns the record (shape, dtype and checksum of each leaf, by path) from its JSON; the inverse of ``to_json``.

    ``step`` is the number in the name of the folder.

    Raises:
      ValueError: a digest is wrong, the record belongs to a different step, or an entry is invalid.
    """
    record = content.get("leaves") if isinstance(content, dict) else None
    if record is None or content.get("digest") != _digest(record):
        raise ValueError("the record of leaves does not have its digest")
    if not (isinstance(record, dict) and record):
        raise ValueError("the record has its digest, and holds no leaves")
    if wrong := [path for path, entry in record.items() if not _is_entry(entry)]:
        raise ValueError(f"{listed(wrong)}: the record has its digest, and does not describe an array there")
    check_number(saved_as(content), step)
    return record


def saved_as(content: Json) -> int | None:
    """Returns the step number in a record, given as JSON; None if the number or its digest is missing or wrong."""
    if not isinstance(content, dict) or type(number := content.get("step")) is not int:
        return None
    return number if content.get("step_digest") == _digest([number, content.get("digest")]) else None


def check_number(number: int | None, name: int) -> None:
    """Raises a ``ValueError`` if the recorded step ``number`` is None, or is not the number ``name`` of the folder."""
    if number is None:
        raise ValueError("the record's number of the step does not have its digest")
    if number != name:
        raise ValueError(
            f"it was saved as step {number}, and its folder was renamed, copied or linked to {name}; rename the folder "
            f"to {number}"
        )


def _is_entry(entry: Json) -> bool:
    """Returns whether a record entry, read from JSON, describes an array.

    A valid entry is a dict with a shape, a known dtype and a checksum of two non-negative integers. The entry of a PRNG
    key must also have the key implementation, and any entry may have the name of an optimizer.
    """
    # Checked even with a correct digest: a different program or version may have written the record.
    try:
        with interruptions_go_on():
            names, numbers = entry.keys() - {OPTIMIZER}, [*entry["shape"], *entry["checksum"]]
            wanted = {"shape", "dtype", "checksum"} | ({"impl"} if entry["dtype"].startswith("key<") else set())
            is_described = names == wanted and all(type(number) is int and number >= 0 for number in numbers)
            data_struct(entry)
            return is_described and len(entry["checksum"]) == 2 and isinstance(entry.get(OPTIMIZER, ""), str)
    except Exception:  # NumPy and JAX raise errors of various types for an unknown dtype or key implementation
        return False


def _digest(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_sound(record: Record, arrays: Arrays) -> None:
    """Raises a ``ValueError`` if shape, dtype or checksum of a restored array differ from the record; lists the paths.

    Every process must call this function, because checksums of global arrays have collectives. ``arrays`` has an array
    for each path in ``record``.
    """
    sums = checksum_each(arrays)

    def is_sound(path: str, entry: Entry) -> bool:
        struct, array = data_struct(entry), arrays[path]
        return (array.shape, array.dtype, sums[path]) == (struct.shape, struct.dtype, entry["checksum"])

    if bad := [path for path, entry in record.items() if not is_sound(path, entry)]:
        raise ValueError(f"{listed(bad)}: what was read does not have the checksum or dtype of what was saved")


# --------------------------------------------------------------------------------------- the optimizer, the experiment


@runtime_checkable
class HasOptimizer(Protocol):
    """Protocol of states with an optimizer: the ``TrainState`` of this library or of Flax."""

    tx: optax.GradientTransformation
    opt_state: PyTree


def _optimizers_of(state: PyTree) -> dict[str, str]:
    """Returns the name and version of each optimizer in a state, by the path prefix of its ``opt_state``.

    The result is {} without optimizers. An example of the result: ``{"train/opt_state/": "chain(scale_by_adam, scale)
    of optax 0.2.6"}``.
    """
    with_paths, _ = flatten_with_path(state, HasOptimizer)
    nodes = {path: node for path, node in with_paths if isinstance(node, HasOptimizer) and hasattr(node.tx, "update")}
    begin = {path: "opt_state/" if path == "." else f"{path}/opt_state/" for path in nodes}
    return {begin[path]: f"{name_of(node.tx, flags=True)} of optax {optax.__version__}" for path, node in nodes.items()}


def _first(entries: Record, begin: str) -> str | None:
    return min((path for path in entries if path.startswith(begin)), default=None)


def warn_if_other_optimizer(where: str, entries: Record, state: PyTree) -> None:
    """Warns if an ``opt_state`` was saved with an optimizer different from the optimizer of the target ``state``.

    Args:
      where: name of the saved step, for the warning.
      entries: the record of the saved step; an ``opt_state`` for which the record has no optimizer causes no warning.
      state: the target, which has the optimizers.
    """
    for begin, wanted in _optimizers_of(state).items():
        saved = entries.get(_first(entries, begin) or "", {}).get(OPTIMIZER, wanted)
        saved_name, other = (name.rpartition(" of optax ")[0] for name in (saved, wanted))
        # The states of this library's `muon` and of optax's `muon` are interchangeable.
        if saved_name != other and not ("muon" in saved_name and "muon" in other):
            warn_user(
                f"{where}: '{_first(entries, begin)}' was saved with the optimizer {saved}, and is read into the state "
                f"of {wanted}, whose moments may mean something else. To start with a new optimizer state, read only "
                "the parameters, with restore_params.",
            )


def check_same_tree(entries: Record, newest: Record, where: str) -> None:
    """Raises a ``ValueError`` if paths, shapes or dtypes of a state to save differ from the newest saved step.

    A Python number and an array of the same kind (bool, int, float, complex) count as equal dtypes.

    Args:
      entries: record of the state to save.
      newest: record of the newest step.
      where: name of the newest step in the error.
    """
    paths = sorted(entries.keys() | newest.keys())
    unlike = [path for path in paths if not (path in entries and path in newest and fits(newest[path], entries[path]))]
    if unlike:
        both = [record.get(unlike[0]) for record in (newest, entries)]
        saved, new = ("nothing" if entry is None else f"{entry['dtype']}{entry['shape']}" for entry in both)
        raise ValueError(
            f"{where} is of another state than the one to save: at {listed(unlike)}, first {saved} there and {new} "
            "here. Use a different directory for each experiment; to continue from that step, restore it first, or "
            "its parameters with restore_params."
        )


# ---------------------------------------------------------------------------------------------------------- the target


def check_fits(record: Record, likes: Leaves, where: str) -> None:
    """Raises a ``ValueError`` if the paths, shapes or dtypes of a target differ from the record of a saved step.

    The error names the paths that differ; or a leaf, with its shape and dtype in both. A Python number and an array of
    the same kind (bool, int, float, complex) count as equal dtypes.

    Args:
      record: the record of the saved step, or of a part of the state.
      likes: leaves of the target, by path in the record.
      where: name of the step in the error.
    """
    if problem := names_problem(record.keys(), likes.keys(), "the abstract state has"):
        raise ValueError(
            f"{where} does not fit the abstract state: {problem}. Restore into a state of the saved structure (same "
            "model, optimizer and frozen parameters), or read only the parameters with restore_params."
        )
    unlike = [path for path, like in likes.items() if not fits(record[path], _description(like))]
    if unlike:
        entries = record[unlike[0]], _description(likes[unlike[0]])
        saved, wanted = (f"{entry['dtype']}{entry['shape']}" for entry in entries)
        raise ValueError(
            f"{where} does not fit the abstract state: '{unlike[0]}' was saved as {saved}, and the abstract state has "
            f"{wanted}{f' (and {len(unlike) - 1} more)' if unlike[1:] else ''}. Restore into the same model, optimizer "
            "and frozen_dtype; save metric.sync of a metric's Local state, which has a row per device."
        )


def part_of(record: Record, where: str, *, names: Set[str], path: str | None) -> str:
    """Finds the parameters in a saved state; returns the prefix of their paths, such as "train/params/", or "".

    If ``path`` is given, the prefix is the path and a slash ("" for the path ""). If ``path`` is None, the parameters
    are searched for: the full record, or a part called "params", whose leaves are exactly ``names``. If neither fits,
    the only part called "params" is returned, so that ``check_fits`` can name the leaves that differ.

    Args:
      record: the record of the saved state, by path.
      where: names the step in errors.
      names: paths of the leaves of the parameters to restore.
      path: path of the parameters in the saved state; None: unknown.
    Raises:
      ValueError: the record has no part at ``path``; several parts have exactly the leaves ``names``; or none has, and
        not exactly one part is called "params".
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
    # If no part fits, a single part called "params" is returned, so that `check_fits` names the leaves that differ.
    candidates = fitting or called
    if len(candidates) != 1:
        problem = "no part 'params'"
        if candidates:
            problem = f"more than one part called 'params': {listed(candidates, PARTS_SHOWN)}"
        raise ValueError(
            f"{where} has {problem}. Say with path= which part to read, of {listed(_parts(record), PARTS_SHOWN)}."
        )
    return candidates[0]


def _parts(record: Record) -> list[str]:
    """Returns the paths of a record's inner nodes, outermost first: ``["a", "a/b"]`` for the leaves a/x and a/b/c."""
    return sorted({above for path in record for above in _above(path)}, key=lambda path: (path.count("/"), path))


def names_problem(saved: Set[str], expected: Set[str], target_has: str) -> str:
    """Returns text for an error about names that only one of two sets has; "" for equal sets.

    For example ``names_problem({"a", "b"}, {"a", "c"}, "the parameters have")`` is "it has no 'c'; and it has 'b',
    which the parameters have not".

    Args:
      saved: names in the file or record.
      expected: names in the target.
      target_has: begin of the clause about the target.
    """
    missing, extra = sorted(expected - saved), sorted(saved - expected)
    problems = [f"it has no {listed(missing)}"] if missing else []
    problems += [f"it has {listed(extra)}, which {target_has} not"] if extra else []
    return "; and ".join(problems)


def fits(saved: Entry, like: Entry) -> bool:
    """Returns whether a saved leaf can be read into a leaf of the target: the shapes are equal, and the dtypes fit.

    Both arguments are record entries, of which shape and dtype are compared. Dtypes fit if they are equal; or if one of
    the two leaves is a Python number and both are of the same kind (bool, int, float, complex). A step counter, for
    example, is an int before the first step, and an array afterwards.
    """
    names = {saved["dtype"], like["dtype"]}
    same_kind = bool(names & PYTHON_DTYPES.keys()) and len(set(map(_kind, names))) == 1
    return saved["shape"] == like["shape"] and (len(names) == 1 or same_kind)


def _kind(dtype: str) -> str:
    if dtype in _KINDS or dtype.startswith("key<"):
        return dtype
    return next((kind for kind, of in _KINDS.items() if jnp.issubdtype(jnp.dtype(dtype), of)), dtype)


def target_leaves(target: PyTree, value_of: Callable[[Sharded], Any] | None = None) -> Leaves:
    """Returns the leaves of a restore target by path, without boxes and padding, after a check of their shardings.

    If ``value_of`` is not None, the result has ``value_of(leaf)`` for each leaf, which is passed as a ``Sharded`` (the
    library's box).

    Raises:
      TypeError: a leaf is not numeric.
      ValueError: an abstract leaf has no sharding in a run with several devices; a sharding does not divide the shape
        of a leaf; the target has no leaves; or two leaves have the same name on disk.
    """
    likes = bare_leaves(target, value_of)
    for path, like in likes.items():
        if isinstance(like, jax.ShapeDtypeStruct) and like.sharding is None and jax.device_count() > 1:
            raise ValueError(
                f"the abstract leaf '{path}' of shape {like.shape} has no sharding, and there are "
                f"{jax.device_count()} devices. Make the target with abstract_train_state, or give each "
                "ShapeDtypeStruct a sharding."
            )
        if (sharding := getattr(like, "sharding", None)) is not None:
            sharding.shard_shape(like.shape)  # raises if the sharding does not divide the shape
    return likes


def reads_full_array(entry: Entry, like: Any) -> bool:
    """Returns whether each process reads a saved leaf in full into a NumPy array, and not in shards onto devices.

    True if the target leaf ``like`` is local (every process has a full copy), or if ``entry``, the record entry of the
    saved leaf, is of a Python number or of an array of size 0.
    """
    # "bool" is the dtype of both a Python bool and a bool array; only an array has dims.
    is_number = entry["dtype"] in PYTHON_DTYPES and not entry["shape"]
    return is_local(like) or is_number or 0 in entry["shape"]


def data_struct(entry: Entry) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the stored array for a record entry.

    A Python number is stored with 64 bits (bool stays bool). A PRNG key is stored as its key data, uint32 with a
    further dim.
    """
    shape = tuple(entry["shape"])
    if "impl" in entry:
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=entry["impl"])))
        return jax.ShapeDtypeStruct((*shape, *data.shape), data.dtype)
    return jax.ShapeDtypeStruct(shape, np.dtype(PYTHON_DTYPES.get(entry["dtype"], entry["dtype"])))


def read_structs(record: Record, likes: Leaves) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape, dtype and sharding with which ``Backend.read_arrays`` reads each leaf of ``record``, by path.

    Shape and dtype are those of the stored array (``data_struct``). The sharding is from the target leaf in ``likes``,
    which are by path in the record; None for a leaf that each process reads in full.
    """
    return {
        path: data_struct(entry).update(sharding=None if reads_full_array(entry, likes[path]) else likes[path].sharding)
        for path, entry in record.items()
    }


def as_like(array: Any, entry: Entry, like: Any, path: str) -> Any:
    """Converts a restored array to the type of the target leaf: Python number, NumPy array, ``jax.Array`` or PRNG key.

    An array that was read in shards is returned unchanged, or as a PRNG key. A NumPy array that was read in full is
    cast to the dtype of ``like``, and placed in the sharding of ``like``.

    Args:
      array: the array from ``Backend.read_arrays``; the key data of a PRNG key.
      entry: the record entry of the saved leaf.
      like: the target leaf, an array, abstract array or Python number.
      path: names the leaf in the error.
    Raises:
      ValueError: the dtype of the target cannot represent a saved Python number.
    """
    if type(like).__name__ in PYTHON_DTYPES:
        return type(like)(array.item())
    if "impl" in entry:
        data = placed_like(array, like) if reads_full_array(entry, like) else array
        wrap = partial(jax.random.wrap_key_data, impl=entry["impl"])
        return jax.jit(wrap, out_shardings=data.sharding if data.committed else None)(data)
    if not reads_full_array(entry, like):
        return array
    # A Python number may be read into a narrower dtype that represents the value. (Overflow raises below.)
    with np.errstate(all="ignore"):
        cast = array.astype(like.dtype)
    if array.dtype != like.dtype and not np.array_equal(cast, array, equal_nan=True):
        raise ValueError(f"'{path}' was saved as the Python number {array.item()!r}, which is not a {like.dtype}.")
    return placed_like(cast, like)


def placed_like(array: Any, like: Any) -> Any:
    """Returns a copy of a host array: in NumPy if ``like`` is a NumPy array, else a ``jax.Array`` in ``like.sharding``.

    ``array`` may be any object that supports array indexing. If ``like`` is uncommitted or has no sharding, the result
    is an uncommitted ``jax.Array``.
    """
    return read_like(array, like)()


def read_like(array: Any, like: Any) -> Callable[[], Any]:
    """Copies the entries of ``array`` that this process needs; returns a function that makes the full array.

    The returned function takes no arguments, and returns a NumPy array if ``like`` is a NumPy array, else a global
    ``jax.Array`` in ``like.sharding``; an uncommitted ``jax.Array`` if ``like`` is uncommitted or has no sharding.

    ``read_like`` may run in any thread. The returned function must be called in the thread that requested the read,
    because placing depends on thread-local settings of JAX: the default device, 64 bits.

    Args:
      array: a host array, or any object that supports array indexing, such as a tensor in a file.
      like: an array or abstract array with the shape of ``array``.
    """
    if isinstance(like, np.ndarray | np.generic):
        value = np.array(array) if isinstance(like, np.ndarray) else array[()]
        return lambda: value
    # Copies, because JAX on a CPU may alias the memory of a NumPy array, which may be a memory-mapped file.
    # An uncommitted target stays uncommitted: a committed array could not be combined with arrays on other devices.
    if like.sharding is None or not getattr(like, "committed", True):
        copy = _aligned_copy(array)
        return lambda: jnp.asarray(copy)
    indices = [*like.sharding.addressable_devices_indices_map(array.shape).values()]
    # One copy per device, whose memory JAX takes over; for a replicated sharding JAX calls the callback once.
    shards: dict[str, list[np.ndarray]] = {}
    for index in indices[:1] if like.sharding.is_fully_replicated else indices:
        shards.setdefault(str(index), []).append(_aligned_copy(array[index]))
    return lambda: jax.make_array_from_callback(array.shape, like.sharding, lambda index: shards[str(index)].pop())


def _aligned_copy(values: Any) -> np.ndarray:
    """Returns a NumPy copy of ``values`` at an address that is a multiple of 64 bytes.

    On a CPU JAX takes over memory of this alignment without a second copy.
    """
    values = np.asarray(values)
    room = np.empty(values.nbytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    copy = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy

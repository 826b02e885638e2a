"""Processes compare what they start with, and all of them learn what differs.

  every process   value --> {"optimizer/lr": "0.001", ...} --> digest, posted
  process 0       waits for all digests, sorts the processes into kinds, posts who is of which kind
  every process   reads that: one kind, and it goes on; several, and it reads the entries of one process of each kind
                  and raises: which entry, on which process, with which value

Posts go through the key-value store of JAX's coordination service, which ``jax.distributed.initialize`` starts, and not
through a collective such as ``multihost_utils.assert_equal``. A collective waits for ever for a process that does not
come, needs the same number of devices in every process, and starts the devices, so it cannot run before the choice of
devices is made. JAX has no public name for the store and for who this process is before devices are started;
``jax._src.distributed`` is where other libraries take them from too.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import platform
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.boxes import leaves_with_path
from xlstm_jax.distributed.data_parallel.communication import is_prng_key

AGREEMENT_TIMEOUT_S = 60.0
COMPARED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
GRACE_S = 1.0  # for the answer of the first process, which may have waited to the end
REPORT_TIMEOUT_S = 10.0
KINDS_SHOWN = 8
LINES_SHOWN = 12
TEXT_SHOWN = 80  # characters of a value in an error
VALUES_SHOWN = 6  # of an array

_rounds: dict[str, Iterator[int]] = defaultdict(itertools.count)  # Every process counts the same comparisons.


def assert_same_everywhere(
    value: PyTree, what: str = "configuration", *, timeout_s: float = AGREEMENT_TIMEOUT_S
) -> None:
    """Raises on every process, within seconds, if processes call it with different values. Call it in all of them.

    Call it after ``initialize_distributed`` and before the model is built: processes with different configurations run
    different programs, which wait for each other for ever, and with different seeds they train a mixture. In one
    process it does nothing.

    Args:
      value: dataclasses, mappings, sequences, namespaces and pytrees of numbers, strings, bytes, arrays, enums, dtypes
        and the like. Functions and classes are compared by their names, modules and packages by their source files:
        pass ``{"config": config, "seed": seed, "code": [my_package, xlstm_jax]}``. The versions of Python and of the
        packages that computations depend on are compared in any case.
      what: what the error calls it.
      timeout_s: how long to wait for a process that does not come.
    Raises:
      ValueError: the values differ: key path, both values, and on which processes.
      TimeoutError: processes did not call it in time; says which.
      TypeError: a leaf that cannot be compared between processes; says where.
    """
    here = {**entries_of(value), **_versions()}
    if jax.distributed.is_initialized():
        state = distributed.global_state
        compare(here, what, state.process_id, range(state.num_processes), timeout_s)


def compare(entries: Mapping[str, str], what: str, me: int, processes: Sequence[int], timeout_s: float) -> None:
    """``assert_same_everywhere`` of entries, among ``processes``, of which this one is ``me``.

    Each process sends two messages; the first one sorts, and sends one more for each of the others.
    """
    room, deadline = _Room(processes), time.monotonic() + timeout_s
    room.post(f"digest/{me}", _digest(f"{what} {json.dumps(sorted(entries.items()))}"))
    if me == processes[0]:
        _sort(room, processes, deadline)
    sorted_out = json.loads(room.read("sorted", deadline + GRACE_S) or "{}")
    kinds = sorted_out.get("kinds", [])
    if not kinds:
        missing = sorted_out.get("missing") or sorted(set(processes) - room.posted("digest/")) or processes[:1]
        raise TimeoutError(
            f"{what}: {_named(missing)} did not come to compare it within {timeout_s:g} s; this is {_named([me])}. See "
            f"the log of process {missing[0]}: it may have died, hang, be late, or run other code."
        )
    if len(kinds) > 1:
        raise ValueError(_difference(what, *_reports(room, kinds[:KINDS_SHOWN], {"compared": what, **entries}, me)))


def _sort(room: "_Room", processes: Sequence[int], deadline: float) -> None:
    """Posts which processes have the same digest, the largest group first; or which ones did not come."""
    groups = defaultdict(list)
    for process in processes:
        groups[room.read(f"digest/{process}", deadline)].append(process)
    if None in groups:
        room.post("sorted", json.dumps({"missing": groups[None]}))
        return
    room.forget_the_last()  # All have come here, so all have left that one.
    room.post("sorted", json.dumps({"kinds": sorted(groups.values(), key=len, reverse=True)}))


def _reports(
    room: "_Room", kinds: list[list[int]], entries: Mapping[str, str], me: int
) -> tuple[list[list[int]], list[dict[str, str]]]:
    """The kinds with the entries of the first process of each; those that have them post them here."""
    if me in [kind[0] for kind in kinds]:
        room.post(f"entries/{me}", json.dumps(entries))
    texts = [room.read(f"entries/{kind[0]}", time.monotonic() + REPORT_TIMEOUT_S) for kind in kinds]
    came = [(kind, json.loads(text)) for kind, text in zip(kinds, texts, strict=True) if text]
    return [kind for kind, _ in came], [report for _, report in came]


def entries_of(value: PyTree) -> dict[str, str]:
    """Every leaf by its path, as a short text that differs where the leaf differs.

    Raises:
      TypeError: a leaf whose text would not be the same in two processes.
    """
    return dict(_walk(value, ""))


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    children = _children(value)
    if children is None:
        yield path or ".", _text(value, path or ".")
    elif not children:
        yield path or ".", f"empty {type(value).__name__}"
    else:
        for key, child in children.items():
            yield from _walk(child, f"{path}/{key}" if path else str(key))


def _children(value: Any) -> dict[Any, Any] | None:
    """What ``value`` is made of, by name; None for a leaf."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): child for key, child in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, set | frozenset):
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, **value.keywords}
    if isinstance(value, ModuleType):
        return _source_files(value)
    leaves = leaves_with_path(value)  # other pytrees
    return None if value is None or [path for path, _ in leaves] == ["."] else dict(leaves)


def _source_files(module: ModuleType) -> dict[str, str]:
    """The digest of each source file of a module or package, by its path within."""
    roots = [Path(root) for root in getattr(module, "__path__", [])]
    files = {str(file.relative_to(root)): file for root in roots for file in sorted(root.rglob("*.py"))}
    if not roots and getattr(module, "__file__", None):
        files = {Path(module.__file__).name: Path(module.__file__)}
    return {name: f"sha256 {_digest(file.read_bytes())}" for name, file in files.items()} or {"name": module.__name__}


def _text(leaf: Any, path: str) -> str:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return _array_text(leaf, path)
    if isinstance(leaf, bytes | bytearray):
        return f"{len(leaf)} bytes, sha256 {_digest(bytes(leaf))}"
    if callable(leaf) and hasattr(leaf, "__qualname__"):
        return f"{getattr(leaf, '__module__', '')}.{leaf.__qualname__}"
    text = repr(leaf)
    if " at 0x" in text or type(leaf).__repr__ is object.__repr__:
        raise TypeError(
            f"'{path}' is {_short(text)}: a {type(leaf).__name__} has no text that is the same in two processes with "
            "the same value. Pass its fields, as vars(...), or leave it out."
        )
    return _short(text)


def _array_text(leaf: Any, path: str) -> str:
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise TypeError(
            f"'{path}' of shape {leaf.shape} is split over processes, so none of them holds it. Compare what it is "
            "made from: the configuration and the seed."
        )
    values = np.asarray(jax.random.key_data(leaf) if is_prng_key(leaf) else leaf)
    first = ", ".join(map(str, values.ravel()[:VALUES_SHOWN])) + (", ..." if values.size > VALUES_SHOWN else "")
    return f"{leaf.dtype}{list(leaf.shape)} ({first}), sha256 {_digest(values.tobytes())}"


def _short(text: str) -> str:
    if len(text) <= TEXT_SHOWN:
        return text
    return f"{text[:TEXT_SHOWN]}... ({len(text)} characters, sha256 {_digest(text)})"


def _digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:16]


def _versions() -> dict[str, str]:
    packages = {f"version of {name}": metadata.version(name) for name in COMPARED_PACKAGES}
    return {"version of python": platform.python_version(), **packages}


def _difference(what: str, kinds: Sequence[Sequence[int]], reports: Sequence[Mapping[str, str]]) -> str:
    lines = []
    for path in dict.fromkeys(itertools.chain.from_iterable(reports)):
        where = defaultdict(list)
        for kind, report in zip(kinds, reports, strict=True):
            where[report.get(path, "absent")].extend(kind)
        if len(where) > 1:
            lines.append(f"'{path}' is " + ", but ".join(f"{text} on {_named(on)}" for text, on in where.items()))
    hidden = f"\n  and {len(lines) - LINES_SHOWN} more" if len(lines) > LINES_SHOWN else ""
    return f"the {what} differs between processes:\n  " + "\n  ".join(lines[:LINES_SHOWN]) + hidden


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, sorted(processes)))}"


class _Room:
    """A folder of the coordination service's key-value store, for one comparison among some processes."""

    def __init__(self, processes: Sequence[int]):
        self._client = distributed.global_state.client
        members = _digest(str(list(processes)))
        self._number = next(_rounds[members])
        self._rooms = f"xlstm_jax/agreement/{members}"

    def post(self, name: str, text: str) -> None:
        self._client.key_value_set(f"{self._rooms}/{self._number}/{name}", text)

    def read(self, name: str, deadline: float) -> str | None:
        """Waits for it; None after the deadline."""
        wait_ms = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            return self._client.blocking_key_value_get(f"{self._rooms}/{self._number}/{name}", wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def posted(self, folder: str) -> set[int]:
        """The processes that have posted in the folder."""
        found = self._client.key_value_dir_get(f"{self._rooms}/{self._number}/{folder}")
        return {int(key.rsplit("/", 1)[1]) for key, _ in found}

    def forget_the_last(self) -> None:
        if self._number:
            self._client.key_value_delete(f"{self._rooms}/{self._number - 1}/")

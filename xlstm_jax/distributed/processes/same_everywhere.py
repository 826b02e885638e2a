"""Comparison of start values between processes; every process learns which values differ.

  every process     value --> {"optimizer/lr": "0.001", ...} --> sends a digest of the entries to every process
  digests equal     every process continues
  digests differ    a process per group of equal digests sends its entries, and every process raises an error with the
                    different entries, values and processes

Processes communicate through the key-value store of ``processes/store.py``: the store works before devices are started,
and never waits forever.
"""

import dataclasses
import functools
import json
import os
import platform
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.processes.store import KeyValueStore, by_text, digest, exchange_in, named
from xlstm_jax.private_names import job

AGREEMENT_TIMEOUT_S = 60.0
COMPARED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
GROUPS_SHOWN = 8
LINES_SHOWN = 12
TEXT_SHOWN = 80  # characters of a value in an error
VALUES_SHOWN = 6  # of an array in an error


def assert_same_everywhere(
    value: PyTree, what: str = "configuration", *, timeout_s: float = AGREEMENT_TIMEOUT_S
) -> None:
    """Raises an error in every process if processes pass different values, within seconds of the last process's call.

    Call the function in every process, after ``initialize_distributed`` and before the model is built. Processes with
    different configurations run different programs and wait for each other forever, and processes with different seeds
    start from different weights. In a single process nothing is compared; a leaf that cannot be compared still raises.

    Args:
      value: dataclasses, mappings, sequences, namespaces and pytrees of numbers, strings, bytes, arrays, enums, dtypes
        and similar leaves. Functions and classes are compared by name, modules and packages by their source files: pass
        ``{"config": config, "seed": seed, "code": [my_package, xlstm_jax]}``. The comparison also includes the versions
        of Python and of the numerical packages, and the settings of JAX that change a computation: options of
        ``jax.config``, XLA_FLAGS, LIBTPU_INIT_ARGS, NVIDIA_TF32_OVERRIDE (see ``COMPARED_OPTIONS``).
      what: the name of the value in the error.
      timeout_s: seconds to wait for a late process.
    Raises:
      ValueError: the values differ; lists up to 12 leaves by path, each with its values (up to 80 characters) in the
        8 largest groups of equal processes, and the processes of each value.
      TimeoutError: processes are missing after ``timeout_s``; names the processes.
      TypeError: a leaf cannot be compared between processes; names its path. Processes without such a leaf wait for
        ``timeout_s`` and raise TimeoutError.

    >>> assert_same_everywhere({"lr": 1e-3, "seed": 0})  # two processes with the seeds 0 and 1: both raise
    """
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in COMPARED_PACKAGES}
    entries = entries_of(value) | {f"version of {name}": version for name, version in versions.items()} | jax_settings()
    if jax.distributed.is_initialized():
        compare(entries, what, job.process_id, range(job.num_processes), timeout_s)


def compare(entries: Mapping[str, str], subject: str, me: int, processes: Sequence[int], timeout_s: float) -> None:
    """Raises a ``ValueError`` in every process if ``entries`` (text by path) differ between processes.

    Every one of ``processes``, by index, must call the function; ``me`` is the index of this process. ``subject`` names
    the entries in the error, which lists the different entries by process. Raises a ``TimeoutError`` if a process does
    not call within ``timeout_s`` seconds.
    """
    # Exchange digests first: the entries of a large configuration, times thousands of processes, exceed the store.
    entries_digest = digest(json.dumps(sorted(entries.items())))
    digests = exchange_in(
        KeyValueStore("agreement", me, processes), entries_digest, f"compare the {subject}", timeout_s
    )
    groups = sorted(by_text(digests, processes).values(), key=len, reverse=True)
    if len(groups) == 1:
        return
    # Every process exchanges again, so that their counts in the store stay equal; one per group sends its entries.
    shown = json.dumps(dict(entries) if me in [group[0] for group in groups[:GROUPS_SHOWN]] else {})
    texts = exchange_in(
        KeyValueStore("agreement", me, processes), shown, f"see what differs in the {subject}", timeout_s
    )
    of_process = dict(zip(processes, map(json.loads, texts), strict=True))
    raise ValueError(_difference(subject, [(group, of_process[group[0]]) for group in groups[:GROUPS_SHOWN]]))


def entries_of(value: PyTree) -> dict[str, str]:
    """Returns a short text for each leaf of a value, by path, as {"optimizer/lr": "0.001", ...}.

    Different leaves have different texts (functions and classes: different names), and equal leaves have equal texts in
    all processes. The path of a bare leaf is "."; an empty container counts as a leaf. Raises a ``TypeError`` for a
    leaf without such a text.
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
    """Returns a dict with the children of ``value`` by name or index, {} for an empty container; None for a leaf.

    Dataclasses, namespaces, mappings, sequences, sets (sorted), partial functions and other pytrees have children. The
    children of a Python module are digests of its source files. The value None is a leaf, unlike in JAX.
    """
    # Not by JAX's pytree registry alone, which treats configuration dataclasses and namespaces as leaves.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): child for key, child in value.items()}
    if isinstance(value, tuple) and (as_dict := getattr(value, "_asdict", None)):
        return as_dict()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, set | frozenset):
        # Sort: processes hash strings with different seeds, so the order of a set of strings differs.
        return dict(enumerate(sorted(value, key=repr)))
    if isinstance(value, functools.partial):
        return {"function": value.func, "args": value.args, **value.keywords}
    if isinstance(value, ModuleType):
        return _source_files(value)
    leaves = leaves_with_path(value)  # other pytrees
    return None if value is None or [path for path, _ in leaves] == ["."] else dict(leaves)


def _source_files(module: ModuleType) -> dict[str, str]:
    """Returns a digest of each Python file of a module or package, as text by path relative to the package.

    A module without source files gives its name only: {"name": ...}.
    """
    roots = [Path(root) for root in getattr(module, "__path__", [])]
    files = {str(file.relative_to(root)): file for root in roots for file in sorted(root.rglob("*.py"))}
    if not roots and (file := getattr(module, "__file__", None)):
        files = {Path(file).name: Path(file)}
    return {name: f"sha256 {digest(file.read_bytes())}" for name, file in files.items()} or {"name": module.__name__}


def _text(leaf: Any, path: str) -> str:
    """Returns a short text of a leaf, equal in two processes if the values are equal, and different otherwise.

    Functions and classes are compared by name. Raises a ``TypeError`` with ``path`` for a leaf without a comparable
    text: an array split over processes, or an object with a memory address in its ``repr``.
    """
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return _array_text(leaf, path)
    if isinstance(leaf, bytes | bytearray):
        return f"{len(leaf)} bytes, sha256 {digest(bytes(leaf))}"
    if callable(leaf) and hasattr(leaf, "__qualname__"):
        return f"{getattr(leaf, '__module__', '')}.{leaf.__qualname__}"
    text = repr(leaf)
    # Memory addresses differ between processes even if the objects are equal.
    if " at 0x" in text:
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
    return f"{leaf.dtype}{list(leaf.shape)} ({first}), sha256 {digest(values.tobytes())}"


def _short(text: str) -> str:
    if len(text) <= TEXT_SHOWN:
        return text
    return f"{text[:TEXT_SHOWN]}... ({len(text)} characters, sha256 {digest(text)})"


def _difference(subject: str, reports: Sequence[tuple[list[int], Mapping[str, str]]]) -> str:
    """Returns an error text that lists the entries that differ, each with its texts and the processes of each text.

    ``reports`` has (process indices, entries) for each group of processes with equal entries; ``subject`` names the
    entries. An entry that a group lacks is "absent"; the list ends after 12 entries.
    """
    lines = []
    for path in dict.fromkeys(path for _, entries in reports for path in entries):
        processes_by_text = defaultdict(list)
        for group, entries in reports:
            processes_by_text[entries.get(path, "absent")].extend(group)
        if len(processes_by_text) > 1:
            texts = [f"{text} on {named(processes)}" for text, processes in processes_by_text.items()]
            lines.append(f"'{path}' is {', but '.join(texts)}")
    hidden = f"\n  and {len(lines) - LINES_SHOWN} more" if len(lines) > LINES_SHOWN else ""
    return f"the {subject} differs between processes:\n  " + "\n  ".join(lines[:LINES_SHOWN]) + hidden


# ----------------------------------------------------------------------------------------------------- settings of JAX

# Processes with different settings of JAX compile different programs from the same code, or draw different numbers from
# the same key, without any error. Settings that may differ between processes are not compared: location (addresses,
# platforms, devices and their number), output (logs, dumps, profiles, tracebacks), compilation caches, checks that do
# not change results (leaks, transfers), and paths, which differ from host to host.
COMPARED_OPTIONS = frozenset(
    # values: dtypes, precision, random bits, formulas
    "jax_enable_x64 jax_explicit_x64_dtypes jax_numpy_dtype_promotion jax_numpy_rank_promotion "
    "jax_default_matmul_precision jax_allow_f16_reductions jax_default_prng_impl jax_enable_custom_prng "
    "jax_legacy_prng_key jax_threefry_partitionable jax_threefry_gpu_kernel_lowering jax_random_seed_offset "
    "jax_high_dynamic_range_gumbel jax_accurate_erf_inv jax_softmax_custom_jvp jax_use_hlo_logistic_lowering "
    # programs, and therefore the collectives that connect processes
    "jax_disable_jit jax_debug_nans jax_debug_infs jax_no_execution jax_use_shardy_partitioner "
    "jax_use_direct_linearize jax_remat3 jax_compiler_enable_remat_pass jax_disable_most_optimizations "
    "jax_optimization_level jax_exec_time_optimization_effort jax_memory_fitting_level jax_memory_fitting_effort "
    "jax_error_checking_behavior_nan jax_error_checking_behavior_divide jax_error_checking_behavior_oob "
    "jax_ragged_dot_use_ragged_dot_instruction jax_remove_size_one_mesh_axis_from_type "
    # communication between processes
    "jax_cpu_collectives_implementation jax_sort_devices_by_process_index jax_share_binary_between_hosts "
    "jax_enable_preemption_service jax_enable_recoverability".split()
)
FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
PLAIN_VARIABLES = ("NVIDIA_TF32_OVERRIDE",)  # turns TensorFloat-32 off or on in the libraries that XLA calls
OWN_FLAGS = re.compile(r"dump|device_count|cache|profile|log|(dir|path|file|to|from)$")  # names of ignored flags


def jax_settings() -> dict[str, str]:
    """Returns the settings of this process that change a computation, as text by name, to compare processes.

    Settings are the options of ``jax.config`` in ``COMPARED_OPTIONS``, the flags in XLA_FLAGS and LIBTPU_INIT_ARGS
    (except for flags of paths, logs and device counts), and NVIDIA_TF32_OVERRIDE if set.
    """
    values = jax.config.values
    # The attribute includes the value set by a context manager (jax.enable_x64()) in this thread, `values` does not;
    # some options have no attribute.
    options = {name: str(getattr(jax.config, name, values[name])) for name in COMPARED_OPTIONS & values.keys()}
    flags = {}
    for variable in FLAG_VARIABLES:
        for flag in os.environ.get(variable, "").split():  # the last flag of a name counts
            name, _, value = flag.partition("=")
            if not OWN_FLAGS.search(name):
                flags[f"{variable} {name}"] = value or "true"
    return options | flags | {name: os.environ[name] for name in PLAIN_VARIABLES if name in os.environ}

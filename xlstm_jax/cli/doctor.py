"""Report on this machine (versions, devices, extras), and self-tests of the library.

    examine() -> Diagnosis

This process starts no accelerator. Child processes (``self_test``) list the devices and compare sharded training with
training on one device: a child can simulate devices, and releases an accelerator when it ends. Meanwhile the compilers
for absent devices run, and a training on simulated devices, whose result is used unless this machine has several
accelerators.
"""

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from xlstm_jax import __version__
from xlstm_jax.cli import self_test
from xlstm_jax.cli.self_test import Check
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.forecast.compiling.compile import StepCall, begin_for_topology
from xlstm_jax.forecast.compiling.compile_process import CompileError, Pending, installed_version
from xlstm_jax.forecast.hardware.topologies import parse_topology
from xlstm_jax.formatting import how_to_install, one_line, rich_table

NEEDED = ("xlstm_jax", "jax", "jaxlib", "flax", "optax", "numpy", "rich")
USED = ("orbax-checkpoint", "flatbuffers", "libtpu", "matplotlib")  # optional packages
# Packages installed by the JAX extras that our extras require; the plugin comes without CUDA's libraries.
OF_JAX = {"jax[tpu]": "libtpu", "jax[cuda12-local]": "jax-cuda12-plugin"}
# Purpose of each extra; the first four are for every user.
USES = {
    "checkpoint": "Checkpointer",
    "publish": "publish",
    "forecast": "forecasts for TPUs, and pictures",
    "forecast-gpu": "the same for GPUs",
    "train": "the training job of benchmarks/",
    "bench": "benchmarks/metrics.py",
    "torch": "PyTorch in benchmarks/step_time.py",
    "models": "tests with others' models",
    "test": "the suite",
    "docs": "the site of the pages",
    "screens": "pictures of the site's pages",
    "dev": "work on the library",
}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
CHILD_TIMEOUT_S = 300.0
# Simulated devices test the library, not XLA; XLA's optimizations would take a third of the time.
SIMULATED = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
TOPOLOGIES = {"forecast": "v5e:2x2", "forecast-gpu": "h100:1x4"}  # four devices each


@dataclass(frozen=True)
class Diagnosis:
    """Result of ``examine``.

    Attributes:
      versions: versions of Python and of packages; None for packages that are not installed.
      missing: missing packages by extra; None (unknown) if the library runs uninstalled.
      devices: devices at hand, as "8 x NVIDIA H100 (gpu)"; "" if JAX cannot start.
      tested_on: devices of the self-tests.
      checks: results of the self-tests.
    """

    versions: dict[str, str | None]
    missing: dict[str, list[str]] | None
    devices: str
    tested_on: str
    checks: tuple[Check, ...]

    def tables(self) -> list[object]:
        """Returns the diagnosis as tables of ``rich`` and strings: versions, extras, devices at hand, self-tests."""
        versions = [[name, version or "not installed"] for name, version in self.versions.items()]
        lacking = {extra: f"lacks {', '.join(names)}" for extra, names in (self.missing or {}).items()}
        others = "not known: the library runs uninstalled" if self.missing is None else "installed"
        extras = [[f"[{extra}]", use, lacking.get(extra, others)] for extra, use in USES.items()]
        install = [f"To install an extra: {how_to_install('NAME')}.\n"] if self.missing else []
        checks = [[c.name, c.measured, c.allowed, "ok" if c.ok else "FAILED"] for c in self.checks]
        return [
            rich_table("Versions", ["package", "version"], versions, left=2),
            rich_table("Extras", ["extra", "for", "state"], extras, left=3),
            *install,
            f"Devices at hand: {self.devices or 'none; see the first self-test'}\n",
            rich_table(f"Self-tests, on {self.tested_on}", ["test", "measured", "allowed", "result"], checks, left=3),
        ]

    def to_json(self) -> str:
        """Returns the diagnosis as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def examine(say: Callable[[str], None]) -> Diagnosis:
    """Examines this machine, runs the self-tests, and returns the results; ``say`` shows the progress.

    The result has versions, missing extras, and devices at hand. The self-tests are a training on several devices
    compared with one device, and compilations for absent devices.
    """
    say("reading versions")
    versions, missing = installed(), missing_extras(extras())
    begun = {extra: _begin_compiling(extra) for extra in available_compilers(missing)}
    say("starting JAX on the devices at hand")
    with ThreadPoolExecutor() as executor:
        # Started before the devices are listed: on a machine without accelerators the simulated test is needed, and an
        # early start hides its time.
        simulated = executor.submit(run_child, "simulated", dict(os.environ) | SIMULATED)
        listed = run_child("devices", dict(os.environ))
        kinds = listed.get("kinds", [])
        # A single accelerator splits nothing, so a training on it would not test sharding.
        several = len(kinds) > 1 and listed["platform"] != "cpu"
        tested_on = f"{len(kinds)} x {kinds[0]}" if several else f"{self_test.MAX_DEVICES} simulated CPU devices"
        say(f"training a small model on {tested_on} and on one device")
        tested = run_child("parity", dict(os.environ)) if several else simulated.result()
    if begun:
        say(f"waiting for the compilers for {' and '.join(TOPOLOGIES[extra] for extra in begun)}")
    return Diagnosis(
        versions=versions,
        missing=missing,
        devices=f"{len(kinds)} x {kinds[0]} ({listed['platform']})" if kinds else "",
        tested_on=tested_on,
        checks=(
            *_checks("JAX starts", listed),
            *_checks("training", tested),
            *(_compile_check(TOPOLOGIES[extra], job) for extra, job in begun.items()),
            *_libtpu_check(versions["libtpu"]),
        ),
    )


def installed() -> dict[str, str | None]:
    """Returns {name: installed version}: of Python, of required and optional packages, and of JAX's CUDA plugins.

    None for a package that is not installed; a plugin that is not installed is left out. The version of this library is
    that of the running code.
    """
    plugins = {name: version for name in PLUGINS if (version := installed_version(name))}
    packages = {name: installed_version(name) for name in (*NEEDED, *USED)} | plugins
    packages["xlstm_jax"] = __version__  # version of the running code; another version may be installed
    return {"python": platform.python_version()} | packages


def extras() -> dict[str, list[str]] | None:
    """Returns the names of the packages of each extra, {"publish": [...]}, from the metadata of the installed library.

    None if the library runs uninstalled. An extra that the installed version lacks has [].
    """
    if not installed_version("xlstm_jax"):
        return None
    by_extra: dict[str, list[str]] = {extra: [] for extra in USES}
    for line in requires("xlstm_jax") or ():
        # A line reads "jax[tpu]; extra == 'forecast'". The installed version may differ from the running version, and
        # may have other extras.
        match = re.match(r"([\w.-]+)(\[[\w-]+\])?.*extra == .([\w-]+)", line)
        if match and match[3] in by_extra:
            by_extra[match[3]].append(OF_JAX.get(f"{match[1]}{match[2]}", match[1]))
    return by_extra


def missing_extras(extras: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]] | None:
    """Returns the missing packages by extra, {"bench": ["clu"]}; None if ``extras`` is None (unknown).

    ``extras`` has the packages of each extra. An extra without missing packages is left out.
    """
    if extras is None:
        return None
    lacking = {
        extra: [name for name in dict.fromkeys(names) if not installed_version(name)] for extra, names in extras.items()
    }
    return {extra: names for extra, names in lacking.items() if names}


def _libtpu_check(installed: str | None) -> Iterator[Check]:
    """Yields a check: the installed libtpu has the version that this JAX requires. Nothing without libtpu.

    ``installed`` is the version of libtpu, or None. Nothing also if JAX requires no version.
    """
    # The requirement reads "libtpu==0.0.17.*; extra == 'tpu'".
    wanted = next((line for line in requires("jax") or () if line.startswith("libtpu")), "").partition(";")[0].strip()
    if installed and wanted:
        same = installed.startswith(wanted.partition("==")[2].removesuffix("*"))
        yield Check("libtpu is the one that JAX asks for", installed, wanted, same)


def run_child(test: str, environment: dict[str, str], timeout_s: float = CHILD_TIMEOUT_S) -> dict[str, Any]:
    """Runs a child process of ``self_test``, and returns its result, parsed JSON, or {"error": reason}.

    Args:
      test: "devices", "parity" or "simulated".
      environment: the environment variables of the child.
      timeout_s: seconds after which the child is ended, which is an error.
    """
    # The result comes in a file, because JAX and its plugins may write to stdout and stderr.
    with tempfile.TemporaryDirectory(prefix="xlstm_jax_doctor_") as folder:
        path = Path(folder) / "found.json"
        # -P prevents imports from the working directory, such as a user's `jax.py`.
        command = [sys.executable, "-P", "-m", self_test.__name__, test, str(path)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {timeout_s:.0f} s"}
        if done.returncode == 0 and path.exists():
            return json.loads(path.read_text())
        # The last line of a traceback is the error.
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        return {"error": lines[-1]}


def _checks(name: str, report: dict[str, Any]) -> Sequence[Check]:
    if "error" in report:
        return [Check(name, report["error"], "", False)]
    return [Check(**check) for check in report.get("checks", ())]


def available_compilers(missing: Mapping[str, Sequence[str]] | None) -> list[str]:
    """Returns the extras of ``TOPOLOGIES`` whose compilers are installed: of "forecast" (TPUs) and "forecast-gpu".

    ``missing`` has the missing packages by extra; None (unknown) gives []. A missing matplotlib, which only draws, does
    not count.
    """
    if missing is None:
        return []
    # matplotlib only draws, and is not needed to compile.
    return [extra for extra in TOPOLOGIES if not set(missing.get(extra, ())) - {"matplotlib"}]


def _begin_compiling(extra: str) -> Pending[Any] | ImportError:
    """Starts to compile a small program with the compiler of an extra ("forecast" for TPUs, "forecast-gpu").

    Returns the running compilation. If the compiler is for another version of jaxlib, returns the ``ImportError``,
    which is not raised.
    """
    sharding = NamedSharding(DeviceMeshManager.create_abstract_mesh({"fsdp": 4}), PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((4, 128), jnp.float32, sharding=sharding)
    try:
        return begin_for_topology(StepCall(jax.jit(jnp.sum), (x,), topology=parse_topology(TOPOLOGIES[extra]))).start()
    except ImportError as error:  # the plugin is for another version of jaxlib
        return error


def _compile_check(topology: str, job: Pending[Any] | ImportError) -> Check:
    """Waits for a compilation started for ``topology``; returns the ``Check`` that a program compiles.

    ``job`` is from ``_begin_compiling``: the compilation, or the ``ImportError`` of its start. The check fails for an
    ``ImportError``, and for an error of the compilation.
    """
    problem: Exception | None = job if isinstance(job, ImportError) else None
    try:
        if isinstance(job, Pending):
            job.result()
    except (CompileError, TimeoutError) as error:
        problem = error
    return Check(f"a program compiles for {topology}", one_line(problem) if problem else "it does", "", not problem)

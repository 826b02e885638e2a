"""From a training step to its compiled program: for accelerators that are not there, or for the devices at hand.

  step, abstract args --trace, export--> StableHLO --child process, libtpu--> Compiled     compile_for_topology
  step, abstract args --lower, compile--> Compiled                                         compile_here

A step for a topology is traced on a mesh without devices (``jax.sharding.AbstractMesh``) or on any mesh of as many
devices as the topology has. Nothing is allocated, and this process never loads libtpu.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.forecast import compile_child
from xlstm_jax.distributed.forecast.chips import Topology, parse_topology
from xlstm_jax.distributed.partitioning import leaf_value, leaves_with_path

COMPILE_TIMEOUT_S = 1800.0
# libtpu asks the cloud for its place, and takes a lock, unless it is told not to. The accelerator type is that of any
# host; the topology decides.
CHILD_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}
FOR_ANOTHER_BACKEND = "XLA_FLAGS"  # libtpu ends the process at a flag that it does not know


ARGUMENTS = ("argument", "output", "alias")
OWN_SCOPES = "jit(call)/call_exported/jit(flat)/"  # of the way through the child, in front of the step's own names
ARGUMENT = re.compile(r'op_name="args\[(\d+)\]"')


class CompileError(RuntimeError):
    """The compiler refused the step, for another reason than memory; its own words follow."""


@dataclass(frozen=True)
class Compiled:
    """A compiled step, as text and numbers.

    Attributes:
      platform: "tpu", "cpu", "gpu".
      device_kind: as JAX names it.
      topology: None for devices at hand.
      axis_sizes: the mesh.
      hlo: the optimized program of one device, instructions in the order of their schedule.
      buffers, live_ranges: XLA's texts about them; None where the backend gives none.
      memory: bytes by XLA's own count: argument, output, alias, temp, generated_code, the last two not from the CPU
        backend, whose figures are not to be trusted. None where the program does not fit.
      seconds: of compilation.
      coords: of TPUs: where on the torus each device of the mesh lies, in the mesh's order.
      versions: of jax, jaxlib, libtpu.
    """

    platform: str
    device_kind: str
    topology: Topology | None
    axis_sizes: dict[str, int]
    hlo: str
    buffers: str | None
    live_ranges: str | None
    memory: dict[str, int] | None
    seconds: float
    coords: tuple[tuple[int, ...], ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


def trace(step: Any, args: Sequence[PyTree]) -> Any:
    """``step.trace(*args)``, with an error that says what a step is.

    Raises:
      TypeError: ``step`` is not a ``jax.jit`` function.
    """
    if not hasattr(step, "trace"):
        raise TypeError(
            f"step must be a jax.jit function, as make_train_step returns one, not {step!r}; pass jax.jit(step)."
        )
    return step.trace(*args)


def mesh_axes_of(args: Sequence[PyTree]) -> dict[str, int]:
    """The axes and sizes of the mesh that the abstract arguments lie on; {} where none says.

    Raises:
      ValueError: arguments lie on meshes of different shapes; names a leaf of each.
    """
    found = {}
    for path, leaf in leaves_with_path(args):
        sharding = getattr(leaf_value(leaf), "sharding", None)
        if isinstance(sharding, NamedSharding):
            found.setdefault(tuple(sharding.mesh.shape.items()), path)
    if len(found) > 1:
        (one, path), (two, other), *_ = found.items()
        raise ValueError(
            f"argument {path} lies on the mesh {dict(one)}, but argument {other} on {dict(two)}. Make them on one mesh."
        )
    return dict(next(iter(found), ()))


def compile_here(step: Any, *args: PyTree, compiler_options: dict[str, Any] | None = None) -> Compiled:
    """Compiles a step for the devices of its own mesh, in this process.

    Raises:
      ValueError: the arguments lie on an ``AbstractMesh``, which has no devices.
    """
    axes = mesh_axes_of(args)
    start = time.monotonic()
    compiled = trace(step, args).lower().compile(compiler_options=compiler_options)
    seconds = time.monotonic() - start
    device = next(iter(jax.tree.leaves(compiled.input_shardings)[0].device_set))
    stats = compiled.memory_analysis()
    trusted = compile_child.MEMORY if device.platform != "cpu" else ARGUMENTS
    return Compiled(
        platform=device.platform,
        device_kind=device.device_kind,
        topology=None,
        axis_sizes=axes,
        hlo=compiled.as_text(),
        buffers=None,
        live_ranges=None,
        memory={name: getattr(stats, f"{name}_size_in_bytes") for name in trusted},
        seconds=seconds,
        coords=_coords(compiled),
        versions={"jax": jax.__version__, "jaxlib": jax.lib.__version__},
    )


def _coords(compiled: Any) -> tuple[tuple[int, ...], ...]:
    """Where on the torus the devices lie, in the mesh's order; () where they are no TPUs, or no mesh."""
    places = [place for place in jax.tree.leaves(compiled.input_shardings) if isinstance(place, NamedSharding)]
    devices = places[0].mesh.devices.flat if places else ()
    return tuple(tuple(device.coords) for device in devices if device.platform == "tpu")


def compile_for_topology(
    step: Any,
    *args: PyTree,
    topology: str,
    compiler_options: dict[str, Any] | None = None,
    timeout_s: float = COMPILE_TIMEOUT_S,
) -> Compiled:
    """Compiles a step for TPUs that are not there, in a child process that loads libtpu.

    Args:
      step: a ``jax.jit`` function.
      *args: its arguments, arrays or ``ShapeDtypeStruct`` with shardings on a mesh of as many devices as the topology
        has; an ``AbstractMesh`` will do.
      topology: as "v5e:16x16".
      compiler_options: XLA's, as for ``jax.jit(...).lower(...).compile``. LIBTPU_INIT_ARGS reaches the child too.
      timeout_s: how long the compilation may take.
    Raises:
      ImportError: libtpu is not installed, or flatbuffers.
      ValueError: an unknown topology, or its devices are not as many as the mesh's: says both.
      CompileError: the compiler refuses the step, for another reason than memory.
      TimeoutError: it did not end in time.
    """
    place = parse_topology(topology)
    axes = mesh_axes_of(args) or {"device": 1}
    if math.prod(axes.values()) != place.num_devices:
        raise ValueError(
            f"the step's mesh {axes} has {math.prod(axes.values())} devices, but topology={topology!r} has "
            f"{place.num_devices}. Make the mesh of the topology's size, or choose a topology of the mesh's."
        )
    _check_installed()
    with tempfile.TemporaryDirectory(prefix="xlstm_jax_forecast_") as name:
        folder = Path(name)
        traced = trace(step, args)
        donated = [i for i, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
        exported = _export(step, args)
        if exported.nr_devices not in (1, place.num_devices):
            raise ValueError(
                f"the step is made for {exported.nr_devices} devices, but its arguments lie on the mesh {axes}. Give "
                "them shardings on the step's mesh, as abstract_train_state and abstract_batch do."
            )
        (folder / "step.bin").write_bytes(exported.serialize())
        request = {
            "axes": axes,
            "donated": donated,
            "options": dict(compiler_options or {}),
            "topology": place.description(),
        }
        (folder / "request.json").write_text(json.dumps(request))
        _run_child(folder, timeout_s)
        return _read(folder, place, axes, traced.jaxpr.jaxpr.debug_info.arg_names)


def _check_installed() -> None:
    missing = [name for name in ("libtpu", "flatbuffers") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"compiling for a TPU topology needs {' and '.join(missing)}, on a machine without TPUs too: "
            "pip install xlstm_jax[forecast]"
        )


def _export(step: Any, args: Sequence[PyTree]) -> export.Exported:
    """The step as a function of its leaves: an export knows no pytrees but those that are registered with it."""
    leaves, treedef = jax.tree.flatten(args)

    def flat(*leaves):
        return tuple(jax.tree.leaves(step(*treedef.unflatten(leaves))))

    return export.export(jax.jit(flat), platforms=["tpu"])(*leaves)


def _run_child(folder: Path, timeout_s: float) -> None:
    """Runs the child to its end; a child that outlives its time, or this process's interrupt, is killed."""
    environment = {key: value for key, value in os.environ.items() if key != FOR_ANOTHER_BACKEND} | CHILD_ENVIRONMENT
    command = [sys.executable, "-P", compile_child.__file__, str(folder)]
    with (
        open(folder / "log", "wb") as log,
        _killed_at_the_end(
            subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        ) as child,
    ):
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"compiling for the topology took longer than timeout_s={timeout_s:.0f}. Scan the layers (nn.scan), "
                "which compiles one of them, or give it more time."
            ) from None
    if not (folder / "result.json").exists():
        end = (folder / "log").read_text(errors="replace")[-2000:]
        raise CompileError(f"the compiler's process ended with exit code {child.returncode}:\n{end}")


@contextlib.contextmanager
def _killed_at_the_end(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _read(folder: Path, place: Topology, axes: dict[str, int], arguments: Sequence[str]) -> Compiled:
    result = json.loads((folder / "result.json").read_text())
    # The text after code generation has the compiler's cycles; a program that does not fit may not come so far.
    hlo = _dumped(folder / "dump", "codegen") or _dumped(folder / "dump", "optimizations")
    buffers = _dumped(folder / "dump", "optimizations-buffer-assignment")
    if not (hlo and buffers):
        raise CompileError(f"the compiler refuses the step for {place.name}: {result['error']}")
    return Compiled(
        platform="tpu",
        device_kind=result["device_kind"],
        topology=place,
        axis_sizes=axes,
        hlo=_with_names(hlo, arguments),
        buffers=buffers,
        live_ranges=_dumped(folder / "dump", "optimizations-live-range"),
        memory=result["memory"],
        seconds=result["seconds"],
        coords=tuple(map(tuple, result["coords"])),
        versions=result["versions"],
    )


def _with_names(hlo: str, arguments: Sequence[str]) -> str:
    """The program with the names that it has when JAX compiles it without an export."""

    def named(match):
        return f'op_name="{arguments[int(match[1])]}"'.replace("'", "\\'")

    return ARGUMENT.sub(named, hlo.replace(OWN_SCOPES, ""))


def _dumped(folder: Path, name: str) -> str | None:
    paths = list(folder.glob(f"*.after_{name}.txt"))
    assert len(paths) <= 1, paths  # the child compiles one program
    return paths[0].read_text() if paths else None

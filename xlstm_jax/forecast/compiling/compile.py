"""Compilation of a training step: for absent accelerators, or for the devices at hand.

  begin_for_topology, compile_for_topology   StepCall --trace, export--> StableHLO --child process, or cache--> Compiled
  compile_here                               StepCall --trace, lower, compile--> Compiled

A step for a topology is traced on a mesh without devices (``jax.sharding.AbstractMesh``), or on any mesh with as many
devices as the topology. Nothing is allocated, and this process never starts a compiler for absent devices. The mesh
comes from the arguments' shardings or from ``jax.jit(in_shardings=...)``.
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Traced, Wrapped

from xlstm_jax.accelerators import resolved, resolved_on
from xlstm_jax.common_types import PyTree
from xlstm_jax.explicit_axes import outside_other_mesh
from xlstm_jax.forecast.compiling import child as compile_child
from xlstm_jax.forecast.compiling.compile_process import (
    COMPILE_TIMEOUT_S,
    RESULT,
    CompileError,
    Pending,
    check_compiler,
    compiler_message,
    may_be_too_large,
)
from xlstm_jax.forecast.compiling.report_cache import ReportCache, Texts
from xlstm_jax.forecast.hardware.cudnn import ALLOWED, traced_for_chip
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology
from xlstm_jax.private_names import in_shardings_of, traceback_in_locations_limit
from xlstm_jax.program_names import HOST_MEMORY

JAX_PLATFORM = {"tpu": "tpu", "cuda": "gpu"}  # JAX's device platform by compiler
TRUSTED_OF_CPU = ("argument", "output", "alias")  # the other figures of the CPU backend are wrong
EXPORT_SCOPES = "jit(call)/call_exported/"  # prefix that the export adds to the step's operation names
ARGUMENT = re.compile(r'op_name="args\[(\d+)\]"')
RAGGED = export.DisabledSafetyCheck.custom_call("ragged_all_to_all")  # safe: the same release compiles it right away
CALLS_PYTHON = "different from the lowering platform"  # export's error for jax.debug.print and other callbacks
GIVE_SHARDINGS = "Give the arguments NamedShardings, as abstract_train_state and abstract_batch do."


@dataclass(frozen=True)
class Compiled:
    """A compiled step, as text and numbers.

    Attributes:
      platform: "tpu", "cpu" or "gpu".
      device_kind: JAX's name of the device.
      topology: the absent devices; None for devices at hand.
      axis_sizes: mesh axes and their sizes.
      hlo: optimized program of one device, instructions in scheduled order.
      buffers, live_ranges: XLA's buffer assignment and live ranges as text; None if the backend writes none.
      memory: bytes as XLA counts them: argument, output, alias, temp, generated_code. The CPU backend's temp and
        generated_code are wrong and left out. A topology also has total_allocation, if the release reports it (temp
        counts a TPU's temporaries twice). None if the compiler found that the program does not fit.
      seconds: compile time.
      coords: TPUs: torus coordinates of each device, in mesh order.
      versions: versions of jax and jaxlib, and for a topology of the compiler's packages.
      without_sharding: path of the first argument leaf without a sharding, for a step on several devices; None if
        every leaf has a sharding.
      too_large: the compiler's message for a program that may not fit; else None.
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
    without_sharding: str | None = None
    too_large: str | None = None

    @property
    def devices(self) -> int:
        """Number of devices of the mesh: the product of the axis sizes."""
        return math.prod(self.axis_sizes.values())


# ------------------------------------------------------------------------------------------- a step and its arguments


@dataclass(frozen=True)
class StepCall:
    """A step with its arguments and the devices to compile for.

    Attributes:
      step: a ``jax.jit`` function.
      args, kwargs: arguments of the step: arrays or ``ShapeDtypeStruct`` with shardings on a mesh (possibly an
        ``AbstractMesh``) with as many devices as the topology.
      topology: devices that need not be present; None: the devices that hold the arguments.
      compiler_options: XLA options; "auto" or "forecast": the library's options for the chip and the slice.
        LIBTPU_INIT_ARGS reaches the compiler too.
      cache: cache of compiler reports for topologies, read first and then written; None: always compile and store
        nothing.
    """

    step: Wrapped
    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree] = field(default_factory=dict)
    topology: Topology | None = None
    compiler_options: Mapping[str, Any] | str | None = None
    cache: ReportCache | None = None

    @cached_property
    def traced(self) -> Traced:
        """Result of ``step.trace(*args, **kwargs)``; for a topology traced as if its chip were the local device.

        Raises:
          TypeError: ``step`` is not a ``jax.jit`` function.
        """
        if not hasattr(self.step, "trace"):
            raise TypeError(
                f"step must be a jax.jit function, as make_train_step returns one, not {self.step!r}; pass "
                "jax.jit(step)."
            )
        # While tracing, JAX queries the GPU at hand about cuDNN. For an absent GPU the chip's table entry answers.
        chip = traced_for_chip(self.topology.chip) if self.topology else nullcontext()
        with chip, outside_other_mesh((self.args, dict(self.kwargs))):
            return self.step.trace(*self.args, **self.kwargs)

    @cached_property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """Mesh of the arguments' shardings or of ``jax.jit(in_shardings=...)``; None if neither has a mesh.

        If two meshes have the same shape, one with devices and the other abstract, this is the mesh with devices.

        Raises:
          ValueError: arguments are on meshes of different shapes; the error names a leaf of each mesh.
        """
        shardings = [(path, getattr(leaf, "sharding", None)) for path, leaf in self.leaves]
        by_jit = zip(self.argument_names, self.in_shardings, strict=False)
        meshes = [
            (path, sharding.mesh) for path, sharding in [*shardings, *by_jit] if isinstance(sharding, NamedSharding)
        ]
        by_shape: dict[Any, tuple[str, Mesh | AbstractMesh]] = {}
        # Meshes with devices come first, so that `setdefault` prefers them to abstract meshes of the same shape.
        for path, mesh in sorted(meshes, key=lambda pair: isinstance(pair[1], AbstractMesh)):
            by_shape.setdefault(tuple(mesh.shape.items()), (path, mesh))
        if len(by_shape) > 1:
            (first, (path, _)), (two, (other, _)), *_ = by_shape.items()
            raise ValueError(
                f"argument {path} lies on the mesh {dict(first)}, but argument {other} on {dict(two)}. Make them on "
                "one mesh."
            )
        return next((mesh for _, mesh in by_shape.values()), None)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis sizes of ``mesh``; empty without a mesh."""
        return dict(self.mesh.shape) if self.mesh is not None else {}

    @property
    def argument_names(self) -> Sequence[str]:
        """Paths of the argument leaves, in the order of ``jax.jit``, in JAX's form: ``state.params['head']``."""
        return self.traced.jaxpr.jaxpr.debug_info.arg_names

    @cached_property
    def leaves(self) -> list[tuple[str, Any]]:
        """Pairs (path, leaf) for each leaf of ``args``, then of ``kwargs``; a path has the form ``0/params/head``.

        Arguments that are static for ``jax.jit`` are included, and flattened like any pytree.
        """
        trees = (self.args, dict(self.kwargs))
        return [(_name(path), leaf) for tree in trees for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """Shardings of ``jax.jit(in_shardings=...)``, one for each argument leaf, in the order of ``argument_names``.

        A leaf without sharding has JAX's mark for "unspecified". JAX has no public name for these shardings before
        compilation.
        """
        return in_shardings_of(self.traced)

    @property
    def leaf_without_sharding(self) -> str | None:
        """Path of the first argument leaf that has no sharding on a mesh of several devices; None if there is none.

        Scalars and PRNG keys are skipped: they are small and replicated. None also for a step without a mesh, and for a
        mesh of one device, where no sharding is needed.
        """
        if self.mesh is None or self.mesh.size == 1:
            return None
        # Static arguments are not arrays, so the arrays among the leaves match the traced arguments in order.
        arrays = [(path, leaf) for path, leaf in self.leaves if hasattr(leaf, "dtype") and leaf.shape]
        infos = zip(jax.tree.leaves(self.traced.args_info), self.in_shardings, strict=False)
        by_jit = [sharding for info, sharding in infos if info.shape]
        for (path, leaf), sharding in zip(arrays, by_jit, strict=False):
            raw_key = leaf.dtype == "uint32" and leaf.shape in ((2,), (4,))
            is_key = raw_key or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            if not (is_key or _is_sharded(getattr(leaf, "sharding", None)) or _is_sharded(sharding)):
                return path
        return None


def _name(path: tuple[Any, ...]) -> str:
    """Formats a key path of a pytree as text: ``0/params/head/kernel``.

    A last attribute ``value`` is left out: an array in a box of Flax or a variable of NNX gets the path of the box.
    """
    # An array inside of a Flax box or an NNX variable gets the path of the box.
    named = path[:-1] if path[-1:] == (jax.tree_util.GetAttrKey("value"),) else path
    return jax.tree_util.keystr(named, simple=True, separator="/")


def _is_sharded(sharding: Any) -> bool:
    """Returns whether a sharding places an array on a mesh (of any size) or on several devices; False for None."""
    return isinstance(sharding, NamedSharding) or getattr(sharding, "num_devices", 1) > 1


# ---------------------------------------------------------------------------------------------------------- compiling


def compile_here(call: StepCall) -> Compiled:
    """Compiles a step in this process, for the devices that hold the arguments, and returns the compiler's output.

    The output has no texts of buffers and live ranges, and on a CPU only the memory sizes that the compiler counts
    right.

    Raises:
      ValueError: the arguments are on an ``AbstractMesh``, which has no devices; or the arguments are on no mesh, but
        the step runs on several devices.
      CompileError: the compiler refuses the step.
    """
    mesh, options = call.mesh, resolved_on(call.mesh, call.compiler_options)
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"the arguments lie on the abstract mesh {call.axis_sizes}, which has no devices. Give a topology, as "
            "topology='v5e:2x4', or make them on a mesh of devices at hand."
        )
    start = time.monotonic()
    try:
        compiled = call.traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        message = compiler_message("the devices at hand", error, options)
        raise CompileError(f"the compiler refuses the step for {message}") from error
    seconds = time.monotonic() - start
    # The arguments may be on no mesh, so the devices come from the compiled program.
    devices = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))[0].device_set
    if mesh is None and len(devices) > 1:
        raise ValueError(f"the step runs on {len(devices)} devices, but its arguments lie on no mesh. {GIVE_SHARDINGS}")
    device, stats = next(iter(devices)), compiled.memory_analysis()
    trusted = compile_child.MEMORY if device.platform != "cpu" else TRUSTED_OF_CPU
    on_torus = [d for d in (mesh.devices.flat if mesh is not None else ()) if d.platform == "tpu"]
    return Compiled(
        platform=device.platform,
        device_kind=device.device_kind,
        topology=None,
        axis_sizes=call.axis_sizes,
        hlo=compiled.as_text() or "",
        buffers=None,
        live_ranges=None,
        memory={name: getattr(stats, f"{name}_size_in_bytes") for name in trusted},
        seconds=seconds,
        coords=tuple(tuple(device.coords) for device in on_torus),
        versions={name: version(name) for name in ("jax", "jaxlib")},
        without_sharding=call.leaf_without_sharding,
    )


def compile_for_topology(
    step: Wrapped,
    *args: PyTree,
    topology: str,
    compiler_options: Mapping[str, Any] | None = None,
    timeout_s: float = COMPILE_TIMEOUT_S,
    cache: ReportCache | None = None,
) -> Compiled:
    """Compiles a step for absent TPUs or GPUs, in a child process, and waits for the compiler's output.

    Args:
      step: a ``jax.jit`` function.
      *args: arguments of the step: arrays or ``ShapeDtypeStruct`` with shardings on a mesh of the topology's size.
      topology: name such as "v5e:16x16" or "h100:32x8".
      compiler_options: XLA options; None: XLA's defaults.
      timeout_s: time limit of the compilation in seconds.
      cache: cache of the compiler's texts; None: no cache.
    Raises:
      ImportError: the compiler is not installed, or its version differs from jaxlib's.
      ValueError: the arguments are on no mesh; mesh and topology have different numbers of devices; or the step calls
        back into Python (``jax.debug.print``).
      CompileError: the compiler refuses the step, for another reason than memory.
      TimeoutError: the compilation takes longer than ``timeout_s``.
    """
    devices = parse_topology(topology)
    begun = begin_for_topology(StepCall(step, args, {}, devices, compiler_options, cache))
    begun.timeout_s = timeout_s
    return begun.start().result()


def begin_for_topology(call: StepCall) -> Pending[Compiled]:
    """Exports a step for its topology and returns the compilation, not yet started, which a child process will run.

    The compilation keeps neither the step nor its arrays, and can run in parallel with others.

    Raises:
      ImportError: the compiler is not installed, or its version differs from jaxlib's (see ``check_compiler``).
      ValueError: the arguments are on no mesh; the numbers of devices in the mesh and in the topology differ (names
        both); or the step calls back into Python (``jax.debug.print``), which works only on devices of the calling
        process.
    """
    topology = call.topology
    assert topology is not None
    if call.mesh is None and topology.num_devices > 1:
        raise ValueError(
            f"topology={topology.name!r} has {topology.num_devices} devices, but the arguments lie on no mesh. "
            f"{GIVE_SHARDINGS}"
        )
    if call.mesh is not None and call.mesh.size != topology.num_devices:
        raise ValueError(
            f"the step's mesh {call.axis_sizes} has {call.mesh.size} devices, but topology={topology.name!r} has "
            f"{topology.num_devices}. Make a mesh of {topology.num_devices} devices, or choose another topology."
        )
    packages = check_compiler(topology.platform)
    exported = _export(call, topology)
    if exported.nr_devices not in (1, topology.num_devices):
        raise ValueError(
            f"the step is made for {exported.nr_devices} devices, but its arguments lie on the mesh "
            f"{call.axis_sizes}. {GIVE_SHARDINGS}"
        )
    # The child gets only bytes and JSON, so its output depends on nothing else and can be cached.
    options = resolved(call.compiler_options, topology.chip.device_kinds[0], topology.shape)
    settings: dict[str, Any] = {
        "axes": call.axis_sizes or {"device": 1},
        "axis_types": [kind.name for kind in call.mesh.axis_types] if call.mesh is not None else ["Auto"],
        "donated": [i for i, info in enumerate(jax.tree.leaves(call.traced.args_info)) if info.donated],
        "options": options or {},
        "topology": topology.description(),
        "packages": packages,
        "host_memory": HOST_MEMORY,
    }
    names, missing = call.argument_names, call.leaf_without_sharding  # `finish` must not keep the call's arrays alive

    def finish(texts: Texts) -> Compiled:
        return dataclasses.replace(_read_texts(texts, topology, settings, names), without_sharding=missing)

    return Pending(bytes(exported.serialize()), settings, finish, call.cache)


def _export(call: StepCall, topology: Topology) -> export.Exported:
    """Exports the step for the compiler of the topology, as a function of its argument leaves.

    The exported function takes the leaves as positional arguments and returns a tuple of leaves, because an export can
    only store registered pytree types. The export keeps operation names but no source lines, so a new caller or an
    added comment does not change the program.

    Raises:
      ValueError: the step calls back into Python, or has an operation that JAX partitions by a call into Python.
    """
    try:
        outside = outside_other_mesh((call.args, dict(call.kwargs)))
        with traceback_in_locations_limit(0), traced_for_chip(topology.chip), outside:
            exporting = export.export(call.step, platforms=[topology.platform], disabled_checks=[*ALLOWED, RAGGED])
            exported = exporting(*call.args, **call.kwargs)
    except ValueError as error:
        if CALLS_PYTHON not in str(error):
            raise
        raise ValueError(
            "the step calls back into Python, by jax.debug.print, jax.debug.callback, io_callback or pure_callback, "
            "which cannot be compiled for a topology. Leave the call out of the step, or leave topology out."
        ) from error
    except AssertionError as error:  # JAX looks up the devices of an operation that it partitions in Python
        raise ValueError(
            "the step holds an operation that JAX partitions by calling back into Python, such as cuDNN's attention "
            "outside of shard_map, which cannot be compiled for a topology. Call the operation inside of "
            "jax.shard_map, as in the loss of make_train_step."
        ) from error
    inputs: PyTree = ((0,) * len(exported.in_avals), {})
    outputs = (0,) * len(exported.out_avals)
    return dataclasses.replace(exported, in_tree=jax.tree.structure(inputs), out_tree=jax.tree.structure(outputs))


def _read_texts(texts: Texts, topology: Topology, settings: Mapping[str, Any], arguments: Sequence[str]) -> Compiled:
    """Converts the texts that the child process wrote for one compilation to a ``Compiled``.

    Names that the export added are removed from the program: an argument ``args[3]`` gets its name in the step again.

    Args:
      texts: texts by name: the child's result (JSON), the program ("hlo"), "buffers" and "live_ranges", if written.
      topology: the devices of the compilation.
      settings: request of the compilation: mesh axes, compiler options.
      arguments: names of the step's argument leaves, in order.
    Raises:
      CompileError: the compiler refused the step for another reason than the program's size, or wrote no program.
    """
    result = json.loads(texts[RESULT])
    error = result["error"]
    message = compiler_message(topology.name, error or "it wrote no program", settings["options"])
    if not (texts.get("hlo") and texts.get("buffers")) or (error and not may_be_too_large(error)):
        raise CompileError(f"the compiler refuses the step for {message}")

    def argument_name(match: re.Match[str]) -> str:  # the same name as without an export
        return f'op_name="{arguments[int(match[1])]}"'.replace("'", "\\'")

    return Compiled(
        platform=JAX_PLATFORM[topology.platform],
        device_kind=result["device_kind"],
        topology=topology,
        axis_sizes=settings["axes"],
        hlo=ARGUMENT.sub(argument_name, texts["hlo"].replace(EXPORT_SCOPES, "")),
        buffers=texts["buffers"],
        live_ranges=texts.get("live_ranges"),
        memory=result["memory"],
        seconds=result["seconds"],
        coords=tuple(map(tuple, result["coords"])),
        versions=result["versions"],
        too_large=message if error else None,
    )

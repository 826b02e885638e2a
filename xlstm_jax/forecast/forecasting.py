"""Memory, traffic and time of a step per device, predicted without the devices.

    forecast(step, state, batch, rng, topology="v5e:16x16") -> Forecast

The step is compiled for the topology. The forecast then reads the compiled program: XLA's memory plan, the scheduled
collectives, and the compiler's estimate of cycles. FLOP are counted in the step's jaxpr. Times follow from these
numbers and from the chip's published figures; they rank variants of a step and are no measurement.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import jax
from jax.sharding import Mesh
from rich.console import RenderableType

from xlstm_jax.common_types import PyTree
from xlstm_jax.forecast import report
from xlstm_jax.forecast.compiling.compile import Compiled, StepCall, begin_for_topology, compile_here
from xlstm_jax.forecast.compiling.compile_process import CompileError, Pending
from xlstm_jax.forecast.compiling.report_cache import ReportCache, chosen_cache
from xlstm_jax.forecast.cost.axis_traffic import AxisTraffic, axis_traffic, total_seconds
from xlstm_jax.forecast.cost.clock import Cycles, Kernels
from xlstm_jax.forecast.cost.collective_traffic import Collective, find_collectives, sum_wire_bytes
from xlstm_jax.forecast.cost.cycles import HbmBytes, count_hbm_bytes
from xlstm_jax.forecast.cost.fills import Fills, find_fills
from xlstm_jax.forecast.cost.flops import Flops, count_flops
from xlstm_jax.forecast.cost.host import HostTraffic, host_buffers, host_traffic
from xlstm_jax.forecast.cost.memory import Memory, memory_of_totals, operation_names, read_memory
from xlstm_jax.forecast.cost.products import executed_flops, pallas_seconds, unknown_calls
from xlstm_jax.forecast.cost.rematerialization import MARGIN, limit_bytes, rematerialized
from xlstm_jax.forecast.cost.roofline import Roofline, step_bounds
from xlstm_jax.forecast.cost.schedule import axes_of, timed, with_waits
from xlstm_jax.forecast.cost.time_range import Range, total
from xlstm_jax.forecast.hardware.chips import CHIPS, Chip, chip_of
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.nccl import NVLINK_FRACTION, network_fraction
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology
from xlstm_jax.forecast.hlo.op_names import in_shard_map
from xlstm_jax.forecast.hlo.program import Program, parse
from xlstm_jax.formatting import notebook_html, parse_json_as, plain_text

FORMAT, DERIVED = 2, "step_time"
CPU_NOTE = (
    "Compiled for CPU: collectives and arguments are exact; the CPU backend's figures for temporaries are not to be "
    "trusted (recomputation raises them), so there are none. Give a topology, as topology='v5e:2x4'."
)
GPU_NOTE = (
    "Not validated on hardware: bytes and schedule come from XLA's compiler for this GPU, which had no device to time "
    "matrix products on (nothing is autotuned)."
)


@dataclass(frozen=True)
class Forecast:
    """Predicted cost of a step: sizes in bytes and times in seconds, per device and step.

    Attributes:
      platform, device_kind: JAX's names of the device.
      topology: name of the topology; None for devices at hand.
      axis_sizes: mesh axes and their sizes.
      memory: see ``Memory``; on a CPU only the arguments, on a GPU without the list of temporaries.
      code_bytes: size of the program; 0 for a program that does not fit, since the compiler then reports no size.
      available_bytes: memory available to a program; None for a device without figures.
      collectives: collectives that the step executes.
      flops: FLOP of matrix products, from the jaxpr.
      cycles: the compiler's estimate; None if the compiler gives none.
      hbm_bytes: bytes moved between HBM and the cores.
      tokens: tokens in the global batch; None if ``forecast`` was called without ``tokens``.
      unknown_loops: names of loops of unknown length, whose contents count once.
      compile_seconds: compile time.
      versions: versions of jax, jaxlib, libtpu.
      notes: caveats for the reader.
      shared_flops: FLOP of matrix products outside of ``shard_map`` per device in the compiled program; an even share
        is ``flops.shared``.
      roofline: three bounds of the time by the chip's published figures; None for a device without figures.
      exposed_seconds: time that the step waits for collectives. TPUs: the time of the bytes, without latency, summed
        over collectives, each alone on the links; of an asynchronous collective only the time after the end of the
        overlapped work counts. GPUs: from the simulated schedule, with latency and reached rates. None if ``roofline``
        is None. ``wait_time`` has the range.
      host: bytes in host memory and host transfers; None without host memory, and for devices without figures.
      kernel_seconds, expected_kernel_seconds: GPUs: sum of the kernels' times, at least by their rooflines, and
        expected at the rates of ``Chip.efficiency``; else None.
      pallas_seconds: TPUs: time of Pallas kernels by their roofline; None without Pallas kernels.
      fills: TPUs: zero-fills that stand for gathers, whose cycles ``step_time`` corrects; None for other devices.
      rematerialized: instructions that the compiler itself runs again to save memory: {name: executions in a step}.

    >>> x = abstract_batch(jax.ShapeDtypeStruct((64, 512), jnp.float32), mesh, ("dp", "fsdp"))
    >>> found = forecast(jax.jit(lambda x: x @ x.T), x)
    >>> found.memory.argument_bytes, found.wire_bytes, found.flops.total
    (16384, 114688.0, 524288.0)
    """

    platform: str
    device_kind: str
    topology: str | None
    axis_sizes: dict[str, int]
    memory: Memory
    code_bytes: int
    available_bytes: int | None
    collectives: tuple[Collective, ...]
    flops: Flops
    cycles: int | None
    hbm_bytes: HbmBytes | None
    tokens: int | None
    unknown_loops: tuple[str, ...]
    compile_seconds: float
    versions: dict[str, str]
    notes: tuple[str, ...]
    shared_flops: float
    roofline: Roofline | None = None
    exposed_seconds: float | None = None
    host: HostTraffic | None = None
    kernel_seconds: float | None = None
    expected_kernel_seconds: float | None = None
    pallas_seconds: float | None = None
    fills: Fills | None = None
    rematerialized: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh: the product of the axis sizes."""
        return math.prod(self.axis_sizes.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of a device's memory at the step's peak, including the program's code."""
        return self.memory.total_bytes + self.code_bytes

    @property
    def fits(self) -> bool | None:
        """Whether ``total_bytes`` are at most ``available_bytes``; None if these are unknown, and on a CPU."""
        # The CPU backend's figure for temporaries is wrong, so the sum is wrong, too.
        if self.available_bytes is None or self.platform == "cpu":
            return None
        return self.total_bytes <= self.available_bytes

    @property
    def rematerialization_bytes(self) -> int | None:
        """``total_bytes`` at which XLA begins to compute values again on its own; None if unknown."""
        if self.available_bytes is None or self.platform == "cpu":
            return None
        io = self.memory.argument_bytes + self.memory.output_bytes
        return limit_bytes(self.available_bytes, io, on_gpu=self.platform == "gpu")

    @property
    def has_margin(self) -> bool | None:
        """Whether the step stays 5 % below ``rematerialization_bytes`` and XLA recomputes no value; None if unknown."""
        limit = self.rematerialization_bytes
        if limit is None:
            return None
        return self.total_bytes <= (1 - MARGIN) * limit and not self.rematerialized

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in a step."""
        return sum_wire_bytes(self.collectives)

    @property
    def axis_traffic(self) -> tuple[AxisTraffic, ...]:
        """Bytes (of weights, activations, other) and seconds of collectives, by set of mesh axes, most bytes first."""
        return axis_traffic(self.collectives)

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are GPUs with published figures, whose collectives have a ``timing``."""
        return self.kernel_seconds is not None

    @property
    def asynchronous_fraction(self) -> float:
        """Fraction of ``wire_bytes`` sent by asynchronous collectives, 0 to 1; 0 without traffic."""
        return self._fraction(lambda collective: collective.asynchronous)

    @property
    def hidden_fraction(self) -> float | None:
        """GPUs: fraction of ``wire_bytes`` hidden by matrix products expected to take as long; else None."""
        return self._fraction(lambda collective: collective.is_hidden) if self.on_gpus else None

    @property
    def beside_products_fraction(self) -> float | None:
        """GPUs: fraction of ``wire_bytes`` overlapped by any matrix product, however short; else None."""
        return self._fraction(lambda collective: bool(collective.overlapped.product_seconds)) if self.on_gpus else None

    def _fraction(self, chosen: Callable[[Collective], bool]) -> float:
        return sum_wire_bytes(filter(chosen, self.collectives)) / self.wire_bytes if self.wire_bytes else 0.0

    @property
    def nic_bytes(self) -> float | None:
        """GPUs: bytes through each GPU's network adapter to other hosts in a step; else None."""
        return sum(c.count * c.timing.nic_bytes for c in self.collectives if c.timing) if self.on_gpus else None

    @property
    def nvlink_bytes(self) -> float | None:
        """GPUs: bytes that each GPU sends within its host in a step; else None."""
        return None if self.nic_bytes is None else self.wire_bytes - self.nic_bytes

    @property
    def exposed_bandwidth_seconds(self) -> float | None:
        """The least wait of a step for collectives: by published rates alone, without latency; None without figures.

        GPUs: from the schedule simulated at published rates. TPUs: equal to ``exposed_seconds``.
        """
        if not self.on_gpus:
            return self.exposed_seconds
        return sum(c.count * c.timing.waited_by_bandwidth_s for c in self.collectives if c.timing)

    @property
    def chip(self) -> Chip | None:
        """Published figures of the device; None if unknown."""
        # The topology names the chip of absent devices; for devices at hand the kind identifies the chip.
        name = self.topology.split(":")[0] if self.topology else None
        return CHIPS[name] if name else chip_of(self.device_kind)

    @property
    def cycle_seconds(self) -> float | None:
        """Compute time without communication: the compiler's cycles at the chip's clock, plus ``pallas_seconds``.

        None without an estimate of cycles, or without a clock (GPUs).
        """
        # The compiler's cycles exclude Pallas kernels, so their time is added.
        clock_hz = self.chip.clock_hz if self.chip else None
        return self.cycles / clock_hz + (self.pallas_seconds or 0.0) if self.cycles and clock_hz else None

    @property
    def fill_excess_seconds(self) -> float:
        """TPUs: seconds of a step by which the compiler overestimates its zero-fills (``fills``); 0 for other devices.

        These are the compiler's cycles for the fills, less the time of their bytes at HBM's rate; at least 0.
        """
        chip = self.chip
        if self.fills is None or chip is None or chip.clock_hz is None:
            return 0.0
        return self.fills.excess_s(chip.clock_hz, chip.hbm_bandwidth)

    @property
    def compute_time(self) -> Range | None:
        """Time of a step without collectives and host transfers; None if ``roofline`` is None.

        least: the longest of the step's rooflines and, on GPUs, of the sum of the kernels' rooflines. expected: the
        compiler's cycles with corrected fills (TPUs), or each kernel at reached rates (GPUs), but no less than the
        least time. most: the compiler's uncorrected cycles (TPUs); equal to expected on GPUs.
        """
        if self.roofline is None:
            return None
        # Memory and matrix units work in parallel, so the longer time counts.
        least = max(self.kernel_seconds or 0.0, self.roofline.compute_s, self.roofline.memory_s)
        busy = max(self.cycle_seconds or 0.0, self.expected_kernel_seconds or 0.0)
        return Range(least, max(busy - self.fill_excess_seconds, least), max(busy, least))

    @property
    def wait_time(self) -> Range | None:
        """Time that a step waits for collectives, the sum of ``Collective.wait``; None if ``roofline`` is None."""
        least, exposed_s = self.exposed_bandwidth_seconds, self.exposed_seconds
        if self.roofline is None or least is None or exposed_s is None:
            return None
        # Latencies that ``exposed_seconds`` leaves out: on TPUs all of them, on GPUs the hidden ones.
        more = [(one.count, one.wait, one.exposed_s or 0.0) for one in self.collectives]
        latency = total((count, wait.beyond(counted)) for count, wait, counted in more if wait is not None)
        return Range(least, exposed_s + latency.expected, exposed_s + latency.most)

    @property
    def step_time(self) -> Range | None:
        """Time of a step: ``compute_time``, ``wait_time``, and the waits for host transfers.

        least: by published rates alone, without latency. expected: by reached rates, with the latencies that the
        schedule waits for. most: no latency is hidden. No step is shorter than ``roofline.wire_s``. None if
        ``roofline`` is None.
        """
        if self.roofline is None or self.compute_time is None or self.wait_time is None:
            return None
        host_s = self.host.waited_s if self.host else 0.0
        times = self.compute_time.plus(self.wait_time).plus(Range(host_s, host_s, host_s))
        # No step is shorter than the time of its links, even if collectives are hidden.
        return times.at_least(self.roofline.wire_s)

    @property
    def step_seconds(self) -> float | None:
        """Expected seconds of a step, ``step_time.expected``, for comparing variants of a step; None if unknown."""
        return self.step_time.expected if self.step_time else None

    def __str__(self) -> str:
        return plain_text(self.table())

    def _repr_html_(self) -> str:
        title = "What each device sends in a step, by collective; what the step waits for in orange"
        return notebook_html(self.table(), title, report.bars(self))

    def table(self) -> RenderableType:
        """Returns the tables of memory, traffic and time, for ``rich``."""
        return report.tables(self)

    def plot(self, path: str | Path) -> None:
        """Draws memory over the schedule and the bounds of the time to an image file; the suffix gives the format.

        Raises:
          ImportError: matplotlib is not installed.
        """
        report.plot(self, path)

    def to_json(self) -> str:
        """Returns the full forecast as JSON, for storage and comparison; ``Forecast.from_json`` reads it."""
        times = self.step_time._asdict() if self.step_time else None
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self) | {DERIVED: times}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Forecast":
        """Reads a forecast from the JSON of ``to_json``.

        Raises:
          ValueError: the text is no forecast, or has another format.
        """
        return parse_json_as(text, "a forecast", Forecast._of_json)

    @staticmethod
    def _of_json(data: Any) -> "Forecast":
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"this is no forecast of format {FORMAT}; make it anew with this version of the library.")
        data.pop(DERIVED, None)
        return _from_parsed_json(Forecast, data)


def _from_parsed_json(annotation: Any, data: Any) -> Any:
    """Converts parsed JSON to a value of the type ``annotation``.

    Supported types: dataclasses (from dicts), tuples (from lists) with one type of items, ``X | None``, and the types
    of JSON. A value of any other type is returned unchanged.
    """
    # JSON stores tuples as lists and dataclasses as dicts; the annotations give the original type.
    if isinstance(annotation, UnionType):  # X | None
        return None if data is None else _from_parsed_json(get_args(annotation)[0], data)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        field_types = get_type_hints(annotation)
        # Fields of an earlier release that this release has dropped are ignored.
        return annotation(
            **{name: _from_parsed_json(field_types[name], value) for name, value in data.items() if name in field_types}
        )
    return tuple(_from_parsed_json(get_args(annotation)[0], item) for item in data) if isinstance(data, list) else data


def forecast(
    step: jax.stages.Wrapped,
    *args: PyTree,
    topology: str | Mesh | None = None,
    kwargs: Mapping[str, PyTree] | None = None,
    tokens: int | None = None,
    compiler_options: dict[str, Any] | str | None = None,
    cache: bool | ReportCache = True,
) -> Forecast:
    """Compiles a training step and predicts its cost per device.

    >>> x = abstract_batch(jax.ShapeDtypeStruct((64, 512), jnp.float32), mesh, ("dp", "fsdp"))
    >>> found = forecast(jax.jit(lambda x: x @ x.T), x)
    >>> [(c.kind, c.axes, c.payload_bytes) for c in found.collectives]
    [('all-gather', ('dp', 'fsdp'), 131072)]

    Args:
      step: a ``jax.jit`` function, such as the result of ``make_train_step``.
      *args: arguments of the step: arrays or ``ShapeDtypeStruct`` with shardings, as ``abstract_train_state`` and
        ``abstract_batch`` make them on a mesh or an ``AbstractMesh``; static arguments as in a call of the step.
        Shardings may be left to ``jax.jit(in_shardings=...)``.
      topology: name such as "v5e:16x16" or "h100:32x8": TPUs or GPUs that need not be present, as many as devices in
        the arguments' mesh. None, or the mesh of the arguments: the devices at hand that hold the arguments.
      kwargs: keyword arguments of the step, as ``{"train": True}``.
      tokens: tokens in the global batch, for the number of tokens at which the step becomes compute-bound.
      compiler_options: XLA options, as for ``jax.jit(...).lower(...).compile(compiler_options)``; None: XLA's defaults.
        "auto": the result of the function ``compiler_options`` for the chip and the slice; "forecast": with
        ``chosen_by="forecast"``. Options of the step itself (``make_train_step(..., compiler_options=...)``) are for
        the devices of the step's mesh and are not used.
      cache: True: read programs compiled before for a topology from the user's folder (docs/forecast.md explains the
        cache key); False: always compile; a ``ReportCache``: use another folder.
    Raises:
      ValueError: the topology is unknown, or its number of devices differs from the mesh's; the arguments are on no
        mesh or on several; a step for a topology calls back into Python (``jax.debug.print``); or ``compiler_options``
        is an unknown string, or a known one for a device without known options.
      TypeError: ``step`` is not a ``jax.jit`` function.
      ImportError: packages of the compiler for the topology are not installed.
      CompileError: the compiler refuses the step, for another reason than memory.
      TimeoutError: the compilation for a topology takes longer than half an hour.
    """
    devices = parse_topology(topology) if isinstance(topology, str) else None
    call = StepCall(step, args, kwargs or {}, devices, compiler_options, chosen_cache(cache))
    if devices is not None:
        return begin_forecast(call, tokens).start().result()
    if isinstance(topology, Mesh) and dict(topology.shape) != call.axis_sizes:
        raise ValueError(
            f"topology is the mesh {dict(topology.shape)}, but the arguments lie on {call.axis_sizes or 'no mesh'}. "
            "Make them on that mesh, or leave topology out."
        )
    compiled = compile_here(call)
    return read(compiled, count_flops(call.traced.jaxpr, compiled.devices), tokens)


def begin_forecast(call: StepCall, tokens: int | None = None) -> Pending[Forecast]:
    """Traces and exports a step for ``call.topology``; returns the compilation, not yet started, as a ``Pending``.

    The ``result`` of the ``Pending`` is the forecast. Several compilations can run in parallel (see ``side_by_side``).
    ``tokens`` is the number of tokens in the global batch.

    Raises:
      ImportError: the compiler is not installed, or its version differs from jaxlib's.
      ValueError: the arguments are on no mesh; mesh and topology have different numbers of devices; or the step calls
        back into Python (``jax.debug.print``).
    """
    jaxpr = call.traced.jaxpr
    return begin_for_topology(call).then(lambda compiled: read(compiled, count_flops(jaxpr, compiled.devices), tokens))


def read(compiled: Compiled, flops: Flops, tokens: int | None = None) -> Forecast:
    """Returns the ``Forecast`` of a compiled step: memory, collectives and times, from the compiler's output.

    Args:
      compiled: HLO text, buffers and cycles of the step, also of a step that the compiler refuses as too large. Without
        published rates of the device the forecast has no times.
      flops: FLOP of the step, counted in its jaxpr.
      tokens: tokens in the global batch; None: unknown.
    Raises:
      CompileError: the compiler refuses the step as too large, but the buffers of the step fit into the chip's HBM: the
        step exceeds a different memory of the chip. (If the buffers do not fit, the forecast says so.)
    """
    program = parse(compiled.hlo)
    chip = compiled.topology.chip if compiled.topology else chip_of(compiled.device_kind)
    if compiled.buffers and compiled.live_ranges:
        names, transferred = operation_names(program), host_buffers(program)
        memory = read_memory(compiled.buffers, compiled.live_ranges, names, host_buffers=transferred)
    else:
        # Only compilers in the child process write texts about buffers, and not all write live ranges.
        memory = memory_of_totals(compiled.memory or {})
    # Compilers report "exhausted" for other memories too. By the plan of its buffers this step would fit.
    if compiled.too_large and chip and memory.total_bytes <= chip.usable_hbm_bytes:
        raise CompileError(f"the compiler refuses the step for {compiled.too_large}")
    moved = count_hbm_bytes(program) if compiled.platform != "cpu" else None
    result = Forecast(
        platform=compiled.platform,
        device_kind=compiled.device_kind,
        topology=compiled.topology.name if compiled.topology else None,
        axis_sizes=compiled.axis_sizes,
        memory=memory,
        code_bytes=(compiled.memory or {}).get("generated_code", 0),
        available_bytes=chip.usable_hbm_bytes if chip else None,
        collectives=tuple(find_collectives(program, compiled.axis_sizes)),
        flops=flops,
        # A sum of integers; 0 for a backend without estimates.
        cycles=int(Cycles(program).total) or None,
        hbm_bytes=moved,
        tokens=tokens,
        unknown_loops=tuple(dict.fromkeys(program.unknown_loops + flops.unknown_loops)),
        compile_seconds=compiled.seconds,
        versions=compiled.versions,
        notes=(*notes_on(compiled, flops, chip), *(unknown_calls(program, moved) if moved else ())),
        shared_flops=shared_flops(program, flops),
        rematerialized=rematerialized(program),
    )
    return _with_times(result, program, moved, links_of(compiled, chip)) if chip and moved else result


def _with_times(forecast: Forecast, program: Program, moved: HbmBytes, links: Links) -> Forecast:
    """Returns the forecast with its times filled in, computed from the chip's published figures.

    Other fields stay as they are. The times are those of collectives, waits, roofline and host transfers; for GPUs also
    of kernels, for TPUs of Pallas kernels and fills.

    Args:
      forecast: forecast without times.
      program: the compiled program.
      moved: HBM bytes that the program reads and writes in a step.
      links: links between the devices of the mesh, and their chip.
    """
    chip, flops = links.chip, forecast.flops
    if forecast.platform == "gpu":
        least, expected = Kernels(program, chip), Kernels(program, chip.reached)
        collectives = timed(least, expected, forecast.collectives, links)
        forecast = dataclasses.replace(forecast, kernel_seconds=least.total, expected_kernel_seconds=expected.total)
    else:
        collectives = tuple(with_waits(links, collective) for collective in forecast.collectives)
        pallas_s = pallas_seconds(program, flops, chip)
        forecast = dataclasses.replace(forecast, pallas_seconds=pallas_s, fills=find_fills(program))
    # Collectives over the same set of axes share links, so their bytes add up; other axes have separate links.
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    for collective in collectives:
        sent[axes_of(links, collective)] += collective.wire_bytes_per_step
    tokens = forecast.tokens and forecast.tokens / forecast.devices
    return dataclasses.replace(
        forecast,
        collectives=collectives,
        roofline=step_bounds(flops.by_dtype(), moved.total, sent, links, tokens_per_device=tokens),
        exposed_seconds=total_seconds((each.count, each.exposed_s) for each in collectives),
        host=host_traffic(program, chip),
    )


def rates_note(chip: Chip) -> str:
    """Returns a sentence with the published and the reached rates from which a GPU forecast computes times."""
    assert chip.network_bandwidth and chip.efficiency  # a GPU
    return (
        f"Least, by published rates of {chip.name}: {chip.peak_flops['bfloat16'] / 1e12:,.0f} TFLOP/s in bfloat16, HBM "
        f"at {chip.hbm_bandwidth / 1e12:.3g} TB/s, NVLink at {chip.link_bandwidth / 1e9:,.0f} GB/s and the network at "
        f"{chip.network_bandwidth / 1e9:,.0f} GB/s per GPU, one way. Expected: {chip.efficiency.products:.0%} of the "
        f"FLOP/s, {chip.efficiency.memory:.0%} of HBM, {NVLINK_FRACTION:.0%} of NVLink, of the network "
        f"{network_fraction('', 2):.0%} between 2 hosts and {network_fraction('', 32):.0%} among 32 (of gathers "
        f"{network_fraction('all-gather', 32):.0%}), and the latency of what NCCL chooses."
    )


def links_of(compiled: Compiled, chip: Chip) -> Links:
    """Returns the links between the devices of a compiled step, which are devices of the kind ``chip``.

    For TPUs at hand, which have no topology, the torus follows from their coordinates: the size of a dim is the largest
    coordinate plus 1.
    """
    topology = compiled.topology
    if topology is None and chip.torus_axes:
        spans = [max(line) + 1 for line in zip(*compiled.coords, strict=True)]
        topology = Topology("at hand", chip, tuple(spans[: chip.torus_axes]))
    return Links(chip, compiled.axis_sizes, topology, compiled.coords)


def shared_flops(program: Program, flops: Flops) -> float:
    """Returns the FLOP per device and step of the matrix products outside of ``shard_map`` in a compiled program.

    The known FLOP are those inside of ``shard_map``, counted in the jaxpr (``flops``), and those of products outside
    that the compiler has named. Some products, inside or outside, have lost their names. If the total of the program is
    above the known FLOP, the difference also counts as outside, up to the FLOP of all products without names.
    """
    outside = executed_flops(program, lambda i: bool(i.op_name) and not in_shard_map(i.op_name))
    # The compiler drops names when it merges or rewrites products, including products of the model. Only FLOP beyond
    # the jaxpr's count can be repeated work outside.
    nameless = executed_flops(program, lambda i: not i.op_name)
    beyond = executed_flops(program, lambda i: True) - (flops.total - flops.shared) - outside
    return outside + max(0.0, min(nameless, beyond))


def notes_on(compiled: Compiled, flops: Flops, chip: Chip | None) -> Iterator[str]:
    """Yields caveats for the reader of a forecast, a sentence or two each, for ``Forecast.notes``.

    The caveats concern CPUs, absent GPUs, rates of GPUs, an argument without sharding, and operations with unknown
    FLOP; a caveat that does not apply is left out. ``chip`` is None for a device without published figures.
    """
    if compiled.platform == "cpu":
        yield CPU_NOTE
    if compiled.platform == "gpu" and compiled.topology:
        yield GPU_NOTE
    if compiled.platform == "gpu" and chip:
        yield rates_note(chip)
    if compiled.without_sharding:
        yield (
            f"Argument {compiled.without_sharding} has no sharding: the compiler chooses one, and may replicate the "
            "argument. Give it a sharding, as abstract_batch and shard_batch do."
        )
    if flops.opaque:
        yield f"FLOP of {', '.join(flops.opaque)} are not counted."

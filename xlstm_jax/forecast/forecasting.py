"""What a step will cost on each device, before there is a device: memory, traffic, time.

    forecast(step, state, batch, rng, topology="v5e:16x16") -> Forecast

The step is compiled for the topology, and the compiled program is read: what XLA has planned in memory, the collectives
it has scheduled, the cycles that it expects. FLOP are counted in the step's jaxpr. Times follow from these and from the
chip's published figures; they rank variants of a step and are no measurement.
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
from xlstm_jax.forecast.cost.flops import Flops, count_flops
from xlstm_jax.forecast.cost.host import HostTraffic, host_buffers, host_traffic
from xlstm_jax.forecast.cost.memory import Memory, memory_of_totals, operation_names, read_memory
from xlstm_jax.forecast.cost.products import executed_flops, pallas_seconds, unknown_calls
from xlstm_jax.forecast.cost.roofline import Range, Roofline, step_bounds
from xlstm_jax.forecast.cost.schedule import axes_of, timed, with_waits
from xlstm_jax.forecast.hardware.chips import CHIPS, Chip, chip_of
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.nccl import NVLINK_FRACTION, network_fraction
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology
from xlstm_jax.forecast.hlo.op_names import in_shard_map
from xlstm_jax.forecast.hlo.program import Program, parse
from xlstm_jax.wording import notebook_html, plain_text, read_json

FORMAT, DERIVED = 2, "step_time"
CPU_NOTE = (
    "Compiled for CPU: collectives and arguments are exact; the CPU backend's figures for temporaries are not to be "
    "trusted (recomputation raises them), so there are none. Give a topology, as topology='v5e:2x4'."
)
GPU_NOTE = (
    "Not validated on hardware: bytes and schedule are those of XLA's compiler for this GPU, which had no device to "
    "time matrix products on (nothing is autotuned)."
)


@dataclass(frozen=True)
class Forecast:
    """What one step costs each device. All sizes in bytes, all times in seconds, per device and step.

    Attributes:
      platform, device_kind: as JAX names them.
      topology: None for devices at hand.
      axis_sizes: the mesh.
      memory: see ``Memory``; on a CPU only its arguments, on a GPU no list of temporaries.
      code_bytes: of the program itself; 0 where it does not fit, as the compiler does not say then.
      available_bytes: what a program may fill; None for a device without figures.
      collectives: all that the step executes.
      flops: of matrix products, from the jaxpr.
      cycles: the compiler's own estimate; None where it gives none.
      hbm_bytes: moved between HBM and the cores.
      tokens: in the batch of all devices; None where ``forecast`` was not given it.
      unknown_loops: names of loops whose length the program does not show; what is in them counts once.
      compile_seconds: how long the compilation took.
      versions: of jax, jaxlib, libtpu.
      notes: what the reader should know.
      shared_flops: FLOP of matrix products outside of ``shard_map`` that each device does in the compiled program; an
        even share of them would be ``flops.shared``.
      roofline: three bounds of the time by the chip's published figures; None for a device without figures.
      exposed_seconds: how long the schedule is expected to wait for collectives. On TPUs the sum over collectives, each
        alone on its links; an asynchronous collective counts by how much it outlasts what runs beside it. On GPUs by
        ``schedule``, with latency and the rates that are reached. None where ``roofline`` is None.
      host: what lies in the memory of the host, and travels to it and back; None where nothing does, and for devices
        without figures.
      kernel_seconds, expected_kernel_seconds: on GPUs the sum of what each kernel takes, at least by its roofline, and
        at the rates of ``Chip.efficiency``; else None.
      pallas_seconds: on TPUs what kernels of Pallas take by their roofline; None where there are none.

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

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axis_sizes.values())

    @property
    def total_bytes(self) -> int:
        """What the step takes of a device's memory at its peak."""
        return self.memory.total_bytes + self.code_bytes

    @property
    def fits(self) -> bool | None:
        """Whether ``total_bytes`` are available; None where either number is unknown."""
        # What the CPU backend says of temporaries is wrong, so the sum is, too.
        if self.available_bytes is None or self.platform == "cpu":
            return None
        return self.total_bytes <= self.available_bytes

    @property
    def wire_bytes(self) -> float:
        """What each device sends in a step."""
        return sum_wire_bytes(self.collectives)

    @property
    def axis_traffic(self) -> tuple[AxisTraffic, ...]:
        """What travels along each set of axes, weights and activations apart; those that carry most first."""
        return axis_traffic(self.collectives)

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are GPUs with published figures; their collectives have a ``timing``."""
        return self.kernel_seconds is not None

    @property
    def asynchronous_fraction(self) -> float:
        """The part of ``wire_bytes`` that travels while the schedule goes on, 0 to 1; 0 where nothing travels."""
        return self._fraction(lambda collective: collective.asynchronous)

    @property
    def hidden_fraction(self) -> float | None:
        """The part of ``wire_bytes`` beside matrix products that are expected to take as long; GPUs only, else None."""
        return self._fraction(lambda collective: collective.is_hidden) if self.on_gpus else None

    @property
    def beside_products_fraction(self) -> float | None:
        """The part of ``wire_bytes`` beside any matrix product, however short; GPUs only, else None."""
        return self._fraction(lambda collective: bool(collective.overlapped.product_seconds)) if self.on_gpus else None

    def _fraction(self, chosen: Callable[[Collective], bool]) -> float:
        return sum_wire_bytes(filter(chosen, self.collectives)) / self.wire_bytes if self.wire_bytes else 0.0

    @property
    def nic_bytes(self) -> float | None:
        """What the network adapter of each GPU carries to other hosts in a step; GPUs only, else None."""
        return sum(c.count * c.timing.nic_bytes for c in self.collectives if c.timing) if self.on_gpus else None

    @property
    def nvlink_bytes(self) -> float | None:
        """What each GPU sends within its host in a step; GPUs only, else None."""
        return None if self.nic_bytes is None else self.wire_bytes - self.nic_bytes

    @property
    def exposed_bandwidth_seconds(self) -> float | None:
        """The least of ``exposed_seconds``: by published rates alone, without the latency of GPUs' collectives."""
        if not self.on_gpus:
            return self.exposed_seconds
        return sum(c.count * c.timing.waited_by_bandwidth_s for c in self.collectives if c.timing)

    @property
    def chip(self) -> Chip | None:
        """The published figures of the device."""
        # An absent device has the chip that its topology names; one at hand is known by its kind.
        name = self.topology.split(":")[0] if self.topology else None
        return CHIPS[name] if name else chip_of(self.device_kind)

    @property
    def cycle_seconds(self) -> float | None:
        """The time of all but communication: the compiler's cycles at the chip's clock, and ``pallas_seconds``."""
        # The compiler gives kernels of Pallas no cycles: they come on top.
        clock_hz = self.chip.clock_hz if self.chip else None
        return self.cycles / clock_hz + (self.pallas_seconds or 0.0) if self.cycles and clock_hz else None

    @property
    def step_time(self) -> Range | None:
        """A step's time: what runs, and the collectives and transfers to the host that it waits for.

        least: by published rates alone. What runs takes its rooflines, on GPUs those of each kernel, and links have no
          latency.
        expected: what runs takes the compiler's estimate of cycles (TPUs), or each kernel by the rates that are reached
          (GPUs), but no less than the rooflines; GPUs' collectives take what NCCL does.

        No step is shorter than ``roofline.wire_s``. None where ``roofline`` is None.
        """
        waits = (self.exposed_bandwidth_seconds, self.exposed_seconds)
        if self.roofline is None or waits[0] is None or waits[1] is None:
            return None
        # Memory and matrix units work side by side, so the longer of the two counts; what is waited for comes on top.
        least = max(self.kernel_seconds or 0.0, self.roofline.compute_s, self.roofline.memory_s)
        busy = max(self.cycle_seconds or 0.0, self.expected_kernel_seconds or 0.0, least)
        host_s = self.host.waited_s if self.host else 0.0
        times = (least + waits[0] + host_s, busy + waits[1] + host_s)
        # No step is shorter than its links need, however much of that is hidden.
        return Range(*(max(seconds, self.roofline.wire_s) for seconds in times))

    @property
    def step_seconds(self) -> float | None:
        """The expected value of ``step_time``, by which variants of a step are compared."""
        return self.step_time.expected if self.step_time else None

    def __str__(self) -> str:
        return plain_text(self.table())

    def _repr_html_(self) -> str:
        title = "What each device sends in a step, by collective; what the step waits for in orange"
        return notebook_html(self.table(), title, report.bars(self))

    def table(self) -> RenderableType:
        """The tables of memory, traffic and time, for ``rich``."""
        return report.tables(self)

    def plot(self, path: str | Path) -> None:
        """Draws memory over the schedule and the bounds of the time into a PNG; matplotlib must be installed."""
        report.plot(self, path)

    def to_json(self) -> str:
        """Everything, to be kept and compared; ``Forecast.from_json`` reads it."""
        times = self.step_time._asdict() if self.step_time else None
        return json.dumps({"format": FORMAT} | dataclasses.asdict(self) | {DERIVED: times}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Forecast":
        """The inverse of ``to_json``.

        Raises:
          ValueError: no forecast, or one of another format; names both.
        """
        return read_json(text, "a forecast", Forecast._of_json)

    @staticmethod
    def _of_json(data: Any) -> "Forecast":
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"this is no forecast of format {FORMAT}; make it anew with this version of the library.")
        data.pop(DERIVED, None)
        return _restored(Forecast, data)


def _restored(kind: Any, data: Any) -> Any:
    """A value of a type from what ``json`` has read: dataclasses from dicts and tuples from lists, as annotated."""
    # JSON has lists for tuples and dicts for dataclasses; the annotations say which it was.
    if isinstance(kind, UnionType):  # X | None
        return None if data is None else _restored(get_args(kind)[0], data)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        kinds = get_type_hints(kind)
        # A release may leave out what an earlier one kept.
        return kind(**{name: _restored(kinds[name], value) for name, value in data.items() if name in kinds})
    return tuple(_restored(get_args(kind)[0], item) for item in data) if isinstance(data, list) else data


def forecast(
    step: jax.stages.Wrapped,
    *args: PyTree,
    topology: str | Mesh | None = None,
    kwargs: Mapping[str, PyTree] | None = None,
    tokens: int | None = None,
    compiler_options: dict[str, Any] | str | None = None,
    cache: bool | ReportCache = True,
) -> Forecast:
    """Compiles a training step and reads what it will cost each device.

    >>> x = abstract_batch(jax.ShapeDtypeStruct((64, 512), jnp.float32), mesh, ("dp", "fsdp"))
    >>> found = forecast(jax.jit(lambda x: x @ x.T), x)
    >>> [(c.kind, c.axes, c.payload_bytes) for c in found.collectives]
    [('all-gather', ('dp', 'fsdp'), 131072)]

    Args:
      step: a ``jax.jit`` function, as ``make_train_step`` returns one.
      *args: its arguments, arrays or ``ShapeDtypeStruct`` with shardings, as ``abstract_train_state`` and
        ``abstract_batch`` make them on a mesh or on an ``AbstractMesh``; static ones as the step is called with them.
        Shardings may be left to ``jax.jit(in_shardings=...)``.
      topology: as "v5e:16x16" or "h100:32x8": TPUs or GPUs that need not be there, as many as the mesh of the
        arguments has devices. A mesh, or None: the devices at hand that the arguments lie on.
      kwargs: what the step takes by keyword, as ``{"train": True}``.
      tokens: in the batch of all devices, for the number of tokens at which the step becomes compute-bound.
      compiler_options: XLA's, as for ``jax.jit(...).lower(...).compile(compiler_options)``; "auto": those of
        ``compiler_options`` for the chip and the slice. (What the step itself asks for, with ``make_train_step(...,
        compiler_options=...)``, is for the devices of its own mesh and not taken.)
      cache: whether a program that was compiled for a topology before is read from the user's folder instead of being
        compiled again (docs/forecast.md has what tells programs apart); or a ``ReportCache``, which is another folder.
    Raises:
      ValueError: an unknown topology, or it has other than the mesh's number of devices; the arguments lie on no mesh
        or on several; a step for a topology calls back into Python (``jax.debug.print``).
      TypeError: ``step`` is not a ``jax.jit`` function.
      ImportError: what the compiler for TPUs needs is not installed.
      CompileError: the compiler refuses the step, for another reason than memory.
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
    """``forecast`` for a topology, up to the compiler: what is left may run beside others, see ``side_by_side``."""
    jaxpr = call.traced.jaxpr
    return begin_for_topology(call).then(lambda compiled: read(compiled, count_flops(jaxpr, compiled.devices), tokens))


def read(compiled: Compiled, flops: Flops, tokens: int | None = None) -> Forecast:
    """The forecast of a compiled step.

    Raises:
      CompileError: the compiler says that the step does not fit, but it does: what it refuses is something else.
    """
    program = parse(compiled.hlo)
    chip = compiled.topology.chip if compiled.topology else chip_of(compiled.device_kind)
    if compiled.buffers and compiled.live_ranges:
        names, on_way = operation_names(program), host_buffers(program)
        memory = read_memory(compiled.buffers, compiled.live_ranges, names, host_buffers=on_way)
    else:
        # Only the compilers in the child process write texts about buffers.
        memory = memory_of_totals(compiled.memory or {})
    # Compilers say "exhausted" of other memories too. By its own buffers the step would fit.
    if compiled.too_large and chip and memory.total_bytes <= chip.usable_hbm_bytes:
        raise CompileError(f"the compiler refuses the step for {compiled.too_large}")
    moved = count_hbm_bytes(program) if compiled.platform != "cpu" else None
    found = Forecast(
        platform=compiled.platform,
        device_kind=compiled.device_kind,
        topology=compiled.topology.name if compiled.topology else None,
        axis_sizes=compiled.axis_sizes,
        memory=memory,
        code_bytes=(compiled.memory or {}).get("generated_code", 0),
        available_bytes=chip.usable_hbm_bytes if chip else None,
        collectives=tuple(find_collectives(program, compiled.axis_sizes)),
        flops=flops,
        # Sums of whole numbers; a backend without estimates has none.
        cycles=int(Cycles(program).total) or None,
        hbm_bytes=moved,
        tokens=tokens,
        unknown_loops=tuple(dict.fromkeys(program.unknown_loops + flops.unknown_loops)),
        compile_seconds=compiled.seconds,
        versions=compiled.versions,
        notes=(*notes_on(compiled, flops, chip), *(unknown_calls(program, moved) if moved else ())),
        shared_flops=shared_flops(program, flops),
    )
    return _with_times(found, program, moved, links_of(compiled, chip)) if chip and moved else found


def _with_times(forecast: Forecast, program: Program, moved: HbmBytes, links: Links) -> Forecast:
    """The forecast with all that follows from the published figures of its chip."""
    chip, flops = links.chip, forecast.flops
    if forecast.platform == "gpu":
        least, expected = Kernels(program, chip), Kernels(program, chip.reached)
        collectives = timed(least, expected, forecast.collectives, links)
        forecast = dataclasses.replace(forecast, kernel_seconds=least.total, expected_kernel_seconds=expected.total)
    else:
        collectives = tuple(with_waits(links, collective) for collective in forecast.collectives)
        forecast = dataclasses.replace(forecast, pallas_seconds=pallas_seconds(program, flops, chip))
    # Collectives over one set of axes share its links, so their bytes add up; other axes have links of their own.
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    for collective in collectives:
        sent[axes_of(links, collective)] += collective.wire_bytes_per_step
    tokens = forecast.tokens and forecast.tokens / forecast.devices
    return dataclasses.replace(
        forecast,
        collectives=collectives,
        roofline=step_bounds(flops.by_dtype(), moved.total, sent, links, tokens_per_device=tokens),
        exposed_seconds=total_seconds((one.count, one.exposed_s) for one in collectives),
        host=host_traffic(program, chip),
    )


def rates_note(chip: Chip) -> str:
    """What the times of a forecast for GPUs rest on."""
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
    """The links between the devices; of TPUs at hand the torus is what their coordinates span."""
    topology = compiled.topology
    if topology is None and chip.torus_axes:
        spans = [max(line) + 1 for line in zip(*compiled.coords, strict=True)]
        topology = Topology("at hand", chip, tuple(spans[: chip.torus_axes]))
    return Links(chip, compiled.axis_sizes, topology, compiled.coords)


def shared_flops(program: Program, flops: Flops) -> float:
    """What a device does of the matrix products outside of ``shard_map``.

    Products to which the compiler has left no name count as far as the step does more than the named ones.
    """
    outside = executed_flops(program, lambda i: bool(i.op_name) and not in_shard_map(i.op_name))
    # The compiler drops names where it merges or rewrites products, of the model as well: only what exceeds the jaxpr's
    # count can be repeated work outside.
    nameless = executed_flops(program, lambda i: not i.op_name)
    beyond = executed_flops(program, lambda i: True) - (flops.total - flops.shared) - outside
    return outside + max(0.0, min(nameless, beyond))


def notes_on(compiled: Compiled, flops: Flops, chip: Chip | None) -> Iterator[str]:
    """What the reader of a forecast should know."""
    if compiled.platform == "cpu":
        yield CPU_NOTE
    if compiled.platform == "gpu" and compiled.topology:
        yield GPU_NOTE
    if compiled.platform == "gpu" and chip:
        yield rates_note(chip)
    if compiled.without_sharding:
        yield (
            f"Argument {compiled.without_sharding} has no sharding: the compiler chooses, maybe whole on each device. "
            "Give it one, as abstract_batch and shard_batch do."
        )
    if flops.opaque:
        yield f"FLOP of {', '.join(flops.opaque)} are not counted."

"""The parts of a forecast that are read from a compiled step and a chip's figures, one function for each."""

import math
from collections import defaultdict
from collections.abc import Iterator

from xlstm_jax.distributed.forecast.compiling.compile import Compiled
from xlstm_jax.distributed.forecast.cost.cycles import HbmBytes
from xlstm_jax.distributed.forecast.cost.flops import Flops
from xlstm_jax.distributed.forecast.cost.host import visitors
from xlstm_jax.distributed.forecast.cost.memory import Memory, operation_names, read_memory
from xlstm_jax.distributed.forecast.cost.products import executed_flops
from xlstm_jax.distributed.forecast.cost.roofline import Roofline, step_bounds
from xlstm_jax.distributed.forecast.cost.schedule import axes_of
from xlstm_jax.distributed.forecast.cost.traffic import Collective
from xlstm_jax.distributed.forecast.hlo.op_names import in_shard_map
from xlstm_jax.distributed.forecast.hlo.program import Program
from xlstm_jax.distributed.hardware.chips import Chip
from xlstm_jax.distributed.hardware.links import Links
from xlstm_jax.distributed.hardware.nccl import NVLINK_FRACTION, network_fraction
from xlstm_jax.distributed.hardware.slices import Topology

CPU_NOTE = (
    "Compiled for CPU: collectives and arguments are exact; the CPU backend's figures for temporaries are not to be "
    "trusted (recomputation raises them), so there are none. Give a topology, as topology='v5e:2x4'."
)
GPU_NOTE = (
    "Not validated on hardware: bytes and schedule are those of XLA's compiler for this GPU, which had no device to "
    "time matrix products on (nothing is autotuned)."
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


def memory_of(compiled: Compiled, program: Program) -> Memory:
    """What the step takes of memory, by module where XLA's own texts are there."""
    if compiled.buffers and compiled.live_ranges:
        names = operation_names(program)
        return read_memory(compiled.buffers, compiled.live_ranges, names, visitors=visitors(program))
    stats = compiled.memory or {}
    alias = stats.get("alias", 0)
    return Memory(
        argument_bytes=stats.get("argument", 0),
        alias_bytes=alias,
        output_bytes=stats.get("output", 0) - alias,
        temporary_bytes=stats.get("temp", 0),
        constant_bytes=0,
        peak_point=0,
        peak_live_bytes=stats.get("temp", 0),
        temporaries=(),
        arguments=(),
        timeline=(),
    )


def links_of(compiled: Compiled, chip: Chip) -> Links:
    """The links between the devices; of TPUs at hand the torus is what their coordinates span."""
    topology = compiled.topology
    if topology is None and chip.torus_axes:
        spans = [max(line) + 1 for line in zip(*compiled.coords, strict=True)]
        topology = Topology("at hand", chip, tuple(spans[: chip.torus_axes]))
    return Links(chip, compiled.axis_sizes, topology, compiled.coords)


def roofline_of(
    links: Links, flops: Flops, moved: HbmBytes, found: tuple[Collective, ...], tokens: int | None
) -> Roofline:
    """Three bounds of the step's time."""
    sent: dict[tuple[str, ...], float] = defaultdict(float)
    for collective in found:
        sent[axes_of(links, collective)] += collective.wire_bytes_per_step
    per_device = tokens and tokens / math.prod(links.axis_sizes.values())
    return step_bounds(flops.by_dtype(), moved.total, sent, links.chip, links, tokens_per_device=per_device)


def shared_flops(program: Program, flops: Flops) -> float:
    """What a device does of the matrix products outside of ``shard_map``.

    Those that the compiler has left without a name are what the step does beyond the products inside.
    """
    outside = executed_flops(program, lambda i: bool(i.op_name) and not in_shard_map(i.op_name))
    nameless = executed_flops(program, lambda i: not i.op_name)
    beyond = executed_flops(program, lambda i: True) - (flops.total - flops.shared) - outside
    return outside + max(0.0, min(nameless, beyond))


def exposed_seconds(links: Links, collective: Collective) -> float:
    """How long the schedule waits for a collective in a step.

    Where the compiler gives no cycles for what runs beside an asynchronous one of a TPU, it is taken to be hidden.
    """
    if collective.timing is not None:
        return collective.count * collective.timing.waited_s
    alone = links.seconds(axes_of(links, collective), collective.wire_bytes)
    beside = collective.overlapped.cycles
    if not collective.asynchronous:
        return collective.count * alone
    if beside is None or links.chip.clock_hz is None:
        return 0.0 if collective.overlapped.instructions else collective.count * alone
    return collective.count * max(0.0, alone - beside / links.chip.clock_hz)


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

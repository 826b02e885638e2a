"""Network traffic of a compiled step: every collective with its count, bytes, mesh axes and module.

    Program --collectives--> [Collective(kind, count, dtype, payload_bytes, wire_bytes, axes, module, direction, ...)]

Wire bytes assume the ring algorithm, which sends the fewest bytes (Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009). Each of n devices sends

    all-gather, reduce-scatter, all-to-all     (n - 1) / n  x payload
    all-reduce                               2 (n - 1) / n  x payload
    collective-permute, collective-broadcast                  payload
    ragged-all-to-all                          (n - 1) / n  x payload, for rows that spread evenly

where the payload is the unsharded array: the result of a gather, the input of a reduction. A ragged exchange has two
arrays, the rows to send and the buffer for received rows. Its payload is the smaller array, which is full of rows; the
larger array is padded to the maximum.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xlstm_jax.forecast.cost.clock import Cycles
from xlstm_jax.forecast.cost.cycles import CONTROL
from xlstm_jax.forecast.cost.time_range import Range
from xlstm_jax.forecast.hlo.collective_sites import Site, sites
from xlstm_jax.forecast.hlo.dataflow import Value, downstream, origin, sources, upstream
from xlstm_jax.forecast.hlo.device_groups import axes_of_groups
from xlstm_jax.forecast.hlo.instruction import Instruction
from xlstm_jax.forecast.hlo.op_names import (
    BACKWARD,
    OTHER,
    RECOMPUTE,
    common_path,
    in_shard_map,
    module_path,
)
from xlstm_jax.forecast.hlo.program import Computation, Program
from xlstm_jax.program_names import LOOKUP_SCOPE

MIXED = "mixed"
RAGGED = "ragged-all-to-all"
WEIGHTS, ACTIVATIONS = "weights", "activations"  # contents of a collective; else ``OTHER``
MIN_S = 1e-12  # a collective without overlapped products is not hidden, even if it takes no time

_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_ZERO = re.compile(r"-?0(\.0*)?")
_SAME_VALUES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "fusion", "get-tuple-element", "opt-barrier"}
_SAME_VALUES |= {"parameter", "reshape", "transpose", "tuple", "while"}
_SCATTER_NAMES, _GATHER_NAMES = ("reduce_scatter", "psum_scatter"), ("all_gather", "all_gather_invariant")


@dataclass(frozen=True)
class Overlap:
    """Work scheduled between the start and the end of a collective.

    Attributes:
      modules: modules of the compute instructions, in scheduled order.
      instructions: number of compute instructions.
      cycles: the compiler's estimate for the instructions, loops multiplied out; None if the sum is 0 and an estimate
        is missing, or without instructions.
      seconds: expected time of the instructions; None if unknown.
      product_seconds: GPUs: the part of ``seconds`` in kernels with a matrix product; else None.
    """

    modules: tuple[str, ...]
    instructions: int
    cycles: int | None
    seconds: float | None = None
    product_seconds: float | None = None


NO_OVERLAP = Overlap((), 0, None)


@dataclass(frozen=True)
class Timing:
    """Time of a single execution of a GPU collective.

    Attributes:
      networks: networks in use: "NVLink" within a host, "network" between hosts, both, or empty for a single device.
      nic_bytes: bytes through the network adapter of each GPU.
      bandwidth_s: least time: the bytes at the links' published rates, without latency.
      latency_s: latency of the algorithm chosen by NCCL, see ``hardware.nccl``.
      waited_s: expected wait of the schedule: the part of ``seconds`` left when the result is needed, after every
        collective that started earlier, with kernels at reached rates.
      waited_by_bandwidth_s: the same wait by published rates alone: no latency, and each kernel at the roofline.
      bytes_s: time of the bytes at the rate reached by NCCL.
      choice: NCCL's algorithm and protocol, as "Ring LL128".
    """

    networks: tuple[str, ...]
    nic_bytes: float
    bandwidth_s: float
    latency_s: float
    waited_s: float
    waited_by_bandwidth_s: float
    bytes_s: float
    choice: str

    @property
    def seconds(self) -> float:
        """Expected seconds of one execution without overlap: latency plus the time of the bytes."""
        return self.bytes_s + self.latency_s


class Bandwidth(NamedTuple):
    """Seconds of one execution of a collective: alone on its links, and the wait of the schedule."""

    seconds: float
    waited_s: float


@dataclass(frozen=True)
class Collective:
    """A collective operation of a step.

    >>> from xlstm_jax.forecast import forecast
    >>> x = jax.device_put(jnp.zeros((8, 256)), jax.NamedSharding(mesh, jax.P("fsdp")))
    >>> (one,) = forecast(jax.jit(lambda x: x.sum(0)), x).collectives
    >>> one.kind, one.axes, one.payload_bytes, one.wire_bytes  # each of 4 devices sends 2 x 3/4 of 256 floats
    ('all-reduce', ('fsdp',), 1024, 1536.0)

    Attributes:
      name: name of the instruction in the program.
      kind: executed operation: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", ...
      stands_for: requested operation, "reduce-scatter" or "all-gather", if the compiler executes an all-reduce
        instead.
      count: executions per step; a loop of unknown length counts as a single trip.
      dtype: dtype on the wire; "mixed" for arrays of different dtypes in the same collective.
      payload_bytes: unsharded bytes per execution, summed over the arrays.
      wire_bytes: bytes sent by each device per execution.
      group_size: devices in an exchange; for a permute, the number of connected devices.
      axes: mesh axes of the collective; None if the groups follow no set of axes.
      op_name: JAX's name of the operation; if the compiler dropped the name, the name of the nearest named operation.
      modules: modules served by the collective, one per array.
      leaves: paths of the gathered parameters, one per array; empty if unknown.
      slices: number of pieces into which a later loop slices the gathered array, one per trip; 1 without a loop.
      direction: "forward", "backward", "recompute" (forward computed again in the backward pass) or "other".
      asynchronous: whether the schedule continues during the collective.
      overlapped: work scheduled during the collective.
      timing: GPUs: time of the collective and the schedule's wait; else None.
      alone_s, exposed_s: seconds per execution without overlap, and the expected wait of the schedule; None for a
        device without figures. TPUs: of the bytes alone.
      latency_s: latency per execution in seconds, see ``Links.latency_s``; None for a device without figures.
    """

    name: str
    kind: str
    stands_for: str | None
    count: int
    dtype: str
    payload_bytes: int
    wire_bytes: float
    group_size: int
    axes: tuple[str, ...] | None
    op_name: str
    modules: tuple[str, ...]
    leaves: tuple[str, ...]
    direction: str
    asynchronous: bool
    overlapped: Overlap = field(default=NO_OVERLAP)
    slices: int = 1
    timing: Timing | None = None
    alone_s: float | None = None
    exposed_s: float | None = None
    latency_s: float | None = None

    @property
    def carries(self) -> str:
        """Contents of the collective's arrays: "weights", "activations" or "other".

        "weights" are gathered parameters, and reduce-scattered or averaged gradients. "activations" are everything else
        sent inside of ``shard_map``. "other" is sent outside of ``shard_map``, for example by the optimizer.
        """
        # Gradients of replicated leaves are averaged in the scope of `sync_gradients`, which gathers no leaf.
        if self.leaves or _is_in_own_scope(self.op_name):
            return WEIGHTS
        return ACTIVATIONS if in_shard_map(self.op_name) else OTHER

    @property
    def module(self) -> str:
        """Path of the module that the collective serves, such as "blocks/up"; for several modules, their common parent.

        "" if several modules have no common parent, and for a collective outside of modules.
        """
        return common_path(self.modules)

    @property
    def looks_up_rows(self) -> bool:
        """Whether the collective exchanges rows of an embedding table for a lookup, instead of gathering the table.

        JAX's name of the operation (``op_name``) tells: the library runs such lookups in the scope "lookup_rows".
        """
        return LOOKUP_SCOPE in self.op_name

    @property
    def wire_bytes_per_step(self) -> float:
        return self.count * self.wire_bytes

    @property
    def by_bandwidth(self) -> "Bandwidth":
        """Seconds of one execution by published rates, without latency: alone on the links, and the schedule's wait.

        Both are 0 for a device without published figures.
        """
        if self.timing is not None:
            return Bandwidth(self.timing.bandwidth_s, self.timing.waited_by_bandwidth_s)
        return Bandwidth(self.alone_s or 0.0, self.exposed_s or 0.0)

    @property
    def wait(self) -> Range | None:
        """Seconds that the schedule waits for one execution, as a range; None for a device without published figures.

        ``least`` has the wait for the bytes at published rates, without latency. ``expected`` of GPUs is the wait in
        the simulated schedule, with NCCL's latency; of TPUs, ``least`` plus the latency of a synchronous collective. In
        ``most`` no latency is hidden: TPUs add it to every collective, GPUs wait at least for the latency.
        """
        if self.exposed_s is None:
            return None
        latency_s = self.latency_s or 0.0
        if self.timing is not None:
            return Range(self.timing.waited_by_bandwidth_s, self.exposed_s, max(self.exposed_s, latency_s))
        waited = 0.0 if self.asynchronous else latency_s
        return Range(self.exposed_s, self.exposed_s + waited, self.exposed_s + latency_s)

    @property
    def is_hidden(self) -> bool:
        """Whether matrix products on a GPU overlap the collective, and are expected to take at least as long.

        False for other devices.
        """
        return self.timing is not None and (self.overlapped.product_seconds or 0) >= max(self.timing.seconds, MIN_S)


def sum_wire_bytes(collectives: Iterable[Collective]) -> float:
    """Returns the bytes that each device sends in a step, summed over the collectives."""
    return sum(collective.wire_bytes_per_step for collective in collectives)


def executions(collectives: Iterable[Collective]) -> int:
    """Returns how many collectives a step executes: the sum of ``count``, loops multiplied out."""
    return sum(collective.count for collective in collectives)


def find_collectives(program: Program, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Returns every collective that a program executes, in scheduled order, callers before called computations.

    Args:
      program: result of ``hlo.parse``.
      axis_sizes: mesh sizes by axis; the last axis runs fastest over the devices.
    Raises:
      ValueError: the number of devices in the mesh differs from the program's.
    """
    devices = math.prod(axis_sizes.values())
    if program.num_partitions not in (None, devices):
        raise ValueError(
            f"the mesh {dict(axis_sizes)} has {devices} devices, the program was compiled for "
            f"{program.num_partitions}. Pass the axis sizes of the mesh that the step was compiled on."
        )
    cycles = Cycles(program)
    return [_collective(program, site, axis_sizes, cycles) for site in sites(program)]


def ring_bytes(kind: str, payload_bytes: int, group_size: int) -> float:
    """Returns the bytes that each device sends in one execution of a collective, by the ring algorithm.

    With n = ``group_size`` these are (n - 1) / n of the payload (the unsharded array); twice as many for an all-reduce;
    the full payload for a permute or a broadcast.
    """
    # A device does not send to itself: n - 1 of n shares are sent.
    round_ = (group_size - 1) / group_size
    rounds = {"all-reduce": 2 * round_, "collective-permute": 1.0, "collective-broadcast": 1.0}
    return payload_bytes * rounds.get(kind, round_)


# ------------------------------------------------------------------------------------------------- describing each one


def _collective(program: Program, site: Site, axis_sizes: Mapping[str, int], cycles: Cycles) -> Collective:
    """Returns the ``Collective`` at ``site``: bytes, dtype, mesh axes, modules served, and the overlap with compute.

    The times of the result are None; ``with_waits`` or ``timed`` fill them in later.

    Args:
      program: the compiled program.
      site: place at which the program executes the collective.
      axis_sizes: size of each mesh axis, outermost first.
      cycles: the compiler's estimates of cycles, for the overlapped instructions.
    """
    groups = site.inner.groups or (tuple(range(math.prod(axis_sizes.values()))),)
    group_size = max(len(group) for group in groups)
    # The operands are sent. For an all-reduce the result gives the dtype, since a TPU may sum in a wider dtype.
    reduces_all = site.inner.opcode.removesuffix("-start") == "all-reduce"
    sent = [site.inner] if reduces_all else [value.instruction for value in site.arrays]
    shapes = [shape for instruction in sent for shape in instruction.shapes]
    if site.kind == RAGGED:
        shapes = shapes[:2]  # the rest are offsets and sizes
        payload = min(shape.nbytes for shape in shapes)
    else:
        payload = sum(shape.nbytes for shape in shapes) * (group_size if site.kind == "all-gather" else 1)
    dtypes = {shape.dtype for shape in shapes}
    names = _op_names(program, site)
    stands_for = _stands_for(site, program, group_size, names)
    gathers = "all-gather" in (site.kind, stands_for)
    leaves = tuple(_parameter_path(program, value) for value in site.arrays) if gathers else ()
    # All or none: `leaves` has an entry for each array of the collective.
    leaves = leaves if all(leaves) else ()
    direction = module_path(names[0])[1] if names[0] else OTHER
    if gathers and not site.own_names and direction == BACKWARD:
        direction = RECOMPUTE  # the name is a neighbour's; a gather in the backward pass serves recomputation
    return Collective(
        name=site.scheduled.name,
        kind=site.kind,
        stands_for=stands_for,
        count=site.trips,
        dtype=dtypes.pop() if len(dtypes) == 1 else MIXED,
        payload_bytes=payload,
        wire_bytes=ring_bytes(site.kind, payload, group_size),
        group_size=group_size,
        axes=axes_of_groups(groups, axis_sizes),
        op_name=names[0],
        modules=tuple(leaf.rpartition("/")[0] for leaf in leaves) or _modules_served(program, site, names, gathers),
        leaves=leaves,
        direction=direction,
        asynchronous=site.overlapped_instructions is not None,
        overlapped=_overlap(site, cycles),
        slices=_pieces_in_loops(program, site) if gathers else 1,
    )


def _overlap(site: Site, cycles: Cycles) -> Overlap:
    work = [instruction for instruction in site.overlapped_instructions or () if instruction.is_work]
    # A loop that runs during the collective counts with all its trips.
    spent = sum(cycles.duration_of(site.computation, instruction).total for instruction in work)
    modules = dict.fromkeys(module_path(instruction.op_name)[0] for instruction in work if instruction.op_name)
    known = spent or (work and not any(_lacks_cycles(cycles.program, site.computation, each) for each in work))
    return Overlap(tuple(filter(None, modules)), len(work), int(spent) if known else None)


def _lacks_cycles(program: Program, computation: Computation, instruction: Instruction) -> bool:
    """Returns whether the compiler gave no estimate of cycles for an instruction of ``computation``.

    0 counts as an estimate. A loop, branch or call lacks cycles if an instruction that it runs lacks cycles; never if
    it runs nothing (0 trips).
    """
    if instruction.opcode not in CONTROL:
        return instruction.estimated_cycles is None
    if not program.trips_of(computation, instruction):
        return False
    called = (program.computations[name] for name in instruction.called_names)
    return any(_lacks_cycles(program, inner, each) for inner in called for each in inner.instructions if each.is_work)


def _op_names(program: Program, site: Site) -> tuple[str, ...]:
    """Returns JAX's names of the operations behind a collective, several if the compiler merged operations.

    If the compiler dropped the names of the collective, the result has a single name: of the reducer (the computation
    that adds two values), else of the nearest operation from which the sent arrays are computed, else "".
    """
    if site.own_names:
        return site.own_names
    # If a compiler built an all-reduce from other operations, the reducer (the sum of two values) may keep the name.
    reducers = [program.computations[name] for name in site.inner.callees_by_role.get("to_apply", ())]
    operand_names = [i.op_name for reducer in reducers for i in reducer.parameters.values() if i.op_name]
    # A name without a slash belongs to an argument and names no operation.
    near = (other for value in site.arrays for other in (value, *upstream(program, value)))
    names = itertools.chain(
        operand_names, (value.instruction.op_name for value in near if "/" in value.instruction.op_name)
    )
    return (next(names, ""),)


def _stands_for(site: Site, program: Program, group_size: int, names: tuple[str, ...]) -> str | None:
    if site.kind != "all-reduce":
        return None
    primitive = names[0].rsplit("/", 1)[-1]
    if primitive in _SCATTER_NAMES:
        return "reduce-scatter"
    # A TPU compiler that replaces a gather by an all-reduce drops the name: only the zeros identify the gather.
    in_zeros = not site.own_names and all(_is_shard_in_zeros(program, value, group_size) for value in site.arrays)
    return "all-gather" if primitive in _GATHER_NAMES or in_zeros else None


def _is_shard_in_zeros(program: Program, value: Value, group_size: int) -> bool:
    """Returns whether an array is zero except for the device's shard: then its all-reduce acts as an all-gather.

    True if ``value``, possibly behind copies, is a ``dynamic-update-slice`` of an array of zeros, with an update of 1 /
    ``group_size`` of the array's bytes. ``group_size`` is the number of devices in the exchange.
    """
    while value.instruction.opcode != "dynamic-update-slice":
        before = sources(program, value)
        if len(before) != 1 or before[0].instruction.opcode == "while":
            return False
        value = before[0]
    full, shard = (value.computation.by_name[name] for name in value.instruction.operands[:2])
    # Copies and calls may lie between the zero constant and the update that writes the shard.
    base = origin(program, Value(value.computation, full.name)).instruction
    is_zero = base.opcode == "constant" and _ZERO.fullmatch(base.operand_text)
    return bool(is_zero) and full.shapes[0].nbytes == group_size * shard.shapes[0].nbytes


# ------------------------------------------------------------------------------------ the modules that each one serves


def _modules_served(program: Program, site: Site, names: tuple[str, ...], gathers: bool) -> tuple[str, ...]:
    """Returns, for each array of a collective, the path of the module that the array belongs to; "" outside of modules.

    Usually the path comes from the array's name in ``names``. But a gather by the library is named after an outer
    module, because parameters are gathered before the scope of their module is entered; the same holds for the
    averaging of gradients. For these collectives, and for nameless collectives, the path comes from the nearest
    operation in a module: after the collective for a gather, before the collective for any other kind. Without an
    operation in a module the name counts.

    Args:
      program: the compiled program.
      site: place at which the program executes the collective.
      names: JAX's names of the operations behind the collective; a name for each array, or the first for every array.
      gathers: whether the collective is an all-gather, or an all-reduce in place of an all-gather.
    """
    names = names if len(names) == len(site.arrays) else names[:1] * len(site.arrays)
    own_paths = tuple(module_path(name)[0] for name in names)
    if site.own_names and not any(map(_is_in_own_scope, names)):
        return own_paths
    served = []
    for position, value in enumerate(site.arrays):
        near = downstream(program, site.result(position)) if gathers else (value, *upstream(program, value))
        named = (other.instruction.op_name for other in near)
        paths = (module_path(name)[0] for name in named if name and not _is_in_own_scope(name))
        served.append(next(filter(None, paths), own_paths[position]))
    return tuple(served)


def _is_in_own_scope(op_name: str) -> bool:
    return not {"gather_params", "sync_gradients"}.isdisjoint(op_name.split("/"))


def _pieces_in_loops(program: Program, site: Site) -> int:
    """Returns into how many pieces a later loop slices the result of a gather, one in each trip; 1 without such a loop.

    A loop over layers slices the weights of a layer from the gathered weights of all layers. The largest number counts
    if the gather has several arrays or slices.
    """
    # A gather before a loop over layers gathers the weights of all layers, and each trip slices the weights of one
    # layer. A slice that runs as often as the gather is not in such a loop.
    pieces = [
        _size(piece.computation.by_name[piece.instruction.operands[0]]) // max(_size(piece.instruction), 1)
        for position in range(len(site.arrays))
        for piece in downstream(program, site.result(position), through=_SAME_VALUES)
        if piece.instruction.opcode == "dynamic-slice"
        and program.trips[program.schedule_of(piece.computation)] > site.trips
    ]
    return max(pieces, default=1)


def _size(instruction: Instruction) -> int:
    return math.prod(instruction.shapes[0].dims)


def _parameter_path(program: Program, value: Value) -> str:
    """Returns the path of the parameter that an array comes from, as in the model's tree: "blocks/up/kernel".

    Casts, copies and slices between the parameter and the array are passed. The path is read from JAX's name of the
    program's argument: ``state.params['blocks']['up']['kernel'].value``. "" if the array comes from no argument, or
    from an argument outside of "params".
    """
    # Casts, copies into faster memory and slices of stacked layers may lie between the parameter and its gather.
    value = origin(program, value)
    instruction = value.instruction
    if instruction.opcode != "parameter" or not value.computation.is_entry:
        return ""
    name = instruction.op_name.removesuffix(".value")  # ".value" is the field of a box
    steps = [re.split(r"[.\[]", name)[0], *("".join(step) for step in _STEP.findall(name))]
    return "/".join(steps[len(steps) - steps[::-1].index("params") :]) if "params" in steps else ""

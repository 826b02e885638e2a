"""What a compiled step sends over the network: every collective, how often, how much, for which module.

    Program --collectives--> [Collective(kind, count, dtype, payload_bytes, wire_bytes, axes, module, direction, ...)]

Wire bytes are those of the ring algorithm, which needs the fewest (Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009). Each of n devices sends

    all-gather, reduce-scatter, all-to-all     (n - 1) / n  x payload
    all-reduce                               2 (n - 1) / n  x payload
    collective-permute                                        payload
    ragged-all-to-all                          (n - 1) / n  x payload, of rows that spread evenly

where the payload is the whole array: what a gather results in, what a reduction starts from. Of a ragged exchange it is
the smaller one of what rows are taken from and what they are written to, which is full of rows; the other has places
for the most that could come.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from xlstm_jax.forecast.cost.clock import Cycles
from xlstm_jax.forecast.cost.cycles import CONTROL
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
WEIGHTS, ACTIVATIONS = "weights", "activations"  # what a collective carries; else ``OTHER``
MIN_S = 1e-12  # so that nothing hides beside nothing

_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
_ZERO = re.compile(r"-?0(\.0*)?")
_SAME_VALUES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "fusion", "get-tuple-element", "opt-barrier"}
_SAME_VALUES |= {"parameter", "reshape", "transpose", "tuple", "while"}
_SCATTER_NAMES, _GATHER_NAMES = ("reduce_scatter", "psum_scatter"), ("all_gather", "all_gather_invariant")


@dataclass(frozen=True)
class Overlap:
    """What runs while a collective is under way.

    Attributes:
      modules: that the compute instructions serve, in order.
      instructions: how many of them there are.
      cycles: the compiler's estimate for all of them, loops multiplied out; None where they would be 0, and some
        have none.
      seconds: what they are expected to take; None where that is not known.
      product_seconds: of it, on GPUs, the kernels that hold a matrix product; else None.
    """

    modules: tuple[str, ...]
    instructions: int
    cycles: int | None
    seconds: float | None = None
    product_seconds: float | None = None


NO_OVERLAP = Overlap((), 0, None)


@dataclass(frozen=True)
class Timing:
    """The time of one execution of a collective of GPUs.

    Attributes:
      networks: which it uses: "NVLink" within a host, "network" between hosts, both, or none for one device alone.
      nic_bytes: that the network adapter of each GPU carries.
      bandwidth_s: of its bytes alone, at the links' published rates: the least.
      latency_s: before its bytes count, in the way that NCCL chooses, see ``hardware.nccl``.
      waited_s: how long the schedule is expected to wait for it: what is left of ``seconds`` when its result is needed,
        after the collectives that were under way before it, with kernels at the rates that they reach.
      waited_by_bandwidth_s: the same by published rates alone: no latency, and each kernel at its roofline.
      bytes_s: of its bytes, as fast as NCCL sends them.
      choice: of NCCL, as "Ring LL128".
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
        """Expected, alone."""
        return self.bytes_s + self.latency_s


class Bandwidth(NamedTuple):
    """Seconds of one execution of a collective: alone on its links, and waited for."""

    seconds: float
    waited_s: float


@dataclass(frozen=True)
class Collective:
    """One collective operation of a step.

    >>> from xlstm_jax.forecast import forecast
    >>> x = jax.device_put(jnp.zeros((8, 256)), jax.NamedSharding(mesh, jax.P("fsdp")))
    >>> (one,) = forecast(jax.jit(lambda x: x.sum(0)), x).collectives
    >>> one.kind, one.axes, one.payload_bytes, one.wire_bytes  # each of 4 devices sends 2 x 3/4 of 256 floats
    ('all-reduce', ('fsdp',), 1024, 1536.0)

    Attributes:
      name: of its instruction in the program.
      kind: what is executed: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", ...
      stands_for: what was asked for, where an all-reduce does the work of a "reduce-scatter" or an "all-gather".
      count: executions per step; those in a loop of unknown length count once per execution of the loop.
      dtype: in which it travels; "mixed" where arrays of different dtypes travel together.
      payload_bytes: of one execution, the whole array; of several arrays that travel together, their sum.
      wire_bytes: that each device sends in one execution.
      group_size: how many devices take part in one exchange; for a permute, how many it connects.
      axes: of the mesh that it runs over; None if its groups follow no set of axes.
      op_name: the name that JAX gave it; where the compiler dropped that, the name of the nearest named operation.
      modules: modules that it serves, one for each array that travels.
      leaves: paths of the parameters that are gathered, one for each array; empty where they are not known.
      slices: how many pieces a loop cuts out of what was gathered before it, one in each trip; 1 without such a loop.
      direction: "forward", "backward", "recompute" (backward again computes forward) or "other".
      asynchronous: whether the schedule goes on while it is under way.
      overlapped: what is scheduled while it is under way.
      timing: on GPUs how long it takes, and how long the schedule waits for it; else None.
      alone_s, exposed_s: of one execution, how long it takes alone on its links, and how long the schedule is expected
        to wait for it; None for a device without figures.
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

    @property
    def carries(self) -> str:
        """What it carries: "weights", gathered, or their gradients, scattered and averaged; "activations", whatever
        else is sent inside of ``shard_map``; "other", what is sent outside, as by the optimizer."""
        # Gradients of whole leaves are averaged in the scope of `sync_gradients`, and no leaf is gathered there.
        if self.leaves or _is_in_own_scope(self.op_name):
            return WEIGHTS
        return ACTIVATIONS if in_shard_map(self.op_name) else OTHER

    @property
    def module(self) -> str:
        """The module that it serves; of several, the nearest that holds them all; "" for the whole model or none."""
        return common_path(self.modules)

    @property
    def looks_up_rows(self) -> bool:
        """Whether it serves a lookup that asks for rows of a table instead of the table, forward or backward."""
        return LOOKUP_SCOPE in self.op_name

    @property
    def wire_bytes_per_step(self) -> float:
        return self.count * self.wire_bytes

    @property
    def by_bandwidth(self) -> "Bandwidth":
        """The times of its bytes by published rates, without latency; 0 for a device without figures."""
        if self.timing is not None:
            return Bandwidth(self.timing.bandwidth_s, self.timing.waited_by_bandwidth_s)
        return Bandwidth(self.alone_s or 0.0, self.exposed_s or 0.0)

    @property
    def is_hidden(self) -> bool:
        """On GPUs: whether matrix products are expected to run beside it for as long as it takes."""
        return self.timing is not None and (self.overlapped.product_seconds or 0) >= max(self.timing.seconds, MIN_S)


def sum_wire_bytes(collectives: Iterable[Collective]) -> float:
    """What each device sends for all of them in a step."""
    return sum(collective.wire_bytes_per_step for collective in collectives)


def executions(collectives: Iterable[Collective]) -> int:
    """How many collectives a step executes."""
    return sum(collective.count for collective in collectives)


def find_collectives(program: Program, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective that a program executes.

    Args:
      program: as ``hlo.parse`` gives it.
      axis_sizes: the mesh, sizes by axis, the last running fastest over the devices.
    Raises:
      ValueError: the mesh does not have as many devices as the program was compiled for.
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
    """Bytes that each device sends in one execution, by the ring algorithm (see the top of this file)."""
    # Nobody sends to itself: of n shares n - 1 travel.
    round_ = (group_size - 1) / group_size
    rounds = {"all-reduce": 2 * round_, "collective-permute": 1.0, "collective-broadcast": 1.0}
    return payload_bytes * rounds.get(kind, round_)


# ------------------------------------------------------------------------------------------------- describing each one


def _collective(program: Program, site: Site, axis_sizes: Mapping[str, int], cycles: Cycles) -> Collective:
    groups = site.inner.groups or (tuple(range(math.prod(axis_sizes.values()))),)
    group_size = max(len(group) for group in groups)
    # What travels are the operands; of an all-reduce the result, as a TPU may sum in a wider dtype.
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
    leaves = tuple(_leaf(program, value) for value in site.arrays) if gathers else ()
    # All or none: `leaves` has an entry for each array that travels.
    leaves = leaves if all(leaves) else ()
    direction = module_path(names[0])[1] if names[0] else OTHER
    if gathers and not site.own_names and direction == BACKWARD:
        direction = RECOMPUTE  # it has a neighbour's name, and in the backward pass serves to compute forward again
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
        asynchronous=site.during is not None,
        overlapped=_overlap(site, cycles),
        slices=_pieces_in_loops(program, site) if gathers else 1,
    )


def _overlap(site: Site, cycles: Cycles) -> Overlap:
    work = [instruction for instruction in site.during or () if instruction.is_work]
    # A loop that runs beside it counts with all its trips.
    spent = sum(cycles.of(site.computation, instruction).total for instruction in work)
    modules = dict.fromkeys(module_path(instruction.op_name)[0] for instruction in work if instruction.op_name)
    known = spent or (work and not any(_lacks_cycles(cycles.program, site.computation, each) for each in work))
    return Overlap(tuple(filter(None, modules)), len(work), int(spent) if known else None)


def _lacks_cycles(program: Program, computation: Computation, instruction: Instruction) -> bool:
    """Whether the compiler gives no estimate for an instruction, or for one that it runs; "0" is one."""
    if instruction.opcode not in CONTROL:
        return instruction.estimated_cycles is None
    if not program.trips_of(computation, instruction):
        return False
    called = (program.computations[name] for name in instruction.all_called)
    return any(_lacks_cycles(program, inner, each) for inner in called for each in inner.instructions if each.is_work)


def _op_names(program: Program, site: Site) -> tuple[str, ...]:
    """Names of the operations that the collective stems from, several where the compiler merged them.

    Where it has none of its own, its reducer may still hold the name; else it is that of the nearest operation before
    it.
    """
    if site.own_names:
        return site.own_names
    # Of an all-reduce that a compiler has made of others, the name may be left in the computation that adds two values.
    reducers = [program.computations[name] for name in site.inner.called.get("to_apply", ())]
    own = [i.op_name for reducer in reducers for i in reducer.parameters.values() if i.op_name]
    # A name without a slash is that of an argument, and says nothing of what is done.
    near = (other for value in site.arrays for other in (value, *upstream(program, value)))
    names = itertools.chain(own, (value.instruction.op_name for value in near if "/" in value.instruction.op_name))
    return (next(names, ""),)


def _stands_for(site: Site, program: Program, group_size: int, names: tuple[str, ...]) -> str | None:
    if site.kind != "all-reduce":
        return None
    primitive = names[0].rsplit("/", 1)[-1]
    if primitive in _SCATTER_NAMES:
        return "reduce-scatter"
    # A TPU's compiler that puts an all-reduce in place of a gather drops the name: then only the zeros tell.
    in_zeros = not site.own_names and all(_is_shard_in_zeros(program, value, group_size) for value in site.arrays)
    return "all-gather" if primitive in _GATHER_NAMES or in_zeros else None


def _is_shard_in_zeros(program: Program, value: Value, group_size: int) -> bool:
    """Whether an array is zero but for the shard that each device writes: the all-reduce of it is a gather."""
    while value.instruction.opcode != "dynamic-update-slice":
        before = sources(program, value)
        if len(before) != 1 or before[0].instruction.opcode == "while":
            return False
        value = before[0]
    whole, shard = (value.computation.by_name[name] for name in value.instruction.operands[:2])
    # The array into which the shard is written may have come through copies and calls from the constant that made it.
    base = origin(program, Value(value.computation, whole.name)).instruction
    is_zero = base.opcode == "constant" and _ZERO.fullmatch(base.operand_text)
    return bool(is_zero) and whole.shapes[0].nbytes == group_size * shard.shapes[0].nbytes


# ------------------------------------------------------------------------------------ the modules that each one serves


def _modules_served(program: Program, site: Site, names: tuple[str, ...], gathers: bool) -> tuple[str, ...]:
    """A module for each array: that of its own name, or of what computes it, or of what reads it where it is gathered.

    Parameters are gathered before the scope of their module is entered, so a gather carries the name of the module
    around it. That name is therefore the last resort.
    """
    names = names if len(names) == len(site.arrays) else names[:1] * len(site.arrays)
    own = tuple(module_path(name)[0] for name in names)
    if site.own_names and not any(map(_is_in_own_scope, names)):
        return own
    served = []
    for position, value in enumerate(site.arrays):
        near = downstream(program, site.result(position)) if gathers else (value, *upstream(program, value))
        named = (other.instruction.op_name for other in near)
        paths = (module_path(name)[0] for name in named if name and not _is_in_own_scope(name))
        served.append(next(filter(None, paths), own[position]))
    return tuple(served)


def _is_in_own_scope(op_name: str) -> bool:
    return not {"gather_params", "sync_gradients"}.isdisjoint(op_name.split("/"))


def _pieces_in_loops(program: Program, site: Site) -> int:
    """Into how many pieces a loop after the gather cuts what was gathered; 1 without such a loop."""
    # A gather in front of a loop over layers brings the weights of all layers: in each trip the loop cuts out those of
    # one. A slice that runs as often as the gather itself is not such a loop's.
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


def _leaf(program: Program, value: Value) -> str:
    """The path of the parameter that an array stems from, as in the model's tree: "blocks/up/kernel"; "" if unknown.

    JAX names the arguments of a program: ``state.params['blocks']['up']['kernel'].value``.
    """
    # Casts, copies into faster memory and slices of a stack of layers stand between the parameter and its gather.
    value = origin(program, value)
    instruction = value.instruction
    if instruction.opcode != "parameter" or not value.computation.is_entry:
        return ""
    name = instruction.op_name.removesuffix(".value")  # that of a box
    steps = [re.split(r"[.\[]", name)[0], *("".join(step) for step in _STEP.findall(name))]
    return "/".join(steps[len(steps) - steps[::-1].index("params") :]) if "params" in steps else ""

"""The memory of a compiled program, by module, at the moment when it is largest.

XLA plans all memory before the program runs, and describes the plan in two texts that ``xla_dump_to`` writes:

  buffer assignment   allocations and, in them, every value with its offset and size: arguments, outputs, constants,
                      and one large allocation for all temporaries
  live range          the schedule (instructions numbered, loop bodies included), and the first and last point of each
                      value

So at each point of the schedule it is known which bytes of the temporaries' allocation are in use, and by what. The
point where most are in use is the peak. Values that share bytes, as the carry of a loop and what is written into it
in place, count once: the sum at the peak is at most the allocation, and the rest lies between buffers.

Sizes are those of the device's tiled layout, so a float32[10] takes 512 bytes on a TPU. Only the device's main memory
counts, which is XLA's memory space 0: not the on-chip VMEM.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from xlstm_jax.forecast.hlo.dataflow import Value, upstream
from xlstm_jax.forecast.hlo.instruction import HBM
from xlstm_jax.forecast.hlo.op_names import OTHER, module_paths
from xlstm_jax.forecast.hlo.program import Program

TIMELINE_POINTS = 400
KINDS = ("argument", "output", "constant", "temporary")  # of allocations
COLLECTIONS = ("parameter", "tuple", "while")  # of many values, which stem from many operations

_ALLOCATION = re.compile(r"allocation \d+: (?:0x[0-9a-f]+, )?size (\d+)(.*):$")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r" value: <\d+ ([^\s{]+)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S.*)$")
_STEP = re.compile(r"    (\d+):(\S+)$")
_RANGE = re.compile(r"    ([^\s{]+)(\{[\d,]*\}):(\d+)-(\d+)$")
_LAYOUT = re.compile(r"(?<=\])\{[^}]*\}")


@dataclass(frozen=True)
class Temporary:
    """A buffer that is live at the peak, by what was written into it. ``first`` and ``last`` are schedule points."""

    bytes: int
    shape: str
    instruction: str
    op_name: str
    path: str
    direction: str
    first: int
    last: int


@dataclass(frozen=True)
class Moment:
    """A point in the schedule: the module that runs, and the bytes of temporaries that are live."""

    point: int
    live_bytes: int
    path: str
    direction: str


@dataclass(frozen=True)
class Memory:
    """What a program takes of one device's main memory. All sizes are bytes, padded as the device lays arrays out.

    Attributes:
      argument_bytes: all arguments, donated ones included.
      alias_bytes: of these, arguments that are donated: an output is written over them.
      output_bytes: outputs that are not written over an argument.
      temporary_bytes: the allocation of all temporaries.
      constant_bytes: constants.
      peak_point: the point of the schedule where most bytes of that allocation are in use.
      peak_live_bytes: the bytes in use there.
      temporaries: what uses them, largest first; their bytes add up to ``peak_live_bytes``.
      timeline: use over the schedule, the peak among its points.
      resident_peak_bytes: the most bytes in use, without the buffers of host transfers; None where that is not known.
    """

    argument_bytes: int
    alias_bytes: int
    output_bytes: int
    temporary_bytes: int
    constant_bytes: int
    peak_point: int = 0
    peak_live_bytes: int = 0
    temporaries: tuple[Temporary, ...] = ()
    timeline: tuple[Moment, ...] = ()
    resident_peak_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """All of it: arguments, own outputs, temporaries and constants, without the program's code.

        It is what libtpu compares with the chip's memory. ``temp_size_in_bytes`` of JAX's ``memory_analysis`` may be a
        third more than the allocation, also for a program that the compiler accepts.
        """
        return self.argument_bytes + self.output_bytes + self.temporary_bytes + self.constant_bytes

    def by_module(self) -> dict[str, int]:
        """Bytes of temporaries at the peak by module path, largest first; "" for what lies in no module."""
        sums: dict[str, int] = defaultdict(int)
        for temporary in self.temporaries:
            sums[temporary.path] += temporary.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class _Operation(NamedTuple):
    """The operation of the model that an instruction stems from."""

    name: str = ""
    path: str = ""
    direction: str = OTHER


_UNKNOWN = _Operation()
_Operations = Mapping[str, _Operation]  # by the name of the instruction


class _Value(NamedTuple):
    """What an instruction writes into an allocation: its range of bytes, and the points at which it is live."""

    instruction: str
    element: str  # of the instruction's result: "{1}", "{}"
    shape: str
    start: int
    stop: int
    first: int = 0
    last: int = 0

    @property
    def name(self) -> str:
        """As the live ranges call it."""
        return self.instruction + self.element


@dataclass(frozen=True)
class _Allocation:
    bytes: int
    kind: str  # "argument", "output", "constant", "temporary" or "thread-local"
    color: int  # XLA's number of the memory space
    donated: bool
    values: list[_Value] = field(default_factory=list)


def memory_of_totals(sizes: Mapping[str, int]) -> Memory:
    """The memory of a program of which only the totals of JAX's ``memory_analysis`` are known."""
    # What JAX counts as output includes the outputs that are written over an argument.
    alias, temporary = sizes.get("alias", 0), sizes.get("temp", 0)
    output = sizes.get("output", 0) - alias
    return Memory(sizes.get("argument", 0), alias, output, temporary, constant_bytes=0, peak_live_bytes=temporary)


def read_memory(
    buffer_assignment: str,
    live_range: str,
    op_names: Mapping[str, str],
    *,
    host_buffers: Collection[str] = (),
    points: int = TIMELINE_POINTS,
) -> Memory:
    """Reads XLA's two texts (see the top of this file).

    Args:
      buffer_assignment: the text of ``*after_optimizations-buffer-assignment.txt``.
      live_range: the text of ``*after_optimizations-live-range.txt`` of the same program.
      op_names: for each instruction the name of an operation of the model, as ``operation_names`` gives them.
      host_buffers: names in ``live_range`` of the values that come from the host or leave for it.
      points: the timeline is thinned to at most so many; of neighbours the highest is kept.
    Raises:
      ValueError: a text does not have the known form, or the two are not of one program.
    """
    paths = module_paths(filter(None, op_names.values()))
    operations = {instruction: _Operation(name, *paths[name]) for instruction, name in op_names.items() if name}
    # On-chip memory (VMEM) has allocations of its own, of another color.
    allocations = [a for a in _allocations(buffer_assignment) if a.color == HBM]
    sums = {kind: sum(a.bytes for a in allocations if a.kind == kind) for kind in KINDS}
    schedule, ranges = _live_ranges(live_range)
    temporaries = _temporaries(allocations, ranges)
    resident = [live for live in temporaries if live.name not in host_buffers]
    live_bytes = _live_bytes(temporaries, len(schedule))
    peak = int(live_bytes.argmax())
    return Memory(
        argument_bytes=sums["argument"],
        alias_bytes=sum(a.bytes for a in allocations if a.donated),
        output_bytes=sums["output"],
        temporary_bytes=sums["temporary"],
        constant_bytes=sums["constant"],
        peak_point=peak,
        peak_live_bytes=int(live_bytes[peak]),
        temporaries=_temporaries_at(peak, temporaries, operations),
        timeline=_timeline(live_bytes, schedule, operations, points),
        resident_peak_bytes=int(_live_bytes(resident, len(schedule)).max()),
    )


def operation_names(program: Program) -> dict[str, str]:
    """For each instruction that runs its ``op_name``, or that of the nearest named one from which its value stems.

    The compiler names nothing that it adds by itself: casts out of a loop, and copies between HBM and VMEM. An argument
    is named too, so a copy of a weight is called ``state.params['head']['kernel']``.
    """
    names_by_instruction = {}
    for computation, _ in program.executed():
        for instruction in computation.instructions:
            before = upstream(program, Value(computation, instruction.name))
            # A tuple or a loop stems from many operations: none of them names it.
            names = (value.instruction.op_name for value in before if instruction.opcode not in COLLECTIONS)
            names_by_instruction[instruction.name] = instruction.op_name or next(filter(None, names), "")
    return names_by_instruction


# ---------------------------------------------------------------------------------------------------------- the texts


def _allocations(text: str) -> list[_Allocation]:
    allocations: list[_Allocation] = []
    for line in text.splitlines():
        if header := _ALLOCATION.match(line):
            flags, color = header[2], _COLOR.search(header[2])
            is_parameter, live_out = ", parameter " in flags, "maybe-live-out" in flags
            kind = "argument" if is_parameter else "output" if live_out else "temporary"
            for other in ("constant", "thread-local"):  # thread-local: scratch of a reduction's scalar function
                kind = other if f", {other}" in flags else kind
            space = int(color[1]) if color else HBM
            allocations.append(_Allocation(int(header[1]), kind, space, is_parameter and live_out))
        elif value := _VALUE.match(line):
            name, element, _, size, offset, shape = value.groups()
            end = int(offset) + int(size)
            allocations[-1].values.append(_Value(name, element or "{}", _LAYOUT.sub("", shape), int(offset), end))
    if not allocations:
        raise ValueError(f"This is no buffer assignment of XLA: no line begins an allocation: {text[:80]!r}.")
    return allocations


def _live_ranges(text: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """The instructions in the order in which they run, and for each value its first and last point."""
    schedule, ranges = {}, {}
    for line in text.splitlines():
        if step := _STEP.match(line):
            schedule[int(step[1])] = step[2]
        elif span := _RANGE.match(line):
            ranges[span[1] + span[2]] = (int(span[3]), int(span[4]))
    if not schedule or not ranges:
        raise ValueError(f"This is no live-range text of XLA, with InstructionSequence and ranges: {text[:80]!r}.")
    # Values that live to the end have a last point behind the last instruction.
    last = max(*schedule, *(stop for _, stop in ranges.values()))
    return [schedule.get(point, "") for point in range(last + 1)], ranges


def _temporaries(allocations: Iterable[_Allocation], ranges: Mapping[str, tuple[int, int]]) -> list[_Value]:
    """All temporaries, their allocations laid one behind the other."""
    # Offsets are those within an allocation. Laid one behind the other, ranges of different allocations do not meet.
    temporaries, base = [], 0
    for allocation in (a for a in allocations if a.kind == "temporary"):
        for value in allocation.values:
            if value.name not in ranges:
                raise ValueError(
                    f"The buffer assignment has a temporary {value.name} of {value.stop - value.start} bytes, which is "
                    f"not in the live-range text; it knows {len(ranges)} values. Pass both texts of one and the same "
                    "program."
                )
            first, last = ranges[value.name]
            start, stop = base + value.start, base + value.stop
            temporaries.append(value._replace(start=start, stop=stop, first=first, last=last))
        base += allocation.bytes
    return temporaries


# -------------------------------------------------------------------------------------------------- the use over time


def _stretches(temporaries: Sequence[_Value]) -> tuple[np.ndarray, list[slice]]:
    """The bytes of the stretches into which the ends of all temporaries cut their memory, and the stretches of each."""
    # Between two neighbouring edges all bytes are used alike, so a stretch is counted as one, however many bytes it
    # has.
    edges = np.unique([edge for value in temporaries for edge in (value.start, value.stop)])
    return np.diff(edges), [slice(*np.searchsorted(edges, (value.start, value.stop))) for value in temporaries]


def _live_bytes(temporaries: Sequence[_Value], points: int) -> np.ndarray:
    """At each point the bytes that any temporary uses; bytes that several share count once."""
    widths, stretches = _stretches(temporaries)
    users, live = np.zeros(len(widths), np.int64), np.zeros(points, np.int64)
    starting, ending = defaultdict(list), defaultdict(list)
    for value, used in zip(temporaries, stretches, strict=True):
        starting[value.first].append(used)
        ending[value.last].append(used)
    for point in range(points):
        for used in starting[point]:
            users[used] += 1
        live[point] = widths[users > 0].sum()
        for used in ending[point]:
            users[used] -= 1
    return live


def _temporaries_at(point: int, temporaries: Sequence[_Value], operations: _Operations) -> tuple[Temporary, ...]:
    """The buffers in use at a point. Where some overlap, the larger one has the bytes."""
    by_range = defaultdict(list)
    widths, stretches = _stretches(temporaries)
    for live, used in zip(temporaries, stretches, strict=True):
        by_range[live.start, live.stop].append((live, used))
    free, found = np.ones(len(widths), bool), []
    # The largest ranges first: a value that is written in place into a part of another is the other's.
    for _, sharing in sorted(by_range.items(), key=lambda item: (item[0][0] - item[0][1], item[0])):
        if not (history := _history([live for live, _ in sharing], point)):
            continue
        used = sharing[0][1]
        if size := int(widths[used][free[used]].sum()):
            found.append(_temporary(size, history, point, operations))
        free[used] = False
    return tuple(sorted(found, key=lambda temporary: -temporary.bytes))


def _history(sharing: Sequence[_Value], point: int) -> list[_Value]:
    """Of the values in one range of bytes: those live at the point, then those that touch these in time, and so on."""
    first, last = point, point
    history: list[_Value] = []
    # In place of a value that ends another one begins, in the same bytes: a carry through the trips of a loop, or an
    # update in place. All of them are one buffer.
    while more := [live for live in sharing if live not in history and live.first <= last and first <= live.last]:
        history += more
        first, last = min(live.first for live in history), max(live.last for live in history)
    return history


def _temporary(size: int, history: Sequence[_Value], point: int, operations: _Operations) -> Temporary:
    """Named after the value whose name says most: one live at the point, before one in a module, before any other."""

    def information(live: _Value) -> tuple[bool, bool, bool]:
        operation = operations.get(live.instruction, _UNKNOWN)
        is_named = bool(operation.name)
        return live.first <= point <= live.last and is_named, bool(operation.path), is_named

    value = max(history, key=information)
    first, last = min(live.first for live in history), max(live.last for live in history)
    return Temporary(size, value.shape, value.instruction, *operations.get(value.instruction, _UNKNOWN), first, last)


def _timeline(live: np.ndarray, schedule: Sequence[str], operations: _Operations, points: int) -> tuple[Moment, ...]:
    """The highest point of each of at most ``points`` equal stretches, with the module that ran last."""
    running, current = [], _UNKNOWN
    for instruction in schedule:
        current = operations.get(instruction, current)
        running.append((current.path, current.direction))
    # Thinned by maxima, and not by every n-th point, so that the peak stays.
    stretches = np.array_split(np.arange(len(live)), min(points, len(live)))
    highest = [int(stretch[live[stretch].argmax()]) for stretch in stretches]
    return tuple(Moment(point, int(live[point]), *running[point]) for point in highest)

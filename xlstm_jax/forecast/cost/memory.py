"""Memory of a compiled program at its peak, by module.

XLA plans all memory before the program runs, and ``xla_dump_to`` writes the plan as two texts:

  buffer assignment   allocations, with offset and size of every value in them: arguments, outputs, constants,
                      and one large allocation for all temporaries
  live range          the schedule (instructions numbered, loop bodies included), and the first and last point of each
                      value

At each point of the schedule, both texts give the bytes of the temporaries' allocation in use, and the values there.
The point with the most bytes in use is the peak. Values with shared bytes, such as a loop carry and an update in
place, count once: the sum at the peak is at most the allocation, and the rest are gaps between buffers.

Sizes refer to the device's tiled layout: a float32[10] takes 512 bytes on a TPU. Only the device's main memory (XLA's
memory space 0) counts, not the on-chip VMEM.
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
KINDS = ("argument", "output", "constant", "temporary")  # kinds of allocations
COLLECTIONS = ("parameter", "tuple", "while")  # opcodes with many values from many operations

_ALLOCATION = re.compile(r"allocation \d+: (?:0x[0-9a-f]+, )?size (\d+)(.*):$")
_COLOR = re.compile(r", color (\d+)")
_VALUE = re.compile(r" value: <\d+ ([^\s{]+)(\{[\d,]*\})?( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S.*)$")
_STEP = re.compile(r"    (\d+):(\S+)$")
_RANGE = re.compile(r"    ([^\s{]+)(\{[\d,]*\}):(\d+)-(\d+)$")
_LAYOUT = re.compile(r"(?<=\])\{[^}]*\}")


@dataclass(frozen=True)
class Temporary:
    """A buffer that is live at the peak, from schedule point ``first`` to ``last``.

    ``instruction``, ``op_name``, ``path`` (module) and ``direction`` describe the producer.
    """

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
    """A point in the schedule: the running module (``path``) and its direction, and the bytes of live temporaries."""

    point: int
    live_bytes: int
    path: str
    direction: str


@dataclass(frozen=True)
class Memory:
    """Main memory of a device that a program uses, in bytes, padded to the device's layout of arrays.

    Attributes:
      argument_bytes: arguments, including donated arguments.
      alias_bytes: part of ``argument_bytes`` that is donated and overwritten by outputs.
      output_bytes: outputs that overwrite no argument.
      temporary_bytes: allocation of the temporaries.
      constant_bytes: constants.
      peak_point: schedule point with the most bytes of the temporaries' allocation in use.
      peak_live_bytes: bytes in use at the peak.
      temporaries: buffers in use at the peak, largest first; the bytes add up to ``peak_live_bytes``.
      timeline: use over the schedule, including the peak.
      resident_peak_bytes: the most bytes in use without the buffers of host transfers; None if unknown.
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
        """Sum of arguments, outputs that overwrite no argument, temporaries and constants, without the program's code.

        libtpu compares this sum with the chip's memory. ``temp_size_in_bytes`` of JAX's ``memory_analysis`` may be a
        third more than the allocation, even for a program that the compiler accepts.
        """
        return self.argument_bytes + self.output_bytes + self.temporary_bytes + self.constant_bytes

    def by_module(self) -> dict[str, int]:
        """Returns {module path: bytes of temporaries at the peak}, largest first; "" is outside of modules."""
        sums: dict[str, int] = defaultdict(int)
        for temporary in self.temporaries:
            sums[temporary.path] += temporary.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


class _Operation(NamedTuple):
    """The model's operation behind an instruction: the ``op_name``, the module's path, and the direction."""

    name: str = ""
    path: str = ""
    direction: str = OTHER


_UNKNOWN = _Operation()
_Operations = Mapping[str, _Operation]  # key: name of the instruction


class _Value(NamedTuple):
    """A value in an allocation: its byte range, and the first and last point at which it is live."""

    instruction: str
    element: str  # element of the instruction's result: "{1}", "{}"
    shape: str
    start: int
    stop: int
    first: int = 0
    last: int = 0

    @property
    def name(self) -> str:
        """Name of the value in XLA's live ranges: instruction and element of the result, such as "fusion.3{1}"."""
        return self.instruction + self.element


@dataclass(frozen=True)
class _Allocation:
    bytes: int
    kind: str  # "argument", "output", "constant", "temporary" or "thread-local"
    color: int  # XLA's number of the memory space
    donated: bool
    values: list[_Value] = field(default_factory=list)


def memory_of_totals(sizes: Mapping[str, int]) -> Memory:
    """Returns the memory of a program from the totals of JAX's ``memory_analysis``, without buffers and timeline.

    ``sizes`` has bytes by name: "argument", "output", "alias", "temp"; a missing name counts as 0.
    """
    # JAX's output size includes the outputs that overwrite an argument.
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
    """Computes the memory of a program, at the peak and over time, from XLA's buffer assignment and live ranges.

    Args:
      buffer_assignment: text of ``*after_optimizations-buffer-assignment.txt``.
      live_range: text of ``*after_optimizations-live-range.txt`` of the same program.
      op_names: for each instruction the name of an operation of the model, from ``operation_names``.
      host_buffers: names in ``live_range`` of values received from the host or sent to it.
      points: maximum length of the timeline; of neighbouring points the highest is kept.
    Raises:
      ValueError: a text has an unknown form, or the two texts belong to different programs.
    """
    paths = module_paths(filter(None, op_names.values()))
    operations = {instruction: _Operation(name, *paths[name]) for instruction, name in op_names.items() if name}
    # On-chip memory (VMEM) has separate allocations, with another color.
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
    """Returns {instruction name: JAX's name of an operation} for every executed instruction of a program.

    The name is the instruction's ``op_name``, or else that of the nearest named instruction from which it is computed.
    The compiler gives no names to instructions that it adds: casts moved out of a loop, and copies between HBM and
    VMEM. Arguments have names, so a copy of a weight is called ``state.params['head']['kernel']``. "" without any name,
    and for a nameless parameter, tuple or loop, which have many producers.
    """
    names_by_instruction = {}
    for computation, _ in program.executed():
        for instruction in computation.instructions:
            before = upstream(program, Value(computation, instruction.name))
            # A tuple or a loop has many producers, so no single producer names it.
            names = (value.instruction.op_name for value in before if instruction.opcode not in COLLECTIONS)
            names_by_instruction[instruction.name] = instruction.op_name or next(filter(None, names), "")
    return names_by_instruction


# ---------------------------------------------------------------------------------------------------------- the texts


def _allocations(text: str) -> list[_Allocation]:
    """Parses XLA's text of the buffer assignment: returns every allocation in every memory space, with its values.

    Raises:
      ValueError: the text has no allocation.
    """
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
    """Parses XLA's text of live ranges: returns (instruction names, ranges).

    ``instruction names[p]`` is the name of the instruction at schedule point p, "" for none. ``ranges`` is {name of a
    value, such as "fusion.3{}": (first point, last point)}.

    Raises:
      ValueError: the text has another form.
    """
    schedule, ranges = {}, {}
    for line in text.splitlines():
        if step := _STEP.match(line):
            schedule[int(step[1])] = step[2]
        elif span := _RANGE.match(line):
            ranges[span[1] + span[2]] = (int(span[3]), int(span[4]))
    if not schedule or not ranges:
        raise ValueError(f"This is no live-range text of XLA, with InstructionSequence and ranges: {text[:80]!r}.")
    # The last point of values that live to the end is behind the last instruction.
    last = max(*schedule, *(stop for _, stop in ranges.values()))
    return [schedule.get(point, "") for point in range(last + 1)], ranges


def _temporaries(allocations: Iterable[_Allocation], ranges: Mapping[str, tuple[int, int]]) -> list[_Value]:
    """Returns the values in the allocations of temporaries, with schedule points ``first`` and ``last`` filled in.

    ``ranges`` has these two points by name of a value. Byte ranges are shifted as if the allocations lay one behind the
    other, so values of different allocations do not overlap.

    Raises:
      ValueError: a value has no live range, so the two texts of XLA belong to different programs.
    """
    # Offsets are relative to an allocation. Placed one behind the other, different allocations do not overlap.
    temporaries, base = [], 0
    for allocation in (a for a in allocations if a.kind == "temporary"):
        for value in allocation.values:
            if value.name not in ranges:
                raise ValueError(
                    f"The buffer assignment has a temporary {value.name} of {value.stop - value.start} bytes, which is "
                    f"not among the {len(ranges)} values of the live-range text. Pass two texts of the same program."
                )
            first, last = ranges[value.name]
            start, stop = base + value.start, base + value.stop
            temporaries.append(value._replace(start=start, stop=stop, first=first, last=last))
        base += allocation.bytes
    return temporaries


# -------------------------------------------------------------------------------------------------- the use over time


def _stretches(temporaries: Sequence[_Value]) -> tuple[np.ndarray, list[slice]]:
    """Cuts the memory of temporaries into stretches at the edges of every temporary's byte range.

    Returns (bytes of each stretch, in order of address; for each temporary the slice of the stretches that it covers).
    """
    # All bytes between two neighbouring edges have the same users, so a stretch is treated as a unit.
    edges = np.unique([edge for value in temporaries for edge in (value.start, value.stop)])
    return np.diff(edges), [slice(*np.searchsorted(edges, (value.start, value.stop))) for value in temporaries]


def _live_bytes(temporaries: Sequence[_Value], points: int) -> np.ndarray:
    """Returns the bytes in use at each schedule point, an array of length ``points``.

    Bytes that several temporaries share count once.
    """
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
    """Returns the buffers in use at a schedule point, largest first; their bytes add up to the bytes in use.

    Values with the same byte range form a buffer. Where buffers overlap, the bytes count for the larger buffer. A
    buffer without remaining bytes is left out. ``operations`` has the model's operation by name of the instruction.
    """
    by_range = defaultdict(list)
    widths, stretches = _stretches(temporaries)
    for live, used in zip(temporaries, stretches, strict=True):
        by_range[live.start, live.stop].append((live, used))
    free, buffers = np.ones(len(widths), bool), []
    # The largest ranges first: a value written in place into a part of another value belongs to the larger value.
    for _, sharing in sorted(by_range.items(), key=lambda item: (item[0][0] - item[0][1], item[0])):
        if not (history := _history([live for live, _ in sharing], point)):
            continue
        used = sharing[0][1]
        if size := int(widths[used][free[used]].sum()):
            buffers.append(_temporary(size, history, point, operations))
        free[used] = False
    return tuple(sorted(buffers, key=lambda temporary: -temporary.bytes))


def _history(sharing: Sequence[_Value], point: int) -> list[_Value]:
    """Returns the values that form a buffer in use at a point; [] if the buffer is unused.

    ``sharing`` has all values of the buffer's byte range. The result has the values that are live at the point, and
    further values whose live ranges touch theirs, directly or through other values: loop carries and updates in place.
    """
    first, last = point, point
    history: list[_Value] = []
    # A value that starts where another ends, in the same bytes, continues the same buffer: a loop carry, or an update
    # in place.
    while more := [live for live in sharing if live not in history and live.first <= last and first <= live.last]:
        history += more
        first, last = min(live.first for live in history), max(live.last for live in history)
    return history


def _temporary(size: int, history: Sequence[_Value], point: int, operations: _Operations) -> Temporary:
    """Builds the ``Temporary`` of a buffer of ``size`` bytes, described by one of the values in ``history``.

    ``history`` has the values that use the buffer one after the other. ``operations`` has the model's operation
    (``op_name`` and module) by instruction name; a value is named if its instruction has an ``op_name``. The
    description is of a named value that is live at the schedule point ``point``, if there is such a value; else of a
    value in a module, else of a named value. The ``Temporary`` is live from the first to the last point of all values.
    """

    def information(live: _Value) -> tuple[bool, bool, bool]:
        operation = operations.get(live.instruction, _UNKNOWN)
        is_named = bool(operation.name)
        return live.first <= point <= live.last and is_named, bool(operation.path), is_named

    value = max(history, key=information)
    first, last = min(live.first for live in history), max(live.last for live in history)
    return Temporary(size, value.shape, value.instruction, *operations.get(value.instruction, _UNKNOWN), first, last)


def _timeline(live: np.ndarray, schedule: Sequence[str], operations: _Operations, points: int) -> tuple[Moment, ...]:
    """Cuts the schedule into at most ``points`` equal stretches; returns for each the moment with the most live bytes.

    A ``Moment`` has the schedule point, the live bytes, and the running module with its direction: of the instruction
    at the point, or of the last instruction before with a known operation.

    Args:
      live: bytes in use at each schedule point.
      schedule: instruction name at each schedule point.
      operations: the model's operation behind each instruction, by name.
      points: maximum length of the timeline.
    """
    running, current = [], _UNKNOWN
    for instruction in schedule:
        current = operations.get(instruction, current)
        running.append((current.path, current.direction))
    # Keeps the maximum of each stretch instead of every n-th point, so that the peak stays.
    stretches = np.array_split(np.arange(len(live)), min(points, len(live)))
    highest = [int(stretch[live[stretch].argmax()]) for stretch in stretches]
    return tuple(Moment(point, int(live[point]), *running[point]) for point in highest)

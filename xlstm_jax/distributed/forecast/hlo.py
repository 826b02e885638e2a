"""Optimized HLO text, as XLA prints it: instructions in the order of their schedule, and how often each one runs.

compiled.as_text() --parse--> Program: computations, each a list of instructions    (TPU, CPU, GPU)
                              Program.executed(): (computation, trips)              loops multiplied out

A loop runs a known number of times where XLA says so (``known_trip_count``), or where its counter starts at a constant,
steps by a constant and is compared with a constant. Constants are followed through the tuple that a loop carries,
through copies, and into the fusion that may hold the comparison.

``compiled.as_text()`` also holds the compiler's estimate of cycles, which files dumped by ``xla_dump_to`` as
"after_optimizations" do not hold yet.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.distributed.forecast.hlo_instruction import Instruction, element, parse_instruction

MAIN_THREAD = "main"
MAX_FOLLOWED = 200  # steps through copies and tuples to a constant; real programs need fewer than ten

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of their schedule.

    Attributes:
      thread: "main", or what runs beside it, such as "sparsecore".
    """

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)
    is_entry: bool = False
    thread: str = MAIN_THREAD

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def position(self) -> dict[str, int]:
        """By name: its place in the schedule."""
        return {instruction.name: i for i, instruction in enumerate(self.instructions)}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {i.tuple_index: i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """By name: who reads it, and as which operand."""
        found = defaultdict(list)
        for instruction in self.instructions:
            for position, name in enumerate(instruction.operands):
                found[name].append((instruction, position))
        return found


@dataclass(frozen=True)
class UnknownTrips:
    """A loop whose number of trips the text does not tell; it is counted as one."""

    computation: str
    instruction: str
    op_name: str


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: by name.
      num_partitions: devices that the program is compiled for; None where the text does not say.
      module_name: such as "jit_step".
    """

    computations: dict[str, Computation] = field(repr=False)
    module_name: str
    num_partitions: int | None

    @cached_property
    def entry(self) -> Computation:
        return next(computation for computation in self.computations.values() if computation.is_entry)

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """(computation, trips) for everything that runs as scheduled code, callers before those they call.

        That is the entry, the bodies and conditions of loops, all branches of a conditional (each as if it was the one
        taken), and what is called or runs asynchronously; not the insides of fusions, nor reducers. A loop of unknown
        length counts as one trip and is listed in ``unknown_trips``.
        """
        trips = defaultdict(int, {self.entry.name: 1})
        for computation in self._callers_first:
            for instruction in computation.instructions:
                for name in _executed_callees(instruction):
                    trips[name] += trips[computation.name] * self.trips(computation, instruction)
            yield computation, trips[computation.name]

    @cached_property
    def unknown_trips(self) -> tuple[UnknownTrips, ...]:
        return tuple(
            UnknownTrips(computation.name, instruction.name, instruction.op_name)
            for computation in self._callers_first
            for instruction in computation.instructions
            if instruction.opcode == "while" and self._trip_count(computation, instruction) is None
        )

    def trips(self, computation: Computation, instruction: Instruction) -> int:
        """How often an instruction runs what it calls: a loop its trips (1 where unknown), anything else once."""
        count = self._trip_count(computation, instruction) if instruction.opcode == "while" else None
        return 1 if count is None else count

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Names of computations that an async-start (or call-start) runs beside the schedule of its caller."""
        inside = set()
        for computation in self._callers_first:
            for instruction in computation.instructions:
                if instruction.opcode.endswith("-start") or computation.name in inside:
                    inside.update(_executed_callees(instruction))
        return frozenset(inside)

    @cached_property
    def in_loops(self) -> frozenset[str]:
        """Names of the computations that run inside of a loop."""
        inside = set()
        for computation in self._callers_first:
            for instruction in computation.instructions:
                if instruction.opcode == "while" or computation.name in inside:
                    inside.update(_executed_callees(instruction))
        return frozenset(inside)

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """By the name of a computation: who calls it, as a fusion or a reducer too."""
        found = defaultdict(list)
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in {name for names in instruction.called.values() for name in names}:
                    found[name].append((computation, instruction))
        return found

    @cached_property
    def _callers_first(self) -> list[Computation]:
        order, seen = [], set()
        stack = [(self.entry.name, False)]
        while stack:
            name, done = stack.pop()
            if done:
                order.append(self.computations[name])
            elif name not in seen:
                seen.add(name)
                stack.append((name, True))
                stack += [
                    (callee, False) for i in self.computations[name].instructions for callee in _executed_callees(i)
                ]
        return order[::-1]

    @cached_property
    def _trip_counts(self) -> dict[tuple[str, str], int | None]:
        return {}

    def _trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        key = (computation.name, loop.name)
        if key not in self._trip_counts:
            told = _TRIPS.search(loop.attributes)
            self._trip_counts[key] = int(told[1]) if told else _counted_trips(self, computation, loop)
        return self._trip_counts[key]


def _executed_callees(instruction: Instruction) -> tuple[str, ...]:
    if "=%" not in instruction.attributes and "computations={" not in instruction.attributes:
        return ()
    called = instruction.called
    if instruction.opcode == "while":
        return called["body"] + called["condition"]
    if instruction.opcode == "conditional":
        return called["branches"]
    if instruction.opcode in ("call", "call-start"):
        return called.get("to_apply", ()) + called.get("calls", ())
    return called.get("calls", ()) if instruction.opcode == "async-start" else ()


def parse(text: str) -> Program:
    """Reads optimized, scheduled HLO text.

    Raises:
      ValueError: it is no such text.
    """
    header, _, body = text.lstrip().partition("\n")
    if not header.startswith("HloModule ") or "is_scheduled=true" not in header:
        raise ValueError(
            f"not the text of a compiled program (an HloModule with is_scheduled=true), but {header[:80]!r}. "
            "Pass compiled.as_text(), of jitted.lower(...).compile()."
        )
    computations = {computation.name: computation for computation in _computations(body)}
    if sum(computation.is_entry for computation in computations.values()) != 1:
        raise ValueError(f"{header[:80]!r}: the text has no ENTRY computation; is it cut off?")
    partitions = re.search(r"num_partitions=(\d+)", header)
    name = header.removeprefix("HloModule ").split(",")[0].strip()
    return Program(computations, name, int(partitions[1]) if partitions else None)


def _computations(body: str) -> Iterator[Computation]:
    name, is_entry, instructions = None, False, []
    for line in body.splitlines():
        if name is None:
            if line.endswith("{") and (match := _COMPUTATION.match(line)):
                name, is_entry, instructions = match[2], bool(match[1]), []
        elif line.startswith("}"):
            thread = re.search(r'execution_thread="(\w+)"', line)
            yield Computation(name, _with_elements(instructions), is_entry, thread[1] if thread else MAIN_THREAD)
            name = None
        elif instruction := parse_instruction(line):
            instructions.append(instruction)
    if name is not None:
        raise ValueError(f"the HLO text ends inside of the computation {name!r}; it is cut off.")


def _with_elements(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """The instructions, and a get-tuple-element behind each of which an operand ``%while.3#1`` abbreviates one."""
    short = [name for i in instructions if "#" in i.operand_text for name in i.operands if "#" in name]
    wanted = defaultdict(set)
    for name in short:
        while "#" in name:
            name, _, index = name.rpartition("#")
            wanted[name].add(int(index))
    queue, found = deque(instructions), []
    while queue:
        found.append(queue.popleft())
        queue.extendleft(element(found[-1], index) for index in sorted(wanted.pop(found[-1].name, ()), reverse=True))
    return tuple(found)


# ---------------------------------------------------------------------------------------------------- counting trips


@dataclass(frozen=True)
class _Linear:
    """A scalar: element ``carried`` of what the loop carries (None: nothing of it) plus ``offset``."""

    carried: int | None
    offset: int


@dataclass(frozen=True)
class _Place:
    """A value: what instruction of what computation, reached through which fusions."""

    computation: Computation
    name: str
    callers: tuple["_Place", ...] = ()

    @property
    def instruction(self) -> Instruction:
        return self.computation.by_name[self.name]

    def to(self, name: str) -> "_Place":
        return _Place(self.computation, name, self.callers)


_SAME_VALUE = frozenset("copy bitcast convert reshape copy-start copy-done optimization-barrier broadcast".split())
_HOLDS = {"LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b}
_MIRROR = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def _counted_trips(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """The trips of a loop that counts from a constant, by a constant, to a constant; None for any other."""
    condition = program.computations[loop.called["condition"][0]]
    compare = _resolve(program, _Place(condition, condition.root.name))
    if compare is None or compare.instruction.opcode != "compare":
        return None
    direction = re.search(r"direction=(\w+)", compare.instruction.attributes)[1]
    left, right = (_linear(program, compare.to(operand)) for operand in compare.instruction.operands)
    if left is None or right is None or direction not in _MIRROR:
        return None
    if left.carried is None:
        left, right, direction = right, left, _MIRROR[direction]
    if left.carried is None:
        return None
    start, bound = _initial(program, computation, loop, left), _initial(program, computation, loop, right)
    step = _step(program, loop, left.carried)
    if None in (start, bound, step) or not _is_constant(program, loop, right):
        return None
    return _count(start, bound, step, direction)


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
    distance = bound - start
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if not _HOLDS[direction](start, bound):
        return 0
    if (step > 0) != (direction in ("LT", "LE")):
        return None  # it counts away from its bound
    steps = distance // step if direction in ("LE", "GE") else -(-distance // step)
    return steps + (direction in ("LE", "GE"))


def _is_constant(program: Program, loop: Instruction, value: _Linear) -> bool:
    return value.carried is None or _step(program, loop, value.carried) == 0


def _step(program: Program, loop: Instruction, carried: int) -> int | None:
    """What one trip adds to an element of what the loop carries; None where it is no constant."""
    body = program.computations[loop.called["body"][0]]
    after = _tuple_element(program, _Place(body, body.root.name), carried)
    value = after and _linear(program, after)
    return value.offset if value is not None and value.carried == carried else None


def _initial(program: Program, computation: Computation, loop: Instruction, value: _Linear) -> int | None:
    """A value before the first trip, if it is a constant."""
    if value.carried is None:
        return value.offset
    before = _tuple_element(program, _Place(computation, loop.operands[0]), value.carried)
    start = before and _linear(program, before)
    if start is not None and start.carried is not None:
        start = _initial_outside(program, computation, start)
    return None if start is None else start.offset + value.offset


def _initial_outside(program: Program, body: Computation, value: _Linear) -> _Linear | None:
    """Of a loop within a loop: a value that the outer one carries unchanged, before its first trip."""
    callers = program.callers[body.name]
    if len(callers) != 1 or callers[0][1].opcode != "while" or not _is_constant(program, callers[0][1], value):
        return None
    start = _initial(program, *callers[0], value)
    return None if start is None else _Linear(None, start)


def _linear(program: Program, place: _Place) -> _Linear | None:
    """A scalar as a constant, or as a carried element plus a constant."""
    place = _resolve(program, place)
    if place is None:
        return None
    instruction = place.instruction
    if instruction.opcode == "constant":
        text = instruction.operand_text.strip("{} ")
        return _Linear(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if instruction.opcode == "get-tuple-element":
        return _Linear(instruction.tuple_index, 0)
    if instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (_linear(program, place.to(operand)) for operand in instruction.operands)
    sign = 1 if instruction.opcode == "add" else -1
    if left is None or right is None or (right.carried is not None and (sign < 0 or left.carried is not None)):
        return None
    return _Linear(left.carried if right.carried is None else right.carried, left.offset + sign * right.offset)


def _resolve(program: Program, place: _Place) -> _Place | None:
    """The instruction that computes a value: through copies, tuples, and into fusions and out of them again.

    It ends at an element of the enclosing computation's parameter, what a loop carries, at a constant, or at an
    operation.
    """
    for _ in range(MAX_FOLLOWED):
        instruction = place.instruction
        if instruction.opcode in _SAME_VALUE and instruction.operands:
            place = place.to(instruction.operands[0])
        elif instruction.opcode in ("fusion", "call"):
            place = _inside(program, place)
        elif instruction.opcode == "parameter" and place.callers:
            caller = place.callers[-1]
            place = caller.to(caller.instruction.operands[instruction.tuple_index])
        elif instruction.opcode == "get-tuple-element":
            element = _tuple_element(program, place.to(instruction.operands[0]), instruction.tuple_index)
            if element is None:
                return place if _is_own_parameter(place, instruction) else None
            place = element
        else:
            return place
    return None


def _is_own_parameter(place: _Place, element: Instruction) -> bool:
    return not place.callers and place.computation.by_name[element.operands[0]].opcode == "parameter"


def _inside(program: Program, place: _Place) -> _Place:
    called = place.instruction.called
    callee = program.computations[(called.get("calls") or called["to_apply"])[0]]
    return _Place(callee, callee.root.name, (*place.callers, place))


def _tuple_element(program: Program, place: _Place, index: int) -> _Place | None:
    """Where an element of a tuple is made; None if it is not made by a ``tuple`` here."""
    for _ in range(MAX_FOLLOWED):
        instruction = place.instruction
        if instruction.opcode == "tuple":
            return place.to(instruction.operands[index])
        if instruction.opcode == "parameter" and place.callers:
            caller = place.callers[-1]
            place = caller.to(caller.instruction.operands[instruction.tuple_index])
        elif instruction.opcode in ("fusion", "call"):
            place = _inside(program, place)
        elif instruction.opcode in _SAME_VALUE:
            place = place.to(instruction.operands[0])
        else:
            return None
    return None

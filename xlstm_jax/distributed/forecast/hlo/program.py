"""Optimized HLO text, as XLA prints it: instructions in the order of their schedule, and how often each one runs.

compiled.as_text() --parse--> Program: computations, each a list of instructions    (TPU, CPU, GPU)
                              Program.executed(): (computation, trips)              loops multiplied out

``compiled.as_text()`` also holds the compiler's estimate of cycles, which files dumped by ``xla_dump_to`` as
"after_optimizations" do not hold yet.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.distributed.forecast.hlo.computation import MAIN_THREAD, Computation
from xlstm_jax.distributed.forecast.hlo.instruction import Instruction, element, parse_instruction
from xlstm_jax.distributed.forecast.hlo.trip_counts import trip_count

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


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
            self._trip_counts[key] = trip_count(self.computations, computation, loop)
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

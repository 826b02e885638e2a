"""A compiled program, read from the HLO text that XLA prints, and how often each computation runs.

compiled.as_text() --parse--> Program: computations, each a list of instructions    (TPU, CPU, GPU)
                              Program.executed(): (computation, trips)              loops multiplied out

``compiled.as_text()`` also holds the compiler's estimate of cycles, which files dumped by ``xla_dump_to`` as
"after_optimizations" do not hold yet.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.distributed.forecast.hlo.computation import MAIN_THREAD, Computation
from xlstm_jax.distributed.forecast.hlo.instruction import Instruction, element, parse_instruction
from xlstm_jax.distributed.forecast.hlo.trip_counts import trip_count

_END = re.compile(r'\}(?:, execution_thread="(\w+)")?\s*$')
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: by name.
      num_partitions: devices that the program is compiled for; None where the text does not say.
    """

    computations: dict[str, Computation] = field(repr=False)
    num_partitions: int | None

    @cached_property
    def entry(self) -> Computation:
        return next(computation for computation in self.computations.values() if computation.is_entry)

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """(computation, trips) for everything that runs as scheduled code, callers before those they call.

        That is the entry, the bodies and conditions of loops, all branches of a conditional (each as if it was the one
        taken), and what is called or runs asynchronously; not the insides of fusions, nor reducers. A loop of unknown
        length counts as one trip and is listed in ``unknown_loops``.
        """
        trips = defaultdict(int, {self.entry.name: 1})
        for computation in self._callers_first:
            for instruction in computation.instructions:
                times = self._loops.get((computation.name, instruction.name), 1)
                for name in _executed_callees(instruction):
                    trips[name] += trips[computation.name] * (1 if times is None else times)
            yield computation, trips[computation.name]

    @cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        """Loops whose number of trips is unknown: the names of their operations, or of their instructions."""
        loops = [
            self.computations[caller].by_name[name] for (caller, name), trips in self._loops.items() if trips is None
        ]
        return tuple(loop.op_name or loop.name for loop in loops)

    @cached_property
    def _loops(self) -> dict[tuple[str, str], int | None]:
        """The trips of all loops, by the names of computation and instruction; None where unknown."""
        return {
            (computation.name, instruction.name): trip_count(self.computations, computation, instruction)
            for computation in self._callers_first
            for instruction in computation.instructions
            if instruction.opcode == "while"
        }

    def trips_of(self, computation: Computation, loop: Instruction) -> int:
        """How often a loop's body runs; 1 where that is unknown."""
        return self._loops[computation.name, loop.name] or 1

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Names of computations that an async-start (or call-start) runs beside the schedule of its caller."""
        return self._called_from(lambda instruction: instruction.opcode.endswith("-start"))

    @cached_property
    def in_loops(self) -> frozenset[str]:
        """Names of the computations that run inside of a loop."""
        return self._called_from(lambda instruction: instruction.opcode == "while")

    def _called_from(self, is_caller: Callable[[Instruction], bool]) -> frozenset[str]:
        """Names of the computations that such instructions call, and of those that these call."""
        inside: set[str] = set()
        for computation in self._callers_first:
            for instruction in computation.instructions:
                if is_caller(instruction) or computation.name in inside:
                    inside.update(_executed_callees(instruction))
        return frozenset(inside)

    def with_fused(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        """The instruction, and those that it holds if it is a fusion; each with the computation that it stands in."""
        yield computation, instruction
        if instruction.opcode == "fusion":
            for name in (name for names in instruction.called.values() for name in names):
                within = self.computations[name]
                for inner in within.instructions:
                    yield from self.with_fused(within, inner)

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
                stack += [(c, False) for i in self.computations[name].instructions for c in _executed_callees(i)]
        return order[::-1]


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
      ValueError: the text is something else, or is cut off.
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
    return Program(computations, int(partitions[1]) if partitions else None)


def _computations(body: str) -> Iterator[Computation]:
    name, is_entry = None, False
    lines: list[str] = []
    for line in body.splitlines():
        if name is None:
            if line.endswith("{") and (match := _COMPUTATION.match(line)):
                name, is_entry, lines = match[2], bool(match[1]), []
        elif end := _END.match(line):
            instructions = [instruction for text in lines if (instruction := parse_instruction(text))]
            yield Computation(name, _with_elements(instructions), is_entry, end[1] or MAIN_THREAD)
            name = None
        elif lines and line[:1].strip():  # what a kernel of Pallas says of itself has line breaks
            lines[-1] += line
        else:
            lines.append(line)
    if name is not None:
        raise ValueError(f"the HLO text ends inside of the computation {name!r}; it is cut off.")


def _with_elements(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """The instructions, and behind ``%while.3`` the get-tuple-element that an operand ``%while.3#1`` abbreviates."""
    wanted = defaultdict(set)
    for name in [name for i in instructions if "#" in i.operand_text for name in i.operands]:
        while "#" in name:
            name, _, index = name.rpartition("#")
            wanted[name].add(int(index))
    queue, found = deque(instructions), []
    while queue:
        found.append(queue.popleft())
        queue.extendleft(element(found[-1], index) for index in sorted(wanted.pop(found[-1].name, ()), reverse=True))
    return tuple(found)

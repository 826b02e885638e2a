"""A compiled program, parsed from XLA's HLO text, and the number of runs of each computation.

compiled.as_text() --parse--> Program: computations, each a list of instructions    (TPU, CPU, GPU)
                              Program.executed(): (computation, trips)              loops multiplied out

``compiled.as_text()`` also contains the compiler's estimate of cycles (TPUs), as does the file "after_codegen" of
``xla_dump_to``, in contrast to the file "after_optimizations".

Compilers for CPUs and GPUs write the number of trips beside a loop (``known_trip_count``). TPU compilers do not, but
bring each loop of known length into the same form, in which every number is a constant:

    %while = while(tuple(..., constant(0))), condition=..., body=...
    condition:  compare(get-tuple-element(%parameter), constant(6)), direction=LT
    body:       tuple(..., add(get-tuple-element(%parameter), constant(1)))
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.forecast.hlo.instruction import Instruction, element, parse_instruction

_END = re.compile(r'\}(?:, execution_thread="\w+")?\s*$')
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DIRECTION = re.compile(r"direction=(\w+)")
_UPWARDS, _DOWNWARDS = ("LT", "LE", "NE"), ("GT", "GE", "NE")
_INCLUSIVE = {"LE": 1, "GE": -1}


@dataclass(frozen=True, eq=False)  # names are unique in a program, and comparing texts would be slow
class Computation:
    """A function of the HLO program: instructions in scheduled order. The entry computation is the program itself."""

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)
    is_entry: bool = False

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def position(self) -> dict[str, int]:
        """Index of each instruction in ``instructions``, by the instruction's name."""
        return {instruction.name: i for i, instruction in enumerate(self.instructions)}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {i.tuple_index: i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Readers of each instruction's result, by name of the read instruction; an empty list without readers.

        A reader is (reading instruction, index of the read instruction among the operands). An instruction that reads
        the same result twice is listed twice.
        """
        readers = defaultdict(list)
        for instruction in self.instructions:
            for position, name in enumerate(instruction.operands):
                readers[name].append((instruction, position))
        return readers


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: computations by name.
      num_partitions: number of devices that the program is compiled for; None if the text does not contain it.
    """

    computations: dict[str, Computation] = field(repr=False)
    num_partitions: int | None

    @cached_property
    def entry(self) -> Computation:
        return next(computation for computation in self.computations.values() if computation.is_entry)

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """Iterates over (computation, runs in a step) for each computation that runs as scheduled code, callers first.

        These are the entry, the bodies and conditions of loops, the branches of a conditional (each counted as taken),
        and computations called directly or asynchronously; not the insides of fusions, nor reducers. A loop of unknown
        length counts as a single trip and is listed in ``unknown_loops``.
        """
        return ((computation, self.trips[computation.name]) for computation in self._callers_first)

    def schedules(self) -> Iterator[tuple[Computation, int]]:
        """Iterates over ``executed``, (computation, runs in a step), without computations of asynchronous operations.

        The work of an asynchronous computation counts at its start instruction.
        """
        return (
            (computation, trips) for computation, trips in self.executed() if computation.name not in self.asynchronous
        )

    @cached_property
    def trips(self) -> dict[str, int]:
        """Number of runs of each computation in a step, by name of the computation.

        0 for computations that do not run as scheduled code, such as reducers and the insides of fusions.
        """
        # Callers come first: when a computation is reached, every caller has added its trips.
        trips = defaultdict(int, {self.entry.name: 1})
        for computation in self._callers_first:
            for instruction in computation.instructions:
                for name in _executed_callees(instruction):
                    trips[name] += trips[computation.name] * self.trips_of(computation, instruction)
        return trips

    @cached_property
    def unknown_loops(self) -> tuple[str, ...]:
        """Names of the loops whose number of iterations is unknown.

        The name is JAX's name of the operation (``op_name``), or without such a name that of the ``while`` instruction.
        """
        loops = [
            self.computations[caller].by_name[name] for (caller, name), trips in self._loops.items() if trips is None
        ]
        return tuple(loop.op_name or loop.name for loop in loops)

    @cached_property
    def _loops(self) -> dict[tuple[str, str], int | None]:
        """Number of iterations of each ``while`` in scheduled code; None if unknown.

        A key is (name of the computation that contains the ``while``, name of the ``while`` instruction).
        """
        return {
            (computation.name, instruction.name): trip_count(self.computations, computation, instruction)
            for computation in self._callers_first
            for instruction in computation.instructions
            if instruction.opcode == "while"
        }

    def trips_of(self, computation: Computation, caller: Instruction) -> int:
        """Returns how often ``caller`` runs the computations that it calls, in one execution of ``caller``.

        ``caller`` is an instruction of ``computation``. The result is the number of iterations for a loop of known
        length, and 1 for any other instruction.
        """
        trips = self._loops.get((computation.name, caller.name))
        return 1 if trips is None else trips

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Names of the computations run by an async-start or call-start, directly or through calls and loops."""
        # Callers come first, so a single pass also finds the callees of asynchronous computations.
        asynchronous: set[str] = set()
        for computation in self._callers_first:
            for instruction in computation.instructions:
                if instruction.opcode.endswith("-start") or computation.name in asynchronous:
                    asynchronous.update(_executed_callees(instruction))
        return frozenset(asynchronous)

    def with_fused(
        self, computation: Computation, instruction: Instruction
    ) -> Iterator[tuple[Computation, Instruction]]:
        """Yields (computation, instruction) for ``instruction`` and, if this is a fusion, for each instruction inside.

        ``computation`` contains ``instruction``; each yielded computation contains the yielded instruction. Fusions
        nested in the fusion are opened, too.
        """
        yield computation, instruction
        if instruction.opcode == "fusion":
            for name in instruction.called_names:
                within = self.computations[name]
                for inner in within.instructions:
                    yield from self.with_fused(within, inner)

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Calls of each computation, by name of the called computation; [] for the entry computation.

        A call is a pair (computation with the calling instruction, calling instruction). Calling instructions are loops
        (of condition and body), conditionals, fusions, reductions, and calls of functions.
        """
        callers = defaultdict(list)
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in set(instruction.called_names):
                    callers[name].append((computation, instruction))
        return callers

    def schedule_of(self, computation: Computation) -> str:
        """Returns the name of the computation whose schedule runs ``computation``.

        For the inside of a fusion, also nested, this is the computation with the outermost fusion; else ``computation``
        itself.
        """
        # A fused computation has a single caller. Other computations have a schedule.
        while calls := [caller for caller, call in self.callers[computation.name] if call.opcode == "fusion"]:
            computation = calls[0]
        return computation.name

    @cached_property
    def _callers_first(self) -> list[Computation]:
        """Returns all computations that run as scheduled code, each after its callers; the entry is the first."""
        # Depth first: a computation is appended after its callees, and the list is reversed at the end. The stack is
        # explicit, because nested loops may exceed Python's recursion limit.
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
    """Returns the names of the computations that an instruction runs as scheduled code; () for most instructions.

    These are body and condition of a loop, every branch of a conditional, and the computation of a call, also of an
    asynchronous call. Reducers and the insides of fusions do not count.
    """
    # Most instructions call nothing, and the regular expressions of `callees_by_role` are slow.
    if "=%" not in instruction.attributes and "computations={" not in instruction.attributes:
        return ()
    called = instruction.callees_by_role
    if instruction.opcode == "while":
        return called["body"] + called["condition"]
    if instruction.opcode == "conditional":
        return called["branches"]
    if instruction.opcode in ("call", "call-start"):
        return called.get("to_apply", ()) + called.get("calls", ())
    return called.get("calls", ()) if instruction.opcode == "async-start" else ()


def parse(text: str) -> Program:
    """Parses optimized, scheduled HLO text, as of ``compiled.as_text()``, to a ``Program``.

    Raises:
      ValueError: the text is no scheduled HLO module, or is cut off.
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
    """Yields the computations in ``body``, the text of a program behind the header line, in the order of the text.

    Raises:
      ValueError: the text ends inside of a computation.
    """
    name, is_entry = None, False
    lines: list[str] = []
    for line in body.splitlines():
        if name is None:
            if line.endswith("{") and (match := _COMPUTATION.match(line)):
                name, is_entry, lines = match[2], bool(match[1]), []
        elif _END.match(line):
            instructions = [instruction for text in lines if (instruction := parse_instruction(text))]
            yield Computation(name, _with_elements(instructions), is_entry)
            name = None
        elif lines and line[:1].strip():  # the description of a Pallas kernel has line breaks
            lines[-1] += line
        else:
            lines.append(line)
    if name is not None:
        raise ValueError(f"the HLO text ends inside of the computation {name!r}; it is cut off.")


def _with_elements(instructions: list[Instruction]) -> tuple[Instruction, ...]:
    """Returns the instructions of a computation, with one added for each different operand like ``%while.3#1``.

    The operand ``%while.3#1`` abbreviates element 1 of the tuple ``%while.3``. A ``get-tuple-element`` named
    "while.3#1" is inserted directly behind ``%while.3``.
    """
    wanted = defaultdict(set)
    for name in [name for i in instructions if "#" in i.operand_text for name in i.operands]:
        while "#" in name:
            name, _, index = name.rpartition("#")
            wanted[name].add(int(index))
    # An element is processed next, right behind its tuple, since it may have elements itself: %while.3#1#0.
    queue, complete = deque(instructions), []
    while queue:
        complete.append(queue.popleft())
        queue.extendleft(
            element(complete[-1], index) for index in sorted(wanted.pop(complete[-1].name, ()), reverse=True)
        )
    return tuple(complete)


# -------------------------------------------------------------------------------------------------- the trips of a loop


def trip_count(computations: Mapping[str, Computation], caller: Computation, loop: Instruction) -> int | None:
    """Returns the number of iterations of a ``while``; None if unknown.

    The number is known if the compiler has written it, or if the loop counts from a constant to a constant.

    Args:
      computations: computations of the program by name.
      caller: the computation that contains the loop.
      loop: the ``while`` instruction.
    """
    # Compilers for CPUs and GPUs write the number of trips.
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    # The rest parses the form that a TPU compiler gives to loops of known length (see the top of this file).
    condition, body = (computations[loop.callees_by_role[role][0]] for role in ("condition", "body"))
    direction = _DIRECTION.search(condition.root.attributes)
    if condition.root.opcode != "compare" or direction is None:
        return None
    left, right = condition.root.operands
    counter, bound = _counter(condition, left), _constant(condition, right)
    if counter is None or bound is None:
        return None
    # The condition compares element `index` of the carry, plus `offset`, with the bound.
    index, offset = counter
    start = _constant(caller, _element(caller, loop.operands[0], index))
    after = _counter(body, _element(body, body.root.name, index))
    # The body must return the same element plus a constant; else the condition does not compare the counter.
    if start is None or after is None or after[0] != index:
        return None
    return _count(start + offset, bound, after[1], direction[1])


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
    """Returns how many numbers start, start + step, ... a loop counts before ``number <direction> bound`` is False.

    ``direction`` is HLO's comparison: "LT", "LE", "GT", "GE", "NE". None if the loop may not end: ``step`` is 0 or
    leads away from the bound, or "NE" misses the bound.
    """
    if step == 0 or direction not in (_UPWARDS if step > 0 else _DOWNWARDS):
        return None
    numbers = range(start, bound + _INCLUSIVE.get(direction, 0), step)
    # With != a loop ends only if the counter reaches the bound exactly.
    ends = direction != "NE" or start + len(numbers) * step == bound
    return len(numbers) if ends else None


def _element(computation: Computation, name: str, index: int) -> str:
    """Returns the name of the instruction that computes element ``index`` of the tuple called ``name``.

    If no ``tuple`` instruction made the tuple, returns ``name`` itself.
    """
    made = computation.by_name[name]
    return made.operands[index] if made.opcode == "tuple" else name


def _constant(computation: Computation, name: str) -> int | None:
    """Returns the integer of the scalar constant called ``name``, possibly behind copies; None for anything else."""
    instruction = computation.by_name[name]
    if instruction.opcode == "copy":
        return _constant(computation, instruction.operands[0])
    is_integer = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.operand_text)
    return int(instruction.operand_text) if is_integer else None


def _counter(computation: Computation, name: str) -> tuple[int, int] | None:
    """Parses the instruction called ``name`` as a loop counter: an element of the loop's carry, plus a constant.

    Returns (index of the element in the carry, the constant). The constant is 0 if nothing is added. Copies in between
    are ignored. None if the instruction has another form.
    """
    instruction = computation.by_name[name]
    if instruction.opcode == "copy":
        return _counter(computation, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        is_carried = computation.by_name[instruction.operands[0]].opcode == "parameter"
        return (instruction.tuple_index, 0) if is_carried else None
    if instruction.opcode != "add":
        return None
    left, right = instruction.operands
    counter, constant = _counter(computation, left), _constant(computation, right)
    return None if counter is None or constant is None else (counter[0], counter[1] + constant)

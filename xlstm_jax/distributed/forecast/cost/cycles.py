"""The cycles of a compiled step, as its compiler estimates them, and the bytes that it moves between HBM and the core.

    Program --cycles-->    int       TPU: the estimate by which the compiler chose its kernels, loops multiplied out
    Program --hbm_bytes--> HbmBytes  every backend: operands and results of what is scheduled, as far as they lie in HBM

``compiled.cost_analysis()`` counts a loop's body once and can be negative; neither number is taken from it.

An instruction reads its operands and writes its results, each once. Only memory space 0 counts, not VMEM. A fusion
reads what it needs: of a parameter that it only slices, the slices. An update written in place,
``dynamic-update-slice``, moves the update and not the array around it. Names for values (tuples, bitcasts), constants
and what a loop carries move nothing. A kernel that reads an operand more than once, as a large matrix product may,
moves more than is counted here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xlstm_jax.distributed.forecast.hlo.instruction import HBM, Instruction, Shape
from xlstm_jax.distributed.forecast.hlo.program import MAIN_THREAD, Computation, Program

_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_ALIASED = re.compile(r"\{(\d*)\}: \(\d+")
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written in place, and which operand is the update
_SAME_BYTES = {"bitcast", "get-tuple-element"}
_CONTROL = {"while", "conditional", "call"}
_CHAINED = re.compile(r'chain_id="|custom_call_target="AsyncCollectiveDone"')


@dataclass(frozen=True)
class HbmBytes:
    """Bytes that one step reads from HBM and writes to it, on one core."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def count_cycles(program: Program) -> int | None:
    """The compiler's estimated cycles of one step on one core, by the schedule's own thread, loops multiplied out.

    None where the backend gives none (CPU, GPU). Collectives and kernels of Pallas have no estimate and count as 0. The
    program must be parsed from ``compiled.as_text()``: files that ``xla_dump_to`` writes before code generation have no
    estimates yet.
    """
    spent = [
        trips * instruction.estimated_cycles
        for _, trips, instruction in scheduled(program)
        if instruction.estimated_cycles is not None
    ]
    return sum(spent) if spent else None


@dataclass(frozen=True)
class LoopCycles:
    """The cycles of an instruction with all that it calls: of a loop its body's, as often as it runs."""

    program: Program
    _known: dict[str, int | None] = field(default_factory=dict, repr=False)

    def cycles_of(self, computation: Computation, instruction: Instruction) -> int | None:
        """Of one execution; None where the compiler gives no estimate. Of a conditional the longest branch counts."""
        if instruction.opcode not in _CONTROL:
            return instruction.estimated_cycles
        called = [self._of_computation(self.program.computations[name]) for name in instruction.all_called]
        known = [cycles for cycles in called if cycles is not None]
        if instruction.opcode == "conditional":
            return max(known, default=None)
        trips = self.program.trips_of(computation, instruction) if instruction.opcode == "while" else 1
        return trips * sum(known) if known else None

    def _of_computation(self, computation: Computation) -> int | None:
        if computation.name not in self._known:
            each = (self.cycles_of(computation, instruction) for instruction in computation.instructions)
            known = [cycles for cycles in each if cycles is not None]
            self._known[computation.name] = sum(known) if known else None
        return self._known[computation.name]


def count_hbm_bytes(program: Program) -> HbmBytes:
    """Bytes that the scheduled instructions read from HBM and write to it, loops multiplied out.

    On a CPU, and in programs without memory spaces, all memory counts as HBM.
    """
    reads, writes = 0, 0
    for computation, trips, instruction in scheduled(program):
        read, written = moved_by(program, computation, instruction)
        reads, writes = reads + trips * read, writes + trips * written
    return HbmBytes(reads, writes)


def main_schedules(program: Program) -> Iterator[tuple[Computation, int]]:
    """What the main thread runs, and how often; what runs beside it counts where it is started."""
    for computation, trips in program.executed():
        if computation.thread == MAIN_THREAD and computation.name not in program.asynchronous:
            yield computation, trips


def scheduled(program: Program) -> Iterator[tuple[Computation, int, Instruction]]:
    """The instructions of ``main_schedules``."""
    for computation, trips in main_schedules(program):
        for instruction in computation.instructions:
            yield computation, trips, instruction


# ----------------------------------------------------------------------------------------------------- bytes of HBM


def moved_by(program: Program, computation: Computation, instruction: Instruction, space: int = HBM) -> tuple[int, int]:
    """(read, written) in a memory by one execution of a scheduled instruction."""
    if instruction.opcode in _CONTROL or not (instruction.is_work or instruction.opcode.endswith("-start")):
        return 0, 0
    operands = [computation.by_name[name] for name in instruction.operands]
    results = _results(instruction, operands)
    if callee := _callee(program, instruction):
        read = 0
        for number, operand in enumerate(operands):
            if whole := _in(space, operand.shapes):
                needed = _needed(program, callee, callee.parameters[number])
                read += whole if needed is None else min(whole, needed)
        return read, _written_by(program, callee, instruction, results, space)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _SLICES:
        return _total(results[:1]) if _in(space, operands[0].shapes) else 0, _in(space, results[:1])
    if opcode in _UPDATES:
        updates = operands[_UPDATES[opcode]].shapes
        return _in(space, updates), _total(updates) if _in(space, results) else 0
    return sum(_in(space, operand.shapes) for operand in set(operands)), _in(space, results)


def _in(space: int, shapes: Iterable[Shape]) -> int:
    return sum(shape.nbytes for shape in shapes if shape.space == space)


def _total(shapes: Iterable[Shape]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _results(instruction: Instruction, operands: list[Instruction]) -> tuple[Shape, ...]:
    """The arrays that an instruction makes. The type of a ``-start`` lists its operands too; they are left out."""
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.shapes
    # Its type is (copy, original, context).
    if instruction.opcode == "copy-start":
        return instruction.shapes[:1]
    return instruction.shapes[sum(len(operand.shapes) for operand in operands) :]


def _callee(program: Program, instruction: Instruction) -> Computation | None:
    role = {"fusion": "calls", "async-start": "calls", "call-start": "to_apply"}.get(instruction.opcode)
    return program.computations[instruction.called[role][0]] if role else None


def _needed(program: Program, computation: Computation, instruction: Instruction) -> int | None:
    """The bytes of a value that are read inside of a fusion; None for all."""
    # A parameter may be read by several: bytes that two of them slice out count twice, but never more than all (see
    # `moved_by`).
    parts = [_needed_by(program, computation, *user) for user in computation.users.get(instruction.name, ())]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _needed_by(program: Program, computation: Computation, user: Instruction, position: int) -> int | None:
    if user.opcode in _SAME_BYTES:
        return _needed(program, computation, user)
    if user.opcode in _SLICES and position == 0:
        return _total(user.shapes)
    if user.opcode in _UPDATES and position == 0:
        return 0 if _is_result(computation, user) else None
    if user.opcode == "fusion" and (callee := _callee(program, user)):
        return _needed(program, callee, callee.parameters[position])
    # Nothing is read of what a fusion only passes on, nor of a collective under way: it was counted where it started.
    handed_on = user.opcode == "tuple" and user.is_root
    starts = '"AsyncCollectiveStart"' in computation.root.attributes
    return 0 if handed_on or (_CHAINED.search(user.attributes) and not starts) else None


def _is_result(computation: Computation, instruction: Instruction) -> bool:
    """Whether a value goes nowhere but into the result."""
    users = [user for user, _ in computation.users.get(instruction.name, ())]
    # Then the update is in place: the fusion writes into the array that it was given.
    passed = all(user.opcode in ("bitcast", "tuple") and _is_result(computation, user) for user in users)
    return passed if users else instruction.is_root


def _written_by(
    program: Program, callee: Computation, caller: Instruction, results: tuple[Shape, ...], space: int
) -> int:
    root = callee.root
    parts = root.operands if root.opcode == "tuple" else (root.name,)
    if caller.opcode.endswith("-start"):
        results = results[: len(parts)]  # behind them stands what the start itself needs
    # Where the root does not say what makes each result, all of it counts as written.
    parts = parts if len(parts) == len(results) else ()
    aliasing = _ALIASING.search(caller.attributes)
    aliased = {int(index or 0) for index in _ALIASED.findall(aliasing[1])} if aliasing else set()
    written = 0
    for index, shape in enumerate(results):
        update = _update(program, callee, parts[index]) if parts else None
        whole = 0 if index in aliased else shape.nbytes
        written += (whole if update is None else update) if shape.space == space else 0
    return written


def _update(program: Program, computation: Computation, name: str) -> int | None:
    """The bytes of a result that are written, where it is an array that is there already; None where it is new."""
    instruction = computation.by_name[name]
    if instruction.opcode == "bitcast":
        return _update(program, computation, instruction.operands[0])
    if instruction.opcode == "parameter":
        return 0
    if instruction.opcode in _UPDATES:
        return _total(computation.by_name[instruction.operands[_UPDATES[instruction.opcode]]].shapes)
    callee = _callee(program, instruction) if instruction.opcode == "fusion" else None
    return _update(program, callee, callee.root.name) if callee else None

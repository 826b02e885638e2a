"""The bytes that a compiled step moves between HBM and the core: operands and results of what is scheduled.

``compiled.cost_analysis()`` counts a loop's body once, so its bytes are not used.

An instruction reads its operands and writes its results, each once. Only memory space 0 counts, not VMEM. A fusion
reads what it needs: of a parameter that it only slices, the slices. An update written in place,
``dynamic-update-slice``, moves the update and not the array around it. Names for values (tuples, bitcasts), constants
and what a loop carries move nothing. A kernel that reads an operand more than once, as a large matrix product may,
moves more than is counted here.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xlstm_jax.forecast.hlo.instruction import HBM, Instruction, Shape
from xlstm_jax.forecast.hlo.program import Computation, Program

_ALIASING = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_ALIASED = re.compile(r"\{(\d*)\}: \(\d+")
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written in place, and which operand is the update
_SAME_BYTES = {"bitcast", "get-tuple-element"}
CONTROL = {"while", "conditional", "call"}  # what they call runs in their place
_CHAINED = re.compile(r'chain_id="|custom_call_target="AsyncCollectiveDone"')


@dataclass(frozen=True)
class HbmBytes:
    """Bytes that one step reads from HBM and writes to it, on one core."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def count_hbm_bytes(program: Program) -> HbmBytes:
    """Bytes that the scheduled instructions read from HBM and write to it, loops multiplied out.

    On a CPU, and in programs without memory spaces, all memory counts as HBM.
    """
    reads, writes = 0, 0
    for computation, trips, instruction in scheduled(program):
        read, written = moved_by(program, computation, instruction)
        reads, writes = reads + trips * read, writes + trips * written
    return HbmBytes(reads, writes)


def scheduled(program: Program) -> Iterator[tuple[Computation, int, Instruction]]:
    """The instructions that run one after the other, each with its computation and how often that runs."""
    for computation, trips in program.schedules():
        for instruction in computation.instructions:
            yield computation, trips, instruction


# ----------------------------------------------------------------------------------------------------- bytes of HBM


def moved_by(program: Program, computation: Computation, instruction: Instruction, space: int = HBM) -> tuple[int, int]:
    """(read, written) in a memory by one execution of a scheduled instruction."""
    if instruction.opcode in CONTROL or not (instruction.is_work or instruction.opcode.endswith("-start")):
        return 0, 0
    operands = [computation.by_name[name] for name in instruction.operands]
    results = _results(instruction, operands)
    if callee := _callee(program, instruction):
        read = sum(
            # Two readers may each need slices of a value, but never more than all of it is read.
            min(_nbytes(operand.shapes, space), _needed(program, callee, callee.parameters[number]))
            for number, operand in enumerate(operands)
        )
        return int(read), _written_by(program, callee, instruction, results, space)
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in _SLICES:
        return _nbytes(results[:1]) if _nbytes(operands[0].shapes, space) else 0, _nbytes(results[:1], space)
    if opcode in _UPDATES:
        updates = operands[_UPDATES[opcode]].shapes
        return _nbytes(updates, space), _nbytes(updates) if _nbytes(results, space) else 0
    return sum(_nbytes(operand.shapes, space) for operand in set(operands)), _nbytes(results, space)


def _nbytes(shapes: Iterable[Shape], space: int | None = None) -> int:
    """The bytes of arrays, of those in a memory alone where one is given."""
    return sum(shape.nbytes for shape in shapes if space in (None, shape.space))


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


def _needed(program: Program, computation: Computation, instruction: Instruction) -> float:
    """The bytes of a value that are read inside of a fusion; infinite where all of it is."""
    # What a collective under way reads was counted where it started.
    starts = '"AsyncCollectiveStart"' in computation.root.attributes
    needed = 0.0
    for user, position in computation.users.get(instruction.name, ()):
        if user.opcode in _SAME_BYTES:
            needed += _needed(program, computation, user)
        elif user.opcode in _SLICES and position == 0:
            needed += _nbytes(user.shapes)
        elif user.opcode in _UPDATES and position == 0:
            needed += 0 if _is_result(computation, user) else math.inf
        elif user.opcode == "fusion" and (callee := _callee(program, user)):
            needed += _needed(program, callee, callee.parameters[position])
        elif not (user.opcode == "tuple" and user.is_root) and (starts or not _CHAINED.search(user.attributes)):
            return math.inf
    return needed


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
        if shape.space == space:
            whole = 0 if index in aliased else shape.nbytes
            written += _update(program, callee, parts[index], whole) if parts else whole
    return written


def _update(program: Program, computation: Computation, name: str, whole: int) -> int:
    """The bytes of a result that are written, where it is an array that is there already; ``whole`` where it is new."""
    instruction = computation.by_name[name]
    if instruction.opcode == "bitcast":
        return _update(program, computation, instruction.operands[0], whole)
    if instruction.opcode == "parameter":
        return 0
    if instruction.opcode in _UPDATES:
        return _nbytes(computation.by_name[instruction.operands[_UPDATES[instruction.opcode]]].shapes)
    callee = _callee(program, instruction) if instruction.opcode == "fusion" else None
    return _update(program, callee, callee.root.name, whole) if callee else whole

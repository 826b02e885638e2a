"""HBM traffic of a compiled step: bytes of the operands and results of scheduled instructions.

``compiled.cost_analysis()`` counts a loop's body once, so this module does not use its bytes.

An instruction reads each operand and writes each result once. Only memory space 0 (HBM) counts, not VMEM. A fusion
that only slices a parameter reads only the slices. An update in place, ``dynamic-update-slice``, moves only the
update, not the array around the update. Tuples, bitcasts, constants and loop carries move nothing. A kernel may read
an operand more than once, as a large matrix product does, and then moves more bytes than are counted here.
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
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written in place; the value is the operand index of the update
_SAME_BYTES = {"bitcast", "get-tuple-element"}
CONTROL = {"while", "conditional", "call"}  # the called computations run in place of the instruction
_CHAINED = re.compile(r'chain_id="|custom_call_target="AsyncCollectiveDone"')


@dataclass(frozen=True)
class HbmBytes:
    """Bytes read from HBM and written to HBM in a step, on a single core."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def count_hbm_bytes(program: Program) -> HbmBytes:
    """Counts the HBM bytes that a device's scheduled instructions read and write in a step, loops multiplied out.

    On a CPU, and in programs without memory spaces, all memory counts as HBM.
    """
    reads, writes = 0, 0
    for computation, trips, instruction in scheduled(program):
        read, written = moved_by(program, computation, instruction)
        reads, writes = reads + trips * read, writes + trips * written
    return HbmBytes(reads, writes)


def scheduled(program: Program) -> Iterator[tuple[Computation, int, Instruction]]:
    """Yields (computation, trips, instruction) for each instruction in the program's schedules, callers first.

    ``computation`` contains the instruction, ``trips`` is its number of runs in a step. A fusion is one instruction.
    The insides of asynchronous computations are left out, because their work counts at the start instruction.
    """
    for computation, trips in program.schedules():
        for instruction in computation.instructions:
            yield computation, trips, instruction


# ----------------------------------------------------------------------------------------------------- bytes of HBM


def moved_by(program: Program, computation: Computation, instruction: Instruction, space: int = HBM) -> tuple[int, int]:
    """Returns the bytes (read, written) that one execution of a scheduled instruction moves in a memory space.

    The space is 0 for HBM (the default) or 5 for host memory. A slice reads only the sliced part, an update in place
    moves only the update. (0, 0) for loops, branches and calls, whose instructions count themselves, and for
    instructions that only name values.
    """
    if instruction.opcode in CONTROL or not (instruction.is_work or instruction.opcode.endswith("-start")):
        return 0, 0
    operands = [computation.by_name[name] for name in instruction.operands]
    results = _results(instruction, operands)
    if callee := _callee(program, instruction):
        read = sum(
            # Several readers may each need slices of a value; the sum is capped at the value's size.
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
    """Returns the total bytes of the arrays; with ``space``, only of those in this memory space (0: HBM, 5: host)."""
    return sum(shape.nbytes for shape in shapes if space in (None, shape.space))


def _results(instruction: Instruction, operands: list[Instruction]) -> tuple[Shape, ...]:
    """Returns the shapes of the arrays that an instruction writes as the result, with tuples flattened.

    The type of a ``-start`` instruction also lists the operands, and that of a ``copy-start`` a context; both are left
    out. ``operands`` are the instructions whose results ``instruction`` reads, in order.
    """
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.shapes
    # The type of a copy-start is (copy, original, context).
    if instruction.opcode == "copy-start":
        return instruction.shapes[:1]
    return instruction.shapes[sum(len(operand.shapes) for operand in operands) :]


def _callee(program: Program, instruction: Instruction) -> Computation | None:
    role = {"fusion": "calls", "async-start": "calls", "call-start": "to_apply"}.get(instruction.opcode)
    return program.computations[instruction.callees_by_role[role][0]] if role else None


def _needed(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Returns how many bytes of a value a fused computation reads: the bytes of slices, or infinity for the full value.

    The value is the result of ``instruction`` in ``computation``, usually a parameter. Uses inside of nested fusions
    count, too. 0 for a value that is only returned, or that is only updated in place and returned. Some fusions
    continue a collective over several fusions: there the reads of the collective count 0, because the first fusion
    counts them.
    """
    # The reads of a running collective were counted at its start.
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
    """Returns whether an instruction is used only in the result of its computation, through tuples and bitcasts.

    An instruction without uses must be the root of the computation.
    """
    users = [user for user, _ in computation.users.get(instruction.name, ())]
    # Then the update is in place: the fusion writes into its operand.
    passed = all(user.opcode in ("bitcast", "tuple") and _is_result(computation, user) for user in users)
    return passed if users else instruction.is_root


def _written_by(
    program: Program, callee: Computation, caller: Instruction, results: tuple[Shape, ...], space: int
) -> int:
    """Returns the bytes that a fusion or asynchronous start writes to its results in a memory space.

    Each result in the memory space counts in full, except for:

    - an array that the called computation updates in place: only the updated part counts
    - a parameter that the computation returns unchanged: 0
    - a result that shares the buffer of an operand: only an update in place counts

    Args:
      program: the compiled program.
      callee: the computation that ``caller`` runs.
      caller: the fusion or start instruction.
      results: shapes of the caller's results.
      space: memory space, 0 for HBM.
    """
    root = callee.root
    parts = root.operands if root.opcode == "tuple" else (root.name,)
    if caller.opcode.endswith("-start"):
        results = results[: len(parts)]  # the arrays behind them are the start's context
    # If the root does not show the producer of each result, the full results count as written.
    parts = parts if len(parts) == len(results) else ()
    aliasing = _ALIASING.search(caller.attributes)
    aliased = {int(index or 0) for index in _ALIASED.findall(aliasing[1])} if aliasing else set()
    written = 0
    for index, shape in enumerate(results):
        if shape.space == space:
            full_bytes = 0 if index in aliased else shape.nbytes
            written += _update(program, callee, parts[index], full_bytes) if parts else full_bytes
    return written


def _update(program: Program, computation: Computation, name: str, written: int) -> int:
    """Returns the bytes that ``computation`` writes for a result: for the array of the instruction called ``name``.

    For an update in place these are the bytes of the update. For a parameter that is returned unchanged 0. For anything
    else ``written``, given by the caller as the bytes of the full result. Bitcasts and nested fusions are followed to
    the instruction that makes the array.
    """
    instruction = computation.by_name[name]
    if instruction.opcode == "bitcast":
        return _update(program, computation, instruction.operands[0], written)
    if instruction.opcode == "parameter":
        return 0
    if instruction.opcode in _UPDATES:
        return _nbytes(computation.by_name[instruction.operands[_UPDATES[instruction.opcode]]].shapes)
    callee = _callee(program, instruction) if instruction.opcode == "fusion" else None
    return _update(program, callee, callee.root.name, written) if callee else written

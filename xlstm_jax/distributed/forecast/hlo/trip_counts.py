"""How often a loop of a compiled program runs.

Compilers for CPUs and GPUs write it next to the loop (``known_trip_count``). Those for TPUs do not; but they bring each
loop of known length into the same form, in which every number is a constant:

    %while = while(tuple(..., constant(0))), condition=..., body=...
    condition:  compare(get-tuple-element(%parameter), constant(6)), direction=LT
    body:       tuple(..., add(get-tuple-element(%parameter), constant(1)))
"""

import re
from collections.abc import Mapping

from xlstm_jax.distributed.forecast.hlo.computation import Computation
from xlstm_jax.distributed.forecast.hlo.instruction import Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DIRECTION = re.compile(r"direction=(\w+)")
_UPWARDS, _DOWNWARDS = ("LT", "LE", "NE"), ("GT", "GE", "NE")
_INCLUSIVE = {"LE": 1, "GE": -1}


def trip_count(computations: Mapping[str, Computation], caller: Computation, loop: Instruction) -> int | None:
    """The trips of a ``while``; None where its length is not constant.

    Args:
      computations: of the program, by name.
      caller: the computation that the loop is in.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition, body = (computations[loop.called[role][0]] for role in ("condition", "body"))
    direction = _DIRECTION.search(condition.root.attributes)
    if condition.root.opcode != "compare" or direction is None:
        return None
    left, right = condition.root.operands
    counter, bound = _counter(condition, left), _constant(condition, right)
    if counter is None or bound is None:
        return None
    index, offset = counter
    start = _constant(caller, _element(caller, loop.operands[0], index))
    after = _counter(body, _element(body, body.root.name, index))
    if start is None or after is None or after[0] != index:
        return None
    return _count(start + offset, bound, after[1], direction[1])


def _count(start: int, bound: int, step: int, direction: str) -> int | None:
    """The numbers start, start + step, ... for which the comparison with the bound holds; None where all do."""
    if step == 0 or direction not in (_UPWARDS if step > 0 else _DOWNWARDS):
        return None
    distance = bound + _INCLUSIVE.get(direction, 0) - start
    if direction == "NE" and (distance % step or distance // step < 0):
        return None
    return max(0, -(-distance // step))


def _element(computation: Computation, name: str, index: int) -> str:
    """The instruction that makes an element of a tuple; the tuple itself where it is not made by a ``tuple``."""
    made = computation.by_name[name]
    return made.operands[index] if made.opcode == "tuple" else name


def _constant(computation: Computation, name: str) -> int | None:
    """The value of an integer constant, or of its copy."""
    instruction = computation.by_name[name]
    if instruction.opcode == "copy":
        return _constant(computation, instruction.operands[0])
    is_integer = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.operand_text)
    return int(instruction.operand_text) if is_integer else None


def _counter(computation: Computation, name: str) -> tuple[int, int] | None:
    """An element of the computation's parameter plus a constant, as (index of the element, constant)."""
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

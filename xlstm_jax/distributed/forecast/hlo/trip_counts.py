"""How often a loop of a compiled program runs.

A known number of times where XLA says so (``known_trip_count``), or where its counter starts at a constant, steps by a
constant and is compared with a constant. Constants are followed through the tuple that a loop carries, through copies,
and into the fusion that may hold the comparison.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from xlstm_jax.distributed.forecast.hlo.computation import Computation
from xlstm_jax.distributed.forecast.hlo.instruction import Instruction

MAX_FOLLOWED = 200  # steps through copies and tuples to a constant; real programs need fewer than ten
_TOLD = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

Computations = Mapping[str, Computation]  # of a program, by name
_SAME_VALUE = frozenset("copy bitcast convert reshape copy-start copy-done optimization-barrier broadcast".split())
_HOLDS = {"LT": lambda a, b: a < b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b}
_MIRROR = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


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


def trip_count(computations: Computations, computation: Computation, loop: Instruction) -> int | None:
    """The trips of a ``while`` of one of these computations; None where neither XLA nor its counter tells."""
    told = _TOLD.search(loop.attributes)
    return int(told[1]) if told else _counted_trips(computations, computation, loop)


def _counted_trips(computations: Computations, computation: Computation, loop: Instruction) -> int | None:
    """The trips of a loop that counts from a constant, by a constant, to a constant; None for any other."""
    condition = computations[loop.called["condition"][0]]
    compare = _resolve(computations, _Place(condition, condition.root.name))
    if compare is None or compare.instruction.opcode != "compare":
        return None
    direction = re.search(r"direction=(\w+)", compare.instruction.attributes)[1]
    left, right = (_linear(computations, compare.to(operand)) for operand in compare.instruction.operands)
    if left is None or right is None or direction not in _MIRROR:
        return None
    if left.carried is None:
        left, right, direction = right, left, _MIRROR[direction]
    if left.carried is None:
        return None
    start, bound = _initial(computations, computation, loop, left), _initial(computations, computation, loop, right)
    step = _step(computations, loop, left.carried)
    if None in (start, bound, step) or not _is_constant(computations, loop, right):
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


def _is_constant(computations: Computations, loop: Instruction, value: _Linear) -> bool:
    return value.carried is None or _step(computations, loop, value.carried) == 0


def _step(computations: Computations, loop: Instruction, carried: int) -> int | None:
    """What one trip adds to an element of what the loop carries; None where it is no constant."""
    body = computations[loop.called["body"][0]]
    after = _tuple_element(computations, _Place(body, body.root.name), carried)
    value = after and _linear(computations, after)
    return value.offset if value is not None and value.carried == carried else None


def _initial(computations: Computations, computation: Computation, loop: Instruction, value: _Linear) -> int | None:
    """A value before the first trip, if it is a constant."""
    if value.carried is None:
        return value.offset
    before = _tuple_element(computations, _Place(computation, loop.operands[0]), value.carried)
    start = before and _linear(computations, before)
    if start is not None and start.carried is not None:
        start = _initial_outside(computations, computation, start)
    return None if start is None else start.offset + value.offset


def _initial_outside(computations: Computations, body: Computation, value: _Linear) -> _Linear | None:
    """Of a loop within a loop: a value that the outer one carries unchanged, before its first trip."""
    loops = [
        (computation, instruction)
        for computation in computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while" and body.name in instruction.called["body"]
    ]
    if len(loops) != 1 or not _is_constant(computations, loops[0][1], value):
        return None
    start = _initial(computations, *loops[0], value)
    return None if start is None else _Linear(None, start)


def _linear(computations: Computations, place: _Place) -> _Linear | None:
    """A scalar as a constant, or as a carried element plus a constant."""
    place = _resolve(computations, place)
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
    left, right = (_linear(computations, place.to(operand)) for operand in instruction.operands)
    sign = 1 if instruction.opcode == "add" else -1
    if left is None or right is None or (right.carried is not None and (sign < 0 or left.carried is not None)):
        return None
    return _Linear(left.carried if right.carried is None else right.carried, left.offset + sign * right.offset)


def _resolve(computations: Computations, place: _Place) -> _Place | None:
    """The instruction that computes a value: through copies, tuples, and into fusions and out of them again.

    It ends at an element of the enclosing computation's parameter, what a loop carries, at a constant, or at an
    operation.
    """
    for _ in range(MAX_FOLLOWED):
        instruction = place.instruction
        if instruction.opcode in _SAME_VALUE and instruction.operands:
            place = place.to(instruction.operands[0])
        elif instruction.opcode in ("fusion", "call"):
            place = _inside(computations, place)
        elif instruction.opcode == "parameter" and place.callers:
            caller = place.callers[-1]
            place = caller.to(caller.instruction.operands[instruction.tuple_index])
        elif instruction.opcode == "get-tuple-element":
            element = _tuple_element(computations, place.to(instruction.operands[0]), instruction.tuple_index)
            if element is None:
                return place if _is_own_parameter(place, instruction) else None
            place = element
        else:
            return place
    return None


def _is_own_parameter(place: _Place, element: Instruction) -> bool:
    return not place.callers and place.computation.by_name[element.operands[0]].opcode == "parameter"


def _inside(computations: Computations, place: _Place) -> _Place:
    called = place.instruction.called
    callee = computations[(called.get("calls") or called["to_apply"])[0]]
    return _Place(callee, callee.root.name, (*place.callers, place))


def _tuple_element(computations: Computations, place: _Place, index: int) -> _Place | None:
    """Where an element of a tuple is made; None if it is not made by a ``tuple`` here."""
    for _ in range(MAX_FOLLOWED):
        instruction = place.instruction
        if instruction.opcode == "tuple":
            return place.to(instruction.operands[index])
        if instruction.opcode == "parameter" and place.callers:
            caller = place.callers[-1]
            place = caller.to(caller.instruction.operands[instruction.tuple_index])
        elif instruction.opcode in ("fusion", "call"):
            place = _inside(computations, place)
        elif instruction.opcode in _SAME_VALUE:
            place = place.to(instruction.operands[0])
        else:
            return None
    return None

"""Data flow in a compiled program: through tuples, fusions, loops and asynchronous calls.

%g = all-gather(%x)        downstream: into the fusion that reads %g, to the dot_general in it
%t = tuple(%g, ...)                    element 0 of %t, of the loop's carry, of the body's parameter
%w = while(%t), body=...   upstream:   from a gradient stacked by a loop to the operations in the loop's body
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from xlstm_jax.forecast.hlo.instruction import COLLECTIVES, Instruction
from xlstm_jax.forecast.hlo.program import Computation, Program

_MAIN_FIRST = re.compile('"(ConcatBitcast|AsyncCollectiveDone)"')
MAX_VISITED = 2000  # values per search; the operations around a collective are within some ten


@dataclass(frozen=True)
class Value:
    """The result of the instruction ``name``, or an element of a result that is a tuple.

    ``element=(1, 0)`` is element 0 of element 1; () is the whole result.
    """

    computation: Computation
    name: str
    element: tuple[int, ...] = ()

    @property
    def instruction(self) -> Instruction:
        return self.computation.by_name[self.name]


def upstream(program: Program, value: Value) -> Iterator[Value]:
    """Yields the values (results of instructions) from which ``value`` is computed, directly or through other values.

    The nearest values come first. Each value is yielded once; ``value`` itself is not. The search ends after about
    ``MAX_VISITED`` values.
    """
    return _walk(program, value, sources)


def downstream(program: Program, value: Value, *, through: Collection[str] | None = None) -> Iterator[Value]:
    """Yields the values (results of instructions) that are computed from ``value``, directly or through other values.

    The nearest values come first. Each value is yielded once; ``value`` itself is not. The search ends after about
    ``MAX_VISITED`` values. ``through`` has the opcodes behind whose results the search continues; a result of another
    opcode is yielded, but not followed. None: all opcodes.
    """
    return _walk(program, value, uses, through)


def _walk(
    program: Program,
    value: Value,
    step: Callable[[Program, Value], list[Value]],
    through: Collection[str] | None = None,
) -> Iterator[Value]:
    """Yields the values that are reached from ``value`` by repeated ``step``, breadth first: nearest first, each once.

    ``step`` returns the direct neighbours of a value, for example its inputs. ``value`` itself is not yielded.
    ``through`` limits the search to opcodes: the result of any other opcode is yielded, but not followed. None: every
    result is followed. The search ends after about ``MAX_VISITED`` values.
    """
    queue, seen = deque([value]), {value}
    while queue and len(seen) < MAX_VISITED:
        for neighbour in step(program, queue.popleft()):
            if neighbour not in seen:
                seen.add(neighbour)
                if through is None or neighbour.instruction.opcode in through:
                    queue.append(neighbour)
                yield neighbour


def origin(program: Program, value: Value) -> Value:
    """Follows a value back as long as it has a single input, and returns the last value reached.

    The result is the operation that computes the array from several arrays, or a constant, or a parameter of the
    program. Casts, copies, slices and calls are passed. Where one of several inputs is the main one, the main input is
    followed: for an update of a larger array the update, for a loop carry the value before the loop.
    """
    while before := sources(program, value):
        instruction = value.instruction
        # A TPU copies an array into VMEM in slices, and concatenates the slices; the end of an asynchronous gather
        # reads the shard, then buffers. There, for a loop's carry and for an update, the first source is the main one.
        is_carry = instruction.opcode == "parameter" and any(
            caller.opcode == "while" for _, caller in program.callers[value.computation.name]
        )
        is_update = instruction.opcode == "dynamic-update-slice" or _MAIN_FIRST.search(instruction.attributes)
        if len(before) > 1 and not (is_carry or is_update):
            break
        value = before[0]
    return value


def sources(program: Program, value: Value) -> list[Value]:
    """Returns the direct inputs of a value, the main input first; empty for a constant.

    A ``Value`` is the result of an instruction in a computation, or an element of the result. The direct inputs are:

    - of element i of a ``tuple``: operand i; of a ``get-tuple-element``: the element of the operand
    - of a fusion, call or loop: the result of the called computation; of a conditional: the results of its branches
    - of a parameter: the values passed by callers; empty for a parameter of the program
    - of a slice: the sliced array, without indices; of an update in place: the update, then the updated array
    - of any further instruction: the operands
    """
    computation, instruction, element = value.computation, value.instruction, value.element
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "parameter":
        return _sources_of_parameter(program, value)
    if opcode == "tuple" and element:
        return [Value(computation, operands[element[0]], element[1:])]
    if opcode == "get-tuple-element":
        return [Value(computation, operands[0], (instruction.tuple_index, *element))]
    if callees := _callees(program, instruction):
        return [Value(callee, callee.root.name, element) for callee in callees]
    if opcode.endswith(("-done", "-update")):
        return [Value(computation, operands[0], element)]
    if element and _carries_several(instruction):
        return [Value(computation, operands[element[0]], element[1:])]
    if opcode in ("dynamic-slice", "gather"):
        operands = operands[:1]
    if opcode == "dynamic-update-slice":
        operands = (operands[1], operands[0])
    return [Value(computation, operand) for operand in operands]


def _sources_of_parameter(program: Program, value: Value) -> list[Value]:
    """Returns the values that callers pass for ``value``, a parameter of a computation; usually one for each caller.

    For the parameter of a loop's body or condition these are two values: the operand of the loop, and the result of the
    body in the previous iteration. Empty for a parameter of the program.
    """
    number, before = value.instruction.tuple_index, []
    for caller, call in program.callers[value.computation.name]:
        if call.opcode == "while":
            body = program.computations[call.callees_by_role["body"][0]]
            before += [Value(caller, call.operands[0], value.element), Value(body, body.root.name, value.element)]
        elif call.opcode == "conditional":
            branch = call.callees_by_role["branches"].index(value.computation.name)
            before.append(Value(caller, call.operands[1 + branch], value.element))
        elif _is_call(call) and number < len(call.operands):  # a call offloaded to a SparseCore may have no operands
            before.append(Value(caller, call.operands[number], value.element))
    return before


def uses(program: Program, value: Value) -> list[Value]:
    """Returns the values that are directly computed from a value, inside of called computations and in callers, too.

    A user that is a call, fusion, loop or conditional contributes the parameter of its computation. The root of a
    computation contributes the result of each caller and, in a loop's body, the body's parameter in the next trip.
    """
    computation, users = value.computation, []
    # The root of a computation is the result of the caller, and in a loop the parameter of the next trip.
    for caller, call in program.callers[computation.name] if value.instruction.is_root else ():
        if call.opcode == "while" and computation.name in call.callees_by_role["body"]:
            users.append(Value(computation, computation.parameters[0].name, value.element))
            users.append(Value(caller, call.name, value.element))
        elif call.opcode == "conditional" or _is_call(call):
            users.append(Value(caller, call.name, value.element))
    for user, position in computation.users.get(value.name, ()):
        users += _used_by(program, value, user, position)
    return users


def _used_by(program: Program, value: Value, user: Instruction, position: int) -> list[Value]:
    """Returns the values into which ``user``, an instruction with ``value`` as operand ``position``, turns ``value``.

    Usually this is the result of ``user``. For a tuple, and for a collective of several arrays, it is element
    ``position`` of the result; for a call, fusion, loop or conditional the parameter of the called computation (of a
    loop: of the body). Empty for a ``get-tuple-element`` of another element.
    """
    computation, element = value.computation, value.element
    if user.opcode == "tuple":
        return [Value(computation, user.name, (position, *element))]
    if user.opcode == "get-tuple-element":
        is_other = element and element[0] != user.tuple_index
        return [] if is_other else [Value(computation, user.name, element[1:])]
    if callees := _callees(program, user):
        # A loop takes one operand, its carry; a branch has one parameter. A call has as many parameters as operands.
        number = {"while": 0, "conditional": 0}.get(user.opcode, position)
        # Each branch has a separate operand, after the operand that selects the branch.
        callees = callees[position - 1 : position] if user.opcode == "conditional" else callees
        return [Value(c, c.parameters[number].name, element) for c in callees if number in c.parameters]
    if _carries_several(user):
        return [Value(computation, user.name, (position, *element))]
    return [Value(computation, user.name, element if user.opcode.endswith(("-done", "-update")) else ())]


def _carries_several(instruction: Instruction) -> bool:
    """Returns whether an instruction is a collective (or its ``-start``) with several operands.

    The result of such a collective is a tuple with an element for each operand.
    """
    return instruction.opcode.removesuffix("-start") in COLLECTIVES and len(instruction.operands) > 1


def _is_call(instruction: Instruction) -> bool:
    return instruction.opcode in ("fusion", "call", "call-start", "async-start")


def _callees(program: Program, instruction: Instruction) -> list[Computation]:
    """Returns the computations whose root becomes the result of an instruction; empty for an instruction without calls.

    These are the called computation of a fusion, call or asynchronous start, the body of a loop (not its condition),
    and every branch of a conditional.
    """
    names = instruction.called_names if instruction.opcode == "conditional" or _is_call(instruction) else ()
    names = instruction.callees_by_role["body"] if instruction.opcode == "while" else names
    return [program.computations[name] for name in names]

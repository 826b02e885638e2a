"""A line of optimized HLO text: type of the result, opcode, operands, attributes.

    %fusion.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%copy.75, %all-gather.37), kind=kOutput, calls=..., ...

A type gives the memory space, S(1): 0 is HBM (or a CPU's memory), 1 is a TPU core's VMEM, 5 is host memory, other
numbers are scalars and semaphores.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.forecast.hlo.device_groups import Groups, replica_groups
from xlstm_jax.forecast.hlo.text import bytes_of, integers, split_outside

HBM, HOST = 0, 5  # memory spaces
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
COLLECTIVES |= {"collective-broadcast", "ragged-all-to-all"}

# Opcodes that only name values and take no time.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_FREE |= {"optimization-barrier", "add-dependency"}
_FREE_CUSTOM_CALL = re.compile(
    r'custom_call_target="(AllocateBuffer|ConcatBitcast|PrepareAsync\w+|AsyncCollective\w+)"'
)
_MERGED = re.compile(r"(.*/)?\(([^()]*:.*)\)$", re.DOTALL)
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"(?:^| )([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|true_computation|false_computation|branch_computations)="
    r"(?:%([\w.\-]+)|\{([^}]*)\})"
)
_INDEX = re.compile(r"index=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """Type of an array in an instruction's result.

    Attributes:
      dtype: HLO's name: "bf16", "f8e4m3fn", "pred", "token".
      dims: sizes; for a dim of bounded size the bound.
      space: memory space; 0 is HBM.
      nbytes: bytes of the values, without the padding of TPU tiles.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int
    nbytes: int


@dataclass(frozen=True)
class Instruction:
    """A line of a computation, cut into texts. Properties parse the texts on first access."""

    name: str
    opcode: str
    type_text: str = field(repr=False)
    operand_text: str = field(repr=False)
    attributes: str = field(repr=False)
    is_root: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Type (dtype, dims, memory space, bytes) of each array in the result; nested tuples are flattened in order."""
        shapes = []
        for dtype, dims, layout in _ARRAY.findall(self.type_text):
            space, narrow = _SPACE.search(layout), _ELEMENT_BITS.search(layout)
            # E(4) in the layout means packed values, here 4 bits each.
            bits, sizes = int(narrow[1]) if narrow else 8 * bytes_of(dtype), integers(dims)
            nbytes = -(-math.prod(sizes) * bits // 8)  # rounded up
            shapes.append(Shape(dtype, sizes, int(space[1]) if space else HBM, nbytes))
        return tuple(shapes)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instruction's operands; empty for a parameter or a constant."""
        if self.opcode in ("parameter", "constant"):
            return ()
        return tuple(_OPERAND.findall(self.operand_text))

    @cached_property
    def op_names(self) -> tuple[str, ...]:
        """JAX's names of the operations behind the instruction, from ``metadata``; () if the compiler gave no name.

        Merged operations have several names: "a/(b/psum:c/psum)" is "a/b/psum" and "a/c/psum".
        """
        match = _OP_NAME.search(self.attributes)
        name = match[1].replace("\\'", "'").replace('\\"', '"') if match else ""
        merged = _MERGED.fullmatch(name)
        return tuple(f"{merged[1] or ''}{part}" for part in merged[2].split(":")) if merged else (name,) * bool(name)

    @property
    def op_name(self) -> str:
        """First of ``op_names``; "" without names."""
        return self.op_names[0] if self.op_names else ""

    @cached_property
    def is_work(self) -> bool:
        """Whether the instruction computes or moves data.

        False for an instruction that only names values, such as a tuple, and for every ``-start``, ``-update`` and
        ``-done`` of an asynchronous operation.
        """
        if self.opcode in _FREE or self.opcode.endswith(("-start", "-update", "-done")):
            return False
        return not (self.opcode == "custom-call" and _FREE_CUSTOM_CALL.search(self.attributes))

    @cached_property
    def callees_by_role(self) -> dict[str, tuple[str, ...]]:
        """Names of the called computations by role: calls, body, condition, to_apply, branches, as far as present.

        A loop has {"condition": ("cond.1",), "body": ("body.1",)}, a conditional a name for each branch.
        """
        roles: dict[str, tuple[str, ...]] = {}
        for role, name, several in _CALLED.findall(self.attributes):
            # A conditional over a bool names two computations; a conditional over an index has a list.
            key = "branches" if role.startswith(("branch", "true", "false")) else role
            roles[key] = roles.get(key, ()) + ((name,) if name else tuple(_OPERAND.findall(several)))
        return roles

    @property
    def called_names(self) -> tuple[str, ...]:
        """Names of all computations that the instruction calls: a loop calls condition and body. () without calls."""
        return tuple(name for names in self.callees_by_role.values() for name in names)

    @cached_property
    def groups(self) -> Groups:
        """Groups of devices that a collective connects: for each group a tuple of device ids.

        An id is a position in the flattened mesh. () if the text names no groups: then all devices form a single group.

        Raises:
          ValueError: the groups have an unknown form.
        """
        return replica_groups(self.attributes)

    @cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's estimate of the cycles of a single execution; None without an estimate.

        Only TPU compilers write estimates, and not for every instruction.
        """
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else None

    @cached_property
    def tuple_index(self) -> int:
        """For a ``get-tuple-element`` the index of the taken element; for a ``parameter`` the number of the parameter.

        Not defined for any other opcode.
        """
        return int(self.operand_text if self.opcode == "parameter" else _INDEX.findall(self.attributes)[0])


def parse_instruction(line: str) -> Instruction | None:
    """Parses a line of HLO text, ``%name = type opcode(operands), attributes``, to an ``Instruction``.

    None for a line that does not begin as an instruction (with spaces, a name and "=").

    Raises:
      ValueError: the line begins as an instruction, but has no opcode or an open parenthesis.
    """
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    opcode = _OPCODE.search(line, match.end())
    if opcode is None:
        raise ValueError(f"no opcode in this line of HLO text: {line.strip()[:120]!r}.")
    end = _closing(line, opcode.end())
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        type_text=line[match.end() : opcode.start()],
        operand_text=line[opcode.end() : end],
        attributes=line[end + 1 :],
        is_root=bool(match[1]),
    )


def element(tuple_instruction: Instruction, index: int) -> Instruction:
    """Builds the ``get-tuple-element`` instruction for element ``index`` of the result of ``tuple_instruction``.

    Newer compilers write no such instruction, but an operand ``%while.3#1`` for element 1 of ``%while.3``. The built
    instruction has the name "while.3#1".
    """
    return Instruction(
        name=f"{tuple_instruction.name}#{index}",
        opcode="get-tuple-element",
        type_text=split_outside(tuple_instruction.type_text.strip()[1:-1], ",")[index].strip(),
        operand_text=f"%{tuple_instruction.name}",
        attributes=f", index={index}",
    )


def _closing(line: str, start: int) -> int:
    """Returns the index in ``line`` of the ")" that closes the "(" directly before index ``start``.

    Raises:
      ValueError: the parenthesis is not closed in this line.
    """
    # Jumps between closing parentheses instead of reading each character, since a line may have megabytes (constants,
    # Pallas kernels).
    end, at, depth = line.find(")", start), start, 1
    while end >= 0:
        depth += line.count("(", at, end) - 1
        if depth == 0:
            return end
        at, end = end + 1, line.find(")", end + 1)
    raise ValueError(f"a parenthesis is left open in this line of HLO text: {line.strip()[:120]!r}.")

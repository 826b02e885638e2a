"""One line of optimized HLO text: a result's type, an opcode, operands, attributes.

    %fusion.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%copy.75, %all-gather.37), kind=kOutput, calls=..., ...

A type tells the memory space, S(1): 0 is HBM (or a CPU's memory), 1 is a TPU core's VMEM, higher numbers are scalars
and semaphores. What is seldom asked for is read from the text only then.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.distributed.forecast.hlo.device_groups import Groups, replica_groups, source_target_pairs

HBM, VMEM = 0, 1
BITS = {
    **{"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s1": 1, "u1": 1},
    **{"s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128},
}
COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all collective-permute collective-broadcast ragged-all-to-all".split()
)

# What takes no time: names for values. And the two ends of what runs by itself.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier "
    "add-dependency".split()
)
_FREE_CUSTOM_CALL = re.compile(
    r'custom_call_target="(AllocateBuffer|ConcatBitcast|PrepareAsync\w+|AsyncCollective\w+)"'
)
_MERGED = re.compile(r"(.*/)?\(([^()]*:.*)\)$", re.DOTALL)
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"(?:^| )([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")  # %while.3#1 is what newer compilers write for an element of a tuple
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%([\w.\-]+)|\{([^}]*)\})"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Shape:
    """One array of a result.

    Attributes:
      dtype: as HLO writes it: "bf16", "f8e4m3fn", "pred", "token".
      dims: sizes; of a dim of bounded size its bound.
      space: memory space, 0 being HBM.
      nbytes: of the values alone. Tiles of a TPU may pad the buffer.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int
    nbytes: int


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(_shape(*match.groups()) for match in _ARRAY.finditer(text))


def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    sizes = tuple(int(size.strip().removeprefix("<=")) for size in dims.split(",") if size.strip())
    space, narrow = _SPACE.search(layout or ""), _ELEMENT_BITS.search(layout or "")
    # Integers of less than a byte lie in a byte each, unless the layout says how many bits they take.
    bits = int(narrow[1]) if narrow else _bits(dtype)
    return Shape(dtype, sizes, int(space[1]) if space else HBM, -(-math.prod(sizes) * bits // 8))


def _bits(dtype: str) -> int:
    if dtype.startswith("f8"):
        return 8
    if dtype not in BITS:
        raise ValueError(
            f"HLO text holds the dtype {dtype!r}, whose size is not known here; known: {sorted(BITS)}, f8*."
        )
    return BITS[dtype] and max(BITS[dtype], 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. What is seldom asked for is read from the text when it is."""

    name: str
    opcode: str
    type_text: str = field(repr=False)
    operand_text: str = field(repr=False)
    attributes: str = field(repr=False)
    is_root: bool = False

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The arrays of the result; those of a tuple, nested or not, in order."""
        return _shapes(self.type_text)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it reads; none for a parameter or a constant."""
        if self.opcode in ("parameter", "constant"):
            return ()
        return tuple(_OPERAND.findall(self.operand_text))

    @cached_property
    def op_names(self) -> tuple[str, ...]:
        """The names of the operations that it stems from, as JAX gave them; () where the compiler made it up.

        Several where the compiler has merged operations: "a/(b/psum:c/psum)" is "a/b/psum" and "a/c/psum".
        """
        match = _OP_NAME.search(self.attributes)
        name = match[1].replace("\\'", "'").replace('\\"', '"') if match else ""
        merged = _MERGED.fullmatch(name)
        return tuple(f"{merged[1] or ''}{part}" for part in merged[2].split(":")) if merged else (name,) * bool(name)

    @property
    def op_name(self) -> str:
        """The first of ``op_names``, "" where there is none."""
        return self.op_names[0] if self.op_names else ""

    @cached_property
    def is_work(self) -> bool:
        """Whether it computes or moves anything by itself: no name for a value, no start and no end of what does."""
        if self.opcode in _FREE or self.opcode.endswith(("-start", "-update", "-done")):
            return False
        return not (self.opcode == "custom-call" and _FREE_CUSTOM_CALL.search(self.attributes))

    @cached_property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of computations by role: calls, body, condition, to_apply, branches."""
        roles = defaultdict(tuple)
        for role, name, several in _CALLED.findall(self.attributes):
            role = "branches" if role.startswith(("branch", "true", "false")) else role
            roles["calls" if role == "called_computations" else role] += (
                (name,) if name else tuple(_OPERAND.findall(several))
            )
        return dict(roles)

    @cached_property
    def channel_id(self) -> int | None:
        """Of a collective. Not unique: newer compilers give several collectives the same."""
        match = re.search(r"channel_id=(\d+)", self.attributes)
        return int(match[1]) if match else None

    @cached_property
    def groups(self) -> Groups | None:
        """Device ids by group of a collective, as places in the flattened mesh; () stands for all devices in one."""
        return replica_groups(self.attributes)

    @cached_property
    def replica_groups(self) -> tuple[int, int] | None:
        """(number of groups, devices in each); None where there are none, or all devices form one."""
        return (len(self.groups), len(self.groups[0])) if self.groups else None

    @cached_property
    def source_target_pairs(self) -> Groups:
        """(from, to) of a collective-permute."""
        return source_target_pairs(self.attributes)

    @cached_property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate for one execution; TPU only, and not for every instruction."""
        match = _CYCLES.search(self.attributes)
        return int(match[1]) if match else None

    @cached_property
    def tuple_index(self) -> int:
        """Of a get-tuple-element: which one; of a parameter: its number."""
        text = self.operand_text if self.opcode == "parameter" else re.search(r"index=(\d+)", self.attributes)[1]
        return int(text)


def parse_instruction(line: str) -> Instruction | None:
    """Reads one line; None if it is no instruction.

    Raises:
      ValueError: it begins as one and does not go on.
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


def element(of: Instruction, index: int) -> Instruction:
    """The get-tuple-element that an operand such as ``%while.3#1`` abbreviates."""
    return Instruction(
        name=f"{of.name}#{index}",
        opcode="get-tuple-element",
        type_text=_elements(of.type_text)[index],
        operand_text=f"%{of.name}",
        attributes=f", index={index}",
    )


def _elements(type_text: str) -> list[str]:
    """The types in a tuple's type: those between the commas that stand in no bracket but the outermost."""
    elements, depth = [""], 0
    for char in type_text.strip()[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += char
    return [text.strip() for text in elements]


def _closing(line: str, start: int) -> int:
    """Where the parenthesis is closed that was opened just before ``start``."""
    end, at, depth = line.find(")", start), start, 1
    while end >= 0:
        depth += line.count("(", at, end) - 1
        if depth == 0:
            return end
        at, end = end + 1, line.find(")", end + 1)
    raise ValueError(f"a parenthesis is left open in this line of HLO text: {line.strip()[:120]!r}.")

"""A computation of a compiled program: instructions in the order of their schedule."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from xlstm_jax.distributed.forecast.hlo.instruction import Instruction

MAIN_THREAD = "main"


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of their schedule.

    Attributes:
      thread: "main", or what runs beside it, such as "sparsecore".
    """

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)
    is_entry: bool = False
    thread: str = MAIN_THREAD

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def position(self) -> dict[str, int]:
        """By name: the index in ``instructions``."""
        return {instruction.name: i for i, instruction in enumerate(self.instructions)}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {i.tuple_index: i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """By name: who reads it, and as which operand."""
        found = defaultdict(list)
        for instruction in self.instructions:
            for position, name in enumerate(instruction.operands):
                found[name].append((instruction, position))
        return found

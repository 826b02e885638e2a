"""A traced function as a list of operations between numbered values, to be run in another order, or on some rows."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.extend import core

from xlstm_jax.distributed.data_parallel.remat import ARITHMETIC

ELEMENTWISE = frozenset(f"{ARITHMETIC} convert_element_type copy sharding_constraint".split())
SPREAD = "broadcast_in_dim"  # a scalar to an array, as jnp.where does it
FUNCTIONS = ("jit", "pjit")
UPDATE_SCOPE = "update"
BY_CALLER = -1  # the user of a result

Number = int  # of a value in a program
Operand = Any  # a number, or a literal


class Op(NamedTuple):
    """An equation between values that have numbers."""

    eqn: core.JaxprEqn
    operands: tuple[Operand, ...]
    results: tuple[Number, ...]

    @property
    def numbers(self) -> list[Number]:
        return [x for x in self.operands if _is_number(x)]

    @property
    def result(self) -> Any:
        """The type of its first result; None where it has none."""
        return self.eqn.outvars[0].aval if self.results else None

    def is_elementwise(self, shape: tuple[int, ...] | None = None) -> bool:
        """Whether its result is an array, of this shape, each element made of those in its place and of scalars."""
        own = tuple(self.result.shape) if self.results else ()
        if not own or (shape is not None and own != shape):
            return False
        name, shapes = self.eqn.primitive.name, {getattr(x.aval, "shape", None) for x in self.eqn.invars} - {()}
        return (name in ELEMENTWISE and shapes <= {own}) or (name == SPREAD and not shapes)

    def run(self, values: Mapping[Number, Any], rows: int | None = None) -> dict[Number, Any]:
        """The results by their numbers; of an elementwise one also where ``values`` are so many rows of each."""
        operands = [values[x] if _is_number(x) else x.val for x in self.operands]
        primitive, scope = self.eqn.primitive, str(self.eqn.source_info.name_stack)
        with self.eqn.ctx.manager, jax.named_scope(scope or UPDATE_SCOPE):
            if rows and primitive.name == SPREAD:
                found = jax.lax.broadcast(operands[0], (rows, *self.result.shape[1:]))
            else:
                found = primitive.bind(*operands, **primitive.get_bind_params(self.eqn.params))
        return dict(zip(self.results, found if primitive.multiple_results else [found], strict=True))


@dataclass
class TracedUpdate:
    """A function as a list of operations.

    Attributes:
      count: what gives values their numbers.
      given: what it is computed from beside its arguments, by number.
      inputs, outputs: the arguments and the results.
    """

    count: Iterator[Number] = field(default_factory=itertools.count)
    ops: list[Op] = field(default_factory=list)
    given: dict[Number, Any] = field(default_factory=dict)
    inputs: list[Number] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)

    @classmethod
    def of(cls, closed: Any) -> "TracedUpdate":
        """Of what ``jax.make_jaxpr`` returns."""
        program = cls()
        program.inputs = [next(program.count) for _ in closed.jaxpr.invars]
        program.outputs = program._add(closed, program.inputs)
        return program

    def _add(self, closed: Any, operands: Sequence[Operand]) -> list[Operand]:
        """Adds the equations of a jaxpr, those of functions in it one by one; returns its results."""
        numbers: dict[Any, Operand] = dict(zip(closed.jaxpr.invars, operands, strict=True))
        for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[var] = next(self.count)
            self.given[numbers[var]] = const
        for eqn in closed.jaxpr.eqns:
            own = [_read(numbers, x) for x in eqn.invars]
            if eqn.primitive.name in FUNCTIONS:
                results = self._add(eqn.params["jaxpr"], own)
            else:
                results = [next(self.count) for _ in eqn.outvars]
                self.ops.append(Op(eqn, tuple(own), tuple(results)))
            numbers.update(zip(eqn.outvars, results, strict=True))
        return [_read(numbers, x) for x in closed.jaxpr.outvars]

    def phases(self, arrival: Mapping[Number, int]) -> tuple[dict[Number, int], dict[int, list[Op]]]:
        """When each value is there, and what is computed in each phase, where inputs arrive one after the other.

        That is once the last input has arrived that it needs; or later, if it is arithmetic on an array that one later
        phase alone needs, as a clipped gradient is: until then nothing has to hold it.
        """
        phase, by_op = dict.fromkeys(self.given, 0) | dict(arrival), [0] * len(self.ops)
        for i, op in enumerate(self.ops):
            by_op[i] = max((phase[x] for x in op.numbers), default=0)
            phase |= dict.fromkeys(op.results, by_op[i])
        users: dict[Number, set[int]] = defaultdict(set)
        for x in filter(_is_number, self.outputs):
            users[x].add(BY_CALLER)
        for i, op in reversed(list(enumerate(self.ops))):
            needed = set[int]().union(*(users[x] for x in op.results))
            if op.is_elementwise() and len(needed) == 1 and BY_CALLER not in needed:
                (by_op[i],) = needed
                phase |= dict.fromkeys(op.results, by_op[i])
            for x in op.numbers:
                users[x].add(by_op[i])
        ops: dict[int, list[Op]] = defaultdict(list)
        for k, op in zip(by_op, self.ops, strict=True):
            ops[k].append(op)
        return phase, ops


def _is_number(x: Operand) -> bool:
    return isinstance(x, Number)


def _read(numbers: Mapping[Any, Operand], x: Any) -> Operand:
    return x if isinstance(x, core.Literal) else numbers[x]

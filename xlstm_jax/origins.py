"""``TracedValue``: a traced value with its producing equation, to walk back from results to their origins.

  TracedValue(tracer)    a tracer of ``jax.jit`` or ``shard_map``
  value.made()           the producing equation, its operands as values, and the number of the result
  inside(made)           the same result within the equation's jaxpr: a call, a ``scan``, a ``shard_map``
  is_gradient(value)     whether a backward pass made the value
  origins(value, ends)   the values from which ``value`` was computed

A walk reads equations and computes nothing. A walk ends at arguments of the traced function, and at tracers of
transformations except ``jax.jit`` and ``shard_map``: these values have no known equation.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from xlstm_jax.equations import FUNCTIONS, name_and_params
from xlstm_jax.introspection import equation_of
from xlstm_jax.private_names import core

_ENTERED = FUNCTIONS | {"remat2", "checkpoint", "scan", "shard_map"}  # operands and results match the inner jaxpr's
MOST_VALUES = 10_000  # a walk stops after this number of values


class _Scope:
    """Jaxpr of an equation, with the values of its inputs."""

    def __init__(self, jaxpr: Any, inputs: list["TracedValue"]) -> None:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self.results = jaxpr.outvars
        self.inputs = dict(zip(jaxpr.invars, inputs, strict=True))
        self.equations = {var: (eqn, number) for eqn in jaxpr.eqns for number, var in enumerate(eqn.outvars)}

    def value(self, var: Any) -> "TracedValue":
        is_input = not isinstance(var, core.Literal) and var in self.inputs
        return self.inputs[var] if is_input else TracedValue(var, self)


class ProducingEquation(NamedTuple):
    """Origin of a value: result ``number`` of the equation ``eqn``."""

    eqn: Any
    operands: list["TracedValue"]
    number: int


class TracedValue(NamedTuple):
    """Traced value: a tracer, or a variable or literal of the jaxpr ``scope`` of an equation.

    The value of a jaxpr's argument is the operand that the equation passes; for a carry of a ``scan``, the first carry.
    """

    tracer_or_atom: Any
    scope: _Scope | None = None

    @property
    def aval(self) -> Any:
        return jax.typeof(self.tracer_or_atom) if self.scope is None else self.tracer_or_atom.aval

    @property
    def number(self) -> float | None:
        """The number, if this value is a real scalar literal of the traced program; else None."""
        literal: Any = getattr(self.tracer_or_atom, "val", None)
        literal = getattr(literal, "val", literal)  # a tracer holds a variable or a literal
        is_scalar = isinstance(literal, int | float | np.number | np.ndarray) and np.ndim(literal) == 0
        return float(literal) if is_scalar and np.isrealobj(literal) else None

    def made(self) -> ProducingEquation | None:
        """Returns the equation that made the value, with its operands and the index of the value among its results.

        None if no equation is known, as for an argument of the traced function.
        """
        if self.scope is None:
            if found := equation_of(self.tracer_or_atom):
                eqn, tracers, number = found
                return ProducingEquation(eqn, [TracedValue(tracer) for tracer in tracers], number)
        elif not isinstance(self.tracer_or_atom, core.Literal) and self.tracer_or_atom in self.scope.equations:
            eqn, number = self.scope.equations[self.tracer_or_atom]
            return ProducingEquation(eqn, [self.scope.value(var) for var in eqn.invars], number)
        return None


def inside(made: ProducingEquation) -> TracedValue | None:
    """Returns, for a result of a call, a ``scan`` or a ``shard_map``, the same result as a value of the inner jaxpr.

    The walk to origins can continue there: arguments of the inner jaxpr are the operands of the equation. None for
    equations of other kinds.
    """
    name, params = name_and_params(made.eqn)
    jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
    if name not in _ENTERED or jaxpr is None:
        return None
    scope = _Scope(jaxpr, made.operands)
    return scope.value(scope.results[made.number])


def origins(value: TracedValue, ends: Callable[[TracedValue], bool]) -> Iterator[TracedValue]:
    """Yields ``value`` and the values from which ``value`` was computed, directly or indirectly.

    ``value`` comes first, and each value once. The walk does not continue to the operands of a value for which ``ends``
    returns True, does not enter equations within calls, and stops after ``MOST_VALUES`` values.
    """
    known, waiting = set[int](), [value]
    while waiting and len(known) < MOST_VALUES:
        current = waiting.pop()
        if id(current.tracer_or_atom) not in known:
            known.add(id(current.tracer_or_atom))
            yield current
            if not ends(current) and (made := current.made()):
                waiting.extend(made.operands)


def is_gradient(value: TracedValue) -> bool:
    """Returns whether an equation of a backward pass (``jax.grad``, ``jax.vjp``) made the value.

    False if no equation is known, as for an argument of the traced function.
    """
    made = value.made()
    return made is not None and "transpose(" in str(made.eqn.source_info.name_stack)

"""Evaluates a traced program on uniform arrays, whose entries are equal: a single number stands for an array.

  f32[4096, 4096] of 0.5, summed over dim 0   ->   f32[4096] of 2048

So the update of an optimizer for parameters of 70 billion entries is evaluated at true shapes in milliseconds. Values
computed from arrays that are not uniform (random numbers, an ``iota``) are ``UNKNOWN``, also the results of primitives
that are not in the tables below. Constants with unequal, finite entries, such as the coefficients of a polynomial, are
``FINITE``: their product with 0 is 0.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xlstm_jax.equations import FUNCTIONS, name_and_params, scan_counts

MAX_LOOPS = 100


class _Unknown:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


UNKNOWN, FINITE = _Unknown("UNKNOWN"), _Unknown("FINITE")
Uniform = Any  # a number, UNKNOWN or FINITE

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "sign": np.sign,
    "abs": abs,
    "max": max,
    "min": min,
    "square": lambda x: x * x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float64(1) / np.sqrt(x),
    "cbrt": np.cbrt,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "cos": np.cos,
    "sin": np.sin,
    "floor": np.floor,
    "ceil": np.ceil,
    "is_finite": lambda x: bool(np.isfinite(x)),
    "pow": lambda x, y: np.power(np.float64(x), y),
    "rem": math.fmod,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "clamp": lambda low, x, high: min(max(x, low), high),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
# Primitives whose result contains only entries of the first operand; further operands (indices) do not matter.
REARRANGING = frozenset(
    {
        *(
            "broadcast_in_dim",
            "reshape",
            "transpose",
            "squeeze",
            "expand_dims",
            "rev",
            "slice",
            "dynamic_slice",
            "copy",
        ),
        *("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_precision", "stop_gradient"),
        *("sharding_constraint", "reshard", "mesh_cast"),
    }
)


def uniform_value(array: Any) -> Uniform:
    """Returns the common value of an array whose entries are equal: a bool, an int or a ``np.float64``.

    ``FINITE`` for unequal entries that are finite. ``UNKNOWN`` for unequal entries with an infinity or NaN, and for
    arrays that are empty or complex, or keys of random numbers.
    """
    try:
        values = np.asarray(array)
    except TypeError:  # keys of random numbers
        return UNKNOWN
    if values.size == 0 or values.dtype.kind not in "biufV":
        return UNKNOWN
    if not (values == values.flat[0]).all():
        return FINITE if np.isfinite(values.astype(np.float64)).all() else UNKNOWN
    return _number(values.flat[0], values.dtype)


def evaluate(jaxpr: Any, consts: Sequence[Any], values: Sequence[Uniform]) -> list[Uniform]:
    """Evaluates a jaxpr on arrays whose entries are equal: returns, for each result in order, the value of its entries.

    A value is a number (a bool, an int or a ``np.float64``), or ``UNKNOWN``, or ``FINITE`` for unequal, finite entries.

    Args:
      jaxpr: an open jaxpr (``ClosedJaxpr.jaxpr``).
      consts: the arrays of its constants, in order.
      values: for each argument the value of its entries: a number, ``FINITE`` or ``UNKNOWN``.
    """
    found = dict(zip(jaxpr.invars, values, strict=True))
    found |= {var: uniform_value(const) for var, const in zip(jaxpr.constvars, consts, strict=True)}

    def read(var: Any) -> Uniform:
        return uniform_value(var.val) if hasattr(var, "val") else found[var]

    with np.errstate(all="ignore"):
        for eqn in jaxpr.eqns:
            results = _evaluated(eqn, [read(var) for var in eqn.invars])
            found.update(zip(eqn.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _evaluated(eqn: Any, values: list[Uniform]) -> list[Uniform]:
    name, params = name_and_params(eqn)
    unknown = [UNKNOWN] * len(eqn.outvars)
    if name in FUNCTIONS or name in ("checkpoint", "remat", "remat2", "core_call"):
        return _called(params.get("jaxpr", params.get("call_jaxpr")), values)
    if name == "cond":
        which, *rest = values
        branches = params["branches"]
        taken = branches if isinstance(which, _Unknown) else [branches[min(max(int(which), 0), len(branches) - 1)]]
        return _equal([_called(branch, rest) for branch in taken])
    if name == "scan":
        return _scanned(params, values)
    if name == "while":
        return _looped(params, values)
    if name == "select_n":
        which, *cases = values
        return [_same(cases) if isinstance(which, _Unknown) else cases[int(which)]]
    if name == "pad" and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape:
        return values[:1]
    if name in ("concatenate", "pad", "dynamic_update_slice"):
        return [_same(values[:2] if name != "concatenate" else values)]
    if name == "optimization_barrier":
        return values
    if name in REARRANGING:
        return [values[0]]
    if name in ("mul", "dot_general") and FINITE in values and 0 in values:
        return [np.float64(0)]
    if any(isinstance(value, _Unknown) for value in values):
        return unknown
    dtype = eqn.outvars[0].aval.dtype
    if name == "convert_element_type":
        return [_number(values[0], dtype)]
    sizes = [math.prod(var.aval.shape) for var in (*eqn.invars, *eqn.outvars)]
    if name == "reduce_sum":
        return [values[0] * (sizes[0] // max(sizes[-1], 1))]
    if name == "dot_general":
        contracted = [eqn.invars[0].aval.shape[dim] for dim in params["dimension_numbers"][0][0]]
        return [values[0] * values[1] * math.prod(contracted)]
    if name == "integer_pow":
        return [_number(np.float64(values[0]) ** params["y"], dtype)]
    if name == "div":
        exact = np.float64(values[0]) / np.float64(values[1])
        return [_number(np.trunc(exact) if np.issubdtype(dtype, np.integer) else exact, dtype)]
    if name == "not":
        # A comparison of a NumPy number is a NumPy bool.
        return [not values[0]] if isinstance(values[0], bool | np.bool_) else unknown
    return [ELEMENTWISE[name](*values)] if name in ELEMENTWISE else unknown


def _number(value: Any, dtype: Any) -> Uniform:
    if np.issubdtype(dtype, np.bool_):
        return bool(value)
    if np.issubdtype(dtype, np.integer):
        return int(value) if np.isfinite(value) else UNKNOWN
    return np.float64(value)


def _called(jaxpr: Any, values: Sequence[Uniform]) -> list[Uniform]:
    # Closed jaxprs contain their constants; open jaxprs have no constants.
    return evaluate(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), values)


def _scanned(params: dict[str, Any], values: list[Uniform]) -> list[Uniform]:
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = (
        values[:num_consts],
        values[num_consts : num_consts + num_carry],
        values[num_consts + num_carry :],
    )
    results: list[list[Uniform]] = []
    if params["length"] > MAX_LOOPS:
        return [UNKNOWN] * len(_called(params["jaxpr"], values))
    for _ in range(params["length"]):
        out = _called(params["jaxpr"], [*consts, *carry, *xs])
        carry = out[:num_carry]
        results.append(out[num_carry:])
    return [*carry, *(_equal(results) if results else [])]


def _looped(params: dict[str, Any], values: list[Uniform]) -> list[Uniform]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    consts, carry = values[: of_cond + of_body], values[of_cond + of_body :]
    for _ in range(MAX_LOOPS):
        goes_on = _called(params["cond_jaxpr"], [*consts[:of_cond], *carry])[0]
        if isinstance(goes_on, _Unknown):
            break
        if not goes_on:
            return carry
        carry = _called(params["body_jaxpr"], [*consts[of_cond:], *carry])
    return [UNKNOWN] * len(carry)


def _equal(several: list[list[Uniform]]) -> list[Uniform]:
    return [_same(list(values)) for values in zip(*several, strict=True)]


def _same(values: list[Uniform]) -> Uniform:
    """Returns the common value of several arrays of equal entries, for an array whose entries are from any of them.

    ``values`` are the values of the arrays. The result is the number if all are equal numbers; ``FINITE`` if every
    value is ``FINITE``; else ``UNKNOWN``.
    """
    if any(isinstance(value, _Unknown) for value in values):
        return FINITE if all(value is FINITE for value in values) else UNKNOWN
    return values[0] if all(value == values[0] for value in values) else UNKNOWN

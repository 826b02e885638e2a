"""Reads the equations of a traced program (a jaxpr), with those of nested jaxprs; lists names of collectives."""

from collections.abc import Iterable, Mapping
from typing import Any

from xlstm_jax.private_names import core

# XLA's kind of each collective, by the name of JAX's primitive.
_KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("unreduced_psum", "unreduced_pmax", "unreduced_pmin"), "all-reduce"),
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    **dict.fromkeys(("ppermute", "psend", "precv"), "collective-permute"),
    **dict.fromkeys(("pbroadcast", "pbroadcast_dynamic"), "collective-broadcast"),
}
# Each collective may be a pair of operations, start and done.
COLLECTIVES = {name + form: kind for name, kind in _KINDS.items() for form in ("", "_start", "_done")}
# Primitives that call a jaxpr as a function.
FUNCTIONS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "pjit"})
GATHERS = frozenset(name for name, kind in COLLECTIVES.items() if kind == "all-gather")


def named_axes(eqn: Any) -> tuple[str, ...]:
    """Returns the names of mesh axes in an equation's parameter ``axes`` or ``axis_name``; () without names."""
    return axes_in(eqn.params)


def axes_in(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of mesh axes in an equation's parameters ``params``, read from "axes" or "axis_name".

    Indices of array dims are left out; () without names.
    """
    names = params.get("axes", params.get("axis_name", ()))
    return tuple([name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str)])


def name_and_params(eqn: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name of an equation's primitive, and its parameters.

    With ``jax_remat3`` and ``jax_custom_vjp3`` (JAX 0.12) the equation of ``jax.checkpoint`` or of a ``custom_vjp`` has
    another form, which contains the same jaxpr. The name and the jaxpr are returned as without these flags.
    """
    traced = eqn.params.get("_prim")
    if hasattr(traced, "traced"):
        return "custom_vjp_call", {"call_jaxpr": traced.traced.jaxpr}
    if "prevent_cse" in getattr(traced, "params", {}):
        return "remat2", traced.params
    return eqn.primitive.name, eqn.params


def nested_jaxprs(eqn: Any) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation, such as the body of a ``scan``; [] without one."""
    return list(core.jaxprs_in_params(name_and_params(eqn)[1]))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns (number of constants, number of carries) among the inputs of a ``scan``; ``params`` are its parameters.

    The inputs are in this order: constants, carries, arrays that the ``scan`` cuts along dim 0.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    of_consts, of_carry, _ = params["ft_in"].unpack()  # JAX 0.12
    return len(of_consts), len(of_carry)


def nbytes(aval: Any) -> int:
    """Returns the bytes of an abstract value; 0 for a token, which has no dtype."""
    return aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


def all_equations(eqns: Iterable[Any]) -> list[Any]:
    """Returns the equations and, after them, the equations of nested jaxprs at any depth.

    A jaxpr that several equations call contributes its equations once.
    """
    equations, waiting, known = [], [eqns], set[int]()
    while waiting:
        for eqn in waiting.pop():
            equations.append(eqn)
            if not eqn.params:
                continue
            for inner in core.jaxprs_in_params(name_and_params(eqn)[1] if "_prim" in eqn.params else eqn.params):
                if id(inner) not in known:
                    known.add(id(inner))
                    waiting.append(inner.eqns)
    return equations

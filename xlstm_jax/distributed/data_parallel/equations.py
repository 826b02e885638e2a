"""The equations of a traced program (a jaxpr), those of the programs within it, and what of them communicates."""

from collections.abc import Iterable, Iterator
from typing import Any

from xlstm_jax.private_names import core

# JAX's names of gathers. In 0.12 a gather may be two operations, its start and its end.
GATHERS = frozenset(f"all_gather{form}" for form in ("", "_start", "_done", "_invariant", "_reduced", "_reduced_start"))
# All operations that communicate, by JAX's names: what XLA calls each.
COLLECTIVES = dict.fromkeys(GATHERS, "all-gather") | {
    "reduce_scatter": "reduce-scatter",
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}


def named_axes(eqn: Any) -> tuple[str, ...]:
    """The mesh axes that an equation names, as ``axes`` or as ``axis_name``, one or several."""
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str))


def all_equations(eqns: Iterable[Any]) -> Iterator[Any]:
    """Equations, and the equations of the jaxprs within them; those of a jaxpr that several equations share, once."""
    waiting, known = [eqns], set[int]()
    while waiting:
        for eqn in waiting.pop():
            yield eqn
            for inner in core.jaxprs_in_params(eqn.params):
                if id(inner) not in known:
                    known.add(id(inner))
                    waiting.append(inner.eqns)

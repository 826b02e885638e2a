"""How many bytes of intermediate values are alive at a time, by a jaxpr: a guess, before anything is compiled.

  x  --dot_general-->  h  --gelu-->  g  --dot_general-->  y       x, g and y are in memory; h is read where it is made

Operations run in the order in which they were traced. Of a value in memory there are as many bytes as its shape says
from the operation that makes it to the last one that reads it; within a loop or a call come those of its own values.
Values between elementwise operations are in no memory, as a compiler fuses those. The compiler may order operations in
another way, so the guess is within 20 % of what it needs, as ``benchmarks.axes`` finds for models of 8e9 to 70e9
parameters, and no bound.
"""

from typing import Any

from xlstm_jax.equations import COLLECTIVES, nbytes
from xlstm_jax.private_names import core

# Besides what holds a program of its own (loops, calls, kernels): operations with operands in memory.
_IN_MEMORY = {"dot_general", "ragged_dot_general", "conv_general_dilated", "gather", "scatter-add", "sort", "top_k"}
_IN_MEMORY |= COLLECTIVES.keys()


def live_bytes(jaxpr: Any) -> int:
    """The most bytes that are alive at a time of what a program computes, without its arguments and its results.

    >>> def layers(x, w):
    ...     return ((x @ w) @ w).sum()
    >>> program = jax.make_jaxpr(layers)(jnp.ones((256, 256)), jnp.ones((256, 256)))
    >>> live_bytes(program.jaxpr) == 2 * 256 * 256 * 4  # both products, while the second is computed
    True
    """
    # Arguments and results are counted where they are bound.
    given = {*jaxpr.invars, *jaxpr.constvars, *_variables(jaxpr.outvars)}
    whole = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in _IN_MEMORY or any(core.jaxprs_in_params(eqn.params))]
    stored = {v for eqn in whole for v in _of(eqn)} - given
    last_read = {v: place for place, eqn in enumerate(jaxpr.eqns) for v in _of(eqn)}
    alive = most = 0
    for place, eqn in enumerate(jaxpr.eqns):
        alive += sum(nbytes(v.aval) for v in eqn.outvars if v in stored)
        within = max(map(live_bytes, core.jaxprs_in_params(eqn.params)), default=0)
        most = max(most, alive + within)
        alive -= sum(nbytes(v.aval) for v in stored.intersection(_of(eqn)) if last_read[v] == place)
    return most


def _of(eqn: Any) -> list[Any]:
    return [*_variables(eqn.invars), *eqn.outvars]


def _variables(atoms: Any) -> list[Any]:
    """Without literals, which stand in the program itself."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]

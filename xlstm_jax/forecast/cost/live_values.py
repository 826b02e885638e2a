"""Estimate of the bytes of live intermediate values from a jaxpr, before anything is compiled.

  x  --dot_general-->  h  --gelu-->  g  --dot_general-->  y     x, h, g, y are in memory; values inside of gelu are not

Operations run in traced order. A value in memory counts with its shape's bytes from the producer to the last reader. A
loop or a call adds the bytes of inner values. Values between elementwise operations are not in memory, because a
compiler fuses elementwise operations. The compiler may choose another order, so the estimate is no bound;
``benchmarks.axes`` finds it within 20 % of the compiled program for models of 8e9 to 70e9 parameters.
"""

from typing import Any

from xlstm_jax.equations import COLLECTIVES, nbytes, nested_jaxprs
from xlstm_jax.private_names import core

# Operations with operands in memory, besides operations that contain a jaxpr (loops, calls, kernels).
_IN_MEMORY = {"dot_general", "ragged_dot_general", "conv_general_dilated", "gather", "scatter-add", "sort", "top_k"}
_IN_MEMORY |= COLLECTIVES.keys()


def live_bytes(jaxpr: Any) -> int:
    """Returns the most bytes of live values at any time, without the arguments and results of the jaxpr.

    >>> def layers(x, w):
    ...     return ((x @ w) @ w).sum()
    >>> program = jax.make_jaxpr(layers)(jnp.ones((256, 256)), jnp.ones((256, 256)))
    >>> live_bytes(program.jaxpr) == 2 * 256 * 256 * 4  # both products, while the second is computed
    True

    Only values that a product, collective, gather, sort, loop or call reads or makes count, because a compiler fuses
    elementwise operations. A value is live from its producer to its last reader, in traced order. A loop or call adds
    the most bytes of its own live values.
    """
    # The caller counts arguments and results where it binds them.
    never_freed = {*jaxpr.invars, *jaxpr.constvars, *_variables(jaxpr.outvars)}
    materialized = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in _IN_MEMORY or any(nested_jaxprs(eqn))]
    stored = {v for eqn in materialized for v in _values_of(eqn)} - never_freed
    last_read = {v: place for place, eqn in enumerate(jaxpr.eqns) for v in _values_of(eqn)}
    alive = most = 0
    for place, eqn in enumerate(jaxpr.eqns):
        alive += sum(nbytes(v.aval) for v in eqn.outvars if v in stored)
        within = max(map(live_bytes, nested_jaxprs(eqn)), default=0)
        most = max(most, alive + within)
        alive -= sum(nbytes(v.aval) for v in stored.intersection(_values_of(eqn)) if last_read[v] == place)
    return most


def _values_of(eqn: Any) -> list[Any]:
    return [*_variables(eqn.invars), *eqn.outvars]


def _variables(atoms: Any) -> list[Any]:
    """Returns the variables among ``atoms``, operands of a jaxpr, in order, without literals, which take no memory."""
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]

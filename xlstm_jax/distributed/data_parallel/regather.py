"""Which values a backward pass computes again: gathered weights, and all that is computed from them alone.

``keeping_no_weights`` makes of any policy of rematerialisation one that keeps no gathered weight. Units need it for
``reshard_after_forward``; ``remat`` offers it to users.

JAX asks a policy about one operation at a time: the policy sees the operation, the types of its inputs and its
parameters, not where the inputs come from. So it cannot recognise a weight. Nor does it help to name the output of a
gather and to keep everything except that name: JAX then keeps the gather's own output, before the name, or a value that
is computed after it. It does help to refuse the gathers themselves (``GATHERS``), and all operations that only move or
cast values, compute element by element, or draw random numbers (``RECOMPUTED``); also a function with a derivative of
its own that consists of nothing else.

The results of these operations on a gathered weight (a cast, a transpose, some rows, quantised values times their
scales, an exp) are computed again in the backward pass. So are the results of the same operations on activations. This
costs no matrix product: XLA fuses the operations into those that read the results. In the compiled programs of
docs/remat.md it takes less memory *and* fewer cycles than keeping the results, as fewer bytes are moved.

Some values that are computed from weights alone may still be kept: reductions (a norm, a maximum: smaller than the
weight), products of weights with weights, rows gathered or scattered by index (``k[perm]``, ``k.at[0].set(0)``),
cumulative sums, sorts, kernels and loops. A policy cannot tell them from the same operations on activations. Merge such
weights outside of the rematerialised function, or keep "nothing".

Complex values are computed again, too, whatever the base keeps: JAX rounds what a policy keeps by ``reduce_precision``,
which does not accept them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xlstm_jax.equations import GATHERS
from xlstm_jax.private_names import mul_p

Policy = Callable[..., Any]

_CASTS = (
    "bitcast_convert_type convert_element_type layout_constraint preduced pvary reduce_precision reduced_vary_cast "
    "reduced_vary_cast_p relayout reshard sharding_constraint stop_gradient vary_unreduced_cast vary_unreduced_cast_p"
)
_MOVES = (
    "broadcast_in_dim broadcast_to concatenate copy dynamic_slice dynamic_update_slice iota optimization_barrier pad "
    "reshape rev slice split squeeze stack tile transpose unstack"
)
_ARITHMETIC = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cos cosh digamma div "
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p log2 logistic lt "
    "max min mul ne neg nextafter not one_minus_square or polynomial population_count pow real rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor"
)
# Each entry of a dropout mask is drawn from 32 random bits; keeping them would take 32 times the information of the
# mask. Computed again from the same key, they are the same bits.
_RANDOM = "iota_2x32_shape random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32"
RECOMPUTED = frozenset(f"{_CASTS} {_MOVES} {_ARITHMETIC} {_RANDOM}".split())

_MAKE_COMPLEX = ("complex", "eig", "fft")  # of real values

_FUNCTIONS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "pjit"})


# One object for one base, since JAX compares policies by identity.
@functools.cache
def keeping_no_weights(base: Policy) -> Policy:
    """Returns a policy that keeps what ``base`` keeps, but for gathered weights (see the top of this file)."""
    return functools.partial(_keep_but_weights, base)


def _keep_but_weights(base: Policy, primitive: Any, *inputs: Any, **params: Any) -> Any:
    """The answer to JAX's question whether to keep the results of an operation, for a policy ``base``."""
    name = primitive.name
    if may_be_complex(name, inputs, params):
        return False
    if name in GATHERS or name in RECOMPUTED or _is_table(name, params) or _is_cheap_call(base, name, params):
        return False
    # A base that keeps even products of single elements keeps everything: it has not chosen this name, which may be a
    # weight's. A base that keeps this name, and not such products, has chosen it.
    if name == "name" and base(mul_p, *inputs, *inputs):
        return False
    return base(primitive, *inputs, **params)


def may_be_complex(name: str, inputs: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether a result of an operation is complex; also of one that makes real values of complex ones."""
    body = params.get("call_jaxpr") or params.get("jaxpr")
    types = [*inputs, *getattr(body, "out_avals", ())]
    dtypes = [getattr(aval, "dtype", None) for aval in types]
    dtypes += [params.get("preferred_element_type"), params.get("new_dtype")]
    of_complex = any(dtype is not None and jnp.issubdtype(dtype, np.complexfloating) for dtype in dtypes)
    return of_complex or name in _MAKE_COMPLEX


def _is_table(name: str, params: dict[str, Any]) -> bool:
    """Whether a gather reads single values from a table (quantised weights), and not rows (an embedding)."""
    # A table of quantised values is asked for each value by itself. Rows of an embedding are activations.
    return name == "gather" and math.prod(params["slice_sizes"]) == 1


def _is_cheap_call(base: Policy, name: str, params: dict[str, Any]) -> bool:
    """Whether a function has nothing in it to keep."""
    # JAX looks into most functions itself. It does not look into a function with a derivative of its own if nothing in
    # it is differentiated, as in the gather of frozen weights. The maxima in such a gather are those of packed blocks.
    if name not in _FUNCTIONS:
        return False
    body = (params.get("call_jaxpr") or params["jaxpr"]).eqns
    passed = {"reduce_max"} if any(eqn.primitive.name in GATHERS for eqn in body) else ()
    return not any(
        _keep_but_weights(base, eqn.primitive, *(value.aval for value in eqn.invars), **eqn.params)
        for eqn in body
        if eqn.primitive.name not in passed
    )

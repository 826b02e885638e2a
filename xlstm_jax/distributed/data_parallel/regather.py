"""Choice of the values that a backward pass recomputes: gathered weights, and values computed from weights alone.

``keeping_no_weights`` turns a rematerialisation policy into a policy that keeps no gathered weight. Units use it for
``reshard_after_forward``; ``remat`` offers it to users.

JAX calls a policy once per operation, with the operation, the types of inputs and the parameters, but not the
origin of the inputs. So a policy cannot recognise a weight. Naming the output of a gather and keeping everything except
that name does not help either: JAX then keeps the gather's output before the name, or a value computed after the name.
The policy therefore keeps no result of the gathers themselves (``GATHERS``), of operations that only move or cast
values, compute element by element, or draw random numbers (``RECOMPUTED``), and of functions with a custom derivative
that contain only these operations.

Results of these operations on a gathered weight (a cast, a transpose, some rows, quantised values times their scales,
an exp) are recomputed in the backward pass, and so are results of the same operations on activations. This costs no
matrix product: XLA fuses the operations into the consumers of the results. In the compiled programs of docs/remat.md
recomputing takes less memory *and* fewer cycles than keeping the results, as fewer bytes are moved.

Some values computed from weights alone may still be kept: reductions (a norm, a maximum: smaller than the weight),
products of weights with weights, rows gathered or scattered by index (``k[perm]``, ``k.at[0].set(0)``), cumulative
sums, sorts, kernels and loops. A policy cannot distinguish these from the same operations on activations. Merge such
weights outside of the rematerialised function, or keep "nothing".

Complex values are recomputed, too, whatever the base keeps: JAX rounds kept values by ``reduce_precision``, which does
not accept complex values.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xlstm_jax.equations import FUNCTIONS, GATHERS, axes_in
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
# Each entry of a dropout mask is drawn from 32 random bits; keeping the bits would take 32 times the information of the
# mask. Recomputed from the same key, the bits are equal.
_RANDOM = "iota_2x32_shape random_bits random_fold_in random_seed random_split random_unwrap random_wrap threefry2x32"
RECOMPUTED = frozenset(f"{_CASTS} {_MOVES} {_ARITHMETIC} {_RANDOM}".split())

_MAKE_COMPLEX = ("complex", "eig", "fft")  # make complex values of real values


# Cached: JAX compares policies by identity.
@functools.cache
def keeping_no_weights(base: Policy, kept_axes: frozenset[str] = frozenset()) -> Policy:
    """Returns a policy for ``jax.checkpoint`` that keeps the values that ``base`` keeps, except gathered weights.

    Left out are also results of cheap operations, which only move or cast values or compute element by element: the
    policy cannot tell a cast weight from a cast activation. Results of gathers over ``kept_axes`` alone are kept.
    Equal arguments give the same object.
    """
    return functools.partial(_keep_but_weights, base, kept_axes)


def _keep_but_weights(base: Policy, kept_axes: frozenset[str], primitive: Any, *inputs: Any, **params: Any) -> Any:
    """Returns whether to keep the results of an operation for a backward pass: as ``base`` says, but False for weights.

    JAX calls the function with the operation ``primitive``, the types ``inputs`` and the parameters ``params``. Without
    a call of ``base``, the result is True for a gather over axes that are all in ``kept_axes``. It is False (recompute)
    for any other gather, for operations in ``RECOMPUTED`` and calls that contain only such operations, for single
    values read from a table, and for complex values. A value with a name (``checkpoint_name``) is recomputed, too, if
    ``base`` keeps everything.
    """
    name = primitive.name
    if may_be_complex(name, inputs, params):
        return False
    if name in GATHERS:
        return bool(kept_axes) and kept_axes.issuperset(axes_in(params))
    if name in RECOMPUTED or _is_table(name, params) or _is_cheap_call(base, name, params):
        return False
    # A base that keeps even products of single elements keeps everything: it has not chosen this name, which may be a
    # weight's. A base that keeps this name but not such products has chosen the name.
    if name == "name" and base(mul_p, *inputs, *inputs):
        return False
    return base(primitive, *inputs, **params)


def may_be_complex(name: str, inputs: Sequence[Any], params: dict[str, Any]) -> bool:
    """Returns whether an operation may have complex inputs or results, by its types, or by its name (an FFT, say).

    ``name`` is the name of the operation, ``inputs`` are the types of its inputs, ``params`` its parameters.
    """
    body = params.get("call_jaxpr") or params.get("jaxpr")
    types = [*inputs, *getattr(body, "out_avals", ())]
    dtypes = [getattr(aval, "dtype", None) for aval in types]
    dtypes += [params.get("preferred_element_type"), params.get("new_dtype")]
    of_complex = any(dtype is not None and jnp.issubdtype(dtype, np.complexfloating) for dtype in dtypes)
    return of_complex or name in _MAKE_COMPLEX


def _is_table(name: str, params: dict[str, Any]) -> bool:
    """Returns whether an operation is JAX's indexing "gather", and reads single values rather than rows.

    Quantised weights are decoded by such reads from a table. ``params`` are the parameters of the operation.
    """
    # Quantised values are decoded one by one from a table. Rows of an embedding are activations.
    return name == "gather" and math.prod(params["slice_sizes"]) == 1


def _is_cheap_call(base: Policy, name: str, params: dict[str, Any]) -> bool:
    """Returns whether an operation calls a function in which the policy keeps no value, so that the call is recomputed.

    False for an operation that calls no function. ``base`` is the user's policy, ``name`` the operation's name,
    ``params`` are the operation's parameters, with the body of the function.
    """
    # JAX applies policies inside most functions, but not inside a function with a custom derivative if nothing in it is
    # differentiated, such as the gather of frozen weights. The maxima in such a gather are those of packed blocks.
    if name not in FUNCTIONS:
        return False
    body = (params.get("call_jaxpr") or params["jaxpr"]).eqns
    passed = {"reduce_max"} if any(eqn.primitive.name in GATHERS for eqn in body) else ()
    return not any(
        _keep_but_weights(base, frozenset(), eqn.primitive, *(value.aval for value in eqn.invars), **eqn.params)
        for eqn in body
        if eqn.primitive.name not in passed
    )

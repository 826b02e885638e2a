"""Policies of rematerialisation, which keep activations as you choose and gathered weights never.

    jax.checkpoint(f, policy=remat_policy(base))        nn.remat(Block, policy=remat_policy(base))

    "everything"  what is costly to compute again: matrix products, convolutions, reductions, kernels, collectives
    "dots"        only matrix products without batch dims: projections, not attention scores
    "nothing"     only the inputs; all is computed again
    a policy      what that policy keeps

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

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.trees import flatten_with_path
from xlstm_jax.equations import GATHERS
from xlstm_jax.private_names import mul_p
from xlstm_jax.program_names import HOST_MEMORY

Policy = Callable[..., Any]

BLOCK_INPUT = "block_input"  # the name (``checkpoint_name``) of a wrapped module's input

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

_BASES: dict[str, Policy] = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def remat_policy(base: str | Policy | None = None, *, offload: Sequence[str] = ()) -> Policy:
    """A policy for ``jax.checkpoint`` and ``nn.remat`` that never keeps a gathered weight (see the top of this file).

    >>> block = nn.remat(shard_module_params(nn.Dense, "fsdp"), policy=remat_policy("dots"))(32)
    >>> block.init_with_output(jax.random.key(0), jnp.ones((8, 16)))[0].shape  # what is kept changes no value
    (8, 32)

    Args:
      base: what is kept of all other values: "everything" (also None), "dots", "nothing", or a policy, as those of
        ``jax.checkpoint_policies``. A policy that keeps values by name (``jax.ad_checkpoint.checkpoint_name``) keeps
        every value of that name, also a weight.
      offload: names of values (``checkpoint_name``) that are kept in the memory of the host, until the backward pass
        needs them; with base "nothing" only these are kept. ``BLOCK_INPUT`` is the name of the input of each wrapped
        module.
    Returns:
      The same object for the same arguments: JAX compares policies by identity, and would trace again for another.
    Raises:
      ValueError: ``base`` is no such name.
      TypeError: ``offload`` is one string, and not several.
    """
    if isinstance(offload, str):
        raise TypeError(f"offload={offload!r} is one string; pass the names in a list, as [{offload!r}].")
    names = tuple(offload)
    if callable(base):
        return _policy(base, names)
    name = "everything" if base is None else base
    if not isinstance(name, str) or name not in _BASES:
        raise ValueError(f"base={base!r} is none of {', '.join(map(repr, _BASES))}, nor a policy; pass one of them.")
    return _policy(_BASES[name], names)


# One object for equal arguments, since JAX compares policies by identity.
@functools.cache
def _policy(base: Policy, offloaded: tuple[str, ...]) -> Policy:
    keep = functools.partial(_keep_but_weights, base)
    if not offloaded:
        return keep
    to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )

    def offload_or_keep(primitive: Any, *inputs: Any, **params: Any) -> Any:
        # JAX has no policy that offloads some values, by their names, and asks another one about the rest.
        goes = primitive.name == "name" and params["name"] in offloaded
        goes = goes and not _may_be_complex(primitive.name, inputs, params)
        return (to_host if goes else keep)(primitive, *inputs, **params)

    return offload_or_keep


def _keep_but_weights(base: Policy, primitive: Any, *inputs: Any, **params: Any) -> Any:
    """The answer to JAX's question whether to keep the results of an operation, for a policy ``base``."""
    name = primitive.name
    if _may_be_complex(name, inputs, params):
        return False
    if name in GATHERS or name in RECOMPUTED or _is_table(name, params) or _is_cheap_call(base, name, params):
        return False
    # A base that keeps even products of single elements keeps everything: it has not chosen this name, which may be a
    # weight's. A base that keeps this name, and not such products, has chosen it.
    if name == "name" and base(mul_p, *inputs, *inputs):
        return False
    return base(primitive, *inputs, **params)


def _may_be_complex(name: str, inputs: Sequence[Any], params: dict[str, Any]) -> bool:
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


def split_arrays(tree: PyTree, *others: type[Any]) -> tuple[dict[int, Any], Callable[[dict[int, Any]], PyTree]]:
    """The arrays of a tree by position, and a function that puts other arrays in their places; all else stays.

    Instances of the classes ``others`` count as arrays.
    """
    found, treedef = flatten_with_path(tree, lambda node: isinstance(node, others))
    leaves = [leaf for _, leaf in found]
    arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, *others))}
    # Without the arrays, since the function below keeps `rest`: a tracer in it would outlive its trace.
    rest = [None if i in arrays else leaf for i, leaf in enumerate(leaves)]
    return arrays, lambda arrays: jax.tree.unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(rest)])

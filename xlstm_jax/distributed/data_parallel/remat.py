"""Rematerialisation policies that keep chosen activations, and never gathered weights.

    jax.checkpoint(f, policy=remat_policy(base))        nn.remat(Block, policy=remat_policy(base))

    "everything"  keeps results that are costly to recompute: matrix products, convolutions, reductions, kernels,
                  collectives
    "dots"        keeps only matrix products without batch dims: projections, not attention scores
    "nothing"     keeps only the inputs; everything is recomputed
    a policy      keeps the policy's choice, except gathered weights

``regather`` lists values that are never kept, with reasons.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.regather import Policy, keeping_no_weights, may_be_complex
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.program_names import HOST_MEMORY

_BASES: dict[str, Policy] = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


def remat_policy(
    base: str | Policy | None = None, *, offload: Sequence[str] = (), gathered_over: AxisNames | tuple[()] = ()
) -> Policy:
    """Makes a policy for ``jax.checkpoint`` and ``nn.remat`` that never keeps a gathered weight.

    >>> block = nn.remat(shard_module_params(nn.Dense, "fsdp"), policy=remat_policy("dots"))(32)
    >>> block.init_with_output(jax.random.key(0), jnp.ones((8, 16)))[0].shape  # what is kept changes no value
    (8, 32)

    Results of cheap operations (casts, arithmetic) are not kept either, since they may be computed from a weight: see
    ``regather``.

    Args:
      base: which values other than weights are kept: "everything" (also ``None``), "dots", "nothing", or a policy of
        ``jax.checkpoint_policies``. A policy that keeps values by name (``jax.ad_checkpoint.checkpoint_name``) keeps
        every value of that name, also a weight.
      offload: names of values (``checkpoint_name``) to keep in host memory until the backward pass reads them;
        with base "nothing" only these values are kept. ``BLOCK_INPUT`` is the name of the input of each wrapped module.
      gathered_over: axes over which weights stay gathered until the backward pass, which then gathers over the other
        axes alone. Only axes that are gathered first are possible: the axes across hosts (``inter_host_axes``). Nothing
        is then sent between hosts a second time; in exchange each device keeps 1/n of every weight, for n devices of a
        host.
    Returns:
      The policy; the same object for equal arguments: JAX compares policies by identity, and retraces for another
      object.
    Raises:
      ValueError: ``base`` is neither a policy nor a known name.
      TypeError: ``offload`` is a string instead of a sequence of strings.
    """
    if isinstance(offload, str):
        raise TypeError(f"offload={offload!r} is one string; pass the names in a list, as [{offload!r}].")
    names, kept_axes = tuple(offload), frozenset(as_axis_names(gathered_over) if gathered_over else ())
    if callable(base):
        return _policy(base, names, kept_axes)
    name = "everything" if base is None else base
    if not isinstance(name, str) or name not in _BASES:
        raise ValueError(f"base={base!r} is none of {', '.join(map(repr, _BASES))}, nor a policy; pass one of them.")
    return _policy(_BASES[name], names, kept_axes)


# Cached, since JAX compares policies by identity.
@functools.cache
def _policy(base: Policy, offloaded: tuple[str, ...], kept_axes: frozenset[str]) -> Policy:
    """Returns the policy for ``jax.checkpoint`` that keeps the values that ``base`` keeps, but no gathered weights.

    Values with a name (``checkpoint_name``) in ``offloaded`` are kept in host memory. Results of gathers over
    ``kept_axes`` alone are kept, too. The same object is returned for equal arguments.
    """
    keep = keeping_no_weights(base, kept_axes)
    if not offloaded:
        return keep
    to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )

    def offload_or_keep(primitive: Any, *inputs: Any, **params: Any) -> Any:
        # JAX has no policy that offloads some values by name and delegates the rest to another policy.
        goes = primitive.name == "name" and params["name"] in offloaded
        goes = goes and not may_be_complex(primitive.name, inputs, params)
        return (to_host if goes else keep)(primitive, *inputs, **params)

    return offload_or_keep

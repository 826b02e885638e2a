"""The router of a mixture of experts: which experts each token goes to, and the losses that keep the choices even.

  X[n, d] -- router -->  logits[n, E] -- softmax, top k -->  experts[n, k], weights[n, k]

Each device routes its own tokens. ``load_balancing_loss`` alone communicates: shares are those of the whole batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.dtypes import common_dtype, promoting

Array = jax.Array


class Routing(NamedTuple):
    """Where tokens go: ``experts`` int32 [n, k] and ``weights`` [n, k], by the ``logits`` [n, E].

    >>> Routing(experts=jnp.array([[1]]), weights=jnp.ones((1, 1)), logits=jnp.zeros((1, 2))).experts.shape
    (1, 1)
    """

    experts: Array
    weights: Array
    logits: Array


@promoting
def route_tokens(logits: Array, top_k: int, *, normalize: bool = False) -> Routing:
    """The ``top_k`` likeliest experts of each token, weighted by their probabilities.

    >>> route_tokens(jnp.log(jnp.array([[0.5, 0.1, 0.4]])), top_k=2).experts
    Array([[0, 2]], dtype=int32)

    Args:
      logits: [n, E]; softmax and weights are float32.
      top_k: 1 to E. Of experts that are equally likely the first is taken.
      normalize: divide the weights of a token by their sum (Mixtral), which is 1 for all k = E.
    Raises:
      ValueError: ``top_k`` is not between 1 and E.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"top_k={top_k} of {logits.shape[-1]} experts: a token goes to one expert at least, and to all at most."
        )
    logits = logits.astype(common_dtype(logits.dtype, jnp.float32))
    weights, experts = lax.top_k(jax.nn.softmax(logits), top_k)
    # Of the softmax over all experts, so that the router has a gradient also where one expert is taken.
    return Routing(experts, weights / weights.sum(-1, keepdims=True) if normalize else weights, logits)


@promoting
def load_balancing_loss(
    routing: Routing, batch_axes: AxisNames | tuple[()] = (), row_weights: Array | None = None
) -> Array:
    """E times the sum over experts of (share of the choices) x (mean probability): 1 where all get the same, E at most.

    Shares are those of the whole batch. The mean over the devices of what this returns is the loss of the whole batch,
    and the mean of its gradients the gradient: add it to the loss of the device as any mean over its tokens.

    >>> routing = route_tokens(jnp.zeros((4, 8)), top_k=1)  # all to the first of 8 experts, all equally likely
    >>> float(load_balancing_loss(routing))
    1.0

    Args:
      routing: of this device's tokens.
      batch_axes: all axes along which tokens differ; () outside of ``shard_map``.
      row_weights: [n], 0 for padding; means are weighted. In a loss of (sum, weight) add it times the device's weight.
    """
    n, experts = routing.logits.shape
    weights = jnp.ones(n, routing.logits.dtype) if row_weights is None else row_weights.astype(routing.logits.dtype)
    chosen = jnp.zeros(experts, weights.dtype).at[routing.experts].add(weights[:, None])
    axes = as_axis_names(batch_axes) if batch_axes else ()
    # Sums over devices of both, and no mean of the devices' shares: they may hold different weights. Types must not
    # tell that a total is equal on all devices, as it would then count once.
    sums = collectives.to_varying([chosen, weights.sum() * routing.experts.shape[1]], axes)
    chosen, total = collectives.psum(sums, [axes, axes])
    # The count of choices has no gradient; the loss acts through the probabilities.
    share = lax.stop_gradient(chosen / jnp.where(total > 0, total, 1))
    return experts * jnp.sum(share * _mean(jax.nn.softmax(routing.logits), weights))


@promoting
def router_z_loss(routing: Routing, row_weights: Array | None = None) -> Array:
    """The mean over this device's tokens of logsumexp(logits)^2, which keeps logits small; [].

    >>> routing = route_tokens(jnp.full((4, 8), 3.0) - jnp.log(8), top_k=1)
    >>> round(float(router_z_loss(routing)), 4)
    9.0
    """
    weights = jnp.ones(len(routing.logits), routing.logits.dtype) if row_weights is None else row_weights
    return _mean(jax.nn.logsumexp(routing.logits, axis=-1) ** 2, weights.astype(routing.logits.dtype))


def _mean(values: Array, weights: Array) -> Array:
    total = weights.sum()
    return jnp.tensordot(weights, values, 1) / jnp.where(total > 0, total, 1)

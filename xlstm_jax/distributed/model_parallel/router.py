"""Router of a mixture of experts: the choice of experts for each token, and the losses that balance the choices.

  X[n, d] -- router -->  logits[n, E] -- softmax, top k -->  experts[n, k], weights[n, k]

Each device routes its tokens. Only ``load_balancing_loss`` communicates: its shares are over the global batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, common_dtype, promoting

Array = jax.Array


class Routing(NamedTuple):
    """Chosen experts of each token: ``experts`` int32 [n, k] and ``weights`` [n, k], from the ``logits`` [n, E].

    ``route_tokens`` returns weights and logits in float32, or in a wider dtype of its input.

    >>> Routing(experts=jnp.array([[1]]), weights=jnp.ones((1, 1)), logits=jnp.zeros((1, 2))).experts.shape
    (1, 1)
    """

    experts: Array
    weights: Array
    logits: Array


@promoting
def route_tokens(logits: Array, top_k: int, *, normalize: bool = False) -> Routing:
    """Chooses the ``top_k`` most probable experts of each token, in this order, weighted by their probabilities.

    >>> route_tokens(jnp.log(jnp.array([[0.5, 0.1, 0.4]])), top_k=2).experts
    Array([[0, 2]], dtype=int32)

    Args:
      logits: [n, E]; softmax and weights are float32.
      top_k: 1 to E. Among experts of equal probability the first is chosen.
      normalize: divide the weights of a token by their sum (Mixtral).
    Raises:
      ValueError: ``top_k`` is not between 1 and E.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"top_k={top_k} of {logits.shape[-1]} experts: a token goes to one expert at least, and to all at most."
        )
    logits = logits.astype(common_dtype(logits.dtype, jnp.float32))
    weights, experts = lax.top_k(jax.nn.softmax(logits), top_k)
    # Weights from the softmax over all experts, so that the router has a gradient even with top_k=1.
    return Routing(experts, weights / weights.sum(-1, keepdims=True) if normalize else weights, logits)


@promoting
def load_balancing_loss(
    routing: Routing, batch_axes: AxisNames | tuple[()] = (), row_weights: Array | None = None
) -> Array:
    """Returns E times the sum over experts of (share of the choices) x (mean probability): 1 if balanced, <= E / k.

    Shares of the choices are counted over the global batch. The mean of the returned values over devices is the loss of
    the global batch, and the mean of their gradients is the gradient of this loss. So add the value to the device's
    loss like any mean over the device's tokens.

    >>> routing = route_tokens(jnp.zeros((4, 8)), top_k=1)  # all to the first of 8 experts, all equally likely
    >>> float(load_balancing_loss(routing))
    1.0

    Args:
      routing: the routing of this device's tokens.
      batch_axes: all axes along which tokens differ; () outside of ``shard_map``.
      row_weights: [n], 0 for padding; shares and means are weighted. In a loss of (sum, weight) add the value times the
        device's weight to the sum.
    """
    n, experts = routing.logits.shape
    weights = jnp.ones(n, routing.logits.dtype) if row_weights is None else row_weights.astype(routing.logits.dtype)
    chosen = jnp.zeros(experts, weights.dtype).at[routing.experts].add(weights[:, None])
    axes = as_axis_names(batch_axes) if batch_axes else ()
    # Sum counts and totals over devices, instead of averaging the devices' shares: devices may hold different weights.
    # Cast to varying first: psum counts a value that is replicated by its type only once.
    sums = collectives.to_varying([chosen, weights.sum() * routing.experts.shape[1]], axes)
    chosen, total = collectives.psum(sums, [axes, axes])
    # The count of choices has no gradient; the loss acts through the probabilities.
    share = lax.stop_gradient(chosen / jnp.where(total > 0, total, 1))
    return experts * jnp.sum(share * _mean(jax.nn.softmax(routing.logits), weights))


@promoting
def router_z_loss(routing: Routing, row_weights: Array | None = None) -> Array:
    """Returns a scalar loss that keeps logits small: the mean over this device's tokens of logsumexp(logits)^2.

    ``row_weights`` [n] weights the mean; 0 for padding.

    >>> routing = route_tokens(jnp.full((4, 8), 3.0) - jnp.log(8), top_k=1)
    >>> round(float(router_z_loss(routing)), 4)
    9.0
    """
    weights = jnp.ones(len(routing.logits), routing.logits.dtype) if row_weights is None else row_weights
    return _mean(jax.nn.logsumexp(routing.logits, axis=-1) ** 2, weights.astype(routing.logits.dtype))


def _mean(values: Array, weights: Array) -> Array:
    total = weights.sum()
    return jnp.tensordot(weights, values, 1) / jnp.where(total > 0, total, 1)

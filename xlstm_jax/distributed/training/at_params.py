"""Loss and gradients of a step's batch at other parameters, for optimizers that ask for them in their update.

  loss_at         ``value_fn`` of optax's line searches, which differentiate it
  gradients_at    ``grad_fn`` of optax's SAM

``StepOptions.updated`` passes them to the optimizer.
"""

from collections.abc import Callable
from functools import partial

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.wire.collectives import common_dtype
from xlstm_jax.distributed.optimizers.sharded_optimizer import trainable, with_trainable
from xlstm_jax.distributed.training.carries.carry import BatchResult


def loss_and_grads_at(
    like: PyTree, of_batch: Callable[[PyTree], BatchResult], params: PyTree
) -> tuple[jax.Array, PyTree]:
    """Returns (loss, gradients) of the step's batch, with the same random draws, at other ``params``.

    ``params`` and gradients are global arrays without boxes and padding, None for untrained leaves. ``like`` are the
    parameters of the state: ``params`` get their boxes. ``of_batch(boxed parameters)`` computes loss and gradients.
    """
    result = of_batch(with_trainable(like, params))
    return result.loss, trainable(result.grads)


LossAndGrads = Callable[[PyTree], tuple[jax.Array, PyTree]]


def gradients_at(again: LossAndGrads, params: PyTree, index: jax.Array | int = 0) -> PyTree:
    """Returns the gradients at ``params``, for optax's SAM (``opaque_mode=True``).

    ``again(params)`` returns (loss, gradients) of the step's batch. ``index``, the number of the call, has no effect:
    every adversarial step uses the batch of the step.
    """
    del index
    return again(params)[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_at(again: LossAndGrads, params: PyTree) -> jax.Array:
    """Returns the loss at ``params``, for line searches (L-BFGS), which differentiate it.

    ``again(params)`` returns (loss, gradients) of the step's batch. The function has a custom gradient rule. If JAX
    differentiated the ``shard_map``, each device would get 1/N of the cotangent, and the means inside would divide by N
    once more.
    """
    return again(params)[0]


def _loss_at_fwd(again: LossAndGrads, params: PyTree) -> tuple[jax.Array, PyTree]:
    return again(params)


def _loss_at_bwd(again: LossAndGrads, grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
    def times(grad: jax.Array) -> jax.Array:
        wide = common_dtype(grad.dtype, cotangent.dtype)
        return (grad.astype(wide) * cotangent.astype(wide)).astype(grad.dtype)

    return (jax.tree.map(times, grads),)


loss_at.defvjp(_loss_at_fwd, _loss_at_bwd)

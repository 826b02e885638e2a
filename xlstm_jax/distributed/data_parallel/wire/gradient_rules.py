"""Identities of arrays around a gather, with gradients of their own, for leaves that gathers alone would falsify.

  with_summed_gradient   before a gather over axes over which the model itself splits the leaf: the gradient becomes a
                         sum over the axes of the batch, where the gradient of a gather is a mean
  with_equal_type        after a gather that yields equal values along axes: the type says so

``leaf.gather_leaf`` calls them.
"""

from functools import partial

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS


def with_summed_gradient(shard: jax.Array, model_axes: tuple[str, ...], path: str) -> jax.Array:
    """Returns the shard with a gradient that is multiplied by the number of devices along batch axes in ``model_axes``.

    ``model_axes`` are the axes of a gather over which the model itself splits the leaf at ``path``; only a user's code
    gathers over such axes. Batch axes are the axes over which the batch of the running loss is split. The gradient of
    the gather is a mean over the axes. ``sync_gradients`` expects a sum over the axes of the batch, and divides the
    sum; the factor makes the mean a sum. If no loss of ``training.value_and_grad`` is running, the backward pass raises
    a ``ValueError``. If all ``model_axes`` have size 1, the shard is returned unchanged.
    """
    model_axes = collectives.spread_axes(model_axes)
    return _with_summed_gradient(shard, model_axes, RUNNING_LOSS.get().axes, path) if model_axes else shard


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _with_summed_gradient(
    shard: jax.Array, model_axes: tuple[str, ...], batch_axes: tuple[str, ...], path: str
) -> jax.Array:
    return shard


def _with_summed_gradient_bwd(
    model_axes: tuple[str, ...], batch_axes: tuple[str, ...], path: str, residual: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    if not batch_axes:
        raise ValueError(
            f"the model itself splits {f'{path!r}' if path else 'a parameter'} over {model_axes}, by its box, and a "
            "gather over these axes is differentiated: sync_gradients would treat the mean of gradients as a sum. Take "
            "the gradient by training.value_and_grad."
        )
    return (cotangent * collectives.axis_size([axis for axis in model_axes if axis in batch_axes]),)


_with_summed_gradient.defvjp(lambda shard, model_axes, batch_axes, path: (shard, None), _with_summed_gradient_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_equal_type(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns ``value``, a gathered array, with the type "equal along ``axes``"; the gradient is unchanged.

    The caller knows that ``value`` is equal on all devices along ``axes``; the type of a gather's result still says
    that the value varies. In the backward pass the gradient, equal along ``axes`` too, becomes varying by type.
    """
    # The sum of the first device's value and of zeros has the same bits, NaN included.
    is_first = collectives.axis_index(axes) == 0
    return collectives.all_reduce_sum(jnp.where(is_first, value, jnp.zeros_like(value)), axes)


def _with_equal_type_bwd(axes: tuple[str, ...], residual: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residual
    return (collectives.to_varying(cotangent, axes),)


with_equal_type.defvjp(lambda value, axes: (with_equal_type(value, axes), None), _with_equal_type_bwd)

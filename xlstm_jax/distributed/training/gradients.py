"""Gradients of the mean over all devices, inside ``shard_map``, right in both ``check_vma`` modes.

Weighting. A loss is the mean over this device's examples, and the gradient the mean over devices of its gradient. Where
devices hold different weights (tokens), the loss function returns (sum, weight) instead. With W the weight on all N
devices, each differentiates sum * N / W: the mean of that over devices is the global weighted mean, and every number
that is scattered stays of the size of a mean. Minibatches j combine as sum_j W_j g_j / sum_j W_j.

Types. Under ``check_vma=True`` JAX sums the cotangent of a leaf over every axis that the leaf does not vary over.
Parameters are therefore cast to varying before they are differentiated: what comes back is each device's own gradient,
as under ``check_vma=False``, and one mean serves both modes.

Accumulation. Over m minibatches, with P the bytes of the split parameters, a step sends (gather twice, scatter once)

  "reduce_each"           m * 3P                 memory: that of one minibatch
  "reduce_once"           2P                     all weights and their gradients whole on every device
  "reduce_replicas_once"  m * 3P, and the reduction over the copies of the shards once instead of m times
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.boxes import copied_axes, leaf_value, rebox, split_differentiable
from xlstm_jax.distributed.data_parallel.communication import wide_dtype
from xlstm_jax.distributed.data_parallel.gather import sync_gradients

LossFn = Callable[..., Any]


def fold_rng_over_axis(rng: jax.Array, axis_name: AxisNames) -> jax.Array:
    """A key that differs from device to device along the axes, for dropout and the like; inside ``shard_map``.

    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="fold_rng_over_axis")
    return jax.random.fold_in(rng, collectives.axis_index(axes))


class _Share(NamedTuple):
    """What one device has of one minibatch: ``loss`` and ``grads`` whose mean over devices is the minibatch's.

    ``grads`` is a list, of the leaves that take a gradient. ``aux`` is as the loss function returned it; ``scale`` is
    the factor that made the loss out of the function's first output, and ``weight`` the minibatch's global weight.
    """

    loss: jax.Array
    grads: list[Any]
    aux: PyTree
    scale: jax.Array | float
    weight: jax.Array | float


def value_and_grad(
    loss_fn: LossFn, axis_names: AxisNames, has_aux: bool = False, *, weighted: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad`` of the loss over all devices; for use inside ``shard_map``, in either ``check_vma`` mode.

    Parameters are cast to varying before they are differentiated, so that JAX adds no sum of its own; what is split
    comes back scattered, and what is whole is averaged once. Do not call ``sync_gradients`` on the result.

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)`` -> the mean loss over this device's batch, a real scalar. With
        ``weighted``: ``(sum, weight)``, the weighted sum of losses on this device and the sum of its weights, which may
        be 0 on some devices and is a constant: no gradient flows through it. With ``has_aux`` a pair of that and
        anything.
      axis_names: all the axes along which the batch or gathered weights differ: those of the wrappers among them.
      has_aux: as in ``jax.value_and_grad``; the auxiliary output is returned as this device computed it.
      weighted: see ``loss_fn``.
    Returns:
      A function of the arguments of ``loss_fn`` that returns ``(loss, grads)``, or ``((loss, aux), grads)``: the loss,
      equal on all devices, and gradients boxed like ``params``. The gradient of the global weighted mean is 0, and so
      is the loss, where the weight is 0 everywhere. Leaves that are no floats have gradients of dtype float0.
    Raises:
      ValueError: an axis is not bound; or the type of the loss or weight shows that it was reduced over an axis
        already, or varies over one that ``axis_names`` leaves out. (Without types, under ``check_vma=False``, a loss
        averaged by ``pmean`` gives the same result.)
      TypeError: the loss function returned something else than announced.
    """
    axes = as_axis_names(axis_names)

    def value_and_grad_fn(params, *args, **kwargs):
        collectives.check_bound(axes, caller="value_and_grad")
        share = _share(loss_fn, axes, has_aux, weighted, params, *args, **kwargs)
        (loss,) = collectives.pmean([share.loss], [axes])
        grads = _synced(params, share.grads, axes)
        return ((loss, share.aux), grads) if has_aux else (loss, grads)

    return value_and_grad_fn


def _share(loss_fn, axes, has_aux, weighted, params, *args, **kwargs) -> _Share:
    live, put_back = split_differentiable(params)

    def scaled_loss(live):
        out = loss_fn(put_back(live), *args, **kwargs)
        out, aux = _pair(out, "has_aux=True", "(loss, aux)") if has_aux else (out, None)
        loss, scale, weight = _scaled(out, axes) if weighted else (out, 1, 1)
        _check_scalar(loss, has_aux, weighted)
        _check_not_reduced(loss, axes, "the loss")
        _check_axes_complete(loss, axes)
        return loss, (aux, scale, weight)

    live = _varying(live, axes)
    (loss, (aux, scale, weight)), grads = jax.value_and_grad(scaled_loss, has_aux=True)(live)
    return _Share(loss, grads, aux, scale, weight)


def _scaled(out: Any, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sum, weight) -> (sum * N / W, N / W, W), W being the weight on all devices."""
    total, weight = _pair(out, "weighted=True", "(sum, weight)")
    if isinstance(weight, jax.core.Tracer):
        _check_not_reduced(weight, axes, "the weight")
    local = jax.lax.stop_gradient(jnp.asarray(weight, wide_dtype(jnp.result_type(total))))
    (weight,) = collectives.psum([collectives.to_varying(local, collectives.spread_axes(axes))], [axes])
    scale = jnp.where(weight != 0, collectives.axis_size(axes) / jnp.where(weight != 0, weight, 1), 0)
    return total * scale.astype(jnp.result_type(total)), scale, weight


def _pair(out: Any, option: str, what: str) -> tuple[Any, Any]:
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(f"{option}: loss_fn must return {what}, not {type(out).__name__}.")
    return tuple(out)


def _check_scalar(loss: Any, has_aux: bool, weighted: bool) -> None:
    if isinstance(loss, tuple | list | dict) or np.shape(loss) != ():
        raise TypeError(
            f"loss_fn returned {jax.tree.map(jax.typeof, loss)} where a scalar loss is expected, with {has_aux=} and "
            f"{weighted=}. A pair (loss, aux) needs has_aux=True, a pair (sum, weight) weighted=True."
        )


def _check_axes_complete(loss: jax.Array, axes: tuple[str, ...]) -> None:
    """Raises where the type of the loss varies over an axis that is not averaged over.

    JAX sums the gradient of a parameter over axes that the parameter does not vary over, so that of a whole leaf would
    come back multiplied by the size of that axis.
    """
    for axis in sorted(collectives.varying_axes(loss) - set(axes)):
        size = collectives.axis_size([axis])
        if size > 1:
            raise ValueError(
                f"the loss varies over {axis!r}, which the axes to average over, {axes}, leave out: gradients of whole "
                f"leaves would be summed over its {size} devices. Name all axes along which the batch or gathered "
                f"weights differ, or reduce over {axis!r} in the model (tensor parallel)."
            )


def _check_not_reduced(value: jax.Array, axes: tuple[str, ...], what: str) -> None:
    """Raises where the type of ``value`` shows that it is the same on all devices along one of the axes."""
    for axis in axes:
        tracked = collectives.axis_size([axis]) > 1 and collectives.is_tracked(axis)
        if tracked and axis not in collectives.varying_axes(value):
            raise ValueError(
                f"{what} that loss_fn returned does not vary over {axis!r} (its type is {jax.typeof(value)}): it was "
                "reduced over that axis already, or does not depend on parameters and batch at all. Return this "
                "device's own value; it is averaged over the axes here. (Pass a constant weight as a Python number.)"
            )


def _synced(params: PyTree, grads: list[Any], axes: tuple[str, ...]) -> PyTree:
    """Gradients averaged over devices in the tree of ``params``, with float0 for leaves that take none."""
    _, put_back = split_differentiable(params)
    return put_back(sync_gradients(grads, axes), rest=_no_gradient)


def _no_gradient(leaf: Any) -> Any:
    return rebox(leaf, np.zeros(np.shape(leaf_value(leaf)), jax.dtypes.float0))


def _varying(live: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """Leaves cast to varying over the axes, except over those of their copies: that cast stands within the gather."""

    def cast(leaf):
        return collectives.to_varying(leaf, [a for a in collectives.spread_axes(axes) if a not in copied_axes(leaf)])

    return [cast(leaf) for leaf in live]

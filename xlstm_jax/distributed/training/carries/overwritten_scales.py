"""Carry for ``_overwrite_with_gradient``, the collection whose gradient is its next value (a Flax convention).

The collection contains the scales of fp8 products and histories of their largest magnitudes (``flax.linen.fp8_ops``).
The next value is the maximum over devices. Some histories record gradients of outputs, which must be as large as on a
single device with the full batch: each of N devices therefore differentiates its term of the global mean, 1/N of the
local mean.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Self

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.distributed.training.carries.carry import Inputs
from xlstm_jax.distributed.training.carries.collection_carry import CollectionCarry
from xlstm_jax.distributed.training.gradients import LocalResult, Loss


class OverwrittenScales(CollectionCarry):
    """Carry for the scales of fp8 products."""

    overwritten = (OVERWRITTEN,)

    @classmethod
    def from_inputs(cls, inputs: Inputs) -> Self | None:
        if OVERWRITTEN not in inputs.collections:
            return None
        return cls({OVERWRITTEN: inputs.collections[OVERWRITTEN]}, inputs.axes, inputs.read_later)

    def differentiating(self, local_result: Callable[..., LocalResult]) -> Callable[..., LocalResult]:
        return partial(_with_scales, local_result)


def _with_scales(
    local_result: Callable[..., LocalResult],
    loss_fn: Callable[..., Loss],
    weights: PyTree,
    axes: tuple[str, ...],
    *rest: PyTree,
) -> LocalResult:
    """Differentiates ``loss_fn(weights, *rest)`` with respect to the weights and the fp8 scales.

    Returns the ``LocalResult`` for the weights, with loss and gradients of the local mean on this device, as
    ``local_result(loss_fn, weights, axes, *rest)`` returns them, and with new scales among its updated collections. The
    new value of a scale is its gradient, as the maximum over the devices along ``axes``. ``rest[-1]`` are the
    collections before, the scales among them.
    """
    *rest_args, collections = rest
    count, devices = len(trees.split_differentiable(weights)[0]), collectives.axis_size(axes)

    def loss(both: tuple[PyTree, PyTree]) -> Loss:
        return loss_fn(both[0], *rest_args, {**collections, OVERWRITTEN: both[1]})

    # Divide the loss by N first, so that gradients of outputs are as large as on one device.
    local = local_result(loss, (weights, collections[OVERWRITTEN]), axes, devices=devices)
    # Multiply by N again: callers expect the local mean.
    loss_of_device, grads = jax.tree.map(lambda x: x * devices, (local.loss, local.grads[:count]))
    leaves, put_back = trees.split_differentiable(collections[OVERWRITTEN])
    scales = trees.stored_values(local.grads[count:])
    largest = collectives.all_reduce(["max"] * len(scales), scales, axes)
    overwritten = {OVERWRITTEN: put_back(map(rebox, leaves, largest))}
    updated = {**local.collections, **overwritten} if isinstance(local.collections, Mapping) else local.collections
    return local._replace(loss=loss_of_device, grads=grads, collections=updated)

"""Collections whose gradient is their next value: the scales of Flax's fp8 products, and their histories.

  loss_fn(params, batch, rng, {"_overwrite_with_gradient": scales, ...})
  d loss / d scales   -->   the next scales: the largest of all devices

By Flax's convention (``flax.linen.fp8_ops``) the backward pass of a product does not return the gradient of its scales,
but their next values, and the next history of largest magnitudes: of inputs, kernels, and gradients of outputs. The
gradients of outputs must have the size that they have on one device with the whole batch. Each of N devices therefore
differentiates its term of the global mean, 1/N of its own mean.
"""

from collections.abc import Callable, Mapping

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.gradients import LocalResult, local_result
from xlstm_jax.distributed.training.loss import Loss

OVERWRITTEN = "_overwrite_with_gradient"


def overwriting_result(
    loss_fn: Callable[..., Loss], weights: PyTree, rest: tuple[PyTree, ...], axes: tuple[str, ...]
) -> LocalResult:
    """``local_result`` of ``loss_fn(weights, *rest)``, where ``rest[-1]`` has the collection ``OVERWRITTEN``."""
    *others, collections = rest
    count, devices = len(trees.split_differentiable(weights)[0]), collectives.axis_size(axes)

    def loss(both: tuple[PyTree, PyTree]) -> Loss:
        return loss_fn(both[0], *others, {**collections, OVERWRITTEN: both[1]})

    both = weights, collections[OVERWRITTEN]
    local = local_result(loss, both, axes, devices)
    loss_of_device, grads = jax.tree.map(lambda x: x * devices, (local.loss, local.grads[:count]))
    live, put_back = trees.split_differentiable(collections[OVERWRITTEN])
    found = [leaf_of(leaf).value for leaf in local.grads[count:]]
    largest = collectives.all_reduce(["max"] * len(found), found, axes)
    overwritten = {OVERWRITTEN: put_back(map(rebox, live, largest))}
    updated = {**local.collections, **overwritten} if isinstance(local.collections, Mapping) else local.collections
    return local._replace(loss=loss_of_device, grads=grads, collections=updated)

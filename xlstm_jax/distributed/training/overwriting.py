"""Collections of which the gradient is the next value: the scales of Flax's fp8 products, and their histories.

  loss_fn(params, batch, rng, {"_overwrite_with_gradient": scales, ...})
  d loss / d scales   -->   the next scales: the largest of all devices

By Flax's convention (``flax.linen.fp8_ops``) the backward pass of a product returns, in place of a gradient, the scale
and the history of largest magnitudes that follow: of inputs, of kernels, and of the gradients of outputs. The last are
those of one device on the whole batch only where devices differentiate their terms of the mean over all of them, and
not their own means, which are N times as large on N devices.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.gradients import LocalResult, local_result

OVERWRITTEN = "_overwrite_with_gradient"


def overwriting_result(
    loss_fn: Callable[..., Any],
    weights: PyTree,
    rest: tuple[PyTree, ...],
    axes: tuple[str, ...],
    has_aux: bool,
    weighted: bool,
) -> LocalResult:
    """``local_result`` of ``loss_fn(weights, *rest)``; collections, the last of ``rest``, have ``OVERWRITTEN``."""
    *others, collections = rest
    count, devices = len(trees.split_differentiable(weights)[0]), collectives.axis_size(axes)

    def loss(both: tuple[PyTree, PyTree]) -> Any:
        return loss_fn(both[0], *others, {**collections, OVERWRITTEN: both[1]})

    both = weights, collections[OVERWRITTEN]
    local = local_result(loss, both, axes, has_aux, weighted, True, devices=devices)
    loss_of_device, grads = jax.tree.map(lambda x: x * devices, (local.loss, local.grads[:count]))
    live, put_back = trees.split_differentiable(collections[OVERWRITTEN])
    found = [leaf_of(leaf).value for leaf in local.grads[count:]]
    largest = collectives.all_reduce(["max"] * len(found), found, axes)
    overwritten = {OVERWRITTEN: put_back(map(rebox, live, largest))}
    updated = {**local.collections, **overwritten} if isinstance(local.collections, Mapping) else local.collections
    return local._replace(loss=loss_of_device, grads=grads, collections=updated)

"""The gradient of a batch, minibatch after minibatch, inside ``shard_map``.

weights        the parameters, or what was gathered of them once: by one of the ``strategies``
minibatch j    its loss and its gradient g_j with respect to the weights; its weight W_j
mean           sum_j W_j g_j / sum_j W_j, in float32 or wider
gradients      made of that mean by the strategy; those of whole leaves are then averaged over devices
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import rebox, split_by_model
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.communication import wide_dtype
from xlstm_jax.distributed.training.auxiliary import Auxiliary
from xlstm_jax.distributed.training.branches import check_branches
from xlstm_jax.distributed.training.checking.arguments import check_batch
from xlstm_jax.distributed.training.checking.collections import readable, updated_collections
from xlstm_jax.distributed.training.checking.mistakes import warn_of_averages
from xlstm_jax.distributed.training.gradients import LossOutput, averaged, local_result
from xlstm_jax.distributed.training.overwriting import OVERWRITTEN, overwriting_result
from xlstm_jax.distributed.training.strategies import DEFAULT_ACCUMULATION, STRATEGIES

ACCUMULATION = tuple(STRATEGIES)


class MinibatchLoss(Protocol):
    """The loss of a minibatch; ``rng`` is None where ``accumulate_gradients`` was given none."""

    def __call__(self, params: PyTree, minibatch: PyTree, rng: PyTree, /) -> LossOutput: ...


class MinibatchLossWithCollections(Protocol):
    """The same, and collections, where ``accumulate_gradients`` was given some."""

    def __call__(
        self, params: PyTree, minibatch: PyTree, rng: PyTree, collections: PyTree, /
    ) -> tuple[LossOutput, PyTree]: ...


MinibatchLossFn = MinibatchLoss | MinibatchLossWithCollections


def accumulate_gradients(
    loss_fn: MinibatchLossFn,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    axis_names: AxisNames,
    num_minibatches: int = 1,
    *,
    accumulation: str = DEFAULT_ACCUMULATION,
    has_aux: bool = False,
    weighted: bool = False,
    fold_aux: Callable[[PyTree, PyTree], PyTree] | None = None,
    carry: PyTree = None,
    collections: Mapping[str, PyTree] | None = None,
) -> tuple[Any, ...]:
    """Loss and gradient of the whole batch, also where the weights of minibatches differ; inside ``shard_map``.

    >>> loss_fn = lambda w, minibatch, rng: jnp.mean(w * minibatch)
    >>> step = lambda w, x: accumulate_gradients(loss_fn, w, x, None, "fsdp", num_minibatches=2)
    >>> over_devices = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("fsdp")), out_specs=jax.P())
    >>> over_devices(jnp.float32(2), jnp.arange(8.0))  # of all 8 values, one for each minibatch of a device
    (Array(7., dtype=float32), Array(3.5, dtype=float32))

    Args:
      loss_fn: ``loss_fn(params, minibatch, rng)``, returning what ``value_and_grad`` asks for.
      params, axis_names, weighted: as in ``value_and_grad``.
      batch: leaves [b, ...], b being the number of examples on this device, and scalars, which every minibatch gets.
      rng: a key, folded with the index of the minibatch where there are several; None is passed on.
      num_minibatches: m, which must divide b.
      accumulation: when gradients are reduced over devices, for the same result. "reduce_each": in every minibatch.
        "reduce_once": after the last, and parameters are gathered before the first; that saves (m - 1) / m of the
        traffic and holds all weights and their float32 gradients whole. "reduce_replicas_once": in every minibatch, but
        over copies of the shards (``Replicas``) after the last.
      has_aux: the auxiliary output is then a tree. Floats and bools in it are averaged like the loss: over minibatches
        and devices, and with ``weighted`` as sums over the global weight. A cell (``metrics.Count``, ``Total``,
        ``Maximum``, ``Minimum``) is merged instead, and its value returned: ``{"tokens": Count.of(mask)}``.
      fold_aux, carry: with ``has_aux``, instead of averaging: ``carry = fold_aux(carry, aux)`` after every minibatch,
        on this device alone (the state of a metric, say). The carry varies over the axes by type, and keeps its types.
      collections: what the model keeps beside parameters, as ``{"batch_stats": ...}``: the same on all devices. The
        loss function is then ``loss_fn(params, minibatch, rng, collections)``, and returns a pair of what is said above
        and the updated ones, with which the next minibatch goes on. One that it leaves out stays. Of the collection
        "_overwrite_with_gradient" (scales of Flax's fp8 products) the gradient is the next value, the largest of all
        devices.
    Returns:
      ``(loss, grads)``, or ``((loss, aux), grads)``, equal on all devices but for what is split; the carry in place of
      ``aux`` where there is ``fold_aux``. With collections they come third, ``(loss, grads, collections)``.
    Raises:
      ValueError: m does not divide b, or leaves differ in b (names leaf and both numbers); or ``accumulation`` is
        unknown, or does not fit the parameters: "reduce_once" needs boxes that say in what dtype to gather,
        "reduce_replicas_once" needs copies; or a collection would differ between devices, or has changed its shape.
      TypeError: an integer in the auxiliary output, of which an average is hardly meant; names it.
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="accumulate_gradients")
    check_options(num_minibatches, accumulation)
    strategy = STRATEGIES[accumulation if num_minibatches > 1 else DEFAULT_ACCUMULATION]
    own = trees.map_leaves(split_by_model, params)
    weights = strategy.weights(own, axes)
    check_batch(batch, num_minibatches, f"{num_minibatches=}")
    minibatches = jax.tree.map(lambda x: _split_rows(x, num_minibatches), batch)

    def on_minibatch(index: Any, carried: tuple[PyTree, ...]) -> tuple[_OfMinibatch, tuple[PyTree, ...]]:
        carry, *kept = carried
        minibatch = jax.tree.map(lambda x: x[index] if np.ndim(x) else x, minibatches)
        key = rng if rng is None or num_minibatches == 1 else jax.random.fold_in(rng, index)
        rest, loss = (minibatch, key, *kept), cast(Callable[..., Any], loss_fn)
        if kept and OVERWRITTEN in kept[0]:
            local = overwriting_result(loss, weights, rest, axes, has_aux, weighted)
        else:
            local = local_result(lambda weights: loss(weights, *rest), weights, axes, has_aux, weighted, bool(kept))
        check_branches(local.gathered_in_branches, loss, (weights, *rest), axes)
        if kept:
            kept = [updated_collections(loss, (weights, *rest), local.collections, axes)]
        if fold_aux is not None:
            carry, local = fold_aux(carry, local.aux), local._replace(aux=None)
        aux = Auxiliary.of(local.aux).scaled(local.scale)
        if has_aux and fold_aux is None:

            def floats(weights: PyTree) -> list[Any]:
                found = loss(weights, *rest)
                return Auxiliary.of((found[0] if kept else found)[1]).means

            count = collectives.axis_size(axes) * num_minibatches
            warn_of_averages(aux.mean_paths, count, weighted, lambda: jax.make_jaxpr(floats)(weights))
        # All values vary over all axes by type, for a scan to carry them.
        loss, aux = collectives.to_varying((local.loss, aux), collectives.spread_axes(axes))
        return _OfMinibatch(((loss, aux.means), local.grads), local.weight, aux.replace(means=[])), (carry, *kept)

    start = (carry, readable(collections)) if collections else (carry,)
    (((loss, means), mean_grads), _, aux), (carry, *kept) = _mean_over(on_minibatch, num_minibatches, start)
    loss, reported = aux.replace(means=means).over_devices(loss, axes)
    grads = averaged(strategy.gradients(mean_grads, own, axes), params, axes)
    found = (loss, reported if fold_aux is None else carry) if has_aux else loss
    kept = [trees.map_leaves(rebox, collections, trees.stored_values(updated)) for updated in kept]
    return (found, grads, *kept)


class _OfMinibatch(NamedTuple):
    """What one minibatch, or all of them, come to on this device."""

    means: Any  # (values, gradients), the means over the examples
    weight: Any
    aux: Auxiliary  # without ``means``, which are among the values


def _split_rows(x: Any, m: int) -> Any:
    """[b, ...] -> [m, b / m, ...]; a scalar stays one."""
    return jnp.reshape(x, (m, np.shape(x)[0] // m, *np.shape(x)[1:])) if np.ndim(x) else x


def _mean_over(
    on_minibatch: Callable[[Any, PyTree], tuple[_OfMinibatch, PyTree]], count: int, carry: PyTree
) -> tuple[_OfMinibatch, PyTree]:
    """The mean by weight of what ``on_minibatch(i, carry)`` returns for i < count; 0 where there is no weight.

    Sums run in float32 or wider. The mean of gradients stays so; other values come back in their dtypes.
    """
    if count == 1:
        return on_minibatch(0, carry)

    def add(total: Any, index: jax.Array) -> tuple[Any, Auxiliary]:
        (sums, weights), carry = total
        (values, weight, aux), carry = on_minibatch(index, carry)
        sums = jax.tree.map(lambda sum_, x: sum_ + x.astype(sum_.dtype) * jnp.asarray(weight, sum_.dtype), sums, values)
        return ((sums, weights + weight), carry), aux

    like, _ = jax.eval_shape(on_minibatch, jnp.int32(0), carry)
    zeros = jax.tree.map(lambda x: collectives.zeros_of_type(x, wide_dtype(x.dtype)), (like.means, like.weight))
    ((sums, weight), carry), aux = jax.lax.scan(add, (zeros, carry), jnp.arange(count, dtype=jnp.int32))
    weight = jnp.where(weight != 0, weight, 1)
    values, grads = jax.tree.map(lambda sum_: sum_ / weight, sums)
    values = jax.tree.map(lambda value, x: value.astype(x.dtype), values, like.means[0])
    return _OfMinibatch((values, grads), weight, aux.merged()), carry


def check_options(num_minibatches: Any, accumulation: str) -> None:
    """Raises a ``ValueError`` where there is no such number of minibatches, or no such strategy."""
    if not isinstance(num_minibatches, int | np.integer) or num_minibatches < 1:
        raise ValueError(f"num_minibatches={num_minibatches!r} is not a positive integer.")
    if accumulation not in ACCUMULATION:
        raise ValueError(f"accumulation={accumulation!r} is none of {ACCUMULATION}.")

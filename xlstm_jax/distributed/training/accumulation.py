"""Gradients over minibatches, one after the other; inside ``shard_map``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.boxes import (
    Sharded,
    is_box,
    leaf_axes,
    leaf_communication,
    leaf_value,
    leaves_with_path,
    map_leaves,
    map_leaves_with_path,
    rebox,
    split_differentiable,
    with_communication,
)
from xlstm_jax.distributed.data_parallel.communication import dtype_name, wide_dtype
from xlstm_jax.distributed.data_parallel.gather import gather_params, reduce_over_replicas
from xlstm_jax.distributed.training.gradients import LossFn, _share, _synced, _varying

ACCUMULATION = ("reduce_each", "reduce_once", "reduce_replicas_once")


def accumulate_gradients(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    rng: jax.Array | None,
    axis_names: AxisNames,
    num_minibatches: int = 1,
    *,
    accumulation: str = ACCUMULATION[0],
    has_aux: bool = False,
    weighted: bool = False,
    fold_aux: Callable[[PyTree, PyTree], PyTree] | None = None,
    carry: PyTree = None,
) -> tuple[Any, PyTree]:
    """Loss and gradient of the whole batch, computed on one minibatch after the other; inside ``shard_map``.

    Equal to the gradient of the full batch, also where minibatches hold different weights. Whole parameters are
    averaged once, at the end; when the split ones travel, ``accumulation`` says.

    Args:
      loss_fn: ``loss_fn(params, minibatch, rng)``, returning what ``value_and_grad`` asks for.
      params: the parameters, boxed where they are split.
      batch: leaves [b, ...], b being the number of examples on this device.
      rng: a key, folded with the index of the minibatch where there are several; None is passed on.
      axis_names: as in ``value_and_grad``.
      num_minibatches: m, which must divide b.
      accumulation: "reduce_each": every minibatch gathers and scatters the split parameters, and memory stays that of
        one. "reduce_once": they are gathered before the first and scattered after the last, in the dtypes that their
        boxes say (those of the wrapper, but from ``shard_params``, which knows of none); that saves (m - 1) / m of the
        traffic and holds all weights and their float32 gradients whole. "reduce_replicas_once": every minibatch
        gathers and scatters, and the shards' gradients are averaged over their copies (``Replicas``) after the last.
      has_aux: the auxiliary output is then a tree of numbers, averaged like the loss: over minibatches and devices, and
        with ``weighted`` as sums over the global weight.
      weighted: as in ``value_and_grad``.
      fold_aux, carry: with ``has_aux``, what to do with the auxiliary output instead of averaging it: ``carry =
        fold_aux(carry, aux)`` after every minibatch, on this device alone (the state of a metric, say). The carry must
        vary over the axes by type, and keeps its types.
    Returns:
      ``(loss, grads)``, or ``((loss, aux), grads)``, equal on all devices but for what is split; the carry in place of
      ``aux`` where there is ``fold_aux``.
    Raises:
      ValueError: m does not divide b; names the leaf and both numbers, so that no example is dropped in silence. Or
        ``accumulation`` is unknown, or does not fit the parameters: a leaf that is boxed without a word on how it
        travels, for "reduce_once", or no copies at all, for "reduce_replicas_once".
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="accumulate_gradients")
    check_count(num_minibatches)
    check_accumulation(accumulation)
    used, reduce = _REDUCE[accumulation if num_minibatches > 1 else ACCUMULATION[0]](params, axes)
    minibatches = split_batch(batch, num_minibatches)

    def part(index, carry):
        """(loss, aux), grads and weight of a minibatch; all values vary over all axes, for a scan to carry them."""
        minibatch = jax.tree.map(lambda x: x[index], minibatches)
        folded = rng if rng is None or num_minibatches == 1 else jax.random.fold_in(rng, index)
        share = _share(loss_fn, axes, has_aux, weighted, used, minibatch, folded)
        if fold_aux is not None:
            carry, share = fold_aux(carry, share.aux), share._replace(aux=None)
        aux = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.promote_types(jnp.result_type(a), jnp.float32)) * share.scale, share.aux
        )
        return (
            (collectives.to_varying((share.loss, aux), collectives.spread_axes(axes)), share.grads),
            share.weight,
        ), carry

    ((loss, aux), grads), carry = _mean_over(part, num_minibatches, carry)
    aux_leaves, aux_tree = jax.tree.flatten(aux)
    loss, *aux_leaves = collectives.pmean([loss, *aux_leaves], [axes] * (1 + len(aux_leaves)))
    grads = _synced(params, reduce(grads), axes)
    aux = carry if fold_aux is not None else jax.tree.unflatten(aux_tree, aux_leaves)
    return ((loss, aux), grads) if has_aux else (loss, grads)


def _mean_over(part: Callable[..., Any], count: int, carry: PyTree) -> tuple[PyTree, PyTree]:
    """The mean of values over i < count, ``part(i, carry) -> ((values, weight), carry)``; 0 without weight."""
    if count == 1:
        (values, _), carry = part(0, carry)
        return values, carry

    def add(total, index):
        (sums, weights), carry = total
        (values, weight), carry = part(index, carry)
        sums = jax.tree.map(lambda sum_, x: sum_ + x.astype(sum_.dtype) * jnp.asarray(weight, sum_.dtype), sums, values)
        return ((sums, weights + weight), carry), None

    like, _ = jax.eval_shape(part, jnp.int32(0), carry)
    zeros = jax.tree.map(lambda x: collectives.zeros_of_type(x, wide_dtype(x.dtype)), like)
    ((sums, weight), carry), _ = jax.lax.scan(add, (zeros, carry), jnp.arange(count, dtype=jnp.int32))
    weight = jnp.where(weight != 0, weight, 1)
    (sums, grads), (like, _) = sums, like[0]
    mean = jax.tree.map(lambda sum_, x: (sum_ / weight).astype(x.dtype), sums, like)
    return (mean, jax.tree.map(lambda sum_: sum_ / weight, grads)), carry


def _scattered(params: PyTree, axes: tuple[str, ...]) -> tuple[PyTree, Callable[[list[Any]], list[Any]]]:
    """What minibatches differentiate by in each mode, and how their mean gradient gets the type of the parameters."""
    del axes
    live, _ = split_differentiable(params)
    return params, lambda grads: [
        rebox(p, leaf_value(g).astype(leaf_value(p).dtype)) for p, g in zip(live, grads, strict=True)
    ]


def _gathered_once(params: PyTree, axes: tuple[str, ...]) -> tuple[PyTree, Callable[[list[Any]], list[Any]]]:
    """All parameters, gathered; and the transpose of that gather, for mean gradients that are not narrowed before."""
    for path, leaf in leaves_with_path(params):
        if is_box(leaf) and not isinstance(leaf, Sharded) and set(leaf_axes(leaf)) & set(axes):
            raise ValueError(
                f"accumulation='reduce_once' gathers '{path}' itself, and its box, {type(leaf).__name__}, does not say "
                "in what dtype. Initialise with init_sharded, or use accumulation='reduce_each'."
            )
    used = gather_params(params, axes)
    live = _varying(split_differentiable(params)[0], axes)
    dtypes = [wide_dtype(leaf_value(leaf).dtype) for leaf in split_differentiable(used)[0]]
    wide = [with_communication(leaf, gather_dtype=dtype_name(dtype)) for leaf, dtype in zip(live, dtypes, strict=True)]

    def reduce(grads):
        out, pull = jax.vjp(lambda live: gather_params(live, axes), wide)
        cotangents = [
            rebox(like, leaf_value(g).astype(leaf_value(like).dtype)) for g, like in zip(grads, out, strict=True)
        ]
        (reduced,) = pull(cotangents)
        return [rebox(leaf, leaf_value(grad)) for leaf, grad in zip(live, reduced, strict=True)]

    return used, reduce


def _replicas_last(params: PyTree, axes: tuple[str, ...]) -> tuple[PyTree, Callable[[list[Any]], list[Any]]]:
    """The parameters without a word of their copies; and the reduction over these."""
    live, _ = split_differentiable(params)
    copies = [leaf_communication(leaf).replicas for leaf in live]
    if not any(copies):
        raise ValueError(
            "accumulation='reduce_replicas_once': no parameter has copies along slower axes. Wrap with "
            "shard_module_params(..., replicas=Replicas('dp')), or use accumulation='reduce_each'."
        )

    def reduce(grads):
        values = [leaf_value(grad) for grad in grads]
        reduced = [reduce_over_replicas(g, over) if over else g for g, over in zip(values, copies, strict=True)]
        return _scattered(params, axes)[1](reduced)

    return map_leaves(lambda leaf: with_communication(leaf, replicas=None), params), reduce


_REDUCE = dict(zip(ACCUMULATION, (_scattered, _gathered_once, _replicas_last), strict=True))


def split_batch(batch: PyTree, num_minibatches: int) -> PyTree:
    """Reshapes every leaf [b, ...] to [m, b / m, ...], index i being minibatch i in the original order.

    Raises:
      ValueError: names the first leaf that ``num_minibatches`` does not divide.
    """

    def split(path, x):
        check_divides(f"batch['{path}']", np.shape(x), num_minibatches, f"num_minibatches={num_minibatches}")
        return jnp.reshape(x, (num_minibatches, x.shape[0] // num_minibatches, *x.shape[1:]))

    return map_leaves_with_path(split, batch)


def check_count(num_minibatches: Any) -> None:
    """Raises a ``ValueError`` where ``num_minibatches`` is not a positive integer."""
    if not isinstance(num_minibatches, int | np.integer) or num_minibatches < 1:
        raise ValueError(f"num_minibatches={num_minibatches!r} is not a positive integer.")


def check_accumulation(accumulation: Any) -> None:
    """Raises a ``ValueError`` where ``accumulation`` is none of the modes."""
    if accumulation not in ACCUMULATION:
        raise ValueError(f"accumulation={accumulation!r} is none of {ACCUMULATION}.")


def check_divides(name: str, shape: tuple[int, ...], parts: int, divisor: str) -> None:
    """Raises a ``ValueError`` with name, both numbers and cure, where ``parts`` does not divide the leading dim."""
    if not shape:
        raise ValueError(f"{name} is a scalar; every leaf of a batch has the examples as its leading dim.")
    examples, rest = shape[0], shape[0] % parts
    if examples == 0:
        raise ValueError(f"{name} of shape {shape} holds no examples; the mean over none is not a number.")
    if rest:
        raise ValueError(
            f"{name} of shape {shape} holds {examples} examples, which {divisor} does not divide; the last {rest} "
            f"would be dropped. Pad the batch to {examples - rest + parts} examples (with weight 0, weighted=True), or "
            f"choose a divisor of {examples}."
        )

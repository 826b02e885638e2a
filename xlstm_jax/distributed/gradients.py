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
from xlstm_jax.distributed import collectives
from xlstm_jax.distributed.data_parallel import sync_gradients
from xlstm_jax.distributed.parameters import gather_params, reduce_over_replicas
from xlstm_jax.distributed.partitioning import (
    Sharded,
    as_axis_names,
    copied_axes,
    dtype_name,
    is_box,
    leaf_axes,
    leaf_value,
    leaf_wire,
    leaves_with_path,
    map_leaves,
    map_leaves_with_path,
    rebox,
    split_differentiable,
    wide_dtype,
    with_wire,
)

ACCUMULATION = ("reduce_each", "reduce_once", "reduce_replicas_once")

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


def _varying(live: list[Any], axes: tuple[str, ...]) -> list[Any]:
    """Leaves cast to varying over the axes, except over those of their copies: that cast stands within the gather."""

    def cast(leaf):
        return collectives.to_varying(leaf, [a for a in collectives.spread_axes(axes) if a not in copied_axes(leaf)])

    return [cast(leaf) for leaf in live]


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
    wide = [with_wire(leaf, gather_dtype=dtype_name(dtype)) for leaf, dtype in zip(live, dtypes, strict=True)]

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
    copies = [leaf_wire(leaf).replicas for leaf in live]
    if not any(copies):
        raise ValueError(
            "accumulation='reduce_replicas_once': no parameter has copies along slower axes. Wrap with "
            "shard_module_params(..., replicas=Replicas('dp')), or use accumulation='reduce_each'."
        )

    def reduce(grads):
        values = [leaf_value(grad) for grad in grads]
        reduced = [reduce_over_replicas(g, over) if over else g for g, over in zip(values, copies, strict=True)]
        return _scattered(params, axes)[1](reduced)

    return map_leaves(lambda leaf: with_wire(leaf, replicas=None), params), reduce


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

"""Parameters are gathered where they are used, and gradients are averaged: the two halves of FSDP in ``shard_map``.

  gather_params    W[d_fsdp, f]  -->  W[d, f]         all-gather, one stage for each axis
  its transpose    dW[d, f]      -->  dW[d_fsdp, f]   reduce-scatter, mean over N, then over copies of the shard
  sync_gradients   dW            -->  mean of dW      all-reduce, of leaves that stay whole; once

A box says how its leaf travels (``Communication``), so that a gather does the same wherever it is called.
"""

import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import boxes, collectives
from xlstm_jax.distributed.data_parallel.axes import AxisEntry, as_axis_names, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.communication import Communication, Replicas, cast_dtype, term_of_mean, widened


def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: AxisNames,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    replicas: Replicas | None = None,
) -> jax.Array:
    """All-gathers ``x`` along a dim; the gradient is reduce-scattered as the *mean* over the axis.

    >>> def loss(shard, x):  # of 1 value on each of 4 devices; x differs by device
    ...     return (gather_array_with_mean_grads(shard, 0, "fsdp") * x).sum()
    >>> grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))
    >>> grad(jnp.ones(4), jnp.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [1.5, 1.5, 1.5, 1.5]

    Args:
      x: this device's shard, [..., d / N, ...]. Integers and PRNG keys are gathered too, uncast and without gradient.
      axis: the dim d along which the shards are concatenated.
      axis_name: an axis or a tuple of axes, outermost first. One all-gather per axis, the innermost first.
      gather_dtype: dtype that is sent, and of the result; None: x's own. With the dtype in which the module computes
        nothing is left to cast (and to save for the backward pass).
      grad_scatter_dtype: dtype in which the gradient is summed; None: float32, or x's own where that is wider. It is
        divided by N before the sum, so that a float16 sum overflows only where the mean does. On one device nothing
        travels, and nothing is narrowed.
      replicas: other axes along which there are copies of ``x``; its gradient is then averaged over them too, after the
        scatter. Where the type of ``x`` says that the copies are equal (``check_vma=True``) it is summed, as JAX sums
        the gradient of any such value, and ``sync_gradients`` divides.
    Returns:
      [..., d, ...] in ``gather_dtype``. Its cotangent comes back as [..., d / N, ...] in x's dtype.
    Raises:
      ValueError: an axis is not bound, ``x`` has no such dim, or a dtype would make floats complex, or the reverse.
    """
    axes, how = as_axis_names(axis_name), Communication.of(gather_dtype, grad_scatter_dtype, replicas)
    collectives.check_bound(axes, caller="gather_array_with_mean_grads")
    collectives.check_bound(how.copied_axes, caller="gather_array_with_mean_grads, replicas")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"gather_array_with_mean_grads: axis={axis} is no dim of an array of shape {x.shape}.")
    how.dtypes(x)  # refused here, not in the backward pass
    return _gather(x, axis % x.ndim, axes, how)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Primal:
    """What the backward pass must know of the value that was gathered: a residual without any array in it."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x: jax.Array, dim: int, axes: tuple[str, ...], how: Communication) -> jax.Array:
    return _gather_fwd(x, dim, axes, how)[0]


def _gather_fwd(x: jax.Array, dim: int, axes: tuple[str, ...], how: Communication) -> tuple[jax.Array, _Primal]:
    primal = _Primal(x.shape, x.dtype, collectives.varying_axes(x))
    # Copies are equal by type only here: the cast to varying over them must not be JAX's, which transposes it to a sum
    # of whole gradients.
    x = collectives.to_varying(x, collectives.spread_axes(how.copied_axes))
    return collectives.all_gather(how.as_sent(x), dim, axes), primal


def _gather_bwd(
    dim: int, axes: tuple[str, ...], how: Communication, primal: _Primal, cotangent: jax.Array
) -> tuple[jax.Array | np.ndarray]:
    if cotangent.dtype == jax.dtypes.float0:
        return (np.zeros(primal.shape, jax.dtypes.float0),)
    grad = widened(cotangent)
    if collectives.spread_axes(axes):
        _, dtype = how.dtypes(primal)
        grad = collectives.reduce_scatter(term_of_mean(grad, collectives.axis_size(axes), dtype), dim, axes)
    if how.replicas:
        grad = reduce_over_replicas(grad, how.replicas, primal.varying)
    return (collectives.to_varying(grad, primal.varying).astype(primal.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def reduce_over_replicas(grad: jax.Array, replicas: Replicas, varying: Collection[str] = ()) -> jax.Array:
    """The mean of a shard's gradient over its copies, divided before it travels, in the dtype that was chosen.

    ``varying`` are the axes over which the shard varies by type. Over tracked ones that it does not vary over the
    result is the sum: JAX sums what else depends on the shard (a penalty on its values), and sums add up.
    """
    axes, wide = collectives.spread_axes(replicas.axes), widened(grad)
    if not axes:
        return wide
    dtype = cast_dtype(wide, replicas.reduce_dtype, "reduce_dtype")
    term = term_of_mean(wide, collectives.axis_size(axes), dtype)
    mean = collectives.all_reduce_sum(term, axes).astype(wide.dtype)
    summed = [axis for axis in axes if collectives.is_tracked(axis) and axis not in varying]
    return mean * collectives.axis_size(summed) if summed else mean


def gather_params(
    params: PyTree,
    axis_name: AxisNames,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
) -> PyTree:
    """Undoes ``shard_params``: all-gathers every leaf that is boxed over the axis. Call it inside ``shard_map``.

    >>> boxed = nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp"))  # the global array; a device sees [16, 8] of it
    >>> gather = lambda boxed: gather_params(boxed, "fsdp")
    >>> jax.shard_map(gather, mesh=mesh, in_specs=jax.P(None, "fsdp"), out_specs=jax.P(), check_vma=False)(boxed).shape
    (16, 32)

    Args:
      params: the tree, boxed where it is split.
      axis_name: an axis or a tuple of axes; where a leaf is split over only some of them, over those.
      gather_dtype, grad_scatter_dtype: see ``gather_array_with_mean_grads``. None: what the leaf's box says, which is
        what ``shard_module_params`` was given.
    Returns:
      The tree with whole values. A leaf that is still split over another axis stays boxed with the names that are left;
      every other comes back as a plain array, without padding. Leaves that were not split are not touched, nor cast.

      A dim split over ``("fsdp", "tp")``, gathered over "fsdp", yields the contiguous shard that ``"tp"`` alone would
      hold. Its shards lie scattered over "tp" too, so both axes travel; with "fsdp" innermost, only "fsdp" does.
    Raises:
      ValueError: an axis is not bound, or a dtype does not fit a leaf; names the leaf.
    """
    axes, given = as_axis_names(axis_name), Communication.of(gather_dtype, grad_scatter_dtype)
    collectives.check_bound(axes, caller="gather_params")

    def gather(path: str, leaf: Any) -> Any:
        if not boxes.is_box(leaf):
            return leaf
        value, names = boxes.leaf_value(leaf), list(boxes.leaf_names(leaf))
        how = given.or_else(boxes.leaf_communication(leaf))
        for dim, entry in enumerate(names):
            if set(entry_axes(entry)) & set(axes):
                collectives.check_bound(how.copied_axes, caller=f"gather_params, replicas of '{path}'")
                how.dtypes(value, path)  # refused here, with the leaf's name
                value, names[dim] = _gather_dim(value, dim, entry_axes(entry), axes, how)
                how = replace(how, replicas=None)  # once for each leaf
        sizes = boxes.true_sizes(leaf)
        whole = tuple(slice(size if entry is None else None) for size, entry in zip(sizes, names, strict=True))
        value = value[whole] if any(sizes) else value
        if not any(names):
            return value
        return boxes.PartlyGathered(value, tuple(names), communication=how, true_sizes=sizes if any(sizes) else ())

    with jax.named_scope("gather_params"):
        return boxes.map_leaves_with_path(gather, params)


def _gather_dim(
    value: jax.Array, dim: int, held: tuple[str, ...], axes: tuple[str, ...], how: Communication
) -> tuple[jax.Array, AxisEntry]:
    """Gathers one dim, split over ``held``, over those of ``axes``; returns the value and the entry that is left."""
    first = next(i for i, axis in enumerate(held) if axis in axes)
    outer, inner = held[:first], held[first:]
    kept = tuple(axis for axis in inner if axis not in axes)
    if not kept:
        return _gather(value, dim, inner, how), axes_entry(outer)
    # An axis to keep lies inside one to gather. Its shards are gathered as well (an all-gather whose transpose is a
    # sum, as they are shards and not copies), and the one that it holds by itself is cut out.
    for axis in reversed(inner):
        if axis in axes:
            value, how = _gather(value, dim, (axis,), how), replace(how, replicas=None)
        else:
            value = collectives.all_gather(value, dim, (axis,))
    return collectives.own_shard(value, dim, kept), axes_entry(outer + kept)


def sync_gradients(grads: PyTree, axis_names: AxisNames) -> PyTree:
    """Averages gradients over the data axes that their leaves are not split over.

    Call it inside ``shard_map``, on what comes straight from ``jax.grad`` of a loss that is the mean over this device's
    batch. Arrays that it has returned, or ``training.value_and_grad``, it knows again and leaves as they are.

    >>> sync = lambda grad: sync_gradients(grad, "fsdp")
    >>> grads = jnp.array([0.0, 1.0, 2.0, 3.0])  # one value on each of 4 devices
    >>> jax.shard_map(sync, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(grads).tolist()
    [1.5]

    A leaf that is split over an axis, or has copies along it (``Replicas``), was averaged over it by the transpose of
    its gather. Under ``check_vma=True`` a gradient whose type does not vary over an axis was summed over it by JAX
    (over the axis of its copies, by that transpose), and is divided; any other is averaged.

    An average has that type, too. One that has become another array since (scaled, cast, clipped, carried by a
    ``scan``) must therefore not come here again: nothing shows that it is no sum. ``training.check_step`` finds it.

    Args:
      grads: boxed where the parameters are; leaves without gradient (float0) pass.
      axis_names: all mesh axes along which the batch or gathered weights differ (those of the wrappers among them), a
        string or a sequence. An axis that is left out is not averaged over, and nothing here can notice.
    Returns:
      The tree with the same boxes and dtypes; sums run in float32 where the leaves are narrower.
    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="sync_gradients")
    live, put_back = boxes.split_differentiable(grads)
    known = [_known_averages.axes_of(boxes.leaf_value(leaf)) for leaf in live]
    done = [axes_of.union(boxes.reduced_axes(leaf)) for leaf, axes_of in zip(live, known, strict=True)]
    over = [tuple(axis for axis in axes if axis not in axes_done) for axes_done in done]
    with jax.named_scope("sync_gradients"):
        synced = collectives.pmean(list(map(_divide_summed, live, over, known)), over)
    for value, axes_done in zip(synced, done, strict=True):
        _known_averages.add(value, axes_done.union(axes))
    return put_back([boxes.rebox(leaf, value) for leaf, value in zip(live, synced, strict=True)])


def _divide_summed(leaf: Any, axes: tuple[str, ...], known: frozenset[str]) -> jax.Array:
    """A gradient divided by the sizes of the tracked axes, its copies' among them, over which it is summed already."""
    grad = boxes.leaf_value(leaf)
    over = [axis for axis in (*axes, *boxes.copied_axes(leaf)) if axis not in known]
    equal = [axis for axis in over if axis not in collectives.varying_axes(grad)]
    count = collectives.axis_size(list(filter(collectives.is_tracked, equal)))
    return grad / count if count > 1 else grad


class _Averages:
    """The traced arrays that ``sync_gradients`` has returned and that still exist, with the axes averaged over.

    By identity: an average has the type of a sum, and JAX lets nobody write on an array where it comes from.
    """

    def __init__(self) -> None:
        self._axes: dict[int, tuple[weakref.ref[jax.Array], frozenset[str]]] = {}

    def add(self, value: jax.Array, axes: frozenset[str]) -> None:
        if isinstance(value, Tracer):
            key = id(value)
            self._axes[key] = (weakref.ref(value, lambda _: self._axes.pop(key, None)), axes)

    def axes_of(self, value: Any) -> frozenset[str]:
        found = self._axes.get(id(value))
        return found[1] if found and found[0]() is value else frozenset()


_known_averages = _Averages()

"""The life of a parameter inside ``shard_map``: split, gathered, its gradient scattered.

  shard_params    W[d, f]       -->  W[d_fsdp, f]    each device keeps its slice, in a box with its names
  gather_params   W[d_fsdp, f]  -->  W[d, f]         all-gather, one stage for each axis
  its transpose   dW[d, f]      -->  dW[d_fsdp, f]   reduce-scatter, mean over N, then over copies of the shard

A box says how its leaf travels (``Communication``), so that a gather does the same wherever it is called. ``linen`` puts
all of it around modules.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.axes import AxisEntry, as_axis_names, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.boxes import (
    PartlyGathered,
    copied_axes,
    is_box,
    leaf_communication,
    leaf_names,
    leaf_value,
    map_leaves_with_path,
    rebox,
    reduced_axes,
    split_differentiable,
    true_sizes,
)
from xlstm_jax.distributed.data_parallel.communication import (
    Communication,
    Replicas,
    as_sent,
    cast_dtype,
    dtype_name,
    scatter_dtype,
    wide_dtype,
)

# --------------------------------------------------------------------------------------------------------- gathering


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Primal:
    """What the backward pass must know of the value that was gathered: a residual without any array in it."""

    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[str]


def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: AxisNames,
    gather_dtype: Any = None,
    grad_scatter_dtype: Any = None,
    *,
    replicas: Replicas | None = None,
) -> jax.Array:
    """All-gathers ``x`` along a dim; the gradient is reduce-scattered as the *mean* over the axis.

    Args:
      x: this device's shard, [..., d / N, ...]. Integers and PRNG keys are gathered too, never cast, without gradient.
      axis: the dim d along which the shards are concatenated.
      axis_name: an axis or a tuple of axes, outermost first. One all-gather per axis, the innermost first.
      gather_dtype: dtype that is sent, and of the result; None: x's own. Narrow it to the dtype that the module computes
        in, so that nothing is left to cast (and to save for the backward pass).
      grad_scatter_dtype: dtype in which the gradient is summed; None: float32, or x's own where that is
        wider. It is divided by N before the sum, in float32 or wider, so that a float16 sum of N gradients overflows
        only where their mean does. Nothing is narrowed where nothing travels, on one device.
      replicas: other axes along which there are copies of ``x``; its gradient is then averaged over them too, after the
        scatter. Where the type of ``x`` says that the copies are equal (``check_vma=True``) it is summed, as JAX sums
        the gradient of any such value, and ``sync_gradients`` divides.
    Returns:
      [..., d, ...] in ``gather_dtype``. Its cotangent comes back as [..., d / N, ...] in x's dtype.
    Raises:
      ValueError: an axis is not bound, ``x`` has no such dim, or a dtype would change the kind of the
        numbers (float, complex).
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="gather_array_with_mean_grads")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"gather_array_with_mean_grads: axis={axis} is no dim of an array of shape {x.shape}.")
    if replicas:
        collectives.check_bound(replicas.axes, caller="gather_array_with_mean_grads, replicas")
    scatter_dtype(x, grad_scatter_dtype)
    gathered_as = cast_dtype(x, gather_dtype, "gather_dtype")
    return _gather(x, axis % x.ndim, axes, gathered_as, dtype_name(grad_scatter_dtype), replicas)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _gather(x, dim, axes, gather_dtype, grad_scatter_dtype, replicas):
    return _gather_fwd(x, dim, axes, gather_dtype, grad_scatter_dtype, replicas)[0]


def _gather_fwd(x, dim, axes, gather_dtype, grad_scatter_dtype, replicas):
    del grad_scatter_dtype
    primal = _Primal(x.shape, x.dtype, collectives.varying_axes(x))
    # Copies are equal by type only here: the cast to varying over them must not be JAX's, which transposes it to a sum
    # of whole gradients.
    x = collectives.to_varying(x, collectives.spread_axes(replicas.axes if replicas else ()))
    return collectives.all_gather(as_sent(x, gather_dtype), dim, axes), primal


def _gather_bwd(dim, axes, gather_dtype, grad_scatter_dtype, replicas, primal, cotangent):
    del gather_dtype
    if cotangent.dtype == jax.dtypes.float0:
        return (np.zeros(primal.shape, jax.dtypes.float0),)
    wide = cotangent.astype(wide_dtype(cotangent.dtype))
    if collectives.spread_axes(axes):
        dtype = scatter_dtype(primal, grad_scatter_dtype)
        wide = collectives.reduce_scatter((wide / collectives.axis_size(axes)).astype(dtype), dim, axes)
    grad = reduce_over_replicas(wide, replicas, primal.varying) if replicas else wide
    return (collectives.to_varying(grad, primal.varying).astype(primal.dtype),)


_gather.defvjp(_gather_fwd, _gather_bwd)


def reduce_over_replicas(grad: jax.Array, replicas: Replicas, varying: Collection[str] = ()) -> jax.Array:
    """The mean of a shard's gradient over its copies, divided before it travels, in the dtype that was chosen.

    ``varying`` are the axes over which the shard varies by type. Over tracked ones that it does not vary over the
    result is the sum: JAX sums what else depends on the shard (a penalty on its values), and sums add up.
    """
    axes = collectives.spread_axes(replicas.axes)
    wide = grad.astype(wide_dtype(grad.dtype))
    if not axes:
        return wide
    dtype = cast_dtype(wide, replicas.reduce_dtype, "reduce_dtype")
    mean = collectives.all_reduce_sum((wide / collectives.axis_size(axes)).astype(dtype), axes).astype(wide.dtype)
    summed = [axis for axis in axes if collectives.is_tracked(axis) and axis not in varying]
    return mean * collectives.axis_size(summed) if summed else mean


def gather_params(
    params: PyTree, axis_name: AxisNames, gather_dtype: Any = None, grad_scatter_dtype: Any = None
) -> PyTree:
    """Undoes ``shard_params``: all-gathers every leaf that is boxed over the axis. Call it inside ``shard_map``.

    Args:
      params: the tree, boxed where it is split.
      axis_name: an axis or a tuple of axes; where a leaf is split over only some of them, over those.
      gather_dtype: see ``gather_array_with_mean_grads``; applies to the leaves that are gathered. None: what the box
        says, which is the dtype that ``shard_module_params`` was given.
      grad_scatter_dtype: likewise.
    Returns:
      The tree with whole values. A leaf that is still split over another axis stays boxed with the names that are left;
      every other comes back as a plain array, without padding. Leaves that were not split are not touched, nor cast.

      A dim split over ``("fsdp", "tp")``, gathered over "fsdp", yields the contiguous part that ``"tp"`` alone would
      hold. Its shards lie scattered over "tp" too, so both axes travel; with "fsdp" innermost, only "fsdp" does.
    Raises:
      ValueError: an axis is not bound, or a dtype does not fit a leaf; names the leaf.
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="gather_params")
    given = {"gather_dtype": dtype_name(gather_dtype), "grad_scatter_dtype": dtype_name(grad_scatter_dtype)}

    def gather(path, leaf):
        if not is_box(leaf):
            return leaf
        value, names, how = leaf.value, list(leaf_names(leaf)), _communication_of(leaf, given)
        for dim, entry in enumerate(names):
            if set(entry_axes(entry)) & set(axes):
                how.check_fits(value, path)
                value, names[dim] = _gather_dim(value, dim, entry_axes(entry), axes, how)
                how = replace(how, replicas=None)  # once for each leaf
        sizes = true_sizes(leaf)
        whole = tuple(slice(size if entry is None else None) for size, entry in zip(sizes, names, strict=True))
        value = value[whole] if any(sizes) else value
        if not any(names):
            return value
        return PartlyGathered(value, tuple(names), communication=how, true_sizes=leaf.true_sizes)

    with jax.named_scope("gather_params"):
        return map_leaves_with_path(gather, params)


def _communication_of(leaf: Any, given: Mapping[str, str | None]) -> Communication:
    """What the box of a leaf says, with the dtypes that are given in place of its own."""
    return replace(leaf_communication(leaf), **{name: dtype for name, dtype in given.items() if dtype is not None})


def _gather_dim(
    value: jax.Array, dim: int, held: tuple[str, ...], axes: tuple[str, ...], how: Communication
) -> tuple[jax.Array, AxisEntry]:
    """Gathers one dim, split over ``held``, over those of ``axes``; returns the value and the entry that is left."""
    first = next(i for i, axis in enumerate(held) if axis in axes)
    outer, inner = held[:first], held[first:]
    kept = tuple(axis for axis in inner if axis not in axes)
    gather = partial(
        gather_array_with_mean_grads, gather_dtype=how.gather_dtype, grad_scatter_dtype=how.grad_scatter_dtype
    )
    if not kept:
        return gather(value, dim, inner, replicas=how.replicas), axes_entry(outer)
    # An axis to keep lies inside one to gather. Its shards are gathered as well (an all-gather whose transpose is a
    # sum, as they are shards and not copies), and the one that it holds by itself is cut out.
    for axis in reversed(inner):
        if axis in axes:
            value = gather(value, dim, axis, replicas=how.replicas)
            how = replace(how, replicas=None)
        else:
            value = collectives.all_gather(value, dim, (axis,))
    return collectives.own_shard(value, dim, kept), axes_entry(outer + kept)


# ----------------------------------------------------------------------------------------------- replicated gradients


def sync_gradients(grads: PyTree, axis_names: AxisNames) -> PyTree:
    """Averages gradients over the data axes that their leaves are not split over.

    Call it once, inside ``shard_map``, on what comes straight from ``jax.grad`` of a loss that is the mean over this
    device's batch. It is *not* for the gradients of ``training.value_and_grad``, which has done it.

    A leaf that is split over an axis, or has its copies along it (``Replicas``), has been averaged over it by the
    transpose of its gather. Under ``check_vma=True`` a leaf whose type does not vary over an axis has been summed over
    it by JAX (and, over the axis of its copies, by that transpose), and is divided; any other is averaged.

    Args:
      grads: boxed where the parameters are; leaves without gradient (float0) pass.
      axis_names: all mesh axes along which the batch or gathered weights differ (those of the wrappers among them), a
        string or a sequence. One that is left out goes unseen here.
    Returns:
      The tree with the same boxes and dtypes; sums run in float32 where the leaves are narrower.
    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="sync_gradients")
    live, put_back = split_differentiable(grads)
    over = [tuple(axis for axis in axes if axis not in reduced_axes(leaf)) for leaf in live]
    with jax.named_scope("sync_gradients"):
        divided = [
            _divide_summed(leaf_value(leaf), (*left, *copied_axes(leaf))) for leaf, left in zip(live, over, strict=True)
        ]
        synced = collectives.pmean(divided, over)
    return put_back([rebox(leaf, value) for leaf, value in zip(live, synced, strict=True)])


def _divide_summed(grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Divides by the sizes of those tracked axes over which JAX has already summed ``grad``."""
    varying = collectives.varying_axes(grad)
    parts = collectives.axis_size([a for a in axes if a not in varying and collectives.is_tracked(a)])
    return grad / parts if parts > 1 else grad

"""Gathers trees of parameters, and averages gradients: the two halves of FSDP in ``shard_map``.

  gather_params    W[d_fsdp, f]  -->  W[d, f]         all-gather, one stage for each axis
  its transpose    dW[d, f]      -->  dW[d_fsdp, f]   reduce-scatter, mean over N, then over copies of the shard
  sync_gradients   dW            -->  mean of dW      all-reduce, for replicated leaves; once

A box holds the leaf's communication options (``Communication``), so that a gather has the same result for every caller.
``gather_array`` gathers one array.

``sync_gradients`` recognises its averages when they are passed in again. Under ``check_vma=True`` an average has the
type of a sum that JAX has made: "equal on all devices". Nothing in the type says whether to divide. So averages are
remembered:

  the average itself        is found by its identity: ``averaged_axes``; ``sync_gradients`` returns it unchanged
  a value computed from it  (scaled, cast, clipped) is found by its equations, and refused: ``check_no_average``

Equations show a changed average only within one trace: inside a ``scan`` or ``jax.jit`` that receives an average, the
average is an argument without equations, and a second ``sync_gradients`` there divides it.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import Tracer
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extension import gathers_in_tree
from xlstm_jax.distributed.data_parallel.leaf import Sharded, gather_leaf, is_box, leaf_of, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.gather_array import set_context
from xlstm_jax.origins import TracedValue, is_gradient, origins
from xlstm_jax.program_names import GATHER_SCOPE


def gather_params(
    params: PyTree,
    axis_name: AxisNames,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
) -> PyTree:
    """Gathers every leaf that is boxed over the axis: the inverse of ``shard_params``. Call inside ``shard_map``.

    >>> boxed = nn.Partitioned(jnp.ones((16, 32)), (None, "fsdp"))  # the global array; a device sees [16, 8] of it
    >>> gather = lambda boxed: gather_params(boxed, "fsdp")
    >>> jax.shard_map(gather, mesh=mesh, in_specs=jax.P(None, "fsdp"), out_specs=jax.P(), check_vma=False)(boxed).shape
    (16, 32)

    Args:
      params: the tree, boxed where it is split.
      axis_name: an axis or a tuple of axes. A leaf is gathered over the axes among these that split the leaf.
      gather_dtype, grad_scatter_dtype: see ``gather_array_with_mean_grads``. ``None``: the options in the leaf's box,
        which come from ``shard_module_params``.
    Returns:
      The tree with unsharded values. A leaf that is still split over another axis stays boxed with the remaining names;
      every other leaf is a plain array without padding. Leaves that were not split are neither changed nor cast.

      A dim split over ``("fsdp", "tp")``, gathered over "fsdp", becomes the contiguous shard of a dim split over
      ``"tp"`` alone. Parts of this shard are on devices along both axes, so the dim is gathered over both axes, and the
      shard is cut out. A dim split over ``("tp", "fsdp")`` is gathered over "fsdp" alone.
    Raises:
      ValueError: an axis is not bound, or a dtype does not fit a leaf; names the leaf.
    """
    axes = collectives.bound_axes(axis_name, caller="gather_params")
    given = Communication.of(gather_dtype, grad_scatter_dtype)
    together = gathers_in_tree(params, axes, given)

    def gathered(path: str, leaf: Any) -> Any:
        return gather_leaf(leaf_of(leaf), axes, given, path, together=together.get(path)) if is_box(leaf) else leaf

    with jax.named_scope(GATHER_SCOPE):
        return trees.map_leaves_with_path(gathered, params)


def sync_gradients(grads: PyTree, axis_names: AxisNames) -> PyTree:
    """Averages gradients over the data axes that their leaves are not split over.

    Call ``sync_gradients`` once, inside ``shard_map``, on the result of ``jax.grad`` of a loss that is the mean over
    this device's batch. Arrays returned by ``sync_gradients`` or ``training.value_and_grad`` are recognised, and not
    averaged again. If you scale, cast or clip an average and pass it in again, an error is raised; inside a ``scan`` or
    ``jax.jit`` that receives the average it is not recognised, and may be divided a second time:
    ``training.check_step`` finds this.

    >>> sync = lambda grad: sync_gradients(grad, "fsdp")
    >>> grads = jnp.array([0.0, 1.0, 2.0, 3.0])  # one value on each of 4 devices
    >>> jax.shard_map(sync, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())(grads).tolist()
    [1.5]

    A leaf that is split over an axis, or has copies along the axis, was averaged over the axis by the
    transpose of its gather. Under ``check_vma=True`` a gradient whose type does not vary over an axis was summed over
    the axis by JAX (over the axis of copies, by the transpose), and is divided; any other gradient is averaged.

    If the model itself splits a leaf over an axis of the batch (each device has different experts), the gradient is the
    sum over the tokens sent to the device, and is divided. Boxes made by ``init_sharded`` record that the model splits
    the leaf. A hand-made ``nn.Partitioned`` does not, and is treated as a leaf that ``gather_params`` has gathered;
    ``value_and_grad`` treats both correctly.

    Args:
      grads: boxed where the parameters are; leaves without gradient (float0) are returned unchanged.
      axis_names: all mesh axes along which the batch or gathered weights differ, including the axes of the wrappers; a
        string or a sequence. Gradients are not averaged over an omitted axis, and no error is raised.
    Returns:
      The tree with the same boxes and dtypes; sums run in float32 if the leaves are narrower.
    Raises:
      ValueError: an axis is not bound; lists the bound axes. Or a gradient was averaged before and then changed; names
        the leaf.
    """
    axes = collectives.bound_axes(axis_names, caller="sync_gradients")
    leaves, treedef = trees.flatten_with_path(grads)
    boxes = [(path, leaf_of(leaf)) for path, leaf in leaves]
    takes = [box.is_differentiable for _, box in boxes]
    means = iter(mean_gradients([box for box, take in zip(boxes, takes, strict=True) if take], axes))
    synced = [rebox(leaf, next(means)) if take else leaf for (_, leaf), take in zip(leaves, takes, strict=True)]
    return jax.tree.unflatten(treedef, synced)


def mean_gradients(grads: list[tuple[str, Sharded]], axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns the mean of each gradient over the devices of ``axes``, as arrays without boxes, in order of ``grads``.

    ``grads`` are pairs (path, gradient in its box), ``axes`` the bound data axes. Axes over which a gradient is
    averaged already are left out: axes of its leaf's gather, and axes of an earlier average. A gradient that is a sum
    over an axis is divided. Results that are tracers are remembered, so that ``sync_gradients`` does not average these
    again (``averaged_axes``).

    Raises:
      ValueError: a gradient was averaged before and then changed; names the leaf.
    """
    values: list[jax.Array] = []
    axes_left: list[list[str]] = []
    averaged: list[frozenset[str]] = []
    with jax.named_scope("sync_gradients"):
        for path, box in grads:
            known = averaged_axes(box.value) if _averages.known else frozenset()
            copied = box.communication.replicas.axes if box.communication.replicas else ()
            # The backward pass of the gather has averaged over the gathered axes and the axes of copies.
            reduced = known.union(set(box.axes).difference(box.model_axes), copied)
            left = [axis for axis in axes if axis not in reduced]
            # The gradient is already a sum over the model's own axes, and over tracked axes (of copies, too) missing in
            # its type: JAX has summed the cotangent over those, since the leaf does not vary there.
            varying = collectives.varying_axes(box.value)
            may_be = [axis for axis in (*left, *copied) if axis not in known]
            summed = [a for a in may_be if a in box.model_axes or (a not in varying and collectives.is_tracked(a))]
            count = collectives.axis_size(summed)
            if count > 1:
                check_no_average(path, box.value, summed)
            values.append(box.value / count if count > 1 else box.value)
            # Over the model's own axes the gradient is already a sum, and was divided.
            axes_left.append([axis for axis in left if axis not in box.model_axes])
            averaged.append(reduced.union(axes))
        synced = collectives.pmean(values, axes_left)
    # Remembered by weak references: a tracer must not outlive its trace. Tracers of ended traces are dropped here.
    alive = [(average, over) for average, over in _averages.known if average() is not None]
    traced = [(value, over) for value, over in zip(synced, averaged, strict=True) if isinstance(value, Tracer)]
    _averages.known = alive + [(weakref.ref(value), over) for value, over in traced]
    return synced


# ------------------------------------------------------------------------------------------------------------- averages


class _Averages(threading.local):
    """Traced arrays returned by ``sync_gradients`` and still alive, with the axes of the average.

    JAX arrays cannot be annotated with their origin. A trace runs in one thread, and several threads may trace at a
    time.
    """

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[jax.Array], frozenset[str]]] = []


_averages = _Averages()
_raises: ContextVar[bool] = ContextVar("_raises", default=True)


def wrong_averages_pass() -> AbstractContextManager[None]:
    """Returns a context in which wrong averages raise no errors, so that their gradients can be measured."""
    return set_context(_raises, False)


def wrong_averages_raise() -> bool:
    """Returns False inside the context ``wrong_averages_pass``, else True.

    True means that a proved mistake in averaging gradients raises an error.
    """
    return _raises.get()


def averaged_axes(value: jax.Array) -> frozenset[str]:
    """Returns the axes over which ``sync_gradients`` has averaged ``value``, an array compared by identity.

    An empty set for any other array, including an array computed from an average.
    """
    for average, axes in _averages.known:
        if average() is value:
            return axes
    return frozenset()


def check_no_average(path: str, value: jax.Array, axes: Sequence[str]) -> None:
    """Raises if a gradient that would be divided by the number of devices over ``axes`` is an average over an axis.

    Nothing is checked inside the context ``wrong_averages_pass``.

    Args:
      path: the path of the leaf, for the error.
      value: a gradient that does not vary over ``axes`` by type.
      axes: axes over which the gradient counts as a sum.
    Raises:
      ValueError: the gradient was computed from averages over an axis in ``axes``, and not by a later ``jax.grad``;
        names the leaf.
    """
    if not _averages.known or not wrong_averages_raise():
        return
    ends = lambda origin: bool(averaged_axes(origin.tracer_or_atom)) or is_gradient(origin)  # noqa: E731
    found = frozenset[str]().union(
        *[averaged_axes(origin.tracer_or_atom) for origin in origins(TracedValue(value), ends)]
    )
    if twice := tuple(axis for axis in axes if axis in found):
        raise ValueError(
            f"sync_gradients: '{path}' of shape {value.shape} was averaged over {twice} by an earlier sync_gradients "
            "or value_and_grad, then changed (scaled, cast, clipped), and would be divided by the number of devices a "
            "second time. Call sync_gradients once, on the result of jax.grad."
        )

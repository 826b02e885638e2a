"""Trees of parameters are split and gathered, and their gradients averaged: FSDP in ``shard_map``.

  shard_params    W[d, f]       -->  W[d_fsdp, f]   each leaf that is large enough; the shards get boxes with axis names
  gather_params   W[d_fsdp, f]  -->  W[d, f]        all-gather, one stage for each axis
  its transpose   dW[d, f]      -->  dW[d_fsdp, f]  reduce-scatter, mean over N, then over copies of the shard
  sync_gradients  dW            -->  mean of dW     all-reduce, for replicated leaves; once

A box holds the leaf's communication options (``Communication``), so that a gather has the same result for every caller.
``leaf.gather_leaf`` gathers one leaf, and ``communication.gather_dims`` one array.

``averages`` recognises a gradient that was averaged before.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.averages import (
    AVERAGES,
    averaged_axes,
    axes_of_average,
    check_no_average,
    remember_averages,
)
from xlstm_jax.distributed.data_parallel.extension import axis_orders
from xlstm_jax.distributed.data_parallel.leaf import (
    Sharded,
    frozen,
    gather_leaf,
    is_box,
    leaf_of,
    rebox,
    split_by_model,
)
from xlstm_jax.distributed.data_parallel.policy import (
    DEFAULT_MIN_WEIGHT_SIZE,
    DEFAULT_UNEVEN,
    ShardChoice,
    ShardPolicy,
    choose_shard_dim,
    next_multiple,
)
from xlstm_jax.distributed.data_parallel.reasons import PrngKeys
from xlstm_jax.distributed.data_parallel.shared_collectives import gathers_in_tree, sent_together
from xlstm_jax.distributed.data_parallel.store import UNEVEN, LeafToSplit
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import (
    as_axis_names,
    axes_entry,
    entry_axes,
    is_prng_key,
)
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.program_names import GATHER_SCOPE

# ---------------------------------------------------------------------------------------------------------------- split


def shard_params(
    params: PyTree,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    *,
    uneven: str = DEFAULT_UNEVEN,
) -> PyTree:
    """Splits parameters over a mesh axis: every device keeps its shard of each sufficiently large leaf.

    Call it inside ``shard_map``, on values that are equal along the axis; or outside, under ``jax.set_mesh``, on global
    arrays, which are placed on the mesh. To initialise a model use ``training.init_sharded``, which never holds the
    full tree on a device.

    >>> shard = lambda w: shard_params(w, "fsdp", min_weight_size=64)
    >>> boxed = jax.shard_map(shard, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(None, "fsdp"))(jnp.ones((16, 32)))
    >>> boxed.names, boxed.value.addressable_shards[0].data.shape  # what one of 4 devices keeps
    ((None, 'fsdp'), (16, 8))
    >>> with jax.set_mesh(mesh):
    ...     shard(jnp.ones((16, 32))).value.sharding.spec
    P(None, 'fsdp')

    Args:
      params: leaves [..., d, ...], bare or boxed; boxes with further axes (tensor parallel) are kept and extended.
      axis_name: an axis or a tuple of axes, N devices in all; a dim is split over the entire tuple. The largest leaf
        keeps the given order, outermost first; the orders of smaller leaves balance the load of the axes.
      min_weight_size: leaves with fewer values stay replicated; a leaf of exactly this size is split.
      uneven: treatment of a leaf if N divides no dim; "replicate": the leaf stays replicated; "pad": the
        leaf is split along its largest dim, with zeros up to the next multiple of N.
    Returns:
      The tree. A leaf is split along the largest dim that N divides and that no other axis splits, and boxed as
      ``nn.Partitioned`` with value [..., d / N, ...]. Other leaves are returned unchanged, including PRNG keys.
    Raises:
      ValueError: an axis is not bound, and no mesh with the axes is set; lists the axes that are bound. Or
        ``min_weight_size`` is negative, or ``uneven`` is unknown.
    """
    axes, around = as_axis_names(axis_name), jax.sharding.get_abstract_mesh()
    policy = ShardPolicy(axes, min_weight_size, uneven=uneven)
    if not around.manual_axes and around.shape.keys() >= set(axes):
        boxed = box_params(params, {axis: around.shape[axis] for axis in axes}, policy)
        specs = trees.partition_specs(boxed, around)
        return trees.map_values(lambda leaf, spec: jax.device_put(leaf.value, spec), boxed, specs)
    collectives.check_bound(axes, caller="shard_params")
    return box_shards(params, policy)


def box_shards(params: PyTree, policy: ShardPolicy) -> PyTree:
    """Returns the parameters, unsharded on each device, split and boxed as by ``shard_params``; inside ``shard_map``.

    Each device keeps its shard of a leaf that is split. A leaf that ``policy`` freezes, or that the model splits, is
    boxed; other leaves are unchanged. ``policy`` has all options of a wrapped module.
    """
    # Sizes are read from the running shard_map: one wrapped model works on every mesh that has its axes.
    sizes = {axis: collectives.axis_size((axis,)) for axis in policy.axes}
    return box_params(params, sizes, policy, collectives.local_shard)


def box_params(
    params: PyTree,
    axis_sizes: dict[str, int],
    policy: ShardPolicy,
    take: Callable[[Any, int, tuple[str, ...]], Any] | None = None,
) -> PyTree:
    """Returns the tree with each leaf that ``policy`` splits or freezes, or that the model splits, in a ``Sharded``.

    Other leaves are unchanged, but for boxes of logical names that rules map to no axis: these boxes are removed.

    Args:
      params: global arrays, abstract arrays, or (inside ``shard_map``) arrays that are unsharded on each device.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      policy: the options of a wrapped module.
      take: ``take(value, dim, axes)`` converts the unsharded array, in storage format (with padding, say), to the array
        in the box: its shard, say. ``None``: the box holds the unsharded array.
    """
    # All leaves are read before the first is split: the order of a leaf's axes depends on the bytes that other leaves
    # send over each axis.
    given_leaves, treedef = trees.flatten_with_path(params)
    leaves, communication = {path: leaf_of(leaf) for path, leaf in given_leaves}, policy.communication
    choices = {path: choice_of(leaf, axis_sizes, policy).dim for path, leaf in leaves.items()}
    dims = {path: dim for path, dim in choices.items() if dim is not None}
    # Leaves that share collectives share the order of axes: ``order_as`` has the leaf whose order a leaf takes.
    marks = sent_together({path: leaves[path] for path in dims}, communication) if communication.options else {}
    order_as = {path: next(iter(marks)) if path in marks else path for path in dims}
    order_of = dict.fromkeys(order_as.values(), tuple(axis_sizes))
    if len(axis_sizes) > 1:  # an extension may give leaves other orders, by the bytes that each sends
        sizes = dict.fromkeys(order_of, 0)
        for path, of in order_as.items():
            sizes[of] += leaves[path].stored_bytes
        orders = axis_orders(list(sizes.values()), list(order_of.values()), axis_sizes, communication.inter_host_axes)
        order_of = dict(zip(sizes, orders, strict=True))
    boxed: list[Any] = []
    for path, leaf in given_leaves:
        leaf = split_by_model(leaf, axis_sizes)
        leaf = leaf if policy.trainable else frozen(leaf)
        if path not in dims:
            boxed.append(leaf)
            continue
        # The stored form of the leaf, in which the axes divide the dim, and the part of it for the box.
        box, axes = leaf_of(leaf), order_of[order_as[path]]
        to_split = LeafToSplit(box.value, box.names, dims[path], box.store)
        if mode := UNEVEN[policy.uneven]:
            to_split = mode.prepare_for_split(to_split, math.prod(axis_sizes.values()))
        value = to_split.value if take is None else take(to_split.value, to_split.dim, axes)
        # The box: the axes as the name of the dim, outermost first, and the options of the wrapper.
        names = list(to_split.names)
        names[to_split.dim] = axes_entry(axes)
        # A second wrapper keeps the copies of the first, but for those along axes that now split the leaf.
        if replicas := communication.replicas or box.communication.replicas:
            replicas = replicas.without({axis for entry in names for axis in entry_axes(entry)})
        boxed.append(
            Sharded(
                value,
                tuple(names),
                communication=replace(communication, replicas=replicas),
                store=to_split.store,
                model_axes=box.model_axes,
                trainable=box.trainable,
                marks=box.marks | {marks[path]} if path in marks else box.marks,
            )
        )
    return jax.tree.unflatten(treedef, boxed)


def choice_of(box: Sharded, axis_sizes: dict[str, int], policy: ShardPolicy) -> ShardChoice:
    """Returns the dim of the leaf in ``box`` to split over the axes, as ``policy`` says, and the reason.

    The dim is None for a leaf that stays replicated, such as a PRNG key. ``axis_sizes`` has the axes to split over,
    outermost first, with their sizes.
    """
    if is_prng_key(box.value):
        return ShardChoice(None, PrngKeys())
    return choose_shard_dim(np.shape(box.value), box.names, axis_sizes, policy.min_weight_size, policy.uneven)


def split_array_over_mesh(x: jax.Array, axis_name: AxisNames, split_axis: int) -> jax.Array:
    """Returns this device's slice of an array that is replicated along the axis; inside ``shard_map``.

    >>> split = lambda x: split_array_over_mesh(x, "fsdp", 1)
    >>> largest = jax.shard_map(lambda x: split(x).max(1), mesh=mesh, in_specs=jax.P(), out_specs=jax.P("fsdp"))
    >>> largest(jnp.arange(8.0)[None]).tolist()  # of 2 values on each of 4 devices
    [1.0, 3.0, 5.0, 7.0]

    Nothing is sent. In the backward pass each device has the gradient of its slice, and zeros elsewhere; the gradient
    of ``x`` is the sum of these over the axis. The sum is taken by the producer of ``x``: by the transpose of the
    all-gather that made ``x``; by JAX, if ``x`` has the type "equal on all devices"; or, for a parameter,
    as the mean, by ``value_and_grad`` and ``sync_gradients``.

    Args:
      x: [..., d, ...], of any dtype.
      axis_name: an axis or a tuple of axes, the first outermost, N devices in all.
      split_axis: the dim d; negative values count from the end.
    Returns:
      [..., d / N, ...], with slices in the order of ``PartitionSpec(axes)``.
    Raises:
      ValueError: an axis is not bound; ``x`` has no dim ``split_axis``, or N does not divide the dim.
    """
    axes = collectives.bound_axes(axis_name, caller="split_array_over_mesh")
    if not -x.ndim <= split_axis < x.ndim:
        raise ValueError(f"split_array_over_mesh: {split_axis=} is no dim of an array of shape {x.shape}.")
    size, count = x.shape[split_axis], collectives.axis_size(axes)
    if size % count:
        raise ValueError(
            f"split_array_over_mesh: dim {split_axis} of an array of shape {x.shape} has size {size}, which the "
            f"{count} devices over {axes} do not divide; the last {size % count} would be lost. Pad it to "
            f"{next_multiple(size, count)}."
        )
    return collectives.local_shard(x, split_axis % x.ndim, axes)


def with_unit(variables: PyTree, before: PyTree) -> PyTree:
    """Returns the variables of a module, in which the boxes that the module has just made name the module as unit.

    The unit of a leaf is the wrapped module that gathers the leaf. The box stores the unit as ``unit_depth``, the
    number of names in the leaf's path below the module: 1 for "params/kernel". Three kinds of leaves are unchanged:
    bare leaves; boxes whose axes no wrapped module gathers (the model itself splits the leaf); and boxes made by a
    wrapped module inside, which already have a unit in ``before``, and the same axes.

    Args:
      variables: the variables after the module has boxed its leaves.
      before: the same variables before.
    """
    with_path, treedef = trees.flatten_with_path(variables)
    leaves = [leaf for _, leaf in with_path]
    for i, ((path, leaf), old) in enumerate(zip(with_path, treedef.flatten_up_to(before), strict=True)):
        if isinstance(leaf, Sharded):
            box, was = leaf_of(leaf), leaf_of(old)
            # A box that had a unit before, and has the same axes now, belongs to a wrapped module inside this module.
            is_new = not was.unit_depth or box.axes != was.axes
            if is_new and (not box.model_axes or box.gathered_axes):
                leaves[i] = leaf.replace(unit_depth=path.count("/"))
    return jax.tree.unflatten(treedef, leaves)


# --------------------------------------------------------------------------------------------------------------- gather


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


# ------------------------------------------------------------------------------------------------ averages of gradients


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
    live = [box for box, take in zip(boxes, takes, strict=True) if take]
    over = [axes_of_average(box, axes) for _, box in live]
    averages = mean_gradients(live, axes)
    remember_averages(averages, over)
    means = iter(averages)
    synced = [rebox(leaf, next(means)) if take else leaf for (_, leaf), take in zip(leaves, takes, strict=True)]
    return jax.tree.unflatten(treedef, synced)


def mean_gradients(grads: list[tuple[str, Sharded]], axes: tuple[str, ...]) -> list[jax.Array]:
    """Returns the mean of each gradient over the devices of ``axes``, as arrays without boxes, in order of ``grads``.

    ``grads`` are pairs (path, gradient in its box), ``axes`` the bound data axes. Axes over which a gradient is
    averaged already are left out: axes of its leaf's gather, and axes of an earlier average that was remembered
    (``averages``). A gradient that is a sum over an axis is divided.

    Raises:
      ValueError: a gradient was averaged before and then changed; names the leaf.
    """
    values: list[jax.Array] = []
    axes_left: list[list[str]] = []
    with jax.named_scope("sync_gradients"):
        for path, box in grads:
            known = averaged_axes(box.value) if AVERAGES.known else frozenset()
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
        return collectives.pmean(values, axes_left)

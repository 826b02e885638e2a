"""Chooses the axis order of each sharded parameter so that links carry equal loads.

A leaf of B bytes, split over axes of sizes n_0 (outermost), n_1, ..., is gathered innermost first, and the
gradient is scattered outermost first. The outermost axis carries B (n_0 - 1) / n_0 bytes, the next axis
B / n_0 (n_1 - 1) / n_1: nearly everything is sent over the outermost axis. Each axis of a torus is a separate link, so
the outermost axis rotates from leaf to leaf, weighted by bytes: a step waits for the busiest link.

Slow axes (across hosts or slices) stay innermost: slow axes are gathered first, when the fewest bytes are sent.

A table for row lookups (``wire/lookup.py``) counts as 0 bytes: only rows and a few columns are sent. If a batch has so
many tokens that the table is gathered after all, matrix products take far longer than the links.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extension import AxisOrder, Extension, avoids_gather, register
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_library_box, leaf_of
from xlstm_jax.distributed.data_parallel.shared_collectives import sent_with
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.formats import sent_itemsize

# Up to six axes all orders are tried (720). Eight axes have 40,320 orders: with more than six axes only the choices of
# the three outermost axes are tried, because these carry the most bytes.
ALL_TRIED, PLACES_TRIED = 6, 3

# The layers of a Python loop keep one order, so that JAX traces and XLA compiles one layer, unless that makes the
# busiest axis carry this much more than the mean.
SHARED_ORDER_LIMIT = 1.05


def balanced_orders(
    sizes: Sequence[float],
    default_orders: Sequence[AxisOrder],
    axis_sizes: Mapping[str, int],
    slow_axes: Collection[str] = (),
) -> list[AxisOrder]:
    """Returns for each leaf its axes in a new order, outermost first, with little load on the busiest axis.

    The largest leaf keeps the given order. Smaller leaves follow by size, each with the order under which the busiest
    axis carries the fewest bytes. Of more than six axes, each choice of three outermost axes is tried, followed by the
    rest in the given order. The result has the order of ``sizes``.

    Args:
      sizes: bytes of each leaf.
      default_orders: the axes of each leaf, in the order of the user's option.
      axis_sizes: the number of devices along each axis.
      slow_axes: axes that stay innermost, in the given order.
    """
    if all(len(order) < 2 for order in default_orders):
        return list(default_orders)
    total = dict.fromkeys((axis for axis in axis_sizes if axis not in slow_axes), 0.0)

    def loads(size: float, order: AxisOrder) -> list[float]:
        """Returns the total bytes sent over each fast axis, largest first, if a leaf is added to the leaves so far.

        ``size`` is the number of bytes of the leaf, ``order`` has the axes of the leaf, outermost first.
        """
        sent = _traffic(size, order, axis_sizes)
        return sorted((total[axis] + sent.get(axis, 0.0) for axis in total), reverse=True)

    orders = list(default_orders)
    # The largest first: small leaves even out the differences that large leaves leave.
    for leaf in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        slow = tuple(axis for axis in default_orders[leaf] if axis in slow_axes)
        fast = tuple(axis for axis in default_orders[leaf] if axis not in slow_axes)
        first = permutations(fast, len(fast) if len(fast) <= ALL_TRIED else PLACES_TRIED)
        choices = [(*outer, *(axis for axis in fast if axis not in outer), *slow) for outer in first]
        # `min` takes the first of equally good orders. The choices are reversed, so that the given order is taken last:
        # its outermost axis stays free for modules with a single leaf, which keeps the given order.
        choices = choices[::-1] if any(total.values()) else choices[:1]
        orders[leaf] = min(choices, key=partial(loads, sizes[leaf]))
        for axis, sent in _traffic(sizes[leaf], orders[leaf], axis_sizes).items():
            if axis in total:
                total[axis] += sent
    return orders


def _traffic(size: float, order: AxisOrder, axis_sizes: Mapping[str, int]) -> dict[str, float]:
    """Returns, by axis, the bytes sent over the axis in one gather of a leaf with ``size`` bytes in unsharded form.

    ``order`` has the axes that split the leaf, outermost first. Over the outermost axis, of n devices, size (n - 1) / n
    bytes are sent; over the next axis the same of size / n bytes.
    """
    sent = {}
    for axis in order:
        sent[axis] = size * (axis_sizes[axis] - 1) / axis_sizes[axis]
        # Axes further inside are gathered before this axis, when fewer bytes are sent by this factor.
        size /= axis_sizes[axis]
    return sent


# --------------------------------------------------------------------------------------------- across a model


def balanced_over_model(params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
    """Returns the parameters with axis orders balanced over the entire model; values are global arrays.

    A wrapped module boxes only its leaves. This function sees every module's leaves, and every layer of a scan. Only
    the order of names changes: the same dim is split over the same axes. Axes over which the model itself splits a leaf
    keep their places, and a leaf gathered over a single axis stays unchanged.

    Args:
      params: boxed arrays, or abstract arrays, of global shapes.
      axis_sizes: the axes of the mesh, in its order, with their sizes.
    """
    reorderable, group_of, slow_axes = {}, {}, set()
    for path, leaf in leaves_with_path(params):
        box = leaf_of(leaf)
        dim, axes = _reorderable(box, axis_sizes) if is_library_box(leaf) else (0, ())
        if axes:
            reorderable[path] = _sent_bytes(box), dim, axes
            slow_axes |= set(box.communication.inter_host_axes)
            group_of[path] = sent_with(path, box) or path
    order_of = _shared_orders(reorderable, group_of, axis_sizes, slow_axes)

    # Values are global arrays: another order moves shards between devices, without effect on the global values.
    def reorder(path: str, leaf: Any) -> Any:
        if path not in order_of:
            return leaf
        names, dim = list(leaf.names), reorderable[path][1]
        order = iter(order_of[path])
        movable = set(order_of[path])
        names[dim] = axes_entry(tuple(next(order) if axis in movable else axis for axis in entry_axes(names[dim])))
        return leaf.replace(names=tuple(names))

    return map_leaves_with_path(reorder, params)


def _reorderable(box: Sharded, axis_sizes: Mapping[str, int]) -> tuple[int, AxisOrder]:
    """Returns (dim, axes) of the first dim of a leaf that is gathered over two or more axes of size 2 or more.

    ``axes`` are the gathered axes of the dim, in the order of ``axis_sizes``, the mesh. (0, ()) if the leaf has no such
    dim: another order of axes would change nothing.
    """
    for dim, entry in enumerate(box.names):
        gathered = [axis for axis in entry_axes(entry) if axis in box.gathered_axes]
        if sum(axis_sizes.get(axis, 1) > 1 for axis in gathered) > 1:
            return dim, tuple(axis for axis in axis_sizes if axis in gathered)
    return 0, ()


def _sent_bytes(box: Sharded) -> float:
    """Returns the bytes of an unsharded leaf in the formats in which a training step sends the leaf.

    The gather counts and, if the leaf takes a gradient, the reduce-scatter of the gradient. 0 for a leaf that is
    normally not gathered, as a table for row lookups.
    """
    shape = np.shape(box.value)
    if avoids_gather(box):
        return 0.0
    _, summed = box.communication.dtypes(box.value)
    sent = sent_itemsize(box.communication.sent_as(box.value))
    return math.prod(shape) * (sent + (np.dtype(summed).itemsize if box.is_differentiable else 0))


def _shared_orders(
    reorderable: dict[str, tuple[float, int, AxisOrder]],
    group_of: dict[str, str],
    axis_sizes: Mapping[str, int],
    slow_axes: Collection[str],
) -> dict[str, AxisOrder]:
    """Returns by path the axes of each leaf, outermost first, in an order that balances the load of the links.

    Layers of a Python loop (paths that differ only in numbers) share an order, unless the busiest axis then carries
    more than ``SHARED_ORDER_LIMIT`` times the mean. Layers with different orders are different programs, each traced by
    JAX and compiled by XLA.

    Args:
      reorderable: by path: (sent bytes of the leaf, the dim to gather, the axes of the dim).
      group_of: by path, a name; leaves with equal names share collectives, and have one order in either case.
      axis_sizes: the number of devices along each axis.
      slow_axes: axes that stay innermost.
    """

    def orders_of(key: Callable[[str], Any]) -> dict[str, AxisOrder]:
        groups: dict[Any, list[str]] = defaultdict(list)
        for path in reorderable:
            groups[key(path)].append(path)
        sizes = [sum(reorderable[path][0] for path in paths) for paths in groups.values()]
        default_orders = [reorderable[paths[0]][2] for paths in groups.values()]
        orders = balanced_orders(sizes, default_orders, axis_sizes, slow_axes)
        return {path: order for paths, order in zip(groups.values(), orders, strict=True) for path in paths}

    def in_balance(orders: dict[str, AxisOrder]) -> bool:
        load: dict[str, float] = defaultdict(float)
        for path, order in orders.items():
            for axis, sent in _traffic(reorderable[path][0], order, axis_sizes).items():
                load[axis] += sent
        loads = [sent for axis, sent in load.items() if sent and axis not in slow_axes]
        return not loads or max(loads) <= SHARED_ORDER_LIMIT * sum(loads) / len(loads)

    def layer_of(path: str) -> Any:
        # Paths that differ only in numbers belong to layers: block_0/kernel, block_1/kernel.
        dim = reorderable[path][1] if group_of[path] == path else None
        return re.sub(r"\d+", "*", group_of[path]), dim, reorderable[path][2]

    shared = orders_of(layer_of)
    return shared if in_balance(shared) else orders_of(lambda path: (group_of[path], reorderable[path][2]))


@register
class LinkBalance(Extension):
    """Chooses axis orders with balanced links, for the leaves of a unit (wrapped module) and of an entire model."""

    def axis_orders(
        self,
        sizes: Sequence[float],
        default_orders: Sequence[AxisOrder],
        axis_sizes: Mapping[str, int],
        slow: Collection[str],
    ) -> Sequence[AxisOrder]:
        return balanced_orders(sizes, default_orders, axis_sizes, slow)

    def reorder_axes(self, params: PyTree, axis_sizes: Mapping[str, int]) -> PyTree:
        return balanced_over_model(params, axis_sizes)

"""``shard_params``: every device keeps its slice of each leaf that is large enough, in a box with its names."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.boxes import (
    box_dim,
    leaf_names,
    leaf_value,
    leaves_with_path,
    map_leaves_with_path,
)
from xlstm_jax.distributed.data_parallel.communication import (
    DEFAULT_COMMUNICATION,
    Communication,
    Replicas,
    cast_dtype,
    dtype_name,
    is_prng_key,
    scatter_dtype,
    value_dtype,
)
from xlstm_jax.distributed.data_parallel.planned import Decision, Planned
from xlstm_jax.distributed.data_parallel.reasons import PrngKeys
from xlstm_jax.distributed.data_parallel.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, UNEVEN, ShardChoice, balanced_orders, choose_shard_dim, padded_size

# ---------------------------------------------------------------------------------------------------------- sharding


class ShardRule(NamedTuple):
    """What a wrapper decides by: leaves from which size on, how they travel, and what to do where no dim divides."""

    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE
    uneven: str = UNEVEN[0]
    communication: Communication = DEFAULT_COMMUNICATION

    @classmethod
    def of(
        cls,
        min_weight_size: int,
        uneven: str = UNEVEN[0],
        gather_dtype: Any = None,
        grad_scatter_dtype: Any = None,
        replicas: Replicas | None = None,
    ) -> "ShardRule":
        """The rule of these options of ``shard_module_params``.

        Raises:
          TypeError, ValueError: one of them is not what it must be.
        """
        if not isinstance(min_weight_size, int | np.integer):
            raise TypeError(f"min_weight_size={min_weight_size!r} is not a number of values.")
        if uneven not in UNEVEN:
            raise ValueError(f"uneven={uneven!r} is none of {UNEVEN}.")
        if not isinstance(replicas, Replicas | None):
            raise TypeError(f"replicas={replicas!r}: pass Replicas({replicas!r}), with the axes of the copies.")
        return cls(
            int(min_weight_size),
            uneven,
            Communication(dtype_name(gather_dtype), dtype_name(grad_scatter_dtype), replicas),
        )


def shard_params(
    params: PyTree,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    *,
    uneven: str = UNEVEN[0],
) -> PyTree:
    """Splits parameters over a mesh axis: every device keeps its slice of each leaf that is large enough.

    Call it inside ``shard_map``, on values that are equal on all devices of the axis. To initialise a model use
    ``training.init_sharded``, which never holds the whole tree.

    Args:
      params: leaves [..., d, ...], bare or boxed; boxes that name other axes (tensor parallel) are kept and extended.
      axis_name: an axis or a tuple of axes; a dim is split over all of them. The order given is that of the largest
        leaf, outermost first, and rotates from leaf to leaf, so that all axes carry the same load.
      min_weight_size: leaves with fewer values stay whole; one of exactly this size is split.
      uneven: what happens to a leaf none of whose dims the axis divides; "replicate": it stays whole; "pad": it is
        split along its largest dim, with zeros up to the next multiple of N.
    Returns:
      The tree, leaves split along the largest dim that the axis divides and no other axis has taken, as
      ``nn.Partitioned`` with value [..., d / N, ...]. Leaves that are too small, that the axis does not divide, that
      are split over it already, and PRNG keys come back as they are.
    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_name)
    collectives.check_bound(axes, caller="shard_params")
    return box_shards(params, axes, ShardRule.of(min_weight_size, uneven))


def box_shards(params: PyTree, axes: tuple[str, ...], rule: ShardRule) -> PyTree:
    """``shard_params`` with all options of a wrapper in one ``rule``; inside ``shard_map``."""
    return _box_params(params, {axis: collectives.axis_size((axis,)) for axis in axes}, rule, collectives.own_shard)


def box_global(params: PyTree, axis_sizes: dict[str, int], rule: ShardRule) -> PyTree:
    """``shard_params`` outside of ``shard_map``: a box holds the global value, with padding where that is needed."""
    return _box_params(params, axis_sizes, rule, lambda value, dim, axes: value)


def _box_params(params: PyTree, axis_sizes: dict[str, int], rule: ShardRule, take: Callable[..., Any]) -> PyTree:
    """Boxes the leaves that are to be split, with what ``take(value, dim, axes)`` makes of each."""
    decided, parts = _decisions(params, axis_sizes, rule), math.prod(axis_sizes.values())

    def box(path, leaf):
        (dim, _), axes = decided[path]
        if dim is None:
            return leaf
        value, true_size = _padded(leaf_value(leaf), dim, parts)
        return box_dim(leaf, take(value, dim, axes), dim, axes, rule.communication, true_size)

    return map_leaves_with_path(box, params)


def _decisions(
    params: PyTree, axis_sizes: dict[str, int], rule: ShardRule
) -> dict[str, tuple[ShardChoice, tuple[str, ...]]]:
    """For each leaf by its path: which dim is split, if any, and in what order of the axes."""
    leaves = dict(leaves_with_path(params))
    choices = {path: _choice(leaf, axis_sizes, rule) for path, leaf in leaves.items()}
    split = [path for path, choice in choices.items() if choice.dim is not None]
    orders = balanced_orders([_num_bytes(leaves[path]) for path in split], axis_sizes)
    order_of = dict(zip(split, orders, strict=True))
    return {path: (choice, order_of.get(path, ())) for path, choice in choices.items()}


def _choice(leaf: Any, axis_sizes: dict[str, int], rule: ShardRule) -> ShardChoice:
    value = leaf_value(leaf)
    if is_prng_key(value):
        return ShardChoice(None, PrngKeys())
    return choose_shard_dim(np.shape(value), leaf_names(leaf), axis_sizes, rule.min_weight_size, rule.uneven)


def _num_bytes(leaf: Any) -> int:
    value = leaf_value(leaf)
    return math.prod(np.shape(value)) * value_dtype(value).itemsize


def _padded(value: Any, dim: int, parts: int) -> tuple[Any, int | None]:
    """The value with ``dim`` padded by zeros to a multiple of ``parts``, and its size before; None where that fits."""
    size = value.shape[dim]
    if size % parts == 0:
        return value, None
    widths = [(0, padded_size(size, parts) - size if d == dim else 0) for d in range(value.ndim)]
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: jnp.pad(x, widths), value), size
    return jnp.pad(value, widths), size


def plan_params(params: PyTree, axis_sizes: dict[str, int], rule: ShardRule) -> PyTree:
    """What ``shard_params`` would decide: every leaf, global or abstract, split or not, in a box that says why.

    Args:
      params: leaves, bare or boxed.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      rule: by which it is decided.
    Returns:
      The tree with every leaf as ``Planned``.
    Raises:
      ValueError: a dtype does not fit a leaf that would be gathered; names the leaf.
    """
    decided, parts = _decisions(params, axis_sizes, rule), math.prod(axis_sizes.values())

    def box(path, leaf):
        value, (choice, axes) = leaf_value(leaf), decided[path]
        shape, boxed, dtypes = np.shape(value), leaf, [str(value_dtype(value))] * 2
        if choice.dim is not None:
            padded, true_size = _padded(value, choice.dim, parts)
            boxed = box_dim(leaf, padded, choice.dim, axes, rule.communication, true_size)
            gathered = cast_dtype(value, rule.communication.gather_dtype, "gather_dtype", path)
            dtypes = [
                str(jnp.dtype(dtype))
                for dtype in (gathered, scatter_dtype(value, rule.communication.grad_scatter_dtype, path))
            ]
        return Planned.of(leaf, boxed, Decision(tuple(axis_sizes), choice, shape, leaf_names(boxed), *dtypes))

    return map_leaves_with_path(box, params)

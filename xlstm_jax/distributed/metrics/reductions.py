"""Metric dictionaries reduced to one value per name: three places to do it, one set of names.

  on global arrays, in plain jit     reduce_mean, reduce_sum, reduce_max, reduce_min, reduce_custom
  inside shard_map or pmap           the same names with _collective, and all_gather
  outside, on gathered arrays        collect_from_devices

Dictionaries may be nested. Values other than ``jax.Array`` (a name, a Python number, a NumPy array, a key) pass through
untouched, unless ``reduce_fn`` names an operation for them. However many metrics there are, a call issues one
collective per operation and dtype; means are sums that are divided afterwards, and values narrower than 32 bits are
summed in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from xlstm_jax.common_types import AxisNames, Metrics, PyTree
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.dtypes import common_dtype, is_prng_key, wide_dtype

DEFAULT_AXIS = "batch"
OPERATIONS = ("mean", "sum", "max", "min")
# A metric that ``reduce_fn`` does not name: arrays are averaged, numbers pass through.
UNNAMED = ""
NUMBERS = (int, float, np.number, np.bool_)  # bool is an int
Operations = Mapping[str, "str | Operations | None"]  # by the names of the metrics, nested like them


def reduce_mean(metrics: Metrics) -> Metrics:
    """The mean over all entries of each array; the mean of integers or bools is a float32. Scalars stay.

    For global arrays, under plain ``jit`` or outside of it.

    >>> reduce_mean({"loss": jnp.arange(4.0), "run": "a"})
    {'loss': Array(1.5, dtype=float32), 'run': 'a'}
    """
    return _reduce_global(metrics, "mean")


def reduce_sum(metrics: Metrics) -> Metrics:
    """The sum over all entries of each array; see ``reduce_mean``. The sum of bools is a count.

    >>> reduce_sum({"hits": jnp.array([True, False, True])})
    {'hits': Array(2, dtype=int32)}
    """
    return _reduce_global(metrics, "sum")


def reduce_max(metrics: Metrics) -> Metrics:
    """The largest entry of each array; see ``reduce_mean``.

    >>> reduce_max({"norm": jnp.arange(4.0)})
    {'norm': Array(3., dtype=float32)}
    """
    return _reduce_global(metrics, "max")


def reduce_min(metrics: Metrics) -> Metrics:
    """The smallest entry of each array; see ``reduce_mean``.

    >>> reduce_min({"norm": jnp.arange(4.0)})
    {'norm': Array(0., dtype=float32)}
    """
    return _reduce_global(metrics, "min")


def reduce_custom(metrics: Metrics, reduce_fn: Operations | None = None) -> Metrics:
    """Each metric by an operation of its own, on global arrays as for ``reduce_mean``.

    >>> reduce_custom({"loss": jnp.arange(4.0), "tokens": jnp.arange(4)}, {"tokens": "sum"})
    {'loss': Array(1.5, dtype=float32), 'tokens': Array(6, dtype=int32)}

    Args:
      reduce_fn: name -> "mean", "sum", "max", "min", or None, which leaves the metric alone. Metrics that it does not
        name are averaged. A nested dictionary takes one operation for all its metrics, or a dictionary.
    Raises:
      ValueError: an unknown operation; a name that the metrics do not have; or "sum" for a Python number, which has no
        entries to sum. Nothing has been reduced then.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if isinstance(leaf, NUMBERS) and _operation_at(path, reduce_fn or {}) == "sum":
            raise ValueError(
                f"reduce_fn[{jax.tree_util.keystr(path, simple=True, separator='/')!r}] is 'sum', but that metric is "
                f"{leaf!r}, a number with no entries to be summed. Pass an array that has one for each device or row, "
                "or None to leave it alone. (Inside shard_map reduce_custom_collective sums numbers over devices.)"
            )
    return _reduce_each(metrics, reduce_fn, _reduce_global)


def _reduce_global(tree: PyTree, operation: str) -> PyTree:
    reduce = getattr(jnp, operation)
    return jax.tree.map(lambda x: reduce(x) if _is_metric(x) and x.ndim > 0 else x, tree)


def _is_metric(value: object) -> bool:
    return isinstance(value, jax.Array) and not is_prng_key(value)


def _reduce_each(
    metrics: Metrics, reduce_fn: Operations | None, reduce: Callable[[list[Any], str], list[Any]]
) -> Metrics:
    """Sorts the leaves by operation and calls ``reduce(leaves, operation)`` once for each."""
    chosen = {} if reduce_fn is None else reduce_fn
    _check_operations(metrics, chosen, "")
    with_paths, structure = jax.tree_util.tree_flatten_with_path(metrics)
    named = [_operation_at(path, chosen) for path, _ in with_paths]
    # A number or NumPy array is reduced only under its own name: unnamed it is a label, such as an epoch.
    leaves = [
        jnp.asarray(leaf) if operation and isinstance(leaf, (*NUMBERS, np.ndarray)) else leaf
        for (_, leaf), operation in zip(with_paths, named, strict=True)
    ]
    operations = ["mean" if operation is UNNAMED else operation for operation in named]
    # One call for each operation, not for each leaf: a call is one collective per dtype.
    for operation in OPERATIONS:
        indices = [i for i, name in enumerate(operations) if name == operation]
        for i, value in zip(indices, reduce([leaves[i] for i in indices], operation), strict=True):
            leaves[i] = value
    return jax.tree.unflatten(structure, leaves)


def _check_operations(metrics: PyTree, chosen: object, path: str) -> None:
    """Raises where ``chosen`` has an unknown operation, or a name that the metrics do not have."""
    if not isinstance(chosen, Mapping):
        if chosen is not None and chosen not in OPERATIONS:
            raise ValueError(
                f"reduce_fn[{path!r}] is {chosen!r}; the operations are {', '.join(map(repr, OPERATIONS))}, and None "
                "for a metric that is to be left alone."
            )
        return
    if not isinstance(metrics, Mapping):
        raise ValueError(f"reduce_fn[{path!r}] is a dictionary, but that metric is {type(metrics).__name__}.")
    for name, operation in chosen.items():
        inner = f"{path}/{name}" if path else str(name)
        if name not in metrics:
            raise ValueError(
                f"reduce_fn has {inner!r}, which the metrics do not have: {sorted(metrics, key=str)}. "
                "(A metric that is not named is averaged, so a misspelt name would be averaged in silence.)"
            )
        _check_operations(metrics[name], operation, inner)


def _operation_at(path: Sequence[Any], chosen: Any) -> str | None:
    """The operation for the leaf at a key path: ``UNNAMED`` if it has none, None if the leaf is to stay."""
    for key in path:
        # One operation for a nested dictionary holds for all leaves below it.
        if isinstance(chosen, Mapping):
            # A list has no keys: `_check_operations` refuses a dictionary of operations for it.
            chosen = chosen.get(getattr(key, "key", None), UNNAMED)
    return chosen


def reduce_mean_collective(
    metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS, *, weight: ArrayLike | None = None
) -> Metrics:
    """The mean over devices of each metric, elementwise; inside ``shard_map`` or ``pmap``.

    >>> split, step = jax.P(("dp", "fsdp")), lambda x: reduce_mean_collective({"loss": x}, ("dp", "fsdp"))
    >>> jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=jax.P())(jnp.arange(8.0))["loss"]
    Array([3.5], dtype=float32)

    Args:
      metrics: this device's values, of any shape.
      axis_name: the axis or the tuple of axes that the batch is split over.
      weight: a scalar, the number of examples or tokens behind this device's means; by default all devices count the
        same. The result is sum(weight * value) / sum(weight), and 0 if all weights are 0. Values of devices with
        weight 0 are ignored, NaN included.
    Returns:
      The means, equal on all devices (by type, too); integers and bools as float32, other dtypes kept.
    """
    return _over_devices(metrics, "mean", collectives.bound_axes(axis_name, caller="reduce_mean_collective"), weight)


def reduce_sum_collective(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """The sum over devices of each metric, elementwise, as by ``psum``; inside ``shard_map`` or ``pmap``.

    Every device counts, in both ``check_vma`` modes. So name only the axes that the batch is split over: along a tensor
    parallel axis devices hold equal values, which would be counted several times. Dtypes are those of ``jnp.sum``.

    >>> jax.pmap(lambda x: reduce_sum_collective({"n": x}), axis_name="batch")(jnp.arange(8))["n"][0]
    Array(28, dtype=int32)
    """
    return _over_devices(metrics, "sum", collectives.bound_axes(axis_name, caller="reduce_sum_collective"))


def reduce_max_collective(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """The largest over devices of each metric, elementwise; inside ``shard_map`` or ``pmap``.

    >>> jax.pmap(lambda x: reduce_max_collective({"peak": x}), axis_name="batch")(jnp.arange(8))["peak"][0]
    Array(7, dtype=int32)
    """
    return _over_devices(metrics, "max", collectives.bound_axes(axis_name, caller="reduce_max_collective"))


def reduce_min_collective(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """The smallest over devices of each metric, elementwise; inside ``shard_map`` or ``pmap``.

    >>> jax.pmap(lambda x: reduce_min_collective({"least": x}), axis_name="batch")(jnp.arange(8))["least"][0]
    Array(0, dtype=int32)
    """
    return _over_devices(metrics, "min", collectives.bound_axes(axis_name, caller="reduce_min_collective"))


def reduce_custom_collective(
    metrics: Metrics,
    reduce_fn: Operations | None = None,
    axis_name: AxisNames = DEFAULT_AXIS,
    *,
    weight: ArrayLike | None = None,
) -> Metrics:
    """Each metric by an operation of its own over devices; ``reduce_fn`` and errors as in ``reduce_custom``.

    A Python number or NumPy array that ``reduce_fn`` names is every device's value: the sum of 2 over 8 devices is 16.
    ``weight`` is the weight of the means; see ``reduce_mean_collective``.

    >>> step = lambda x: reduce_custom_collective({"loss": x, "peak": x, "n": 2}, {"peak": "max", "n": "sum"}, "batch")
    >>> {name: float(x[0]) for name, x in jax.pmap(step, axis_name="batch")(jnp.arange(8.0)).items()}
    {'loss': 3.5, 'n': 16.0, 'peak': 7.0}
    """
    axes = collectives.bound_axes(axis_name, caller="reduce_custom_collective")
    return _reduce_each(metrics, reduce_fn, lambda leaves, operation: _over_devices(leaves, operation, axes, weight))


def all_gather(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """Every device's values: [...] -> [n, ...], equal on all devices; inside ``shard_map`` or ``pmap``.

    For a tuple of axes n is the product of their sizes, the first axis being the outermost.

    >>> jax.pmap(lambda x: all_gather({"loss": x}), axis_name="batch")(jnp.arange(8))["loss"][0]
    Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return _on_arrays(
        metrics, partial(collectives.all_gather_stacked, axes=collectives.bound_axes(axis_name, caller="all_gather"))
    )


def _on_arrays(tree: PyTree, fn: Callable[[list[jax.Array]], list[jax.Array]]) -> PyTree:
    """``fn`` on all the arrays of a tree together; the rest stays."""
    leaves, structure = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if _is_metric(leaf)]
    for i, value in zip(indices, fn([leaves[i] for i in indices]), strict=True):
        leaves[i] = value
    return jax.tree.unflatten(structure, leaves)


def _over_devices(tree: PyTree, operation: str, axes: tuple[str, ...], weight: ArrayLike | None = None) -> PyTree:
    """The arrays of a tree reduced over devices, sums in the dtype of ``jnp.sum``; the rest stays."""

    def reduced(arrays: list[jax.Array]) -> list[jax.Array]:
        dtypes = [_sum_dtype(array.dtype) if operation == "sum" else array.dtype for array in arrays]
        # Extrema would survive a narrow dtype. Widened, they share one collective with the float32 arrays.
        wide = [array.astype(wide_dtype(_sum_dtype(array.dtype))) for array in arrays]
        out = collectives.all_reduce([operation] * len(wide), wide, axes)
        return [value.astype(dtype) for value, dtype in zip(out, dtypes, strict=True)]

    return _on_arrays(tree, partial(_means, axes=axes, weight=weight) if operation == "mean" else reduced)


def _sum_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of ``jnp.sum``: bools and integers narrower than 32 bits are summed as 32 bits."""
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def _means(arrays: list[jax.Array], axes: tuple[str, ...], weight: ArrayLike | None) -> list[jax.Array]:
    """Weighted means, the weights travelling with the sums; with equal weights the plain mean."""
    if not arrays:
        return []
    dtypes = [array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.dtype(jnp.float32) for array in arrays]
    values = [array.astype(wide_dtype(dtype)) for array, dtype in zip(arrays, dtypes, strict=True)]
    # Sums divided at the end, not `pmean`: with a weight the divisor travels in the collective of the sums.
    total: jax.Array | int = collectives.axis_size(axes)
    if weight is None:
        sums = collectives.all_reduce(["sum"] * len(values), values, axes)
    else:
        if jnp.shape(weight) != ():
            raise ValueError(
                f"weight has the shape {jnp.shape(weight)}; it is one number per device, the weight of all that its "
                "means are over. Pass the sum of the weights."
            )
        # In the dtype of the sums, so that it joins their collective; float32 counts tokens exactly up to 2^24.
        weight = jnp.asarray(weight, wide_dtype(common_dtype(jnp.result_type(weight), jnp.float32)))
        # Not by the product alone: a device without weight may hold NaN, and 0 * NaN is NaN.
        weighted = [jnp.where(weight != 0, x * weight.astype(x.dtype), 0) for x in values]
        *sums, weights = collectives.all_reduce(["sum"] * (len(values) + 1), [*weighted, weight], axes)
        # Without any weight the sums are 0, and 0 / 1 is the promised 0, where 0 / 0 would be NaN.
        total = jnp.where(weights != 0, weights, 1)
    return [(value / total).astype(dtype) for value, dtype in zip(sums, dtypes, strict=True)]


def collect_from_devices(metrics: Metrics) -> Metrics:
    """Arrays with a leading device dim, as ``pmap`` and ``all_gather`` return, become lists of n values.

    Scalars and values other than ``jax.Array`` stay. Call it outside of ``shard_map`` and ``pmap``.

    >>> [float(loss) for loss in collect_from_devices({"loss": jnp.array([0.5, 1.5])})["loss"]]
    [0.5, 1.5]

    Raises:
      ValueError: an array lies on other processes too and differs between devices, so that it cannot be read here.
    """

    def as_list(path: Any, value: Any) -> Any:
        if not _is_metric(value) or value.ndim == 0:
            return value
        if value.is_fully_addressable:
            return list(value)
        # JAX does not iterate over arrays of several processes, but any one copy has all the values.
        if value.is_fully_replicated:
            return list(value.addressable_data(0))
        raise ValueError(
            f"metrics{jax.tree_util.keystr(path)} lies on devices of several processes and differs between them. Call "
            "all_gather inside of shard_map, and return its result with PartitionSpec()."
        )

    return jax.tree_util.tree_map_with_path(as_list, metrics)

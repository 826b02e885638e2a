"""Reductions of metric dictionaries to one value per name.

  on global arrays, in plain jit     reduce_mean, reduce_sum, reduce_max, reduce_min, reduce_custom
  inside shard_map or pmap           the same names with _collective, and all_gather
  outside, on gathered arrays        collect_from_devices

Dictionaries may be nested. Python numbers and NumPy arrays are returned unchanged unless ``reduce_fn`` names an
operation for them; strings, PRNG keys and other objects are always returned unchanged. A call issues one collective
per operation and dtype, for any number of metrics. A mean is a sum that is divided after the collective; floats
narrower than 32 bits are summed in float32. An axis that is not bound raises a ``ValueError``.
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
from xlstm_jax.distributed.data_parallel.wire.collectives import common_dtype, is_prng_key, wide_dtype

DEFAULT_AXIS = "batch"
OPERATIONS = ("mean", "sum", "max", "min")
# Operation of a metric that ``reduce_fn`` does not name: arrays are averaged, numbers are returned unchanged.
UNNAMED = ""
NUMBERS = (int, float, np.number, np.bool_)  # bool is an int
Operations = Mapping[str, "str | Operations | None"]  # metric name -> operation, nested like the metrics


def reduce_mean(metrics: Metrics) -> Metrics:
    """Returns the metrics with each array replaced by the mean of its entries; scalars are returned unchanged.

    For global arrays, under plain ``jit`` or outside of ``jit``. The mean of integers or bools is a float32.

    >>> reduce_mean({"loss": jnp.arange(4.0), "run": "a"})
    {'loss': Array(1.5, dtype=float32), 'run': 'a'}
    """
    return _reduce_global(metrics, "mean")


def reduce_sum(metrics: Metrics) -> Metrics:
    """Returns the metrics with each array replaced by the sum of its entries; scalars are returned unchanged.

    For global arrays, under plain ``jit`` or outside of ``jit``. Values other than JAX arrays are unchanged. The sum of
    bools is an integer count.

    >>> reduce_sum({"hits": jnp.array([True, False, True])})
    {'hits': Array(2, dtype=int32)}
    """
    return _reduce_global(metrics, "sum")


def reduce_max(metrics: Metrics) -> Metrics:
    """Returns the metrics with each array replaced by its largest entry; scalars are returned unchanged.

    For global arrays, under plain ``jit`` or outside of ``jit``. Values other than JAX arrays are unchanged.

    >>> reduce_max({"norm": jnp.arange(4.0)})
    {'norm': Array(3., dtype=float32)}
    """
    return _reduce_global(metrics, "max")


def reduce_min(metrics: Metrics) -> Metrics:
    """Returns the metrics with each array replaced by its smallest entry; scalars are returned unchanged.

    For global arrays, under plain ``jit`` or outside of ``jit``. Values other than JAX arrays are unchanged.

    >>> reduce_min({"norm": jnp.arange(4.0)})
    {'norm': Array(0., dtype=float32)}
    """
    return _reduce_global(metrics, "min")


def reduce_custom(metrics: Metrics, reduce_fn: Operations | None = None) -> Metrics:
    """Reduces each metric by the operation that ``reduce_fn`` names, over the entries of a global array.

    >>> reduce_custom({"loss": jnp.arange(4.0), "tokens": jnp.arange(4)}, {"tokens": "sum"})
    {'loss': Array(1.5, dtype=float32), 'tokens': Array(6, dtype=int32)}

    Args:
      reduce_fn: name -> "mean", "sum", "max", "min", or None to return the metric unchanged. Metrics missing from
        ``reduce_fn`` are averaged. A nested dictionary of metrics takes a single operation or a dictionary.
    Raises:
      ValueError: an operation is unknown; a name is missing from the metrics; a dictionary of operations is for a
        metric that is no dictionary; or the operation is "sum" for a Python number, which has no entries to sum.
        Raised before anything is reduced.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if isinstance(leaf, NUMBERS) and _operation_at(path, reduce_fn or {}) == "sum":
            raise ValueError(
                f"reduce_fn[{jax.tree_util.keystr(path, simple=True, separator='/')!r}] is 'sum', but that metric is "
                f"{leaf!r}, a number with no entries to be summed. Pass an array with one entry per device or row, or "
                "None to keep the number. (Inside shard_map, reduce_custom_collective sums numbers over devices.)"
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
    """Reduces each leaf of ``metrics`` by the operation that ``reduce_fn`` has for the leaf's name ("mean" by default).

    ``reduce(leaves, operation)`` is called once per operation, with a list of leaves, and returns the reduced leaves in
    order. Numbers and NumPy arrays become arrays if ``reduce_fn`` names them. Leaves with the operation None are
    returned unchanged. Raises a ``ValueError`` if ``reduce_fn`` does not fit the metrics.
    """
    chosen = {} if reduce_fn is None else reduce_fn
    _check_operations(metrics, chosen, "")
    with_paths, structure = jax.tree_util.tree_flatten_with_path(metrics)
    named = [_operation_at(path, chosen) for path, _ in with_paths]
    # A number or NumPy array is reduced only if `reduce_fn` names it; otherwise it is a label, such as an epoch.
    leaves = [
        jnp.asarray(leaf) if operation and isinstance(leaf, (*NUMBERS, np.ndarray)) else leaf
        for (_, leaf), operation in zip(with_paths, named, strict=True)
    ]
    operations = ["mean" if operation is UNNAMED else operation for operation in named]
    # One call per operation instead of per leaf: each call issues one collective per dtype.
    for operation in OPERATIONS:
        indices = [i for i, name in enumerate(operations) if name == operation]
        for i, value in zip(indices, reduce([leaves[i] for i in indices], operation), strict=True):
            leaves[i] = value
    return jax.tree.unflatten(structure, leaves)


def _check_operations(metrics: PyTree, chosen: object, path: str) -> None:
    """Raises a ``ValueError`` if ``chosen`` has an unknown operation, or a name that is missing from the metrics.

    ``chosen`` is an operation, None, or a dict from names to such values. A dict for a metric that is no dict also
    raises. ``path`` is the path of ``metrics`` within all metrics, for the error.
    """
    if not isinstance(chosen, Mapping):
        if chosen is not None and chosen not in OPERATIONS:
            raise ValueError(
                f"reduce_fn[{path!r}] is {chosen!r}; the operations are {', '.join(map(repr, OPERATIONS))}, and None "
                "for a metric to keep unchanged."
            )
        return
    if not isinstance(metrics, Mapping):
        raise ValueError(f"reduce_fn[{path!r}] is a dictionary, but that metric is {type(metrics).__name__}.")
    for name, operation in chosen.items():
        inner = f"{path}/{name}" if path else str(name)
        if name not in metrics:
            raise ValueError(
                f"reduce_fn has {inner!r}, which the metrics do not have: {sorted(metrics, key=str)}. "
                "(A metric missing from reduce_fn is averaged, so a misspelt name would be averaged silently.)"
            )
        _check_operations(metrics[name], operation, inner)


def _operation_at(path: Sequence[Any], chosen: Any) -> str | None:
    """Returns the operation that ``chosen`` (an operation, or nested dicts) has for the leaf at the pytree ``path``.

    ``UNNAMED`` ("") if ``chosen`` does not name the leaf; None to keep the leaf unchanged. An operation for a nested
    dict of metrics applies to all leaves in the dict.
    """
    for key in path:
        # A single operation for a nested dictionary applies to every leaf below it.
        if isinstance(chosen, Mapping):
            # A list has no keys: `_check_operations` rejects a dictionary of operations for a list.
            chosen = chosen.get(getattr(key, "key", None), UNNAMED)
    return chosen


def reduce_mean_collective(
    metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS, *, weight: ArrayLike | None = None
) -> Metrics:
    """Averages each metric over devices, elementwise; inside ``shard_map`` or ``pmap``.

    >>> split, step = jax.P(("dp", "fsdp")), lambda x: reduce_mean_collective({"loss": x}, ("dp", "fsdp"))
    >>> jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=jax.P())(jnp.arange(8.0))["loss"]
    Array([3.5], dtype=float32)

    Args:
      metrics: values of this device, of any shape.
      axis_name: the axis or the tuple of axes that the batch is split over.
      weight: a scalar, the number of examples or tokens behind the means of this device; equal for every device by
        default. The result is sum(weight * value) / sum(weight), and 0 if the sum of weights is 0. Values of devices
        with weight 0 are ignored, NaN included.
    Returns:
      The means, replicated along ``axis_name`` (also in their types); integers and bools become float32, other dtypes
      are kept.
    Raises:
      ValueError: an axis is not bound, or ``weight`` is not a scalar.
    """
    return _over_devices(metrics, "mean", collectives.bound_axes(axis_name, caller="reduce_mean_collective"), weight)


def reduce_sum_collective(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """Sums each metric over devices, elementwise, as ``psum`` does; inside ``shard_map`` or ``pmap``.

    Every device counts, in both ``check_vma`` modes. So name only the axes that the batch is split over: along a
    tensor parallel axis devices hold equal values, which would be counted several times. Result dtypes are as for
    ``jnp.sum``. Results are replicated along ``axis_name``; an unbound axis raises a ``ValueError``.

    >>> jax.pmap(lambda x: reduce_sum_collective({"n": x}), axis_name="batch")(jnp.arange(8))["n"][0]
    Array(28, dtype=int32)
    """
    return _over_devices(metrics, "sum", collectives.bound_axes(axis_name, caller="reduce_sum_collective"))


def reduce_max_collective(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """Returns the maximum over devices of each metric, elementwise; inside ``shard_map`` or ``pmap``.

    Results have the dtypes of the metrics, and are replicated along ``axis_name``. An unbound axis raises a
    ``ValueError``.

    >>> jax.pmap(lambda x: reduce_max_collective({"peak": x}), axis_name="batch")(jnp.arange(8))["peak"][0]
    Array(7, dtype=int32)
    """
    return _over_devices(metrics, "max", collectives.bound_axes(axis_name, caller="reduce_max_collective"))


def reduce_min_collective(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """Returns the minimum over devices of each metric, elementwise; inside ``shard_map`` or ``pmap``.

    Results have the dtypes of the metrics, and are replicated along ``axis_name``. An unbound axis raises a
    ``ValueError``.

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
    """Reduces each metric over devices, elementwise, by its operation; inside ``shard_map`` or ``pmap``.

    >>> step = lambda x: reduce_custom_collective({"loss": x, "peak": x, "n": 2}, {"peak": "max", "n": "sum"}, "batch")
    >>> {name: float(x[0]) for name, x in jax.pmap(step, axis_name="batch")(jnp.arange(8.0)).items()}
    {'loss': 3.5, 'n': 16.0, 'peak': 7.0}

    Args:
      metrics: values of this device. A Python number or NumPy array that ``reduce_fn`` names counts as the value of
        every device: the sum of 2 over 8 devices is 16.
      reduce_fn: name -> "mean", "sum", "max", "min", or None to return the metric unchanged. Arrays missing from
        ``reduce_fn`` are averaged. A nested dictionary of metrics takes a single operation or a dictionary.
      axis_name: the axis or the tuple of axes that the batch is split over.
      weight: a scalar, the weight of this device in means; see ``reduce_mean_collective``.
    Raises:
      ValueError: an axis is not bound, ``weight`` is not a scalar, an operation is unknown, or ``reduce_fn`` does not
        fit the metrics.
    """
    axes = collectives.bound_axes(axis_name, caller="reduce_custom_collective")
    return _reduce_each(metrics, reduce_fn, lambda leaves, operation: _over_devices(leaves, operation, axes, weight))


def all_gather(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
    """Gathers the metrics of every device: [...] -> [n, ...], replicated; inside ``shard_map`` or ``pmap``.

    For a tuple of axes n is the product of the axis sizes, and the first axis is the outermost. An unbound axis raises
    a ``ValueError``.

    >>> jax.pmap(lambda x: all_gather({"loss": x}), axis_name="batch")(jnp.arange(8))["loss"][0]
    Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    return _on_arrays(
        metrics, partial(collectives.all_gather_stacked, axes=collectives.bound_axes(axis_name, caller="all_gather"))
    )


def _on_arrays(tree: PyTree, fn: Callable[[list[jax.Array]], list[jax.Array]]) -> PyTree:
    """Returns ``tree`` with its JAX arrays replaced by the results of one call ``fn(list of these arrays)``, in order.

    Other leaves (numbers, NumPy arrays, strings, PRNG keys) are unchanged.
    """
    leaves, structure = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if _is_metric(leaf)]
    for i, value in zip(indices, fn([leaves[i] for i in indices]), strict=True):
        leaves[i] = value
    return jax.tree.unflatten(structure, leaves)


def _over_devices(tree: PyTree, operation: str, axes: tuple[str, ...], weight: ArrayLike | None = None) -> PyTree:
    """Returns ``tree`` with each JAX array reduced elementwise over the devices of ``axes``; other leaves unchanged.

    ``operation`` is "mean", "sum", "max" or "min". ``weight`` is a scalar, this device's weight of a mean (None: equal
    weights), and has no effect on other operations. Sums have the dtype of ``jnp.sum``; extrema, and means of floats,
    have the dtype of the array; means of integers and bools are float32.
    """

    def reduced(arrays: list[jax.Array]) -> list[jax.Array]:
        dtypes = [_sum_dtype(array.dtype) if operation == "sum" else array.dtype for array in arrays]
        # Extrema are exact in a narrow dtype. They are widened to share one collective with the float32 arrays.
        wide = [array.astype(wide_dtype(_sum_dtype(array.dtype))) for array in arrays]
        out = collectives.all_reduce([operation] * len(wide), wide, axes)
        return [value.astype(dtype) for value, dtype in zip(out, dtypes, strict=True)]

    return _on_arrays(tree, partial(_means, axes=axes, weight=weight) if operation == "mean" else reduced)


def _sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of ``jnp.sum`` for values of ``dtype``.

    Without x64, bools and integers narrower than 32 bits become 32-bit integers; other dtypes are kept.
    """
    return jax.eval_shape(jnp.sum, jax.ShapeDtypeStruct((), dtype)).dtype


def _means(arrays: list[jax.Array], axes: tuple[str, ...], weight: ArrayLike | None) -> list[jax.Array]:
    """Returns the elementwise weighted means of ``arrays`` over the devices of ``axes``, in order.

    ``weight`` is a scalar, the weight of this device; None: equal weights. The mean is 0 if all weights are 0. Integers
    and bools become float32, other dtypes are kept. Raises a ``ValueError`` unless ``weight`` is a scalar. Weights are
    summed in the same collective as the weighted arrays.
    """
    if not arrays:
        return []
    dtypes = [array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.dtype(jnp.float32) for array in arrays]
    values = [array.astype(wide_dtype(dtype)) for array, dtype in zip(arrays, dtypes, strict=True)]
    # Sums divided at the end instead of `pmean`: the sum of weights is computed in the collective of the sums.
    total: jax.Array | int = collectives.axis_size(axes)
    if weight is None:
        sums = collectives.all_reduce(["sum"] * len(values), values, axes)
    else:
        if jnp.shape(weight) != ():
            raise ValueError(
                f"weight has the shape {jnp.shape(weight)}; it is one number per device, the weight of the examples "
                "behind the means of the device. Pass the sum of the weights."
            )
        # In the dtype of the sums, to share their collective; float32 counts tokens exactly up to 2^24.
        weight = jnp.asarray(weight, wide_dtype(common_dtype(jnp.result_type(weight), jnp.float32)))
        # `where` as well as the product: a device of weight 0 may hold NaN, and 0 * NaN is NaN.
        weighted = [jnp.where(weight != 0, x * weight.astype(x.dtype), 0) for x in values]
        *sums, weights = collectives.all_reduce(["sum"] * (len(values) + 1), [*weighted, weight], axes)
        # If every weight is 0 the sums are 0: dividing by 1 gives the documented 0, where 0 / 0 would be NaN.
        total = jnp.where(weights != 0, weights, 1)
    return [(value / total).astype(dtype) for value, dtype in zip(sums, dtypes, strict=True)]


def collect_from_devices(metrics: Metrics) -> Metrics:
    """Converts arrays with a leading device dim, as from ``pmap`` or ``all_gather``: [n, ...] -> a list of n arrays.

    The first dim of every array counts as the device dim. Scalars and values other than ``jax.Array`` are returned
    unchanged. Call the function outside of ``shard_map`` and ``pmap``.

    >>> [float(loss) for loss in collect_from_devices({"loss": jnp.array([0.5, 1.5])})["loss"]]
    [0.5, 1.5]

    Raises:
      ValueError: an array spans several processes and differs between devices, so this process cannot read all of it.
    """

    def as_list(path: Any, value: Any) -> Any:
        if not _is_metric(value) or value.ndim == 0:
            return value
        if value.is_fully_addressable:
            return list(value)
        # JAX does not iterate over arrays of several processes, but each local copy has every value.
        if value.is_fully_replicated:
            return list(value.addressable_data(0))
        raise ValueError(
            f"metrics{jax.tree_util.keystr(path)} is on devices of several processes and differs between devices. Call "
            "all_gather inside of shard_map, and return the result with PartitionSpec()."
        )

    return jax.tree_util.tree_map_with_path(as_list, metrics)

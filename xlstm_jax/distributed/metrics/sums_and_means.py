"""Sums, extrema, means, norms, rates, and several metrics under one name.

Every metric takes values of any shape, [b, ...], and ``weight``: one number for all, or one per row of the leading
dims, [b] or [b, ...]. Rows with weight 0 (padding) are not looked at, whatever they hold.

In the examples ``metric.result(metric.observe(values))`` is the value of one batch on one device. In a training step
take ``empty``, ``update``, ``sync`` and ``compute``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.trees import map_sharded
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Minimum, Total, like_rows, wide_float
from xlstm_jax.distributed.metrics.layout import Cells
from xlstm_jax.distributed.metrics.pure_metric import PureMetric


@dataclass(frozen=True)
class Sum(PureMetric):
    """The sum of all values: a float, compensated, or with an integer ``dtype`` an exact 64-bit integer.

    Of nothing it is 0. The value of an integer sum is an int64 where x64 is on, else a float32 rounded beyond 2^24;
    ``synced.cells.exact()`` is the integer itself, on the host.

    >>> float(Sum().result(Sum().observe(jnp.array([1.0, 2.5, jnp.nan]), weight=jnp.array([1, 1, 0]))))
    3.5
    """

    dtype: DTypeLike = jnp.float32

    def identity(self) -> Cells:
        return self._cell.identity()

    def observe(self, values: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        return self._cell.of(values, weight)

    def result(self, cells: Cells) -> jax.Array:
        return cells.value

    @property
    def _cell(self) -> type[Total] | type[Count]:
        return Count if jnp.issubdtype(self.dtype, jnp.integer) else Total


@dataclass(frozen=True)
class _Extremum(PureMetric):
    dtype: DTypeLike = jnp.float32
    cell: ClassVar[type[Maximum]]

    def identity(self) -> Cells:
        return self.cell.identity(dtype=self.dtype)

    def observe(self, values: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        return self.cell.of(jnp.asarray(values, self.dtype), weight)

    def result(self, cells: Cells) -> jax.Array:
        return cells.value


@dataclass(frozen=True)
class Max(_Extremum):
    """The largest value in ``dtype``; of nothing it is -inf, or the dtype's minimum. A NaN among the values shows.

    >>> float(Max().result(Max().observe(jnp.array([-1.0, -5.0]))))
    -1.0
    """

    cell = Maximum


@dataclass(frozen=True)
class Min(_Extremum):
    """The smallest value in ``dtype``; of nothing it is +inf, or the dtype's maximum. A NaN among the values shows.

    >>> float(Min().result(Min().observe(jnp.array([-1.0, -5.0]))))
    -5.0
    """

    cell = Minimum


@dataclass(frozen=True)
class WeightedMean(PureMetric):
    """sum(weight * value) / sum(weight) over everything seen; ``empty_value`` where the weight is 0.

    >>> mean = WeightedMean()
    >>> float(mean.result(mean.observe(jnp.array([1.0, 4.0]), weight=jnp.array([3, 1]))))
    1.75
    """

    empty_value: float = 0.0

    def identity(self) -> Cells:
        return {"total": Total.identity(), "weight": Total.identity()}

    def observe(self, values: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        total, shape = Total.of(values, weight), jnp.shape(values)
        if weight is None:
            # Shapes are known while tracing, so nothing is summed at run time.
            weights = jnp.asarray(math.prod(shape), wide_float())
        else:
            weights = jnp.broadcast_to(like_rows(weight, jnp.asarray(values)).astype(wide_float()), shape)
        return {"total": total, "weight": Total.of(weights)}

    def result(self, cells: Cells) -> jax.Array:
        return ratio(cells["total"].value, cells["weight"].value, self.empty_value)


def ratio(numerator: jax.Array, denominator: jax.Array, empty_value: float) -> jax.Array:
    """numerator / denominator, and ``empty_value`` where the denominator is 0."""
    # Two `where`: a 0 / 0 in the branch not taken would still stop `jax_debug_nans` and make gradients NaN.
    some = denominator != 0
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), empty_value)


@dataclass(frozen=True)
class Perplexity(WeightedMean):
    """exp of the weighted mean of losses in nats per token; of nothing it is exp(empty_value) = 1.

    >>> float(Perplexity().result(Perplexity().observe(jnp.log(jnp.full(10, 2.0)))))
    2.0
    """

    def result(self, cells: Cells) -> jax.Array:
        return jnp.exp(super().result(cells))


@dataclass(frozen=True)
class Throughput(PureMetric):
    """Items per second: ``devices`` * sum(items) / sum(seconds), both sums over all devices; of nothing it is 0.

    Every device adds its items and its seconds, so their ratio is the rate of one device; with ``devices=mesh.size`` it
    is the rate of all devices. Time is measured on the host: pass the duration of the previous step as an argument of
    the step.

    >>> tokens = Throughput(devices=8)
    >>> float(tokens.result(tokens.observe(4096, 0.5)))
    65536.0
    """

    devices: int = 1

    def identity(self) -> Cells:
        return {"items": Count.identity(), "seconds": Total.identity()}

    def observe(self, items: ArrayLike, seconds: ArrayLike) -> Cells:
        return {"items": Count.of(items), "seconds": Total.of(seconds)}

    def result(self, cells: Cells) -> jax.Array:
        return self.devices * ratio(cells["items"].value, cells["seconds"].value, 0.0)


@dataclass(frozen=True)
class GlobalNorm(PureMetric):
    """The root of the sum of squares of all entries of all trees seen: the L2 norm of the vector that they make up.

    Without ``axes`` the devices observe different entries of the vector. For parameters and gradients name the axes of
    the state: a boxed leaf is then a shard along the axes of its box, and whole along the other axes, where it counts
    once. A leaf without a box is whole along all axes. The norm of nothing is 0. Squares are taken in float32: entries
    beyond 1e19 overflow to inf.

    >>> norm = GlobalNorm()
    >>> float(norm.result(norm.observe({"kernel": jnp.array([3.0]), "bias": jnp.array([4.0])})))
    5.0
    """

    axes: AxisNames = ()

    def identity(self) -> Cells:
        return Total.identity()

    def observe(self, tree: PyTree) -> Cells:
        axes = as_axis_names(self.axes) if self.axes else ()

        def square(leaf: Sharded) -> jax.Array:
            value = jnp.asarray(leaf.value).astype(wide_float())
            split = set(leaf.axes) | collectives.varying_axes(leaf.value)
            # All devices along these axes observe the same entries: a share of each adds up to one whole.
            whole_along = [axis for axis in axes if axis not in split]
            return Total.of(jnp.abs(value) ** 2).value / collectives.axis_size(whole_along)

        squares = jax.tree.leaves(map_sharded(square, tree))
        return Total.of(jnp.stack(squares)) if squares else Total.identity()

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        # With axes, `observe` divides by the devices that hold the same, so a declared axis counts nothing twice.
        if not self.axes:
            super().check_observed(observed, axes)

    def result(self, cells: Cells) -> jax.Array:
        return jnp.sqrt(cells.value)


# eq=False hashes by identity: a metric is a static argument of jitted functions, and a dict has no hash.
@dataclass(frozen=True, eq=False)
class Compose(PureMetric):
    """Several metrics by name, in one state that is synchronized at once.

    ``update(state, loss=losses, accuracy=(scores, labels), mean={"values": v, "weight": w})``: a tuple holds the
    positional arguments of that metric, a dict its keyword arguments, and anything else is its one argument. Metrics
    that are not named stay as they are; an unknown name is a ``ValueError``. The value is a dict.

    >>> metric = Compose({"loss": WeightedMean(), "peak": Max()})
    >>> metric.result(metric.observe(loss=(jnp.arange(4.0), jnp.ones(4)), peak=jnp.arange(4.0)))
    {'loss': Array(1.5, dtype=float32), 'peak': Array(3., dtype=float32)}
    """

    metrics: Mapping[str, PureMetric]

    def __getitem__(self, name: str) -> PureMetric:
        """The metric of this name."""
        return self.metrics[name]

    def identity(self) -> Cells:
        return {name: metric.identity() for name, metric in self.metrics.items()}

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        # `observed` is (args, kwargs), and metrics are named by keyword. Each has its own rule for its axes.
        for name, arguments in observed[1].items():
            if name in self.metrics:
                self.metrics[name].check_observed(arguments, axes)

    def observe(self, **observed: Any) -> Cells:
        if unknown := sorted(observed.keys() - self.metrics.keys()):
            raise ValueError(f"there is no metric {unknown[0]!r} among {sorted(self.metrics)}.")
        cells = {}
        for name, given in observed.items():
            observe = self.metrics[name].observe
            if isinstance(given, dict):
                cells[name] = observe(**given)
            else:
                cells[name] = observe(*given) if isinstance(given, tuple) else observe(given)
        return cells

    def result(self, cells: Cells) -> dict[str, PyTree]:
        return {name: metric.result(cells[name]) for name, metric in self.metrics.items()}

"""Sums, extrema, means, norms, rates, and ``Compose`` for several metrics in one state.

Sums, extrema and means take values of any shape, [b, ...], and ``weight``: a scalar, or an array with the leading dims
of the values, [b] or [b, ...]. Rows with weight 0 (padding) are ignored, NaN included. A weight of another shape raises
a ``ValueError``. ``Throughput`` takes items and seconds, ``GlobalNorm`` a tree, ``Compose`` the arguments of each named
metric.

In the examples ``metric.result(metric.observe(values))`` is the value of one batch on one device. In a training step
use ``empty``, ``update``, ``sync`` and ``compute``.
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
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.metrics.cells import (
    Count,
    Maximum,
    Minimum,
    Total,
    as_wide_floats,
    like_rows,
    loses_parts,
    wide_float,
)
from xlstm_jax.distributed.metrics.layout import Cells
from xlstm_jax.distributed.metrics.pure_metric import PureMetric, Synced


@dataclass(frozen=True)
class Sum(PureMetric):
    """Sum of values: a compensated float sum or, with an integer ``dtype``, an exact 64-bit integer sum; initially 0.

    ``update(state, values, weight=None)``: values [b, ...]; the weight is a scalar or has the leading dims of the
    values. Rows with weight 0 are ignored.

    The value of an integer sum is an int64 with x64, otherwise a float32 that is rounded above 2^24;
    ``synced.cells.exact()`` returns the exact integer on the host. An integer sum raises a ``TypeError`` for floats.

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
        given = jnp.result_type(values)
        if loses_parts(given, self.dtype):
            raise TypeError(
                f"{type(self).__name__} of dtype {jnp.dtype(self.dtype).name} got values of dtype {given.name}, which "
                f"it would truncate. Pass {type(self).__name__}(dtype=...) the dtype of the values."
            )
        return self.cell.of(jnp.asarray(values, self.dtype), weight)

    def result(self, cells: Cells) -> jax.Array:
        return cells.value


@dataclass(frozen=True)
class Max(_Extremum):
    """Largest value in ``dtype``; initially -inf, or the minimum of an integer dtype. NaN propagates.

    ``update(state, values, weight=None)``: values [b, ...]. Rows with weight 0 are ignored; other weights have no
    effect. An integer dtype raises a ``TypeError`` for floats.

    >>> float(Max().result(Max().observe(jnp.array([-1.0, -5.0]))))
    -1.0
    """

    cell = Maximum


@dataclass(frozen=True)
class Min(_Extremum):
    """Smallest value in ``dtype``; initially +inf, or the maximum of an integer dtype. NaN propagates.

    ``update(state, values, weight=None)``: values [b, ...]. Rows with weight 0 are ignored; other weights have no
    effect. An integer dtype raises a ``TypeError`` for floats.

    >>> float(Min().result(Min().observe(jnp.array([-1.0, -5.0]))))
    -5.0
    """

    cell = Minimum


@dataclass(frozen=True)
class WeightedMean(PureMetric):
    """Weighted mean sum(weight * value) / sum(weight) of the observed values; ``empty_value`` if sum(weight) is 0.

    ``update(state, values, weight=None)``: values [b, ...]; the weight is a scalar or has the leading dims of the
    values, 1 by default. Rows with weight 0 are ignored, NaN included.

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
            # The sum of weights is the static number of values, so nothing is summed at run time.
            weights = jnp.asarray(math.prod(shape), wide_float())
        else:
            weights = jnp.broadcast_to(like_rows(weight, jnp.asarray(values)).astype(wide_float()), shape)
        return {"total": total, "weight": Total.of(weights)}

    def result(self, cells: Cells) -> jax.Array:
        return ratio(cells["total"].value, cells["weight"].value, self.empty_value)

    def accumulated_weight(self, state: Synced) -> jax.Array:
        """Returns sum(weight) of a synchronized state, such as the number of tokens: a float scalar.

        Args:
          state: as ``sync`` and ``state_of`` return.
        Raises:
          ValueError: the state is that of a metric with other cells.

        >>> mean = WeightedMean()
        >>> synced = mean.state_of(mean.observe(jnp.array([1.0, 4.0]), weight=jnp.array([3, 1])))
        >>> float(mean.accumulated_weight(synced))
        4.0
        """
        self._check_own(state)
        return state.cells["weight"].value


def ratio(numerator: jax.Array, denominator: jax.Array, empty_value: float) -> jax.Array:
    """Returns numerator / denominator, and ``empty_value`` where the denominator is 0."""
    # `where` twice, because a 0 / 0 in the unselected branch would trigger `jax_debug_nans` and make gradients NaN.
    some = denominator != 0
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), empty_value)


@dataclass(frozen=True)
class Perplexity(WeightedMean):
    """Perplexity: exp of the weighted mean of losses in nats per token; initially exp(empty_value) = 1.

    ``update(state, losses, weight=None)`` as for ``WeightedMean``.

    >>> float(Perplexity().result(Perplexity().observe(jnp.log(jnp.full(10, 2.0)))))
    2.0
    """

    def result(self, cells: Cells) -> jax.Array:
        return jnp.exp(super().result(cells))


@dataclass(frozen=True)
class Throughput(PureMetric):
    """Items per second: ``devices`` * sum(items) / sum(seconds), both sums over every device; initially 0.

    ``update(state, items, seconds)``: numbers or arrays of this device. Every device adds local items and seconds, so
    the ratio of the sums is the rate of one device. ``devices`` is the number of devices that the batch is split over:
    the product of the sizes of the axes that were passed to ``empty``, 8 on a mesh {"dp": 2, "fsdp": 4}, and also on
    {"dp": 2, "fsdp": 4, "tp": 2}. Time is measured on the host: pass the duration of the previous step as an argument
    of the step. Items are integers or bools; floats raise a ``TypeError``.

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
    """L2 norm over the entries of every observed tree: the root of the sum of squares; initially 0.

    ``update(state, tree)``. Without ``axes`` every entry on every device counts. For parameters and gradients set
    ``axes`` to the axes of the state (of ``empty``), so that replicated entries count once: a boxed leaf
    (``nn.Partitioned``) is a shard along the axes named by the box and replicated along the remaining axes; a leaf
    without a box is replicated along every axis, except the axes that its type varies over. Squares are computed in
    float32: entries above 1e19 overflow to inf.

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
            value = jnp.asarray(leaf.value)
            split = set(leaf.axes) | collectives.varying_axes(leaf.value)
            # Devices along the replicated axes observe equal entries: each adds an equal share of the square.
            replicated = [axis for axis in axes if axis not in split]
            # Of complex entries the absolute value counts; it is computed in a complex dtype.
            real = as_wide_floats(jnp.abs(value) if jnp.iscomplexobj(value) else value)
            return Total.of(jnp.abs(real) ** 2).value / collectives.axis_size(replicated)

        squares = jax.tree.leaves(map_sharded(square, tree))
        return Total.of(jnp.stack(squares)) if squares else Total.identity()

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        # With axes, `observe` divides by the number of devices with equal entries, so each entry counts once.
        if not self.axes:
            super().check_observed(observed, axes)

    def result(self, cells: Cells) -> jax.Array:
        return jnp.sqrt(cells.value)


# eq=False hashes by identity: a metric is a static argument of jitted functions, and a dict has no hash.
@dataclass(frozen=True, eq=False)
class Compose(PureMetric):
    """Named metrics in a single state that is synchronized at once; the value is a dict by name.

    ``update(state, loss=losses, accuracy=(scores, labels), mean={"values": v, "weight": w})``: a tuple contains the
    positional arguments of the named metric, a dict contains keyword arguments, and any other value is the only
    argument. Metrics missing from the call are unchanged; an unknown name raises a ``ValueError``.

    >>> metric = Compose({"loss": WeightedMean(), "peak": Max()})
    >>> metric.result(metric.observe(loss=(jnp.arange(4.0), jnp.ones(4)), peak=jnp.arange(4.0)))
    {'loss': Array(1.5, dtype=float32), 'peak': Array(3., dtype=float32)}
    """

    metrics: Mapping[str, PureMetric]

    def __getitem__(self, name: str) -> PureMetric:
        """Returns the metric called ``name``."""
        return self.metrics[name]

    def identity(self) -> Cells:
        return {name: metric.identity() for name, metric in self.metrics.items()}

    def check_observed(self, observed: PyTree, axes: tuple[str, ...]) -> None:
        # `observed` is (args, kwargs), and metrics are named by keyword. Each metric has a different rule for axes.
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

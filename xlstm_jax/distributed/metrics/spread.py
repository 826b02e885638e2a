"""Standard deviation of values over devices and steps, from sums of squares that keep twice the bits of a float32.

The state is three ``Total`` cells, so states merge in any order and grouping, and ``sync`` sends them like other sums:

  weight    W  = sum w
  first     S1 = sum w x       the exact products as pairs (high, low)
  second    S2 = sum w x^2

With float32 sums, S2/W - (S1/W)^2 is lost where the mean is some thousand times the deviation: the relative error is
u (mean / deviation)^2, u = 2^-24 (Chan, Golub and LeVeque, "Algorithms for computing the sample variance: analysis and
recommendations", The American Statistician 37(3), 1983). With pairs the error is some 2^-46 (mean / deviation)^2, where
Welford's update has u (mean / deviation). Products are exact by Dekker's splitting ("A floating-point technique for
extending the available precision", Numerische Mathematik 18, 1971).
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from xlstm_jax.distributed.metrics.cells import Total, as_wide_floats, halves, like_rows, masked
from xlstm_jax.distributed.metrics.layout import Cells
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.metrics.sums_and_means import ratio


@dataclass(frozen=True)
class StandardDeviation(PureMetric):
    """Weighted standard deviation of the observed values: sqrt(sum(weight * (value - mean)^2) / sum(weight)).

    ``update(state, values, weight=None)``: values [b, ...]; the weight is a scalar or has the leading dims of the
    values. Rows with weight 0 are ignored. The divisor is the sum of weights, as ``numpy.std`` divides by the count;
    the value is ``empty_value`` if the sum of weights is 0. For the deviation over examples observe a value for each
    example; for the deviation over steps observe one value for each step, such as the gradient norm that the step
    returns.

    The relative error is below 3e-6 if the mean is less than 10,000 times the deviation. The error grows with the
    square of the ratio mean / deviation: 1e-4 for 100,000. For equal values the result is 0, or at most 1e-6 of the
    mean. Squares of values beyond 1e18 overflow.

    >>> deviation = StandardDeviation()
    >>> float(deviation.result(deviation.observe(jnp.array([1.0, 3.0, jnp.nan]), weight=jnp.array([1, 1, 0]))))
    1.0
    """

    empty_value: float = 0.0

    def identity(self) -> Cells:
        return {name: Total.identity() for name in ("weight", "first", "second")}

    def observe(self, values: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        values = as_wide_floats(values)
        if weight is None:
            first, weights = Total(values, jnp.zeros_like(values)), Total.of(float(math.prod(values.shape)))
        else:
            each = jnp.broadcast_to(like_rows(weight, values).astype(values.dtype), values.shape)
            values = masked(values, each, 0)
            first, weights = times(Total(each, jnp.zeros_like(each)), values), Total.of(each)
        dims = tuple(range(values.ndim))
        return {"weight": weights, "first": first.merged(dims), "second": times(first, values).merged(dims)}

    def result(self, cells: Cells) -> jax.Array:
        weight, first, second = (cells[name] for name in ("weight", "first", "second"))
        # Converts sums of x to sums of differences x - m from the rounded mean m. Differences are small, so the
        # subtractions below lose no digits.
        mean = ratio(first.value, weight.value, 0.0)
        differences = first.merge(times(weight, -mean))  # sum w (x - m)
        squares = second.merge(times(first, -mean)).merge(times(differences, -mean))  # sum w (x - m)^2
        shift = ratio(differences.value, weight.value, 0.0)  # difference of the exact mean from m
        variance = ratio(squares.value, weight.value, 0.0) - shift**2
        deviation = jnp.sqrt(jnp.where(variance < 0, 0, variance))  # NaN stays NaN
        return jnp.where(weight.value != 0, deviation, self.empty_value)


def times(total: Total, x: jax.Array) -> Total:
    """Returns the pair ``total`` (high + low) times the floats ``x``, of equal or broadcastable shape, as such a pair.

    The relative error is 2^-46.
    """
    high = total.high * x
    (a, b), (c, d) = halves(total.high), halves(x)
    # The products of halves are exact, and so is their sum: the rounding error of `high`. A fused multiply-add of two
    # exact terms gives the same bits.
    lost = ((a * c - high) + a * d + b * c) + b * d + total.low * x
    rounded = high + lost
    finite = jnp.isfinite(rounded)  # for an infinite product, inf - inf would be NaN
    return Total(jnp.where(finite, rounded, high), jnp.where(finite, lost - (rounded - high), 0))

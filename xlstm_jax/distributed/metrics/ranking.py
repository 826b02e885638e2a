"""Area under the ROC curve and average precision from a histogram of scores, with a bound of the binning error.

Both values depend on the order of the scores, which a state of fixed size cannot store. ``BinnedRanking`` counts the
scores of each class in bins and treats scores in the same bin as equal::

    low                                   high
     |  n   | p n  | p n  | p n  |  p   |        weight of positives and negatives by bin, [bins] each
     |______|______|______|______|______|
                      b    '--- above --'        P, N total weights; TP, FP weight of positives, negatives above bin b

The binning error is bounded from the same histogram. The bounds hold for every distribution of scores:

AUROC is the fraction of pairs (positive, negative) in which the positive has the higher score; equal scores count 1/2.
  Pairs in different bins are counted exactly. A pair in one bin counts 1/2 instead of 0, 1/2 or 1, so::

      |binned - exact|  <=  1/2 sum_b p_b n_b / (P N)

Average precision is the mean over positives of the precision at the score of the positive: the fraction of positives
  among the examples with an equal or higher score. For a positive in bin b, these examples are every example above b
  and a part of bin b: p' <= p_b positives, including the positive itself, and n' <= n_b negatives. The precision
  (TP + p') / (TP + p' + FP + n') increases with p' and decreases with n', so::

      TP / (TP + FP + n_b)  <=  precision  <=  (TP + p_b) / (TP + p_b + FP)

  The binned precision, with p' = p_b and n' = n_b, is in the same interval. Let L and U be the means of the lower and
  upper ends over the positives: the exact and the binned average precision are both in [L, U], so::

      |binned - exact|  <=  max(U - binned, binned - L)

The proofs only need that a higher score is never in a lower bin. So the bounds also hold for scores outside of
[low, high], which are counted in the outermost bins, and for scores that rounding moves across the border of a bin.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from xlstm_jax.distributed.metrics.cells import Total, wide_float
from xlstm_jax.distributed.metrics.classification import check_one_score_per_label, weight_per_label
from xlstm_jax.distributed.metrics.layout import Cells
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.metrics.sums_and_means import ratio

MAX_BINS = 2**20  # Bin numbers are computed in float32, exact up to 2^24; memory is exhausted earlier.


@dataclass(frozen=True)
class BinnedRanking(PureMetric):
    """AUROC and average precision, each with a bound of the binning error; see the module docstring.

    ``update(state, scores, labels, weight=None)``: scores [b...] and integer or bool labels [b...]. Label 1 is positive
    and any other label is negative. The weight is a scalar or has the leading dims of the labels, and may be
    fractional. Rows with weight 0 are ignored; a NaN score of nonzero weight makes the values NaN. The value is the
    dict

      auroc, auroc_error_bound                            ``empty_auroc`` and 0 if a class has no examples
      average_precision, average_precision_error_bound    ``empty_average_precision`` and 0 without positives

    Rounding to float32 adds up to 1e-6 to the errors.

    >>> ranking = BinnedRanking()
    >>> scores, labels = jnp.array([0.9, 0.4, 0.6, 0.1]), jnp.array([1, 1, 0, 0])
    >>> values = jax.jit(lambda *batch: ranking.result(ranking.observe(*batch)))(scores, labels)
    >>> float(values["auroc"]), float(values["auroc_error_bound"])
    (0.75, 0.0)

    Args:
      bins: the number of bins of equal width between low and high. The bounds decrease about as 1 / bins.
      low, high: the range of the scores, such as -20 and 20 for logits. Scores outside of the range are counted in the
        outermost bins.
      empty_auroc: the value of ``auroc`` if the positive or the negative class has no examples.
      empty_average_precision: the value of ``average_precision`` if the positive class has no examples.
    """

    bins: int = 1000
    low: float = 0.0
    high: float = 1.0
    empty_auroc: float = 0.5
    empty_average_precision: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= MAX_BINS:
            raise ValueError(f"bins={self.bins} is not in 1..{MAX_BINS}.")
        # A width above the float32 range becomes inf and is rejected below; NumPy would warn before the error.
        with np.errstate(all="ignore"):
            width = np.float32(self.high) - np.float32(self.low)
        if not np.finfo(np.float32).tiny <= width < np.inf:
            raise ValueError(f"low={self.low} is not below high={self.high} by a finite width in float32.")

    def identity(self) -> Cells:
        return {name: Total.identity((self.bins,)) for name in ("positive", "negative")}

    def observe(self, scores: ArrayLike, labels: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        """Returns the histograms of a batch: {"positive": ``Total`` [bins], "negative": ``Total`` [bins]}.

        Entry b is the total weight of the labels whose score is in bin b. Scores and labels have the same shape. Label
        1 is positive, any other label negative. ``weight`` is a scalar or has the leading dims of the labels; None: 1.
        """
        scores, labels = jnp.asarray(scores), jnp.asarray(labels)
        check_one_score_per_label(scores, labels, "BinnedRanking")
        weight, positive = weight_per_label(weight, labels.shape), labels == 1
        # A NaN score has no bin; a NaN weight makes every value NaN instead.
        weight = jnp.where(jnp.isnan(scores) & (weight != 0), jnp.nan, weight)
        # Each operation is monotonic, even with rounding and at infinity: the bounds rely on the order of scores only.
        fraction = (scores.astype(wide_float()) - self.low) / (self.high - self.low)
        bins = jnp.clip(jnp.floor(fraction * self.bins), 0, self.bins - 1).astype(jnp.int32)

        def histogram(weight: jax.Array) -> Total:
            return Total.of_halves(weight, lambda half: jnp.zeros(self.bins, half.dtype).at[bins].add(half))

        return {
            "positive": histogram(jnp.where(positive, weight, 0)),
            "negative": histogram(jnp.where(positive, 0, weight)),
        }

    def result(self, cells: Cells) -> dict[str, jax.Array]:
        """Returns AUROC, average precision and a bound of the binning error of each, as scalars, from the histograms.

        The names are "auroc", "auroc_error_bound", "average_precision" and "average_precision_error_bound". ``cells``
        are the histograms of ``observe``, merged over batches.
        """
        # Entry b is the weight in bin b and above; entry 0 is the total weight. Summed in pairs (high, low), because
        # the error of plain cumulative sums of a thousand float32 reaches 1e-4.
        reached = {name: jax.lax.associative_scan(Total.merge, total, reverse=True) for name, total in cells.items()}
        fractions = {name: ratio(total.value, reached[name].value[0], 0) for name, total in cells.items()}
        p, n = fractions["positive"], fractions["negative"]
        # Fraction of positives that score higher than a negative of each bin: positives above the bin, plus half of
        # the positives in the bin.
        higher = ratio(_above(reached["positive"]).value, reached["positive"].value[0], 0)
        auroc = Total.of(n * (higher + p / 2)).value
        precision, precision_bound = _average_precision(p, reached)
        some = {name: total.value[0] != 0 for name, total in reached.items()}
        return {
            "auroc": jnp.where(some["positive"] & some["negative"], auroc, self.empty_auroc),
            "auroc_error_bound": Total.of(p * n / 2).value,
            "average_precision": jnp.where(some["positive"], precision, self.empty_average_precision),
            "average_precision_error_bound": precision_bound,
        }


def _average_precision(p: jax.Array, reached: Cells) -> tuple[jax.Array, jax.Array]:
    """Returns (average precision, bound of the absolute binning error), two scalars.

    The average precision is the sum over bins of ``p`` times the precision of the bin. The precision of a bin counts
    all examples in and above the bin: positives / (positives + negatives), by weight. The module docstring derives the
    bound.

    Args:
      p: the fraction of the positives in each bin, [bins].
      reached: the weight in and above each bin, a ``Total`` [bins] each for "positive" and "negative".
    """
    tp, fp = reached["positive"], reached["negative"]

    def mean(right: Total, wrong: Total) -> jax.Array:
        # 0 / 0 occurs at bins with p = 0, and in `lowest` where neither negatives in the bin nor examples above exist:
        # the precision is 1 there.
        return Total.of(p * ratio(right.value, right.merge(wrong).value, 1)).value

    binned, highest, lowest = mean(tp, fp), mean(tp, _above(fp)), mean(_above(tp), fp)
    # The three means are rounded, so the difference of equal values may be negative.
    return binned, jnp.maximum(jnp.maximum(highest - binned, binned - lowest), 0)


def _above(reached: Total) -> Total:
    """Returns the weight above each bin, [bins], from the weight in and above each bin: [5, 3, 1] -> [3, 1, 0]."""
    return jax.tree.map(lambda x: jnp.append(x[1:], jnp.zeros_like(x[:1])), reached)

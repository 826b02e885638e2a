"""Area under the ROC curve and average precision, from a histogram of the scores, with a bound of what binning costs.

Both depend on the order of all scores, which no state of fixed size can hold. ``BinnedRanking`` counts the scores of
either class in bins and takes the scores in one bin for equal::

    low                                   high
     |  n   | p n  | p n  | p n  |  p   |        weight of positives and negatives by bin, [bins] each
     |______|______|______|______|______|
                      b    '--- above --'        P, N all positives and negatives; TP, FP the same above bin b

What that costs is computed from the same histogram. It is a bound, not an estimate, whatever the scores are:

AUROC is the fraction of pairs (positive, negative) in which the positive has the higher score; equal scores count 1/2.
  Pairs in different bins are counted as they are. A pair in one bin counts 1/2 instead of 0, 1/2 or 1, so that::

      |binned - exact|  <=  1/2 sum_b p_b n_b / (P N)

Average precision is the mean, over positives, of the precision at the score of each: the fraction of positives among
  all examples that score as high or higher. For a positive in bin b these are all examples above b and some of the bin:
  p' <= p_b positives, itself among them, and n' <= n_b negatives. (TP + p') / (TP + p' + FP + n') rises with p' and
  falls with n', so::

      TP / (TP + FP + n_b)  <=  precision  <=  (TP + p_b) / (TP + p_b + FP)

  The binned precision, with p' = p_b and n' = n_b, lies there too. Let L and U be the means of the two ends over the
  positives: exact and binned are both in [L, U], so::

      |binned - exact|  <=  max(U - binned, binned - L)

All that this needs of the bins is that a higher score is never in a lower bin. So it also holds for scores outside of
[low, high], which fall into the outermost bins, and for scores that rounding puts on the other side of a border.
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

MAX_BINS = 2**20  # Bin numbers are computed in float32, which holds them all; memory ends earlier.


@dataclass(frozen=True)
class BinnedRanking(PureMetric):
    """AUROC and average precision, each with the bound of its error by binning; see the module.

    ``update(state, scores, labels, weight=None)``: scores [b...] and integer or bool labels [b...], of which 1 is
    positive and every other negative; the weight has one number for all or the leading dims of the labels, and may be
    fractional. Rows with weight 0 are ignored; a NaN among the other scores makes the values NaN. The value is the dict

      auroc, auroc_error_bound                            where a class is missing: ``empty_auroc`` and 0
      average_precision, average_precision_error_bound    where no positive was seen: ``empty_average_precision`` and 0

    Rounding to float32 adds up to 1e-6 to the errors.

    >>> ranking = BinnedRanking()
    >>> scores, labels = jnp.array([0.9, 0.4, 0.6, 0.1]), jnp.array([1, 1, 0, 0])
    >>> values = jax.jit(lambda *batch: ranking.result(ranking.observe(*batch)))(scores, labels)
    >>> float(values["auroc"]), float(values["auroc_error_bound"])
    (0.75, 0.0)

    Args:
      bins: the number of bins of equal width, [low, high] in all. The bounds fall about as 1 / bins.
      low, high: the range that scores lie in, such as -20 and 20 for logits. The outermost bins take the rest.
    """

    bins: int = 1000
    low: float = 0.0
    high: float = 1.0
    empty_auroc: float = 0.5
    empty_average_precision: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= MAX_BINS:
            raise ValueError(f"bins={self.bins} is not in 1..{MAX_BINS}.")
        # A width beyond float32 becomes inf and is refused below; NumPy's warning would come before the error.
        with np.errstate(all="ignore"):
            width = np.float32(self.high) - np.float32(self.low)
        if not np.finfo(np.float32).tiny <= width < np.inf:
            raise ValueError(f"low={self.low} is not below high={self.high} by a finite width in float32.")

    def identity(self) -> Cells:
        return {name: Total.identity((self.bins,)) for name in ("positive", "negative")}

    def observe(self, scores: ArrayLike, labels: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        scores, labels = jnp.asarray(scores), jnp.asarray(labels)
        check_one_score_per_label(scores, labels, "BinnedRanking")
        weight, positive = weight_per_label(weight, labels.shape), labels == 1
        # NaN has no bin. As a NaN weight it shows in every value.
        weight = jnp.where(jnp.isnan(scores) & (weight != 0), jnp.nan, weight)
        # Each operation is monotonic, also rounded and at infinity: the bounds need the order of scores, not borders.
        fraction = (scores.astype(wide_float()) - self.low) / (self.high - self.low)
        bins = jnp.clip(jnp.floor(fraction * self.bins), 0, self.bins - 1).astype(jnp.int32)

        def histogram(weight: jax.Array) -> Total:
            return Total.of_halves(weight, lambda half: jnp.zeros(self.bins, half.dtype).at[bins].add(half))

        return {
            "positive": histogram(jnp.where(positive, weight, 0)),
            "negative": histogram(jnp.where(positive, 0, weight)),
        }

    def result(self, cells: Cells) -> dict[str, jax.Array]:
        # Entry b is the weight in bin b and above, entry 0 the weight of all. In pairs: plain cumulative sums of a
        # thousand float32 would be off by up to 1e-4.
        reached = {name: jax.lax.associative_scan(Total.merge, total, reverse=True) for name, total in cells.items()}
        fractions = {name: ratio(total.value, reached[name].value[0], 0) for name, total in cells.items()}
        p, n = fractions["positive"], fractions["negative"]
        # A negative's share of the positives that score higher: those above its bin, and half of those in it.
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
    """(average precision, bound of its error), from each bin's fraction of positives and weight in and above it."""
    tp, fp = reached["positive"], reached["negative"]

    def mean(right: Total, wrong: Total) -> jax.Array:
        # With nothing above and no negatives in the bin, all that scores as high are positives: precision 1.
        return Total.of(p * ratio(right.value, right.merge(wrong).value, 1)).value

    binned, highest, lowest = mean(tp, fp), mean(tp, _above(fp)), mean(_above(tp), fp)
    # Each of the three is rounded, so the difference of equal values may be negative.
    return binned, jnp.maximum(jnp.maximum(highest - binned, binned - lowest), 0)


def _above(reached: Total) -> Total:
    """The weight above each bin, from the weight in it and above."""
    return jax.tree.map(lambda x: jnp.append(x[1:], jnp.zeros_like(x[:1])), reached)

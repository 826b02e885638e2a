"""Accuracy, precision, recall and F-scores of classifiers, computed from one confusion matrix per class.

A task turns scores into decisions. The state counts decisions by outcome, and a statistic is a ratio of counts::

    task        Binary | Multiclass | Multilabel          scores, labels -> predicted, actual: bools [b..., C]

                              is the class   is not
    state       predicted         tp           fp         total weight of the decisions, [C]
                not predicted     fn           tn

    statistic   Accuracy   (tp + tn) / all                per class, or averaged over the classes
                Precision  tp / (tp + fp)
                Recall     tp / (tp + fn)
                FBeta      (1 + beta^2) tp / ((1 + beta^2) tp + beta^2 fn + fp)

A single state serves every statistic. In the examples ``metric.result(metric.observe(scores, labels))`` is the value of
one batch on one device; in a training step use ``empty``, ``update``, ``sync`` and ``compute``.

Averages are defined as in scikit-learn: "micro" adds up the counts over classes before the division, "macro" is the
mean over classes, "weighted" is the mean weighted by support (tp + fn, the weight of the rows of a class), and
"per_class" returns the values per class, [C]. Balanced accuracy is ``Recall(average="macro")``; set
``zero_division=nan`` if some class may not occur.

A NaN score makes every statistic NaN in which the row of the score counts. Rows with weight 0 (padding) are ignored,
NaN included.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from xlstm_jax.distributed.metrics.cells import Total, like_rows, wide_float
from xlstm_jax.distributed.metrics.layout import Cells
from xlstm_jax.distributed.metrics.pure_metric import PureMetric
from xlstm_jax.distributed.metrics.sums_and_means import ratio

AVERAGES = ("micro", "macro", "weighted", "per_class")


@dataclass(frozen=True)
class Decisions:
    """Predicted and actual classes of a batch, as masks.

    ``predicted`` and ``actual`` are bools [b..., C]: whether class c is predicted for a row, and whether class c is the
    label. ``unknown`` is true where a score is NaN or a label is invalid, [b..., C] or [b..., 1]. ``weighted`` is the
    full shape of weights: [b...], or [b..., C] for weights per decision.
    """

    predicted: jax.Array
    actual: jax.Array
    unknown: jax.Array | bool
    weighted: tuple[int, ...]


class Task(Protocol):
    """Rule that turns scores and labels into decisions, for C = ``num_classes`` confusion matrices."""

    @property
    def num_classes(self) -> int: ...

    def decide(self, scores: jax.Array, labels: jax.Array) -> Decisions:
        """Returns the ``Decisions`` of a batch: two masks, bools [b..., C], of the predicted and the actual classes.

        The subclass has the rule for predicted classes: ``Multiclass`` takes the class of the highest score, ``Binary``
        and ``Multilabel`` compare each score with a threshold. The subclass also states the valid shapes and dtypes of
        ``scores`` and ``labels``; any other shape or dtype raises a ``ValueError``.
        """
        ...


@dataclass(frozen=True)
class Binary:
    """Binary classification: scores [b...] and labels [b...]; predicts positive where ``score >= threshold``. C = 1.

    Statistics describe the positive class for every ``average``. Label 1 is positive; any other label, such as 0 or -1,
    is negative.

    >>> Binary(threshold=0.5).decide(jnp.array([0.9, 0.2]), jnp.array([1, 1])).predicted.tolist()
    [[True], [False]]
    """

    threshold: float = 0.5
    num_classes: ClassVar[int] = 1

    def decide(self, scores: jax.Array, labels: jax.Array) -> Decisions:
        check_one_score_per_label(scores, labels, "Binary")
        reached = _at_least(scores, self.threshold)
        return Decisions(reached[..., None], labels[..., None] == 1, jnp.isnan(scores)[..., None], labels.shape)


@dataclass(frozen=True)
class Multilabel:
    """Multilabel classification: scores [b..., L] and labels [b..., L] in {0, 1}; C = L = ``num_labels``.

    A label is predicted where ``score >= threshold``. Weights are per row, [b...], or per label, [b..., L].

    >>> Multilabel(3).decide(jnp.array([[0.9, 0.2, 0.7]]), jnp.array([[1, 0, 0]])).predicted.tolist()
    [[True, False, True]]
    """

    num_labels: int
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.num_labels < 1:
            raise ValueError(f"Multilabel with num_labels={self.num_labels}: there must be at least 1.")

    @property
    def num_classes(self) -> int:
        return self.num_labels

    def decide(self, scores: jax.Array, labels: jax.Array) -> Decisions:
        check_one_score_per_label(scores, labels, "Multilabel")
        if labels.shape[-1:] != (self.num_labels,):
            raise ValueError(f"labels of shape {labels.shape} do not end in num_labels={self.num_labels}.")
        return Decisions(_at_least(scores, self.threshold), labels == 1, jnp.isnan(scores), labels.shape)


@dataclass(frozen=True)
class Multiclass:
    """Multiclass classification, C = ``num_classes``: scores [b..., C] and labels; predicts the class of highest score.

    Labels are integers [b...] or [b..., 1] or, for floating scores, one-hot [b..., C] of any dtype. With ``top_k`` > 1
    the prediction is the label if the label is among the k highest scores, else the class of the highest score. Ties
    are resolved in favour of the lower class. With ``top_k`` 1 the scores may be integer predictions in the shape of
    the labels.

    A label outside of 0..C-1 (an ignore index such as -1), or a one-hot row without a 1, matches no class: the row
    counts as a false positive of the predicted class and never as a false negative. Give the row weight 0 to exclude
    it. An integer prediction outside of 0..C-1 counts only as a false negative. Rows of [b..., C] labels that are not
    one-hot (smoothed labels, probabilities) make the statistics NaN.

    >>> Multiclass(3).decide(jnp.array([[0.1, 0.7, 0.2]]), jnp.array([2])).predicted.tolist()
    [[False, True, False]]
    """

    num_classes: int
    top_k: int = 1

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise ValueError(f"Multiclass with num_classes={self.num_classes}: there must be at least 2; see Binary.")
        if not 1 <= self.top_k <= self.num_classes:
            raise ValueError(f"top_k={self.top_k} is not in 1..{self.num_classes}, the number of classes.")

    def decide(self, scores: jax.Array, labels: jax.Array) -> Decisions:
        """Returns the ``Decisions`` of a batch: bool masks [b..., C] of the predicted and of the actual classes.

        ``scores`` are [b..., C] for C classes, and the class of the highest score is predicted (with ``top_k`` > 1 the
        label, if it is among the k highest). ``labels`` are class numbers [b...] or [b..., 1], or one-hot [b..., C].
        With ``top_k`` 1 ``scores`` may be predicted class numbers in the shape of ``labels``. A row with a NaN score is
        marked as unknown.

        Raises a ``ValueError`` if the shapes or dtypes of scores and labels do not fit together.
        """
        classes = jnp.arange(self.num_classes)
        labels, unknown = self._class_numbers(scores, labels)
        check_labels(labels)
        if scores.shape == (*labels.shape, self.num_classes):
            predictions = self._predictions(scores, labels)
            unknown = unknown | jnp.isnan(scores).any(-1, keepdims=True)
        elif scores.shape == labels.shape and jnp.issubdtype(scores.dtype, jnp.integer) and self.top_k == 1:
            predictions = scores
        else:
            raise ValueError(
                f"scores of shape {scores.shape} and dtype {scores.dtype} do not fit labels of shape {labels.shape}: "
                f"with num_classes={self.num_classes} they have shape {(*labels.shape, self.num_classes)}, or with "
                f"top_k 1 (here {self.top_k}) are integer predictions of the labels' shape."
            )
        return Decisions(predictions[..., None] == classes, labels[..., None] == classes, unknown, labels.shape)

    def _class_numbers(self, scores: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
        """Returns (class numbers, mask of invalid rows) for labels in one of three forms.

        1. One-hot labels, of the shape of floating scores [b..., C], become class numbers [b...], -1 for a row without
        a 1. The mask [b..., 1] is true where a row is not one-hot.

        2. With floating scores [b..., C], labels [b..., 1] lose the last dim. The mask is False.

        3. Other labels are returned unchanged. The mask is False.
        """
        # Integer scores are predictions, so labels of the same shape are class numbers, for any last dim.
        *rows, last = scores.shape or (None,)
        if last != self.num_classes or jnp.issubdtype(scores.dtype, jnp.integer):
            return labels, False
        if labels.shape == (*rows, 1):
            return labels[..., 0], False
        if labels.shape != scores.shape:
            return labels, False
        # The argmax of smoothed labels would be a valid class number, so rows that are not one-hot are marked.
        ones = labels == 1
        is_one_hot = (ones | (labels == 0)).all(-1) & (ones.sum(-1) <= 1)
        return jnp.where(ones.any(-1), jnp.argmax(ones, -1), -1), ~is_one_hot[..., None]

    def _predictions(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        if self.top_k == 1:
            return jnp.argmax(scores, axis=-1)
        # With this prediction, plain accuracy is top-k accuracy.
        _, highest = lax.top_k(scores, self.top_k)
        among = (highest == labels[..., None]).any(-1)
        return jnp.where(among, labels, highest[..., 0])


def _at_least(scores: jax.Array, threshold: float) -> jax.Array:
    """Returns bools in the shape of ``scores``: score >= threshold, compared in float32 (float64 with x64).

    A narrow dtype would round the threshold.
    """
    return scores.astype(wide_float()) >= threshold


def check_labels(labels: jax.Array) -> None:
    """Raises a ValueError for labels that are neither integers nor bools, such as probabilities or one-hot floats."""
    if not (jnp.issubdtype(labels.dtype, jnp.integer) or jnp.issubdtype(labels.dtype, jnp.bool_)):
        raise ValueError(
            f"labels of dtype {labels.dtype}: they are integers or bools. Scores come first, labels second."
        )


def check_one_score_per_label(scores: jax.Array, labels: jax.Array, caller: str) -> None:
    """Raises a ``ValueError`` if labels are not integers or bools, or if the shapes of scores and labels differ.

    ``caller`` is the name of the metric or task, for the error.
    """
    check_labels(labels)
    if scores.shape != labels.shape:
        raise ValueError(f"scores of shape {scores.shape}, labels of shape {labels.shape}: {caller} has one per label.")


def total_of(which: jax.Array, unknown: jax.Array | bool, weight: jax.Array) -> Total:
    """Returns, for each class, the total weight of the rows where ``which`` [b..., C] is true: a ``Total`` [C].

    ``weight`` is per row, [b...], or per decision, [b..., C]. A class is NaN if ``unknown`` (bools [b..., C] or [b...,
    1], or False) is true in a row of nonzero weight.
    """
    counted = like_rows(weight, which) != 0
    # With weights per decision the last dim of the weight is the class dim, which is not summed.
    rows = tuple(range(weight.ndim)) if weight.ndim < which.ndim else tuple(range(which.ndim - 1))

    def add(half: jax.Array) -> jax.Array:
        half = like_rows(half, which)
        return jnp.sum(jnp.where(counted & unknown, jnp.nan, jnp.where(which & counted, half, 0)), axis=rows)

    return Total.of_halves(weight, add)


def weight_per_label(weight: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns ``weight`` broadcast to ``shape``, the shape of the labels; None means weight 1.

    Raises:
      ValueError: ``weight`` is neither a scalar nor an array with the leading dims of ``shape``.
    """
    labels = jax.ShapeDtypeStruct(shape, jnp.bool_)
    return jnp.broadcast_to(like_rows(1 if weight is None else weight, labels), shape)


@dataclass(frozen=True, kw_only=True)
class Statistic(ABC):
    """Base class of statistics: a fraction per class, or an average over classes. A subclass implements ``terms``.

    Args:
      average: an entry of ``AVERAGES``; see the module docstring.
      zero_division: the fraction where the denominator is 0. NaN excludes a class with denominator 0 from "macro" and
        "weighted" averages; the average is NaN if every class is excluded.
    """

    average: str = "macro"
    zero_division: float = 0.0

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            raise ValueError(f"average={self.average!r} of {type(self).__name__} is none of {', '.join(AVERAGES)}.")

    @abstractmethod
    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        """Returns (numerator, denominator) of the fraction that the statistic is, in the shape of the counts.

        The arguments are the counts of true and false positives and negatives: [C], or [] for counts summed over
        classes.
        """

    def compute(self, cells: Cells, task: Task) -> jax.Array:
        """Returns the statistic computed from counts: [C] if ``average`` is "per_class", else a scalar.

        ``cells`` has the counts "tp", "fp", "fn" and "tn", each a ``Total`` [C]. A class with the denominator 0 has the
        value ``zero_division``; NaN excludes the class from an average. ``task`` has no effect here; a subclass may
        distinguish tasks.
        """
        del task
        if self.average == "micro":
            return ratio(*self.terms(**_over_classes(cells)), self.zero_division)
        numerator, denominator = self.terms(**cells)
        by_class = ratio(numerator, denominator, self.zero_division)
        if self.average == "per_class":
            return by_class
        weight = cells["tp"].merge(cells["fn"]).value if self.average == "weighted" else jnp.ones_like(by_class)
        # An excluded class has the value NaN and weight 0, and `Total.of` ignores values of weight 0.
        defined = (denominator != 0) | (not math.isnan(self.zero_division))
        # As in scikit-learn: if the total weight is 0, the average is the plain mean over the defined classes.
        weight = jnp.where(jnp.any(defined & (weight != 0)), weight, 1)
        weight = jnp.where(defined, weight, 0)
        return ratio(Total.of(by_class, weight).value, Total.of(weight).value, self.zero_division)


@dataclass(frozen=True, kw_only=True)
class Accuracy(Statistic):
    """Fraction of correct decisions; ``zero_division`` if no decision was observed.

    "micro", the default, is the fraction of correct rows (Binary, Multiclass) or correct labels (Multilabel). "macro",
    "weighted" and "per_class" score each class against the rest; with many classes most of these decisions are true
    negatives. For balanced accuracy use ``Recall(average="macro")``.

    >>> metric = ConfusionMatrix(Binary(), {"accuracy": Accuracy()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2, 0.7]), jnp.array([1, 0, 0, 1])))
    {'accuracy': Array(0.75, dtype=float32)}
    """

    average: str = "micro"

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        right = tp.merge(tn)
        return right.value, right.merge(fp).merge(fn).value

    def compute(self, cells: Cells, task: Task) -> jax.Array:
        if self.average == "micro" and isinstance(task, Multiclass):
            # A row is one decision among C classes, not C decisions. Every class counts every row: read class 0.
            _, rows = self.terms(**cells)
            return ratio(_over_classes(cells)["tp"].value, rows[0], self.zero_division)
        return super().compute(cells, task)


@dataclass(frozen=True, kw_only=True)
class Precision(Statistic):
    """Fraction of the predictions of a class that are correct; ``zero_division`` for a class that is never predicted.

    By default the mean over classes (``average="macro"``).

    >>> metric = ConfusionMatrix(Binary(), {"precision": Precision()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2, 0.7]), jnp.array([1, 0, 0, 0])))
    {'precision': Array(0.33333334, dtype=float32)}
    """

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        return tp.value, tp.merge(fp).value


@dataclass(frozen=True, kw_only=True)
class Recall(Statistic):
    """Fraction of the rows of a class that are predicted correctly; ``zero_division`` for a class without rows.

    By default the mean over classes (``average="macro"``).

    >>> metric = ConfusionMatrix(Binary(), {"recall": Recall()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2, 0.7]), jnp.array([1, 0, 1, 0])))
    {'recall': Array(0.5, dtype=float32)}
    """

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        return tp.value, tp.merge(fn).value


@dataclass(frozen=True)
class FBeta(Statistic):
    """Weighted harmonic mean of precision and recall; recall counts ``beta`` times as much. By default ``beta`` is 1.

    The value is ``zero_division`` for a class that neither occurs nor is predicted, so that precision and recall are
    both undefined. By default the mean over classes (``average="macro"``).

    >>> metric = ConfusionMatrix(Binary(), {"f1": FBeta()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2]), jnp.array([1, 0, 1])))
    {'f1': Array(0.5, dtype=float32)}
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta} of FBeta is not in (0, inf); at 0 it is Precision, at infinity Recall.")

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        square = self.beta**2
        # (1 + b^2) P R / (b^2 P + R), expanded into counts: 0 instead of 0 / 0 where P and R are both 0.
        return (1 + square) * tp.value, square * tp.merge(fn).value + tp.merge(fp).value


def _over_classes(cells: Cells) -> Cells:
    """Returns each count summed over the classes, [C] -> [], by name, without losing the low part of the ``Total``."""
    return {name: Total.of(total.high).merge(Total.of(total.low)) for name, total in cells.items()}


# eq=False hashes by identity, as for `Compose`.
@dataclass(frozen=True, eq=False)
class ConfusionMatrix(PureMetric):
    """Named statistics for a task; the value is a dict with the value of each statistic by name.

    ``update(state, scores, labels, weight=None)``: the weight is a scalar or has the leading dims of the labels, and
    may be fractional. Raises a ``ValueError`` if scores, labels, weight and task do not fit together. The cells of the
    state are the counts "tp", "fp", "fn" and "tn", each a ``Total`` of shape [C].

    Args:
      task: ``Binary``, ``Multiclass`` or ``Multilabel``, which turns scores and labels into decisions.
      statistics: ``Accuracy``, ``Precision``, ``Recall``, ``FBeta`` or further subclasses of ``Statistic``, by name.

    >>> metric = ConfusionMatrix(Multiclass(3), {"top1": Accuracy(), "recall": Recall(average="per_class")})
    >>> values = metric.result(metric.observe(jnp.array([0, 1, 1, 2]), jnp.array([0, 1, 2, 2])))
    >>> float(values["top1"]), values["recall"].tolist()
    (0.75, [1.0, 1.0, 0.5])
    """

    task: Task
    statistics: Mapping[str, Statistic]

    def identity(self) -> Cells:
        return {name: Total.identity((self.task.num_classes,)) for name in ("tp", "fp", "fn", "tn")}

    def observe(self, scores: ArrayLike, labels: ArrayLike, weight: ArrayLike | None = None) -> Cells:
        decisions = self.task.decide(jnp.asarray(scores), jnp.asarray(labels))
        weight = weight_per_label(weight, decisions.weighted)
        outcomes = {
            "tp": decisions.predicted & decisions.actual,
            "fp": decisions.predicted & ~decisions.actual,
            "fn": ~decisions.predicted & decisions.actual,
            "tn": ~(decisions.predicted | decisions.actual),
        }
        return {name: total_of(which, decisions.unknown, weight) for name, which in outcomes.items()}

    def result(self, cells: Cells) -> dict[str, jax.Array]:
        return {name: statistic.compute(cells, self.task) for name, statistic in self.statistics.items()}

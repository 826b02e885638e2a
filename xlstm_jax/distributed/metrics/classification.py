"""Accuracy, precision, recall and F-scores of classifiers, all from one confusion matrix per class.

A task turns scores into decisions. The state counts them by outcome, and a statistic is a fraction of them::

    task        Binary | Multiclass | Multilabel          scores, labels -> predicted, actual: bools [b..., C]

                              is the class   is not
    state       predicted         tp           fp         each the weight of its decisions, [C]
                not predicted     fn           tn

    statistic   Accuracy   (tp + tn) / all                of every class, or averaged over the classes
                Precision  tp / (tp + fp)
                Recall     tp / (tp + fn)
                FBeta      (1 + beta^2) tp / ((1 + beta^2) tp + beta^2 fn + fp)

One state serves all statistics. In the examples ``metric.result(metric.observe(scores, labels))`` is the value of one
batch on one device; in a training step take ``empty``, ``update``, ``sync`` and ``compute``.

Averages are those of scikit-learn: "micro" adds up the decisions of all classes first, "macro" is the mean over
classes, "weighted" the mean by support (tp + fn, the weight of the rows of a class), and "per_class" no average: [C].
Balanced accuracy is ``Recall(average="macro")``, with ``zero_division=nan`` where some class may not occur at all.

A NaN score makes every statistic NaN that its row counts in. Rows with weight 0 (padding) are ignored, whatever they
hold.
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
    """What was predicted and what is true, bools [b..., C]; and where either is unknown, [b..., C] or [b..., 1].

    ``weighted`` is the shape that weights may have: [b...], or [b..., C] where single decisions have weights.
    """

    predicted: jax.Array
    actual: jax.Array
    unknown: jax.Array | bool
    weighted: tuple[int, ...]


class Task(Protocol):
    """How decisions are made of scores, for C = ``num_classes`` confusion matrices."""

    @property
    def num_classes(self) -> int: ...

    def decide(self, scores: jax.Array, labels: jax.Array) -> Decisions:
        """Raises a ValueError where the task does not take these shapes or dtypes."""
        ...


@dataclass(frozen=True)
class Binary:
    """Yes or no: scores [b...] and labels [b...]; yes is predicted where ``score >= threshold``. C = 1.

    Statistics are of the positive class, whatever their average. Label 1 is positive; others, as 0 or -1, are negative.

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
    """Several yes or no at once: scores [b..., L] and labels [b..., L] in {0, 1}; C = L.

    Weights are of rows, [b...], or of single labels, [b..., L].

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
    """One of C classes: scores [b..., C] and labels; the highest score is the prediction.

    Labels are integers [b...] or [b..., 1], or with floating scores one-hot [b..., C], of any dtype. With ``top_k`` > 1
    the prediction is the label if it is among the k highest scores, else the class of the highest score. Of equal
    scores the lower class counts as the higher. With ``top_k`` 1 the scores may be integer predictions of the labels'
    shape.

    A label outside of 0..C-1 (an ignore index such as -1), or a one-hot row without a 1, matches no class: its row is a
    false positive of the predicted class and no false negative. Give such rows weight 0 to leave them out. An integer
    prediction outside of 0..C-1 is a false negative only. Rows of [b..., C] labels that are not one-hot (smoothed
    labels, probabilities) show as NaN.

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
        """The labels as class numbers [b...], -1 for none; and where one-hot labels are not one-hot, [b..., 1]."""
        # Integer scores are predictions, so labels of their shape are class numbers, whatever the last dim.
        *rows, last = scores.shape or (None,)
        if last != self.num_classes or jnp.issubdtype(scores.dtype, jnp.integer):
            return labels, False
        if labels.shape == (*rows, 1):
            return labels[..., 0], False
        if labels.shape != scores.shape:
            return labels, False
        # An argmax of smoothed labels would pass for a label, so only true one-hot rows count.
        ones = labels == 1
        is_one_hot = (ones | (labels == 0)).all(-1) & (ones.sum(-1) <= 1)
        return jnp.where(ones.any(-1), jnp.argmax(ones, -1), -1), ~is_one_hot[..., None]

    def _predictions(self, scores: jax.Array, labels: jax.Array) -> jax.Array:
        if self.top_k == 1:
            return jnp.argmax(scores, axis=-1)
        # Top-k accuracy is the plain accuracy of this prediction.
        _, highest = lax.top_k(scores, self.top_k)
        among = (highest == labels[..., None]).any(-1)
        return jnp.where(among, labels, highest[..., 0])


def _at_least(scores: jax.Array, threshold: float) -> jax.Array:
    """``scores >= threshold``, compared in float32: in a narrow dtype the threshold would be rounded to it."""
    return scores.astype(wide_float()) >= threshold


def check_labels(labels: jax.Array) -> None:
    """Raises ValueError where labels are not integers or bools, but probabilities or one-hot floats."""
    if not (jnp.issubdtype(labels.dtype, jnp.integer) or jnp.issubdtype(labels.dtype, jnp.bool_)):
        raise ValueError(
            f"labels of dtype {labels.dtype}: they are integers or bools. Scores come first, labels second."
        )


def check_one_score_per_label(scores: jax.Array, labels: jax.Array, caller: str) -> None:
    """Raises ValueError where labels are not integers or bools, or scores have another shape."""
    check_labels(labels)
    if scores.shape != labels.shape:
        raise ValueError(f"scores of shape {scores.shape}, labels of shape {labels.shape}: {caller} has one per label.")


def total_of(which: jax.Array, unknown: jax.Array | bool, weight: jax.Array) -> Total:
    """By class the weight of the rows where ``which`` [b..., C] is true; NaN where a row that counts is unknown."""
    counted = like_rows(weight, which) != 0
    # Where single decisions have weights, the last dim of the weight is the classes, which stay apart.
    rows = tuple(range(weight.ndim)) if weight.ndim < which.ndim else tuple(range(which.ndim - 1))

    def add(half: jax.Array) -> jax.Array:
        half = like_rows(half, which)
        return jnp.sum(jnp.where(counted & unknown, jnp.nan, jnp.where(which & counted, half, 0)), axis=rows)

    return Total.of_halves(weight, add)


def weight_per_label(weight: ArrayLike | None, shape: tuple[int, ...]) -> jax.Array:
    """The weight, which has leading dims of ``shape``, broadcast to [*shape]; 1 for each label without a weight."""
    labels = jax.ShapeDtypeStruct(shape, jnp.bool_)
    return jnp.broadcast_to(like_rows(1 if weight is None else weight, labels), shape)


@dataclass(frozen=True, kw_only=True)
class Statistic(ABC):
    """A fraction of decisions, by class or averaged. A subclass says which (``terms``).

    Args:
      average: one of ``AVERAGES``; see the module.
      zero_division: the fraction where its denominator is 0. NaN leaves such classes out of "macro" and "weighted", and
        is the average where all classes are left out.
    """

    average: str = "macro"
    zero_division: float = 0.0

    def __post_init__(self) -> None:
        if self.average not in AVERAGES:
            raise ValueError(f"average={self.average!r} of {type(self).__name__} is none of {', '.join(AVERAGES)}.")

    @abstractmethod
    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        """(numerator, denominator), of every class [C] or of all classes as one []."""

    def of(self, cells: Cells, task: Task) -> jax.Array:
        """The value: [C] for "per_class", else []."""
        del task
        if self.average == "micro":
            return ratio(*self.terms(**_over_classes(cells)), self.zero_division)
        numerator, denominator = self.terms(**cells)
        by_class = ratio(numerator, denominator, self.zero_division)
        if self.average == "per_class":
            return by_class
        weight = cells["tp"].merge(cells["fn"]).value if self.average == "weighted" else jnp.ones_like(by_class)
        # A class that is left out has the value NaN and gets weight 0, with which `Total.of` ignores it.
        defined = (denominator != 0) | (not math.isnan(self.zero_division))
        # As in scikit-learn: where no weight is left, the plain mean of the classes that are defined.
        weight = jnp.where(jnp.any(defined & (weight != 0)), weight, 1)
        weight = jnp.where(defined, weight, 0)
        return ratio(Total.of(by_class, weight).value, Total.of(weight).value, self.zero_division)


@dataclass(frozen=True, kw_only=True)
class Accuracy(Statistic):
    """The fraction of right decisions; of nothing it is ``zero_division``.

    "micro" is the fraction of rows (Binary, Multiclass) or of single labels (Multilabel) that are right. The other
    averages are over "this class against the rest", in which most decisions of many classes are true negatives: for
    balanced accuracy take ``Recall(average="macro")``.

    >>> metric = ConfusionMatrix(Binary(), {"accuracy": Accuracy()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2, 0.7]), jnp.array([1, 0, 0, 1])))
    {'accuracy': Array(0.75, dtype=float32)}
    """

    average: str = "micro"

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        right = tp.merge(tn)
        return right.value, right.merge(fp).merge(fn).value

    def of(self, cells: Cells, task: Task) -> jax.Array:
        if self.average == "micro" and isinstance(task, Multiclass):
            # A row is one decision among C, not C decisions. Every class has counted all rows: the first will do.
            _, rows = self.terms(**cells)
            return ratio(_over_classes(cells)["tp"].value, rows[0], self.zero_division)
        return super().of(cells, task)


@dataclass(frozen=True, kw_only=True)
class Precision(Statistic):
    """The fraction of a class's predictions that are right; ``zero_division`` for a class that was never predicted.

    >>> metric = ConfusionMatrix(Binary(), {"precision": Precision()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2, 0.7]), jnp.array([1, 0, 0, 0])))
    {'precision': Array(0.33333334, dtype=float32)}
    """

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        return tp.value, tp.merge(fp).value


@dataclass(frozen=True, kw_only=True)
class Recall(Statistic):
    """The fraction of a class's rows that were predicted as it; ``zero_division`` for a class without rows.

    >>> metric = ConfusionMatrix(Binary(), {"recall": Recall()})
    >>> metric.result(metric.observe(jnp.array([0.9, 0.8, 0.2, 0.7]), jnp.array([1, 0, 1, 0])))
    {'recall': Array(0.5, dtype=float32)}
    """

    def terms(self, tp: Total, fp: Total, fn: Total, tn: Total) -> tuple[jax.Array, jax.Array]:
        return tp.value, tp.merge(fn).value


@dataclass(frozen=True)
class FBeta(Statistic):
    """The harmonic mean of precision and recall, in which recall counts ``beta`` times as much; F1 by default.

    ``zero_division`` where a class was neither predicted nor occurred, so that precision and recall are both undefined.

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
        # (1 + b^2) P R / (b^2 P + R), multiplied out: 0 instead of 0 / 0 where P and R are both 0.
        return (1 + square) * tp.value, square * tp.merge(fn).value + tp.merge(fp).value


def _over_classes(cells: Cells) -> Cells:
    """[C] -> []: the sum over classes, of both parts of the pairs."""
    return {name: Total.of(total.high).merge(Total.of(total.low)) for name, total in cells.items()}


# eq=False hashes by identity, as for `Compose`.
@dataclass(frozen=True, eq=False)
class ConfusionMatrix(PureMetric):
    """Statistics of the decisions of a task (``Binary``, ``Multiclass``, ``Multilabel``) by name; the value is a dict.

    ``update(state, scores, labels, weight=None)``: the weight has one number for all or the leading dims of the labels,
    and may be fractional; a ``ValueError`` where they do not fit each other or the task. The state's cells are the
    counts themselves, ``Total`` of shape [C].

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
        made = self.task.decide(jnp.asarray(scores), jnp.asarray(labels))
        weight = weight_per_label(weight, made.weighted)
        became = {
            "tp": made.predicted & made.actual,
            "fp": made.predicted & ~made.actual,
            "fn": ~made.predicted & made.actual,
            "tn": ~(made.predicted | made.actual),
        }
        return {name: total_of(which, made.unknown, weight) for name, which in became.items()}

    def result(self, cells: Cells) -> dict[str, jax.Array]:
        return {name: statistic.of(cells, self.task) for name, statistic in self.statistics.items()}

"""Tests of confusion matrices and binned rankings: uneven shares equal scikit-learn on all rows at once.

Eight devices see from none to eight rows per update, the other rows are padding: weight 0, scores NaN, invalid labels.
The reference gets the real rows of all devices and updates in one float64 array.
"""

import itertools
from functools import cache

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from tests.support import AXES, mesh_of, on_mesh
from xlstm_jax.distributed.metrics.cells import Total
from xlstm_jax.distributed.metrics.classification import (
    AVERAGES,
    Accuracy,
    Binary,
    ConfusionMatrix,
    FBeta,
    Multiclass,
    Multilabel,
    Precision,
    Recall,
)
from xlstm_jax.distributed.metrics.ranking import BinnedRanking
from xlstm_jax.distributed.metrics.sums_and_means import Compose

UPDATES, DEVICES, ROWS, CLASSES, BINS = 3, 8, 8, 6, 40
# Rows per update and device; device 2 never sees any, and no update has the shares of another.
SHARES = np.array([[8, 5, 0, 1, 7, 3, 8, 2], [1, 8, 0, 8, 0, 2, 4, 3], [4, 0, 0, 6, 8, 8, 1, 5]])
LARGEST_SHARE = 4
TOLERANCE = 1e-6

TASKS = {
    "binary": Binary(threshold=0.3),
    "multiclass": Multiclass(CLASSES),
    "predictions": Multiclass(CLASSES),
    "top_k": Multiclass(CLASSES, top_k=2),
    "multilabel": Multilabel(CLASSES, threshold=0.6),
}
STATISTICS = {
    "accuracy": lambda average: Accuracy(average=average),
    "precision": lambda average: Precision(average=average),
    "recall": lambda average: Recall(average=average),
    "f1": lambda average: FBeta(average=average),
    "f2_one": lambda average: FBeta(2.0, average=average, zero_division=1.0),
    "precision_one": lambda average: Precision(average=average, zero_division=1.0),
    "recall_nan": lambda average: Recall(average=average, zero_division=float("nan")),
}
# All averages of two statistics, and of each other statistic two.
OTHERS = {"precision": ("macro", "per_class"), "recall": ("macro", "micro")}
GRID = [
    (statistic, average)
    for statistic, average in itertools.product(STATISTICS, AVERAGES)
    if statistic in ("accuracy", "f1") or average in OTHERS.get(statistic, ("macro", "weighted"))
]
RANKING = BinnedRanking(bins=BINS)
METRIC = Compose(
    {name: ConfusionMatrix(task, {f"{s}/{a}": STATISTICS[s](a) for s, a in GRID}) for name, task in TASKS.items()}
    | {"ranking": RANKING}
)


def sklearn_metrics():
    """Imports scikit-learn's metrics for a test that compares with them: seconds for each worker otherwise."""
    from sklearn import metrics

    return metrics


# ---------------------------------------------------------------------------------------------------------------- data


@cache
def rows():
    """Returns name -> (scores, labels) [updates, devices, rows, ...]; class 5 is absent, device d prefers d % 5."""
    rng = np.random.default_rng(0)
    shape = (UPDATES, DEVICES, ROWS)
    device = np.arange(DEVICES)[None, :, None]
    labels = np.where(rng.random(shape) < 0.5, device % 5, rng.integers(0, 5, shape))
    logits = rng.normal(size=(*shape, CLASSES)) + 1.5 * (labels[..., None] == np.arange(CLASSES))
    logits[..., 5] = -9.0
    many = (rng.random((*shape, CLASSES)) < (1 + device[..., None]) / 12) & (np.arange(CLASSES) < 5)
    yes = rng.random(shape) < (1 + device) / 10
    # Scores away from bin borders, where float32 and float64 round differently.
    bins = np.clip(BINS * (0.2 + 0.4 * yes + 0.3 * rng.normal(size=shape)), 0, BINS - 1).astype(int)
    scores = (bins + rng.uniform(0.1, 0.9, shape)) / BINS
    predicted = np.where(rng.random(shape) < 0.1, CLASSES, logits.argmax(-1))
    return {
        "binary": (scores, yes),
        "multiclass": (logits, labels),
        "predictions": (predicted, np.where(rng.random(shape) < 0.1, -1, labels)),
        "top_k": (logits, labels),
        "multilabel": (np.where(many, 0.7, 0.3) + rng.normal(size=many.shape) / 4, many),
        "ranking": (scores, yes),
    }


@cache
def weights(kind):
    """Returns weights [updates, devices, rows]; 0 is padding."""
    real = np.arange(ROWS) < SHARES[..., None]
    if kind != "fractional":
        return (real * (kind == "ones")).astype(np.float32)
    return (real * np.random.default_rng(1).uniform(0.1, 3.0, real.shape)).astype(np.float32)


def padded(kind, without=None):
    """Returns the batches of all devices, [updates, devices * rows, ...]; ``without`` pads a device's full share."""
    weight = weights(kind).copy()
    if without is not None:
        weight[:, without] = 0

    def flat(x, filler):
        x = np.where((weight != 0).reshape(weight.shape + (1,) * (x.ndim - weight.ndim)), x, filler)
        return x.reshape(UPDATES, DEVICES * ROWS, *x.shape[3:])

    def batch(scores, labels):
        scores = scores if scores.dtype == int else scores.astype(np.float32)
        return {
            "scores": flat(scores, 99 if scores.dtype == int else np.float32(np.nan)),
            "labels": flat(labels.astype(int), 99).astype(np.int32),
            "weight": weight.reshape(UPDATES, DEVICES * ROWS),
        }

    return {name: batch(*both) for name, both in rows().items()}


@cache
def seen(name, kind):
    """Returns (scores, labels, weight) of the real rows, each in a single float64 array."""
    scores, labels = rows()[name]
    real = weights(kind) != 0
    scores = scores if scores.dtype == int else scores.astype(np.float32).astype(np.float64)
    return scores[real], labels[real].astype(int), weights(kind)[real].astype(np.float64)


# ------------------------------------------------------------------------------------------------------------ programs


@cache
def program(check_vma):
    def updates_and_sync(batches):
        def update(state, batch):
            return METRIC.update(state, **batch), None

        return METRIC.sync(jax.lax.scan(update, METRIC.empty(AXES), batches)[0])

    return on_mesh(updates_and_sync, mesh_of(4, 2), check_vma, (P(None, AXES),), P())


@cache
def compute():
    return jax.jit(METRIC.compute)


@cache
def computed(check_vma, kind, without=None):
    return jax.device_get(compute()(program(check_vma)(padded(kind, without))))


# ----------------------------------------------------------------------------------------------------------- reference


def predicted(name, scores, labels):
    if name == "binary":
        return (scores >= 0.3).astype(int)
    if name == "multilabel":
        return (scores >= 0.6).astype(int)
    if name == "predictions":
        return scores
    highest = np.argsort(-scores, axis=-1)
    if name == "multiclass":
        return highest[:, 0]
    return np.where((highest[:, :2] == labels[:, None]).any(-1), labels, highest[:, 0])


def accuracy(name, average, labels, predictions, weight):
    if average == "micro" and name == "multilabel":
        return 1 - sklearn_metrics().hamming_loss(labels, predictions, sample_weight=weight)
    if average == "micro" or name == "binary":
        share = sklearn_metrics().accuracy_score(labels, predictions, sample_weight=weight)
        return [share] if average == "per_class" else share
    if name == "multilabel":
        decisions = [(labels[:, c] == 1, predictions[:, c] == 1) for c in range(CLASSES)]
    else:
        decisions = [(labels == c, predictions == c) for c in range(CLASSES)]
    each = [sklearn_metrics().accuracy_score(y, p, sample_weight=weight) for y, p in decisions]
    support = [np.sum(weight * y) for y, _ in decisions]
    return {"per_class": each, "macro": np.mean(each), "weighted": np.average(each, weights=support)}[average]


def reference(name, statistic, average, scores, labels, weight):
    predictions = predicted(name, scores, labels)
    if statistic == "accuracy":
        return accuracy(name, average, labels, predictions, weight)
    base, _, zero_division = statistic.partition("_")
    options = {"zero_division": {"": 0.0, "one": 1.0, "nan": np.nan}[zero_division], "sample_weight": weight}
    options["average"] = None if average == "per_class" else average
    if name == "binary":
        options |= {"labels": [1], "average": options["average"] and "micro"}
    elif name != "multilabel":
        options["labels"] = range(CLASSES)
    if base in ("f1", "f2"):
        return sklearn_metrics().fbeta_score(labels, predictions, beta=float(base[1]), **options)
    return getattr(sklearn_metrics(), f"{base}_score")(labels, predictions, **options)


# --------------------------------------------------------------------------------------------------- confusion matrices


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("check_vma, kind", [(True, "fractional"), (True, "ones"), (False, "fractional")])
def test_classification_statistics_over_uneven_shards_match_scikit_learn(check_vma, kind, name):
    for statistic, average in GRID:
        got = computed(check_vma, kind)[name][f"{statistic}/{average}"]
        want = reference(name, statistic, average, *seen(name, kind))
        assert np.shape(got) == np.shape(want)
        assert_allclose(got, want, rtol=0, atol=TOLERANCE, err_msg=f"{statistic}/{average}")


@pytest.mark.parametrize("name", TASKS)
def test_classification_statistics_change_without_the_largest_shard(name):
    whole, part = (computed(True, "fractional", without)[name] for without in (None, LARGEST_SHARE))
    for key in whole:
        assert not np.allclose(whole[key], part[key], rtol=0, atol=100 * TOLERANCE, equal_nan=True), key


@pytest.mark.parametrize("kind", ["ones", "fractional"])
def test_micro_accuracy_with_top_k_is_top_k_accuracy(kind):
    scores, labels, weight = seen("top_k", kind)
    want = sklearn_metrics().top_k_accuracy_score(labels, scores, k=2, labels=range(CLASSES), sample_weight=weight)
    assert_allclose(computed(True, kind)["top_k"]["accuracy/micro"], want, rtol=0, atol=TOLERANCE)
    assert want > computed(True, kind)["multiclass"]["accuracy/micro"] + 0.05


@pytest.mark.parametrize("kind", ["ones", "fractional"])
def test_balanced_accuracy_is_macro_recall_of_the_classes_that_occur(kind):
    scores, labels, weight = seen("multiclass", kind)
    want = sklearn_metrics().balanced_accuracy_score(labels, scores.argmax(-1), sample_weight=weight)
    assert_allclose(computed(True, kind)["multiclass"]["recall_nan/macro"], want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", TASKS)
def test_statistic_without_rows_returns_the_zero_division_value(name):
    values = computed(True, "none")[name]
    for statistic, average in GRID:
        declared = {"one": 1.0, "nan": np.nan}.get(statistic.partition("_")[2], 0.0)
        got = values[f"{statistic}/{average}"]
        assert_allclose(got, np.full(np.shape(got), declared), err_msg=f"{statistic}/{average}")


def value_of(statistic, task, *observed):
    metric = ConfusionMatrix(task, {"it": statistic})
    return jax.jit(lambda *rows: metric.result(metric.observe(*rows))["it"])(*observed)


def test_weighted_average_without_support_is_the_plain_mean_of_classes():
    labels, predictions = np.array([-1, -1, -1]), np.array([0, 0, 1])
    got = value_of(Precision(average="weighted", zero_division=1.0), Multiclass(4), predictions, labels)
    assert_allclose(got, (0 + 0 + 1 + 1) / 4)


@pytest.mark.parametrize("weight", [np.array([0.5, 2.0]), np.array([[0.5, 1, 0], [2, 0, 3]])], ids=["rows", "tokens"])
def test_accuracy_treats_leading_dims_as_rows_and_broadcasts_the_weight(weight):
    scores = np.random.default_rng(2).normal(size=(2, 3, 4))
    labels = np.array([[0, 1, 2], [3, 2, 1]])
    each = np.broadcast_to(weight[:, None] if weight.ndim == 1 else weight, labels.shape)
    want = np.sum(each * (scores.argmax(-1) == labels)) / np.sum(each)
    assert_allclose(value_of(Accuracy(), Multiclass(4), scores, labels, weight), want, rtol=TOLERANCE)


def test_multilabel_statistics_accept_a_weight_per_label():
    scores, labels = np.array([[0.9, 0.1], [0.9, 0.9]]), np.array([[1, 1], [0, 1]])
    weight = np.array([[1.0, 2.0], [4.0, 0.0]])
    assert_allclose(value_of(Accuracy(), Multilabel(2), scores, labels, weight), 1 / 7, rtol=TOLERANCE)
    assert_allclose(value_of(Recall(average="per_class"), Multilabel(2), scores, labels, weight), [1, 0])


def test_identities_are_zeros_and_small_values_are_those_by_hand():
    statistics = {"f1": FBeta(average="per_class"), "precision": Precision(average="micro")}
    matrix, ranking = ConfusionMatrix(Multilabel(2), statistics), BinnedRanking(bins=4)
    assert {name: total.value.tolist() for name, total in matrix.identity().items()} == {
        name: [0, 0] for name in ("tp", "fp", "fn", "tn")
    }
    assert {name: total.value.tolist() for name, total in ranking.identity().items()} == {
        name: [0, 0, 0, 0] for name in ("positive", "negative")
    }

    @jax.jit
    def values(scores, labels, ranked, positive):
        return matrix.result(matrix.observe(scores, labels)), ranking.result(ranking.observe(ranked, positive))

    # Of the first label a hit and a false alarm, of the second a hit. Three of four pairs of scores are in order.
    of_labels, of_ranks = values(
        np.array([[0.9, 0.1], [0.9, 0.9]]), np.array([[1, 0], [0, 1]]), np.array([0.1, 0.3, 0.6, 0.9]), np.arange(4) % 2
    )
    assert_allclose(of_labels["f1"], [2 / 3, 1], rtol=TOLERANCE)
    assert_allclose(of_labels["precision"], 2 / 3, rtol=TOLERANCE)
    assert_allclose(of_ranks["auroc"], 3 / 4, rtol=TOLERANCE)
    assert_allclose(of_ranks["average_precision"], (1 + 2 / 3) / 2, rtol=TOLERANCE)


def test_decisions_of_one_hot_rows_and_at_thresholds_are_those_by_hand():
    rows = np.array([[0, 0, 1], [0, 0, 0], [1, 1, 0], [0.8, 0.1, 0.1], [0, 2, 0], [1, 0, 0]], np.float32)
    scores = np.array([[0.1, 0.2, 0.7]] * 5 + [[0.9, np.nan, 0]], np.float32)

    @jax.jit
    def decided(rows, scores):
        hot, column = Multiclass(3).decide(scores, rows), Multiclass(3).decide(scores, jnp.arange(6)[:, None] % 3)
        among = Multiclass(3, top_k=3).decide(scores, jnp.arange(6) % 3)
        binary = Binary(threshold=0.25).decide(jnp.array([0.25, 0.24]), jnp.array([1, 2]))
        return hot.actual, hot.unknown, column.actual, column.unknown, among.predicted, binary.predicted, binary.actual

    hot, unknown, column, unknown_scores, among, predicted, positive = decided(rows, scores)
    no_class, classes = [False] * 3, np.eye(3, dtype=bool)
    assert hot[:2].tolist() == [[False, False, True], no_class], "a row without a 1 is of no class"
    assert unknown[:, 0].tolist() == [False, False, True, True, True, True], "rows that are not one-hot are unknown"
    np.testing.assert_array_equal(column, np.tile(classes, (2, 1)), "a last dim of 1 counts classes")
    assert unknown_scores[:, 0].tolist() == [False] * 5 + [True], "a NaN among the scores of a row"
    np.testing.assert_array_equal(among[:5], np.tile(classes, (2, 1))[:5], "each label is among all classes")
    assert predicted.tolist() == [[True], [False]] and positive.tolist() == [[True], [False]]
    assert Multiclass(2, top_k=2).num_classes == 2  # the smallest number of classes, and the largest k


def test_rows_with_two_ones_or_none_are_of_no_class_and_a_score_at_the_threshold_is_positive():
    rows, scores = np.array([[0, 0, 1], [0, 0, 0], [1, 1, 0]], np.float32), np.zeros((3, 3), np.float32)

    @jax.jit
    def decided(scores, rows):
        hot = Multiclass(3).decide(scores, rows)
        return hot.actual, hot.unknown, Binary(0.25).decide(jnp.array([0.25, 0.24]), jnp.array([1, 1])).predicted

    actual, unknown, predicted = decided(scores, rows)
    assert actual[:2].tolist() == [[False, False, True], [False] * 3]
    assert unknown.ravel().tolist() == [False, False, True] and predicted.ravel().tolist() == [True, False]


def test_f_beta_weighs_misses_by_the_square_of_beta():
    tp, fp, fn = (Total(jnp.float32(count), jnp.float32(0)) for count in (1, 2, 3))
    numerator, denominator = FBeta(beta=2.0).terms(tp, fp, fn, tp)
    assert (float(numerator), float(denominator)) == (5, 4 * (1 + 3) + 1 + 2), "false alarms are weighed for misses"


def test_scores_at_the_borders_of_bins_and_beyond_them_are_counted_once():
    scores, ranking = jnp.array([-1, 0, 0.25, 0.999, 1, 2, jnp.nan]), BinnedRanking(bins=4)
    cells = jax.jit(ranking.observe)(scores, jnp.array([1, 1, 0, 0, 1, 1, 1]), jnp.array([1, 1, 1, 1, 1, 1, 0]))
    found = {name: (total.high + total.low).tolist() for name, total in cells.items()}
    assert found == {"positive": [2, 0, 0, 2], "negative": [0, 1, 0, 1]}, "a score is in another bin"


def test_equal_scores_rank_the_lower_class_first():
    scores, labels = np.zeros((4, 4)), np.arange(4)
    assert value_of(Accuracy(), Multiclass(4), scores, labels) == 0.25
    assert value_of(Accuracy(), Multiclass(4, top_k=3), scores, labels) == 0.75


def test_invalid_label_counts_as_a_false_positive_and_no_false_negative():
    cells = ConfusionMatrix(Multiclass(3), {}).observe(jnp.array([1, 1, 7]), jnp.array([1, -1, 2]))
    assert {name: total.value.tolist() for name, total in cells.items()} == {
        "tp": [0, 1, 0],
        "fp": [0, 1, 0],
        "fn": [0, 0, 1],
        "tn": [3, 1, 2],
    }


def test_a_threshold_is_not_rounded_to_the_dtype_of_the_scores():
    below = jnp.array([0.699], jnp.bfloat16)  # 0.69921875, the bfloat16 of 0.7
    assert below[0] == jnp.bfloat16(0.7)
    assert value_of(Accuracy(), Binary(threshold=0.7), below, np.array([0])) == 1


def test_nan_scores_with_weight_make_affected_statistics_nan():
    scores, labels = np.array([[np.nan, 0.9], [0.9, 0.9]]), np.array([[1, 1], [1, 0]])
    assert_allclose(value_of(Precision(average="per_class"), Multilabel(2), scores, labels), [np.nan, 0.5])
    assert np.isnan(value_of(Recall(average="macro"), Multilabel(2), scores, labels))
    assert np.isnan(value_of(Accuracy(), Multiclass(2, top_k=2), scores, labels[0]))
    assert value_of(Accuracy(), Multiclass(2), scores, labels[0], np.array([0, 1])) == 0


# ------------------------------------------------------------------------------------------------------------- ranking


def both(scores, labels, weight):
    return {
        "auroc": sklearn_metrics().roc_auc_score(labels, scores, sample_weight=weight),
        "average_precision": sklearn_metrics().average_precision_score(labels, scores, sample_weight=weight),
    }


@pytest.mark.parametrize("kind", ["ones", "fractional"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_binned_ranking_over_uneven_shards_matches_scikit_learn_on_binned_scores(check_vma, kind):
    got = computed(check_vma, kind)["ranking"]
    scores, labels, weight = seen("ranking", kind)
    exact, binned = both(scores, labels, weight), both((np.floor(scores * BINS) + 0.5) / BINS, labels, weight)
    for name in binned:
        assert_allclose(got[name], binned[name], rtol=0, atol=TOLERANCE)
        assert 0 < abs(got[name] - exact[name]) <= got[f"{name}_error_bound"] < 0.1
        assert abs(got[name] - computed(check_vma, kind, LARGEST_SHARE)["ranking"][name]) > 100 * TOLERANCE


def test_binned_ranking_counts_scores_in_bins_beyond_the_range_of_16_bits():
    metric = BinnedRanking(bins=2**17)
    positive = metric.observe(np.array([0.1, 0.5, 0.999]), np.ones(3, int))["positive"].value
    assert np.flatnonzero(positive).tolist() == [13107, 65536, 130940]


FEW = BinnedRanking(bins=7, empty_auroc=0.25, empty_average_precision=0.75)


@cache
def ranked():
    return jax.jit(lambda scores, labels, weight: FEW.result(FEW.observe(scores, labels, weight)))


def values_of_few(scores, labels, weight=1.0):
    """Returns the metric values of up to 16 rows, padded to 16."""
    padding = (0, 16 - len(scores))
    weight = np.pad(np.broadcast_to(np.float32(weight), np.shape(scores)), padding)
    scores = np.pad(np.asarray(scores, np.float32), padding, constant_values=np.nan)
    return jax.device_get(ranked()(scores, np.pad(np.asarray(labels, np.int32), padding), weight))


@hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
@hypothesis.given(
    scores=st_numpy.arrays(np.float32, 16, elements=st.floats(-0.5, 1.5, width=32)),
    labels=st_numpy.arrays(np.int32, 16, elements=st.integers(0, 1)),
    weight=st_numpy.arrays(np.float32, 16, elements=st.sampled_from([0.25, 1.0, 3.0, 1000.0])),
)
def test_binning_error_of_a_ranking_is_within_the_error_bound(scores, labels, weight):
    hypothesis.assume(0 < labels.sum() < 16)
    got, exact = values_of_few(scores, labels, weight), both(scores, labels, weight.astype(np.float64))
    for name in exact:
        assert abs(got[name] - exact[name]) <= got[f"{name}_error_bound"] + TOLERANCE


def test_binned_ranking_error_bound_is_reached_in_a_single_bin():
    got = values_of_few([0.51, 0.52, 0.53], [1, 0, 0])  # one bin: the positive may have any rank
    assert_allclose([got["auroc"], got["auroc_error_bound"]], [0.5, 0.5])
    assert_allclose([got["average_precision"], got["average_precision_error_bound"]], [1 / 3, 2 / 3], rtol=TOLERANCE)


def test_binned_ranking_is_exact_for_scores_in_separate_bins():
    got = values_of_few([-np.inf, 0.2, 0.4, 0.8, np.inf], [0, 1, 0, 1, 1])
    assert_allclose([got["auroc"], got["auroc_error_bound"]], [5 / 6, 0], rtol=TOLERANCE)
    assert_allclose(got["average_precision"], (1 + 1 + 3 / 4) / 3, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "labels, auroc, average_precision", [([], 0.25, 0.75), ([0, 0], 0.25, 0.75), ([1, 1], 0.25, 1.0)], ids=str
)
def test_binned_ranking_without_a_class_returns_the_declared_value(labels, auroc, average_precision):
    got = values_of_few([0.2, 0.7][: len(labels)], labels)
    assert_allclose([got["auroc"], got["average_precision"]], [auroc, average_precision])
    assert got["auroc_error_bound"] == got["average_precision_error_bound"] == 0


def test_nan_score_with_weight_makes_the_binned_ranking_nan():
    got = values_of_few([np.nan, 0.5, 0.2], [1, 1, 0])
    assert np.isnan(list(got.values())).all()
    assert np.isfinite(list(values_of_few([np.nan, 0.5, 0.2], [1, 1, 0], [0, 1, 1]).values())).all()


def test_binned_ranking_with_large_weights_keeps_six_digits():
    metric, rng = BinnedRanking(), np.random.default_rng(3)
    bins, labels = rng.integers(0, 1000, 3000), rng.integers(0, 2, 3000)
    weight = rng.uniform(1, 1e9, 3000).astype(np.float32)
    centres = (bins + 0.5) / 1000
    got = jax.jit(lambda *rows: metric.result(metric.observe(*rows)))(centres, labels, weight)
    for name, want in both(centres, labels, weight.astype(np.float64)).items():
        assert_allclose(got[name], want, rtol=TOLERANCE)

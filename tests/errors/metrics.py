"""Errors of metrics: of cells and states, classification, reductions, and of the accumulators."""

from tests.errors.shared import AXES, MESH, P, create, jax, jnp, mesh_of, np, shaped
from tests.errors.table import Section
from xlstm_jax.distributed import metrics as m
from xlstm_jax.distributed.metrics import (
    Compose,
    Max,
    MetricAccumulator,
    MetricReduceOp,
    StatefulMetric,
    Sum,
    WeightedMean,
)
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Total
from xlstm_jax.distributed.metrics.classification import (
    Accuracy,
    Binary,
    ConfusionMatrix,
    FBeta,
    Multiclass,
    Multilabel,
    Precision,
)
from xlstm_jax.distributed.metrics.ranking import BinnedRanking

metrics, names, plain = Section("Metrics"), Section("Axis names"), WeightedMean()
BATCH_MESH = create({"batch": 8})
SPLIT = jax.sharding.NamedSharding(BATCH_MESH, P("batch"))


def counted(decide, scores, labels, *weight):
    """Returns a call that traces the accuracy of scores."""
    metric = ConfusionMatrix(decide, {"it": Accuracy()})
    return lambda: jax.eval_shape(metric.observe, scores, labels, *weight)


def ranked(*given, **options):
    return lambda: BinnedRanking(**options).observe(*given)


def reduced(fn):
    """Returns a call that reduces one number per device over the axis "batch"."""
    return lambda: shaped(fn, jnp.ones(8), mesh=BATCH_MESH, in_specs=P("batch"))


def by(reduce_fn, reduce=m.reduce_custom):
    return reduced(lambda x: reduce({"loss": x, "tokens": x, "deep": {"a": x}}, reduce_fn)["loss"])


def accumulated(start, value):
    return lambda: MetricAccumulator(start).update(value)


def beyond():
    count = MetricAccumulator(jnp.int32(2**31 - 1))
    count.update(1)
    count.sync()
    return count.value


def loaded(change):
    """Returns a call that loads the state dict of an accumulator after a change."""

    def load():
        accumulator = MetricAccumulator(jnp.float32(0))
        given = accumulator.state_dict()
        change(given)
        accumulator.load_state_dict(given)

    return load


class OfValues(m.PureMetric):
    """A metric that returns its arguments as observations."""

    def identity(self):
        return {"total": Total.identity(), "count": Count.identity()}

    def observe(self, values):
        return values

    def result(self, state):
        return state["total"].value


class OfLargest(m.PureMetric):
    """A metric whose observations have another dtype than its state."""

    def identity(self):
        return Maximum.identity((), jnp.int32)

    def observe(self, values):
        return Maximum.of(values)

    def result(self, state):
        return state.value


def observed(**cells):
    return lambda: OfValues().update(OfValues().empty(), cells)


def declared(axes):
    mesh = create({"dp": 4, "tp": 2})
    fn = lambda v: Sum().sync(Sum().update(Sum().empty(axes), v))  # noqa: E731
    return lambda: shaped(fn, jnp.ones(8), mesh=mesh, in_specs=P("dp"))


def local():
    return plain.empty(AXES, MESH)


def unsynchronized():
    metric = StatefulMetric(WeightedMean())
    metric.update(np.ones(3))
    return metric.compute()


TWO = Compose({"a": WeightedMean(), "b": WeightedMean()})
OTHERS = {"names": Compose({"a": WeightedMean(), "c": WeightedMean()}), "one": plain, "kind": Compose({"a": Max()})}
USES = {
    "update": lambda metric, state: metric.update(state),
    "compute": lambda metric, state: metric.compute_local(state),
    "merge": lambda metric, state: metric.merge(state, state),
}
zeros = np.zeros
ROWS = [
    # ----- classification
    metrics(
        "average-misspelt",
        lambda: Precision(average="mean"),
        ValueError,
        "average=…",
        "average='mean' of Precision is none of micro, macro, weighted",
    ),
    metrics("beta-zero", lambda: FBeta(0.0), ValueError, "beta=…", "beta=0.0 of FBeta is not in (0, inf)"),
    metrics(
        "one-class", lambda: Multiclass(1), ValueError, "Multiclass with", "num_classes=1: there must be at least 2"
    ),
    metrics("top-k-of-classes", lambda: Multiclass(3, top_k=4), ValueError, "top_k=…", "top_k=4 is not in 1..3"),
    metrics("no-labels", lambda: Multilabel(0), ValueError, "Multilabel with", "num_labels=0"),
    metrics(
        "scores-of-more-classes",
        counted(Multiclass(3), zeros((8, 4)), zeros(8, int)),
        ValueError,
        "scores of shape",
        "scores of shape (8, 4)",
        "labels of shape (8,): with num_classes=3 they have shape (8, 3)",
    ),
    metrics(
        "scores-floats",
        counted(Multiclass(3), zeros(8), zeros(8, int)),
        ValueError,
        "scores of shape",
        "scores of shape (8,) and dtype float32 do not fit",
    ),
    metrics(
        "scores-top-k",
        counted(Multiclass(3, top_k=2), zeros(8, int), zeros(8, int)),
        ValueError,
        "scores of shape",
        "with top_k 1 (here 2) are integer predictions",
    ),
    metrics(
        "labels-floats",
        counted(Multiclass(3), zeros((8, 3)), zeros(8)),
        ValueError,
        "labels of dtype",
        "labels of dtype float32: they are integers or bools",
    ),
    metrics(
        "scores-of-one-per-label",
        counted(Binary(), zeros((8, 1)), zeros(8, int)),
        ValueError,
        "scores of shape",
        "scores of shape (8, 1), labels of shape (8,): Binary has one per label",
    ),
    metrics(
        "labels-of-a-row",
        counted(Multilabel(3), zeros((8, 4)), zeros((8, 4), int)),
        ValueError,
        "labels of shape … do not end",
        "labels of shape (8, 4) do not end in num_labels=3",
    ),
    metrics(
        "weight-of-classes",
        counted(Multiclass(3), zeros((8, 3)), zeros(8, int), np.ones((8, 3))),
        ValueError,
        "weight of shape",
        "weight of shape (8, 3) does not fit values of shape (8,)",
    ),
    metrics("bins-none", ranked(bins=0), ValueError, "bins=…", "bins=0 is not in 1.."),
    metrics(
        "range-empty", ranked(low=1.0, high=1.0), ValueError, "low=… is not below", "low=1.0 is not below high=1.0"
    ),
    metrics("range-nan", ranked(high=float("nan")), ValueError, "low=… is not below", "high=nan"),
    metrics("range-infinite", ranked(high=float("inf")), ValueError, "low=… is not below", "high=inf"),
    metrics(
        "ranking-shapes",
        ranked(zeros((8, 2)), zeros(8, int)),
        ValueError,
        "scores of shape",
        "scores of shape (8, 2), labels of shape (8,): BinnedRanking has one per label",
    ),
    metrics("ranking-labels", ranked(zeros(8), zeros(8)), ValueError, "labels of dtype", "float32"),
    metrics(
        "ranking-weight",
        ranked(zeros(8), zeros(8, int), np.ones(4)),
        ValueError,
        "weight of shape",
        "weight of shape (4,)",
    ),
    # ----- reductions
    *[
        metrics(f"reduce-{name}-{way}", by(reduce_fn, reduce), ValueError, words, *says)
        for way, reduce in [("global", m.reduce_custom), ("collective", m.reduce_custom_collective)]
        for name, reduce_fn, words, *says in [
            (
                "median",
                {"loss": "median"},
                "reduce_fn[…]",
                "reduce_fn['loss'] is 'median'; the operations are 'mean', 'sum', 'max', 'min'",
            ),
            ("deep", {"deep": {"a": "avg"}}, "reduce_fn[…]", "reduce_fn['deep/a'] is 'avg'"),
            (
                "misspelt",
                {"tokns": "sum"},
                "reduce_fn has",
                "'tokns', which the metrics do not have: ['deep', 'loss', 'tokens']",
            ),
            ("dictionary", {"loss": {"a": "sum"}}, "reduce_fn[…]", "reduce_fn['loss'] is a dictionary"),
        ]
    ],
    metrics(
        "reduce-list",
        lambda: m.reduce_custom({"a": [1.0]}, {"a": {"x": "sum"}}),
        ValueError,
        "reduce_fn[…]",
        "reduce_fn['a'] is a dictionary, but that metric is list",
    ),
    metrics(
        "reduce-number",
        lambda: m.reduce_custom({"deep": {"n": 2}}, {"deep": {"n": "sum"}}),
        ValueError,
        "reduce_fn[…]",
        "reduce_fn['deep/n'] is 'sum', but that metric is 2, a number with no ent",
    ),
    metrics(
        "reduce-weight-per-example",
        reduced(lambda x: m.reduce_mean_collective({"x": x}, weight=x)),
        ValueError,
        "weight has the shape",
        "weight has the shape (1,); it is one number per device",
    ),
    names(
        "reduce-unbound",
        reduced(lambda x: m.reduce_mean_collective({"x": x}, "data")),
        ValueError,
        "…: … is not a bound mesh axis",
        "reduce_mean_collective: 'data' is not",
        "the axes bound",
        "batch",
    ),
    names(
        "reduce-nothing-bound",
        lambda: m.all_gather({"x": jnp.ones(2)}),
        ValueError,
        "…: … is not a bound mesh axis",
        "no mesh axis is bound here",
    ),
    # ----- accumulators
    metrics(
        "operation-mean",
        lambda: MetricAccumulator(0.0, "mean"),
        ValueError,
        "reduce_op=…",
        "cannot be merged: the mean of means is not the mean",
    ),
    metrics(
        "operation-misspelt",
        lambda: MetricReduceOp("median"),
        ValueError,
        "reduce_op=…",
        "reduce_op='median' is none of 'sum', 'max', 'min'",
    ),
    metrics("sum-of-bool", lambda: MetricAccumulator(False), TypeError, "a sum of bool"),
    metrics(
        "sum-of-complex", lambda: MetricAccumulator(1j), TypeError, "an accumulator of dtype", "complex64 has no sum"
    ),
    metrics(
        "update-shape", accumulated(0.0, np.ones(3)), ValueError, "update got", "shape (3,); the accumulator's is ()"
    ),
    metrics(
        "update-float",
        accumulated(0, 2.5),
        TypeError,
        "update got",
        "got float32, which an accumulator of int32 cannot hold",
    ),
    metrics(
        "update-numpy-wide",
        lambda: StatefulMetric(Sum(jnp.int32)).update(np.int64(2**33), jax.device_put(jnp.ones(8), SPLIT)),
        OverflowError,
        "update got",
        "a NumPy integer beyond 32 bits beside an array that is split over devices",
    ),
    metrics(
        "update-wider",
        lambda: MetricAccumulator(jnp.int8(0), "max").update(jnp.int32(300)),
        TypeError,
        "update got",
        "got int32, which an accumulator of int8 cannot hold",
    ),
    metrics(
        "complex-values",
        lambda: WeightedMean().observe(jnp.ones(2, jnp.complex64)),
        TypeError,
        "a metric of real numbers got",
        "an array of dtype complex64, shape (2,): its imaginary parts would be lost",
    ),
    metrics(
        "largest-of-floats",
        lambda: Max(jnp.int32).observe(jnp.ones(2)),
        TypeError,
        "… of dtype … got values",
        "Max of dtype int32 got values of dtype float32, which it would truncate",
    ),
    metrics(
        "cell-of-floats",
        lambda: OfLargest().update(OfLargest().empty(), jnp.ones(2)),
        TypeError,
        "… is a …, and … was observed",
        "the state is a Maximum of dtype int32, and float32 was observed",
    ),
    metrics("update-large", accumulated(0, 2**31), OverflowError, "update got", "beyond the accumulator's int32"),
    metrics("sum-beyond", beyond, OverflowError, "the sum is", f"the sum is {2**31}, beyond the int32"),
    *[
        metrics(
            f"move-to-{place}",
            lambda place=place: MetricAccumulator(0.0).to(place),
            ValueError,
            "to(…): this process",
            f"to({place!r}): this process has no such device, but cpu:0, cpu:1",
        )
        for place in ["gpu", "abacus", 8, "cpu:8", "cpu:x"]
    ],
    metrics(
        "load-entries",
        loaded(lambda s: s.pop("local")),
        ValueError,
        "the state dict has",
        "['is_synchronized', 'synchronized'], and should",
    ),
    metrics(
        "load-value",
        loaded(lambda s: s.update(local={"value": zeros(8)})),
        ValueError,
        "state dict[…]",
        "state dict['local'] is not the state of such a metric",
    ),
    metrics(
        "load-shape",
        loaded(lambda s: s["local"].update(high=zeros((8, 2), np.float32))),
        ValueError,
        "state dict[…]",
        "shape (8, 2)",
        "this metric's has shape",
    ),
    metrics(
        "load-dtype",
        loaded(lambda s: s["local"].update(high=zeros(8, np.float64))),
        ValueError,
        "state dict[…]",
        "dtype float64; this metric's has",
    ),
    metrics(
        "load-number",
        loaded(lambda s: s["synchronized"].update(high=0.0)),
        ValueError,
        "state dict[…]",
        "dtype None; this metric's has",
    ),
    metrics(
        "update-does-not-divide",
        lambda: StatefulMetric(WeightedMean()).update(
            jax.device_put(jnp.ones((6, 2)), jax.NamedSharding(mesh_of(1, 2), P("fsdp")))
        ),
        ValueError,
        "update got",
        "shape (6, 2), whose first dim 8 devices do not divide. Pad it to 8 rows",
    ),
    metrics(
        "compute-before-sync",
        unsynchronized,
        RuntimeError,
        "compute reads the value",
        "sync() first, or compute_local()",
    ),
    # ----- states
    *[
        metrics(
            f"state-of-another-{name}-{use}",
            lambda call=call, other=other: call(other, TWO.empty()),
            ValueError,
            "the state is that of another metric",
            "a/total: Total []",
        )
        for name, other in OTHERS.items()
        for use, call in USES.items()
    ],
    metrics(
        "observed-shape",
        observed(total=Total.of(jnp.ones(3), keep=1)),
        ValueError,
        "… has the shape …, and",
        "total has the shape (), and (3,) was observed for it. Reduce",
    ),
    metrics(
        "observed-kind",
        observed(count=Total.of(jnp.ones(3))),
        TypeError,
        "… is a …, and … was observed",
        "count is a Count, and Total was observed for it",
    ),
    metrics(
        "observed-name",
        observed(mean=Total.of(jnp.ones(3))),
        ValueError,
        "the state has no",
        "the state has no 'mean'; it has ['count', 'total']",
    ),
    metrics(
        "same-along",
        declared(("dp", "tp")),
        ValueError,
        "the batch is the same along",
        "the same along 'tp', over which the state was declared: it would count 2 times",
        "('dp',)",
    ),
    metrics(
        "differs-along",
        declared(("tp",)),
        ValueError,
        "the batch differs along",
        "differs along 'dp', but the state was declared over ('tp',), so only one of 4 devices",
    ),
    metrics(
        "compute-local-state",
        lambda: plain.compute(local()),
        TypeError,
        "compute got a",
        "compute got a Local",
        "sync(state) first, or compute_local",
    ),
    metrics(
        "update-synced",
        lambda: plain.update(plain.state_of({}), 1.0),
        TypeError,
        "… takes a Local state",
        "update takes a Local state, not Synced. Convert it with as_local",
    ),
    metrics(
        "merge-kinds",
        lambda: plain.merge(local(), plain.state_of({})),
        TypeError,
        "merge of … and …",
        "merge of Local and Synced",
    ),
    metrics(
        "merge-axes",
        lambda: plain.merge(local(), plain.empty("fsdp", MESH)),
        ValueError,
        "merge of states",
        "over the axes ('dp', 'fsdp') and ('fsdp',)",
    ),
    metrics(
        "update-outside",
        lambda: plain.update(local(), 1.0),
        ValueError,
        "the state holds the values of",
        "holds the values of 8 devices. Call this inside shard_map",
    ),
    names(
        "empty-outside",
        lambda: plain.empty(AXES),
        ValueError,
        "…: … is not a bound mesh axis",
        "outside of shard_map it needs mesh=): 'dp' is not a bound mesh axis",
    ),
    metrics(
        "compose-misspelt",
        lambda: Compose({"loss": plain}).update(Compose({"loss": plain}).empty(), los=1.0),
        ValueError,
        "there is no metric",
        "there is no metric 'los' among",
    ),
    metrics(
        "count-floats",
        lambda: Sum(jnp.int32).update(Sum(jnp.int32).empty(), 1.5),
        TypeError,
        "a count of integers",
        "got values of dtype float32",
    ),
    metrics(
        "weight-shape",
        lambda: plain.update(plain.empty(), jnp.ones(2), jnp.ones(3)),
        ValueError,
        "weight of shape",
        "weight of shape (3,) does not fit values of shape (2,)",
    ),
]

"""Tests of training loops and metrics as documented by the predecessor systems, against one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import assert_each_leaf, assert_same_params, mesh_of, normal, on_mesh
from xlstm_jax.distributed import DeviceMeshManager, metrics
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.device_mesh import DataParallel
from xlstm_jax.distributed.metrics import (
    Accuracy,
    BinnedRanking,
    Compose,
    ConfusionMatrix,
    DistributedMetrics,
    FBeta,
    Max,
    Metric,
    MetricAccumulator,
    Multiclass,
    StatefulMetric,
    WeightedMean,
)
from xlstm_jax.distributed.metrics.stateful import _compute

BATCHES = [
    {
        "data": np.random.default_rng(seed).normal(size=(16, 6)).astype(np.float32),
        "targets": np.random.default_rng(seed + 9).normal(size=(16, 3)).astype(np.float32),
        "labels": np.arange(16) * (seed + 1) % 3,
    }
    for seed in range(3)
]
optimizer = optax.adam(1e-2)


@pytest.fixture
def mesh():
    return DeviceMeshManager().create_data_parallel_mesh()


# ------------------------------------------------------------------------------------------------- the documented loops


def linear():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), BATCHES[0]["data"])
    return model, params, optimizer.init(params)


def loss_and_grads(model, params, batch):
    def loss_fn(p):
        loss = jnp.mean((model.apply(p, batch["data"]) - batch["targets"]) ** 2)
        return loss, {"loss": loss}

    return jax.value_and_grad(loss_fn, has_aux=True)(params)


def on_one_device():
    model, params, state = linear()
    for batch in BATCHES:
        (_, metrics), grads = loss_and_grads(model, params, batch)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
    return params, metrics["loss"]


def test_data_parallel_loop_under_plain_jit_matches_a_single_device(mesh):
    dp = DataParallel()
    data_sharding = dp.create_data_parallel_sharding(mesh)
    model, params, optimizer_state = linear()

    @jax.jit
    def train_step(params, optimizer_state, batch):
        (_, metrics), grads = loss_and_grads(model, params, batch)
        grads = dp.all_reduce_gradients(grads, reduce_type="mean")
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state, metrics

    for batch in BATCHES:
        sharded_batch = dp.shard_batch(batch, data_sharding)
        assert len(sharded_batch["data"].sharding.device_set) == 8
        params, optimizer_state, metrics = train_step(params, optimizer_state, sharded_batch)
    want, loss = on_one_device()
    assert_same_params(params, want)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map, check_vma=False"])
def test_data_parallel_loop_with_pmap_or_shard_map_matches_a_single_device(mesh, how):
    """The documented ``pmap`` loop equals one device; rows differ by device, so a missing reduction shows."""
    model, params, optimizer_state = linear()

    def train_step(params, optimizer_state, batch, reduce=DataParallel.all_reduce_gradients_static):
        (_, metrics), grads = loss_and_grads(model, params, batch)
        grads = reduce(grads, reduce_type="mean", axis_name="batch")
        updates, optimizer_state = optimizer.update(grads, optimizer_state)
        return optax.apply_updates(params, updates), optimizer_state, DistributedMetrics().reduce_mean(metrics)

    if how == "pmap":
        step = jax.pmap(train_step, axis_name="batch", in_axes=(None, None, 0), out_axes=None)
        batches = [jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch) for batch in BATCHES]
    else:
        on = DeviceMeshManager.create_device_mesh({"batch": 8})
        step = on_mesh(train_step, on, "False" not in how, (P(), P(), P("batch")), P())
        batches = BATCHES
    for batch in batches:
        params, optimizer_state, metrics = step(params, optimizer_state, batch)
    want, loss = on_one_device()
    assert_same_params(params, want)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


class SimpleModel(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.dense1 = nnx.Linear(6, 8, rngs=rngs)
        self.dense2 = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.dense2(nnx.relu(self.dense1(x)))


def trained_nnx(place, prepare=lambda model: None):
    model = SimpleModel(rngs=nnx.Rngs(0))
    prepare(model)
    state = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def train_step(model, state, batch):
        def loss_fn(model):
            logits = model(batch["data"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()
            return loss, {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == batch["labels"])}

        (_, metrics), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        state.update(model, grads)
        return metrics

    for batch in BATCHES[:2]:
        metrics = train_step(model, state, place(batch))
    return nnx.to_pure_dict(nnx.state(model)), metrics


def test_data_parallel_nnx_loop_without_jit_matches_a_single_device(mesh):
    dp = DataParallel()
    data_sharding = dp.create_data_parallel_sharding(mesh)

    def replicate(model):
        nnx.update(model, dp.shard_model_state(nnx.state(model), mesh))

    got, metrics = trained_nnx(lambda batch: dp.shard_batch(batch, data_sharding), replicate)
    want, of_one = trained_nnx(lambda batch: batch)
    assert_same_params(got, want)
    assert metrics["accuracy"] == of_one["accuracy"]
    np.testing.assert_allclose(metrics["loss"], of_one["loss"], rtol=1e-5)
    assert not [path for path, leaf in leaves_with_path(got) if len(leaf.sharding.device_set) != 8]


# --------------------------------------------------------------------------------------------------- parts of the loops


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_reduce_gradients_with_sum_gives_the_gradient_of_the_sum_over_rows(check_vma):
    x, w = jnp.asarray(BATCHES[0]["data"]), jnp.arange(6.0)
    loss = lambda w, x: jnp.sum((x @ w) ** 2)  # noqa: E731

    def step(w, x):
        return DataParallel().all_reduce_gradients(jax.grad(loss)(w, x), "sum", ("dp", "fsdp"))

    got = on_mesh(step, mesh_of(2, 4), check_vma, (P(), P(("dp", "fsdp"))), P())(w, x)
    np.testing.assert_allclose(got, jax.grad(loss)(w, x), rtol=1e-5)


def test_shard_model_state_replicates_or_splits_as_shard_params_does(mesh):
    state = {"w": jnp.ones((6, 16)), "odd": jnp.ones((3, 5)), "small": jnp.ones(8), "count": jnp.int32(2)}
    split = DataParallel.shard_model_state(state, mesh, "shard", min_weight_size=9)
    assert {name: leaf.sharding.spec for name, leaf in split.items()} == {
        "w": P(None, "data"),
        "odd": P(),
        "small": P(),
        "count": P(),
    }
    for made in (DataParallel.shard_model_state(state, mesh), DataParallel().replicate_params(state, mesh)):
        for path, leaf in leaves_with_path(made):
            assert leaf.is_fully_replicated and leaf.sharding.mesh == mesh, path


dp = DataParallel()
REFUSED = {
    "reduce_type": (lambda mesh: dp.all_reduce_gradients(1.0, "median"), ValueError, "'median' is none of 'mean', 'su"),
    "other axis": (
        lambda mesh: jax.pmap(dp.all_reduce_gradients, axis_name="rows")(jnp.ones(8)),
        ValueError,
        r"sync_gradients: 'batch' is not a bound mesh axis; the axes bound here are \('rows',\)",
    ),
    "param_sharding": (lambda mesh: dp.shard_model_state({}, mesh, "split"), ValueError, "'split' is none of 'repl"),
    "no axis": (lambda mesh: dp.create_data_parallel_sharding(mesh, "fsdp"), ValueError, "data_axis='fsdp': the me"),
    "no sharding": (lambda mesh: dp.shard_batch(BATCHES[0], mesh), TypeError, "sharding is a Mesh, and names no axe"),
    "no rows": (
        lambda mesh: dp.shard_batch(BATCHES[0], NamedSharding(mesh, P(None, "data"))),
        ValueError,
        "a batch is split along its rows alone. Pass that of create_data_parallel_sharding",
    ),
    "rows": (
        lambda mesh: dp.shard_batch(np.ones((9, 2)), dp.create_data_parallel_sharding(mesh)),
        ValueError,
        "8 does not divide the 9 rows",
    ),
}


@pytest.mark.parametrize("fails, error, match", REFUSED.values(), ids=REFUSED)
def test_data_parallel_methods_raise_for_invalid_arguments(mesh, fails, error, match):
    with pytest.raises(error, match=match):
        fails(mesh)


# -------------------------------------------------------------------------------------------------------------- metrics


def test_reduce_custom_under_pmap_reduces_python_numbers_over_devices():
    """``reduce_custom`` sums a Python number over devices, as documented."""

    @partial(jax.pmap, axis_name="batch")
    def step(x):
        seen = {"loss": x.mean(), "samples": x.shape[0], "peak": np.float32(2), "lr": 0.5, "deep": {"n": np.arange(2)}}
        out = DistributedMetrics().reduce_custom(seen, {"samples": "sum", "peak": "max", "deep": "sum"})
        assert out.pop("lr") == 0.5  # not named: passed through
        return out

    out = step(jnp.arange(16.0).reshape(8, 2))
    assert out["samples"].tolist() == [16] * 8 and out["peak"].tolist() == [2] * 8 and out["loss"][0] == 7.5
    assert out["deep"]["n"].tolist() == [[0, 8]] * 8


def test_reduce_custom_outside_pmap_raises_for_a_sum_of_a_plain_number():
    with pytest.raises(ValueError, match=r"reduce_fn\['deep/n'\] is 'sum', but that metric is 2, a number with no ent"):
        metrics.reduce_custom({"deep": {"n": 2}}, {"deep": {"n": "sum"}})
    out = metrics.reduce_custom({"n": 2, "m": 3, "x": np.arange(3)}, {"m": "max", "n": None, "x": "sum"})
    assert (out["n"], out["m"], out["x"]) == (2, 3, 3)


def test_metric_subclass_with_an_accumulator_computes_the_value():
    class Loss(Metric[jax.Array]):
        def __init__(self):
            self.total = MetricAccumulator(0.0)

        def update(self, value):
            self.total.update(value)

        def compute(self):
            return self.total.value

    loss = Loss()
    loss.update(2.0)
    assert loss.compute().shape == () and float(loss.compute()) == 2


def test_compose_gives_access_to_parts_by_name_and_raises_for_unknown_names():
    parts = {"loss": WeightedMean(), "peak": Max()}
    assert not [name for name, part in parts.items() if Compose(parts)[name] is not part]
    with pytest.raises(KeyError, match="los"):
        Compose(parts)["los"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("arrange", ["one-hot", "one-hot floats", "bools", "a dim of 1"])
def test_confusion_matrix_accepts_class_index_onehot_and_boolean_labels(arrange, top_k):
    scores, labels = normal(0, (6, 8, 4)), np.arange(48).reshape(6, 8) % 5 - 1  # -1 is none
    one_hot = labels[..., None] == np.arange(4)
    arranged = {"a dim of 1": labels[..., None], "bools": one_hot, "one-hot": one_hot.astype(int)}
    metric = ConfusionMatrix(Multiclass(4, top_k), {"top": Accuracy(), "f1": FBeta(average="per_class")})
    weight = np.arange(6) % 4
    want = metric.result(metric.observe(scores, labels, weight))
    got = metric.result(metric.observe(scores, arranged.get(arrange, one_hot.astype(np.float32)), weight))
    assert_each_leaf(np.testing.assert_array_equal, got, want)
    assert 0.1 < want["top"] < 0.9


def test_confusion_matrix_of_smoothed_labels_gives_nan():
    metric = ConfusionMatrix(Multiclass(2), {"top1": Accuracy()})
    scores, smoothed = jnp.eye(2), jnp.array([[0.9, 0.1], [0, 1]])
    assert np.isnan(metric.result(metric.observe(scores, smoothed))["top1"])
    assert metric.result(metric.observe(scores, smoothed, np.array([0, 1])))["top1"] == 1  # guard: the valid row


def test_stateful_metric_compute_compiles_a_single_program_once():
    metric = StatefulMetric(BinnedRanking(bins=10))
    programs = []
    for scores, want in (([0.9, 0.4, 0.6, 0.1], 3 / 4), ([0.2, 0.3, 0.8, 0.7], 0)):
        metric.reset()
        metric.update(np.array(scores), np.array([1, 1, 0, 0]))
        metric.sync()
        np.testing.assert_allclose(metric.compute()["auroc"], want, rtol=1e-6)
        programs.append(_compute._cache_size())
    assert programs[0] == programs[1] > 0

"""Tests of evaluation on shards: results of one device, one gather, no reductions, nothing kept for backward."""

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.training.train_state import TrainState
from numpy.testing import assert_allclose

from tests.support import (
    AXES,
    FLOAT32_ROUNDING,
    Model,
    as_called,
    count_collectives,
    data,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
)
from xlstm_jax.distributed import create_train_state, make_eval_step, make_train_step, shard_batch
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of, true_value
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.metrics import Compose, Max, Sum, WeightedMean, make_log_step
from xlstm_jax.distributed.training.checks.calls import check_donated
from xlstm_jax.distributed.training.evaluation import _Evaluation
from xlstm_jax.distributed.training.moments import JittedCall

MESH, KEY = mesh_of(2, 4), jax.random.key(0)
METRIC = Compose({"loss": WeightedMean(), "rows": Sum(jnp.int32), "worst": Max()})
SET = data(batch=21)  # two batches of 16 rows, the last with 5: three devices see padding alone


def eval_fn(params, apply_fn, batch):
    losses = jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, axis=-1)
    seen = batch["weight"] > 0
    return {"loss": (losses, batch["weight"]), "rows": seen, "worst": (losses, seen)}


def batches(rows=16):
    for start in range(0, 21, rows):
        own = {name: np.asarray(SET[name])[start : start + rows] for name in ("x", "y")}
        batch, weight = shard_batch(own, MESH, AXES, pad=rows)
        yield batch | {"weight": weight}


@cache
def state_of(scan=True, remat=False):
    wrap = fsdp(axis_name=AXES if scan else "fsdp", gather_dtype=None)
    return create_train_state(Model(wrap, scan, remat), optax.adam(1e-2), MESH, KEY, SET["x"][:16], batch_axes=AXES)


def evaluate(step, state, metric=METRIC):
    local = metric.empty(AXES, MESH)
    for batch in batches():
        local = step(state, batch, local)
    return make_log_step(metric, MESH, AXES)(local)[0]


def on_one_device(params, scan=True, rows=21):
    """Evaluates the plain model on the full set at once."""
    out = Model(scan=scan).apply({"params": params}, SET["x"][:rows])
    losses = jnp.mean((out - SET["y"][:rows]) ** 2, axis=-1)
    return {"loss": losses.mean(), "rows": len(losses), "worst": losses.max()}


def whole(params):
    return jax.device_get(trees.map_leaves(true_value, params))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scan, check_vma", [(True, True), (False, False)])
def test_evaluation_over_all_batches_matches_a_single_device(scan, check_vma):
    state = state_of(scan)
    want = on_one_device(whole(state.params), scan)
    got = evaluate(eval_step(check_vma=check_vma), state)
    assert got["rows"] == 21
    assert_allclose(got["loss"], want["loss"], rtol=FLOAT32_ROUNDING)
    assert_allclose(got["worst"], want["worst"], rtol=FLOAT32_ROUNDING)
    first = SET["x"][:16], SET["y"][:16]
    assert not np.isclose(
        np.mean((Model(scan=scan).apply({"params": whole(state.params)}, first[0]) - first[1]) ** 2), want["loss"]
    )


def eval_step(fn=eval_fn, mesh=MESH, metric=METRIC, **options):
    return make_eval_step(fn, mesh, AXES, metric=metric, **options)


def lowered(step, state):
    return step.lower(state, next(batches()), METRIC.empty(AXES, MESH))


@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
def test_eval_step_gathers_each_sharded_leaf_once_and_reduces_nothing(remat):
    state = state_of(scan=False, remat=remat)
    split = sum(bool(leaf_of(leaf).axes) for _, leaf in trees.leaves_with_path(state.params))
    text = lowered(eval_step(), state).as_text()
    assert as_called(text).count("stablehlo.all_gather") == count_collectives(text) == split > 3


class Deep(nn.Module):
    """Layers of 64 x 64 weights, scanned."""

    layers: int

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(fsdp(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        return nn.Dense(4)(scan()(nn.Dense(64)(x))[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(64)(x)), None


def temporary_bytes(layers, train):
    state = create_train_state(Deep(layers), optax.sgd(0.1), MESH, KEY, SET["x"][:16], batch_axes=AXES)
    program = make_train_step(mean_loss, MESH, AXES).lower(state, data(), KEY) if train else lowered(eval_step(), state)
    return program.compile().memory_analysis().temp_size_in_bytes


def test_eval_step_memory_does_not_grow_with_the_number_of_layers():
    """Evaluation needs as much memory for eight layers as for two; a training step keeps gathered weights per layer."""
    one_layer = 64 * 64 * 4
    assert abs(temporary_bytes(8, train=False) - temporary_bytes(2, train=False)) < one_layer / 4
    assert temporary_bytes(8, train=True) - temporary_bytes(2, train=True) > 5 * one_layer  # guard


# --------------------------------------------------------------------------------------------- other fields of a state


class WithAverage(TrainState):
    average: Any = struct.field(default=None, kw_only=True)
    collections: Any = struct.field(default_factory=dict, kw_only=True)


def test_eval_step_reuses_the_program_for_averaged_parameters():
    state = state_of()
    average = jax.tree.map(lambda w: 0.5 * w, state.params)
    fields = {name: field for name, field in vars(state).items() if name != "sees_boxes"}
    state = WithAverage(**fields | {"average": average})
    step = eval_step()
    own, averaged = evaluate(step, state), evaluate(step, state.replace(params=state.average))
    want = on_one_device(whole(average))
    assert_allclose(averaged["loss"], want["loss"], rtol=FLOAT32_ROUNDING)
    assert not np.isclose(own["loss"], averaged["loss"])
    assert step._cache_size() == 1


def test_eval_step_passes_collections_to_eval_fn():
    def with_statistics(params, apply_fn, batch, collections):
        out = apply_fn({"params": params} | collections, batch["x"])
        return {"values": out[:, 0], "weight": batch["weight"]}

    model = nn.BatchNorm(use_running_average=True)
    collections = {"batch_stats": {"mean": jnp.arange(8.0), "var": 4 * jnp.ones(8)}}
    params = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}
    state = WithAverage.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1), collections=collections)
    mean = WeightedMean()
    got = evaluate(eval_step(with_statistics, metric=mean), state, mean)
    assert_allclose(got, model.apply({"params": params} | collections, SET["x"])[:, 0].mean(), rtol=FLOAT32_ROUNDING)


# -------------------------------------------------------------------------------------------------------------- errors


def test_each_batch_of_an_evaluation_is_added_to_the_metric_state():
    metric = Sum()
    evaluation = _Evaluation(lambda params, apply_fn, x: {"values": x}, metric, batch_layout(MESH, AXES), True)

    def sum_of_two_batches(x):
        variables, local = {"params": {}, "collections": {}, "extra_trees": {}}, metric.empty(AXES)
        for batch in (x, 2 * x):
            local = evaluation._observed(None, variables, batch, local)
        return metric.compute(metric.sync(local))

    assert on_mesh(sum_of_two_batches, MESH, True, jax.P(AXES), jax.P())(np.arange(8, dtype=np.float32)) == 3 * 28


def test_state_of_which_a_donated_array_was_deleted_is_refused():
    here, deleted = jax.device_put(np.ones((2, 2), np.float32))
    deleted.delete()

    def check(**named):
        check_donated(JittedCall(None, (), {}, named, False))

    check(state=TrainState(here, None, {"w": here}, None, None), local=[here], batch=[deleted])
    for step, w in ((deleted, here), (here, deleted)):
        with pytest.raises(ValueError, match=r"^state was .*Go on with the state that it returned"):
            check(state=TrainState(step, None, {"w": w}, None, None), local=[here])
    with pytest.raises(ValueError, match=r"^local was .*Go on with the local that it returned"):
        check(state=None, local=[deleted])


def test_eval_step_donates_the_metric_state_but_not_the_train_state():
    step, local = eval_step(), METRIC.empty(AXES, MESH)
    after = step(state_of(), next(batches()), local)
    step(state_of(), next(batches()), after)
    with pytest.raises(ValueError, match=r"local was handed to a step before.*Go on with the local that it returned"):
        step(state_of(), next(batches()), local)

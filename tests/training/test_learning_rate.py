"""Tests of the learning rate in the metrics: equal to the rate that moved the parameters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from tests.support import AXES, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import TrainState, create_train_state, make_train_step, skip_nonfinite, unbox
from xlstm_jax.distributed.optimizers.learning_rate import check_learning_rate, learning_rates

KEY, BATCH, MESH = jax.random.key(0), data(), mesh_of(2, 4)
MODEL = fsdp(nn.Dense)(4)
DOWN, UP = optax.linear_schedule(0.4, 0.1, 3), optax.linear_schedule(0.01, 0.04, 3)
INJECTED = optax.inject_hyperparams(optax.sgd)
LABELS = {"kernel": "matrices", "bias": "vectors"}


def in_groups(of_matrices, of_vectors):
    return optax.partition({"matrices": of_matrices, "vectors": of_vectors}, LABELS)


def trained(tx, learning_rate=None, batches=(BATCH,) * 3):
    """Returns for each step the metrics, and the distance that each parameter moved."""
    state = create_train_state(MODEL, tx, MESH, KEY, BATCH["x"], batch_axes=AXES)
    step, seen = make_train_step(mean_loss, MESH, AXES, learning_rate=learning_rate), []
    for batch in batches:
        before = jax.device_get(unbox(state.params))
        state, metrics = step(state, batch, KEY)
        moved = jax.tree.map(lambda new, old: np.linalg.norm(new - old), jax.device_get(unbox(state.params)), before)
        seen.append((jax.device_get(metrics), moved))
    assert step._cache_size() == 1
    return seen


@pytest.mark.parametrize("tx, learning_rate", [
    (optax.sgd(DOWN), DOWN), (INJECTED(DOWN), DOWN), (optax.chain(optax.clip(9.0), INJECTED(DOWN)), DOWN),
], ids=["schedule", "injected", "injected in a chain"])  # fmt: skip
def test_learning_rate_metric_equals_the_rate_of_the_update(tx, learning_rate):
    seen = trained(tx, learning_rate)
    rates = [metrics["learning_rate"] for metrics, _ in seen]
    assert_allclose(rates, [DOWN(i) for i in range(3)], rtol=1e-6)
    assert {rate.dtype for rate in rates} == {np.dtype("float32")}
    moved = [np.linalg.norm(list(moved.values())) / metrics["grad_norm"] for metrics, moved in seen]
    assert_allclose(moved, rates, rtol=1e-4)


def test_learning_rate_metric_of_a_step_is_the_rate_before_the_count_grows():
    loss = lambda params, _, batch: jnp.sum(params["w"] * batch)  # noqa: E731
    step = make_train_step(loss, mesh_of(1, 1), AXES, learning_rate=DOWN)
    state = TrainState.create(apply_fn=None, params={"w": np.float32([0])}, tx=optax.sgd(DOWN))
    after, metrics = step(state, np.ones(1, np.float32))
    assert_allclose([metrics["learning_rate"], -after.params["w"][0]], [0.4, 0.4], rtol=1e-6)


@pytest.mark.parametrize("tx", [
    in_groups(optax.sgd(DOWN), optax.sgd(UP)), in_groups(INJECTED(DOWN), INJECTED(UP)),
], ids=["schedules", "injected"])  # fmt: skip
def test_learning_rate_metrics_are_separate_per_parameter_group(tx):
    one, other = trained(tx, {"matrices": DOWN, "vectors": UP}), trained(optax.sgd(1.0))
    for i, (metrics, moved) in enumerate(one):
        rates = {name: metrics[f"learning_rate/{name}"] for name in ("matrices", "vectors")}
        assert_allclose(list(rates.values()), [DOWN(i), UP(i)], rtol=1e-6)
        for leaf, name in LABELS.items() if i == 0 else ():  # from the same parameters as with the rate 1
            assert_allclose(moved[leaf], rates[name] * other[0][1][leaf], rtol=1e-4)
    assert "learning_rate" not in one[0][0] and not [name for name in other[0][0] if "learning" in name]


@pytest.mark.parametrize("sgd", [optax.sgd, INJECTED], ids=["schedule", "injected"])
def test_learning_rate_metric_does_not_count_a_skipped_step(sgd):
    bad = BATCH | {"y": BATCH["y"] * jnp.nan}
    seen = trained(skip_nonfinite(sgd(DOWN)), DOWN, [BATCH, bad, BATCH])
    assert_allclose([metrics["learning_rate"] for metrics, _ in seen], [DOWN(0), DOWN(1), DOWN(1)], rtol=1e-6)
    assert [metrics["skipped_steps"] for metrics, _ in seen] == [0, 1, 1]


def test_learning_rate_schedule_uses_state_step_without_an_optimizer_count():
    seen = trained(optax.sgd(1.0), lambda step: step * 0.5)
    assert [metrics["learning_rate"] for metrics, _ in seen] == [0, 0.5, 1]


def test_each_group_gets_the_rate_of_its_own_count_and_others_that_of_the_first():
    sgd = lambda: optax.sgd(DOWN)  # noqa: E731
    tx = optax.partition({"a": sgd(), "b": sgd()}, {"kernel": "a", "bias": "b"})
    start = tx.init({"kernel": jnp.ones(2), "bias": jnp.ones(1)})
    state = jax.tree_util.tree_map_with_path(lambda path, count: count + (2 if "'b'" in str(path) else 1), start)
    schedules = {"b": lambda count: 10 * count, "a": lambda count: count, "c": lambda count: 100 * count}
    rates = learning_rates(schedules, state, 7)
    want = {"learning_rate/b": 20, "learning_rate/a": 1, "learning_rate/c": 100}
    assert rates == want, "a schedule was called with the count of another group, or with the step"
    assert {rate.dtype.name for rate in rates.values()} == {"float32"}
    assert learning_rates(schedules["a"], (), 7) == {"learning_rate": 7}, "without a count it is the step that counts"


def test_learning_rates_ignores_a_parameter_named_count():
    opt_state = optax.adam(DOWN).init({"count": jnp.ones(2)})
    assert_allclose(learning_rates(DOWN, opt_state, 7)["learning_rate"], DOWN(0), rtol=1e-6)


@pytest.mark.parametrize("tx", [optax.sgd(DOWN), INJECTED(DOWN), optax.chain(optax.clip(9.0), optax.adam(DOWN))])
def test_learning_rates_are_those_of_the_count_in_the_state(tx):
    params = {"w": np.ones(2, np.float32)}
    state = tx.init(params)
    for count in range(3):
        (rate,) = learning_rates(DOWN, state, 99).values()
        assert rate == DOWN(count) and rate.dtype == jnp.float32
        state = tx.update(params, state, params)[1]


@pytest.mark.parametrize("source", [None, DOWN, {"matrices": DOWN}])
def test_learning_rate_is_none_a_schedule_or_a_dict_of_schedules(source):
    check_learning_rate(source)
    for wrong in (0.1, {}, {"matrices": 0.1}):
        with pytest.raises(TypeError, match="pass the schedule of the optimizer, or a dict of one for each group"):
            check_learning_rate(wrong)

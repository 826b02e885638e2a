"""``StandardDeviation`` equals NumPy's in float64, for any grouping over devices and steps, far from zero, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.metrics.test_states import run, uneven
from tests.support import AXES, data, fsdp, mean_loss, mesh_of
from tests.training.test_explicit_meshes import Linen, state_on
from xlstm_jax.distributed import make_train_step, shard_batch
from xlstm_jax.distributed.metrics import StandardDeviation, StatefulMetric
from xlstm_jax.distributed.metrics.cells import Total
from xlstm_jax.distributed.metrics.spread import times

METRIC = StandardDeviation()


def in_float64(values, weights=None):
    values = np.asarray(values, np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    mean = np.sum(values * weights) / np.sum(weights)
    return np.sqrt(np.sum(weights * (values - mean) ** 2) / np.sum(weights))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dp, fsdp", [(1, 8), (2, 4)])
def test_standard_deviation_equals_numpy_on_uneven_shards(dp, fsdp, check_vma):
    values, weights = uneven()
    got = METRIC.compute(run(METRIC, mesh_of(dp, fsdp), AXES, check_vma, values, weights))
    real = weights > 0
    want = in_float64(values[real], weights[real])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    of_devices = [in_float64(v[w > 0], w[w > 0]) for v, w in zip(values, weights, strict=True)]
    assert not np.isclose(np.mean(of_devices), want, rtol=1e-3)  # guard: a mean of deviations is another number


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e3, -1e4, 1e5])
def test_standard_deviation_is_right_where_the_mean_is_large(mean):
    values = (mean + np.random.default_rng(0).normal(0, 1, 10_000)).astype(np.float32)
    state = METRIC.empty()
    for part in np.split(values, 10):
        state = METRIC.update(state, part)
    want = in_float64(values)
    np.testing.assert_allclose(METRIC.compute(METRIC.sync(state)), want, rtol={-1e4: 3e-6, 1e5: 1e-4}.get(mean, 1e-6))
    if abs(mean) >= 1e4:  # guard: float32 sums of squares are lost
        naive = np.sqrt(max(np.mean(np.square(values)) - np.square(np.mean(values)), 0))
        assert not np.isclose(naive, want, rtol=0.1)


def test_standard_deviation_of_large_states_is_right_by_plain_all_reduces(monkeypatch):
    monkeypatch.setattr("xlstm_jax.distributed.metrics.pure_metric.GATHER_BYTES", 0)
    values, weights = uneven()
    values, real = values + np.float32(1000), weights > 0
    got = METRIC.compute(run(METRIC, mesh_of(2, 4), AXES, True, values, weights))
    np.testing.assert_allclose(got, in_float64(values[real], weights[real]), rtol=1e-5)


def test_standard_deviation_of_equal_values_is_0_to_rounding_of_the_mean():
    for value in (0.1, -1234.567, 1e-6):
        state = METRIC.update(METRIC.empty(), jnp.full(1001, value))
        assert float(METRIC.compute(METRIC.sync(state))) <= 1e-6 * abs(value)
    assert float(METRIC.compute(METRIC.sync(METRIC.empty()))) == 0
    assert float(StandardDeviation(-1.0).compute(METRIC.sync(METRIC.empty()))) == -1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_standard_deviation_of_nonfinite_values_is_not_finite_and_of_their_padding_is(bad):
    values = jnp.array([1.0, bad, 3.0])
    assert not np.isfinite(METRIC.result(METRIC.observe(values)))
    assert float(METRIC.result(METRIC.observe(values, jnp.array([1, 0, 1])))) == 1


def test_sums_of_the_standard_deviation_leave_out_infinite_values_of_weight_0():
    sums = jax.jit(METRIC.observe)(np.array([1, np.inf, 3], np.float32), np.array([1, 0, 2], np.float32))
    assert {name: float(total.high) for name, total in sums.items()} == {"weight": 3, "first": 7, "second": 19}


def test_standard_deviation_has_no_gradient_and_merges_in_either_order():
    a, b = (METRIC.update(METRIC.empty(), jnp.array(x)) for x in ([1.0, 2.0], [5.0, 7.0, 11.0]))
    first, second = METRIC.merge(a, b), METRIC.merge(b, a)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), first, second)))
    assert float(jax.grad(lambda x: METRIC.result(METRIC.observe(jnp.stack([x, 2.0]))))(1.0)) == 0


def test_shift_of_the_mean_and_negative_rounding_are_taken_off_the_variance():
    """The value of sums that rounding has left: ``result`` takes a variance below 0, and a mean between two floats."""
    of, result = lambda high, low=0.0: Total(np.float32(high), np.float32(low)), jax.jit(METRIC.result)
    sums = {"weight": of(1), "first": of(2.0**-10, 2.0**-36), "second": of(0)}
    assert float(result(sums)) == 0, "a variance below 0 is no deviation of 0"
    # Of equal values 1 + 2^-24, whose mean a float32 rounds to 1: squares of differences from 1 are 2^-48.
    equal = {"weight": of(1), "first": of(1, 2.0**-24), "second": of(1 + 2.0**-23, 2.0**-48)}
    assert float(result(equal)) == 0, "the difference of the mean from its float32 counts as a deviation"


def test_standard_deviation_over_steps_is_that_of_the_steps_own_metrics():
    mesh, over_steps, norms = mesh_of(2, 4), StatefulMetric(METRIC), []
    state, step = state_on(mesh, Linen(fsdp())), make_train_step(mean_loss, mesh, AXES)
    for _ in range(4):
        state, metrics = step(state, shard_batch(data(), mesh, AXES), jax.random.key(0))
        over_steps.update(metrics["grad_norm"])
        norms.append(float(metrics["grad_norm"]))
    over_steps.sync()
    np.testing.assert_allclose(over_steps.compute(), np.std(np.float64(norms)), rtol=1e-5)
    assert np.std(norms) > 0


def test_products_of_pairs_keep_twice_the_bits_of_a_float():
    rng = np.random.default_rng(0)
    x, y, z = (rng.normal(size=1000).astype(np.float32) for _ in range(3))
    pair = jax.jit(lambda x, y, z: times(times(Total(x, jnp.zeros_like(x)), y), z))(x, y, z)
    got = np.asarray(pair.high, np.float64) + np.asarray(pair.low, np.float64)
    want = np.float64(x) * np.float64(y) * np.float64(z)
    assert np.abs(got / want - 1).max() < 2.0**-44
    assert np.abs(np.float64(x * y * z) / want - 1).max() > 2.0**-26  # guard

"""Tests of metrics with a separate state: accumulators, the interface, and the catalogue behind accumulators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import AXES, count_collectives, mesh_of
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.distributed.metrics import (
    Compose,
    Max,
    Metric,
    MetricAccumulator,
    StatefulMetric,
    Sum,
    Throughput,
    WeightedMean,
)
from xlstm_jax.distributed.metrics.mesh_state import _sync

PER_DEVICE = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0], np.float32)
NEUTRAL = {"sum": 0.0, "max": -np.inf, "min": np.inf}


@pytest.mark.parametrize("operation", ["sum", "max", "min"])
def test_accumulator_updates_stay_local_to_the_device_until_sync(operation):
    accumulator = MetricAccumulator(jnp.float32(NEUTRAL[operation]), operation)
    accumulator.update(5)
    want = np.array([5.0] + [NEUTRAL[operation]] * 7, np.float32)
    np.testing.assert_array_equal(accumulator.local_values, want)
    accumulator.update(PER_DEVICE)
    merge = {"sum": np.add, "max": np.maximum, "min": np.minimum}[operation]
    want = merge(want, PER_DEVICE)
    np.testing.assert_array_equal(accumulator.local_values, want)
    assert len(accumulator.local_values.sharding.device_set) == 8 and not accumulator.is_synchronized
    accumulator.sync()
    assert accumulator.is_synchronized
    assert float(accumulator.value) == getattr(np, operation)(want)
    accumulator.update(True)
    assert not accumulator.is_synchronized
    accumulator.sync()
    accumulator.update(PER_DEVICE)
    assert not accumulator.is_synchronized
    accumulator.reset()
    np.testing.assert_array_equal(accumulator.local_values, np.full(8, NEUTRAL[operation]))


def test_stateful_metric_counts_numpy_integers_beyond_32_bits_beside_arrays_on_a_device():
    rate = StatefulMetric(Throughput())
    rate.update(np.int64(2**33), jnp.float32(2))
    rate.update(np.int64(2**33), 2.0)
    rate.sync()
    assert float(rate.compute()) == 2**32
    split = jax.device_put(jnp.ones(8), NamedSharding(mesh_of(2, 4), P(AXES)))
    with pytest.raises(OverflowError, match="update got a NumPy integer beyond 32 bits beside an array that is split"):
        rate.update(np.int64(2**33), split)


def test_accumulator_of_a_narrow_integer_wraps_no_value_of_a_wider_array():
    total = MetricAccumulator(jnp.int8(0))
    total.update(jnp.int32(300))
    total.update(jnp.full(8, -30, jnp.int32))
    total.sync()
    assert int(total.value) == 60  # 300 as an int8 is 44
    total.update(jnp.int32(300))
    with pytest.raises(OverflowError, match="the sum is 360, beyond the int8"):
        total.sync()
        _ = total.value
    with pytest.raises(TypeError, match="got int32, which an accumulator of int8 cannot hold"):
        MetricAccumulator(jnp.int8(0), "max").update(jnp.int32(300))


@pytest.mark.parametrize("shape, initial", [((), 1.5), ((2, 3), np.ones((2, 3), np.int32))], ids=["number", "array"])
def test_accumulator_value_before_sync_is_the_process_total_in_the_initial_shape(shape, initial):
    accumulator = MetricAccumulator(initial, mesh=mesh_of(2, 4), axes="dp")  # "fsdp" repeats the rows
    assert accumulator.value.shape == shape
    np.testing.assert_array_equal(accumulator.value, initial)
    accumulator.update(np.stack([np.full(shape, 4), np.full(shape, 2)]))
    assert not accumulator.is_synchronized and accumulator.local_values.shape == (2, *shape)
    assert accumulator.value.dtype == accumulator.dtype
    before = np.asarray(accumulator.value)
    np.testing.assert_array_equal(before, initial + np.full(shape, 6))
    accumulator.sync()  # a sync of one process changes nothing
    np.testing.assert_array_equal(accumulator.value, before)


@jax.jit
def half_a_second_of_work(x):
    return jax.lax.fori_loop(0, 1500, lambda _, x: jnp.tanh(x @ x), x).mean()


def placed(shape, spec):
    return jax.jit(lambda x: x * jnp.ones(shape), out_shardings=NamedSharding(mesh_of(2, 4), spec))


@pytest.mark.parametrize(
    "make, arrange",
    [
        (lambda: MetricAccumulator(0.0), lambda x: x),
        (lambda: MetricAccumulator(0.0), placed(8, P(AXES))),
        (lambda: StatefulMetric(WeightedMean()), lambda x: x),
    ],
    ids=["a number", "a value for each device", "a metric"],
)
def test_accumulator_update_does_not_wait_for_a_pending_value(make, arrange):
    accumulator, x = make(), jnp.eye(256)
    for _ in range(2):  # the first call compiles
        value = arrange(half_a_second_of_work(x))
        accumulator.update(value)
        waited = value.is_ready()
        jax.block_until_ready(value)
    assert not waited


@pytest.mark.parametrize("place", ["cpu", "cpu:3", 3, -1])
def test_metric_to_moves_the_state_to_a_platform_or_device_number(place):
    metric = MaxMetric()
    metric.update(4.0)
    metric.to(place)
    number = place if isinstance(place, int) else int(place.partition(":")[2] or 0)
    assert metric.largest.value.devices() == {jax.devices()[number]} and float(metric.compute()) == 4
    metric.update(5.0)
    metric.sync()
    assert float(metric.compute()) == 5


@pytest.mark.parametrize("axes", [AXES, "dp", "fsdp"], ids=str)
def test_value_before_sync_is_on_the_first_device_of_the_mesh(axes):
    """Any mesh, also one whose first device is not the first of the process, and whose devices hold copies."""
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(2, 4), AXES)
    accumulator = MetricAccumulator(0.0, mesh=mesh, axes=axes)
    accumulator.update(2.5)
    assert not accumulator.is_synchronized
    assert accumulator.value.devices() == {jax.devices()[7]} and float(accumulator.value) == 2.5


@pytest.mark.parametrize("place", ["gpu", "abacus", 8, "cpu:8", "cpu:x"])
def test_accumulator_to_raises_for_an_absent_device(place):
    with pytest.raises(ValueError, match=rf"to\({place!r}\): this process has no such device, but cpu:0, cpu:1"):
        MetricAccumulator(0.0).to(place)


def test_scalar_update_and_initial_value_count_once_on_any_number_of_devices():
    for mesh in (mesh_of(1, 1), mesh_of(2, 4), mesh_of(1, 8)):
        accumulator = MetricAccumulator(jnp.float32(10), mesh=mesh)
        accumulator.update(1.5)
        accumulator.update(jax.device_put(jnp.float32(2.0), NamedSharding(mesh, P())))  # replicated
        accumulator.sync()
        assert float(accumulator.value) == 13.5


@pytest.mark.parametrize(
    "value", [True, 3, 2.5, np.float32(2.5), np.int8(4), jnp.float32(1), jnp.array(True)], ids=repr
)
@pytest.mark.parametrize("operation", ["sum", "max", "min"])
def test_arrays_numbers_and_bools_are_accepted_by_every_operation(operation, value):
    accumulator = MetricAccumulator(jnp.float32(NEUTRAL[operation]), operation)
    accumulator.update(value)
    accumulator.sync()
    assert float(accumulator.value) == float(value) and accumulator.value.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.uint32, bool])
def test_accumulator_keeps_shape_and_dtype_of_the_initial_value(dtype):
    operation = "max" if dtype is bool else "sum"
    accumulator = MetricAccumulator(jnp.zeros((2, 3), dtype), operation)
    accumulator.update(np.ones((2, 3), bool))
    accumulator.update(np.ones((8, 2, 3), bool))
    accumulator.sync()
    assert accumulator.value.shape == (2, 3) and accumulator.value.dtype == dtype
    np.testing.assert_array_equal(accumulator.value.astype(jnp.float32), np.full((2, 3), 1 if dtype is bool else 9))


def test_sums_grow_beyond_2_to_the_24_and_raise_for_int32_overflow():
    accumulator = MetricAccumulator(jnp.float32(2**24))
    for _ in range(6):
        accumulator.update(1)
    accumulator.sync()
    assert float(accumulator.value) == 2**24 + 6
    count = MetricAccumulator(jnp.int32(2**31 - 10))
    count.update(9)
    count.sync()
    assert int(count.value) == 2**31 - 1
    count.update(1)
    for _ in range(2):
        with pytest.raises(OverflowError, match=rf"the sum is {2**31}, beyond the int32"):
            _ = count.value
        count.sync()
    count.update(-1)
    count.sync()
    assert int(count.value) == 2**31 - 1


def test_rejected_update_leaves_the_accumulator_unchanged():
    accumulator = MetricAccumulator(jnp.float32(1))
    accumulator.sync()
    with pytest.raises(ValueError, match="shape"):
        accumulator.update(np.ones(5))
    assert accumulator.is_synchronized and float(accumulator.value) == 1


def test_state_dict_of_an_accumulator_loads_on_any_number_of_devices():
    accumulator = MetricAccumulator(jnp.float32(0))
    accumulator.update(PER_DEVICE)
    saved = accumulator.state_dict()
    assert isinstance(saved["local"]["high"], np.ndarray) and saved["is_synchronized"] is False
    last = jax.devices()[-1]
    accumulator.to(last)
    assert accumulator.local_values.shape == (1,) and accumulator.value.devices() == {last}
    for target in (
        MetricAccumulator(jnp.float32(0)),
        MetricAccumulator(jnp.float32(0), mesh=mesh_of(1, 4)),
        accumulator,
    ):
        target.update(100.0)
        target.load_state_dict(saved)
        target.update(1.0)
        target.sync()
        assert float(target.value) == PER_DEVICE.sum() + 1
    synced = accumulator.state_dict()
    other = MetricAccumulator(jnp.float32(0))
    other.load_state_dict(synced)
    assert other.is_synchronized and float(other.value) == PER_DEVICE.sum() + 1
    other.to(mesh_of(2, 4))
    assert other.is_synchronized and float(other.value) == PER_DEVICE.sum() + 1


def test_state_dict_of_eight_devices_loads_on_one_with_all_rows_and_synchronized_until_a_reset():
    rows = {"high": PER_DEVICE, "low": np.zeros(8, np.float32)}
    merged = {"high": np.float32(PER_DEVICE.sum()), "low": np.float32(0)}
    accumulator = MetricAccumulator(np.float32(0), mesh=mesh_of(1, 1))
    accumulator.load_state_dict({"local": rows, "synchronized": merged, "is_synchronized": True})
    assert np.asarray(accumulator.local_values).tolist() == [PER_DEVICE.sum()] and accumulator.is_synchronized
    accumulator.reset()
    assert not accumulator.is_synchronized


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("local"), r"the state dict has the entries \['is_synchronized', 'synchronized'\], and should"),
        (lambda s: s.update(local={"value": np.zeros(8)}), r"state dict\['local'\] is not the state of such a metric"),
        (lambda s: s["local"].update(high=np.zeros((8, 2), np.float32)), r"shape \(8, 2\) .* this metric's has shape"),
        (lambda s: s["local"].update(high=np.zeros(8, np.float64)), "dtype float64; this metric's has .* float32"),
        (lambda s: s["synchronized"].update(high=0.0), "dtype None; this metric's has .* float32"),
    ],
)
def test_load_state_dict_raises_for_a_mismatch_and_keeps_the_accumulated_value(change, message):
    accumulator = MetricAccumulator(jnp.float32(0))
    accumulator.update(7.0)
    state = accumulator.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        accumulator.load_state_dict(state)
    accumulator.sync()
    assert float(accumulator.value) == 7


# -------------------------------------------------------------------------------------------------------- the interface


class MaxMetric(Metric):
    def __init__(self):
        self.largest = MetricAccumulator(-jnp.inf, "max")

    def update(self, value):
        self.largest.update(value)

    def compute(self):
        return self.largest.value


class Everything(Metric):
    def __init__(self):
        self.parts = [MaxMetric(), MetricAccumulator(0.0)]
        self.named = {"mean": StatefulMetric(WeightedMean())}
        self.count = MetricAccumulator(0)

    def update(self, value):
        self.parts[0].update(value)
        self.parts[1].update(value)
        self.named["mean"].update(value)
        self.count.update(1)

    def compute(self):
        return self.parts[0].compute(), self.parts[1].value, self.named["mean"].compute(), self.count.value


def test_custom_metric_syncs_resets_moves_and_restores_from_a_state_dict():
    metric = MaxMetric()
    metric.update(-3)
    metric.update(-2.5)
    metric.sync()
    assert float(metric.compute()) == -2.5
    saved = metric.state_dict()
    metric.reset()
    assert float(metric.compute().max()) == -np.inf
    metric.to(jax.devices()[2])
    metric.load_state_dict(saved)
    metric.update(-7)
    metric.sync()
    assert float(metric.compute()) == -2.5


def test_nested_metric_parts_are_saved_and_synced_in_a_single_collective():
    metric = Everything()
    for value in (2.0, -4.0, 5.0):
        metric.update(value)
    metric.sync()
    assert [float(x) for x in metric.compute()] == [5, 3, 1, 3]
    saved = metric.state_dict()
    assert set(saved) == {"parts/0/largest", "parts/1", "named/mean/state", "count"}
    other = Everything()
    other.load_state_dict(saved)
    assert [float(x) for x in other.compute()] == [5, 3, 1, 3]
    states = [state for _, state in metric._states()]
    text = _sync.lower(states[0].mesh, [state.local for state in states]).as_text()
    assert count_collectives(text) == 1 < len(states)
    with pytest.raises(ValueError, match="the state dict has the entries"):
        other.load_state_dict({"count": saved["count"]})


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_stateful_metric_of_catalogue_metrics_equals_numpy(tensor_parallel):
    mesh = DeviceMeshManager.create_device_mesh({"dp": 4, "tp": 2}) if tensor_parallel else mesh_of(2, 4)
    axes = ("dp",) if tensor_parallel else AXES
    metric = StatefulMetric(Compose({"mean": WeightedMean(), "sum": Sum(), "max": Max()}), mesh, axes)
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(2, 16)).astype(np.float32), rng.uniform(0.5, 2, (2, 16)).astype(np.float32)
    for v, w in zip(values, weights, strict=True):
        v, w = (jax.device_put(x, NamedSharding(mesh, P(axes))) for x in (v, w))
        metric.update(mean=(v, w), sum=(v, w), max=v)
    own = rng.normal(size=5).astype(np.float32)  # of this process, of any length
    metric.update(mean=own, sum=own, max=own)
    with pytest.raises(RuntimeError, match=r"sync\(\) first, or compute_local\(\)"):
        metric.compute()
    assert metric.compute_local()["mean"].shape == (len(axes) * 4,)
    metric.sync()
    got = metric.compute()
    v = np.concatenate([values.ravel(), own]).astype(np.float64)
    w = np.concatenate([weights.ravel(), np.ones(5)])
    np.testing.assert_allclose(got["mean"], np.average(v, weights=w), rtol=1e-6)
    np.testing.assert_allclose(got["sum"], (v * w).sum(), rtol=1e-6)
    np.testing.assert_allclose(got["max"], v.max(), rtol=1e-6)

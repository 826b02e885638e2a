"""Tests of reductions of metric dictionaries: global arrays, shard_map, pmap, and ``DistributedMetrics``."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import mesh_of, on_mesh
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.distributed import metrics as m

N = 8
VALUES = np.array([3.0, -1.0, 4.0, 1.0, -5.0, 9.0, 2.0, 6.0], np.float32)
COUNTS = np.array([4, 0, 1, 7, 2, 2, 0, 5], np.int32)
PASSED = {"name": "run 7", "lr": 0.5, "host": np.arange(3), "nothing": None}
COLLECTIVES = {
    "mean": m.reduce_mean_collective,
    "sum": m.reduce_sum_collective,
    "max": m.reduce_max_collective,
    "min": m.reduce_min_collective,
}


@pytest.fixture(scope="module")
def batch_mesh():
    return DeviceMeshManager.create_device_mesh({"batch": N})


def collective_counts(fn, *args):
    text = jax.jit(fn).lower(*args).as_text()
    return len(re.findall(r'"?stablehlo\.all_reduce', text)), len(re.findall(r'"?stablehlo\.all_gather', text))


# ----------------------------------------------------------------------------------------------------- on global arrays


@pytest.mark.parametrize("operation", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("jitted", [False, True])
def test_reductions_turn_global_arrays_into_scalars_and_pass_other_values_through(batch_mesh, operation, jitted):
    split = jax.device_put(VALUES.reshape(8, 1), NamedSharding(batch_mesh, P("batch")))
    reduce = getattr(m, f"reduce_{operation}")
    arrays = {"loss": split, "nested": {"count": jnp.asarray(COUNTS)}, "scalar": jnp.float32(7)}
    if jitted:
        out = jax.jit(lambda arrays: {k: v for k, v in reduce(arrays | PASSED).items() if k in arrays})(arrays)
    else:
        out = reduce(arrays | PASSED)
        assert not [name for name in PASSED if out[name] is not PASSED[name]]
    assert float(out["loss"]) == getattr(np, operation)(VALUES)
    assert float(out["nested"]["count"]) == getattr(np, operation)(COUNTS)
    assert float(out["scalar"]) == 7 and out["loss"].shape == ()


def test_reduce_mean_of_integers_returns_a_fraction():
    assert float(m.reduce_mean({"x": jnp.array([1, 2])})["x"]) == 1.5


def test_reduce_custom_applies_the_named_operation_or_by_default_the_mean():
    x = jnp.asarray(VALUES)
    metrics = {"loss": x, "tokens": x, "norm": x, "lr": x, "other": x, "deep": {"a": x, "b": x}, "whole": {"c": x}}
    reduce_fn = {"loss": "mean", "tokens": "sum", "norm": "max", "lr": None, "deep": {"a": "min"}, "whole": "sum"}
    out = m.reduce_custom(metrics, reduce_fn)
    assert float(out["loss"]) == float(out["other"]) == float(out["deep"]["b"]) == VALUES.mean()
    assert float(out["tokens"]) == float(out["whole"]["c"]) == VALUES.sum()
    assert float(out["norm"]) == VALUES.max() and float(out["deep"]["a"]) == VALUES.min()
    assert out["lr"] is x
    assert float(m.reduce_custom({"loss": x})["loss"]) == VALUES.mean()


# ---------------------------------------------------------------------------------------------------------- collectives


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("operation", list(COLLECTIVES))
def test_collective_reductions_cover_all_devices_with_and_without_check_vma(batch_mesh, check_vma, operation):
    def local(x, counts):
        metrics = {"loss": x[0], "nested": {"count": counts}, "half": x.astype(jnp.bfloat16), "flag": counts > 4}
        out = COLLECTIVES[operation](metrics | PASSED)
        assert not [name for name in PASSED if out.pop(name) is not PASSED[name]]
        return out

    out = on_mesh(local, batch_mesh, check_vma, P("batch"), P())(VALUES, COUNTS)
    want = getattr(np, operation)
    assert float(out["loss"]) == want(VALUES) and out["loss"].shape == ()
    assert float(out["nested"]["count"][0]) == want(COUNTS)
    assert out["half"].dtype == jnp.bfloat16 and float(out["half"][0]) == jnp.bfloat16(want(VALUES))
    assert float(out["flag"][0]) == want(COUNTS > 4)
    assert float(out["loss"]) != VALUES[0]  # guard: no device has the answer by itself


@pytest.mark.parametrize("operation", ["max", "min", "sum", "mean"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_collective_reductions_propagate_nan_and_keep_negative_and_infinite_values(batch_mesh, operation, dtype):
    run = on_mesh(lambda x: COLLECTIVES[operation]({"x": x})["x"], batch_mesh, True, P("batch"), P())
    for values in (VALUES, -np.abs(VALUES), [-np.inf, 1, 0, 0, 0, 0, 0, 2], [-0.0] * 8):
        x = jnp.asarray(values, dtype)
        want = getattr(jnp, operation)(x.astype(jnp.float32)).astype(dtype)
        np.testing.assert_array_equal(run(x)[0], want)
    assert jnp.isnan(run(jnp.asarray(VALUES, dtype).at[3].set(jnp.nan))[0])


def test_mean_of_integers_over_devices_is_in_float32(batch_mesh):
    """4095.5 takes 13 bits: bfloat16 has 8."""
    run = on_mesh(lambda x: m.reduce_mean_collective({"x": x})["x"], batch_mesh, True, P("batch"), P())
    mean = run(4092 + np.arange(N, dtype=np.int32))
    assert mean.dtype == jnp.float32 and mean.tolist() == [4095.5]


@pytest.mark.parametrize("check_vma", [True, False])
def test_reduce_sum_collective_counts_a_constant_once_per_device(batch_mesh, check_vma):
    out = on_mesh(
        lambda x: m.reduce_sum_collective({"n": jnp.int32(3), "x": x}), batch_mesh, check_vma, P("batch"), P()
    )(VALUES)
    assert int(out["n"]) == 3 * N


@pytest.mark.parametrize("check_vma", [True, False])
def test_weighted_mean_is_exact_for_uneven_shards_and_ignores_empty_devices(check_vma):
    mesh = mesh_of(2, 4)

    def local(x, counts):
        mean = jnp.where(counts[0] > 0, x[0], jnp.nan)  # a device without examples has no mean
        metrics = {"loss": mean, "vector": jnp.stack([mean, -mean])}
        weighted = m.reduce_mean_collective(metrics, ("dp", "fsdp"), weight=counts[0])
        custom = m.reduce_custom_collective(metrics, {"vector": "max"}, ("dp", "fsdp"), weight=counts[0])
        nothing = m.reduce_mean_collective(metrics, ("dp", "fsdp"), weight=0 * counts[0])
        return weighted, custom["loss"], nothing

    weighted, custom, nothing = on_mesh(local, mesh, check_vma, P(("dp", "fsdp")), P())(VALUES, COUNTS)
    want = np.average(VALUES.astype(np.float64), weights=COUNTS)
    np.testing.assert_allclose(weighted["loss"], want, rtol=1e-6)
    np.testing.assert_allclose(weighted["vector"], [want, -want], rtol=1e-6)
    np.testing.assert_allclose(custom, want, rtol=1e-6)
    assert float(nothing["loss"]) == 0
    assert abs(want - VALUES.mean()) > 0.1  # guard: the mean of means is another number


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_gather_adds_a_device_dim_in_the_order_of_the_axes(check_vma):
    mesh = mesh_of(2, 4)

    def local(x, counts):
        return m.all_gather({"x": x[0], "deep": {"counts": counts}, "name": None}, ("dp", "fsdp"))

    out = on_mesh(local, mesh, check_vma, P(("dp", "fsdp")), P())(VALUES, COUNTS)
    np.testing.assert_array_equal(out["x"], VALUES)
    np.testing.assert_array_equal(out["deep"]["counts"], COUNTS[:, None])


@pytest.mark.parametrize("check_vma", [True, False])
def test_twenty_metrics_take_a_collective_per_operation_and_dtype_or_a_single_all_gather(batch_mesh, check_vma):
    def metrics_of(x):
        return {f"f{i}": x * i for i in range(10)} | {f"i{i}": x.astype(jnp.int32) + i for i in range(10)}

    def counts(local):
        return collective_counts(
            jax.shard_map(local, mesh=batch_mesh, in_specs=P("batch"), out_specs=P(), check_vma=check_vma), VALUES
        )

    assert counts(lambda x: m.reduce_sum_collective(metrics_of(x))) == (2, 0)
    assert counts(lambda x: m.reduce_mean_collective(metrics_of(x))) == (1, 0)
    assert counts(lambda x: m.reduce_mean_collective(metrics_of(x), weight=x[0])) == (1, 0)
    narrow = lambda x: {"wide": x, "narrow": x.astype(jnp.bfloat16)}  # noqa: E731
    assert counts(lambda x: m.reduce_mean_collective(narrow(x))) == (1, 0)  # together, in float32
    assert counts(lambda x: m.all_gather(metrics_of(x))) == (0, 1)
    assert counts(lambda x: jax.tree.map(lambda v: jax.lax.psum(v, "batch"), metrics_of(x))) == (20, 0)  # guard


# ---------------------------------------------------------------------------------------- pmap, the class, unmapped use


@partial(jax.pmap, axis_name="batch")
def pmapped(x, counts):
    metrics = {"loss": x, "count": counts, "peak": x}
    custom = {"count": "sum", "peak": "max"}
    return {
        "custom": m.reduce_custom_collective(metrics, custom),
        "class": m.DistributedMetrics().reduce_custom(metrics, custom),
        "weighted": m.reduce_mean_collective(metrics, weight=counts),
        "gathered": m.all_gather(metrics),
    }


def test_metric_functions_and_distributed_metrics_run_inside_pmap():
    out = pmapped(VALUES, COUNTS)
    for result in (out["custom"], out["class"]):
        np.testing.assert_allclose(result["loss"], np.full(N, VALUES.mean()), rtol=1e-6)
        np.testing.assert_array_equal(result["count"], np.full(N, COUNTS.sum()))
        np.testing.assert_array_equal(result["peak"], np.full(N, VALUES.max()))
    np.testing.assert_allclose(out["weighted"]["loss"], np.full(N, np.average(VALUES, weights=COUNTS)), rtol=1e-6)
    np.testing.assert_array_equal(out["gathered"]["loss"], np.tile(VALUES, (N, 1)))


def test_collect_from_devices_returns_lists_with_a_value_per_device():
    out = m.collect_from_devices(pmapped(VALUES, COUNTS)["custom"] | {"name": "x", "one": jnp.float32(3), "np": COUNTS})
    assert [float(x) for x in out["count"]] == [float(COUNTS.sum())] * N and isinstance(out["count"], list)
    assert out["name"] == "x" and float(out["one"]) == 3 and out["np"] is COUNTS
    nested = m.collect_from_devices({"deep": {"x": jnp.asarray(VALUES)}})
    assert [float(x) for x in nested["deep"]["x"]] == list(VALUES)


METHODS = {
    "all_gather": m.all_gather,
    "reduce_mean": m.reduce_mean_collective,
    "reduce_sum": m.reduce_sum_collective,
    "reduce_max": m.reduce_max_collective,
    "reduce_min": m.reduce_min_collective,
    "reduce_custom": m.reduce_custom_collective,
}


@pytest.mark.parametrize("check_vma", [True, False])
def test_distributed_metrics_methods_static_methods_and_functions_agree(batch_mesh, check_vma):
    def local(x):
        metrics = {"a": x, "deep": {"b": x[0] * 2}}
        return {name: [f(metrics) for f in (getattr(m.DistributedMetrics(), name), *statics(name))] for name in METHODS}

    def statics(name):
        return getattr(m.DistributedMetrics, f"{name}_static"), METHODS[name]

    out = on_mesh(local, batch_mesh, check_vma, P("batch"), P())(VALUES)
    for name, (method, static, function) in out.items():
        for a, b, c in zip(*(jax.tree.leaves(tree) for tree in (method, static, function)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
            np.testing.assert_array_equal(a, c, err_msg=name)
    gathered = {"x": jnp.asarray(VALUES)}
    lists = [
        f(gathered)["x"]
        for f in (m.DistributedMetrics().collect_from_devices, m.DistributedMetrics.collect_from_devices_static)
    ]
    assert lists[0] == lists[1] == m.collect_from_devices(gathered)["x"]


def test_distributed_metrics_is_a_stateless_attribute_of_an_nnx_module(batch_mesh):
    class Trainer(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(1, 1, rngs=rngs)
            self.metrics = m.DistributedMetrics()

        def evaluate(self, x):
            return self.metrics.reduce_mean({"out": self.layer(x).mean()})

    trainer = Trainer(nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(trainer.metrics)) and isinstance(trainer.metrics, nnx.Module)
    graph, state = nnx.split(trainer)
    x = VALUES.reshape(8, 1)
    run = on_mesh(lambda state, x: nnx.merge(graph, state).evaluate(x), batch_mesh, True, (P(), P("batch")), P())
    np.testing.assert_allclose(run(state, x)["out"], trainer.layer(x).mean(), rtol=1e-6)
    split = nnx.jit(lambda trainer, x: trainer.layer(x).mean())(trainer, x)
    np.testing.assert_allclose(split, trainer.layer(x).mean(), rtol=1e-6)

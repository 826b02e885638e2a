"""Tests of the three ways to accumulate: the same gradients with different traffic."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import Model, assert_same_params, data, equations, fsdp, mesh_of, on_mesh, weighted_loss
from xlstm_jax.distributed import DeviceMeshManager, Replicas, create_train_state, make_train_step
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box, leaf_of
from xlstm_jax.distributed.data_parallel.shard import gather_params
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, map_leaves
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.training import accumulate_gradients
from xlstm_jax.distributed.training.accumulation import STRATEGIES, MinibatchResult, mean_over

AXES, BATCH, LAYERS = ("dp", "fsdp"), data(batch=32), 3
TX = optax.sgd(1.0)  # with SGD of rate 1 the change of the parameters is minus the gradient


@cache
def start(mesh, wrap_options):
    wrap = fsdp(**dict(wrap_options)) if wrap_options else lambda module: module
    return create_train_state(Model(wrap), TX, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)


def step_on(mesh, wrap_options, **options):
    state = start(mesh, wrap_options)
    step = make_train_step(weighted_loss, mesh, AXES, weighted=True, **options)
    return step, jax.tree.map(jnp.copy, state)


@cache
def on_one_device():
    step, state = step_on(mesh_of(1, 1), ())
    return step(state, BATCH, jax.random.key(0))


WRAP = (("replicas", Replicas("dp")),)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("accumulation", list(STRATEGIES))
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_accumulation_strategy_gives_the_gradient_of_the_global_batch(accumulation, check_vma):
    """Each way gives the gradient of the global batch, with uneven weights of devices and minibatches."""
    step, state = step_on(mesh_of(2, 4), WRAP, num_minibatches=2, accumulation=accumulation, check_vma=check_vma)
    after, metrics = step(state, BATCH, jax.random.key(0))
    want, want_metrics = on_one_device()
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=2e-6)
    assert_same_params(after.params, want.params)
    before = start(mesh_of(1, 1), ()).params
    with pytest.raises(AssertionError):
        assert_same_params(after.params, before, tolerance=1e-2)  # guard: the gradient is not 0


def collectives(**options):
    """Counts the collectives on arrays by name, axis and loop depth."""
    mesh = mesh_of(2, 4)
    state = jax.eval_shape(lambda: start.__wrapped__(mesh, WRAP))  # a cache would keep tracers
    step = make_train_step(weighted_loss, mesh, AXES, weighted=True, **options)
    found = equations(jax.make_jaxpr(step)(state, BATCH, jax.random.key(0)))
    count = {}
    for within, eqn in found:
        axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        name, depth = eqn.primitive.name.removesuffix("_invariant"), within.count("scan")
        large = [v for v in eqn.invars if hasattr(v, "aval") and np.prod(v.aval.shape) >= 32]
        if name in ("all_gather", "reduce_scatter") or (name.startswith("psum") and large):
            key = (name, axes if isinstance(axes, str) else axes[0], depth)
            count[key] = count.get(key, 0) + 1
    return count


def test_accumulation_strategies_run_collectives_at_the_expected_loop_depth():
    each = collectives(num_minibatches=2)
    assert each["reduce_scatter", "fsdp", 2] == 3  # depth: the loops over minibatches and layers
    assert [key for key in each if key[0].startswith("psum") and key[2] == 2]
    once = collectives(num_minibatches=2, accumulation="reduce_once")
    assert {depth for _, _, depth in once} == {0}
    last = collectives(num_minibatches=2, accumulation="reduce_replicas_once")
    assert last["reduce_scatter", "fsdp", 2] == 3
    assert {depth for name, _, depth in last if name.startswith("psum")} == {0}


def test_minibatches_of_reduce_replicas_once_average_over_no_copies():
    leaf = Sharded(np.ones(4, np.float32), ("fsdp",), communication=Communication(replicas=Replicas("dp")))
    assert leaf.communication.copied_axes == ("dp",)  # guard
    weights = STRATEGIES["reduce_replicas_once"].weights({"w": leaf}, ("dp", "fsdp"))
    assert weights["w"].communication.copied_axes == () and weights["w"].names == ("fsdp",)


def test_gradients_of_reduce_replicas_once_are_averaged_over_copies_at_last():
    """The gradient of the first copy is (1, 2), that of the second (3, 6), each split over two devices."""
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2}, devices=jax.devices()[:4])

    def averaged(grad):
        leaf = Sharded(grad, ("fsdp",), communication=Communication(replicas=Replicas("dp")))
        (mean,) = STRATEGIES["reduce_replicas_once"].gradients([leaf], {"w": leaf}, ("dp", "fsdp"))
        return mean.value

    assert on_mesh(averaged, mesh, False, P(("dp", "fsdp")), P("fsdp"))(np.float32([1, 2, 3, 6])).tolist() == [2, 4]


def test_each_minibatch_gets_the_carries_of_the_minibatch_before():
    def on_minibatch(index, carries):
        value = jnp.float32(index)
        return MinibatchResult(value, [value], jnp.float32(1), 2 * carries, carries)

    found = jax.jit(lambda start: mean_over(on_minibatch, 3, start))(jnp.float32(5))
    assert (float(found.values), float(found.carries)) == (1, 40)
    np.testing.assert_array_equal(found.stacked, [5, 10, 20])


def test_reduce_once_and_reduce_each_agree_with_bfloat16_gathers():
    """``reduce_once`` sees the same rounded bfloat16 weights as ``reduce_each``: equal losses up to float32 rounding.

    Unrounded weights would move the loss by some 1e-4.

    A minibatch's gradient is rounded to 8 bits on leaving its module, and XLA rounds earlier or later depending on
    fusion: gradients agree to that unit, 2^-8 of a leaf's largest entry.
    """
    wrap = (*WRAP, ("uneven", "pad"), ("gather_dtype", jnp.bfloat16))
    before, results = start(mesh_of(2, 4), wrap).params, []
    for accumulation in ("reduce_each", "reduce_once"):
        step, state = step_on(mesh_of(2, 4), wrap, num_minibatches=4, accumulation=accumulation)
        after, metrics = step(state, BATCH, jax.random.key(0))
        results.append((jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after.params), metrics))
    (each, each_metrics), (once, once_metrics) = results
    np.testing.assert_allclose(each_metrics["loss"], once_metrics["loss"], rtol=1e-6)
    assert_same_params(once, each, tolerance=2**-8)


def test_reduce_once_gathers_weights_in_the_gather_dtype():
    """``reduce_once`` gathers weights in the same dtype as gathers per module."""

    def local(shard):
        box = Sharded(shard, ("fsdp",), communication=Communication.of("bfloat16", None))
        of_each, once = (
            STRATEGIES[name].weights({"w": box}, ("fsdp",))["w"] for name in ("reduce_each", "reduce_once")
        )
        return gather_params(of_each, ("fsdp",)), once

    run = on_mesh(local, mesh_of(1, 2), False, P("fsdp"), P())
    of_each, once = jax.eval_shape(run, np.ones(4, np.float32))
    assert once.shape == (4,) and once.dtype == of_each.dtype == jnp.bfloat16


def test_reduce_once_leaves_frozen_weights_frozen_and_axes_of_the_model_split():
    def local(shard):
        boxes = {
            "w": Sharded(shard, ("fsdp",)),
            "frozen": Sharded(shard, ("fsdp",), trainable=False),
            "of the model": Sharded(shard, (("tp", "fsdp"),), model_axes=("tp",)),
        }
        for path, leaf in STRATEGIES["reduce_once"].weights(boxes, ("fsdp",)).items():
            found[path] = leaf_of(leaf).trainable, leaf_of(leaf).value.shape, leaf_of(leaf).axes
        # axes of the batch that do not split the leaf
        found["of others"] = leaf_of(STRATEGIES["reduce_once"].weights(boxes["w"], ("tp",))).value.shape
        return shard

    found = {}
    mesh = DeviceMeshManager.create_device_mesh({"tp": 2, "fsdp": 3}, devices=jax.devices()[:6])
    jax.eval_shape(on_mesh(local, mesh, False, P(("tp", "fsdp")), P(("tp", "fsdp"))), np.ones(12, np.float32))
    assert found.pop("of others") == (2,)
    assert found == {"w": (True, (6,), ()), "frozen": (False, (6,), ()), "of the model": (True, (6,), ("tp",))}


def test_reduce_once_with_bfloat16_gathers_keeps_gradients_in_float32():
    """``reduce_once`` with a bfloat16 gather keeps gradients in float32: 1 + 2^-12 is exact."""
    mean = jnp.full((8, 2), 1 + 2.0**-12)

    def local(shard):
        box = Sharded(shard, ("fsdp", None), communication=Communication.of("bfloat16", None))
        return STRATEGIES["reduce_once"].gradients([mean], {"w": box}, ("fsdp",))[0].value

    got = on_mesh(local, mesh_of(1, 8), False, P("fsdp"), P("fsdp"))(jnp.ones((8, 2)))
    np.testing.assert_array_equal(got, mean)


def test_reduce_once_with_flax_partitioned_boxes_gives_the_same_gradients():
    step, state = step_on(mesh_of(2, 4), WRAP, num_minibatches=2, accumulation="reduce_once")
    foreign = map_leaves(lambda leaf: nn.Partitioned(leaf.value, leaf.names) if is_box(leaf) else leaf, state.params)
    assert any(leaf_of(leaf).axes for _, leaf in leaves_with_path(foreign))
    of_flax = jax.tree.map(jnp.copy, state.replace(params=foreign))
    (_, want), (_, found) = (step(given, BATCH, jax.random.key(0)) for given in (state, of_flax))
    assert float(found["grad_norm"]) == pytest.approx(float(want["grad_norm"]), rel=1e-5)


class TensorParallel(nn.Module):
    """Two products; the kernels are split over "tp" by columns and by rows."""

    @nn.compact
    def __call__(self, x):
        parts = jax.lax.axis_size("tp") if "tp" in jax.sharding.get_abstract_mesh().manual_axes else 1
        init = nn.initializers.normal(0.3)
        columns = self.param("columns", nn.with_partitioning(init, (None, "tp")), (8, 16 // parts))
        rows = self.param("rows", nn.with_partitioning(init, ("tp", None)), (16 // parts, 4))
        y = jnp.tanh(x @ columns) @ rows
        return jax.lax.psum(y, "tp") if "tp" in jax.sharding.get_abstract_mesh().manual_axes else y


def test_accumulation_strategies_agree_for_tensor_parallel_leaves():
    losses = {}
    for tp, accumulation in ((1, "reduce_each"), (2, "reduce_each"), (2, "reduce_once")):
        devices = jax.devices()[: 4 * tp]
        mesh = DeviceMeshManager.create_device_mesh({"fsdp": 4, "tp": tp}, devices=devices)
        model = fsdp(TensorParallel)()
        state = create_train_state(model, TX, mesh, jax.random.key(0), BATCH["x"], batch_axes="fsdp")
        options = {"num_minibatches": 2, "accumulation": accumulation}
        step = make_train_step(weighted_loss, mesh, "fsdp", weighted=True, **options)
        for _ in range(3):
            state, metrics = step(state, BATCH, jax.random.key(0))
        losses[tp, accumulation] = float(metrics["loss"])
    want = losses.pop((1, "reduce_each"))
    assert losses == {case: pytest.approx(want, rel=1e-5) for case in losses}


@pytest.mark.parametrize("accumulation", ["reduce_each", "reduce_once"])
def test_accumulation_accepts_parameters_that_are_python_numbers(accumulation):
    loss = lambda params, x, rng: jnp.mean((params["scale"] * x - 1) ** 2)  # noqa: E731
    params, x = {"scale": 2.0}, jnp.arange(32.0) / 32
    step = lambda x: accumulate_gradients(loss, params, x, None, AXES, 2, accumulation=accumulation)[1]  # noqa: E731
    got = on_mesh(step, mesh_of(2, 4), True, P(AXES), P())(x)
    np.testing.assert_allclose(got["scale"], jax.grad(loss)(params, x, None)["scale"], rtol=1e-6)


def test_accumulation_accepts_float64_example_weights_with_float32_gradients():
    with jax.enable_x64(True):
        step, state = step_on(mesh_of(2, 4), WRAP, num_minibatches=2)
        batch = BATCH | {"weight": BATCH["weight"].astype(jnp.float64)}
        after, metrics = step(state, batch, jax.random.key(0))
        assert metrics["loss"].dtype == jnp.float64
    want, want_metrics = step_on(mesh_of(2, 4), WRAP, num_minibatches=2)[0](*_start_and_rng())
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-6)
    assert_same_params(after.params, want.params)


def _start_and_rng():
    return jax.tree.map(jnp.copy, start(mesh_of(2, 4), WRAP)), BATCH, jax.random.key(0)


def test_minibatches_draw_from_the_key_and_their_index_and_a_single_one_from_the_key_alone():
    loss = lambda w, rows, rng: w * jax.random.uniform(rng)  # noqa: E731

    def run(*counts):
        def local(w, rows):
            key = jax.random.key(7)
            drawn = [jax.random.uniform(key) for key in (key, *(jax.random.fold_in(key, i) for i in range(3)))]
            return drawn, [accumulate_gradients(loss, w, rows, key, "fsdp", count)[1] for count in counts]

        return on_mesh(local, mesh_of(1, 1), True, (P(), P("fsdp")), P())(jnp.float32(1), jnp.ones(6))

    (alone, *drawn), (single, mean) = run(1, np.int64(3))
    assert single == alone
    np.testing.assert_allclose(mean, np.mean(drawn), rtol=1e-6)
    for count in (0, 2.0, "2"):
        with pytest.raises(ValueError, match=f"num_minibatches={count!r} is not a positive integer"):
            run(count)

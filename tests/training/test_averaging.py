"""Tests of weight averages: bit-equal to one device for any placement, without communication."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import (
    AXES,
    assert_each_leaf,
    count_collectives,
    data,
    fsdp,
    mean_loss,
    mesh_of,
    on_mesh,
    plain,
)
from xlstm_jax.distributed import (
    Checkpointer,
    Replicas,
    abstract_train_state,
    create_train_state,
    elementwise_only,
    ema_params,
    export_safetensors,
    import_safetensors,
    make_eval_step,
    make_train_step,
    muon,
    partition_specs,
    plan_sharding,
    skip_nonfinite,
    unbox,
    with_ema,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, true_value
from xlstm_jax.distributed.data_parallel.trees import map_leaves
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step

DECAY, STEPS = 0.75, 4
pytestmark = pytest.mark.filterwarnings("ignore:.*are trained in bfloat16")


class Small(nn.Module):
    """Kernels of 8 x 18 and 18 x 4 (4 devices do not divide the larger dim 18), and a bias of 4."""

    wrap: object = plain
    param_dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(self.wrap(nn.Dense)(18, param_dtype=self.param_dtype, name="up")(x))
        return self.wrap(nn.Dense)(4, param_dtype=self.param_dtype, name="down")(x)


def zero_1(cls):
    return fsdp(cls, replicas=Replicas("dp", shard_optimizer_state=True))


def padded(cls):
    return fsdp(cls, uneven="pad")


def first_state(tx, model=None, mesh=None):
    x = data()["x"]
    return create_train_state(model or Small(fsdp), tx, mesh or mesh_of(2, 4), jax.random.key(0), x, batch_axes=AXES)


def history(tx, model=None, mesh=None, **options):
    """Returns the state after four steps, and the unboxed, unpadded parameters before and after each step."""
    state = first_state(tx, model, mesh)
    step = make_train_step(mean_loss, mesh or mesh_of(2, 4), AXES, **options)
    params = [whole(state.params)]
    for _ in range(STEPS):
        state, _ = step(state, data(), jax.random.key(1))
        params.append(whole(state.params))
    return state, params


def whole(tree):
    return jax.tree.map(np.array, map_leaves(true_value, tree))


@jax.jit
def next_average(average, new):
    return jax.tree.map(lambda a, p: a + (1 - DECAY) * (p.astype(a.dtype) - a), average, new)


def average_on_one_device(params):
    """Returns the average of the parameters over the steps, on one device."""
    average = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params[0])
    for new in params[1:]:
        average = next_average(average, new)
    return average


def assert_equal_bits(got, want):
    assert_each_leaf(np.testing.assert_array_equal, got, want)


# ------------------------------------------------------------------------------------------------------- in a training

CASES = {
    "fsdp": (optax.adamw(0.01), Small(fsdp), (2, 4), {}),
    "padded-bfloat16": (optax.adamw(0.01), Small(padded, jnp.bfloat16), (2, 4), {}),
    "zero-1-accumulation": (optax.adamw(0.01), Small(zero_1), (2, 4), {"num_minibatches": 2, "check_vma": False}),
    "muon": (muon(0.01), Small(fsdp), (1, 8), {}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_with_ema_average_equals_a_single_device_bit_for_bit(name):
    tx, model, mesh, options = CASES[name]
    mesh = mesh_of(*mesh)
    state, params = history(with_ema(tx, DECAY), model, mesh, **options)
    average = ema_params(state.opt_state, state.params)
    kept, want = whole(state.opt_state.ema), average_on_one_device(params)
    assert_equal_bits(kept, want)
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {np.dtype("float32")}
    # The evaluated average is placed as the parameters.
    assert_equal_bits(whole(average), jax.tree.map(lambda a, p: a.astype(p.dtype), want, params[0]))
    assert jax.tree.structure(average) == jax.tree.structure(state.params)
    assert jax.tree.map(lambda x: x.sharding, average) == jax.tree.map(lambda x: x.sharding, state.params)
    # Guard: the average is neither the first parameters nor the last.
    for other in params[0], params[-1]:
        assert np.abs(other["up"]["kernel"] - kept["up"]["kernel"]).max() > 1e-3


def test_with_ema_leaves_updates_unchanged_and_shards_the_average_like_moments():
    (state, params), (_, without) = history(with_ema(optax.adamw(0.01), DECAY)), history(optax.adamw(0.01))
    assert_equal_bits(params, without)
    moments = state.opt_state.inner_state[0].mu
    places = jax.tree.map(lambda x: x.sharding, state.opt_state.ema)
    assert places == jax.tree.map(lambda x: x.sharding, moments)
    assert not places["up"]["kernel"].is_fully_replicated  # guard


def test_plan_counts_the_float32_average_of_with_ema():
    model = Small(padded, jnp.bfloat16)
    plan = plan_sharding(model, mesh_of(2, 4).shape, data()["x"], tx=with_ema(optax.sgd(0.1), DECAY))
    assert plan.optimizer.per_device == 2 * plan.parameters.per_device + 4  # of float32, and a counter
    assert plan.optimizer.per_device < 2 * plan.parameters.total / 2  # guard: the average is split


@pytest.mark.one_in(2)
@pytest.mark.parametrize("wrap", [fsdp, zero_1])
def test_with_ema_adds_no_collective_to_a_step(wrap):
    def collectives(tx):
        step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
        return count_collectives(
            step.lower(first_state(tx, Small(wrap)), data(), jax.random.key(1)).compile().as_text()
        )

    assert collectives(with_ema(optax.adamw(0.01), DECAY)) == collectives(optax.adamw(0.01)) > 0


def test_skip_nonfinite_keeps_the_ema_average_for_a_step_with_nan():
    state = first_state(skip_nonfinite(with_ema(optax.sgd(0.1), DECAY)))
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
    state, _ = step(state, data(), jax.random.key(1))
    before, taken_over = ema_params(state.opt_state, state.params), state.opt_state
    bad = {**data(), "x": jnp.asarray(data()["x"]).at[0, 0].set(jnp.nan)}
    state, metrics = step(state, bad, jax.random.key(1))
    assert metrics["skipped_steps"] == 1 == state.opt_state.inner_state.num_updates
    # The average read before the step has separate buffers: the step has donated the buffers of the state.
    assert taken_over.inner_state.ema["up"]["kernel"].is_deleted()
    assert_equal_bits(whole(ema_params(state.opt_state, state.params)), whole(before))
    # Guard: a finite step changes the average.
    state, _ = step(state, data(), jax.random.key(1))
    moved = whole(ema_params(state.opt_state, state.params))
    assert (moved["up"]["kernel"] != whole(before)["up"]["kernel"]).all()


# ------------------------------------------------------------------------------------------ evaluated, saved, exported


def make_evaluate(mesh):
    """Returns a function of a state: the mean error, and the number of compiled programs."""

    def errors(params, apply_fn, batch):
        return {"values": (apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2}

    metric = WeightedMean()
    step, log_step = make_eval_step(errors, mesh, AXES, metric=metric), make_log_step(metric, mesh, AXES)
    return lambda state: (log_step(step(state, data(), metric.empty(AXES, mesh)))[0], step._cache_size())


def test_ema_params_are_evaluated_exported_and_restored_on_another_mesh(tmp_path):
    tx, model = with_ema(optax.adamw(0.01), DECAY), Small(padded)
    state, params = history(tx, model)
    want = average_on_one_device(params)
    average = ema_params(state.opt_state, state.params)
    evaluate = make_evaluate(mesh_of(2, 4))
    last, _ = evaluate(state)
    found, programs = evaluate(state.replace(params=average))
    assert programs == 1  # average and parameters share a program
    np.testing.assert_allclose(found, mean_loss(want, Small().apply, data()), rtol=1e-6)
    assert abs(found / last - 1) > 1e-3  # guard
    with Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(STEPS, state)
        x, other = data()["x"], mesh_of(1, 8)
        target = abstract_train_state(model, tx, other, jax.random.key(0), x, batch_axes=AXES)
        restored = checkpointer.restore(target)
    assert_equal_bits(whole(ema_params(restored.opt_state, restored.params)), want)
    export_safetensors(average, tmp_path / "model.safetensors")
    assert_equal_bits(whole(import_safetensors(tmp_path / "model.safetensors", restored.params)), want)


# ------------------------------------------------------------------------------------------ the transform alone, errors

BOXES = {"split": ("fsdp", None), "whole": None}


def boxed(tree):
    return {name: Sharded(value, BOXES[name]) if BOXES[name] else value for name, value in tree.items()}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=(8, 3)), jnp.float32) for name in BOXES}


def two_updates(tx, params, grads):
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return ema_params(state, params)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_with_ema_inside_shard_map_passes_elementwise_only_and_matches_a_single_device(check_vma):
    tx = elementwise_only(with_ema(optax.adam(0.1), DECAY))
    params, grads, mesh = boxed(random_tree(0)), boxed(random_tree(1)), mesh_of(2, 4)
    specs = partition_specs(params, mesh)
    got = on_mesh(lambda p, g: two_updates(tx, p, g), mesh, check_vma, (specs, specs), specs)(params, grads)
    want = jax.jit(lambda p, g: two_updates(with_ema(optax.adam(0.1), DECAY), p, g))(random_tree(0), random_tree(1))
    assert_equal_bits(unbox(got), want)


def weights_of_updates(tx, count=6):
    """Returns ``ema_params`` of a weight after each update; with gradients of 1 the weight is 0, -1, -2, ..."""
    params = jnp.zeros(())
    state, seen = tx.init(params), []
    for _ in range(count):
        updates, state = tx.update(jnp.ones(()), state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(ema_params(state, params)))
    return seen


def test_with_ema_accepts_a_constant_or_scheduled_decay():
    mean_of_all = with_ema(optax.sgd(1.0), lambda count: count / (count + 1))
    assert weights_of_updates(mean_of_all) == pytest.approx([-1.0, -1.5, -2.0, -2.5, -3.0, -3.5])
    constant, average = weights_of_updates(with_ema(optax.sgd(1.0), 0.5)), 0.0
    for step, found in enumerate(constant, 1):
        average = (average - step) / 2
        assert found == average


def test_with_ema_inside_multi_steps_averages_complete_updates_only():
    tx = optax.MultiSteps(with_ema(optax.sgd(1.0), 0.5), 2).gradient_transformation()
    assert weights_of_updates(tx, 4) == [0.0, -0.5, -0.5, -1.25]


def test_with_ema_of_bfloat16_parameters_averages_in_float32():
    params, one = jnp.ones(4, jnp.bfloat16), jnp.full(4, 1e-2, jnp.bfloat16)
    tx = with_ema(optax.sgd(1.0), 0.999)
    state = tx.init(params)
    for _ in range(20):
        updates, state = tx.update(one, state, params)
        params = optax.apply_updates(params, updates)
    assert params[0] < 0.9 and 0.5e-3 < 1 - state.ema[0] < 4e-3 and state.ema.dtype == jnp.float32
    assert jnp.bfloat16(1) + jnp.bfloat16(0.001) * (params[0] - 1) == 1  # guard: the same sum in bfloat16


def test_the_average_is_of_weights_as_they_are_stored_in_bfloat16():
    """Under jit XLA adds in float32, and would leave out the cast to bfloat16 and back."""
    params, step = jnp.ones(4, jnp.bfloat16), jnp.full(4, 2.0**-10, jnp.bfloat16)
    tx = with_ema(optax.sgd(-1.0), 0.0)  # an average of the last weights alone
    _, state = jax.jit(tx.update)(step, tx.init(params), params)
    np.testing.assert_array_equal(state.ema, np.ones(4), "the average is of sums that no bfloat16 stores")


def test_ema_params_returns_parameters_without_average_unchanged():
    params = {"trained": jnp.zeros(2), "left": jnp.ones(3)}
    tx = optax.partition({"a": with_ema(optax.sgd(1.0), 0.5), "b": optax.set_to_zero()}, {"trained": "a", "left": "b"})
    _, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert_equal_bits(ema_params(state, params), {"trained": jnp.full(2, -0.5), "left": params["left"]})

"""Tests of gradients inside ``shard_map`` and of the ready-made step, against one device on the global batch."""

import gc
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from tests.support import (
    AXES,
    Model,
    assert_same_params,
    data,
    equations,
    fsdp,
    in_case,
    mean_loss,
    mesh_of,
    on_mesh,
    weighted_loss,
)
from xlstm_jax.distributed import (
    accumulate_gradients,
    create_train_state,
    fold_rng_over_axis,
    init_sharded,
    make_train_step,
    partition_specs,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import averages
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.metrics import cells

BOTH_MODES = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
KEY, BATCH = jax.random.key(0), data()
WRAPPED, PLAIN = Model(fsdp()), Model()


@cache
def plain_params():
    return jax.jit(PLAIN.init)(KEY, BATCH["x"])["params"]


@cache
def boxed_params(mesh):
    return init_sharded(WRAPPED, mesh, KEY, BATCH["x"], batch_axes=AXES)["params"]


def run_grads(fn, mesh, check_vma, params=None, batch=BATCH):
    """Returns (loss, grads) of ``fn(params, batch)`` inside shard_map."""
    params = boxed_params(mesh) if params is None else params
    specs = partition_specs(params, mesh)
    return on_mesh(fn, mesh, check_vma, (specs, P(AXES)), (P(), specs))(params, batch)


@cache
def whole_batch(loss):
    """Returns loss and gradient of the plain model on one device."""
    return jax.jit(jax.value_and_grad(lambda params: loss(params, PLAIN.apply, BATCH)))(plain_params())


def global_weighted_mean(params, apply_fn, batch):
    total, weight = weighted_loss(params, apply_fn, batch)
    return total / weight


# ------------------------------------------------------------------------------------------------------ value_and_grad


@pytest.mark.one_in(2)
@BOTH_MODES
def test_repeated_sync_gradients_does_not_divide_an_average_twice(check_vma):
    """``sync_gradients`` divides its averages once; a scaled copy is refused under ``check_vma=True``."""

    def again(params, batch, changed=False):
        loss, grads = value_and_grad(lambda p: mean_loss(p, WRAPPED.apply, batch), AXES)(params)
        grads = jax.tree.map(lambda g: g * 1, grads) if changed else grads
        return loss, sync_gradients(sync_gradients(sync_gradients(grads, "fsdp"), AXES), "dp")

    def by_hand(params, batch):
        grads = jax.grad(lambda p: mean_loss(p, WRAPPED.apply, batch))(params)
        return jnp.float32(0), sync_gradients(sync_gradients(sync_gradients(grads, "fsdp"), AXES), AXES)

    _, want = whole_batch(mean_loss)
    for local in (again, by_hand):
        _, got = run_grads(local, mesh_of(2, 4), check_vma)
        assert_same_params(got, want)
    changed = partial(run_grads, partial(again, changed=True), mesh_of(2, 4), check_vma)
    if check_vma:  # by its type, a scaled average is a sum
        with pytest.raises(ValueError, match=r"was averaged over .* then changed"):
            changed()
    else:
        assert_same_params(changed()[1], want)


def test_records_of_averaged_gradients_are_dropped_with_the_arrays():
    grads = run_grads(lambda p, b: (jnp.float32(0), sync_gradients(p, AXES)), mesh_of(1, 1), True)
    gc.collect()
    assert not any(average() is not None for average, _ in averages.AVERAGES.known)
    del grads


@pytest.mark.one_in(3)
@pytest.mark.parametrize(  # every mesh with and without weights, and on two axes in both modes
    "dp, fsdp_size, weighted, check_vma",
    [(2, 4, weighted, check_vma) for weighted in (False, True) for check_vma in (True, False)]
    + [(1, 8, False, True), (1, 8, True, False), (8, 1, False, False), (8, 1, True, True), (1, 1, True, True)],
)
def test_value_and_grad_matches_the_gradient_of_the_global_batch(weighted, dp, fsdp_size, check_vma):
    loss = weighted_loss if weighted else mean_loss
    fn = value_and_grad(lambda p, b: loss(p, WRAPPED.apply, b), AXES, weighted=weighted)
    got_loss, got = run_grads(fn, mesh_of(dp, fsdp_size), check_vma)
    want_loss, want = whole_batch(global_weighted_mean if weighted else mean_loss)
    assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_same_params(got, want)


def test_guard_mean_of_device_means_differs_from_the_global_weighted_mean():
    """Guard of the weighted case: devices have different weights, and one device has weight 0."""
    weights = BATCH["weight"].reshape(8, 2).sum(1)
    assert weights.min() == 0 and len(set(weights.tolist())) > 4
    shares = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH) for i in range(8) if weights[i]]
    mean_of_means = np.mean([global_weighted_mean(plain_params(), PLAIN.apply, share) for share in shares])
    assert abs(mean_of_means / whole_batch(global_weighted_mean)[0] - 1) > 0.1


@pytest.mark.one_in(2)
@BOTH_MODES
def test_weighted_loss_with_zero_total_weight_gives_zero_instead_of_nan(check_vma):
    batch = {**BATCH, "weight": jnp.zeros(16)}
    fn = value_and_grad(lambda p, b: weighted_loss(p, WRAPPED.apply, b), AXES, weighted=True)
    loss, grads = run_grads(fn, mesh_of(2, 4), check_vma, batch=batch)
    assert loss == 0 and all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.one_in(2)
@BOTH_MODES
def test_weight_given_as_a_python_number_counts_on_every_device(check_vma):
    def loss(params, batch):
        return len(batch["x"]) * mean_loss(params, WRAPPED.apply, batch), len(batch["x"])

    got_loss, got = run_grads(value_and_grad(loss, AXES, weighted=True), mesh_of(2, 4), check_vma)
    assert_allclose(got_loss, whole_batch(mean_loss)[0], rtol=1e-5)
    assert_same_params(got, whole_batch(mean_loss)[1])


def test_weight_of_a_weighted_loss_is_constant_in_the_gradient():
    """The weight is a constant for the gradient; otherwise the gradient of w x / w would be 0."""
    step = value_and_grad(lambda w, x: (jnp.sum(w * x), w * jnp.sum(x)), AXES, weighted=True)
    loss, grad = on_mesh(step, mesh_of(2, 4), True, (P(), P(AXES)), P())(jnp.float32(2), jnp.arange(16.0))
    assert_allclose([loss, grad], [1, 1 / 2], rtol=1e-6)


def test_sums_of_bfloat16_losses_and_gradients_over_devices_run_in_float32():
    step = value_and_grad(lambda w, x: (jnp.sum(w * x), 257.0), "fsdp", weighted=True)  # 256 in bfloat16
    run = on_mesh(step, mesh_of(1, 1), True, (P(), P("fsdp")), P())
    assert run(jnp.bfloat16(1), jnp.full(1, 256, jnp.bfloat16))[0] == jnp.bfloat16(256 / 257)
    step = value_and_grad(lambda w, x: jnp.mean(w * x), AXES)
    run = on_mesh(step, mesh_of(2, 4), True, (P(), P(AXES)), P())
    found = equations(jax.make_jaxpr(run)(jnp.ones(4, jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)))
    sums = [eqn for _, eqn in found if eqn.primitive.name.startswith("psum")]
    assert {str(v.aval.dtype) for eqn in sums for v in eqn.invars} == {"float32"}


def test_value_and_grad_returns_the_local_aux_of_each_device():
    def local(params, batch):
        fn = value_and_grad(lambda p, b: (mean_loss(p, WRAPPED.apply, b), jnp.sum(b["x"])), AXES, has_aux=True)
        (_, aux), _ = fn(params, batch)
        return aux[None]

    mesh = mesh_of(2, 4)
    params = boxed_params(mesh)
    got = on_mesh(local, mesh, True, (partition_specs(params, mesh), P(AXES)), P(AXES))(params, BATCH)
    assert_allclose(got, BATCH["x"].reshape(8, -1).sum(1), rtol=1e-4, atol=1e-5)


def test_value_and_grad_without_check_vma_accepts_an_already_averaged_loss():
    fn = value_and_grad(lambda p, b: lax.pmean(mean_loss(p, WRAPPED.apply, b), AXES), AXES)
    loss, grads = run_grads(fn, mesh_of(2, 4), check_vma=False)
    assert_allclose(loss, whole_batch(mean_loss)[0], rtol=1e-5)
    assert_same_params(grads, whole_batch(mean_loss)[1])


@pytest.mark.parametrize("axes, batch, missing, size", [("dp", "dp", "fsdp", 4), ("fsdp", AXES, "dp", 2)], ids=str)
def test_value_and_grad_raises_for_a_batch_axis_missing_from_axis_names(axes, batch, missing, size):
    """Batch axes that omit an axis raise: gradients of replicated leaves would be sums over the omitted axis."""
    mesh = mesh_of(2, 4)
    params = jax.eval_shape(lambda: boxed_params.__wrapped__(mesh))  # a cache would keep tracers
    specs = partition_specs(params, mesh)
    for call in (
        lambda p, b: value_and_grad(lambda p, b: mean_loss(p, WRAPPED.apply, b), axes)(p, b),
        lambda p, b: accumulate_gradients(lambda p, b, _: mean_loss(p, WRAPPED.apply, b), p, b, None, axes),
    ):
        with (
            in_case(call=call),
            pytest.raises(
                ValueError, match=rf"the loss varies over '{missing}'.* leave out.* summed over its {size} dev"
            ),
        ):
            jax.eval_shape(on_mesh(call, mesh, True, (specs, P(batch)), (P(), specs)), params, BATCH)


@pytest.mark.filterwarnings("ignore:.scale., and 1 of 1 parameters in all, are trained in float16")
def test_grad_norm_of_float16_gradients_is_summed_in_float32():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", nn.initializers.ones, (64,), jnp.float16).sum()

    mesh = mesh_of(1, 8)
    state = create_train_state(fsdp(Half)(), optax.sgd(0.0), mesh, KEY, BATCH["x"], batch_axes=AXES)
    step = make_train_step(lambda p, f, b, r: jnp.mean(f({"params": p}, b["x"] * 0 + 300.0)), mesh, AXES)
    _, metrics = step(state, BATCH, KEY)
    assert_allclose(metrics["grad_norm"], 300 * 8, rtol=1e-3)  # the square exceeds float16


def test_count_of_steps_begins_as_an_int32_on_every_device_of_the_mesh():
    """A step returns such a count: with another type or placement the second step would be compiled again."""
    mesh = mesh_of(2, 4)
    count = create_train_state(fsdp(nn.Dense)(4), optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES).step
    assert (count.dtype, count.weak_type, int(count)) == (jnp.int32, False, 0)
    assert count.sharding.is_equivalent_to(NamedSharding(mesh, P()), 0)


def test_jax_grad_with_a_single_sync_gradients_is_exact_in_both_vma_modes():
    for check_vma in (True, False):

        def local(params, batch):
            loss, grads = jax.value_and_grad(lambda p: mean_loss(p, WRAPPED.apply, batch))(params)
            return lax.pmean(loss, AXES), sync_gradients(grads, AXES)

        assert_same_params(run_grads(local, mesh_of(2, 4), check_vma)[1], whole_batch(mean_loss)[1])


def test_rng_folded_over_axes_differs_on_every_device():
    fold = on_mesh(
        lambda key: jax.random.key_data(fold_rng_over_axis(key, AXES))[None], mesh_of(2, 4), True, P(), P(AXES)
    )
    assert len({tuple(row) for row in np.asarray(fold(KEY)).tolist()}) == 8


# -------------------------------------------------------------------------------------------------------- accumulation


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "weighted, count, check_vma",
    [(False, 2, True), (False, 2, False), (True, 2, True), (True, 2, False), (True, 1, True)],
)
def test_accumulate_gradients_matches_the_gradient_of_the_global_batch(weighted, count, check_vma):
    loss = weighted_loss if weighted else mean_loss

    def local(params, batch):
        fn = lambda p, b, rng: loss(p, WRAPPED.apply, b)  # noqa: E731
        return accumulate_gradients(fn, params, batch, None, AXES, count, weighted=weighted)

    got_loss, got = run_grads(local, mesh_of(2, 4), check_vma)
    want_loss, want = whole_batch(global_weighted_mean if weighted else mean_loss)
    assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_same_params(got, want)


def test_aux_of_a_weighted_loss_is_divided_by_the_total_weight():
    """Auxiliary outputs of a weighted loss are divided by the batch's weight: one device, minibatch weights 1 and 3."""

    def loss(w, batch, rng):
        return (w * jnp.sum(batch["y"]), jnp.sum(batch["weight"])), {"y": jnp.sum(batch["y"])}

    def local(w, batch):
        return accumulate_gradients(loss, w, batch, None, AXES, 2, weighted=True, has_aux=True)

    batch = {"y": np.float32([10, 2]), "weight": np.float32([1, 3])}
    (got, aux), _ = on_mesh(local, mesh_of(1, 1), False, P(), P())(np.float32(2), batch)
    assert (float(got), float(aux["y"])) == (2 * 12 / 4, 12 / 4)


@pytest.mark.one_in(2)
@BOTH_MODES
def test_aux_of_minibatches_is_averaged_like_the_loss(check_vma):
    def run(weighted):
        def loss(params, batch, rng):
            out = (weighted_loss if weighted else mean_loss)(params, WRAPPED.apply, batch)
            seen = jnp.sum(batch["y"][:, 0] * batch["weight"]) if weighted else jnp.mean(batch["y"][:, 0])
            return out, {"y": seen}

        def local(params, batch):
            return accumulate_gradients(loss, params, batch, None, AXES, 2, weighted=weighted, has_aux=True)

        (_, aux), _ = run_grads(local, mesh_of(1, 8), check_vma)
        return aux["y"]

    assert_allclose(run(False), BATCH["y"][:, 0].mean(), rtol=1e-5)
    assert_allclose(run(True), (BATCH["y"][:, 0] * BATCH["weight"]).sum() / BATCH["weight"].sum(), rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count, check_vma", [(2, False), (1, True)])
def test_aux_cells_define_the_reduction_over_devices_and_minibatches(count, check_vma):
    """Auxiliary cells define their reduction over devices and minibatches: a mean would count 2 of 16 tokens."""

    def loss(params, apply_fn, batch, rng):
        y = batch["y"]
        cells_of = {"tokens": cells.Count.of(len(y)), "sum": cells.Total.of(y)}
        extrema = {"max": cells.Maximum.of(y), "min": cells.Minimum.of(y)}
        return mean_loss(params, apply_fn, batch), cells_of | extrema | {
            "mean": jnp.mean(y),
            "hits": jnp.any(y > 9),
        } | {"narrow": jnp.bfloat16(1)}

    mesh = mesh_of(2, 4)
    state = create_train_state(WRAPPED, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES)
    step = make_train_step(loss, mesh, AXES, count, has_aux=True, check_vma=check_vma)
    metrics, y = step(state, BATCH, KEY)[1], BATCH["y"]
    assert int(metrics["tokens"]) == len(y) and float(metrics["hits"]) == 0 and metrics["narrow"].dtype == jnp.float32
    assert (float(metrics["max"]), float(metrics["min"])) == (float(y.max()), float(y.min()))
    assert_allclose([metrics["sum"], metrics["mean"]], [y.sum(), y.mean()], rtol=1e-5)


def test_aux_cells_of_minibatches_are_merged_and_narrow_numbers_become_float32():
    def loss(w, batch, rng):
        merged = {"count": cells.Count.of(len(batch)), "max": cells.Maximum.of(batch)}
        return w * jnp.mean(batch), merged | {"narrow": jnp.bfloat16(1)}

    def local(w, batch):
        return accumulate_gradients(loss, w, batch, None, AXES, 2, has_aux=True)

    (_, aux), _ = on_mesh(local, mesh_of(1, 1), False, P(), P())(np.float32(2), np.float32([1, 3, 9, 5]))
    assert (int(aux["count"]), float(aux["max"]), float(aux["narrow"])) == (4, 9, 1)
    assert aux["narrow"].dtype == jnp.float32


def test_accumulate_gradients_sums_float16_and_bfloat16_in_float32():
    """Minibatches sum gradients in float32: weights of 10^5 overflow float16, and bfloat16 lacks 16 + 1/128."""

    def run(dtype, values, weight):
        def loss(w, batch, rng):
            return jnp.sum(batch * w), weight

        return accumulate_gradients(loss, jnp.ones((), dtype), values, None, "fsdp", 2, weighted=True)[1]

    mesh = mesh_of(1, 1)
    values = jnp.asarray([1e5, 1e5, 0, 0], jnp.float32)
    got = on_mesh(lambda v: run(jnp.float16, v, 1e5), mesh, True, P(), P())(values)
    assert got.dtype == jnp.float16 and got == 1
    values = jnp.asarray([256.0, 1.0], jnp.float32)
    got = on_mesh(lambda v: run(jnp.bfloat16, v, 1.0), mesh, True, P(), P())(values)
    assert got.dtype == jnp.bfloat16 and got == jnp.bfloat16(128.5)


def test_accumulate_gradients_keeps_float64_precision():
    with jax.enable_x64(True):
        batch = jnp.arange(16, dtype=jnp.float64) / 3

        def local(w, batch):
            fn = lambda w, b, rng: (jnp.sum(jnp.sin(b * w)), jnp.sum(b))  # noqa: E731
            return accumulate_gradients(fn, w, batch, None, AXES, 2, weighted=True)

        loss, grad = on_mesh(local, mesh_of(2, 4), True, (P(), P(AXES)), P())(jnp.float64(0.3), batch)
        want = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(batch * w)) / jnp.sum(batch))(jnp.float64(0.3))
    assert loss.dtype == grad.dtype == jnp.float64
    assert_allclose([loss, grad], want, rtol=1e-14)


def test_accumulate_gradients_gives_each_minibatch_a_different_key():
    def local(w, batch):
        def loss(w, batch, rng):
            noise = jax.random.uniform(rng)
            return w * jnp.mean(batch), {"first": noise, "square": noise**2}

        ((_, aux), _) = accumulate_gradients(loss, w, batch, KEY, AXES, 2, has_aux=True)
        return aux["square"] - aux["first"] ** 2

    variance = on_mesh(local, mesh_of(1, 1), True, P(), P())(np.float32(2), np.float32([1, 3]))
    assert variance > 1e-6


# ------------------------------------------------------------------------------------------------------------ the step


def test_optimizer_state_is_sharded_like_parameters_and_keeps_shardings_over_steps():
    mesh = mesh_of(2, 4)
    state = create_train_state(WRAPPED, optax.adamw(1e-3), mesh, KEY, BATCH["x"], batch_axes=AXES)
    moments = state.opt_state[0].mu
    for (path, p), m in zip(leaves_with_path(state.params), jax.tree.leaves(moments), strict=True):
        value = p.value if is_box(p) else p
        assert m.sharding == value.sharding, path
    assert not [path for path, leaf in leaves_with_path(state.opt_state) if is_box(leaf)]

    step = make_train_step(mean_loss, mesh, AXES)
    before, old = jax.tree.map(lambda x: x.sharding, state), state
    for _ in range(3):
        state, metrics = step(state, BATCH, KEY)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    assert step._cache_size() == 1  # the second step did not compile again
    assert not [path for path, leaf in leaves_with_path(old) if not leaf_of(leaf).value.is_deleted()]  # donated
    assert int(state.step) == 3 and set(metrics) == {"loss", "grad_norm"}


@pytest.mark.one_in(2)
@BOTH_MODES
def test_metrics_loss_and_grad_norm_are_global_values(check_vma):
    mesh = mesh_of(2, 4)
    state = create_train_state(WRAPPED, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES)
    _, metrics = make_train_step(mean_loss, mesh, AXES, check_vma=check_vma)(state, BATCH, KEY)
    loss, grads = whole_batch(mean_loss)
    assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [2, 1])
def test_weighted_train_step_over_minibatches_with_aux_matches_a_single_device(count):
    def loss(params, apply_fn, batch, rng):
        return weighted_loss(params, apply_fn, batch), {"weighted_y": jnp.sum(batch["y"][:, 0] * batch["weight"])}

    mesh = mesh_of(2, 4)
    state = create_train_state(WRAPPED, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES)
    state, metrics = make_train_step(loss, mesh, AXES, count, weighted=True, has_aux=True)(state, BATCH, KEY)
    want_loss, grads = whole_batch(global_weighted_mean)
    assert_allclose(metrics["loss"], want_loss, rtol=1e-5)
    assert_allclose(
        metrics["weighted_y"], (BATCH["y"][:, 0] * BATCH["weight"]).sum() / BATCH["weight"].sum(), rtol=1e-5
    )
    assert_same_params(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, plain_params(), grads))


class WithDropout(nn.Module):
    """Module that applies dropout to ones, with a parameter to train."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (64,))
        return nn.Dropout(0.5, deterministic=False)(jnp.ones((x.shape[0], 64))) * scale


def test_dropout_differs_by_device_example_and_step():
    masks = []

    def loss(params, apply_fn, batch, rng):
        out = apply_fn({"params": params}, batch["x"], rngs={"dropout": rng})
        # The mask as a number, returned as auxiliary output: the mean over devices has few collisions.
        return jnp.mean(out), {f"column_{i}": jnp.mean(out[:, i]) for i in range(8)}

    mesh, model = mesh_of(1, 8), fsdp(WithDropout)()
    state = create_train_state(
        model, optax.set_to_zero(), mesh, {"params": KEY, "dropout": KEY}, BATCH["x"], batch_axes=AXES
    )
    step = make_train_step(loss, mesh, AXES, has_aux=True)
    for _ in range(2):
        state, metrics = step(state, BATCH, KEY)
        masks.append([float(metrics[f"column_{i}"]) for i in range(8)])
    # 16 examples: with the same mask on all devices a column would be 0, 1/2 or 1 of 2.0 (two examples per device).
    assert masks[0] != masks[1]
    assert any(value not in (0.0, 1.0, 2.0) for value in masks[0])
    # With the same mask for both examples of each device a column would keep an even number of examples.
    assert any(value * 8 % 2 for value in masks[0])


def test_train_step_leaves_integer_parameters_unchanged():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            order = self.param("order", lambda key: jnp.arange(4, dtype=jnp.int32)[::-1])
            return nn.Dense(4)(x)[:, order]

    mesh = mesh_of(2, 4)
    state = create_train_state(fsdp(Net)(), optax.adamw(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES)
    before = jax.device_get(unbox(state.params))
    state, _ = make_train_step(mean_loss, mesh, AXES)(state, BATCH, KEY)
    assert (
        np.array_equal(unbox(state.params)["order"], [3, 2, 1, 0]) and unbox(state.params)["order"].dtype == jnp.int32
    )
    assert not np.allclose(unbox(state.params)["Dense_0"]["kernel"], before["Dense_0"]["kernel"])


def test_train_step_lowers_with_all_gather_and_reduce_scatter():
    mesh = mesh_of(2, 4)
    state = create_train_state(WRAPPED, optax.adamw(1e-3), mesh, KEY, BATCH["x"], batch_axes=AXES)
    text = make_train_step(mean_loss, mesh, AXES).lower(state, BATCH, KEY).as_text()
    assert "all_gather" in text and "reduce_scatter" in text

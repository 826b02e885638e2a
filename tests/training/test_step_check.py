"""Tests of ``check_step``: common mistakes in custom steps are found and explained."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import AXES, data, fsdp, mean_loss, mesh_of, weighted_loss
from xlstm_jax.distributed import (
    TrainState,
    check_step,
    create_train_state,
    make_train_step,
    partition_specs,
    sync_gradients,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.data_parallel import box_like
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.state import sharded_opt_state
from xlstm_jax.distributed.training.step_check.check import Comparison, _ratio
from xlstm_jax.distributed.training.step_check.comparison import Multiple, compare_leaves, flat
from xlstm_jax.distributed.training.step_check.observed import ReportedLoss, SeenStep, copies_differ, differ_along
from xlstm_jax.distributed.training.step_check.one_device import OneDevice, Reference

KEY, BATCH = jax.random.key(0), data()


class Model(nn.Module):
    """Two layers with split kernels and replicated biases."""

    @nn.compact
    def __call__(self, x):
        dense = fsdp(nn.Dense)
        return dense(4)(nn.tanh(dense(16)(x)))


MODEL = Model()


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(2, 4)


@pytest.fixture(scope="module")
def state(mesh):
    return create_train_state(MODEL, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES)


def loss_fn(params, batch):
    return mean_loss(params, MODEL.apply, batch)


def of_jax(params, batch, change=lambda loss: loss):
    """Returns the mean loss, and the local gradients of plain JAX."""

    def loss(params):
        local = loss_fn(params, batch)
        return change(local), local

    (_, local), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return lax.pmean(local, AXES), grads


def right(params, batch):
    return value_and_grad(loss_fn, AXES)(params, batch)


def then(reduce, grads_of):
    """Returns ``grads_of`` followed by ``reduce`` of the gradients."""

    def both(params, batch):
        value, grads = grads_of(params, batch)
        return value, reduce(grads)

    return both


def sync(grads, axes=AXES):
    return sync_gradients(grads, axes)


def sum_reported(params, batch):
    value, grads = right(params, batch)
    return 8 * value, grads


def in_one_line(found):
    return " ".join(str(found).split())


def times(factor):
    return partial(jax.tree.map, lambda g: g * factor)


def own_step(grads_of, mesh, params, check_vma, tx=None):
    """Returns a typical custom step around ``grads_of(params, batch)``; ``tx`` replaces the state's optimizer."""
    specs = partition_specs(params, mesh)
    on_mesh = partial(jax.shard_map, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
    run = on_mesh(grads_of, check_vma=check_vma)

    def step(state, batch, rng):
        del rng
        value, grads = run(state.params, batch)
        updates, opt_state = (tx or state.tx).update(unbox(grads), state.opt_state, unbox(state.params))
        params = jax.tree.map(lambda p, u: p + u, unbox(state.params), updates)
        return state.replace(params=box_like(params, state.params), opt_state=opt_state), {"loss": value}

    return jax.jit(step, donate_argnums=0)


SUMMED, DIVIDED = r"8 x the right ones: summed over \('dp', 'fsdp'\)", r"1/8 x the right ones: divided once more over"
UNEQUAL, NO_MULTIPLE = "not the same on all devices that should", "no multiple of the right ones"
MISTAKES = {
    "no sync, types on": (of_jax, True, SUMMED),
    "no sync, types off": (of_jax, False, UNEQUAL),
    "one axis left out, types on": (
        then(partial(sync, axes="fsdp"), of_jax),
        True,
        "2 x the right ones: summed over 'dp'",
    ),
    "one axis left out, types off": (then(partial(sync, axes="fsdp"), of_jax), False, UNEQUAL),
    "averages scaled and averaged again": (then(sync, then(times(1.0), right)), True, DIVIDED),
    "loss averaged by hand": (partial(of_jax, change=lambda x: lax.pmean(x, AXES)), True, "divided once more over"),
    "shards averaged with shards": (
        then(partial(jax.tree.map, lambda g: lax.pmean(g, AXES)), of_jax),
        False,
        NO_MULTIPLE,
    ),
    "a sum is reported": (sum_reported, True, "the loss is 8 x that of one device"),
    "scaled by hand": (then(times(3.0), right), True, "3 x the right ones: which is no number of devices"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_step_finds_and_names_a_mistake_in_a_custom_step(mistake, mesh, state):
    grads_of, check_vma, says = MISTAKES[mistake]
    found = check_step(own_step(grads_of, mesh, state.params, check_vma), state, BATCH, KEY, loss_fn=mean_loss)
    assert not found.ok and found.compared == "gradients"
    assert re.search(says, in_one_line(found)), str(found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("grads_of", [right, then(sync, of_jax), then(sync, right)], ids=["ours", "jax", "twice"])
def test_check_step_finds_correct_custom_steps_right(grads_of, check_vma, mesh, state):
    found = check_step(own_step(grads_of, mesh, state.params, check_vma), state, BATCH, KEY, loss_fn=mean_loss)
    assert found.ok, str(found)
    assert max(abs(leaf.ratio - 1) for leaf in found.leaves) < 1e-5 and max(leaf.error for leaf in found.leaves) < 1e-5
    assert max(len(line) for line in str(found).splitlines()) <= 80
    assert len(found.leaves) == len(jax.tree.leaves(state.params)) and "right" in str(found)
    assert re.fullmatch(r"<StepCheck right: gradients of 4 leaves on dp=2,fsdp=4, findings: 0>", repr(found))
    assert "right" in found._repr_html_()


def sum_loss(params, apply_fn, batch, rng):
    return mean_loss(params, apply_fn, batch) * batch["x"].shape[0]


def globally_divided(params, apply_fn, batch, rng):
    return sum_loss(params, apply_fn, batch, rng) / len(BATCH["x"])


def uneven_mean(params, apply_fn, batch, rng):
    total, weight = weighted_loss(params, apply_fn, batch)
    return total / (weight + 1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "loss, says",
    [
        (
            sum_loss,
            r"the loss is 1/8 x that of one device: it is a sum over examples.*1/8 x .* as the loss is",
        ),
        (globally_divided, "the loss is 1/8 x that of one device: it is a sum over examples"),
        (uneven_mean, "The step minimises another mean. Where examples have weights"),
    ],
)
def test_check_step_finds_a_loss_other_than_a_mean_of_the_batch(loss, says, mesh, state):
    found = check_step(make_train_step(loss, mesh, AXES), state, BATCH, KEY)
    assert not found.ok and re.search(says, in_one_line(found)), str(found)


def test_check_step_finds_make_train_step_with_all_options_right(mesh, state):
    with_aux = lambda params, apply_fn, batch, rng: (weighted_loss(params, apply_fn, batch), {"x": 1.0})  # noqa: E731
    step = make_train_step(with_aux, mesh, AXES, 2, weighted=True, has_aux=True)
    found = check_step(step, state, BATCH, KEY)
    assert found.ok, str(found)
    int(state.step)  # neither changed nor donated


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tx, compared", [(optax.adam(0.1), "updates"), (optax.sgd(0.1), "updates")])
def test_check_step_compares_updates_for_a_step_with_a_custom_optimizer(tx, compared, mesh, state):
    own = state.replace(tx=tx, opt_state=sharded_opt_state(tx, state.params, mesh))
    check = partial(check_step, state=own, batch=BATCH, rng=KEY, loss_fn=mean_loss)
    for grads_of, ok in [(right, True), (of_jax, False)]:
        found = check(own_step(grads_of, mesh, state.params, True, tx))
        assert found.ok == ok and (not ok or found.compared == compared), str(found)
    assert "8 x the right ones: summed over" in in_one_line(found)


@pytest.mark.slow
def test_check_step_skips_a_gradient_of_pure_rounding(mesh):
    """``check_step`` skips the gradient of attention's key bias, pure rounding because softmax is shift-invariant."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            rows = fsdp(nn.Dense)(32)(x).reshape(-1, 4, 8)
            seen = fsdp(nn.MultiHeadDotProductAttention)(num_heads=2, dtype=jnp.bfloat16)(rows)
            return seen.reshape(-1, 32)[:, :4]

    state = create_train_state(Net(), optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES)
    found = check_step(make_train_step(mean_loss, mesh, AXES), state, BATCH, KEY)
    assert found.ok, str(found)
    ratios = {leaf.path.partition("/")[2]: leaf.ratio for leaf in found.leaves}
    assert ratios["key/bias"] == 1 and ratios["query/kernel"] != 1


def checked_step_of_one_leaf(factor=1, calls=1, tx=None):
    """Returns the result of ``check_step`` for a leaf on two devices, with ``factor`` times the gradient.

    The step has an optimizer of its own if ``tx`` is given.
    """
    mesh, x = mesh_of(1, 2), np.arange(1.0, 9, dtype=np.float32).reshape(2, 4)
    params = {"w": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("fsdp")))}
    state = TrainState.create(apply_fn=lambda params, x: params["w"] * x, params=params, tx=tx or optax.sgd(0.1))

    @jax.jit
    def step(state, batch, rng):
        loss, grads = jax.value_and_grad(of_products)(state.params, state.apply_fn, batch, rng)
        grads, opt_state = jax.tree.map(lambda g: factor * g, grads), state.opt_state
        for _ in range(calls):
            updates, opt_state = (tx or state.tx).update(grads, opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt_state=opt_state), {"loss": loss}

    return check_step(step, state, x, KEY, loss_fn=of_products)


def of_products(params, apply_fn, batch, rng):
    return jnp.mean(apply_fn(params, batch) ** 2)


@pytest.mark.parametrize(
    "options, verdict, finding",
    [
        ({}, "right", ""),  # guard
        ({"factor": 2}, "wrong", "2 x"),
        ({"calls": 2}, "wrong", "the step calls its optimizer 2 times"),
        ({"tx": optax.adam(0.1)}, "right", "updates"),
        ({"tx": optax.sgd(0.1), "factor": 2}, "wrong", "2 x"),
    ],
    ids=["right", "summed", "twice", "own optimizer", "summed, own optimizer"],
)
def test_check_step_finds_a_mistake_in_a_step_with_a_single_leaf(options, verdict, finding):
    found = checked_step_of_one_leaf(**options)
    assert found.verdict == verdict and finding in in_one_line(found)
    assert verdict == "wrong" or found.compared == ("updates" if "tx" in options else "gradients")


def test_multiple_of_a_ratio_names_the_mesh_axes_of_a_wrong_sum_or_division():
    ratios = {ratio: Multiple.of(ratio, {"dp": 2, "fsdp": 4}, 1e-3) for ratio in (1.0, 4.0, 8.0, 0.5, 3.0)}
    assert [(found.kind, found.axis_names) for found in ratios.values()] == [
        ("equal", ()),
        ("summed", ("fsdp",)),
        ("summed", ("dp", "fsdp")),
        ("divided", ("dp",)),
        ("other", ()),
    ]


def test_ratio_to_zero_is_1_for_zero_and_infinite_otherwise():
    assert [_ratio(got, right) for got, right in ((1.0, 4.0), (0.0, 0.0), (2.0, 0.0))] == [0.25, 1.0, math.inf]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32], ids=lambda dtype: dtype.__name__)
def test_reference_divides_by_the_exact_sum_of_weights_of_a_narrow_dtype(mesh, state, dtype):
    """The mean of the weights, 32.875, is a number of neither dtype."""
    weights = np.array([256, *[1] * 7], np.float32)

    def first_row(params, apply_fn, batch, rng):
        return jnp.sum(batch["x"]).astype(jnp.bfloat16), batch["weight"][0].astype(dtype)

    batch = {"x": np.array([256, *[0] * 7], np.float32), "weight": weights}
    one_device = OneDevice(LossFunction(first_row, True), batch_layout(mesh, AXES), 1, state, batch, mesh)
    assert one_device.slices(KEY).loss == pytest.approx(256 / 263, rel=1e-6)


def test_reference_of_a_loss_with_a_mean_over_devices_is_computed_on_the_mesh(mesh):
    """Losses are w^2 (x - mean of x)^2: their mean is w^2 times the variance of x, and the gradient 2 w times it."""
    params = {"w": jax.device_put(jnp.float32(3), NamedSharding(mesh, P()))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def spread(params, apply_fn, batch, rng):
        return jnp.mean((params["w"] * (batch["x"] - lax.pmean(jnp.mean(batch["x"]), AXES))) ** 2)

    batch = {"x": np.arange(8, dtype=np.float32)}
    one_device = OneDevice(LossFunction(spread, False), batch_layout(mesh, AXES), 1, state, batch, mesh)
    assert one_device.needs_all_devices(KEY)
    found = one_device.slices(KEY)
    assert found.loss == pytest.approx(9 * 5.25) and float(found.grads["w"]) == pytest.approx(6 * 5.25)


def test_loss_of_a_step_differs_if_it_is_no_multiple_or_another_multiple_of_the_loss_of_one_device(mesh):
    params = {"w": jax.device_put(np.float32(3), NamedSharding(mesh, P()))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    loss, batch = LossFunction(lambda params, *_: params["w"], False), np.ones(8, np.float32)
    compared = Comparison(None, state, (batch, KEY), OneDevice(loss, batch_layout(mesh, AXES), 1, state, batch, mesh))
    right = Reference(3.0, {}, {}, lambda: right)

    def findings(reported):
        seen = SeenStep("gradients", {}, lambda grads: {}, ReportedLoss(reported, 2.0**-23), None, state, state)
        return compared.loss_differs(KEY, seen, right)

    assert findings(3.0) == findings(3.0 * (1 + 1e-6)) == (False, [])
    for reported, says in ((24.0, "8 x that of one device: it is summed over"), (4.0, "reports another loss")):
        (of_model, (finding,)) = findings(reported)
        assert not of_model and says in finding


def test_copies_differ_finds_replicas_of_a_leaf_with_unequal_values():
    sharding = NamedSharding(mesh_of(1, 2), P())
    for second, differ in ((1.0, ()), (2.0, ("fsdp",))):
        copies = [jax.device_put(x, device) for x, device in zip((1.0, second), jax.devices(), strict=False)]
        value = jax.make_array_from_single_device_arrays((), sharding, copies)
        assert copies_differ(value) == bool(differ) and differ_along(value) == differ


def test_check_step_finds_a_step_calling_the_optimizer_twice(mesh, state):
    def twice(state, batch, rng):
        _, grads = on_mesh(state.params, batch)
        grads = unbox(grads)
        updates, opt_state = state.tx.update(grads, state.opt_state, unbox(state.params))
        _, opt_state = state.tx.update(grads, opt_state, unbox(state.params))
        params = jax.tree.map(jnp.add, unbox(state.params), updates)
        return state.replace(params=box_like(params, state.params), opt_state=opt_state), {}

    specs = partition_specs(state.params, mesh)
    on_mesh = jax.shard_map(right, mesh=mesh, in_specs=(specs, P(AXES)), out_specs=(P(), specs))
    found = check_step(twice, state, BATCH, KEY, loss_fn=mean_loss)
    assert "the step calls its optimizer 2 times" in in_one_line(found)


def test_compare_leaves_accepts_rounding_and_rejects_larger_differences():
    """A relative difference of 1e-4 (ratio, direction, zero leaf) is an error, 1e-6 is rounding."""
    right = {"w": np.array([1.0, 2.0, -3.0]), "zero": np.zeros(3)}

    def compared(**changes):
        found = compare_leaves(right | changes, right, {}, {}, lambda: right, float(np.finfo(np.float32).eps))
        return [leaf.is_equal for leaf in found]

    assert compared() == [True, True]
    assert compared(w=right["w"] * (1 + 1e-6)) == [True, True]
    assert compared(w=right["w"] * (1 + 1e-4)) == [False, True]  # a ratio
    assert compared(w=right["w"] + 1e-3 * np.array([2.0, -1.0, 0])) == [False, True]  # another direction
    assert compared(zero=np.full(3, 1e-3)) == [True, False]  # beside nothing


def test_flat_returns_complex_values_as_real_parts_and_imaginary_parts():
    values = flat({"real": np.array([[1, 2]], np.float32), "complex": np.array([1 + 2j, 3 + 4j])})
    assert {path: found.tolist() for path, found in values.items()} == {"real": [1, 2], "complex": [1, 3, 2, 4]}
    assert {found.dtype for found in values.values()} == {np.dtype(np.float64)}

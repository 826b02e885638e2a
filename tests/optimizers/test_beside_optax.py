"""Comparison with optax: library functions that optax also has, in the ready step and on one device.

Optimizers run on global arrays in the ready step, so the library duplicates no optax function with equal results.
``optax.apply_if_finite`` treats gradients equally, and differs otherwise: the library keeps ``skip_nonfinite``.
Reading the rate of ``optax.inject_hyperparams`` is one line of the program; reading the rate of a schedule in an
ordinary optimizer is not. The tables of docs/optimizers.md and docs/training.md give the results.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

from tests.damage import same
from tests.optimizers.test_offload import fetches
from tests.support import (
    AXES,
    Model,
    assert_same_bits,
    assert_same_params,
    data,
    equations,
    fsdp,
    mean_loss,
    mesh_of,
    plain,
)
from xlstm_jax.distributed import (
    LoopGuard,
    NonFiniteError,
    Offload,
    create_train_state,
    make_train_step,
    muon,
    skip_nonfinite,
    unbox,
)
from xlstm_jax.distributed.optimizers import matrix_dimensions, on_unsharded_matrices

KEY, MESH, LIMIT, RATE = jax.random.key(0), mesh_of(2, 4), 2, 0.02
NEVER = np.iinfo(np.int32).max  # errors in a row after which optax applies updates anyway
OURS, OPTAX = skip_nonfinite, partial(optax.apply_if_finite, max_consecutive_errors=LIMIT)
BOTH = pytest.mark.parametrize("wrapper", [OURS, OPTAX], ids=["ours", "optax's"])
GOOD = data() | {"extra": 0.0}
BAD = GOOD | {"x": jnp.asarray(GOOD["x"]).at[3, 0].set(jnp.nan)}  # NaN on one device
BAD_LOSS = GOOD | {"extra": jnp.inf}  # the gradients are finite


def loss_fn(params, apply_fn, batch, rng):
    return mean_loss(params, apply_fn, batch, rng) + batch["extra"]


def first_state(tx, model=None, **options):
    return create_train_state(
        model or fsdp(nn.Dense)(4), tx, MESH, KEY, GOOD["x"], batch_axes=AXES, allow_replicated=True, **options
    )


def trained(tx, batches, model=None, num_minibatches=1, **options):
    """Returns the last state; and for each step the metrics, and whether parameters changed."""
    state = first_state(tx, model, **options)
    step, seen = make_train_step(loss_fn, MESH, AXES, num_minibatches, allow_replicated=True), []
    for batch in batches:
        before = jax.device_get(unbox(state.params))
        state, metrics = step(state, batch, KEY)
        seen.append((metrics, not same(jax.device_get(unbox(state.params)), before)))
    return state, seen


def on_one_device(tx, batches):
    """Returns parameters after training without a wrapper on the finite batches only."""
    model = Model(scan=False)
    params = jax.jit(model.init)(KEY, GOOD["x"])["params"]
    state = tx.init(params)

    @jax.jit
    def update(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, model.apply, batch, None), state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches:
        params, state = update(params, state, batch)
    return params


def optax_muon():
    return optax.contrib.muon(RATE, muon_weight_dimension_numbers=matrix_dimensions())


def normalized(updates, params=None):
    del params
    return jax.tree.map(lambda u: u / jnp.linalg.norm(u), updates)


def by_matrix(of_matrices):
    """Applies ``of_matrices`` to kernels, and the identity to biases."""
    labels = partial(jax.tree.map, lambda p: "matrix" if p.ndim == 2 else "other")
    return optax.partition({"matrix": of_matrices, "other": optax.identity()}, labels)


CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE))
EQUAL = {
    "minibatches": (CLIPPED, CLIPPED, {"num_minibatches": 2}),
    "muon": (muon(RATE), optax_muon(), {}),
    "whole matrices": (
        optax.chain(
            on_unsharded_matrices(optax.chain(optax.trace(0.9), optax.contrib.normalize())), optax.scale(-RATE)
        ),
        optax.chain(by_matrix(optax.chain(optax.trace(0.9), optax.stateless(normalized))), optax.scale(-RATE)),
        {},
    ),
    "offload": (CLIPPED, CLIPPED, {"offload": Offload()}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tx, reference, options", EQUAL.values(), ids=EQUAL)
@BOTH
def test_skip_nonfinite_and_apply_if_finite_both_skip_a_nonfinite_gradient(wrapper, tx, reference, options):
    state, seen = trained(wrapper(tx), [GOOD, BAD, BAD, GOOD], Model(fsdp, scan=False), **options)
    assert [changed for _, changed in seen] == [True, False, False, True]
    assert_same_params(state.params, on_one_device(reference, [GOOD, GOOD]))
    spoiled = on_one_device(reference, [GOOD, BAD, GOOD])
    assert not np.isfinite(np.asarray(spoiled["Dense_0"]["kernel"])).any()  # guard: the batch is bad


@BOTH
def test_nonfinite_loss_is_skipped_by_skip_nonfinite_and_applied_by_apply_if_finite(wrapper):
    _, seen = trained(wrapper(CLIPPED), [GOOD, BAD_LOSS])
    assert [bool(np.isfinite(metrics["loss"])) for metrics, _ in seen] == [True, False]
    assert np.isfinite(seen[1][0]["grad_norm"]) and seen[1][1] == (wrapper is OPTAX)


@BOTH
def test_nonfinite_gradient_beyond_the_limit_is_applied_by_apply_if_finite_only(wrapper):
    state, seen = trained(wrapper(optax.sgd(RATE)), [BAD] * (LIMIT + 1))
    assert [changed for _, changed in seen] == [False] * LIMIT + [wrapper is OPTAX]
    assert np.isfinite(np.asarray(unbox(state.params)["kernel"])).any() == (wrapper is OURS)


def test_apply_if_finite_with_the_largest_limit_never_applies_a_nonfinite_update():
    counted = optax.apply_if_finite(optax.sgd(1.0), NEVER)
    state = counted.init(jnp.ones(2))._replace(notfinite_count=jnp.int32(NEVER))
    updates, state = counted.update(jnp.array([jnp.nan, 1.0]), state, jnp.ones(2))
    assert not updates.any() and state.notfinite_count == NEVER
    below = optax.apply_if_finite(optax.sgd(1.0), NEVER - 1)  # guard: a limit below NEVER is reached
    assert np.isnan(below.update(jnp.array([jnp.nan, 1.0]), state, jnp.ones(2))[0]).any()


def test_loop_guard_accepts_skips_of_skip_nonfinite_and_raises_with_apply_if_finite():
    step, batches = make_train_step(loss_fn, MESH, AXES, allow_replicated=True), [GOOD, BAD, GOOD, GOOD]

    def run(wrapper, counts=lambda state: {}):
        state, seen = first_state(wrapper(optax.sgd(RATE))), []
        with LoopGuard(max_skipped_in_a_row=1) as guard:
            for number, batch in enumerate(batches, 1):
                state, metrics = step(state, batch, KEY)
                seen.append(metrics | counts(state))
                guard.step_done(number, seen[-1])
        return [(int(metrics["skipped_steps"]), int(metrics["skipped_in_a_row"])) for metrics in seen]

    def of_optax(state):
        """Returns copies, because the next step donates the state."""
        kept = state.opt_state
        return {"skipped_steps": jnp.copy(kept.total_notfinite), "skipped_in_a_row": jnp.copy(kept.notfinite_count)}

    with pytest.raises(NonFiniteError, match=r"loss of step 2 is nan, and its update was applied"):
        run(OPTAX)
    assert run(OURS) == run(OPTAX, of_optax) == [(0, 0), (1, 1), (1, 0), (1, 0)]


class Normalized(nn.Module):
    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(16)(x)
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False, axis_name=AXES)(x))


def with_statistics(params, apply_fn, batch, rng, collections):
    del rng
    out, updated = apply_fn({"params": params, **collections}, batch["x"], mutable=list(collections))
    return jnp.mean((out - batch["y"]) ** 2), updated


@BOTH
def test_skipped_step_keeps_batch_statistics_with_skip_nonfinite_only(wrapper):
    state = first_state(wrapper(CLIPPED), Normalized(fsdp()))
    step = make_train_step(with_statistics, MESH, AXES, allow_replicated=True)
    state, _ = step(state, GOOD, KEY)
    before = jax.device_get((unbox(state.params), state.collections))
    state, _ = step(state, BAD, KEY)
    params, collections = jax.device_get((unbox(state.params), state.collections))
    assert_same_bits(params, before[0])
    assert same(collections, before[1]) == (wrapper is OURS)
    assert np.isfinite(collections["batch_stats"]["BatchNorm_0"]["mean"]).all() == (wrapper is OURS)


def test_host_moments_stream_with_skip_nonfinite_and_arrive_all_at_once_with_optax(monkeypatch):
    ours, plain = (fetches(tx, 1, monkeypatch) for tx in (OURS(optax.adam(0.1)), optax.adam(0.1)))
    assert ours == plain and (len(plain[0]), plain[1]) == (4, 3)  # each of four moments but the first waits
    # optax puts all moments into one branch of a condition, so each moment waits for the last moment to arrive.
    come, barriers = fetches(OPTAX(optax.adam(0.1)), 1, monkeypatch)
    assert (len(come), barriers) == (4, 0)

    def operands_of_conditions(tx):
        grads = {"a": jnp.ones(3), "b": jnp.ones(5)}
        update = jax.make_jaxpr(tx.update)(grads, tx.init(grads), grads)
        return [
            sum(var.aval.shape in ((3,), (5,)) for var in eqn.invars)
            for _, eqn in equations(update)
            if eqn.primitive.name == "cond"
        ]

    assert operands_of_conditions(OURS(optax.adam(0.1))) == []
    assert operands_of_conditions(OPTAX(optax.adam(0.1))) == [6]  # two leaves: gradients and both moments


# --------------------------------------------------------------------------------------------------- the learning rate

DOWN = optax.linear_schedule(0.4, 0.1, 8)
INJECTED = optax.inject_hyperparams(optax.sgd)


def kept_rate(opt_state):
    """Returns a copy of the rate by the program's line, because the next step donates the state."""
    return jnp.copy(opt_state.hyperparams["learning_rate"])


def rates(tx, kept, learning_rate=None, batches=(GOOD,) * 3, **options):
    """Returns three lists over steps: the rate read from the state, the metric, and update norm / gradient norm."""
    state, seen = first_state(tx), []
    step = make_train_step(loss_fn, MESH, AXES, learning_rate=learning_rate, allow_replicated=True, **options)
    for batch in batches:
        before = jax.device_get(unbox(state.params))
        state, metrics = step(state, batch, KEY)
        moved = optax.tree.norm(jax.tree.map(np.subtract, jax.device_get(unbox(state.params)), before))
        seen.append((kept(state.opt_state), metrics.get("learning_rate"), moved / metrics["grad_norm"]))
    return [list(map(float, column)) for column in zip(*seen, strict=True) if column[0] is not None]


def test_injected_learning_rate_after_a_step_is_the_rate_of_the_last_update():
    kept, reported, moved = rates(INJECTED(DOWN), kept_rate, DOWN, num_minibatches=2)
    assert_allclose(kept, [DOWN(count) for count in range(3)], rtol=1e-6)
    assert_allclose(reported, kept, rtol=1e-6)
    assert_allclose(moved, kept, rtol=1e-4)
    (kept, moved) = rates(INJECTED(0.25), kept_rate)
    assert kept == [0.25] * 3
    assert_allclose(moved, kept, rtol=1e-4)


def test_injected_learning_rates_are_read_per_partition_group():
    tx = optax.partition(
        {"matrix": INJECTED(DOWN), "other": INJECTED(RATE)},
        partial(jax.tree.map, lambda p: "matrix" if p.ndim == 2 else "other"),
    )
    for group, want in {"matrix": [DOWN(0), DOWN(1)], "other": [RATE] * 2}.items():
        kept, _ = rates(
            tx, lambda state, group=group: kept_rate(state.inner_states[group].inner_state), None, [GOOD] * 2
        )
        assert_allclose(kept, want, rtol=1e-6)


def test_skipped_step_keeps_the_injected_rate_and_reports_the_upcoming_rate():
    kept, reported, moved = rates(
        skip_nonfinite(INJECTED(DOWN)), lambda state: kept_rate(state.inner_state), DOWN, [GOOD, BAD, GOOD]
    )
    assert_allclose(kept, [DOWN(0), DOWN(0), DOWN(1)], rtol=1e-6)
    assert_allclose(reported, [DOWN(0), DOWN(1), DOWN(1)], rtol=1e-6)  # not DOWN(2), by the number of the step
    assert_allclose(np.asarray(moved)[[0, 2]], [DOWN(0), DOWN(1)], rtol=1e-4)


def test_jit_around_the_step_adds_the_injected_rate_to_the_metrics():
    step = make_train_step(loss_fn, MESH, AXES, allow_replicated=True)

    @partial(jax.jit, donate_argnums=0)
    def with_rate(state, batch):
        state, metrics = step(state, batch, KEY)
        return state, metrics | {"learning_rate": state.opt_state.hyperparams["learning_rate"]}

    state, seen = first_state(INJECTED(DOWN)), []
    for _ in range(3):
        state, metrics = with_rate(state, GOOD)
        seen.append(metrics["learning_rate"])
    assert_allclose(seen, [DOWN(count) for count in range(3)], rtol=1e-6)


def test_next_step_deletes_the_injected_rate_in_the_state_but_not_a_copy():
    def first_of_two(read):
        state, step = first_state(INJECTED(0.25)), make_train_step(loss_fn, MESH, AXES, allow_replicated=True)
        state, _ = step(state, GOOD, KEY)
        rate = read(state.opt_state)
        step(state, GOOD, KEY)
        return float(rate)

    with pytest.raises(RuntimeError, match="deleted"):
        first_of_two(lambda state: state.hyperparams["learning_rate"])
    assert first_of_two(kept_rate) == 0.25


@pytest.mark.parametrize("tx", [optax.adamw(DOWN), muon(DOWN), INJECTED(DOWN)], ids=["adamw", "muon", "injected"])
def test_optax_tree_finds_no_learning_rate_without_injection_and_two_with_a_schedule(tx):
    """``optax.tree`` finds no rate without ``inject_hyperparams``, and two with a schedule: value and state."""
    state = tx.init({"kernel": jnp.ones((4, 4))})
    found = optax.tree.get_all_with_path(state, "learning_rate")
    assert len(found) == (2 if hasattr(state, "hyperparams") else 0)
    step = make_train_step(loss_fn, MESH, AXES, learning_rate=DOWN, allow_replicated=True)
    assert step(first_state(tx), GOOD, KEY)[1]["learning_rate"] == DOWN(0)


def test_inject_hyperparams_of_muon_raises_for_ns_steps_unless_static():
    with pytest.raises(TypeError, match=r"ns_steps=.* is no Python number"):
        first_state(optax.inject_hyperparams(muon)(DOWN))
    kept, moved = rates(optax.inject_hyperparams(muon, static_args="ns_steps")(DOWN), kept_rate)
    assert_allclose(kept, [DOWN(count) for count in range(3)], rtol=1e-6)
    assert np.isfinite(moved).all()


def test_injected_adamw_on_bfloat16_parameters_is_nan_without_hyperparam_dtype():
    """With bfloat16 parameters an injected Adam rounds the decay 0.999 to 1, giving NaN, and rounds the rate."""
    params = {"kernel": jnp.ones(4, jnp.bfloat16)}

    def two_updates(tx):
        state, moved = tx.init(params), params
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, moved)
            moved = optax.apply_updates(moved, updates)
        return state, np.isfinite(np.asarray(moved["kernel"], np.float32)).all()

    state, finite = two_updates(optax.inject_hyperparams(optax.adamw)(1e-3))
    assert state.hyperparams["b2"] == 1 and state.hyperparams["learning_rate"] != np.float32(1e-3) and not finite
    state, finite = two_updates(optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3))
    assert state.hyperparams["learning_rate"] == np.float32(1e-3) and finite
    assert two_updates(optax.adamw(DOWN))[1]

"""Tests of ``skip_nonfinite``: all devices skip a step whose loss or gradient is not finite."""

import re
from functools import cache
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import AXES, assert_same_params, fsdp, mesh_of, on_mesh, plain
from xlstm_jax.distributed import (
    check_replicas,
    create_train_state,
    make_train_step,
    skip_counts,
    skip_nonfinite,
    unbox,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.optimizers.nonfinite import SkipNonfiniteState, with_skipped_collections
from xlstm_jax.distributed.optimizers.sharded_optimizer import Trained


class Mlp(nn.Module):
    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(self.wrap(nn.Dense)(16)(x))
        return self.wrap(nn.Dense)(4)(x)


def loss_fn(params, apply_fn, batch, rng=None):
    """Loss with sqrt(root * out^2), which is |out| for root = 1; root = 0 gives a finite value and a NaN gradient."""
    del rng
    out = apply_fn({"params": params}, batch["x"])
    root = jnp.sqrt(batch["root"][:, None] * out**2)
    return jnp.mean((out - 1) ** 2 + root / 10) + jax.lax.stop_gradient(batch["extra"].mean())


POISON = {"x": np.nan, "root": 0.0, "extra": np.inf}  # both; the gradient alone; the loss alone
KINDS = [None, "x", None, "root", "extra", None]
SKIPPED = [0, 1, 1, 2, 3, 3]
IN_A_ROW = [0, 1, 0, 1, 2, 0]
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.05))


def batches():
    """Yields batches of 16 examples; in some steps the last example, on a single device, is bad."""
    for step, kind in enumerate(KINDS):
        x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
        batch = {"x": x, "root": np.ones(16, np.float32), "extra": np.zeros(16, np.float32)}
        if kind:
            batch[kind][-1] = POISON[kind]
        yield kind, batch


def bits(tree):
    """Returns the bytes of all leaves; of a key, the bytes of its data."""
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if is_prng_key(x) else x).tobytes() for x in leaves]


def start_of(tx, mesh):
    return create_train_state(Mlp(fsdp), tx, mesh, jax.random.key(0), jnp.zeros((16, 8)), batch_axes=AXES)


def trained(step, state, skip=()):
    """Returns the state after the steps whose kind is not in ``skip``, and the metrics of each step."""
    before, metrics = jax.tree.map(lambda leaf: leaf.sharding, state), []
    for kind, batch in batches():
        if kind not in skip:
            state, row = step(state, batch, jax.random.key(1))
            metrics.append(jax.device_get(row))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before and step._cache_size() == 1
    return state, metrics


@cache
def trained_on_one_device():
    model, plain_params = Mlp(), Mlp().init(jax.random.key(0), jnp.zeros((16, 8)))["params"]
    opt_state, gradient = TX.init(plain_params), jax.jit(jax.grad(lambda p, b: loss_fn(p, model.apply, b)))
    for kind, batch in batches():
        if kind is None:
            grads = gradient(plain_params, batch)
            updates, opt_state = TX.update(grads, opt_state, plain_params)
            plain_params = optax.apply_updates(plain_params, updates)
    return plain_params


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dp, fsdp_size, check_vma", [(2, 4, True), (1, 8, False)])
def test_skipped_steps_leave_training_bit_equal_to_training_without_bad_batches(dp, fsdp_size, check_vma):
    mesh, tx = mesh_of(dp, fsdp_size), skip_nonfinite(TX)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)
    start = start_of(tx, mesh)
    state, metrics = trained(step, jax.tree.map(jnp.copy, start))
    # Bit-equal to the same program without bad steps; equal up to rounding to optax on one device.
    want, _ = trained(step, start, skip=tuple(POISON))
    assert bits((state.params, state.opt_state.inner_state)) == bits((want.params, want.opt_state.inner_state))
    assert_same_params(state.params, trained_on_one_device())
    assert [int(row["skipped_steps"]) for row in metrics] == SKIPPED
    assert [int(row["skipped_in_a_row"]) for row in metrics] == IN_A_ROW
    moment = state.opt_state.inner_state[1][0].mu["Dense_0"]["kernel"]
    assert moment.sharding.spec == P(None, "fsdp")  # split like its parameter, one level deeper
    assert int(state.step) == len(KINDS)
    check_replicas(state)


def test_skip_nonfinite_adds_a_single_all_reduce_to_the_step():
    def all_reduces(tx):
        state, (_, batch) = start_of(tx, mesh_of(2, 4)), next(batches())
        step = make_train_step(loss_fn, mesh_of(2, 4), AXES)
        return len(
            re.findall(r" all-reduce(-start)?\(", step.lower(state, batch, jax.random.key(1)).compile().as_text())
        )

    assert 0 < all_reduces(optax.adamw(0.05)) == all_reduces(skip_nonfinite(optax.adamw(0.05))) - 1


@pytest.mark.parametrize("kind", POISON)
def test_single_bad_example_makes_training_nonfinite_without_skip_nonfinite(kind):
    mesh = mesh_of(2, 4)
    others = tuple(POISON.keys() - {kind})
    state, metrics = trained(make_train_step(loss_fn, mesh, AXES), start_of(TX, mesh), skip=others)
    if kind == "extra":  # only the loss has it
        assert not np.isfinite([row["loss"] for row in metrics]).all()
    else:
        finite = [path for path, leaf in leaves_with_path(unbox(state.params)) if np.isfinite(leaf).all()]
        assert not finite, "these parameters would be left"


def test_skipped_update_keeps_parameters_and_optimizer_state_bit_for_bit():
    params = {"w": jnp.array([-0.0, 0.0, jnp.inf, 3.0]), "half": jnp.array([-0.0, 1.0], jnp.bfloat16)}
    tx = skip_nonfinite(optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.adam(0.1)))

    @jax.jit
    def step(params, state, loss):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, value=loss)
        return optax.apply_updates(params, updates), state

    _, state = step(params, tx.init(params), 1.0)
    after, skipped = step(params, state, jnp.nan)
    assert bits(after) == bits(params) and bits(skipped.inner_state) == bits(state.inner_state)
    assert bits(step(params, state, 1.0)[0]) != bits(params)  # guard: a good step changes parameters
    assert (int(skipped.skipped_steps), int(skipped.skipped_in_a_row)) == (1, 1)


def test_steps_skipped_in_a_row_start_again_at_0_after_a_good_step():
    tx = skip_nonfinite(optax.sgd(1.0))
    state, counts = tx.init(np.zeros(1, np.float32)), []
    update = jax.jit(tx.update)
    for gradient, loss in ((np.nan, 0), (0, np.inf), (0, 0), (0, 1), (-np.inf, 0)):
        _, state = update(np.float32([gradient]), state, value=np.float32(loss))
        counts.append((int(state.skipped_steps), int(state.skipped_in_a_row)))
    assert counts == [(1, 1), (2, 2), (2, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_devices_skip_for_a_single_nonfinite_shard_inside_shard_map(check_vma):
    def local(grad, params, tx):
        updates, state = tx.update(grad, tx.init(params), params)
        return params + updates, (skip_counts(state) or {"skipped_steps": jnp.zeros((), jnp.int32)})["skipped_steps"]

    grad = jnp.ones(16).at[3].set(jnp.nan if check_vma else jnp.inf)

    def run(tx):
        step = on_mesh(lambda *args: local(*args, tx), mesh_of(2, 4), check_vma, P(AXES), (P(AXES), P()))
        return step(grad, jnp.ones(16))

    new, skipped = run(skip_nonfinite(optax.sgd(0.5)))
    assert int(skipped) == 1 and (np.asarray(new) == 1).all()
    if not check_vma:  # guard: with optax's apply_if_finite the other devices go on
        went_on, _ = run(optax.apply_if_finite(optax.sgd(0.5), 3))
        assert (np.asarray(went_on) == 0.5).sum() == 14


def test_a_step_is_skipped_if_any_entry_of_a_statistic_turns_nonfinite_and_not_if_it_was_so():
    class Seen(NamedTuple):
        update: object

    seen = Seen(lambda grads, before, collections, value: (before._replace(collections=collections), {"loss": value}))
    update = with_skipped_collections(seen, None, None).update
    state = skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(1))

    def loss(old, new):
        before = Trained(0, None, state, {"stats": {"mean": jnp.array(old)}})
        return float(update(None, before, {"stats": {"mean": jnp.array(new)}}, value=jnp.float32(2))[1]["loss"])

    assert np.isnan(loss([1.0, 1.0], [1.0, np.inf])), "one entry of two has turned infinite"
    assert loss([1.0, np.inf], [2.0, np.inf]) == 2, "the entry was infinite before: each later step would be skipped"


def test_collections_after_a_skipped_step_are_those_before_it():
    class Skipping(NamedTuple):
        update: object

    def collections_after(skipped_in_a_row):
        state = SkipNonfiniteState((), np.int32(3), np.int32(skipped_in_a_row))
        before = Trained(0, None, state, {"stats": {"mean": np.float32([1, 2])}})
        inner = Skipping(lambda grads, before, collections: (before._replace(collections=collections), {}))
        update = with_skipped_collections(inner, None, None).update
        after, metrics = update(None, before, {"stats": {"mean": np.float32([3, 4])}})
        assert metrics == {"skipped_steps": 3, "skipped_in_a_row": skipped_in_a_row}
        return after.collections["stats"]["mean"].tolist()

    assert [collections_after(skipped) for skipped in (0, 1, 2)] == [[3, 4], [1, 2], [1, 2]]


def test_skip_counts_finds_nested_counters_and_raises_for_duplicates():
    params = {"w": jnp.ones(3), "skipped_steps": jnp.ones(2)}
    inside = optax.chain(optax.scale(1.0), skip_nonfinite(optax.adam(0.1)))
    assert {name: int(value) for name, value in skip_counts(inside.init(params)).items()} == {
        "skipped_steps": 0,
        "skipped_in_a_row": 0,
    }
    assert skip_counts(optax.adam(0.1).init(params)) == {}
    with pytest.raises(ValueError, match="stands in this optimizer 2 times"):
        skip_counts(optax.chain(skip_nonfinite(optax.sgd(0.1)), skip_nonfinite(optax.adam(0.1))).init(params))

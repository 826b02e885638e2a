"""Tests of the optimizer update in ``check_step``: ``step_check/update`` and ``recording``."""

import re
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding

from tests.support import AXES, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import TrainState, check_step, create_train_state, make_train_step, unbox
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.training.step_check import update
from xlstm_jax.distributed.training.step_check.recording import Recorded, recorded_state
from xlstm_jax.distributed.training.step_check.update import (
    UpdateCheck,
    _Update,
    check_update,
    compare_each_leaf,
    of_state,
    same_bits,
)

KEY, BATCH = jax.random.key(0), data()
ADAM = optax.adam(1e-2)


@pytest.fixture(scope="module")
def state():
    model = nn.Sequential([fsdp(nn.Dense)(16), nn.tanh, fsdp(nn.Dense)(4)])
    return create_train_state(model, ADAM, mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES)


def step_followed_by(change):
    """Returns a faulty step: a ready step, and then ``change(new state, old state)`` on its result."""
    ready = make_train_step(mean_loss, mesh_of(2, 4), AXES)

    def step(state, batch, rng):
        new, metrics = ready(jax.tree.map(jnp.copy, state), batch, rng)
        return change(new, state), metrics

    return step


def checked(step, state):
    """Returns the result of ``check_step``, and its text on one line."""
    found = check_step(step, state, BATCH, KEY, loss_fn=mean_loss)
    return found, " ".join(str(found).split())


def opt_state_unchanged_from_the_second_step_on(new, old):
    """Keeps the optimizer state of the first step in all later steps."""
    kept = lambda x, y: jnp.where(old.step > 0, y, x)  # noqa: E731
    inner = jax.tree.map(kept, new.opt_state.inner, old.opt_state.inner)
    return new.replace(opt_state=Recorded(inner, new.opt_state.record))


def opt_state_set_to_zeros(new, old):
    """Sets the optimizer state to 0 after each step, as ``tx.init`` does."""
    zeros = jax.tree.map(jnp.zeros_like, new.opt_state.inner)
    return new.replace(opt_state=Recorded(zeros, new.opt_state.record))


# name: (change of the new state, verdict of check_step, pattern in its text)
CHANGES = {
    "nothing": (lambda new, old: new, "right", "parameters, updates and the optimizer's state after the step are"),
    "decay": (
        lambda new, old: new.replace(params=jax.tree.map(lambda p: p * 0.99, new.params)),
        "wrong",
        "4 leaves .* the step multiplies them by 0.99 after the update",
    ),
    "moments lost": (opt_state_set_to_zeros, "wrong", "stays as it was"),
    "moments halved": (
        lambda new, old: new.replace(opt_state=jax.tree.map(lambda x: x * 0.5, new.opt_state)),
        "wrong",
        "the step changes all numbers in the optimizer's state",
    ),
    "a count of two": (lambda new, old: new.replace(step=old.step + 2), "wrong", "state.step is 2 .* and was 0"),
    "a second step alone": (
        opt_state_unchanged_from_the_second_step_on,
        "wrong",
        "in a second step, the optimizer's state .* stays as it was",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_check_step_finds_changes_to_params_or_opt_state_outside_the_optimizer(name, state):
    change, verdict, says = CHANGES[name]
    found, text = checked(step_followed_by(change), state)
    assert found.verdict == verdict, f"{found.verdict!r}, with the text: {text}"
    assert re.search(says, text), f"{says!r} is not in: {text}"


def test_check_update_looks_at_a_second_step_only_after_a_right_first_step(monkeypatch):
    wrong, right = UpdateCheck(("the update is wrong",), None, ()), UpdateCheck((), None, ())

    class OfStates:
        def __init__(self, before, after, one_device):
            self.check = lambda: after

    monkeypatch.setattr(update, "_Update", OfStates)
    monkeypatch.setattr(update, "OneDeviceOptimizer", lambda *args: None)

    def findings(first, second):
        return check_update(SimpleNamespace(tx=None), first, None, second and (lambda: second), None).findings

    assert findings(right, wrong) == ("in a second step, the update is wrong",)
    assert findings(wrong, right) == wrong.findings and findings(right, right) == findings(right, None) == ()


def test_recorded_state_reads_like_the_state_and_trains_equally(state):
    kept = recorded_state(state, mesh_of(2, 4))
    assert kept.opt_state[0].count == 0 and len(kept.opt_state) == len(state.opt_state)
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
    recorded, _ = step(jax.tree.map(jnp.copy, kept), BATCH, KEY)
    plain, _ = step(jax.tree.map(jnp.copy, state), BATCH, KEY)
    assert int(recorded.opt_state.record.calls) == 1
    after_recorded, after_plain, before = (leaves_with_path(unbox(s.params)) for s in (recorded, plain, state))
    for (path, a), (_, b), (_, start) in zip(after_recorded, after_plain, before, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7, err_msg=path)
        assert np.any(a != start), f"{path} is unchanged"  # guard: records of an idle optimizer would be equal


@cache
def one_update():
    """Returns the states before and after an update of two numbers by the recording SGD, and the updates."""
    mesh, grads = mesh_of(1, 1), {"w": np.float32([4, 2])}
    params = {"w": jax.device_put(np.float32([1, 2]), NamedSharding(mesh, jax.P()))}
    before = recorded_state(TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.5)), mesh)
    updates, opt_state = before.tx.update(grads, before.opt_state, params)
    after = before.replace(params={"w": np.float32([-1, 1])}, opt_state=opt_state, step=before.step + 1)
    return before, after, updates


def test_step_that_changes_all_numbers_of_the_optimizer_state_or_counts_twice_has_a_finding():
    before, after, _ = one_update()
    halved = after.replace(opt_state=jax.tree.map(lambda x: np.asarray(x) * 0.5, after.opt_state))
    (finding,) = _Update(before, halved, None).check().findings
    assert finding.startswith("the step changes all numbers in the optimizer's state")
    for step, says in ((0, ""), (1, ""), (2, "state.step is 2 after the step, and was 0")):
        found = " ".join(_Update(before, after.replace(step=before.step + step), None).of_count())
        assert says in found and bool(says) == bool(found), found


def test_recording_optimizer_updates_as_the_optimizer_and_parameters_are_compared_with_its_updates():
    before, right, updates = one_update()
    np.testing.assert_array_equal(updates["w"], [-2, -1])
    assert len(right.opt_state) == 2 and right.opt_state[1] == optax.EmptyState()  # as the state of the SGD itself
    for factor, says in ((1.0, ""), (0.5, "1 leaf ('w'): the step multiplies them by 0.5 after the update")):
        after = right.replace(params={"w": right.params["w"] * np.float32(factor)})
        found = " ".join(_Update(before, after, None).of_params())
        assert says in found and bool(says) == bool(found), found


def test_of_state_compares_opt_state_leaves_with_tolerance_and_counts_exactly():
    right = {"0/count": np.int32(1), "0/mu/w": np.array([1.0, 2.0], np.float32), "1/hyperparams/learning_rate": 0.1}
    before = {"0/count": np.int32(0), "0/mu/w": np.zeros(2, np.float32), "1/hyperparams/learning_rate": 0.1}

    def found(**changes):
        return " ".join(of_state({**right, **changes}, right, before, lambda: right, 1e-7))

    assert not found()
    assert not found(**{"1/hyperparams/learning_rate": 0.2})  # for the program to set
    assert not found(**{"0/mu/w": right["0/mu/w"] * np.float32(1 + 1e-6)})
    assert "'0/mu/w' is 1.1 x" in found(**{"0/mu/w": right["0/mu/w"] * np.float32(1.1)})
    assert "'0/count' is 2 in place of 1" in found(**{"0/count": np.int32(2)})
    assert "stays as it was" in found(**{"0/count": np.int32(0)})
    assert "other leaves" in " ".join(of_state({}, right, before, lambda: right, 1e-7))


def test_compare_each_leaf_ignores_subnormal_values_and_same_bits_compares_keys():
    tiny = {"nu": np.full(3, 1e-40, np.float32)}
    (leaf,) = compare_each_leaf({"nu": np.zeros(3, np.float32)}, tiny, lambda: tiny, 1e-7)
    assert leaf.is_equal
    assert same_bits(KEY, jax.random.key(0)) and not same_bits(KEY, jax.random.key(1))


def test_check_step_leaves_the_verdict_open_for_an_optimizer_failing_on_a_single_device(state):
    def update(updates, opt_state, params=None):
        if jax.typeof(jax.tree.leaves(updates)[0]).sharding.mesh.size == 1:
            raise RuntimeError("on a mesh alone")
        return jax.tree.map(lambda g: -g, updates), opt_state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    without_change = step_followed_by(lambda new, old: new)
    found, text = checked(without_change, state.replace(tx=tx, opt_state=optax.EmptyState()))
    assert found.verdict == "cannot tell", f"{found.verdict!r}, with the text: {text}"
    assert "cannot be called on one device" in text

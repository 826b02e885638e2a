"""Tests of the cures that ``check_step`` suggests: the changed step is right, in both modes of ``check_vma``."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax import lax

from tests.step_corpus import losses
from tests.support import AXES, data, mesh_of, normal
from xlstm_jax.distributed import (
    check_step,
    create_train_state,
    make_train_step,
    shard_modules,
)

KEY = jax.random.key(0)
BATCH = {"x": data()["x"], "target": data()["y"], "y": jnp.arange(16) % 4}


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.tanh(nn.Dense(16)(x)))


@pytest.fixture(scope="module")
def state():
    model = shard_modules(Net(), nn.Dense, "fsdp", min_weight_size=32)
    return create_train_state(model, optax.sgd(0.1), mesh_of(2, 4), KEY, BATCH["x"], batch_axes=AXES)


def in_one_line(found):
    return " ".join(str(found).split())


def check(loss, state, check_vma=True, **options):
    step = make_train_step(loss, mesh_of(2, 4), AXES, check_vma=check_vma, **options)
    return check_step(step, state, BATCH, KEY)


def squared(params, apply_fn, batch):
    return (apply_fn({"params": params}, batch["x"]) - batch["target"]) ** 2


def root(params, apply_fn, batch, rng):
    return jnp.sqrt(jnp.mean(squared(params, apply_fn, batch)))


def root_of_all(params, apply_fn, batch, rng):
    loss = jnp.sqrt(lax.pmean(jnp.mean(squared(params, apply_fn, batch)), AXES))
    return lax.pcast(loss, AXES, to="varying")


def without_draws(loss):
    return lambda params, apply_fn, batch, rng: loss(params, lambda v, x, rngs: apply_fn(v, x), batch, rng)


PAIRS = {  # name: (wrong loss, message, corrected loss)
    "root": (root, "a function of a mean .*pmean", root_of_all),
    "negatives": (
        without_draws(losses.two_sided()),
        r"compares rows with each other .*all_gather\(keys, \('dp', 'fsdp'\), tiled=True\)",
        without_draws(losses.two_sided(AXES)),
    ),
    "covariance": (
        without_draws(losses.covariance()),
        r"a statistic of the batch .*pmean\(x.mean\(0\), \('dp', 'fsdp'\)\)",
        without_draws(losses.covariance(AXES)),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PAIRS)
def test_check_step_suggests_a_working_cure_for_a_loss_without_row_mean(name, state):
    wrong, says, right = PAIRS[name]
    found = check(wrong, state)
    assert found.verdict == "wrong"
    assert re.search(says, in_one_line(found)), str(found)
    for check_vma in (True, False):
        assert (cured := check(right, state, check_vma)).verdict == "right", str(cured)


def test_check_step_names_num_minibatches_as_cause_of_a_changed_loss(state):
    found = check(PAIRS["covariance"][2], state, num_minibatches=2)
    assert found.verdict == "wrong" and "num_minibatches=2 changes it" in in_one_line(found), str(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "loss, says",
    [
        (lambda p, f, b, r: squared(lax.stop_gradient(p), f, b).mean(), "all gradients are 0"),
        (
            lambda p, f, b, r: squared({**p, "Dense_0": lax.stop_gradient(p["Dense_0"])}, f, b).mean(),
            r"2 leaves \('Dense_0/bias', 'Dense_0/kernel'\) get no gradient, .*trainable=",
        ),
        (lambda p, f, b, r: squared(p, f, b).sum() + sum(map(jnp.sum, jax.tree.leaves(p))), "A part of it is a sum"),
    ],
)
def test_check_step_names_zero_gradients_and_a_loss_with_a_sum_as_part(loss, says, state):
    found = check(loss, state, check_vma=False)  # with types on a loss of no parameters is refused
    assert found.verdict == "wrong"
    assert re.search(says, in_one_line(found)), str(found)


class LinearAndDead(nn.Module):
    """The gradient of ``linear`` is 1, whatever the parameters are, and the gradient of ``dead`` is 0."""

    @nn.compact
    def __call__(self, x):
        linear, dead = (self.param(name, nn.initializers.ones, (16,)) for name in ("linear", "dead"))
        return nn.Dense(16)(x).mean(-1) ** 2 + linear.sum() + jax.lax.stop_gradient(dead).sum()


def test_check_step_lists_no_leaf_with_a_constant_gradient_among_leaves_without_gradient():
    mesh, x = mesh_of(1, 8), normal(1, (16, 16))
    model = shard_modules(LinearAndDead(), nn.Dense, "fsdp", min_weight_size=0)
    state = create_train_state(model, optax.sgd(1e-3), mesh, jax.random.key(0), x, batch_axes=("fsdp",))
    step = make_train_step(lambda params, apply_fn, x: apply_fn({"params": params}, x).mean(), mesh, ("fsdp",))
    check = check_step(step, state, x, jax.random.key(2))
    assert "'dead'" in str(check) and "'linear'" not in str(check), str(check)

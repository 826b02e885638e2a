"""Optimizers on sharded parameters: exact outside ``shard_map``, and inside of it exact or refused."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.optimizer_cases import CASES, RIGHT
from tests.support import AXES, assert_same_params, data, fsdp, mean_loss, mesh_of, plain
from xlstm_jax.distributed import create_train_state, make_train_step, partition_specs, unbox
from xlstm_jax.distributed import elementwise_only
from xlstm_jax.distributed.partitioning import Sharded, leaf_axes, leaf_names, leaves_with_path, map_leaves, rebox

STEPS = 4
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class TwoLayers(nn.Module):
    """A kernel whose columns are split, one whose rows are, a vector that is split, and one of 4 values that stays whole."""

    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(self.wrap(nn.Dense)(16, name="up", bias_init=nn.initializers.normal(0.1))(x))
        return self.wrap(nn.Dense)(4, name="down", bias_init=nn.initializers.normal(0.1))(x)


def wrapped(cls):
    return fsdp(cls, min_weight_size=16)


# ------------------------------------------------------------------------------------- outside of shard_map: all exact


@cache
def plain_start():
    return jax.jit(TwoLayers().init)(jax.random.key(0), data()["x"])["params"]


def loss_on_one_device(params):
    return mean_loss(params, TwoLayers().apply, data())


def on_one_device(tx):
    """Parameters after four steps of optax as anyone would write them, without a mesh."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state):
        value, grad = jax.value_and_grad(loss_on_one_device)(params)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss_on_one_device)
        return optax.apply_updates(params, updates), state

    params = plain_start()
    state = jax.jit(tx.init)(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params


def places(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


@by_name
def test_any_optimizer_through_the_train_step_is_the_one_of_one_device(case):
    mesh = mesh_of(2, 4)
    state = create_train_state(TwoLayers(wrapped), case.build(), mesh, jax.random.key(0), data()["x"], batch_axes=AXES)
    step = make_train_step(mean_loss, mesh, AXES)
    before = places((state.params, state.opt_state))
    for _ in range(STEPS):
        state, _ = step(state, data(), jax.random.key(1))
    assert_same_params(state.params, on_one_device(case.build()), case.tolerance)
    assert places((state.params, state.opt_state)) == before
    assert step._cache_size() == 1


# ------------------------------------------------------------------------------------- inside of it: right, or refused


def boxed(params):
    """The parameters of ``TwoLayers`` in the boxes that the wrapped model gives them."""
    names = {"up": {"kernel": (None, "fsdp"), "bias": ("fsdp",)}, "down": {"kernel": ("fsdp", None), "bias": None}}
    return jax.tree.map(lambda value, n: value if n is None else Sharded(value, n), params, names, is_leaf=lambda x: x is None)


@cache
def four_gradients():
    """Gradients of four steps, stacked; large, small and of very different size from one shard to the next."""
    rng = np.random.default_rng(2)

    def gradients(leaf):
        grads = rng.normal(size=(STEPS, *leaf.shape)) * np.array([1, 1e-2, 10, 0.1]).reshape(-1, *[1] * leaf.ndim)
        for dim, size in enumerate(leaf.shape):
            grads *= np.logspace(-1, 0.5, size).reshape(-1, *[1] * (leaf.ndim - 1 - dim))
        return jnp.asarray(grads, jnp.float32)

    return jax.tree.map(gradients, plain_start())


def four_updates(tx, params, grads):
    """Parameters after four updates with given gradients, plus a little of the parameters themselves."""
    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)
    for step, value in enumerate((2.0, 1.0, 1.5, 1.5)):
        grad = jax.tree.map(lambda g, p, step=step: g[step] + 0.1 * p, grads, params)
        updates, state = tx.update(grad, state, params, value=jnp.float32(value), grad=grad, value_fn=_no_loss)
        params = optax.apply_updates(params, updates)
    return params


def _no_loss(params):
    return jnp.float32(0) * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))


def on_shards(tx, mesh=None):
    """``four_updates`` inside ``shard_map``, every device with its slices."""
    mesh = mesh or mesh_of(2, 4)
    params, grads = boxed(plain_start()), four_gradients()
    specs = partition_specs(params, mesh)
    stacked = jax.tree.map(lambda spec: P(None, *spec), specs, is_leaf=lambda x: isinstance(x, P))

    def local(params, grads):
        boxes = map_leaves(rebox, params, grads)
        return four_updates(tx, params, boxes)

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, stacked), out_specs=specs, check_vma=False)
    return jax.jit(run)(params, grads)


@by_name
def test_guard_lets_through_what_is_right_and_refuses_the_rest(case):
    if case.on_shards == RIGHT:
        want = jax.jit(lambda params, grads: four_updates(case.build(), params, grads))(plain_start(), four_gradients())
        assert_same_params(on_shards(elementwise_only(case.build())), want)
        return
    with pytest.raises(ValueError, match=rf"(?s)elementwise_only: '.*({case.on_shards}).*' is wrong on shards.*make_train_step"):
        on_shards(elementwise_only(case.build()))

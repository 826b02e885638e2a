"""Tests of rules that need unsharded matrices: computed by owners, equal to one device."""

from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from tests.support import AXES, Model, assert_same_params, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    create_train_state,
    make_train_step,
    skip_nonfinite,
)
from xlstm_jax.distributed.data_parallel.trees import stored_values
from xlstm_jax.distributed.optimizers import on_unsharded_matrices
from xlstm_jax.distributed.optimizers.matrices.layout import _in_order, _in_stored_order

RATE = 0.02


def shampoo():
    """Returns Shampoo for one matrix: the gradient between inverse fourth roots of well-conditioned Gram matrices."""

    def init(matrix):
        return jnp.eye(matrix.shape[0]), jnp.eye(matrix.shape[1])

    def update(grad, state, params=None):
        del params
        grams = state[0] + grad @ grad.T, state[1] + grad.T @ grad
        left, right = (_inverse_fourth_root(gram) for gram in grams)
        return left @ grad @ right, grams

    return optax.GradientTransformation(init, update)


def _inverse_fourth_root(gram):
    values, vectors = jnp.linalg.eigh(gram)
    return (vectors * values**-0.25) @ vectors.T


def transform(rule):
    return optax.chain(on_unsharded_matrices(rule()), optax.scale(-RATE))


def by_hand(rule, steps=3):
    """Trains on one device: each matrix separately, transposed if it has more rows than columns."""
    inner, model, grad = rule(), Model(), jax.jit(jax.grad(mean_loss), static_argnums=1)
    update_of = jax.jit(inner.update)
    params = jax.jit(model.init)(jax.random.key(0), data()["x"])["params"]
    states = {}

    def of_matrix(name, grad):
        turned = grad.T if grad.shape[0] > grad.shape[1] else grad
        update, states[name] = update_of(turned, states.get(name) or inner.init(turned))
        return update.T if grad.shape[0] > grad.shape[1] else update

    def of_leaf(path, grad):
        name = jax.tree_util.keystr(path)
        if "kernel" not in name:
            return grad
        if grad.ndim == 2:
            return of_matrix(name, grad)
        return jnp.stack([of_matrix(f"{name}{layer}", one) for layer, one in enumerate(grad)])

    for _ in range(steps):
        updates = jax.tree_util.tree_map_with_path(of_leaf, grad(params, model.apply, data()))
        params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
    return params


@cache
def three_steps_of_shampoo():
    mesh, tx, x = mesh_of(2, 4), skip_nonfinite(transform(shampoo)), data()["x"]
    state = create_train_state(Model(wrap=fsdp), tx, mesh, jax.random.key(0), x, batch_axes=AXES, allow_replicated=True)
    step = make_train_step(mean_loss, mesh, AXES, allow_replicated=True)
    for _ in range(3):
        state, _ = step(state, data(), jax.random.key(1))
    return state


def test_shampoo_on_shards_matches_a_single_device():
    got, want = whole(three_steps_of_shampoo()), by_hand(shampoo)
    assert_same_params(got, want, 1e-4)  # eigenvectors of Gram matrices: ten times their rounding
    plainly = by_hand(optax.identity)  # guard: the rule changes updates
    assert np.abs(plainly["Dense_0"]["kernel"] - want["Dense_0"]["kernel"]).max() > 1e-3


def whole(state):
    return stored_values(state.params)


def test_owners_store_state_of_assigned_matrices_and_checkpoints_omit_empty_slots(tmp_path):
    """Six kernels of 16 x 32 on four devices: two slots per device; the two empty slots, marked here, are not saved."""
    state = jax.tree.map(marked_after_six, three_steps_of_shampoo())
    left, _ = state.opt_state.inner_state[0].of_owners["16x32"]
    assert left.names == ("fsdp", None, None) and left.value.shape == (8, 16, 16) and left.true_shape[0] == 6
    assert left.value.sharding.spec == P("fsdp")
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state)
        model, x, tx = Model(wrap=fsdp), data()["x"], skip_nonfinite(transform(shampoo))
        on_eight = {"batch_axes": AXES, "allow_replicated": True}
        restored = checkpointer.restore(
            abstract_train_state(model, tx, mesh_of(1, 8), jax.random.key(0), x, **on_eight)
        )
    of_other, _ = restored.opt_state.inner_state[0].of_owners["16x32"]
    np.testing.assert_array_equal(np.asarray(of_other.value)[:6], np.asarray(left.value)[:6])
    assert not np.asarray(of_other.value)[6:].any()
    assert np.asarray(left.value)[6:].all()  # guard: saved slots would not be zero
    assert len(of_other.value.sharding.device_set) == 8


def marked_after_six(leaf):
    """Marks rows 6 and 7 of a stack of eight matrices by 77, and returns other leaves unchanged."""
    return leaf.at[6:].set(77) if leaf.ndim == 3 and leaf.shape[0] == 8 else leaf


def test_dims_of_a_stored_array_come_into_the_order_of_the_value_and_back():
    """Stored are the dims 2, 0 and 1 of a value, in this order: dim i of the value is dim order[i] of the array."""
    value = np.arange(24).reshape(2, 3, 4)
    stored, store = value.transpose(2, 0, 1), SimpleNamespace(order=lambda ndim: (1, 2, 0))
    np.testing.assert_array_equal(_in_order(stored, store), value)
    np.testing.assert_array_equal(_in_stored_order(value, store), stored)

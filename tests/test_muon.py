"""Muon on shards is ``optax.contrib.muon`` on one device, for every mesh and in every place where it may run."""

import jax
import optax
import pytest

from tests.support import AXES, Model, assert_same_params, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import (
    create_train_state,
    make_train_step,
    matrix_dimensions,
    muon,
)

STEPS = 10
RATE = 0.02
TOLERANCE = 1e-5


def reference(model, **options):
    """Parameters after ten steps of optax's own on one device, with the same leaves taken for matrices."""
    params = jax.jit(model.init)(jax.random.key(0), data()["x"])["params"]
    dims = matrix_dimensions()(params)
    tx = optax.contrib.muon(RATE, muon_weight_dimension_numbers=dims, **options)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(mean_loss)(params, model.apply, data()), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params, state


def trained(model, mesh, tx, **options):
    state = create_train_state(model, tx, mesh, jax.random.key(0), data()["x"], batch_axes=AXES, whole_ok=True)
    step = make_train_step(mean_loss, mesh, AXES, whole_ok=True, **options)
    for _ in range(STEPS):
        state, _ = step(state, data(), jax.random.key(1))
    return state


@pytest.mark.parametrize("dp, fsdp_size", [(1, 8), (4, 2), (2, 4), (1, 1)])
def test_ten_steps(dp, fsdp_size):
    state = trained(Model(wrap=fsdp), mesh_of(dp, fsdp_size), muon(RATE))
    want, want_state = reference(Model())
    assert_same_params(state.params, want, TOLERANCE)

"""Tests of parity on one device: wrapping changes no values on a mesh of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import Model, data, fsdp, mean_loss, plain
from xlstm_jax.distributed import DeviceMeshManager, create_train_state, make_train_step, unbox

STEPS = 3


def trained(wrap, learning_rate=1e-2):
    """Returns the losses of some steps of AdamW and the last parameters, on a mesh of the first device."""
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 1}, devices=jax.devices()[:1])
    batch, key = data(), jax.random.key(0)
    tx = optax.adamw(learning_rate)
    state = create_train_state(Model(wrap=wrap), tx, mesh, key, batch["x"], batch_axes="fsdp", allow_replicated=True)
    step = make_train_step(mean_loss, mesh, "fsdp", allow_replicated=True)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(unbox(state.params))


@pytest.mark.parametrize("options", [{}, {"gather_dtype": jnp.float32}, {"reshard_after_forward": True}], ids=str)
def test_wrapped_model_on_a_single_device_trains_like_the_plain_model(options):
    losses, params = trained(fsdp(**options))
    want_losses, want = trained(plain)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, want)
    other_losses, _ = trained(plain, learning_rate=2e-2)
    assert not np.allclose(other_losses, want_losses, rtol=1e-3)  # guard: losses depend on the rate

"""Gradients that a loss takes itself with respect to a number that all devices share, such as a noise level.

The reference is the same loss on one device: its inner gradient is of the mean over the whole batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from tests.support import AXES, FLOAT32_ROUNDING, KEPT, data, fsdp, mesh_of, train_on_one_device, unbox
from xlstm_jax.distributed import create_train_state, make_train_step

BATCH = data()


def mean_over_devices(gradient, number):
    """Returns the gradient as docs/training.md takes the gradient: of this device's mean, averaged over devices."""
    return lax.pmean(gradient(lax.pcast(number, AXES, to="varying")), AXES)


def on_one_device(gradient, number):
    return gradient(number)


def loss_by(inner):
    def loss_fn(params, apply_fn, batch, rng=None):
        def error(level):
            return jnp.mean((apply_fn({"params": params}, level * batch["x"]) - batch["y"]) ** 2)

        return error(1.0) + inner(jax.grad(error), jnp.float32(1.5)) ** 2

    return loss_fn


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_inner_gradient_by_a_shared_number_is_that_of_one_device_once_averaged(check_vma):
    model, mesh = nn.Dense(4), mesh_of(2, 4)
    wrapped = fsdp(nn.Dense)(4)

    def trained(inner):
        state = create_train_state(wrapped, KEPT, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)
        params = jax.device_get(unbox(state.params))
        state, metrics = make_train_step(loss_by(inner), mesh, AXES, check_vma=check_vma)(
            state, BATCH, jax.random.key(1)
        )
        return params, metrics["loss"], unbox(state.opt_state)

    params, loss, gradients = trained(mean_over_devices)
    _, want, losses = train_on_one_device(model, KEPT, params, loss_by(on_one_device), BATCH)
    np.testing.assert_allclose(loss, losses[0], rtol=FLOAT32_ROUNDING)
    for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=FLOAT32_ROUNDING, atol=FLOAT32_ROUNDING)
    _, without, _ = trained(on_one_device)  # guard: without the average both modes are wrong
    assert abs(float(without) - losses[0]) > 0.05 * losses[0]

"""What a model keeps beside its parameters is carried by state and step, as one device with the whole batch would."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import AXES, assert_same_params, fsdp, mesh_of
from tests.vision_models import ResNet
from xlstm_jax.distributed import create_train_state, make_train_step

KEY = jax.random.key(0)
ROWS = 16
IMAGES = jax.random.normal(jax.random.key(1), (ROWS, 6, 6, 3)) * (1 + jnp.arange(ROWS) % 5)[:, None, None, None]
LABELS = jnp.arange(ROWS) * 7 % 4
BATCH = {"image": IMAGES, "label": LABELS}
WRAPPED = fsdp(min_weight_size=64)
MODEL = ResNet(AXES, WRAPPED)


def loss_fn(params, apply_fn, batch, rng, collections):
    del rng
    logits, updated = apply_fn({"params": params, **collections}, batch["image"], mutable=list(collections))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), updated


TX = optax.adamw(1e-2)


@cache
def one_device(steps, minibatches=1):
    """Parameters, batch statistics and the losses of a plain model on one device."""
    model = ResNet()
    variables = jax.jit(model.init)(KEY, IMAGES)
    params, kept = variables["params"], {"batch_stats": variables["batch_stats"]}
    opt_state = TX.init(params)

    @jax.jit
    def step(params, kept, opt_state):
        (loss, kept), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, model.apply, BATCH, None, kept)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), kept, opt_state, loss, grads

    losses = []
    for _ in range(steps):
        params, kept, opt_state, loss, _ = step(params, kept, opt_state)
        losses.append(float(loss))
    return params, kept, losses


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_resnet_trains_as_on_one_device(check_vma):
    mesh = mesh_of(2, 4)
    state = create_train_state(MODEL, TX, mesh, KEY, IMAGES, batch_axes=AXES)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)
    losses = []
    for _ in range(3):
        state, metrics = step(state, BATCH, KEY)
        losses.append(float(metrics["loss"]))
    params, kept, want = one_device(3)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert_same_params(state.params, params, 1e-4)
    assert_same_params(dict(state.collections), kept)
    assert step._cache_size() == 1

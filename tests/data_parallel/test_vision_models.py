"""Tests of a residual network with batch statistics and a diffusion U-Net: training equals one device.

Convolutions have kernels of rank 4, attention of rank 3; BatchNorm has statistics of the global batch: with the batch
axes as ``axis_name`` the statistics are sums over all devices, forward and backward.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support import AXES, assert_same_params, fsdp, mesh_of, normal
from tests.vision_models import ResNet, UNet
from xlstm_jax.distributed import create_train_state, make_train_step
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

KEY, STEPS, ROWS = jax.random.key(0), 3, 16
SCALES = np.float32(1 + np.arange(ROWS) % 5)[:, None, None, None] / 4  # of examples: no device's share is the mean
IMAGES = normal(1, (ROWS, 4, 4, 3)) * SCALES
NOISE = normal(2, IMAGES.shape)
BATCH = {
    "image": IMAGES,
    "label": np.arange(ROWS) * 7 % 4,
    "noise": NOISE,
    "level": np.float32(0.5 + np.arange(ROWS)) / ROWS,
}


def classify(params, apply_fn, batch, rng, collections):
    del rng
    logits, updated = apply_fn({"params": params, **collections}, batch["image"], mutable=list(collections))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), updated


def denoise(params, apply_fn, batch, rng, collections=None):
    """Returns the loss of predicting the noise in an image mixed with noise at some level."""
    level = batch["level"][:, None, None, None]
    noisy = jnp.sqrt(1 - level) * batch["image"] + jnp.sqrt(level) * batch["noise"]
    loss = jnp.mean((apply_fn({"params": params}, noisy, batch["level"]) - batch["noise"]) ** 2)
    return loss if collections is None else (loss, collections)


# The optimizer state begins with the gradients that the optimizer received.
KEEP = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), lambda g, _, params=None: (g, g)
)
# A gradient that vanishes (bias of attention's keys) is pure rounding; this eps keeps its update small.
TX = optax.chain(KEEP, optax.adamw(1e-3, eps=1e-3))

MESH, WRAP = mesh_of(2, 4), fsdp(min_weight_size=16)  # scales and biases of norms are split, too
CASES = {
    "resnet": (ResNet, {"axis_name": AXES}, classify, (IMAGES,)),
    "unet": (UNet, {}, denoise, (IMAGES, BATCH["level"])),
}


@cache
def one_device(name):
    """Returns (loss, gradients) of each step, and the final parameters and collections, on one device."""
    cls, _, loss_fn, inputs = CASES[name]
    model = cls()
    kept = dict(jax.jit(model.init)(KEY, *inputs))
    params = kept.pop("params")
    opt_state = TX.init(params)

    @jax.jit
    def step(params, kept, opt_state):
        loss_and_grads = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, kept), grads = loss_and_grads(params, model.apply, BATCH, None, kept)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), kept, opt_state, loss

    seen = []
    for _ in range(STEPS):
        params, kept, opt_state, loss = step(params, kept, opt_state)
        seen.append((loss, opt_state[0]))
    return seen, params, kept


@cache
def sharded(name):
    cls, options, _, inputs = CASES[name]
    return create_train_state(cls(wrap=WRAP, **options), TX, MESH, KEY, *inputs, batch_axes=AXES)


@pytest.mark.slow  # parity of leaves of every rank stands in test_parity and test_staging
@pytest.mark.parametrize("name, check_vma, remat", [("resnet", False, True), ("unet", True, False)])
def test_resnet_and_unet_train_as_on_a_single_device(name, check_vma, remat):
    cls, options, loss_fn, _ = CASES[name]
    apply_fn = cls(wrap=WRAP, remat=remat, **options).apply
    state = jax.tree.map(jnp.copy, sharded(name).replace(apply_fn=apply_fn))
    split = {path for path, leaf in leaves_with_path(state.params) if is_box(leaf)}
    assert {np.ndim(leaf.value) for path, leaf in leaves_with_path(state.params) if path in split} >= {2, 4}
    step = make_train_step(loss_fn, MESH, AXES, check_vma=check_vma)

    want, params, kept = one_device(name)
    for loss, grads in want:
        state, metrics = step(state, BATCH, KEY)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        assert_same_params(state.opt_state[0], grads, 5e-5)
    # A bias that began at 0 has moved by 3 learning rates, each with the relative error of the gradient.
    assert_same_params(state.params, params, 1e-4)
    if kept:
        assert_same_params(dict(state.collections), kept)

"""Tests of int8 products of AQT (``aqtp``) as ``dot_general`` of Flax's layers: training equals one device."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import AXES, fsdp, mesh_of, plain
from xlstm_jax.distributed import create_train_state, make_train_step, unbox

pytestmark = pytest.mark.filterwarnings("ignore:Implicit conversion of an array to a dtype:DeprecationWarning")
X = jax.random.normal(jax.random.key(1), (16, 16))


def product(bits_of_weight_gradients):
    config = pytest.importorskip("aqt.jax.v2.config")
    made = config.config_v4(fwd_bits=8, dlhs_bits=8, drhs_bits=bits_of_weight_gradients)
    config.set_stochastic_rounding(made, False, False, "jax.uniform")
    return made


class Int8(nn.Module):
    product: object
    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        dense = partial(self.wrap(nn.Dense), dot_general=self.product)
        return dense(4)(nn.tanh(dense(32)(x)))


def loss_fn(params, apply_fn, x, rng):
    return jnp.mean((apply_fn({"params": params}, x) - x[:, :4]) ** 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_training_with_int8_products_matches_a_single_device(check_vma):
    off, text = difference_from_one_device(check_vma, None)
    assert off < 1e-6
    assert "tensor<32x4xi8>) -> tensor<2x4xi32>" in text and not re.search(r"xi8>.*all_gather", text)


def test_int8_weight_gradients_differ_slightly_from_a_single_device_by_local_scales():
    """Gradients of int8 weights differ slightly from one device: their product sums over examples with local scales."""
    off, _ = difference_from_one_device(True, 8)
    assert 1e-5 < off < 1e-2


def difference_from_one_device(check_vma, bits_of_weight_gradients):
    tx, mesh, made = optax.sgd(0.1), mesh_of(2, 4), product(bits_of_weight_gradients)
    state = create_train_state(Int8(made, fsdp), tx, mesh, jax.random.key(0), X, batch_axes=AXES)
    step, model = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma), Int8(made)
    text = step.lower(state, X, jax.random.key(2)).as_text()
    params = model.init(jax.random.key(0), X)["params"]
    grad = jax.jit(jax.grad(lambda params: loss_fn(params, model.apply, X, None)))
    for _ in range(3):
        state, _ = step(state, X, jax.random.key(2))
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grad(params))
    off = jax.tree.map(lambda a, b: np.abs(a - b).max(), jax.device_get(unbox(state.params)), jax.device_get(params))
    return max(jax.tree.leaves(off)), text

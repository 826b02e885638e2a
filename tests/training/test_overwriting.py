"""Flax's fp8 products: scales and histories, whose gradient is their next value, are those of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import AXES, fsdp, mesh_of, plain
from xlstm_jax.distributed import create_train_state, make_train_step, unbox
from xlstm_jax.distributed.training.collections import OVERWRITTEN

X = jax.random.normal(jax.random.key(1), (16, 16)) * (1 + jnp.arange(16) % 5)[:, None]
STEPS = 10


OPS = [partial(op, amax_history_length=4) for op in (nn.Fp8DirectDotGeneralOp, nn.Fp8DotGeneralOp)]


class Fp8(nn.Module):
    wrap: object = plain
    op: object = OPS[0]

    @nn.compact
    def __call__(self, x):
        dense = self.wrap(nn.Dense)
        x = nn.tanh(dense(32, dot_general_cls=self.op)(x))
        return dense(4, dot_general_cls=self.op)(x)


def loss_fn(params, apply_fn, x, rng, collections):
    out, updated = apply_fn({"params": params, **collections}, x, mutable=list(collections))
    return jnp.mean((out - x[:, :4]) ** 2), updated


def on_one_device(tx, minibatches, op):
    """Ten steps of the plain model, as Flax's own ``TrainState`` overwrites."""
    model = Fp8(op=op)
    variables = model.init(jax.random.key(0), X)
    params, scales = variables["params"], variables[OVERWRITTEN]
    opt_state = tx.init(params)

    def loss(params, scales, x):
        return loss_fn(params, model.apply, x, None, {OVERWRITTEN: scales})[0]

    @jax.jit
    def step(params, scales, opt_state):
        total = jax.tree.map(jnp.zeros_like, params)
        for part in range(minibatches):
            rows = X.reshape(8, minibatches, -1, 16)[:, part].reshape(-1, 16)  # each device's own part
            grads, scales = jax.grad(loss, (0, 1))(params, scales, rows)
            total = jax.tree.map(lambda sum_, g: sum_ + g / minibatches, total, grads)
        updates, opt_state = tx.update(total, opt_state, params)
        return optax.apply_updates(params, updates), scales, opt_state

    kept = []
    for _ in range(STEPS):
        params, scales, opt_state = step(params, scales, opt_state)
        kept.append((params, scales))
    return kept


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated")
@pytest.mark.parametrize(
    "check_vma, op, minibatches",
    [(True, OPS[0], 1), (False, OPS[0], 2), (True, OPS[1], 1)],
    ids=["direct", "minibatches", "qdq"],
)
def test_scales_after_each_of_ten_steps_are_those_of_one_device(check_vma, op, minibatches):
    tx, mesh = optax.sgd(0.05), mesh_of(2, 4)
    state = create_train_state(Fp8(fsdp, op), tx, mesh, jax.random.key(0), X, batch_axes=AXES)
    step = make_train_step(loss_fn, mesh, AXES, minibatches, check_vma=check_vma)
    start = jax.device_get(state.collections[OVERWRITTEN])
    for params, scales in on_one_device(tx, minibatches, op):
        state, _ = step(state, X, jax.random.key(2))
        # The same rounding to fp8 on both sides: 8 devices change scales by a power of two alone.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.collections[OVERWRITTEN], scales)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), unbox(state.params), params)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), start, jax.device_get(state.collections[OVERWRITTEN]))
    assert all(jax.tree.leaves(moved))  # guard: all were overwritten

"""Tests of parameters that a loss reads twice, such as tied embeddings: one gather and one scatter per step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import FLOAT32_ROUNDING, equations, integers
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    nnx_model,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel import leaf

AXES = ("dp", "fsdp")
TOKENS = integers(0, (8, 5), 0, 64)


class Tied(nn.Module):
    """A table read by a lookup and by the head; ``head_in_remat`` puts the second read into ``nn.remat``."""

    head_in_remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32, name="embed")
        x = nn.tanh(nn.Dense(32, name="dense")(embed(tokens)))
        attend = nn.remat(lambda embed, x: embed.attend(x)) if self.head_in_remat else nn.Embed.attend
        return attend(embed, x)


class TiedNnx(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.dense = nnx.Embed(64, 32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(nnx.tanh(self.dense(self.embed(tokens))))


def loss_of(apply, params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, batch), batch).mean()


def linen_loss(params, apply_fn, batch, rng):
    return loss_of(lambda params, batch: apply_fn({"params": params}, batch), params, batch)


def past_the_wrapper(params, apply_fn, batch, rng):
    """Loss whose head reads the box without a wrapped module in between."""
    x = nn.tanh(jnp.take(params["embed"]["embedding"].unbox(), batch, axis=0))
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["embed"]["embedding"].T, batch).mean()


def step_and_state(model, where, loss, check_vma=True):
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
    model = shard_modules(model, where, "fsdp", min_weight_size=64)
    state = create_train_state(model, optax.sgd(0.5), mesh, jax.random.key(1), TOKENS, batch_axes=AXES)
    return make_train_step(loss, mesh, AXES, check_vma=check_vma), state


def of_the_table(step, state):
    """Returns the number of gathers of the table (64 x 32 values in four shards), and of scatters of its gradient."""
    found = [eqn for _, eqn in equations(step.trace(state, TOKENS, jax.random.key(2)).jaxpr)]
    gathers = [e for e in found if e.primitive.name.startswith("all_gather") and e.outvars[0].aval.size == 64 * 32]
    scatters = [e for e in found if e.primitive.name == "reduce_scatter" and e.invars[0].aval.size == 64 * 32]
    return len(gathers), len(scatters)


CASES = {
    "linen": (Tied(), (nn.Embed, nn.Dense), linen_loss),
    "the whole model": (Tied(), lambda path, module: path == "", linen_loss),
    "past the wrapper": (Tied(), (nn.Embed, nn.Dense), past_the_wrapper),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_tied_embedding_is_gathered_once_and_scattered_once(case, check_vma):
    step, state = step_and_state(*CASES[case], check_vma)
    assert of_the_table(step, state) == (1, 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_tied_embedding_update_matches_a_single_device(case):
    model, _, loss = CASES[case]
    step, state = step_and_state(*CASES[case])
    before = jax.tree.map(np.array, unbox(state.params))
    after = unbox(step(state, TOKENS, jax.random.key(2))[0].params)
    apply = (lambda params, batch: model.apply({"params": params}, batch)) if loss is linen_loss else None

    def plain(params):
        if apply:
            return loss_of(apply, params, TOKENS)
        table = params["embed"]["embedding"]
        return optax.softmax_cross_entropy_with_integer_labels(nn.tanh(table[TOKENS]) @ table.T, TOKENS).mean()

    want = jax.tree.map(lambda p, g: p - 0.5 * g, before, jax.grad(plain)(before))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=FLOAT32_ROUNDING, atol=1e-7), after, want)
    table, moved = before["embed"]["embedding"], want["embed"]["embedding"]
    assert np.abs(table - moved).max() > 1e-4  # guard: the gradient is not 0


def test_tied_nnx_embedding_is_gathered_once_and_scattered_once():
    step, state = step_and_state(nnx_model(TiedNnx), (nnx.Embed, nnx.Linear), linen_loss)
    assert of_the_table(step, state) == (1, 1)


def test_tied_embedding_read_within_remat_is_gathered_separately():
    step, state = step_and_state(Tied(head_in_remat=True), (nn.Embed, nn.Dense), linen_loss)
    gathers, scatters = of_the_table(step, state)
    assert gathers >= 2 and scatters == 2
    step(state, TOKENS, jax.random.key(2))  # no array of the inner trace leaks


def test_tied_embedding_read_within_jax_checkpoint_is_scattered_separately():
    def loss(params, apply_fn, batch, rng):
        table = params["embed"]["embedding"]
        inner = jax.checkpoint(lambda x: jnp.sin(x @ table.unbox()))  # closes over the shard
        return jnp.mean((inner(jnp.ones((2, 64))) @ table.T) ** 2)

    step, state = step_and_state(Tied(), (nn.Embed, nn.Dense), loss)
    assert of_the_table(step, state)[1] == 2


def test_guard_tied_embedding_is_gathered_twice_without_earlier_gather(monkeypatch):
    monkeypatch.setattr(leaf, "earlier_gather", lambda *args: (None, None))
    step, state = step_and_state(*CASES["linen"])
    gathers, scatters = of_the_table(step, state)
    assert gathers >= 2 and scatters == 2

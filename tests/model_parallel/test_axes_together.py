"""Tests of three model axes on a mesh: ten accumulated and clipped steps equal one device.

``tests/exactness`` tests pairs of an axis and another feature. The model here has all layers that an axis splits:
embedding, attention and feed-forward over "tp", tokens in between too (unless "cp" splits them), experts over "ep",
and a sequence over "cp". All axes except "tp" split the batch.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import KEPT, assert_same_params, fsdp, integers, plain, train_on_one_device
from xlstm_jax.distributed import (
    DeviceMeshManager,
    LMHead,
    create_train_state,
    make_train_step,
    muon,
)
from xlstm_jax.distributed.model_parallel import (
    Experts,
    SplitAttention,
    SplitEmbed,
    SwiGLU,
    context_attention,
    context_positions,
    join_tokens,
    on_split_input,
    split_tokens,
)
from xlstm_jax.distributed.optimizers import matrix_dimensions

VOCAB, WIDTH, LENGTH, ROWS = 24, 8, 8, 16
TOKENS = integers(1, (ROWS, LENGTH), 0, VOCAB)
LABELS = np.where(np.arange(ROWS * LENGTH).reshape(TOKENS.shape) % 3 == 0, -100, np.roll(TOKENS, -1, axis=1))
BATCH_AXES = ("dp", "fsdp", "ep", "cp")
BATCH_SPEC = P(BATCH_AXES[:-1], "cp")


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH, bias_init=nn.initializers.normal(0.5))(x)))


def attend(query, key, value, impl):
    """Attention with position-dependent factors, so that each device needs the positions of its tokens."""
    angle = context_positions(query.shape[1]).astype(jnp.float32)[None, :, None, None] / 3.0
    return context_attention(query * jnp.cos(angle), key * jnp.cos(angle), value, impl=impl)


class Layer(nn.Module):
    mixture: bool
    sequence: bool
    impl: str

    @nn.compact
    def __call__(self, x, _=None):
        split = {"sequence_dim": 1} if self.sequence else {}
        norm = on_split_input(nn.RMSNorm, "tp") if self.sequence else nn.RMSNorm
        attention = SplitAttention(4, 2, 2, partial(attend, impl=self.impl), **split, name="attention")
        x = x + attention(norm(name="norm")(x))
        x = x + SwiGLU(16, **split, name="gated")(x)
        if self.mixture:
            whole = join_tokens(x, 1, "tp") if self.sequence else x
            mixed = Experts(Expert(), 4, 2, block_size=4, name="mixture")(whole)
            x = x + (split_tokens(mixed, 1, "tp") if self.sequence else mixed)
        return x, None


class Decoder(nn.Module):
    mixture: bool = False
    sequence: bool = False
    impl: str = "ring"
    stacked: bool = False  # two layers in a scan, computed again
    wrap: Any = plain

    @nn.compact
    def __call__(self, tokens, labels):
        split = {"sequence_dim": 1} if self.sequence else {}
        x = self.wrap(SplitEmbed)(VOCAB, WIDTH, **split, name="embed")(tokens)
        layers = self.wrap(Layer)
        if self.stacked:
            again = nn.remat(layers, prevent_cse=False)
            layers = nn.scan(again, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers(self.mixture, self.sequence, self.impl, name="layers")(x, None)
        norm = on_split_input(nn.RMSNorm, "tp") if self.sequence else nn.RMSNorm
        x = self.wrap(norm)(name="norm")(x)
        return self.wrap(LMHead)(VOCAB, vocab_axis="tp", chunk_size=5, **split, name="head").losses(x, labels)


def loss_fn(params, apply_fn, batch, rng):
    del rng
    found = apply_fn({"params": params}, *batch)
    return found.loss.sum() + 1e-3 * (found.log_normalizer**2).sum(), (batch[1] >= 0).sum()


HEADS = {  # without a bias: nothing else tells
    "*/attention/out/kernel": optax.contrib.MuonDimensionNumbers((0, 1), 2),
    "*/attention/*/kernel": optax.contrib.MuonDimensionNumbers(0, (1, 2)),
}
MUON = muon(1e-2, muon_weight_dimension_numbers=matrix_dimensions(HEADS))


# --------------------------------------------------------------------------------------------------------- both sides


def mesh_of(sizes):
    sizes = {"dp": 2, "fsdp": 2, "tp": 1, "ep": 1, "cp": 1} | sizes
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return DeviceMeshManager.create_device_mesh(sizes, devices=devices)


@cache
def initial():
    model = Decoder(True)
    return jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0), TOKENS, LABELS)["params"])


# ---------------------------------------------------------------------------------------------------------- the meshes

MESHES = [
    {"fsdp": 2, "tp": 2, "cp": 2},
    {"fsdp": 2, "tp": 2, "ep": 2},
    {"fsdp": 2, "ep": 2, "cp": 2},
    {"tp": 2, "ep": 2, "cp": 2},
    {"dp": 2, "tp": 2, "cp": 2},
    {"dp": 2, "fsdp": 2, "tp": 2},
    {"dp": 2, "fsdp": 2, "ep": 2},
    {"dp": 2, "fsdp": 2, "cp": 2},
    {"fsdp": 2, "cp": 4},
    {"fsdp": 4, "tp": 2},
    {"fsdp": 2, "ep": 4},
]
CLIPPED = {name: optax.chain(KEPT, optax.clip_by_global_norm(0.1), tx) for name, tx in {
    "adamw": optax.adamw(1e-2),
    "muon": MUON,
}.items()}  # fmt: skip


@cache
def ten_steps_of_one_device(optimizer):
    model = Decoder(True)
    return train_on_one_device(model, CLIPPED[optimizer], initial(), loss_fn, (TOKENS, LABELS), 10)


HOW = [("adamw", True), ("muon", False), ("adamw", False), ("muon", True)]
RUNS = [(shape, *HOW[(number + turn) % 4]) for turn in range(4) for number, shape in enumerate(MESHES)]


@pytest.mark.one_in(44)
@pytest.mark.parametrize("shape, optimizer, check_vma", RUNS, ids=str)
def test_ten_accumulated_steps_match_a_single_device_on_meshes_with_model_axes(shape, optimizer, check_vma):
    """Ten clipped, accumulated steps equal one device; "tp" splits tokens between layers unless the mesh has "cp"."""
    mesh = mesh_of({"dp": 1, "fsdp": 1} | shape)
    model = Decoder(
        True, "cp" not in shape, "ulysses" if shape.get("cp") == 2 else "ring", wrap=partial(fsdp, min_weight_size=16)
    )
    batch = TOKENS, LABELS
    state = create_train_state(
        model, CLIPPED[optimizer], mesh, jax.random.key(0), *batch, batch_axes=BATCH_AXES[:-1], allow_replicated=True
    )
    params, opt_state, losses = ten_steps_of_one_device(optimizer)
    how = {"batch_spec": BATCH_SPEC, "layout": "zigzag", "num_minibatches": 2, "weighted": True, "check_vma": check_vma}
    step = make_train_step(loss_fn, mesh, **how, allow_replicated=True)
    for want in losses:
        state, metrics = step(state, batch, jax.random.key(0))
        assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)
    assert_same_params(state.opt_state[0], opt_state[0])
    assert_same_params(state.params, params, 1e-4)  # ten times rounded, and divided by small second moments
    assert losses[-1] < 0.8 * losses[0]  # guard: the loss decreases

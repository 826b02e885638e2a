"""NNX models in the manner of Flax's ``examples/gemma`` and of ``jax-ml/bonsai``, sharded by the five lines.

The models know nothing of the library. Each trains two steps on one device by ``nnx.jit`` and ``nnx.value_and_grad``,
and two steps on a mesh, under a plain mesh and under ``jax.set_mesh`` with explicit axes.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from tests.nnx_models import Einsum
from tests.support import AXES, assert_same_params, split_share
from xlstm_jax.distributed import (
    create_train_state,
    make_train_step,
    nnx_model,
    shard_batch,
    shard_modules,
    unbox,
)

KEY = jax.random.key(0)
ROWS, LENGTH, VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, LAYERS = 16, 8, 32, 16, 4, 2, 8, 48, 2
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))
IMAGES = np.random.default_rng(1).normal(size=(ROWS, 8, 8, 3)).astype(np.float32) * (1 + np.arange(ROWS) % 3)[
    :, None, None, None
].astype(np.float32)
TX = optax.adamw(1e-2, eps=1e-2)


def rope(x, base):
    """Rotary embeddings of [b, t, h, d]; the second half of a head is the partner of the first."""
    angles = jnp.arange(x.shape[1])[:, None] * base ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


# --------------------------------------------------------------------------------------------- as Flax's examples/gemma


class AttentionType(enum.Enum):
    GLOBAL = 1
    LOCAL_SLIDING = 2


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    attention_types: tuple[AttentionType, ...] = (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL)
    window: int = 3
    logits_cap: float = 50.0
    final_cap: float = 30.0
    sows: bool = False


class RMSNorm(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.zeros_init()(rngs.params(), dim))

    def __call__(self, x):
        normed = x * jnp.reciprocal(jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-06))
        return normed * (1 + jnp.expand_dims(self.scale[...], range(x.ndim - 1)))


class GemmaAttention(nnx.Module):
    def __init__(self, config: GemmaConfig, attn_type: AttentionType, *, rngs: nnx.Rngs):
        self.config, self.attn_type = config, attn_type
        self.q_einsum = Einsum("BTD,NDH->BTNH", (HEADS, WIDTH, HEAD), rngs=rngs)
        self.kv_einsum = nnx.Einsum("BSD,CKDH->CBSKH", (2, KV_HEADS, WIDTH, HEAD), rngs=rngs)
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (HEADS, HEAD, WIDTH), rngs=rngs)
        self._query_norm, self._key_norm = RMSNorm(HEAD, rngs=rngs), RMSNorm(HEAD, rngs=rngs)

    @property
    def head_dim(self):
        return self.attn_vec_einsum.shape[1]

    def __call__(self, x, attn_mask):
        query = self._query_norm(self.q_einsum(x))
        key, value = self.kv_einsum(x)
        base = 10_000.0 if self.attn_type == AttentionType.LOCAL_SLIDING else 1_000_000.0
        query, key = rope(query, base) * self.head_dim**-0.5, rope(self._key_norm(key), base)
        key, value = (jnp.repeat(part, HEADS // KV_HEADS, axis=2) for part in (key, value))
        logits = jnp.einsum("BTNH,BSNH->BTNS", query, key)
        logits = jnp.tanh(logits / self.config.logits_cap) * self.config.logits_cap
        if self.attn_type == AttentionType.LOCAL_SLIDING:
            ones = jnp.ones_like(attn_mask)
            attn_mask = jnp.triu(ones, -self.config.window + 1) * jnp.tril(ones, self.config.window - 1) * attn_mask
        probs = jax.nn.softmax(jnp.where(jnp.expand_dims(attn_mask, -2), logits, -2.3e38), axis=-1)
        if self.config.sows:
            self.sow(nnx.Intermediate, "probs", probs)
        return self.attn_vec_einsum(jnp.einsum("BTNS,BSNH->BTNH", probs, value))


class GemmaFeedForward(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj, self.up_proj = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN)
        self.down_proj = linear(HIDDEN, WIDTH)

    def __call__(self, x):
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class GemmaBlock(nnx.Module):
    def __init__(self, config: GemmaConfig, attn_type: AttentionType, *, rngs: nnx.Rngs):
        self.pre_attention_norm, self.post_attn_norm = RMSNorm(WIDTH, rngs=rngs), RMSNorm(WIDTH, rngs=rngs)
        self.pre_ffw_norm, self.post_ffw_norm = RMSNorm(WIDTH, rngs=rngs), RMSNorm(WIDTH, rngs=rngs)
        self.attn, self.mlp = GemmaAttention(config, attn_type, rngs=rngs), GemmaFeedForward(rngs=rngs)
        self.sows = config.sows

    def __call__(self, x, attn_mask):
        x = x + self.post_attn_norm(self.attn(self.pre_attention_norm(x), attn_mask))
        if self.sows:
            self.sow(nnx.Intermediate, "rs_after_attention", x)
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


class Embedder(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.input_embedding = nnx.Param(nnx.initializers.normal(0.3)(rngs.params(), (VOCAB, WIDTH)))

    def encode(self, tokens):
        x = self.input_embedding[(tokens,)]
        return x * jnp.sqrt(x.shape[-1]).astype(x.dtype)

    def decode(self, x):
        return jnp.dot(x, self.input_embedding[...].T)


class Gemma(nnx.Module):
    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        self.embedder = Embedder(rngs=rngs)
        self.layers = nnx.List([GemmaBlock(config, attn_type, rngs=rngs) for attn_type in config.attention_types])
        self.final_norm, self.final_cap = RMSNorm(WIDTH, rngs=rngs), config.final_cap

    def __call__(self, tokens):
        mask = jnp.tril(jnp.ones((tokens.shape[-1],) * 2, jnp.int32))[None] * jnp.ones_like(tokens)[:, :, None]
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return jnp.tanh(self.embedder.decode(self.final_norm(x)) / self.final_cap) * self.final_cap


# --------------------------------------------------------------------------------------------------- as jax-ml/bonsai


@dataclasses.dataclass(slots=True, frozen=True)
class ShardConfig:
    """Where bonsai's models put their arrays under an explicit mesh; None: nowhere."""

    kernel: PartitionSpec | None = None
    activation: PartitionSpec | None = None


class ShardedLinear(nnx.Module):
    def __init__(self, din: int, dout: int, shd: ShardConfig, *, use_bias: bool = True, rngs: nnx.Rngs):
        init = jax.nn.initializers.lecun_normal()
        self.kernel = nnx.Param(init(rngs.params(), (din, dout), out_sharding=shd.kernel))
        self.bias = nnx.Param(jnp.zeros(dout)) if use_bias else nnx.data(jnp.zeros(dout))

    def __call__(self, x, *, out_sharding):
        return jnp.matmul(x, self.kernel[...], out_sharding=out_sharding) + self.bias


class ShardedEmbedding(nnx.Embed):
    def __call__(self, inputs, *, out_sharding):
        (embedding,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        return embedding.at[inputs].get(out_sharding=out_sharding)

    def attend(self, query, *, out_sharding):
        query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        return jnp.dot(query, embedding.T, out_sharding=out_sharding)


class BonsaiNorm(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.scale, self.eps = nnx.Param(jax.nn.initializers.zeros(rngs.params(), dim)), 1e-6

    @jax.named_scope("rms_norm")
    def __call__(self, x):
        normed = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        return normed * (1.0 + self.scale[...])


class BonsaiLayer(nnx.Module):
    def __init__(self, shd: ShardConfig, layer_idx: int, *, rngs: nnx.Rngs):
        linear = partial(ShardedLinear, shd=shd, rngs=rngs)
        self.shd, self.use_sliding = shd, layer_idx % 2 == 0
        self.q_proj, self.k_proj, self.v_proj = (
            linear(WIDTH, heads * HEAD, use_bias=False) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.o_proj = linear(HEADS * HEAD, WIDTH)
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(WIDTH, HIDDEN),
            linear(WIDTH, HIDDEN),
            linear(HIDDEN, WIDTH),
        )
        self.input_layernorm, self.post_attention_layernorm = BonsaiNorm(WIDTH, rngs=rngs), BonsaiNorm(WIDTH, rngs=rngs)

    def __call__(self, x, masks):
        put = {"out_sharding": self.shd.activation}
        h, heads = self.input_layernorm(x), (*x.shape[:-1], -1, HEAD)
        q, k, v = (proj(h, **put).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (jnp.repeat(part, HEADS // KV_HEADS, axis=2) for part in (rope(k, 10_000.0), v))
        logits = jnp.einsum("BTNH,BSNH->BNTS", rope(q, 10_000.0), k, **put) * HEAD**-0.5
        logits = jnp.where(masks["sliding" if self.use_sliding else "causal"], logits, jnp.finfo(jnp.float32).min)
        mixed = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(logits), v, **put)
        x = x + self.o_proj(mixed.reshape(*x.shape[:-1], -1), **put)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(jax.nn.gelu(self.gate_proj(h, **put)) * self.up_proj(h, **put), **put)


class BonsaiDecoder(nnx.Module):
    def __init__(self, shd: ShardConfig, *, rngs: nnx.Rngs):
        self.shd = shd
        self.embed = ShardedEmbedding(VOCAB, WIDTH, rngs=rngs)
        self.embed_scale = jnp.array(WIDTH**0.5, dtype=jnp.float32)  # an array, and no variable
        self.layers = nnx.List([BonsaiLayer(shd, index, rngs=rngs) for index in range(LAYERS)])
        self.norm = BonsaiNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens, out_sharding=self.shd.activation) * self.embed_scale
        past = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
        masks = {"causal": past >= 0, "sliding": (past >= 0) & (past < 3)}
        for layer in self.layers:
            x = layer(x, masks)
        return self.embed.attend(self.norm(x), out_sharding=self.shd.activation)


class VisionLayer(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layer_norm1, self.layer_norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.self_attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.gelu, nnx.Linear(HIDDEN, WIDTH, rngs=rngs))
        self.dropout = nnx.Dropout(0.1, deterministic=True, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.self_attn(self.layer_norm1(x)))
        return x + self.dropout(self.mlp(self.layer_norm2(x)))


class BonsaiVision(nnx.Module):
    """A vision transformer: patches by a convolution, layers made and run as one stack."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.patch_embedding = nnx.Conv(3, WIDTH, (2, 2), strides=(2, 2), padding="valid", rngs=rngs)
        self.position_embedding = nnx.Embed(16, WIDTH, rngs=rngs)
        self.position_ids = jnp.expand_dims(jnp.arange(16), 0)
        # No zeros: a LayerNorm of zeros multiplies gradients, and their rounding, by 1000.
        self.cls_token = nnx.Param(nnx.initializers.normal(0.5)(rngs.params(), (1, 1, WIDTH)))

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return VisionLayer(rngs=rngs)

        self.layers = create(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, images):
        x = self.patch_embedding(images)
        x = x.reshape(x.shape[0], -1, WIDTH) + self.position_embedding(self.position_ids)
        x = jnp.concatenate([jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, WIDTH)), x], axis=1)

        @nnx.remat
        def run(x, layer):
            return layer(x)

        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return self.head(x)[:, :LENGTH]


# ----------------------------------------------------------------------------------------------------------- the tests


@dataclasses.dataclass(frozen=True)
class Case:
    make: Callable[[nnx.Rngs], Any]
    images: bool = False

    @property
    def batch(self):
        inputs = {"inputs": IMAGES if self.images else TOKENS}
        return {
            **inputs,
            "labels": np.roll(TOKENS, -1, axis=1),
            "factor": (1.0 + np.arange(ROWS) % 3).astype("float32"),
        }


CASES = {
    "gemma": Case(lambda rngs: Gemma(GemmaConfig(), rngs=rngs)),
    "gemma that sows": Case(lambda rngs: Gemma(GemmaConfig(sows=True), rngs=rngs)),
    "bonsai decoder": Case(lambda rngs: BonsaiDecoder(ShardConfig(), rngs=rngs)),
    "bonsai vision": Case(lambda rngs: BonsaiVision(rngs=rngs), images=True),
}


def losses_of(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(-1)
    return jnp.mean(losses * batch["factor"])


def of_one_device(case, steps=2, rows=slice(None)):
    """Trains by NNX alone: losses, and the parameters as a nested dict."""
    module = case.make(nnx.Rngs(KEY))
    optimizer = nnx.Optimizer(module, TX, wrt=nnx.Param)
    batch = jax.tree.map(lambda x: x[rows], case.batch)

    @nnx.jit
    def step(module, optimizer):
        def loss_fn(module):
            return losses_of(module(batch["inputs"]), batch)

        loss, grads = nnx.value_and_grad(loss_fn)(module)
        optimizer.update(module, grads)
        return loss

    found = [float(step(module, optimizer)) for _ in range(steps)]
    return found, nnx_model(case.make).unbind(module)["params"]


def loss_fn(params, apply_fn, batch):
    return losses_of(apply_fn({"params": params}, batch["inputs"]), batch)


class Scaled(nnx.Module):
    """Module with an array that is no variable."""

    def __init__(self, rngs):
        self.head = nnx.Linear(LENGTH, VOCAB, rngs=rngs)
        self.scale = jnp.full((LENGTH,), 0.1)

    def __call__(self, inputs):
        return self.head(inputs * self.scale)


def test_loss_without_collections_is_given_the_arrays_of_a_model():
    model, mesh, x = (
        shard_modules(nnx_model(Scaled), min_weight_size=8),
        jax.make_mesh((2, 4), AXES),
        jnp.ones((8, LENGTH)),
    )

    def loss(params, apply_fn, batch):
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    state = jax.eval_shape(lambda: create_train_state(model, TX, mesh, KEY, x, batch_axes=AXES))
    assert state.collections  # guard: the array is in a collection
    after, metrics = jax.eval_shape(make_train_step(loss, mesh, AXES), state, x)
    assert metrics["loss"].shape == () and jax.tree.structure(after) == jax.tree.structure(state)


MESHES = {"plain": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_model_from_outside_trains_as_nnx_on_a_single_device(case, kind, check_vma):
    losses, want = of_one_device(case)
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(MESHES[kind],) * 2)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        model = shard_modules(nnx_model(case.make), min_weight_size=32)
        state = create_train_state(model, TX, mesh, KEY, case.batch["inputs"])
        step = make_train_step(loss_fn, mesh, check_vma=check_vma)
        batch, got = shard_batch(case.batch, mesh, AXES), []
        for _ in losses:
            state, metrics = step(state, batch)
            got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same_params(unbox(jax.device_get(state.params)), want)
    # Guards: nearly all values are split, and devices have different rows.
    assert split_share(state.params) > 0.95
    assert not np.allclose(of_one_device(case, 1, slice(2))[0], losses[0], rtol=1e-3)

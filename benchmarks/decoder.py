"""Decoder in plain Flax, as a user would write it, sharded from outside: the second model of every comparison.

    tokens[b, t] -- embed --> x[b, t, d] -- blocks, one nn.scan over nn.remat --> norm, head --> logits[b, t, vocab]

Grouped-query attention with heads as kernel dims (``nn.DenseGeneral``: rank 3, and 4 if stacked over layers), rotary
positions, RMSNorm, SwiGLU, an embedding that is also the head (``tied``), computed in bfloat16 (``dtype``) with float32
parameters. The model has no code for devices except ``constrain``, which ``jit`` needs; ``decoder`` shards the model by
``shard_modules``, ``baselines.jit_step`` by ``NamedSharding``.

  size              layers x d   heads, of keys   hidden   vocabulary       parameters
  decoder_0.8B      16 x 2048    16, 4            5,632    50,304           0.825e9
  llama3.2_1B       16 x 2048    32, 8            8,192    128,256          1.24e9
  llama3.1_8B       32 x 4096    32, 8            14,336   128,256, untied  8.03e9
  mixture_0.5B      12 x 1024    16, 4            8 x 1408 32,768           0.48e9
  held_out_1k, _8k  8 x 3072     24, 8            8,192    32,000           0.90e9, 1,024 and 8,192 tokens a row

A mixture has experts in place of the MLP, and every expert computes every token (dense dispatch): the output of a token
is the sum of its two best experts, weighted by the router.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from benchmarks.large_models import CONTEXT, Size, inputs_of, next_token_loss
from benchmarks.models import Attention
from xlstm_jax.distributed import shard_modules
from xlstm_jax.forecast.training import Workload

xla_attention: Attention = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
Linear = partial(nn.DenseGeneral, use_bias=False)


@dataclass(frozen=True, kw_only=True)
class DecoderSize(Size):
    """Dims of a decoder.

    Attributes:
      hidden: hidden features of the MLP.
      kv_heads: heads of keys and values.
      tied: whether the embedding is also the head.
      rotary_base: base of the rotary frequencies.
      experts: number of experts in place of each MLP; 0 for an MLP.
      context: tokens of a row.
    """

    hidden: int
    kv_heads: int
    tied: bool = True
    rotary_base: float = 500_000.0
    experts: int = 0
    context: int = CONTEXT
    block: str = "decoder"


SIZES = {
    "decoder_0.8B": DecoderSize(2048, 16, 16, 50_304, hidden=5632, kv_heads=4),
    "llama3.2_1B": DecoderSize(2048, 16, 32, 128_256, hidden=8192, kv_heads=8),
    "llama3.1_8B": DecoderSize(4096, 32, 32, 128_256, hidden=14_336, kv_heads=8, tied=False),
    "mixture_0.5B": DecoderSize(1024, 12, 16, 32_768, hidden=1408, kv_heads=4, experts=8),
    "held_out_1k": DecoderSize(3072, 8, 24, 32_000, hidden=8192, kv_heads=8, context=1024),
    "held_out_8k": DecoderSize(3072, 8, 24, 32_000, hidden=8192, kv_heads=8, context=8192),
    "mixture_small": DecoderSize(256, 2, 4, 2048, hidden=352, kv_heads=2, experts=8),
    "decoder_small": DecoderSize(256, 2, 4, 2048, hidden=704, kv_heads=2),
}


def rotary(x, base):
    """Applies rotary positions to ``x[b, t, h, d]``: rotates pairs of features by angles proportional to t."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * base ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Experts(nn.Module):
    """Mixture of SwiGLU experts: sum of the two best experts for each token of ``y[b, t, d]``, weighted by a router."""

    size: DecoderSize

    @nn.compact
    def __call__(self, y):
        c = self.size
        init = nn.initializers.lecun_normal(batch_axis=(0,))

        def kernel(name, *shape):
            return self.param(name, init, (c.experts, *shape)).astype(y.dtype)

        scores = nn.Dense(c.experts, use_bias=False, name="router")(y.astype(jnp.float32))
        second = jax.lax.top_k(scores, 2)[0][..., 1:]
        weights = nn.softmax(jnp.where(scores >= second, scores, -jnp.inf)).astype(y.dtype)
        gate, up = (jnp.einsum("btd,edh->bteh", y, kernel(name, c.dim, c.hidden)) for name in ("gate", "up"))
        h = nn.silu(gate) * up * weights[..., None]
        return jnp.einsum("bteh,ehd->btd", h, kernel("down", c.hidden, c.dim))


class Block(nn.Module):
    """Pre-norm attention, then pre-norm SwiGLU or a mixture; returns ``(x, None)``, as ``nn.scan`` requires."""

    size: DecoderSize
    attention: Attention = xla_attention
    constrain: Callable[[jax.Array], jax.Array] | None = None
    mixture: Callable[..., nn.Module] = Experts
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, _=None):
        c, width = self.size, self.size.dim // self.size.heads
        linear, norm = partial(Linear, dtype=self.dtype), partial(nn.RMSNorm, dtype=self.dtype)
        # The names are MaxText's, for policies that keep activations by name, on the device or the host.
        x = checkpoint_name(x, "decoder_layer_input")
        y = norm(name="attention_norm")(x)
        q = checkpoint_name(rotary(linear((c.heads, width), name="query")(y), c.rotary_base), "query_proj")
        k = checkpoint_name(rotary(linear((c.kv_heads, width), name="key")(y), c.rotary_base), "key_proj")
        v = checkpoint_name(linear((c.kv_heads, width), name="value")(y), "value_proj")
        context = checkpoint_name(self.attention(q, k, v), "context")
        attended = linear(c.dim, axis=(-2, -1), name="out")(context)
        x = x + checkpoint_name(attended, "out_proj")
        y = norm(name="mlp_norm")(x)
        if c.experts:
            x = x + self.mixture(c, name="experts")(y)
        else:
            y = nn.silu(linear(c.hidden, name="gate")(y)) * linear(c.hidden, name="up")(y)
            x = x + checkpoint_name(linear(c.dim, name="down")(y), "mlpwo")
        return self.constrain(x) if self.constrain else x, None


class Decoder(nn.Module):
    """Decoder that returns next-token logits, float32 ``[b, t, vocab_size]``, for ``tokens[b, t]``."""

    size: DecoderSize
    attention: Attention = xla_attention
    remat: Any = True  # or a policy of nn.remat, or False
    constrain: Callable[[jax.Array], jax.Array] | None = None
    mixture: Callable[..., nn.Module] = Experts
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens):
        c, block = self.size, Block
        if self.remat:
            block = nn.remat(Block, prevent_cse=False, policy=None if self.remat is True else self.remat)
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=c.layers)
        embed = nn.Embed(c.vocab_size, c.dim, dtype=self.dtype, name="embed")
        x = embed(tokens)
        x = self.constrain(x) if self.constrain else x
        x, _ = layers(c, self.attention, self.constrain, self.mixture, self.dtype, name="blocks")(x, None)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = embed.attend(x) if c.tied else Linear(c.vocab_size, dtype=self.dtype, name="head")(x)
        return logits.astype(jnp.float32)


def decoder(
    size: DecoderSize,
    *,
    devices: int,
    shard_axes: tuple[str, ...] = (),
    rows: int = 1,
    context: int | None = None,
    attention: Attention = xla_attention,
    remat: Any = True,
    dtype: Any = jnp.bfloat16,
    min_weight_size: int = 2**18,
    **sharding: Any,
) -> Workload:
    """Creates the workload of a decoder with AdamW; without ``shard_axes`` the model is not wrapped, for ``jit``.

    Args:
      size: see ``SIZES``.
      devices: the number of devices; the batch has ``rows`` rows of ``context`` tokens (None: of ``size``) per device.
      shard_axes: the ``axis_name`` of ``shard_modules``.
      attention: XLA's attention, or a kernel with the same signature.
      remat, dtype: fields of ``Decoder``.
      min_weight_size, **sharding: further options of ``shard_modules``; the default gather dtype is ``dtype``.
    """
    model: nn.Module = Decoder(size, attention, remat, dtype=dtype)
    if shard_axes:
        options = {"gather_dtype": dtype, "min_weight_size": min_weight_size} | sharding
        model = shard_modules(model, _is_unit, shard_axes, **options)
    length = size.context if context is None else context
    tokens = jax.ShapeDtypeStruct((devices * rows, length + 1), jnp.int32)
    return Workload(model, optax.adamw(3e-4), tokens, next_token_loss, inputs=(inputs_of(tokens),))


def _is_unit(path: str, module: nn.Module) -> bool:
    """Whether a module is gathered as a unit: a layer, the embedding, the head."""
    return isinstance(module, Block | nn.Embed) or path == "head"

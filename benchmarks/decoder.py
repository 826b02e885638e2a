"""A decoder as its users write it, in plain Flax, and sharded from outside: the second model of every comparison.

    tokens[b, t] -- embed --> x[b, t, d] -- blocks, one nn.scan over nn.remat --> norm, head --> logits[b, t, vocab]

Grouped-query attention whose kernels have heads as dims (``nn.DenseGeneral``: rank 3, and 4 stacked over layers),
rotary positions, RMSNorm, SwiGLU, an embedding that is the head, too (``tied``), computed in bfloat16 (``dtype``) with
float32 parameters. The model knows nothing of devices but ``constrain``, which ``jit`` needs; ``decoder`` shards it by
``shard_modules``, ``baselines.jit_step`` by ``NamedSharding``.

  size              layers x d   heads, of keys   hidden   vocabulary       parameters
  decoder_0.8B      16 x 2048    16, 4            5,632    50,304           0.825e9
  llama3.2_1B       16 x 2048    32, 8            8,192    128,256          1.24e9
  llama3.1_8B       32 x 4096    32, 8            14,336   128,256, untied  8.03e9
  mixture_0.5B      12 x 1024    16, 4            8 x 1408 32,768           0.48e9

A mixture has experts in place of the MLP, each of which sees every token (dense dispatch): a token takes the sum of its
two best, weighted by the router.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.large_models import CONTEXT, Size, inputs_of, next_token_loss
from benchmarks.models import Attention
from xlstm_jax.distributed import shard_modules
from xlstm_jax.forecast.training import Workload

xla_attention: Attention = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
Linear = partial(nn.DenseGeneral, use_bias=False)


@dataclass(frozen=True, kw_only=True)
class DecoderSize(Size):
    """The dims of a decoder.

    Attributes:
      hidden: of the MLP.
      kv_heads: of keys and values.
      tied: whether the embedding is the head.
      rotary_base: of the slowest of rotary positions.
      experts: in place of each MLP; 0: none.
    """

    hidden: int
    kv_heads: int
    tied: bool = True
    rotary_base: float = 500_000.0
    experts: int = 0
    block: str = "decoder"


SIZES = {
    "decoder_0.8B": DecoderSize(2048, 16, 16, 50_304, hidden=5632, kv_heads=4),
    "llama3.2_1B": DecoderSize(2048, 16, 32, 128_256, hidden=8192, kv_heads=8),
    "llama3.1_8B": DecoderSize(4096, 32, 32, 128_256, hidden=14_336, kv_heads=8, tied=False),
    "mixture_0.5B": DecoderSize(1024, 12, 16, 32_768, hidden=1408, kv_heads=4, experts=8),
    "mixture_small": DecoderSize(256, 2, 4, 2048, hidden=352, kv_heads=2, experts=8),
    "decoder_small": DecoderSize(256, 2, 4, 2048, hidden=704, kv_heads=2),
}


def rotary(x, base):
    """Rotary positions: pairs of features of ``x[b, t, h, d]`` turned by angles that grow with t."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * base ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Experts(nn.Module):
    """The two best of the experts for each token of ``y[b, t, d]``, weighted by the router; each is a SwiGLU."""

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
    """Attention, then SwiGLU or a mixture, each on the normed stream; returns ``(x, None)`` as ``nn.scan`` wants."""

    size: DecoderSize
    attention: Attention = xla_attention
    constrain: Callable[[jax.Array], jax.Array] | None = None
    mixture: Callable[..., nn.Module] = Experts
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, _=None):
        c, width = self.size, self.size.dim // self.size.heads
        linear, norm = partial(Linear, dtype=self.dtype), partial(nn.RMSNorm, dtype=self.dtype)
        y = norm(name="attention_norm")(x)
        q = rotary(linear((c.heads, width), name="query")(y), c.rotary_base)
        k = rotary(linear((c.kv_heads, width), name="key")(y), c.rotary_base)
        v = linear((c.kv_heads, width), name="value")(y)
        x = x + linear(c.dim, axis=(-2, -1), name="out")(self.attention(q, k, v))
        y = norm(name="mlp_norm")(x)
        if c.experts:
            x = x + self.mixture(c, name="experts")(y)
        else:
            y = nn.silu(linear(c.hidden, name="gate")(y)) * linear(c.hidden, name="up")(y)
            x = x + linear(c.dim, name="down")(y)
        return self.constrain(x) if self.constrain else x, None


class Decoder(nn.Module):
    """Logits of the next token, float32 ``[b, t, vocab_size]``, for ``tokens[b, t]``."""

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
    context: int = CONTEXT,
    attention: Attention = xla_attention,
    remat: Any = True,
    dtype: Any = jnp.bfloat16,
    min_weight_size: int = 2**18,
    **sharding: Any,
) -> Workload:
    """A decoder as a workload, trained by AdamW; without ``shard_axes`` nothing is sharded: for ``jit`` to split.

    Args:
      size: see ``SIZES``.
      devices: each has so many ``rows`` of ``context`` tokens.
      shard_axes: the ``axis_name`` of ``shard_modules``.
      attention: XLA's, or a kernel with its signature.
      remat, dtype: of ``Decoder``.
      min_weight_size, **sharding: further options of ``shard_modules``; gathered in ``dtype`` unless they differ.
    """
    model: nn.Module = Decoder(size, attention, remat, dtype=dtype)
    if shard_axes:
        options = {"gather_dtype": dtype, "min_weight_size": min_weight_size} | sharding
        model = shard_modules(model, _is_unit, shard_axes, **options)
    tokens = jax.ShapeDtypeStruct((devices * rows, context + 1), jnp.int32)
    return Workload(model, optax.adamw(3e-4), tokens, next_token_loss, inputs=(inputs_of(tokens),))


def _is_unit(path: str, module: nn.Module) -> bool:
    """What is gathered at once: a layer, the embedding, the head."""
    return isinstance(module, Block | nn.Embed) or path == "head"

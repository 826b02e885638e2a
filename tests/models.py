"""Small language model to trace, compile and count: tokens[b, t] -> logits[b, t, vocab].

The skeleton has attention or a recurrence in its blocks: embedding, one block scanned over layers, norm, head. A
parameter W[d, f] of the block is stacked to W[layers, d, f]. ``wrap`` shards the classes, or leaves them unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.support import plain


class Block(nn.Module):
    """Base class of both blocks; a block returns (x, None), the (carry, output) pair of ``nn.scan``."""

    num_heads: int
    dtype: Any = jnp.float32

    def project(self, name: str, features: int, x):
        return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)(x)

    def norm(self, name: str, x):
        return nn.RMSNorm(dtype=self.dtype, name=name)(x)

    def heads(self, x):
        """Splits the heads: [b, t, h * d] -> [b, h, t, d]."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)


class TransformerBlock(Block):
    """Attention over earlier tokens, then a gated MLP: 13 d^2 weights."""

    @nn.compact
    def __call__(self, x):
        dim, length = x.shape[-1], x.shape[1]
        projected = self.project("query_key_value", 3 * dim, self.norm("attention_norm", x))
        q, k, v = (self.heads(y) for y in jnp.split(projected, 3, axis=-1))
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhts,bhsd->bhtd", nn.softmax(scores), v)
        x = x + self.project("attention_out", dim, mixed.swapaxes(1, 2).reshape(x.shape))
        gate, y = jnp.split(self.project("up", 6 * dim, self.norm("mlp_norm", x)), 2, axis=-1)
        return x + self.project("down", dim, nn.silu(gate) * y), None


class RecurrentBlock(Block):
    """Recurrent memory per head with a forget gate, token by token; has a scale parameter, a bias and small leaves."""

    @nn.compact
    def __call__(self, x):
        width = 2 * x.shape[-1]
        u, gate = jnp.split(self.project("up", 2 * width, self.norm("norm", x)), 2, axis=-1)
        u = u * self.param("scale", nn.initializers.ones, (width,)).astype(self.dtype)
        q, k, v = (self.heads(self.project(name, width, u)) for name in ("query", "key", "value"))
        keep = nn.sigmoid(nn.Dense(self.num_heads, dtype=self.dtype, name="forget_gate")(u)).swapaxes(1, 2)

        def token(memory, inputs):
            q, k, v, keep = inputs
            memory = keep[..., None, None] * memory + k[..., :, None] * v[..., None, :]
            return memory, jnp.einsum("bhd,bhde->bhe", q, memory)

        # Zeros that vary over the same mesh axes as the inputs, as shard_map requires for the carry of a scan.
        start = 0 * k[:, :, 0, :, None] * v[:, :, 0, None, :]
        by_token = [jnp.moveaxis(y, 2, 0) for y in (q, k, v, keep)]
        _, h = jax.lax.scan(token, start, tuple(by_token))
        h = jnp.moveaxis(h, 0, 1).reshape(u.shape)
        return x + self.project("down", x.shape[-1], h * nn.silu(gate)), None


BLOCKS: dict[str, type[Block]] = {"transformer": TransformerBlock, "recurrent": RecurrentBlock}


class LanguageModel(nn.Module):
    """Language model; ``block`` is a key of ``BLOCKS``, and ``num_heads`` divides ``dim``."""

    block: str
    dim: int
    num_layers: int
    num_heads: int
    remat: bool = False
    wrap: Callable[[Any], Any] = plain
    dtype: Any = jnp.float32
    vocab_size: int = 256

    @nn.compact
    def __call__(self, tokens):
        x = self.wrap(nn.Embed)(self.vocab_size, self.dim, dtype=self.dtype, name="embed")(tokens)
        block = self.wrap(BLOCKS[self.block])
        block = nn.remat(block, prevent_cse=False) if self.remat else block
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.num_layers)
        x, _ = layers(self.num_heads, self.dtype, name="blocks")(x)
        x = nn.RMSNorm(dtype=self.dtype, name="final_norm")(x)
        logits = self.wrap(nn.Dense)(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")(x)
        return logits.astype(jnp.float32)

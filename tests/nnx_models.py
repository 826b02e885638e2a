"""NNX versions of the models of ``support`` and ``models`` for the parity tests, and a map of leaf names.

The map goes from the path of a Linen leaf to the path of the NNX leaf with the same values.
"""

import jax
import jax.numpy as jnp
from flax import nnx

NAMES = {"Dense_0": "first", "Dense_1": "last"}
NAMES_IN_BLOCK = {"LayerNorm_0": "norm", "Dense_0": "up", "Dense_1": "down"}
NAMES_OF_SCAN = NAMES | {f"blocks/{old}": f"blocks/{new}" for old, new in NAMES_IN_BLOCK.items()}


class Block(nnx.Module):
    """NNX version of ``support.Block``."""

    def __init__(self, rngs, width=16):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """NNX version of ``support.Model``: Linear, three blocks (a scan or a loop), Linear."""

    def __init__(self, rngs, scan=True, remat=False):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        layers = nnx.vmap(Block) if scan else lambda rngs: nnx.List([Block(rngs) for _ in range(3)])
        self.blocks = layers(rngs.split(3) if scan else rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)
        self.scan, self.remat = scan, remat

    def __call__(self, x):
        def run(x, block):
            return block(x)

        run = nnx.remat(run) if self.remat else run
        x = self.first(x)
        if self.scan:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = run(x, block)
        return self.last(x)


class Einsum(nnx.Module):
    """Product with a parameter of any rank, whose shape other modules read: the layer of Flax's ``examples/gemma``."""

    def __init__(self, equation: str, shape: tuple[int, ...], *, rngs: nnx.Rngs):
        self.equation = equation
        self.w = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])

    @property
    def shape(self):
        return self.w.shape


class LanguageModelBlock(nnx.Module):
    """Base class of the NNX versions of ``models.TransformerBlock`` and ``models.RecurrentBlock``."""

    def __init__(self, rngs, dim, num_heads):
        self.dim, self.num_heads = dim, num_heads
        self.make(rngs)

    def project(self, rngs, din, dout):
        return nnx.Linear(din, dout, use_bias=False, rngs=rngs)

    def heads(self, x):
        """Splits the heads: [b, t, h * d] -> [b, h, t, d]."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)


class TransformerBlock(LanguageModelBlock):
    """NNX version of ``models.TransformerBlock``."""

    def make(self, rngs):
        dim = self.dim
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(dim, rngs=rngs), nnx.RMSNorm(dim, rngs=rngs)
        self.query_key_value, self.attention_out = self.project(rngs, dim, 3 * dim), self.project(rngs, dim, dim)
        self.up, self.down = self.project(rngs, dim, 6 * dim), self.project(rngs, 3 * dim, dim)

    def __call__(self, x):
        length = x.shape[1]
        q, k, v = (self.heads(y) for y in jnp.split(self.query_key_value(self.attention_norm(x)), 3, axis=-1))
        scores = jnp.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhts,bhsd->bhtd", nnx.softmax(scores), v)
        x = x + self.attention_out(mixed.swapaxes(1, 2).reshape(x.shape))
        gate, y = jnp.split(self.up(self.mlp_norm(x)), 2, axis=-1)
        return x + self.down(nnx.silu(gate) * y)


class RecurrentBlock(LanguageModelBlock):
    """NNX version of ``models.RecurrentBlock``."""

    def make(self, rngs):
        dim, width = self.dim, 2 * self.dim
        self.norm, self.scale = nnx.RMSNorm(dim, rngs=rngs), nnx.Param(jnp.ones(width))
        self.up, self.down = self.project(rngs, dim, 2 * width), self.project(rngs, width, dim)
        self.query, self.key, self.value = (self.project(rngs, width, width) for _ in range(3))
        self.forget_gate = nnx.Linear(width, self.num_heads, rngs=rngs)

    def __call__(self, x):
        u, gate = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        u = u * self.scale
        q, k, v = (self.heads(project(u)) for project in (self.query, self.key, self.value))
        keep = nnx.sigmoid(self.forget_gate(u)).swapaxes(1, 2)

        def token(memory, inputs):
            q, k, v, keep = inputs
            memory = keep[..., None, None] * memory + k[..., :, None] * v[..., None, :]
            return memory, jnp.einsum("bhd,bhde->bhe", q, memory)

        start = 0 * k[:, :, 0, :, None] * v[:, :, 0, None, :]
        _, h = jax.lax.scan(token, start, tuple(jnp.moveaxis(y, 2, 0) for y in (q, k, v, keep)))
        return x + self.down(jnp.moveaxis(h, 0, 1).reshape(u.shape) * nnx.silu(gate))


BLOCKS = {"transformer": TransformerBlock, "recurrent": RecurrentBlock}


class LanguageModel(nnx.Module):
    """NNX version of ``models.LanguageModel``, with the same leaf names."""

    def __init__(self, rngs, block, dim, num_layers, num_heads, remat=False, vocab_size=256):
        self.embed = nnx.Embed(vocab_size, dim, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: BLOCKS[block](rngs, dim, num_heads))(rngs.split(num_layers))
        self.final_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, vocab_size, use_bias=False, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens):
        def run(x, block):
            return block(x)

        run = nnx.remat(run, prevent_cse=False) if self.remat else run
        x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embed(tokens), self.blocks)
        return self.head(self.final_norm(x)).astype(jnp.float32)

"""Models of the corpus in Linen, some with an NNX twin, and their batches: some hundred to some thousand values.

Models are plain, and sharded from outside: the same class is the one-device reference. Rows differ in scale, so that
each device's mean differs from the global mean.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from tests.step_corpus import split_models
from xlstm_jax.distributed.model_parallel import context_attention

CLASSES = 4
LECUN = nn.initializers.lecun_normal()


class MLP(nn.Module):
    """Dense, dropout, Dense, dropout, Dense; the options make the variants of the table."""

    rate: float = 0.0
    norm: bool = False
    head_init: Any = LECUN
    dtype: Any = None
    extra_head: bool = False
    of_rows: bool = False  # normalises by the current rows, without statistics

    @nn.compact
    def __call__(self, x):
        for width in (32, 32):
            x = nn.gelu(nn.Dense(width, dtype=self.dtype)(x))
            if self.norm:
                x = nn.LayerNorm(dtype=self.dtype)(x)
            if self.of_rows:
                x = (x - x.mean(0)) / (x.std(0) + 1e-3)
            x = nn.Dropout(self.rate, deterministic=False)(x)
        out = nn.Dense(CLASSES, kernel_init=self.head_init, dtype=self.dtype)(x).astype(jnp.float32)
        return (out, nn.Dense(CLASSES, name="extra")(x)) if self.extra_head else out


class NnxMLP(nnx.Module):
    """NNX twin of ``MLP``."""

    def __init__(self, rngs, rate=0.0, norm=False, head_init=LECUN, extra_head=False):
        self.up, self.middle = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 32, rngs=rngs)
        self.head = nnx.Linear(32, CLASSES, kernel_init=head_init, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(32, rngs=rngs) for _ in range(2)]) if norm else None
        self.extra = nnx.Linear(32, CLASSES, rngs=rngs) if extra_head else None
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        for i, layer in enumerate((self.up, self.middle)):
            x = nnx.gelu(layer(x))
            x = self.drop(x if self.norms is None else self.norms[i](x))
        return self.head(x) if self.extra is None else (self.head(x), self.extra(x))


class Attention(nn.Module):
    """Attention over four tokens of a row's 16 features; the gradient of the key bias is pure rounding."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16)(x.reshape(-1, 4, 4))
        y = nn.MultiHeadDotProductAttention(2, dropout_rate=self.rate, deterministic=False)(nn.LayerNorm()(x))
        return nn.Dense(CLASSES)((x + nn.Dropout(self.rate, deterministic=False)(y)).mean(1))


class Block(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.rate, deterministic=False)(nn.Dense(16)(h)), None


class Scanned(nn.Module):
    """Three blocks in a scan with remat."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        rngs = {"params": True, "dropout": True}
        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs=rngs, length=3)
        return nn.Dense(CLASSES)(layers(self.rate, name="blocks")(x, None)[0])


class Stats(nn.Module):
    """Model with ``batch_stats`` over the batch axes."""

    rate: float = 0.0
    axes: Any = None

    @nn.compact
    def __call__(self, x):
        y = nn.BatchNorm(use_running_average=False, axis_name=self.axes)(nn.Dense(32)(x))
        return nn.Dense(CLASSES)(nn.Dropout(self.rate, deterministic=False)(nn.relu(y)))


class Tied(nn.Module):
    """Next-token model with a tied head; no token of the batch uses the last rows of the table."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 16)
        x = nn.Dropout(self.rate, deterministic=False)(embed(tokens))
        return embed.attend(nn.Dense(16)(jnp.cumsum(x, axis=1)))


class Experts(nn.Module):
    """Each row goes to the expert with the greatest weight; never to the last expert, whose gradients are 0."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        gate = nn.softmax(nn.Dense(4)(x) + jnp.array([0.0, 0.0, 0.0, -1e9]))
        chosen = jax.nn.one_hot(gate.argmax(-1), 4) * gate
        outs = [nn.Dense(CLASSES, name=f"down_{i}")(nn.gelu(nn.Dense(16, name=f"up_{i}")(x))) for i in range(4)]
        return nn.Dropout(self.rate, deterministic=False)(jnp.einsum("ne,enc->nc", chosen, jnp.stack(outs)))


class SplitExperts(nn.Module):
    """Experts split over "ep", which also splits the batch: tokens go to every expert of the group and return."""

    split: bool = True

    @nn.compact
    def __call__(self, x):
        inside = self.split and "ep" in jax.sharding.get_abstract_mesh().manual_axes
        parts = jax.lax.axis_size("ep") if inside else 1
        init = nn.initializers.lecun_normal(batch_axis=0)
        names = (lambda i: nn.with_partitioning(i, ("ep", None, None))) if self.split else (lambda i: i)
        up = self.param("up", names(init), (4 // parts, 16, 8))
        down = self.param("down", names(init), (4 // parts, 8, CLASSES))
        p = nn.softmax(nn.Dense(4, use_bias=False, name="gate")(x))
        hot = jax.nn.one_hot(p.argmax(-1), 4) * p
        if inside:
            x, hot = (jax.lax.all_gather(a, "ep", axis=0, tiled=True) for a in (x, hot))
            hot = jax.lax.dynamic_slice_in_dim(hot, jax.lax.axis_index("ep") * (4 // parts), 4 // parts, 1)
        y = jnp.einsum("enh,ehd,ne->nd", nn.gelu(jnp.einsum("nd,edh->enh", x, up)), down, hot)
        return jax.lax.psum_scatter(y, "ep", scatter_dimension=0, tiled=True) if inside else y


class Convolution(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x.reshape(-1, 4, 4, 1)))
        x = nn.Dropout(self.rate, deterministic=False)(nn.relu(nn.Conv(16, (3, 3), strides=2)(x)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class LoRA(nn.Module):
    """Dense layers with adapters, whose second factor starts at 0: the gradient of the first factor is 0."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        for width in (32, CLASSES):
            a = self.param(f"lora_a_{width}", nn.initializers.normal(0.1), (x.shape[-1], 4))
            b = self.param(f"lora_b_{width}", nn.initializers.zeros, (4, width))
            h = nn.Dense(width, name=f"base_{width}")(x) + nn.Dropout(self.rate, deterministic=False)(x) @ a @ b
            x = nn.gelu(h) if width != CLASSES else h
        return x


class Denoiser(nn.Module):
    """Predicts the noise of noisy rows at times t."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x, t):
        h = nn.silu(nn.Dense(32)(x) + nn.Dense(32)(t[:, None]))
        return nn.Dense(16)(nn.Dropout(self.rate, deterministic=False)(h))


class Sequence(nn.Module):
    """Next-token model with causal attention over 16 tokens; ``layout`` is the optional argument of the call."""

    layout: str | None = None
    exchange: bool = True

    @nn.compact
    def __call__(self, tokens, positions):
        x = nn.Embed(20, 16)(tokens) + nn.Embed(16, 16)(positions)
        q, k, v = (nn.Dense(16, name=name)(x).reshape(*x.shape[:2], 2, 8) for name in "qkv")
        if self.exchange:
            y = context_attention(q, k, v, "cp", layout=self.layout)
        else:
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return nn.Dense(20)(nn.gelu(x + nn.Dense(16)(y.reshape(x.shape))))


LINEN = {
    "mlp": MLP,
    "still": lambda rate: MLP(),
    "norm": lambda rate: MLP(rate, norm=True),
    "zero_head": lambda rate: MLP(rate, head_init=nn.initializers.zeros),
    "bfloat16": lambda rate: MLP(rate, dtype=jnp.bfloat16),
    "extra_head": lambda rate: MLP(rate, extra_head=True),
    "of_rows": lambda rate: MLP(rate, of_rows=True),
    "attention": Attention,
    "scan": Scanned,
    "stats": Stats,
    "tied": Tied,
    "experts": Experts,
    "split_experts": lambda rate: SplitExperts(),
    "conv": Convolution,
    "lora": LoRA,
    "denoiser": Denoiser,
    "sequence": lambda rate: Sequence(),
    "sequence_zigzag": lambda rate: Sequence("zigzag"),
    "sequence_contiguous": lambda rate: Sequence("contiguous"),
    "sequence_alone": lambda rate: Sequence(exchange=False),
    **split_models.MODELS,
}
NNX = {
    "mlp": NnxMLP,
    "norm": lambda rngs, rate: NnxMLP(rngs, rate, norm=True),
    "zero_head": lambda rngs, rate: NnxMLP(rngs, rate, head_init=nnx.initializers.zeros),
    "extra_head": lambda rngs, rate: NnxMLP(rngs, rate, extra_head=True),
}
SEQUENCES = {name for name in LINEN if name.startswith("sequence")}
WITHOUT_DROPOUT = {"still", "split_experts", *split_models.MODELS} | SEQUENCES


def batch_of(model: str) -> dict[str, np.ndarray]:
    """Returns 32 rows (16 of tokens): inputs, classes, targets, and a mask with different counts per device."""
    rng, rows = np.random.default_rng(7), 32
    x = rng.normal(size=(rows, 16)) * (1 + np.arange(rows) % 7)[:, None] / 4
    batch = {"x": x.astype(np.float32), "y": rng.integers(0, CLASSES, rows).astype(np.int32)}
    batch["target"] = rng.normal(size=(rows, CLASSES)).astype(np.float32)
    batch["mask"] = ((np.arange(rows) % 5 < 2) | (np.arange(rows) < 8)).astype(np.float32)
    if model == "tied":
        batch = {"x": rng.integers(0, 40, (16, 9)).astype(np.int32), "mask": batch["mask"][:16]}
    if model in SEQUENCES:
        text = rng.integers(0, 20, (8, 17)).astype(np.int32)
        batch = {"x": text[:, :-1], "y": text[:, 1:], "positions": np.tile(np.arange(16, dtype=np.int32), (8, 1))}
    return batch


def inputs_of(model: str, batch: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Returns the inputs of ``model.init``."""
    if model == "denoiser":
        return batch["x"], batch["mask"]
    if model in SEQUENCES:
        return batch["x"], batch["positions"]
    return (batch["x"][:, :-1] if model == "tied" else batch["x"],)


__all__ = ["LINEN", "NNX", "WITHOUT_DROPOUT", "batch_of", "inputs_of"]

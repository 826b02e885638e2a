"""One small model with a place for every feature that is a part of a model, its twin in NNX, and their batch.

``Net(parts)`` reads a batch, and returns the error of each token [b, t]:

  reads    features x, or tokens through an embedding
  layers   norm, mixer (over tokens, if any) and feed-forward; one layer, or two in a scan or in ``scan_layers``
  head     a product and a squared error, or the cross-entropy of an ``LMHead``

Without a mesh each part is the plain one, and so the model on one device is the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from tests.support import plain
from xlstm_jax.distributed import LMHead, scan_layers
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
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

ROWS, LENGTH, FEATURES, CLASSES, VOCAB = 16, 4, 8, 4, 64
LAYERS = 2  # of a scan; a loop has one, which takes half the time to compile


@dataclass(frozen=True)
class Parts:
    """Which part stands in each place of the model."""

    width: int = 16
    hidden: int = 32
    reads: str = "features"  # or "tokens", "split tokens"
    mixer: str = "none"  # or "attention" (of Flax), "recurrence", "context", "split heads"
    feed: str = "dense"  # or "split", "split sequence", "experts"
    norm: str = "layer"  # or "batch"
    stack: str = "one"  # or "scan", "prefetched"
    head: str = "features"  # or "pieces", "split vocabulary"
    remat: bool = False
    named: bool = False  # kernels have logical names
    product: Any = None  # in place of that of Flax's Dense


PLAIN = Parts()


@cache
def batch() -> dict[str, jax.Array]:
    """Leaves [b, t, ...]; rows differ in scale and in weight, so that no share of the batch is the mean."""
    keys = jax.random.split(jax.random.key(1), 4)
    rows = jnp.arange(ROWS)
    return {
        "x": jax.random.normal(keys[0], (ROWS, LENGTH, FEATURES)) * (1 + rows % 7)[:, None, None] / 4,
        "y": jax.random.normal(keys[1], (ROWS, LENGTH, CLASSES)),
        "tokens": jax.random.randint(keys[2], (ROWS, LENGTH), 0, VOCAB),
        "labels": jax.random.randint(keys[3], (ROWS, LENGTH), 0, VOCAB),
        "weight": jnp.where(rows % 5 < 2, 1.0 + rows, 0.0)[:, None] * jnp.ones((1, LENGTH)),
        "factor": (1.0 + rows % 3)[:, None] * jnp.ones((1, LENGTH)),
    }


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Positions count, so that each device must know which tokens it has."""
    angle = context_positions(query.shape[1]).astype(jnp.float32)[None, :, None, None] / 3.0
    return context_attention(query * jnp.cos(angle), key, value * jnp.cos(angle), impl="ring")


class Expert(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(nn.gelu(nn.Dense(8)(x)))


def dense(parts: Parts, cls: Any = nn.Dense) -> Callable[..., nn.Module]:
    """A ``Dense`` with the product of the model, whose kernel has logical names if the parts say so."""

    def make(features: int, names: tuple[str, str], name: str) -> nn.Module:
        init = nn.linear.default_kernel_init
        init = nn.with_logical_partitioning(init, names) if parts.named else init
        return cls(features, kernel_init=init, dot_general_cls=parts.product, name=name)

    return make


class Block(nn.Module):
    """(x, None), as ``nn.scan`` takes it, for x [b, t, d]."""

    parts: Parts
    wrap: Callable = plain
    stats_axes: Any = None

    @nn.compact
    def __call__(self, x, _=None):
        parts = self.parts
        if parts.norm == "batch":
            h = nn.BatchNorm(use_running_average=False, momentum=0.5, axis_name=self.stats_axes, name="norm")(x)
        else:
            h = nn.LayerNorm(name="norm")(x)
        if parts.mixer == "attention":
            h = h + nn.MultiHeadDotProductAttention(4, qkv_features=16, name="mixer")(h)
        elif parts.mixer == "recurrence":
            h = h + self.wrap(nn.RNN)(nn.LSTMCell(parts.width), name="mixer")(h)
        elif parts.mixer == "context":
            query, key, value = (nn.DenseGeneral((2, 8), name=name)(h) for name in ("query", "key", "value"))
            h = h + nn.DenseGeneral(parts.width, axis=(-2, -1), name="mixed")(attend(query, key, value))
        elif parts.mixer == "split heads":
            h = h + SplitAttention(4, 2, 4, jax.nn.dot_product_attention, name="mixer")(h)
        return x + self.feed(h), None

    def feed(self, h):
        parts = self.parts
        if parts.feed == "split":
            return SwiGLU(16, name="feed")(h)
        if parts.feed == "split sequence":
            own = on_split_input(nn.RMSNorm, "tp")(name="feed_norm")(split_tokens(h, 1, "tp"))
            return join_tokens(SwiGLU(16, sequence_dim=1, name="feed")(own), 1, "tp")
        if parts.feed == "experts":
            return Experts(Expert(parts.width), 4, 2, block_size=4, name="feed")(h)
        make = dense(parts)
        h = nn.gelu(make(parts.hidden, ("embed", "mlp"), "up")(h))
        return make(parts.width, ("mlp", "embed"), "down")(h)


class Net(nn.Module):
    """The errors [b, t] of the tokens of a batch."""

    parts: Parts = PLAIN
    wrap: Callable = plain
    stats_axes: Any = None

    @nn.compact
    def __call__(self, batch):
        parts, make = self.parts, dense(self.parts, self.wrap(nn.Dense))
        if parts.reads == "features":
            x = make(parts.width, ("in", "embed"), "first")(batch["x"])
        else:
            embed = self.wrap(nn.Embed if parts.reads == "tokens" else SplitEmbed)
            x = embed(VOCAB, parts.width, name="embed")(batch["tokens"])
        x = self.layers(x)
        if parts.head == "features":
            return jnp.mean((make(CLASSES, ("embed", "out"), "last")(x) - batch["y"]) ** 2, axis=-1)
        how = {"by_pieces": True} if parts.head == "pieces" else {"vocab_axis": "tp"}
        return self.wrap(LMHead)(VOCAB, chunk_size=16, **how, name="head").losses(x, batch["labels"]).loss

    def layers(self, x):
        parts, block = self.parts, self.wrap(Block)
        block = nn.remat(block, prevent_cse=False) if parts.remat else block
        how = {"parts": parts, "wrap": self.wrap, "stats_axes": self.stats_axes}
        if parts.stack == "one":
            return block(**how, name="layers")(x)[0]
        if parts.stack == "prefetched":
            return scan_layers(block, LAYERS)(**how, name="layers")(x)[0]
        stacked = {"params": 0, "batch_stats": 0, OVERWRITTEN: 0}
        named = {"metadata_params": {nn.PARTITION_NAME: "layers"}} if parts.named else {}
        scan = nn.scan(block, variable_axes=stacked, split_rngs={"params": True}, length=LAYERS, **named)
        return scan(**how, name="layers")(x, None)[0]


# What a wrapper stands around in ``Net``, for one that comes from outside.
UNITS = (Block, nn.RNN, nn.Embed, SplitEmbed, LMHead)


def is_unit(path: str, module: nn.Module) -> bool:
    return isinstance(module, UNITS) or path in ("first", "last")


# ------------------------------------------------------------------------------------------------------------ the twin

TWIN_FIELDS = {"width", "hidden", "stack", "remat"}


class TwinBlock(nnx.Module):
    """The twin of ``Block`` with its plain parts."""

    def __init__(self, rngs, parts):
        self.norm = nnx.LayerNorm(parts.width, epsilon=1e-6, rngs=rngs)
        self.up = nnx.Linear(parts.width, parts.hidden, rngs=rngs)
        self.down = nnx.Linear(parts.hidden, parts.width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Twin(nnx.Module):
    """The twin of ``Net``: parameters have the same paths."""

    def __init__(self, rngs, parts):
        self.first, self.parts = nnx.Linear(FEATURES, parts.width, rngs=rngs), parts
        if parts.stack == "scan":
            self.layers = nnx.vmap(partial(TwinBlock, parts=parts))(rngs.split(LAYERS))
        else:
            self.layers = TwinBlock(rngs, parts)
        self.last = nnx.Linear(parts.width, CLASSES, rngs=rngs)

    def __call__(self, batch):
        def run(x, block):
            return block(x)

        run = nnx.remat(run) if self.parts.remat else run
        x = self.first(batch["x"])
        if self.parts.stack == "scan":
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            x = run(x, self.layers)
        return jnp.mean((self.last(x) - batch["y"]) ** 2, axis=-1)


def is_unit_of_twin(path: str, module: nnx.Module) -> bool:
    return isinstance(module, TwinBlock) or path in ("first", "last")

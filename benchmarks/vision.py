"""Vision transformer in plain Flax, as a user would write it, with layers in a Python loop, sharded from outside.

    images[b, h, w, 3] -- patches, positions --> x[b, p, d] -- blocks_0, blocks_1, ... --> mean, head --> logits

Flax's attention (kernels of rank 3), LayerNorm and GELU, each block in ``nn.remat``, computed in bfloat16 with float32
parameters. The model has no code for devices except ``constrain``, which ``jit`` needs.

  size       layers x d   heads   parameters
  vit_L16    24 x 1024    16      0.30e9
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.large_models import Size
from benchmarks.models import Attention
from xlstm_jax.distributed import shard_modules
from xlstm_jax.forecast.training import Workload

PATCH, SIDE = 16, 224  # pixels


@dataclass(frozen=True, kw_only=True)
class VisionSize(Size):
    """Dims of a vision transformer; ``vocab_size`` is the number of classes."""

    block: str = "vision"

    @property
    def causal(self) -> bool:
        return False


SIZES = {"vit_L16": VisionSize(1024, 24, 16, 1000), "vit_small": VisionSize(128, 2, 2, 16)}


class Block(nn.Module):
    """Pre-norm attention over the patches of an image, then a pre-norm MLP."""

    heads: int
    attention: Attention | None = None

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        kernel = {"attention_fn": lambda q, k, v, **_: self.attention(q, k, v)} if self.attention else {}
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=jnp.bfloat16, **kernel)(y)
        y = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=jnp.bfloat16)(y))
        return x + nn.Dense(x.shape[-1], dtype=jnp.bfloat16)(y)


class VisionTransformer(nn.Module):
    """Vision transformer that returns class logits, float32 ``[b, classes]``, for ``images[b, h, w, 3]``."""

    size: VisionSize
    attention: Attention | None = None  # a kernel; None for Flax's attention
    remat: Any = True  # or a policy of nn.remat, or False
    constrain: Callable[[jax.Array], jax.Array] | None = None

    @nn.compact
    def __call__(self, images):
        c, block = self.size, Block
        if self.remat:
            block = nn.remat(Block, policy=None if self.remat is True else self.remat)
        patches = nn.Conv(c.dim, (PATCH, PATCH), (PATCH, PATCH), dtype=jnp.bfloat16, name="embed")(images)
        x = patches.reshape(images.shape[0], -1, c.dim)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:])).astype(x.dtype)
        for i in range(c.layers):
            x = block(c.heads, self.attention, name=f"blocks_{i}")(self.constrain(x) if self.constrain else x)
        x = nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x).mean(1)
        return nn.Dense(c.vocab_size, dtype=jnp.bfloat16, name="head")(x).astype(jnp.float32)


def class_loss(params, apply_fn, batch, rng):
    """Computes the mean cross-entropy of the classes."""
    del rng
    logits = apply_fn({"params": params}, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def vision_transformer(
    size: VisionSize,
    *,
    devices: int,
    shard_axes: tuple[str, ...] = (),
    images: int = 16,
    attention: Attention | None = None,
    remat: Any = True,
    min_weight_size: int = 2**18,
    **sharding: Any,
) -> Workload:
    """Creates the workload of a vision transformer with AdamW; without ``shard_axes`` the model is not wrapped.

    Args:
      size: see ``SIZES``.
      devices: the number of devices; the batch has ``images`` images per device.
      shard_axes: the ``axis_name`` of ``shard_modules``.
      attention, remat: fields of ``VisionTransformer``.
      min_weight_size, **sharding: further options of ``shard_modules``; the default gather dtype is bfloat16.
    """
    model: nn.Module = VisionTransformer(size, attention, remat)
    if shard_axes:
        options = {"gather_dtype": jnp.bfloat16, "min_weight_size": min_weight_size} | sharding
        model = shard_modules(model, _is_unit, shard_axes, **options)
    shape = jax.ShapeDtypeStruct
    batch = {
        "images": shape((devices * images, SIDE, SIDE, 3), jnp.bfloat16),
        "labels": shape((devices * images,), jnp.int32),
    }
    return Workload(model, optax.adamw(3e-4), batch, class_loss, inputs=(batch["images"],))


def _is_unit(path: str, module: nn.Module) -> bool:
    """Whether a module is gathered as a unit: a layer, the patch embedding, the head."""
    return isinstance(module, Block) or path in ("embed", "head")

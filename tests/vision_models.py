"""Two small vision models: a residual network with batch statistics, and a diffusion U-Net with attention.

Images are [b, h, w, c]; convolution kernels have rank 4, attention kernels rank 3. ``wrap`` shards the blocks, or
leaves them unchanged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from tests.support import plain


class ResNetBlock(nn.Module):
    """Two convolutions with batch statistics beside a projected identity; the last scale starts at 0."""

    features: int
    strides: int
    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(self.norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = self.norm(scale_init=nn.initializers.constant(0.5))(y)
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(nn.Conv(self.features, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Residual network: images [b, h, w, c] -> logits [b, 4]; batch statistics are averaged over ``axis_name``."""

    axis_name: Any = None
    wrap: Callable[[Any], Any] = plain
    remat: bool = False

    @nn.compact
    def __call__(self, x, train: bool = True):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=self.axis_name)
        x = nn.relu(norm(name="norm_in")(self.wrap(nn.Conv)(8, (3, 3), use_bias=False, name="conv_in")(x)))
        block = self.wrap(ResNetBlock)
        block = nn.remat(block) if self.remat else block
        x = block(16, strides=2, norm=norm, name="block")(x)
        return self.wrap(nn.Dense)(4, name="head")(x.mean((1, 2)))


def time_embedding(t, features: int):
    """Embeds noise levels t[b] as sines and cosines [b, features] of geometric frequencies."""
    frequencies = jnp.exp(-jnp.log(1e3) * jnp.arange(features // 2) / (features // 2))
    angles = 100.0 * t[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class UNetBlock(nn.Module):
    """GroupNorm and a convolution, shifted by the time embedding; then attention over the pixels of the image."""

    features: int

    @nn.compact
    def __call__(self, x, t):
        y = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))
        x = y + nn.Dense(self.features)(nn.swish(t))[:, None, None] + nn.Conv(self.features, (1, 1))(x)
        places = nn.GroupNorm(4)(x).reshape(x.shape[0], -1, self.features)
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(places).reshape(x.shape)


class UNet(nn.Module):
    """U-Net: noisy images [b, h, w, c] and noise levels [b] -> noise [b, h, w, c]; one level with a skip connection."""

    wrap: Callable[[Any], Any] = plain
    remat: bool = False

    @nn.compact
    def __call__(self, x, t):
        block = self.wrap(UNetBlock)
        block = nn.remat(block) if self.remat else block
        t = self.wrap(nn.Dense)(16, name="time")(time_embedding(t, 8))
        high = self.wrap(nn.Conv)(8, (3, 3), name="conv_in")(x)
        low = block(16, name="middle")(nn.avg_pool(high, (2, 2), (2, 2)), t)
        low = self.wrap(nn.ConvTranspose)(8, (2, 2), (2, 2), name="up")(low)
        y = nn.swish(nn.GroupNorm(4, name="norm_out")(jnp.concatenate([high, low], axis=-1)))
        return self.wrap(nn.Conv)(x.shape[-1], (3, 3), name="conv_out")(y)

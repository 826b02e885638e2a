"""Models with layers split over the mesh axis "tp" (tensor parallel), right and with typical mistakes.

Each mistake is an argument of ``Split``. On one device along "tp" all variants compute the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from xlstm_jax.distributed.model_parallel import enter_split, leave_split, on_split_input, split_param

AXIS, WIDTH = "tp", 32
KERNEL, ZEROS = nn.initializers.lecun_normal(), nn.initializers.zeros


def _is_split() -> bool:
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes


def _by_hand(reduce: Any) -> Any:
    """Returns a reduction over the axis by ``jax.lax``, the identity without the axis."""
    return lambda x: reduce(x, AXIS) if _is_split() else x


def _entered(x: jax.Array) -> jax.Array:
    return enter_split(x, AXIS) if _is_split() else x


def _left(x: jax.Array) -> jax.Array:
    return leave_split(x, AXIS) if _is_split() else x


def _columns_of_device_0(x: jax.Array) -> jax.Array:
    return jnp.where(lax.axis_index(AXIS) == 0, x, 0 * x) if _is_split() else x


class Up(nn.Module):
    """A layer split by columns."""

    enter: Any = _entered

    @nn.compact
    def __call__(self, x):
        kernel = split_param(self, "kernel", KERNEL, (x.shape[-1], WIDTH), jnp.float32, dim=1)
        bias = split_param(self, "bias", ZEROS, (WIDTH,), jnp.float32, dim=0)
        return self.enter(x) @ kernel + bias


class Down(nn.Module):
    """A layer split by rows; with ``bias_inside`` each device adds the bias before the sum."""

    leave: Any = _left
    bias_inside: bool = False

    @nn.compact
    def __call__(self, x):
        kernel = split_param(self, "kernel", KERNEL, (WIDTH, 16), jnp.float32, dim=0)
        bias = self.param("bias", nn.initializers.ones, (16,))
        y = x @ kernel
        return self.leave(y + bias) if self.bias_inside else self.leave(y) + bias


class Scale(nn.Module):
    """Multiplies the local part of the features by a replicated factor."""

    @nn.compact
    def __call__(self, x):
        return x * (1 + self.param("scale", nn.initializers.ones, (1,)))


class Split(nn.Module):
    """Dense, two split layers with a residual connection around, Dense."""

    rate: float = 0.0
    classes: int = 4
    enter: Any = _entered
    leave: Any = _left
    bias_inside: bool = False
    between: Any = None
    normalised: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="first")(x)
        h = nn.gelu(Up(self.enter, name="up")(x))
        if self.between is not None:
            h = self.between(name="between")(h)
        if self.normalised:  # by the local features
            h = h / (1 + jnp.sqrt(jnp.mean(h**2, -1, keepdims=True)))
        h = nn.Dropout(self.rate, deterministic=False)(h)
        x = x + Down(self.leave, self.bias_inside, name="down")(h)
        return nn.Dense(self.classes, name="last")(x)


MODELS = {
    "split": Split,
    "split, whole scale wrapped": functools.partial(Split, between=on_split_input(Scale, AXIS)),
    "split, whole scale": functools.partial(Split, between=Scale),
    "split, not entered": functools.partial(Split, enter=lambda x: x),
    "split, psum by hand": functools.partial(Split, leave=_by_hand(lax.psum)),
    "split, pmean": functools.partial(Split, leave=_by_hand(lax.pmean)),
    "split, not summed": functools.partial(Split, leave=lambda x: x),
    "split, bias before the sum": functools.partial(Split, bias_inside=True),
    "split, psum twice": functools.partial(Split, leave=lambda x: _by_hand(lax.psum)(_left(x))),
    "split, normalised": functools.partial(Split, normalised=True),
    "split, one device": functools.partial(Split, leave=lambda x: _left(_columns_of_device_0(x))),
}

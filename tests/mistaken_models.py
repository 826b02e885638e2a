"""Models with user mistakes, for the table of errors and for tests of the corrected models."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.support import AXES, Block, fsdp


class OfRow(nn.Module):
    axes: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, axis_name=self.axes)(nn.Dense(8)(x))


class Vmapped(nn.Module):
    axes: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        shared = {"params": None, "batch_stats": None}
        mapped = nn.vmap(OfRow, in_axes=1, axis_name="v", variable_axes=shared, split_rngs={"params": False})
        return mapped(self.axes)(x)


def with_statistics(params, apply_fn, batch, rng, kept):
    out, kept = apply_fn({"params": params, **kept}, batch, mutable=["batch_stats"])
    return jnp.mean(out**2), kept


class Stacked(nn.Module):
    """Scanned blocks, with stacked biases of two dims, and a Dense."""

    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense)(16)(x)
        scan = nn.scan(fsdp(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return fsdp(nn.Dense)(4)(scan(name="blocks")(x, None)[0])


class ScanInScan(nn.Module):
    """Loop over three steps in each of two layers of an ``nn.scan``; ``check`` is Flax's check for constants."""

    check: bool = True

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                shift = fsdp(nn.Dense)(x.shape[-1])(x)
                return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x + shift), x), None

        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        return nn.scan(Layer, check_constancy_invariants=self.check, **options)()(x, None)[0][:, :4]


class OwnScan(nn.Module):
    """LSTM cell in a scan written in the model; ``cast`` applies the cure from the error text."""

    cast: bool = False

    @nn.compact
    def __call__(self, x):
        x = jnp.stack([fsdp(nn.Dense)(16)(x)] * 3, 1)
        scan = nn.scan(nn.LSTMCell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        cell = scan(4)
        carry = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
        if self.cast and not self.is_initializing():
            carry = jax.lax.pcast(carry, AXES, to="varying")
        return cell(carry, x)[1][:, -1]

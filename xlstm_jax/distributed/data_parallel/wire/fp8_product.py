"""Kernels of Flax's fp8 products are quantised before they are gathered, with the scale that all devices share.

  by itself  W[d_fsdp, f] -- all-gather --> W[d, f] -- the product quantises it --> e4m3[d, f]
  here       W[d_fsdp, f] -- quantised --> e4m3[d_fsdp, f] -- all-gather --> e4m3[d, f] -- times scale --> V[d, f]

The product quantises V with the same scale. The values of V are those of the format, so the product computes with the
same bits as by itself. The gradient passes as if nothing had been rounded, as through Flax's own rule. The history of
the largest magnitudes gets that of W, not of V.

A product of Flax (``Fp8DirectDotGeneralOp``, ``Fp8Einsum``, ``Fp8DotGeneralOp``) is a module. It lies in the module
that owns the parameter "kernel", and keeps its state in the collection ``OVERWRITTEN``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax

from xlstm_jax.distributed.data_parallel.wire import collectives

OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection, of which the gradient is the next value
CODES = jnp.float8_e4m3fn
_SCALE, _HISTORY = "kernel_scale", "kernel_amax_history"


class Product(NamedTuple):
    """The path of a product's state in the variables of a model, and the path of the kernel."""

    path: str
    kernel: str

    @property
    def scale(self) -> str:
        return f"{self.path}/{_SCALE}"

    @property
    def history(self) -> str:
        return f"{self.path}/{_HISTORY}"


def products_of(variables: Mapping[str, Any]) -> list[Product]:
    """The products of a module's variables; without those that share a kernel, which may have different scales."""
    found: list[Product] = []

    def look(path: str, node: Any) -> None:
        if isinstance(node, Mapping):
            products = [name for name in node if name.startswith("Fp8") and _SCALE in node[name]]
            if len(products) == 1:
                found.append(Product(f"{OVERWRITTEN}{path}/{products[0]}", f"params{path}/kernel"))
            for name in node.keys() - products:
                look(f"{path}/{name}", node[name])

    look("", variables.get(OVERWRITTEN))
    return found


def next_scale(scale: jax.Array, history: jax.Array) -> jax.Array:
    """The scale with which the product will quantise its kernel: [1], of its state."""
    largest = fp8_ops.get_fp8_max(CODES, jnp.float32)
    return fp8_ops.compute_scale(jnp.max(history, axis=0), scale, largest)


def quantised(shard: jax.Array, scale: jax.Array) -> jax.Array:
    """Floats -> uint8, as the product would quantise them in the dtype of ``shard``."""
    return lax.bitcast_convert_type(fp8_ops.quantize(shard, CODES, scale, shard.dtype), jnp.uint8)


def dequantised(codes: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The inverse: floats of ``dtype``."""
    return fp8_ops.dequantize(lax.bitcast_convert_type(codes, CODES), dtype, scale)


@jax.custom_vjp
def recording(history: jax.Array, shard: jax.Array) -> jax.Array:
    """The history, into which the next value, its gradient, takes the largest magnitude of this device's ``shard``.

    The largest of all devices is that of the whole kernel.
    """
    return history


def _recording_fwd(history: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    return history, jnp.max(jnp.abs(shard)).astype(history.dtype)


def _recording_bwd(largest: jax.Array, after: jax.Array) -> tuple[jax.Array, None]:
    return after.at[0].set(collectives.to_varying(largest, collectives.varying_axes(after))), None


recording.defvjp(_recording_fwd, _recording_bwd)

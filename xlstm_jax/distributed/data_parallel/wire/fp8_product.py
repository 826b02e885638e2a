"""With ``gather_dtype="float8_e4m3fn"`` kernels of Flax's fp8 products are quantised as their products would do it.

  by itself  W[d_fsdp, f] -- all-gather --> W[d, f] -- the product quantises it --> e4m3[d, f]
  here       W[d_fsdp, f] -- quantised --> e4m3[d_fsdp, f] -- all-gather --> e4m3[d, f] -- times scale --> V[d, f]

All devices share the scale, and the product quantises V with it, too. The values of V are those of the format, so the
product computes with the same bits as by itself. The gradient passes as if nothing had been rounded, as through Flax's
own rule. The history of the largest magnitudes gets that of W, not of V.

A product of Flax (``Fp8DirectDotGeneralOp``, ``Fp8Einsum``, ``Fp8DotGeneralOp``) is a module. It lies in the module
that owns the parameter "kernel", and keeps its state in the collection ``OVERWRITTEN``. These names say which kernels
have a product. That the product gets V itself is checked when it is called: see ``check_operand``.
"""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops
from flax.linen.dtypes import promote_dtype
from jax import lax

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire import collectives

OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection, of which the gradient is the next value
CODES = jnp.float8_e4m3fn
PRODUCTS = (fp8_ops.Fp8DirectDotGeneralOp, fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8Einsum)
READERS = (nn.Dense, nn.DenseGeneral)  # they hand their kernel to their product, with nothing but a cast
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


def check_operand(kernels: dict[str, Any], product: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """Raises where a product is called with something else than the kernel that was gathered for it, or twice.

    Args:
      kernels: the kernels that were quantised and gathered, by the paths of their products in the model.
      product: the module that is called with ``args`` and ``kwargs``; of no interest unless it is among these.
    Raises:
      ValueError: the kernel is neither what the product gets, nor that of one of ``READERS``; or it is in float16,
        where small values of V are lost; or the product was called before.
    """
    path, place = "/".join(product.path), 2 if isinstance(product, fp8_ops.Fp8Einsum) else 1
    if path not in kernels:
        return
    owner: Any = product.parent
    got = args[place] if len(args) > place else kwargs.get("rhs")
    is_flaxs = type(product) in PRODUCTS and product.e4m3_dtype == CODES
    # An array that a transformation made of the kernel, or took through, is another object.
    is_whole = owner.get_variable("params", "kernel") is kernels[path] and (got is kernels[path] or _only_casts(owner))
    if not (is_flaxs and is_whole and got.dtype != jnp.float16):
        raise ValueError(
            f"'{'/'.join((*owner.path, 'kernel'))}' is gathered in float8_e4m3fn, rounded as the fp8 product "
            f"'{path}' would round it, and the product gets something else, to which its scale belongs: the kernel "
            "transformed, in float16, a second time, or through a transformation where this cannot be seen. Pass "
            "gather_dtype='bfloat16' for this module, or None; or let Flax's nn.Dense or nn.DenseGeneral read the "
            "kernel, in bfloat16 or float32, and wrap within nn.remat, nn.scan, nn.WeightNorm and nn.map_variables."
        )
    kernels[path] = None  # of a second call the gradient, the next history, would be added to that of the first


def _only_casts(owner: Any) -> bool:
    """Whether a module hands its kernel to its product as Flax's own layers do."""
    call = inspect.unwrap(inspect.getattr_static(type(owner), "__call__"))
    known = any(call is inspect.unwrap(inspect.getattr_static(layer, "__call__")) for layer in READERS)
    return known and getattr(owner, "promote_dtype", promote_dtype) is promote_dtype


def next_scale(scale: jax.Array, history: jax.Array) -> jax.Array:
    """The scale with which the product will quantise its kernel: [1], of its state."""
    largest = fp8_ops.get_fp8_max(CODES, jnp.float32)
    return fp8_ops.compute_scale(jnp.max(history, axis=0), scale, largest)


def quantised(shard: jax.Array, scale: jax.Array) -> jax.Array:
    """Floats -> uint8, as the product would quantise them in the dtype of ``shard``."""
    return lax.bitcast_convert_type(fp8_ops.quantize(shard, CODES, scale, shard.dtype), jnp.uint8)


def dequantised(codes: jax.Array, scale: jax.Array, dtype: DType) -> jax.Array:
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

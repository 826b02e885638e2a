"""Quantises kernels of Flax's fp8 products before the gather, as the products would (``gather_dtype="float8_e4m3fn"``).

  plain Flax  W[d_fsdp, f] -- all-gather --> W[d, f] -- the product quantises W --> e4m3[d, f]
  here        W[d_fsdp, f] -- quantised --> e4m3[d_fsdp, f] -- all-gather --> e4m3[d, f] -- times scale --> V[d, f]

The devices share the scale, and the product quantises V with the same scale. V has only values of the format, so the
product computes with the same bits as in plain Flax. The gradient ignores the rounding, as Flax's rule does. The
history of the largest magnitudes receives the largest magnitude of W, not of V.

W is quantised in the dtype in which W is stored. A product may compute in a wider dtype (W is stored in bfloat16, the
product multiplies in float32), in which some values round differently. The dtype is known when the product is called:
W is then gathered once more, quantised in the dtype of the product, and XLA removes the first gather as unused.

A product of Flax (``Fp8DirectDotGeneralOp``, ``Fp8Einsum``, ``Fp8DotGeneralOp``) is a submodule of the module that owns
the parameter "kernel", and keeps state in the collection ``OVERWRITTEN``. The names of both identify the kernels with a
product. ``checked_operand`` checks in each call of the product that the operand is V.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen import fp8_ops
from flax.linen.dtypes import promote_dtype
from jax import lax

from xlstm_jax.common_types import DType, PyTree
from xlstm_jax.distributed.data_parallel.extension import Extension, ModulePath, register
from xlstm_jax.distributed.data_parallel.leaf import Sharded, gather_leaf, is_gathered_here, leaf_of, path_in_model
from xlstm_jax.distributed.data_parallel.modules.unit import split_over
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN, RUNNING_LOSS
from xlstm_jax.distributed.data_parallel.wire.wire import Wire
from xlstm_jax.program_names import GATHER_SCOPE

NAME = "float8_e4m3fn of its product"  # name of the wire in plans
CODES = jnp.float8_e4m3fn
PRODUCTS = (fp8_ops.Fp8DirectDotGeneralOp, fp8_ops.Fp8DotGeneralOp, fp8_ops.Fp8Einsum)
READERS = (nn.Dense, nn.DenseGeneral)  # these pass their kernel to their product with at most a cast
_SCALE, _HISTORY = "kernel_scale", "kernel_amax_history"


class Product(NamedTuple):
    """Paths, in the variables, of the state of an fp8 product (``path``) and of the product's kernel (``kernel``)."""

    path: str
    kernel: str

    @property
    def scale(self) -> str:
        return f"{self.path}/{_SCALE}"

    @property
    def history(self) -> str:
        return f"{self.path}/{_HISTORY}"


def products_of(variables: Mapping[str, Any]) -> list[Product]:
    """Returns a list with a ``Product`` for each fp8 product of a unit: the paths of its state and of its kernel.

    An fp8 product is a submodule "Fp8..." of Flax that multiplies in float8, and keeps the scale of its kernel in the
    collection ``OVERWRITTEN`` of ``variables``. The paths begin with the collection. Products that share a kernel are
    left out, since their scales may differ.
    """
    result: list[Product] = []

    def look(path: str, node: Any) -> None:
        if isinstance(node, Mapping):
            products = [name for name in node if name.startswith("Fp8") and _SCALE in node[name]]
            if len(products) == 1:
                result.append(Product(f"{OVERWRITTEN}{path}/{products[0]}", f"params{path}/kernel"))
            for name in node.keys() - products:
                look(f"{path}/{name}", node[name])

    look("", variables.get(OVERWRITTEN))
    return result


def checked_operand(kernels: dict[str, Any], product: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Returns the kernel argument of a call of ``product``; checks that this kernel was gathered for the product.

    Returns ``None``, without a check, if ``product`` has no entry in ``kernels``. Sets the entry of the product to
    ``None``, so that a second call of the product raises.

    Args:
      kernels: the quantised and gathered kernels, by the paths of their fp8 products in the model.
      product: the called module.
      args, kwargs: the arguments of the call; the kernel is positional, or the keyword argument ``rhs``.
    Raises:
      ValueError: the argument is another array (a cast by ``nn.Dense`` or ``nn.DenseGeneral`` is allowed); or float16,
        where small values of the kernel are lost; or the product was called before; or its class is not Flax's.
    """
    path, place = "/".join(product.path), place_of_kernel(product)
    if path not in kernels:
        return None
    owner: Any = product.parent
    got = args[place] if len(args) > place else kwargs.get("rhs")
    is_flaxs = type(product) in PRODUCTS and product.e4m3_dtype == CODES
    # An array that a transformation has changed or passed through is another object.
    is_whole = owner.get_variable("params", "kernel") is kernels[path] and (got is kernels[path] or _only_casts(owner))
    if not (is_flaxs and is_whole and got.dtype != jnp.float16):
        raise ValueError(
            f"'{'/'.join((*owner.path, 'kernel'))}' is gathered in float8_e4m3fn, rounded as the fp8 product "
            f"'{path}' would round it, and the product receives another array (transformed, in float16, or a second "
            "time). Pass gather_dtype='bfloat16' for this module, or let nn.Dense or nn.DenseGeneral read the kernel: "
            "docs/fp8.md."
        )
    kernels[path] = None  # refuses a second call: JAX would add the gradients of both calls, which are next histories
    return got


def place_of_kernel(product: Any) -> int:
    """Returns the index of the kernel among the positional arguments of an fp8 product: 2 for an einsum, else 1."""
    return 2 if isinstance(product, fp8_ops.Fp8Einsum) else 1


def with_operand(product: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operand: Any) -> tuple[Any, Any]:
    """Returns (args, kwargs) of an fp8 product, with ``operand`` as the kernel argument (positional or ``rhs``)."""
    place = place_of_kernel(product)
    if len(args) > place:
        return (*args[:place], operand, *args[place + 1 :]), kwargs
    return args, {**kwargs, "rhs": operand}


def _only_casts(owner: Any) -> bool:
    """Returns whether ``owner``, the module of a kernel, passes the kernel to its fp8 product with at most a cast.

    True if ``owner`` runs the unchanged ``__call__`` of ``nn.Dense`` or ``nn.DenseGeneral`` (``READERS``), with Flax's
    ``promote_dtype``.
    """
    call = inspect.unwrap(inspect.getattr_static(type(owner), "__call__"))
    known = any(call is inspect.unwrap(inspect.getattr_static(layer, "__call__")) for layer in READERS)
    return known and getattr(owner, "promote_dtype", promote_dtype) is promote_dtype


def next_scale(scale: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the scale, of shape [1], with which an fp8 product will quantise its kernel when it is called.

    Args:
      scale: the scale of the call before, [1].
      history: the largest magnitudes of the kernel in earlier calls, [calls, 1].
    """
    largest = fp8_ops.get_fp8_max(CODES, jnp.float32)
    return fp8_ops.compute_scale(jnp.max(history, axis=0), scale, largest)


def quantised(shard: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns a shard, divided by ``scale`` and rounded to float8_e4m3fn, as codes: the bits as uint8, same shape.

    The division runs in the shard's dtype, as in the fp8 product, and values outside of the format's range are clipped.
    """
    return lax.bitcast_convert_type(fp8_ops.quantize(shard, CODES, scale, shard.dtype), jnp.uint8)


def dequantised(codes: jax.Array, scale: jax.Array, dtype: DType) -> jax.Array:
    """Returns the numbers of float8_e4m3fn ``codes`` (bits as uint8) times ``scale``, as floats of ``dtype``.

    This is the inverse of ``quantised``, up to rounding.
    """
    return fp8_ops.dequantize(lax.bitcast_convert_type(codes, CODES), dtype, scale)


@jax.custom_vjp
def recording(history: jax.Array, shard: jax.Array) -> jax.Array:
    """Returns ``history`` unchanged; its gradient is the next history, with the largest abs(shard) in entry 0.

    Flax passes the next history of an fp8 product as the gradient of the history. ``shard`` is this device's shard of
    the kernel; the maximum over the devices is the largest magnitude of the unsharded kernel. ``shard`` gets no
    gradient.
    """
    return history


def _recording_fwd(history: jax.Array, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    return history, jnp.max(jnp.abs(shard)).astype(history.dtype)


def _recording_bwd(largest: jax.Array, after: jax.Array) -> tuple[jax.Array, None]:
    return after.at[0].set(collectives.to_varying(largest, collectives.varying_axes(after))), None


recording.defvjp(_recording_fwd, _recording_bwd)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class ProductWire:
    """Wire of a kernel: codes of the product's format, with the product's scale [1]."""

    # Rounding a value of the format again with the same scale does not change it.
    rounds_again: ClassVar[bool] = False

    scale: jax.Array
    dtype: DType  # of the gathered kernel

    def send(self, shard: jax.Array) -> jax.Array:
        return quantised(shard, self.scale)

    def along(self, dim: int) -> int:
        return dim

    def receive(self, arrived: jax.Array) -> jax.Array:
        return dequantised(arrived, self.scale, self.dtype)

    def tree_flatten(self) -> tuple[tuple[jax.Array], DType]:
        return (self.scale,), self.dtype

    @classmethod
    def tree_unflatten(cls, dtype: DType, children: tuple[jax.Array]) -> "ProductWire":
        return cls(*children, dtype)


def _gathered_in(kernel: Sharded, policy: ShardPolicy, path: str, scale: jax.Array, dtype: DType) -> jax.Array:
    """Returns the unsharded kernel in ``dtype``, sent as float8_e4m3fn: cast, quantised, gathered, dequantised.

    ``kernel`` is the box with the shard, ``policy`` has the options of the unit, ``path`` names the kernel in errors,
    ``scale`` is the scale of the quantisation. Casting to ``dtype`` before the quantisation decides how values round.
    """
    communication = replace(policy.communication, replicas=None)  # the box names the copies
    with jax.named_scope(GATHER_SCOPE):
        wider = kernel.replace(value=kernel.value.astype(dtype))
        return leaf_of(gather_leaf(wider, policy.axes, communication, path, ProductWire(scale, dtype))).value


def _recorded(shard: jax.Array, leaf: Sharded) -> jax.Array:
    return recording(leaf.value, shard)


def quantises_products(communication: Communication) -> bool:
    """Returns whether ``gather_dtype`` of a unit is float8_e4m3fn, so that kernels are quantised before the gather."""
    return communication.gather_dtype == "float8_e4m3fn"


@dataclass
@register
class Fp8Products(Extension):
    """Kernels of a unit in the quantised form of their products.

    Attributes:
      products: the paths of products in the model, by the paths of kernels in the unit's variables.
      kernels: the gathered kernels, by the paths of products in the model; see ``checked_operand``.
      shards: the shards as sent, by the paths of histories in the unit's variables.
      gathers_by_product: for each product, by its path in the model: the dtype in which its kernel was quantised, and a
        function that gathers the kernel, quantised in another dtype.
    """

    collections: ClassVar[tuple[str, ...]] = (OVERWRITTEN,)  # replicated: small, and each device needs the scale

    products: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, jax.Array] = field(default_factory=dict)
    gathers_by_product: dict[str, tuple[DType, Callable[[DType], jax.Array]]] = field(default_factory=dict)

    def wires(self, policy: ShardPolicy, variables: PyTree, module: ModulePath) -> Mapping[str, Wire]:
        """Returns, by path in ``variables``, the wires (formats of sent shards) of kernels quantised before the gather.

        These are the split kernels of fp8 products in a unit with ``gather_dtype="float8_e4m3fn"``. This method fills
        the attributes, in which later hooks find the products.

        Raises:
          ValueError: the loss does not differentiate a product's state although the kernel is trainable; or the scale
            is split over axes of the gather.
        """
        if OVERWRITTEN not in variables:
            return {}
        wires: dict[str, Wire] = {}
        leaves = dict(sharded_leaves(variables))
        for product in products_of(variables):
            path, scale, history = path_in_model(module, product.kernel), leaves[product.scale], leaves[product.history]
            kernel = leaves[product.kernel]
            communication = policy.communication.filled_from(kernel.communication)
            loss = RUNNING_LOSS.get()
            if loss.axes and not loss.overwrites and kernel.trainable:
                raise ValueError(
                    f"the fp8 product of '{path}' has scales in {OVERWRITTEN!r}, which would stay as they are: this "
                    "loss is differentiated by its parameters alone. Keep the collection in the state of "
                    "make_train_step, or pass it to accumulate_gradients(..., collections=...); freeze a teacher by "
                    "freeze_params: docs/fp8.md."
                )
            is_gathered = is_gathered_here(product.kernel, kernel) and bool(split_over(kernel, policy.axes))
            if not is_gathered or not quantises_products(communication):
                continue
            if axes := split_over(scale, policy.axes):
                raise ValueError(
                    f"the fp8 product of '{path}' has a scale that is split over {axes}, over which the kernel is "
                    f"gathered: each device would quantise its part with another scale. Leave {axes} out of the names "
                    f"of '{product.scale}', or gather the kernel as it is, with gather_dtype=None."
                )
            in_model = path_in_model(module, product.path.replace(OVERWRITTEN, "params", 1))
            self.products[product.kernel] = in_model
            self.shards[product.history] = sent = kernel.value.astype(communication.dtypes(kernel.value)[0])
            scale_now = next_scale(scale.value, history.value)
            wires[product.kernel] = ProductWire(scale_now, sent.dtype)
            self.gathers_by_product[in_model] = sent.dtype, partial(_gathered_in, kernel, policy, path, scale_now)
        return wires

    def value_replacements(self) -> Mapping[str, Callable[[Any], Any]]:
        """Returns functions by the path of a history (the largest magnitudes of a kernel) in the unit's variables.

        A function takes the leaf of the history, and returns the history for the product to read: the same values, with
        another gradient. The gradient is the next history, in which the newest entry is the largest magnitude of this
        device's shard instead of the gathered kernel.
        """
        return {path: partial(_recorded, shard) for path, shard in self.shards.items()}

    def on_gathered(self, path: str, value: Any) -> None:
        self.kernels[self.products[path]] = value

    def changed_arguments(
        self, module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.kernels or method != "__call__":
            return args, kwargs
        operand = checked_operand(self.kernels, module, args, kwargs)
        if operand is None:
            return args, kwargs
        sent, gathered_in = self.gathers_by_product["/".join(module.path)]
        if jnp.promote_types(sent, operand.dtype) == sent:
            return args, kwargs
        return with_operand(module, args, kwargs, gathered_in(operand.dtype))

    def named_wires(self, variables: PyTree, how_of: Callable[[str], Communication]) -> Mapping[str, str]:
        kernels = [product.kernel for product in products_of(variables)]
        return {kernel: NAME for kernel in kernels if quantises_products(how_of(kernel))}

"""Dense layers whose kernels are split over a mesh axis, by columns or by rows (Megatron-LM, arXiv:1909.08053).

With n devices along "tp", and a replicated x[..., d]:
  column   x[..., d]    @ W[d, f / n]  ->  y[..., f / n]   each device computes some features of all tokens
  row      y[..., f / n] @ W[f / n, d] ->  z[..., d]       each device computes a term of the sum over "tp"
The input of a row-split layer is the output of column-split layers, so two products need a single sum.

With ``sequence_dim`` the activations around the pair are split along the tokens (arXiv:2205.05198): tokens are gathered
before the columns, and the sum after the rows is scattered over tokens. The bytes sent are the same. Activations
between such pairs (norms, dropout, residual connections, and values kept for backward) shrink to 1 / n. The gathered
tokens that the columns multiply are kept for backward, as without ``sequence_dim``; ``nn.remat`` gathers the tokens
again instead.

With ``ring`` the gather, or the scatter, is n - 1 ring steps interleaved with n pieces of the product (collective
matmul): while a piece is multiplied, the next piece is sent. The transpose, which JAX derives, is a ring again.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array, lax
from jax.typing import DTypeLike

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, marks_of_rules, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry, entry_axes
from xlstm_jax.distributed.model_parallel.activations import (
    axis_devices,
    check_differs,
    check_equal,
    check_local_tokens,
    check_tokens,
    enter_split,
    gather_tokens,
    leave_split,
    param_shards,
    scatter_tokens,
)
from xlstm_jax.formatting import joined

DEFAULT_AXIS = "tp"
Product = Callable[[Array, Array], Array]

# ----------------------------------------------------------------------------------------------------------- parameters


def split_param(
    module: nn.Module,
    name: str,
    init: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    dim: int,
    axis_name: str = DEFAULT_AXIS,
) -> Array:
    """Creates or reads ``module.param(name, init, shape, dtype)`` split along ``dim``; returns this device's shard.

    The values are the same as for the unsharded parameter. The parameter's box names the axis, and the axes that
    ``init`` names for further dims. Call the function in a compact method of a custom layer.

    >>> class Scale(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):  # [b, t, f / n], as a ColumnDense returns it
    ...         return x * split_param(self, "scale", nn.initializers.ones, (8,), jnp.float32, dim=0)
    >>> Scale().init_with_output(jax.random.key(0), jnp.ones((2, 3, 8)))[1]["params"]["scale"].shape
    (8,)

    Args:
      module: the layer.
      name, init, dtype: as for ``module.param``.
      shape: the global shape, of the unsharded parameter.
      dim: the dim to split.
      axis_name: the mesh axis.
    Returns:
      Inside ``shard_map`` this device's shard; outside, as in ``init``, the unsharded parameter.
    Raises:
      ValueError: the axis is unknown or does not divide the dim, ``init`` names a different axis for the dim or uses
        this axis for another dim, or the parameter arrives unsharded. The error names the parameter.
    """
    path, dim = "/".join((*module.path, name)), dim % len(shape)
    count, bound = param_shards(axis_name, path), axis_devices(axis_name, path)
    if shape[dim] % count:
        raise ValueError(
            f"'{path}' of shape {shape} is to be split along dim {dim}, of size {shape[dim]}, which the {count} "
            f"devices along {axis_name!r} do not divide. Choose a size that is a multiple of {count}, as "
            f"{-(-shape[dim] // count) * count}, or fewer devices along {axis_name!r}: {_divisors(shape[dim], count)}."
        )

    exists = module.has_variable("params", name)
    # Raise before Linen compares shapes: its error would name neither the axis nor the wrapper.
    if bound > 1 and exists:
        _check_local_part(path, trees.stored_values(module.get_variable("params", name)), shape, dim, axis_name)

    def local_part(rng: Array) -> Any:
        leaf = init(rng, shape, dtype)
        box = leaf_of(leaf)
        value = collectives.local_shard(box.value, dim, (axis_name,)) if bound > 1 else box.value
        if exists:  # Linen compares only the shape; rules for logical names may be out of force
            return value
        sizes = jax.sharding.get_abstract_mesh().shape
        if axis_name not in sizes:
            return rebox(leaf, value)  # on one device, where a box may not name an unknown axis
        # A logical name of the dim without a rule is replaced, as the rules have no effect on the layer's split.
        others = [axis for axis in entry_axes(box.names[dim]) if axis != axis_name and axis in sizes]
        names = (*box.names[:dim], axis_name, *box.names[dim + 1 :])
        if others or axis_name in {axis for entry in (*names[:dim], *names[dim + 1 :]) for axis in entry_axes(entry)}:
            raise ValueError(
                f"'{path}' is split along dim {dim} over {axis_name!r} by its layer, and the names of its initialiser "
                f"are {box.names}. Other dims may have other axes: leave dim {dim} and {axis_name!r} to the layer, in "
                "nn.with_partitioning or in the rules of logical names."
            )
        return Sharded(value, names, model_axes=(axis_name,), marks=marks_of_rules(leaf))

    value: Array = module.param(name, local_part)
    return value


def _check_local_part(path: str, value: Array, shape: tuple[int, ...], dim: int, axis_name: str) -> None:
    if value.shape == shape:
        raise ValueError(
            f"'{path}' of shape {shape} is unsharded on each of the {collectives.axis_size((axis_name,))} devices "
            f"along {axis_name!r}, over which its layer splits dim {dim}. Leave {axis_name!r} out of the axis_name of "
            "its wrapper, and pass it into shard_map with in_specs=partition_specs(params, mesh)."
        )


# ------------------------------------------------------------------------------------------------------------- products


def column_products(
    x: Array,
    kernels: Sequence[Array],
    axis_name: str,
    *,
    sequence_dim: int | None = None,
    ring: bool = False,
    product: Product = jnp.matmul,
    caller: str = "column_products",
) -> list[Array]:
    """Multiplies ``x`` by this device's columns of each kernel: [..., d], [d, f / n] each -> [..., f / n] each.

    Returns a list with the product for each kernel, over all tokens. Without ``sequence_dim``, ``x`` is replicated; one
    all-reduce in backward serves all kernels. With ``sequence_dim``, ``x`` has this device's tokens along this dim, and
    one gather serves all kernels. With ``ring`` the gather runs in ring steps interleaved with the products.
    ``product(x, kernel)`` is the product, and ``caller`` the layer, for errors.
    """
    if sequence_dim is None:
        entered = enter_split(x, axis_name, caller=caller)
        return [product(entered, kernel) for kernel in kernels]
    if not ring or axis_devices(axis_name, caller) == 1:
        entered = gather_tokens(x, sequence_dim, axis_name, caller=caller)
        return [product(entered, kernel) for kernel in kernels]
    check_local_tokens(x, sequence_dim, axis_name, caller)
    return _gathered_in_a_ring(x, kernels, axis_name, sequence_dim, product)


def _gathered_in_a_ring(x: Array, kernels: Sequence[Array], axis_name: str, dim: int, product: Product) -> list[Array]:
    """Returns for each kernel the product of all devices' tokens with the kernel, the tokens of device 0 first.

    The shapes, with ``dim`` the dim of tokens, are [b, t / n, d], [d, f / n] -> [b, t, f / n]. Each of n ring steps
    multiplies, by ``product``, the tokens of a device, and meanwhile sends them on to the next device.
    """
    n, me = collectives.axis_size((axis_name,)), collectives.axis_index((axis_name,))
    share, pieces = collectives.to_varying(x, (axis_name,)), []
    for step in range(n):
        # Sent before the products, which do not depend on the tokens that arrive: the compiler may overlap both.
        arriving = collectives.shift(share, (axis_name,)) if step < n - 1 else share
        pieces.append([product(share, kernel) for kernel in kernels])
        share = arriving
    # The first piece belongs to this device, the last to the next device: the roll brings each piece to its position.
    shift = (me + 1) * x.shape[dim]
    return [jnp.roll(jnp.concatenate(of_one[::-1], axis=dim), shift, axis=dim) for of_one in zip(*pieces, strict=True)]


def row_product(
    x: Array,
    kernel: Array,
    axis_name: str,
    *,
    sequence_dim: int | None = None,
    ring: bool = False,
    product: Product = jnp.matmul,
    caller: str = "row_product",
) -> Array:
    """Multiplies this device's features by this device's rows of the kernel, and sums the products over the devices.

    [..., f / n], [f / n, d] -> [..., d]; ``x`` has all tokens. Without ``sequence_dim`` the sum is replicated. With
    ``sequence_dim`` the sum is split along this dim of tokens: each device gets the sum for its tokens. With ``ring``
    the sum is computed in ring steps interleaved with the products. ``product(x, kernel)`` is the product, and
    ``caller`` the layer, for errors.
    """
    n = axis_devices(axis_name, caller)
    if sequence_dim is None:
        return leave_split(product(x, kernel), axis_name, caller=caller)
    if not ring or n == 1:
        return scatter_tokens(product(x, kernel), sequence_dim, axis_name, caller=caller)
    check_differs(x, axis_name, n, caller)
    check_tokens(x, sequence_dim, axis_name, caller)
    return _scattered_in_a_ring(x, kernel, axis_name, sequence_dim, product)


def _scattered_in_a_ring(x: Array, kernel: Array, axis_name: str, dim: int, product: Product) -> Array:
    """Returns the sum over the devices of ``x`` times the kernel, for this device's tokens.

    The shapes, with ``dim`` the dim of tokens, are [b, t, f / n], [f / n, d] -> [b, t / n, d]. In each of n ring steps
    a device adds its term to a partial sum that arrives from the device before. The device of the tokens adds the last
    term, and keeps the sum.
    """
    n, me = collectives.axis_size((axis_name,)), collectives.axis_index((axis_name,))
    size, total = x.shape[dim] // n, None
    for step in range(n):
        # The term does not depend on the sum that arrives, so the compiler may overlap both.
        kept_by = (me + n - 1 - step) % n  # the device that keeps this partial sum
        term = product(lax.dynamic_slice_in_dim(x, kept_by * size, size, dim), kernel)
        total = term if total is None else collectives.shift(total, (axis_name,)) + term
    assert total is not None
    return total


# --------------------------------------------------------------------------------------------------------------- layers


def last_dims(axis: int | Sequence[int], x: Array, caller: str) -> int:
    """Returns how many of the last dims of ``x`` a layer contracts: 1 for an int ``axis``, else the length of ``axis``.

    ``axis`` is the layer's field, which must name the last dims of ``x``, in order.

    Raises:
      ValueError: ``axis`` names a dim that is not among the last dims, or the last dims not in their order. The error
        begins with ``caller``, the layer.
    """
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    dims = tuple(dim % x.ndim for dim in axes)
    if dims != tuple(range(x.ndim - len(dims), x.ndim)):
        raise ValueError(
            f"{caller}: axis={axis} are not the last dims of an input of shape {x.shape}, in their order; a split "
            "layer sums over these. Transpose the input."
        )
    return len(dims)


FUSED = {2: " (keys and values)", 3: " (queries, keys and values)"}  # layers fused in the first feature dim


def check_features_divide(features: tuple[int, ...], count: int, axis_name: str, caller: str) -> None:
    """Raises a ``ValueError`` if ``count`` devices do not divide the first of several feature dims that looks fused.

    A first dim looks fused if it counts layers, not features or heads, such as the 3 of (3, heads, dim) for queries,
    keys and values. The sign is a first dim of 2 or 3, or three or more dims of which the devices divide the second. In
    all other cases nothing is raised here; ``split_param`` then checks that the devices divide the dim.
    """
    first, *others = features
    looks_fused = bool(others) and (first in FUSED or (len(others) > 1 and others[0] % count == 0))
    if looks_fused and first % count:
        raise fused_features_error(features, count, axis_name, caller)


def fused_features_error(features: tuple[int, ...], count: int, axis_name: str, caller: str) -> ValueError:
    """Returns (does not raise) the error for features such as (3, heads, dim), whose first dim counts fused layers.

    A split over the ``count`` devices along ``axis_name`` would divide the 3 instead of the heads. The message begins
    with ``caller``, the layer, and suggests other features.
    """
    first, second, *rest = features
    divided, heads = ", which do not divide it", f"; if it counts heads, take {_divisors(first, count)} devices"
    if first % count == 0:
        divided, heads = ": one for each", ""
    of_each = (second, *rest) if rest else second
    multiple = "" if second % count == 0 else f", with a multiple of {count} in place of {second}"
    return ValueError(
        f"{caller} has the features {features}, and a column-split layer splits the first dim, of {first}, over the "
        f"{count} devices along {axis_name!r}{divided}. Make {first} layers{FUSED.get(first, '')} of features "
        f"{of_each}, or put the dim to split first: {(second, first, *rest)}{multiple}{heads}."
    )


def _divisors(size: int, most: int) -> str:
    """Returns the divisors of ``size`` up to ``most`` as text for errors: "1, 2 or 4"."""
    return joined([str(n) for n in range(1, min(size, most) + 1) if size % n == 0], "or")


def share_of_input(layer: nn.Module, x: Array, count: int, devices: int) -> str:
    """Compares the input features of ``x`` with those of the layer's kernel on this device: "all", "share" or "".

    Returns "all" if ``x`` has ``devices`` times the kernel's input features, so the kernel is split and ``x`` is not.
    Returns "share" if the kernel has ``devices`` times the features of ``x``, so ``x`` is split and the kernel is not.
    Returns "" in all other cases, if the layer has no kernel yet, and for one device.

    Input features are the last ``count`` dims of ``x``, and the first ``count`` dims of the kernel. The first of these
    dims may differ by the factor; the further dims must be equal.
    """
    if devices == 1 or not layer.has_variable("params", "kernel"):
        return ""
    of_kernel = np.shape(layer.get_variable("params", "kernel"))[:count]
    of_input = x.shape[x.ndim - count :]
    if of_kernel[1:] != of_input[1:]:
        return ""
    if of_kernel[0] * devices == of_input[0]:
        return "all"
    return "share" if of_input[0] * devices == of_kernel[0] else ""


def contracted(x: Array, kernel: Array, count: int, precision: Any) -> Array:
    """Returns ``x`` times the kernel: sums over the last ``count`` dims of ``x`` and the first ``count`` of the kernel.

    [..., *inputs], [*inputs, *features] -> [..., *features]. ``precision`` is as for ``jax.lax.dot_general``.
    """
    dims = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
    return lax.dot_general(x, kernel, (dims, ((), ())), precision=precision)


def _flat_init(init: Callable[..., Any], count: int) -> Callable[..., Array]:
    # As in `nn.DenseGeneral`: values are drawn for a matrix (or a vector, for a bias), whose fan-in scales the values.
    def reshaped(rng: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        flat = (math.prod(shape[:count]), math.prod(shape[count:]))
        leaf = init(rng, flat if count else flat[1:], dtype)
        return trees.map_values(lambda flat: flat.value.reshape(shape), leaf)

    return reshaped


def _replicated_along(axis_name: str, init: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an initialiser (key, shape, dtype) with the values of ``init``, whose box does not name the mesh axis.

    Axes that ``init`` names for the dims are kept, except ``axis_name``; if no axis remains, the value has no box.
    """

    def replicated_init(rng: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        leaf = init(rng, shape, dtype)
        box = leaf_of(leaf)
        if axis_name not in box.axes:
            return leaf
        names = [tuple(axis for axis in entry_axes(entry) if axis != axis_name) for entry in box.names]
        if not any(names):
            return box.value
        return Sharded(box.value, tuple(map(axes_entry, names)), marks=marks_of_rules(leaf))

    return replicated_init


class Split(nn.Module, kw_only=True):
    """Base class of layers that are split over a mesh axis; has the common, keyword-only fields of ``ColumnDense``."""

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    axis_name: str = DEFAULT_AXIS
    sequence_dim: int | None = None
    ring: bool = False

    def _shared_fields(self) -> dict[str, Any]:
        """Returns a dict of the fields that this layer passes to the column- and row-split layers inside, by name.

        The fields are ``use_bias``, both dtypes, ``kernel_init``, ``axis_name``, ``sequence_dim`` and ``ring``.
        """
        names = ("use_bias", "dtype", "param_dtype", "kernel_init", "axis_name", "sequence_dim", "ring")
        return {name: getattr(self, name) for name in names}

    @property
    def _called(self) -> str:
        """The quoted path of this layer, for errors."""
        return f"'{'/'.join(self.path)}'"


class _SplitDense(Split):
    """Base class of column- and row-split layers: the fields of ``nn.DenseGeneral``, and options of the split."""

    features: int | Sequence[int]
    axis: int | Sequence[int] = -1
    use_bias: bool = True
    bias_init: Callable[..., Any] = nn.initializers.zeros_init()
    precision: Any = None

    @property
    def _outputs(self) -> tuple[int, ...]:
        return (self.features,) if isinstance(self.features, int) else tuple(self.features)

    def _check_ring(self) -> None:
        if self.ring and self.sequence_dim is None:
            raise ValueError(
                f"{self._called}: ring=True hides the gather or the scatter of tokens, and has no effect "
                "without sequence_dim=. Pass the dim of split tokens, such as 1 for [b, t, d], or ring=False."
            )


class ColumnDense(_SplitDense):
    """``nn.Dense`` or ``nn.DenseGeneral`` with the features split over ``axis_name``.

    The parameters ``kernel`` and ``bias`` have the global shapes and initial values of ``nn.DenseGeneral``, and with a
    single feature dim of ``nn.Dense``. The first feature dim is split.

    >>> layer = ColumnDense(32, axis_name="fsdp")
    >>> params = init_sharded(layer, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes="dp")["params"]
    >>> params["kernel"].names, params["kernel"].value.shape
    ((None, 'fsdp'), (16, 32))
    >>> apply = jax.shard_map(
    ...     lambda p, x: layer.apply({"params": p}, x), mesh=mesh,
    ...     in_specs=(partition_specs(params, mesh), jax.P("dp")), out_specs=jax.P("dp", "fsdp"))
    >>> jax.jit(apply)(params, jnp.ones((8, 16))).shape
    (8, 32)

    Attributes not listed here are as in ``nn.DenseGeneral``.

    Attributes:
      axis: the dims of the input to sum over: the last dims, in order.
      axis_name: the mesh axis.
      sequence_dim: the dim of tokens along which the input is split over the axis, such as 1 of [b, t, d]; None: the
        input is replicated.
      ring: gather tokens in ring steps interleaved with the product, which hides the transfer. Needs ``sequence_dim``,
        else the call raises a ``ValueError``.
      copied: allow a first feature dim that is smaller than the number of devices: several devices then compute the
        same features (key heads of grouped-query attention), and the parameters stay replicated along the axis.
    """

    copied: bool = False

    def __call__(self, x: Array) -> Array:
        """Returns this device's features of all tokens: [b, t, d] -> [b, t, f / n].

        With ``sequence_dim`` the input has this device's tokens: [b, t / n, d] -> [b, t, f / n].
        """
        return columns_of([self], x)[0]

    @nn.compact
    def operands(self, x: Array) -> tuple[Array, Array, Array | None]:
        """Creates or reads the parameters; returns (x, kernel, bias), cast to the dtype in which the layer computes.

        ``x`` is not gathered. Kernel and bias are this device's columns; the bias is None without ``use_bias``.

        Raises:
          ValueError: ``axis`` is not the last dims; ``x`` has only this device's share of the features; or as
            ``split_param``.
        """
        count = last_dims(self.axis, x, self._called)
        shape = (*x.shape[x.ndim - count :], *self._outputs)
        devices = axis_devices(self.axis_name, self._called)
        if share_of_input(self, x, count, devices) == "share":  # before Linen compares shapes
            raise ValueError(
                f"{self._called} is split by columns, and its input of shape {x.shape} has {x.shape[-count]} of the "
                f"{x.shape[-count] * devices} features of its kernel: a column-split layer before has split them over "
                f"the {devices} devices along {self.axis_name!r}. Make {self._called} a RowDense ('row' in "
                "split_modules)."
            )
        kernel = self._columns("kernel", _flat_init(self.kernel_init, count), shape)
        bias = self._columns("bias", _flat_init(self.bias_init, 0), self._outputs) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        return x, kernel, bias

    def _columns(self, name: str, init: Callable[..., Any], shape: tuple[int, ...]) -> Array:
        """Creates or reads the parameter ``name`` of global ``shape``; returns the columns of this device.

        Columns are entries of the first feature dim. Usually the columns are this device's shard of 1 / n. If heads are
        copied (``copied``, with fewer heads than devices), the parameter is replicated, and the columns are the single
        head that this device computes. In ``init``, or on a single device, all columns are returned. ``init`` is the
        initialiser (key, shape, dtype).
        """
        dim, axis = len(shape) - len(self._outputs), self.axis_name
        copies = self._devices_per_head() if self.copied else 1
        if copies == 1:
            check_features_divide(self._outputs, param_shards(axis, self._called), axis, self._called)
            return split_param(self, name, init, shape, self.param_dtype, dim=dim, axis_name=axis)
        full: Array = self.param(name, _replicated_along(axis, init), shape, self.param_dtype)
        if axis_devices(axis, self._called) == 1:
            return full
        # Devices read different heads of the parameter, so gradients are summed: over the copies of a head, with zeros
        # from the remaining heads.
        with jax.named_scope("sync_gradients"):
            full = enter_split(full, axis, caller=self._called)
        return lax.dynamic_slice_in_dim(full, collectives.axis_index((axis,)) // copies, 1, dim)

    def _devices_per_head(self) -> int:
        n, heads = param_shards(self.axis_name, self._called), self._outputs[0]
        if n > heads and n % heads:
            raise ValueError(
                f"{self._called}: {heads} heads are to be copied to the {n} devices along {self.axis_name!r}, which "
                f"would have {heads}/{n} of a head each. Take {-(-n // heads) * heads} devices along it, or a number "
                "that divides the heads."
            )
        return max(1, n // heads)


# Fields in which the layers of ``columns_of`` must agree.
_EQUAL_FIELDS = ("axis", "axis_name", "sequence_dim", "ring", "precision", "dtype")


def columns_of(layers: Sequence[ColumnDense], x: Array) -> list[Array]:
    """Applies several column-split layers to the same input, with one communication of the input for all layers.

    >>> class Gated(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         gate, up = columns_of([ColumnDense(8, name="gate"), ColumnDense(8, name="up")], x)
    ...         return gate * up
    >>> Gated().init_with_output(jax.random.key(0), jnp.ones((2, 3, 4)))[0].shape
    (2, 3, 8)

    Returns:
      For each layer this device's features of all tokens, [b, t, f / n].
    Raises:
      ValueError: the layers differ in ``axis``, ``axis_name``, ``sequence_dim``, ``ring``, ``precision`` or ``dtype``;
        or as a call of a single layer.
    """
    first = layers[0]
    for layer, name in itertools.product(layers[1:], _EQUAL_FIELDS):
        if (got := getattr(layer, name)) != (want := getattr(first, name)):
            raise ValueError(
                f"columns_of: {first._called} has {name}={want!r}, and {layer._called} has {got!r}. Layers of the "
                "same input must agree: pass equal options, or call each layer separately."
            )
    first._check_ring()
    operands = [layer.operands(x) for layer in layers]
    if first.sequence_dim is None and (n := axis_devices(first.axis_name, first._called)) > 1:
        check_equal(x, first.axis_name, n, first._called)
    products = column_products(
        operands[0][0],
        [kernel for _, kernel, _ in operands],
        first.axis_name,
        sequence_dim=first.sequence_dim,
        ring=first.ring,
        product=partial(contracted, count=last_dims(first.axis, x, first._called), precision=first.precision),
        caller=first._called,
    )
    return [y if bias is None else y + bias for y, (_, _, bias) in zip(products, operands, strict=True)]


class RowDense(_SplitDense):
    """``nn.Dense`` or ``nn.DenseGeneral`` that sums over features split over ``axis_name``.

    The input is the output of a ``ColumnDense``. Parameters have the global shapes and initial values of
    ``nn.DenseGeneral``; the kernel is split along its first dim, the bias is replicated.

    >>> mlp = nn.Sequential([ColumnDense(64, axis_name="fsdp"), nn.gelu, RowDense(16, axis_name="fsdp")])
    >>> params = init_sharded(mlp, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes="dp")["params"]
    >>> params["layers_2"]["kernel"].names, params["layers_2"]["kernel"].value.shape, params["layers_2"]["bias"].shape
    (('fsdp', None), (64, 16), (16,))

    Attributes not listed here are as in ``ColumnDense``.

    Attributes:
      sequence_dim: the dim of tokens along which the result is split over the axis; None: the result is replicated.
      ring: scatter tokens in ring steps interleaved with the product, which hides the transfer. Needs ``sequence_dim``,
        else the call raises a ``ValueError``.
    """

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the sum over the n devices of the local products with the kernel: [b, t, f / n] -> [b, t, d].

        With ``sequence_dim`` each device gets its part of the tokens of the sum, [b, t / n, d].

        The bias is added once, to the sum.
        """
        self._check_ring()
        devices, count = axis_devices(self.axis_name, self._called), last_dims(self.axis, x, self._called)
        inputs = x.shape[x.ndim - count :]
        if share_of_input(self, x, count, devices) == "all":  # before Linen compares shapes
            raise ValueError(
                f"{self._called} is split by rows, and its input of shape {x.shape} has all {inputs[0]} features, "
                f"not the {inputs[0] // devices} of each of the {devices} devices along {self.axis_name!r}. Make the "
                "layer before a ColumnDense ('column' in split_modules), or swap the kinds of the two layers."
            )
        if devices > 1:
            check_differs(x, self.axis_name, devices, self._called)
        shape = (inputs[0] * devices, *inputs[1:], *self._outputs)
        init = _flat_init(self.kernel_init, count)
        kernel = split_param(self, "kernel", init, shape, self.param_dtype, dim=0, axis_name=self.axis_name)
        bias = None
        if self.use_bias:
            bias_init = _replicated_along(self.axis_name, _flat_init(self.bias_init, 0))
            bias = self.param("bias", bias_init, self._outputs, self.param_dtype)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = row_product(
            x,
            kernel,
            self.axis_name,
            sequence_dim=self.sequence_dim,
            ring=self.ring,
            product=partial(contracted, count=count, precision=self.precision),
            caller=self._called,
        )
        if bias is None:
            return y
        # With split tokens each device adds the bias to different tokens, so the gradients are summed; with all tokens
        # on each device the gradients are equal.
        if self.sequence_dim is None:
            return y + bias
        with jax.named_scope("sync_gradients"):
            return y + enter_split(bias, self.axis_name, caller=self._called)


class SwiGLU(Split):
    """``down(silu(gate(x)) * up(x))`` with hidden features split over an axis: a single gather and a single sum.

    >>> SwiGLU(32).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)

    Further fields as in ``ColumnDense`` and ``RowDense``.

    Attributes:
      hidden: number of hidden features.
      activation: function applied to the output of the layer ``gate``.
    """

    hidden: int
    activation: Callable[[Array], Array] = nn.silu
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the output [b, t, d] for ``x`` [b, t, d]; with ``sequence_dim`` both have this device's tokens.

        Without ``sequence_dim`` both are replicated over the axis.
        """
        layers = [ColumnDense(self.hidden, **self._shared_fields(), name=name) for name in ("gate", "up")]
        gate, up = columns_of(layers, x)
        return RowDense(x.shape[-1], **self._shared_fields(), name="down")(self.activation(gate) * up)

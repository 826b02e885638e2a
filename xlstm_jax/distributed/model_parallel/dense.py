"""Dense layers whose kernels are split over a mesh axis, by columns or by rows (Megatron-LM, arXiv:1909.08053).

With n devices along "tp", and x[..., d] whole:
  column   x[..., d]    @ W[d, f / n]  ->  y[..., f / n]   each device has its own features, of all tokens
  row      y[..., f / n] @ W[f / n, d] ->  z[..., d]       each device has a term of the sum, which is taken over "tp"
A row-split layer takes what column-split ones return, so that two products have one sum.

With ``sequence_dim`` activations around the two are split along their tokens (arXiv:2205.05198): tokens are gathered
before the columns, and the sum after the rows is scattered over tokens. The bytes are the same, and what lies between
such pairs (norms, dropout, residuals, and what is kept of them for the backward pass) is an n-th. The gathered tokens
that the columns multiply are kept whole, as without ``sequence_dim``; an ``nn.remat`` around gathers them again.

With ``ring`` the gather, or the scatter, is n - 1 steps of a ring beside n pieces of the product (collective matmul):
while one piece is multiplied, the next one travels. Its transpose, which JAX makes, is a ring again.
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
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, rebox
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import axes_entry, entry_axes
from xlstm_jax.distributed.model_parallel.activations import (
    check_differs,
    check_equal,
    check_own_tokens,
    check_tokens,
    devices_here,
    enter_split,
    gather_tokens,
    leave_split,
    parts_of_params,
    scatter_tokens,
)
from xlstm_jax.wording import joined

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
    """``module.param(name, init, shape, dtype)`` split along ``dim``: this device's part of it, inside ``shard_map``.

    The values are those of the whole parameter, which has the global ``shape``; the box names the axis, beside the axes
    that ``init`` names for other dims. For layers of your own, within a compact method.

    >>> class Scale(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):  # [b, t, f / n], as a ColumnDense returns it
    ...         return x * split_param(self, "scale", nn.initializers.ones, (8,), jnp.float32, dim=0)
    >>> Scale().init_with_output(jax.random.key(0), jnp.ones((2, 3, 8)))[1]["params"]["scale"].shape
    (8,)

    Raises:
      ValueError: the axis is not there, or does not divide the dim, ``init`` names that dim or that axis otherwise, or
        the parameter comes whole; names the parameter.
    """
    path, dim = "/".join((*module.path, name)), dim % len(shape)
    count, here = parts_of_params(axis_name, path), devices_here(axis_name, path)
    if shape[dim] % count:
        raise ValueError(
            f"'{path}' of shape {shape} is to be split along dim {dim}, of size {shape[dim]}, which the {count} "
            f"devices along {axis_name!r} do not divide. Choose a size that is a multiple of {count}, as "
            f"{-(-shape[dim] // count) * count}, or fewer devices along {axis_name!r}: {_divisors(shape[dim], count)}."
        )

    # Linen would compare shapes, and name neither the axis nor the wrapper.
    if here > 1 and module.has_variable("params", name):
        _check_own_part(path, trees.stored_values(module.get_variable("params", name)), shape, dim, axis_name)

    def own_part(rng: Array) -> Any:
        leaf = init(rng, shape, dtype)
        box = leaf_of(leaf)
        value = collectives.own_shard(box.value, dim, (axis_name,)) if here > 1 else box.value
        if axis_name not in jax.sharding.get_abstract_mesh().shape:
            return rebox(leaf, value)  # on one device, where a name of an axis that is not there would be refused
        names = (*box.names[:dim], axis_name, *box.names[dim + 1 :])
        if box.names[dim] not in (None, axis_name) or (axis_name in box.axes and box.names[dim] is None):
            raise ValueError(
                f"'{path}' is split along dim {dim} over {axis_name!r} by its layer, and the names of its initialiser "
                f"are {box.names}. Other dims may have other axes: leave dim {dim} and {axis_name!r} to the layer, in "
                "nn.with_partitioning or in the rules of logical names."
            )
        return Sharded(value, names, model_axes=(axis_name,))

    value: Array = module.param(name, own_part)
    return value


def _check_own_part(path: str, found: Array, shape: tuple[int, ...], dim: int, axis_name: str) -> None:
    if found.shape == shape:
        raise ValueError(
            f"'{path}' of shape {shape} is whole on each of the {collectives.axis_size((axis_name,))} devices along "
            f"{axis_name!r}, over which its layer splits dim {dim}. Leave {axis_name!r} out of the axis_name of its "
            "wrapper, which would gather it there; into shard_map it comes by in_specs=partition_specs(params, mesh)."
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
    """``product(x, kernel)`` for each device's part of several kernels; ``x`` enters, or is gathered, once for all.

    ``x`` [..., d] is equal on all devices, or with ``sequence_dim`` each device's share of the tokens along that dim,
    which are gathered; with ``ring`` in the steps of a ring, beside the products.
    """
    if sequence_dim is None:
        entered = enter_split(x, axis_name, caller=caller)
        return [product(entered, kernel) for kernel in kernels]
    if not ring or devices_here(axis_name, caller) == 1:
        entered = gather_tokens(x, sequence_dim, axis_name, caller=caller)
        return [product(entered, kernel) for kernel in kernels]
    check_own_tokens(x, sequence_dim, axis_name, caller)
    return _gathered_in_a_ring(x, kernels, axis_name, sequence_dim, product)


def _gathered_in_a_ring(x: Array, kernels: Sequence[Array], axis_name: str, dim: int, product: Product) -> list[Array]:
    """Each device multiplies the tokens that it has, and hands them on; after n products it has seen all."""
    n, me = collectives.axis_size((axis_name,)), collectives.axis_index((axis_name,))
    share, pieces = collectives.to_varying(x, (axis_name,)), []
    for step in range(n):
        # Sent before the products, which do not read what arrives: the compiler may do both at a time.
        arriving = collectives.shift(share, (axis_name,)) if step < n - 1 else share
        pieces.append([product(share, kernel) for kernel in kernels])
        share = arriving
    # The last piece is that of the next device, and the first one this device's own: rolled, each lies in its place.
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
    """The sum over devices of ``product(x, kernel)`` with each device's features and rows.

    ``x`` [..., f / n] has all tokens. With ``sequence_dim`` the sum is split along that dim of tokens, with ``ring`` in
    the steps of a ring, beside the products; without, it is whole, and equal everywhere.
    """
    n = devices_here(axis_name, caller)
    if sequence_dim is None:
        return leave_split(product(x, kernel), axis_name, caller=caller)
    if not ring or n == 1:
        return scatter_tokens(product(x, kernel), sequence_dim, axis_name, caller=caller)
    check_differs(x, axis_name, n, caller)
    check_tokens(x, sequence_dim, axis_name, caller)
    return _scattered_in_a_ring(x, kernel, axis_name, sequence_dim, product)


def _scattered_in_a_ring(x: Array, kernel: Array, axis_name: str, dim: int, product: Product) -> Array:
    """The sum of a share of the tokens goes round, each device adding its term, and ends where it is kept."""
    n, me = collectives.axis_size((axis_name,)), collectives.axis_index((axis_name,))
    size, total = x.shape[dim] // n, None
    for step in range(n):
        # The term does not read the sum that arrives, so the compiler may do both at a time.
        kept_by = (me + n - 1 - step) % n  # of the sum that this device now holds
        term = product(lax.dynamic_slice_in_dim(x, kept_by * size, size, dim), kernel)
        total = term if total is None else collectives.shift(total, (axis_name,)) + term
    assert total is not None
    return total


# --------------------------------------------------------------------------------------------------------------- layers


def _last_dims(axis: int | Sequence[int], x: Array, caller: str) -> int:
    """How many of the last dims of ``x`` a layer sums over, as its field ``axis`` says."""
    given = (axis,) if isinstance(axis, int) else tuple(axis)
    dims = tuple(dim % x.ndim for dim in given)
    if dims != tuple(range(x.ndim - len(dims), x.ndim)):
        raise ValueError(
            f"{caller}: axis={axis} are not the last dims of an input of shape {x.shape}, in their order; a split "
            "layer sums over these. Transpose the input."
        )
    return len(dims)


FUSED = {2: " (keys and values)", 3: " (queries, keys and values)"}  # what one layer may compute by its first dim


def check_features_divide(features: tuple[int, ...], count: int, axis_name: str, caller: str) -> None:
    """Raises where the devices do not divide the first of several feature dims, and that dim may count layers.

    Features (3, heads, dim) are those of queries, keys and values. Any other dim that is no multiple is refused by
    ``split_param``.
    """
    first, *others = features
    looks_fused = bool(others) and (first in FUSED or (len(others) > 1 and others[0] % count == 0))
    if looks_fused and first % count:
        raise several_in_one(features, count, axis_name, caller)


def several_in_one(features: tuple[int, ...], count: int, axis_name: str, caller: str) -> ValueError:
    """Returns the error for features such as (3, heads, dim), of which not the heads would be split."""
    first, second, *rest = features
    divided, heads = ", which do not divide it", f"; if it counts heads, take {_divisors(first, count)} devices"
    if first % count == 0:
        divided, heads = ": one for each", ""
    of_each = (second, *rest) if rest else second
    multiple = "" if second % count == 0 else f", with a multiple of {count} in place of {second}"
    return ValueError(
        f"{caller} has the features {features}, and a column-split layer splits the first dim, of {first}, over the "
        f"{count} devices along {axis_name!r}{divided}. If that dim is {first} layers in one{FUSED.get(first, '')}, "
        f"make {first} layers of features {of_each}, each split by columns, or put the dim that is to be split "
        f"first: {(second, first, *rest)}{multiple}{heads}."
    )


def _divisors(size: int, most: int) -> str:
    """Returns the numbers up to ``most`` that divide a size, in words."""
    return joined([str(n) for n in range(1, min(size, most) + 1) if size % n == 0], "or")


def share_of_input(layer: nn.Module, x: Array, count: int, devices: int) -> str:
    """Returns "all" or "share" where the input has all features, or a device's share, and the kernel has the other.

    Compared are the last ``count`` dims of the input with the first dims of the kernel as this device has it; "" where
    they agree, or differ in another way.
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


def _contracted(x: Array, kernel: Array, count: int, precision: Any) -> Array:
    """[..., *inputs], [*inputs, *features] -> [..., *features], summed over ``count`` dims."""
    dims = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
    return lax.dot_general(x, kernel, (dims, ((), ())), precision=precision)


def _flat_init(init: Callable[..., Any], count: int) -> Callable[..., Array]:
    # As `nn.DenseGeneral` has it: values are drawn for a matrix (of a bias, a vector), whose fan-in scales them.
    def reshaped(rng: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        flat = (math.prod(shape[:count]), math.prod(shape[count:]))
        leaf = init(rng, flat if count else flat[1:], dtype)
        return trees.map_values(lambda flat: flat.value.reshape(shape), leaf)

    return reshaped


def _whole_along(axis_name: str, init: Callable[..., Any]) -> Callable[..., Any]:
    """The initialiser of a parameter that is whole along the axis, also where its names would split it there."""

    def without(rng: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        leaf = init(rng, shape, dtype)
        box = leaf_of(leaf)
        if axis_name not in box.axes:
            return leaf
        kept = [tuple(axis for axis in entry_axes(entry) if axis != axis_name) for entry in box.names]
        return Sharded(box.value, tuple(map(axes_entry, kept))) if any(kept) else box.value

    return without


class Split(nn.Module, kw_only=True):
    """The fields of all layers that are split over an axis; by keyword."""

    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    axis_name: str = DEFAULT_AXIS
    sequence_dim: int | None = None
    ring: bool = False

    def _how(self) -> dict[str, Any]:
        """These fields, for the layers within."""
        names = ("use_bias", "dtype", "param_dtype", "kernel_init", "axis_name", "sequence_dim", "ring")
        return {name: getattr(self, name) for name in names}

    @property
    def _called(self) -> str:
        return f"'{'/'.join(self.path)}'"


class _SplitDense(Split):
    """The fields of column- and row-split layers: as those of ``nn.DenseGeneral``, and how the layer is split."""

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
                f"{self._called}: ring=True hides the gather or the scatter of tokens, and without sequence_dim= there "
                "is none. Pass the dim along which tokens are split, as 1 of [b, t, d], or ring=False."
            )


class ColumnDense(_SplitDense):
    """``nn.Dense``, or ``nn.DenseGeneral``, of which each device along ``axis_name`` computes its own features.

    Parameters, ``kernel`` and ``bias``, have the global shapes and the initial values that they have in
    ``nn.DenseGeneral``, and so of one feature dim in ``nn.Dense``. The first feature dim is split.

    >>> layer = ColumnDense(32, axis_name="fsdp")
    >>> params = init_sharded(layer, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes="dp")["params"]
    >>> params["kernel"].names, params["kernel"].value.shape
    ((None, 'fsdp'), (16, 32))
    >>> apply = jax.shard_map(
    ...     lambda p, x: layer.apply({"params": p}, x), mesh=mesh,
    ...     in_specs=(partition_specs(params, mesh), jax.P("dp")), out_specs=jax.P("dp", "fsdp"))
    >>> jax.jit(apply)(params, jnp.ones((8, 16))).shape
    (8, 32)

    All attributes but these are as in ``nn.DenseGeneral``.

    Attributes:
      axis: the dims of the input that are summed over; the last ones, in their order.
      axis_name: the mesh axis.
      sequence_dim: the dim of tokens along which the input is split over the axis, as 1 of [b, t, d]; None: the input
        is whole, and equal on all devices.
      ring: with ``sequence_dim``, gather tokens in the steps of a ring, beside the product.
      copied: of fewer features than devices, in the first feature dim, several devices compute the same: key heads of
        grouped-query attention. The parameters then stay whole along the axis.
    """

    copied: bool = False

    def __call__(self, x: Array) -> Array:
        """[b, t, d] -> [b, t, f / n]; all tokens, also where the input is split along them."""
        return columns_of([self], x)[0]

    @nn.compact
    def operands(self, x: Array) -> tuple[Array, Array, Array | None]:
        """(x, kernel, bias) in the dtype of the product; kernel and bias are this device's columns."""
        count = _last_dims(self.axis, x, self._called)
        shape = (*x.shape[x.ndim - count :], *self._outputs)
        here = devices_here(self.axis_name, self._called)
        if share_of_input(self, x, count, here) == "share":  # before Linen compares shapes
            raise ValueError(
                f"{self._called} is split by columns, and its input of shape {x.shape} has {x.shape[-count]} of the "
                f"{x.shape[-count] * here} features that its kernel multiplies: a column-split layer before it has "
                f"split them over the {here} devices along {self.axis_name!r}. Split {self._called} by rows, as a "
                "RowDense, or 'row' in split_modules."
            )
        kernel = self._columns("kernel", _flat_init(self.kernel_init, count), shape)
        bias = self._columns("bias", _flat_init(self.bias_init, 0), self._outputs) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        return x, kernel, bias

    def _columns(self, name: str, init: Callable[..., Any], shape: tuple[int, ...]) -> Array:
        dim, axis = len(shape) - len(self._outputs), self.axis_name
        copies = self._devices_per_head() if self.copied else 1
        if copies == 1:
            check_features_divide(self._outputs, parts_of_params(axis, self._called), axis, self._called)
            return split_param(self, name, init, shape, self.param_dtype, dim=dim, axis_name=axis)
        whole: Array = self.param(name, _whole_along(axis, init), shape, self.param_dtype)
        if devices_here(axis, self._called) == 1:
            return whole
        # Devices read different heads of it, so gradients are summed: those of copies, and zeros of the other heads.
        with jax.named_scope("sync_gradients"):
            whole = enter_split(whole, axis, caller=self._called)
        return lax.dynamic_slice_in_dim(whole, collectives.axis_index((axis,)) // copies, 1, dim)

    def _devices_per_head(self) -> int:
        n, heads = parts_of_params(self.axis_name, self._called), self._outputs[0]
        if n > heads and n % heads:
            raise ValueError(
                f"{self._called}: {heads} heads are to be copied to the {n} devices along {self.axis_name!r}, which "
                f"would have {heads}/{n} of a head each. Take {-(-n // heads) * heads} devices along it, or a number "
                "that divides the heads."
            )
        return max(1, n // heads)


_OF_ONE_INPUT = ("axis", "axis_name", "sequence_dim", "ring", "precision", "dtype")


def columns_of(layers: Sequence[ColumnDense], x: Array) -> list[Array]:
    """What several column-split layers return of one input, which enters, or is gathered, once for all of them.

    >>> class Gated(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         gate, up = columns_of([ColumnDense(8, name="gate"), ColumnDense(8, name="up")], x)
    ...         return gate * up
    >>> Gated().init_with_output(jax.random.key(0), jnp.ones((2, 3, 4)))[0].shape
    (2, 3, 8)

    Raises:
      ValueError: the layers differ in ``axis``, ``axis_name``, ``sequence_dim``, ``ring``, ``precision`` or ``dtype``.
    """
    first = layers[0]
    for layer, name in itertools.product(layers[1:], _OF_ONE_INPUT):
        if (found := getattr(layer, name)) != (want := getattr(first, name)):
            raise ValueError(
                f"columns_of: {first._called} has {name}={want!r}, and {layer._called} has {found!r}. Layers of one "
                "input enter it once: give them the same, or call each by itself."
            )
    first._check_ring()
    given = [layer.operands(x) for layer in layers]
    if first.sequence_dim is None and (n := devices_here(first.axis_name, first._called)) > 1:
        check_equal(x, first.axis_name, n, first._called)
    products = column_products(
        given[0][0],
        [kernel for _, kernel, _ in given],
        first.axis_name,
        sequence_dim=first.sequence_dim,
        ring=first.ring,
        product=partial(_contracted, count=_last_dims(first.axis, x, first._called), precision=first.precision),
        caller=first._called,
    )
    return [y if bias is None else y + bias for y, (_, _, bias) in zip(products, given, strict=True)]


class RowDense(_SplitDense):
    """``nn.Dense``, or ``nn.DenseGeneral``, that sums over features of which each device has its share.

    The input is what a ``ColumnDense`` has returned. Parameters have the global shapes and initial values that they
    have in ``nn.DenseGeneral``; the kernel is split along its first dim, the bias is whole.

    >>> mlp = nn.Sequential([ColumnDense(64, axis_name="fsdp"), nn.gelu, RowDense(16, axis_name="fsdp")])
    >>> params = init_sharded(mlp, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes="dp")["params"]
    >>> params["layers_2"]["kernel"].names, params["layers_2"]["kernel"].value.shape, params["layers_2"]["bias"].shape
    (('fsdp', None), (64, 16), (16,))

    All attributes but these are as in ``ColumnDense``.

    Attributes:
      sequence_dim: the dim of tokens along which the result is split over the axis; None: it is whole, and equal.
      ring: with ``sequence_dim``, scatter tokens in the steps of a ring, beside the product.
    """

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[b, t, f / n] -> [b, t, d], or [b, t / n, d] with ``sequence_dim``."""
        self._check_ring()
        here, count = devices_here(self.axis_name, self._called), _last_dims(self.axis, x, self._called)
        inputs = x.shape[x.ndim - count :]
        if share_of_input(self, x, count, here) == "all":  # before Linen compares shapes
            raise ValueError(
                f"{self._called} is split by rows, and its input of shape {x.shape} has all {inputs[0]} features, "
                f"where this device's part of the kernel multiplies {inputs[0] // here}: no column-split layer before "
                f"it has split them over the {here} devices along {self.axis_name!r}. Split the layer before it by "
                "columns; or, if this is the first of the two, this one by columns (a ColumnDense, or 'column' in "
                "split_modules) and the next by rows."
            )
        if here > 1:
            check_differs(x, self.axis_name, here, self._called)
        shape = (inputs[0] * here, *inputs[1:], *self._outputs)
        init = _flat_init(self.kernel_init, count)
        kernel = split_param(self, "kernel", init, shape, self.param_dtype, dim=0, axis_name=self.axis_name)
        bias = None
        if self.use_bias:
            bias_init = _whole_along(self.axis_name, _flat_init(self.bias_init, 0))
            bias = self.param("bias", bias_init, self._outputs, self.param_dtype)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = row_product(
            x,
            kernel,
            self.axis_name,
            sequence_dim=self.sequence_dim,
            ring=self.ring,
            product=partial(_contracted, count=count, precision=self.precision),
            caller=self._called,
        )
        if bias is None:
            return y
        # Each device adds it to tokens of its own, so its gradient is summed; where all have all tokens, it is equal.
        if self.sequence_dim is None:
            return y + bias
        with jax.named_scope("sync_gradients"):
            return y + enter_split(bias, self.axis_name, caller=self._called)


class SwiGLU(Split):
    """``down(silu(gate(x)) * up(x))`` with its hidden features split over an axis; one gather, and one sum.

    >>> SwiGLU(32).init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)

    The fields below come beside those of ``ColumnDense`` and ``RowDense``, which have the same meaning.

    Attributes:
      hidden: the number of hidden features.
      activation: of the gate.
    """

    hidden: int
    activation: Callable[[Array], Array] = nn.silu
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[b, t, d] -> [b, t, d]; with ``sequence_dim`` both are this device's tokens."""
        layers = [ColumnDense(self.hidden, **self._how(), name=name) for name in ("gate", "up")]
        gate, up = columns_of(layers, x)
        return RowDense(x.shape[-1], **self._how(), name="down")(self.activation(gate) * up)

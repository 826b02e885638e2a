"""Communication of a leaf: the format of sent shards, the options, the gather of an array and its backward rule.

[Note: path of a shard through a gather]
  stored     W[d_fsdp, f]                              each device keeps its shard
  sent       Wire.send(shard)                          the shard was cast to the gather dtype before
  arrived    all-gather of the sent arrays along dim Wire.along(d), in a stage per axis
  used       W[d, f] = Wire.receive(arrived)           unpacked once, after the last stage
  gradient   dW[d, f]  -->  dW[d_fsdp, f]              reduce-scatter, mean over N, then over copies of the shard, as if
                                                       ``send`` and ``receive`` changed no value

``gather_params`` calls the gather, ``gather_dims``, for each leaf of a tree, and so does a box when it is read.
``prefetch`` runs the same steps separately. The gather, its backward rule, ``prefetch`` and plans use only the methods
of ``Wire``, and depend on no format. Formats that users select by ``gather_dtype`` are ``WireFormat``s in separate
files, registered in ``WIRE_FORMATS`` with a row each in ``formats``. A feature computes wires from a module's state as
an ``Extension`` of a unit.

The box of a leaf holds the options, ``Communication``:
  gather          shards are sent in ``gather_dtype``; default: the stored dtype
  reduce-scatter  gradients are summed in ``grad_scatter_dtype``; default: float32, or the leaf's dtype if wider
  copies          gradients of copies of a shard are averaged as ``Copies`` defines

Only floats are ever cast, and only to floats of the same kind (real, complex). Nothing is narrowed unless a user asks.
A value gathered in a ``WireFormat`` has the leaf's dtype.

``RunningLoss`` has facts on the loss function under trace, set by ``value_and_grad`` and read by each gather. The facts
are in a context variable, because the user's model runs between ``value_and_grad``, which has the axes, and the
gathers. The variable is read while a model is traced, never while a step runs.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import (
    AxisEntry,
    as_axis_names,
    axes_entry,
    entry_axes,
    is_prng_key,
    term_of_mean,
    value_dtype,
    wide_dtype,
    widened,
)
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.data_parallel.wire.second_gradients import not_transposed
from xlstm_jax.formatting import shortened
from xlstm_jax.introspection import transposes_a_shard_map
from xlstm_jax.private_names import BatchTracer
from xlstm_jax.program_names import INTER_HOST_AXES


class Wire(Protocol):
    """Format in which a gather sends a leaf's shards. A pytree: arrays of the format (a scale, say) are children.

    ``rounds_again``: True if sending a received value a second time rounds the value again.
    """

    rounds_again: ClassVar[bool]

    def send(self, shard: jax.Array) -> jax.Array:
        """Returns the array to send in place of ``shard``, such as 8-bit codes of its values.

        ``shard`` is this device's shard of a leaf, [..., d / N, ...] for a dim d that is split over N devices, already
        cast to the gather dtype.
        """
        ...

    def along(self, dim: int) -> int:
        """Returns the dim along which the gather concatenates the sent arrays, for a leaf that is split along ``dim``.

        The result may differ from ``dim`` if ``send`` reshapes the shard.
        """
        ...

    def receive(self, arrived: jax.Array) -> jax.Array:
        """Returns the gathered value [..., d, ...], in the gather dtype, from the sent arrays of N devices.

        ``arrived`` has the results of ``send``, concatenated in device order along the dim that ``along`` returns. The
        split dim has N times the size of a shard.
        """
        ...


@jax.tree_util.register_static
@dataclass(frozen=True)
class Unchanged:
    """Wire that sends shards unchanged."""

    rounds_again: ClassVar[bool] = False

    def send(self, shard: jax.Array) -> jax.Array:
        return shard

    def along(self, dim: int) -> int:
        return dim

    def receive(self, arrived: jax.Array) -> jax.Array:
        return arrived


class WireFormat:
    """Format for sending only, selected by ``gather_dtype``: a gathered value has the dtype of its leaf.

    Subclasses implement ``wire``, ``itemsize`` and ``nbytes``. A format that can also average gradients of copies
    sets ``averages = True`` and implements ``mean_of_terms`` and ``mean_error``.
    """

    averages: ClassVar[bool] = False

    def supports_dtype(self, dtype: DType) -> bool:
        """Returns whether shards of this dtype are sent in the format; shards of other dtypes are sent unchanged.

        Here True for real floats only; a subclass may override the method.
        """
        return bool(jnp.issubdtype(dtype, jnp.floating))

    def wire(self, shape: tuple[int, ...], dtype: DType, dim: int) -> Wire:
        """Returns the ``Wire``, which packs and unpacks shards of this shape and dtype in a gather along ``dim``.

        Abstract.
        """
        raise NotImplementedError

    @property
    def itemsize(self) -> float:
        """Bytes sent per value, on average, in an array without padding. Abstract."""
        raise NotImplementedError

    def nbytes(self, shape: tuple[int, ...], dim: int) -> int:
        """Returns the number of bytes of one shard of this shape, as sent in a gather along ``dim``. Abstract."""
        raise NotImplementedError

    def mean_of_terms(self, term: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the sum of the devices' float32 ``term`` over the mesh ``axes``, sent in this format. Abstract.

        Each device has divided its value by the number of devices, so the sum is a mean. The result is bitwise equal on
        these devices, and equal by type.
        """
        raise NotImplementedError

    def mean_error(self, terms: np.ndarray) -> np.ndarray:
        """Returns the largest error of a single rounding to this format, for each entry of ``terms``. Abstract.

        ``terms`` is a vector with the absolute values of a gradient's entries. The result may have another shape, such
        as [blocks, block size], and further entries for padding: the caller takes its L2 norm.
        """
        raise NotImplementedError


WIRE_FORMATS: dict[str, WireFormat] = {}  # by the names that users pass; filled by ``formats``


# ---------------------------------------------------------------------------------------------------- options of a leaf

SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
SHORT_NAMES |= {"fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "float8": "float8_e4m3fn"}
SHORT_NAMES |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}


class Option:
    """Base class of an option that an extension adds to ``Communication``; a frozen dataclass, by which jit caches."""


@dataclass(frozen=True)
class Communication:
    """Communication options of a split leaf: the requested dtypes, by name or ``None``, and the copies of its shards.

    Axes in ``inter_host_axes`` are gathered first, whatever the order of the other axes. ``options`` are read by
    extensions. ``of_layers`` is True for a leaf of stacked layers, read without the leading dim that a transformation
    has taken: ``vmap`` may give each layer a gradient.
    """

    gather_dtype: str | None = None
    grad_scatter_dtype: str | None = None
    replicas: Copies | None = None
    inter_host_axes: tuple[str, ...] = field(default=INTER_HOST_AXES, repr=False)
    options: tuple[Option, ...] = field(default=(), repr=False)
    of_layers: bool | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        gather_dtype: DTypeLike | None,
        grad_scatter_dtype: DTypeLike | None,
        replicas: Copies | None = None,
        inter_host_axes: tuple[str, ...] = INTER_HOST_AXES,
        options: tuple[Option, ...] = (),
    ) -> "Communication":
        """Returns the options with both dtypes as names ("bfloat16"); a dtype is given in any notation of JAX.

        None stays None; the further arguments are stored as given. ``gather_dtype`` may also be an 8-bit format (a name
        in ``WIRE_FORMATS``, such as "int8"). Raises a ``TypeError`` for a value that is no dtype, and a ``ValueError``
        for a dtype that is no float, or for a ``grad_scatter_dtype`` that is an 8-bit format.
        """
        gather = dtype_name(gather_dtype, "gather_dtype", tuple(WIRE_FORMATS))
        summed = dtype_name(grad_scatter_dtype, "grad_scatter_dtype", refused=WIRE_FORMATS)
        return cls(gather, summed, replicas, inter_host_axes, options)

    def filled_from(self, other: "Communication") -> "Communication":
        """Returns the options of ``self``, with each option at its default (None, say) taken from ``other`` instead."""
        own_options = {name: value for name, value in vars(self).items() if value not in (None, INTER_HOST_AXES, ())}
        return Communication(**{**vars(other), **own_options})

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """Axes along which devices hold copies of a shard; () without copies."""
        return self.replicas.axes if self.replicas else ()

    def dtypes(self, value: Any, path: str | None = None) -> tuple[Any, Any]:
        """Returns (dtype of the gathered value, dtype in which gradients are summed) for a leaf ``value``.

        The first is by default the dtype of the value, also if ``gather_dtype`` is an 8-bit format. The second is by
        default float32, or the dtype of the value if wider.

        Raises:
          ValueError: a dtype, including the copies' dtype, does not fit the value; names the leaf at ``path``.
        """
        gathered = summed = value_dtype(value)
        if self.gather_dtype:
            gathered = cast_dtype(value, self.gather_dtype, "gather_dtype", path)
        if self.grad_scatter_dtype:
            summed = cast_dtype(value, self.grad_scatter_dtype, "grad_scatter_dtype", path)
        if self.replicas:  # raises before the first step rather than in its backward pass
            self.replicas.check(value, path)
        return (gathered, summed) if self.grad_scatter_dtype else (gathered, wide_dtype(summed))

    def format_of(self, value: Any) -> str | None:
        """Returns the name of the packed format, such as "int8", in which a gather sends the array ``value``.

        None if the gather sends ``value`` in a plain dtype.
        """
        return packed_format(value, self.gather_dtype) if self.gather_dtype else None

    def sent_as(self, value: Any) -> str:
        """Returns the name of the 8-bit format, or else of the dtype, in which ``value`` is sent by a gather."""
        return self.format_of(value) or jnp.dtype(self.dtypes(value)[0]).name

    def wire(self, shard: Any, dim: int, axes: tuple[str, ...]) -> Wire:
        """Returns the ``Wire``, which packs and unpacks a leaf's ``shard`` in a gather along ``dim`` over ``axes``.

        The result is ``Unchanged()``, which packs nothing, if ``gather_dtype`` is no 8-bit format for the shard's
        dtype, or if every axis has size 1. ``shard`` is an array, or the ``PrimalType`` (shape and dtype) of an array.
        """
        name = self.format_of(shard) if collectives.spread_axes(axes) else None
        return WIRE_FORMATS[name].wire(shard.shape, shard.dtype, dim) if name else Unchanged()


DEFAULT_COMMUNICATION = Communication()


def dtype_name(
    dtype: DTypeLike | None,
    argument: str = "dtype",
    formats: Collection[str] = (),
    refused: Collection[str] = (),
) -> str | None:
    """Returns the name of a dtype, so that equal dtypes compare as equal; ``None`` for ``None``.

    ``formats`` are names of 8-bit formats that are accepted as well, and ``refused`` names of floats that are not
    accepted, such as float8_e4m3fn, an 8-bit format. ``argument``, the user's argument, is named in errors.

    Raises:
      TypeError: ``dtype`` is not a dtype.
      ValueError: ``dtype`` is in ``refused``; or neither in ``formats`` nor a real or complex float, as parameters are
        cast only to floats.
    """
    if dtype is None or (isinstance(dtype, str) and dtype in formats):
        return dtype
    try:
        jax_dtype = jnp.dtype(dtype)
    except (TypeError, ValueError):
        meant = SHORT_NAMES.get(str(dtype).lower(), "bfloat16")
        raise TypeError(
            f"{argument}={shortened(repr(dtype), 60)} is no dtype; write {argument}='{meant}' or jnp.{meant}."
        ) from None
    is_cast_to = jnp.issubdtype(jax_dtype, jnp.inexact) and jax_dtype.name not in refused
    if jax_dtype.name not in formats and not is_cast_to:
        raise ValueError(f"{argument}={jax_dtype.name}: {_refusal(jax_dtype.name, formats)}")
    return jax_dtype.name


def _refusal(name: str, formats: Collection[str]) -> str:
    """Returns the end of an error text: why the dtype ``name``, no float, is refused, and which dtypes are accepted.

    ``formats`` are the 8-bit formats that the argument accepts: () for sums of gradients.
    """
    if name in WIRE_FORMATS and name not in formats:
        return (
            f"{name} travels in blocks with scales, which a reduce-scatter cannot sum; only gather_dtype and "
            "Replicas(reduce_dtype=...) accept it. Use a floating dtype, such as 'bfloat16', or None."
        )
    return (
        f"parameters and gradients are floats, which a cast to {name} would truncate. Use a floating dtype, such as "
        f"'bfloat16'{', or ' + ', '.join(map(repr, formats)) if formats else ''}, or None."
    )


def packed_format(x: Any, requested: DTypeLike | None) -> str | None:
    """Returns ``requested`` if ``WIRE_FORMATS`` has an 8-bit format of this name for the dtype of ``x``; else None."""
    wire_format = WIRE_FORMATS.get(str(requested))
    return str(requested) if wire_format and wire_format.supports_dtype(value_dtype(x)) else None


def cast_dtype(x: Any, requested: DTypeLike | None, argument: str, path: str | None = None) -> DType:
    """Returns the dtype of ``x`` after a gather or reduce-scatter for which the user has ``requested`` a dtype.

    The dtype of x is kept if nothing was requested, if x is not a float, or if ``requested`` is a format of
    ``WIRE_FORMATS`` for x. Errors name ``argument``, the user's argument, and ``path``, the path of the leaf.

    Raises:
      ValueError: ``requested`` is not a floating dtype, or would make a complex value real or a real value complex.
    """
    dtype = value_dtype(x)
    if requested is None or not jnp.issubdtype(dtype, jnp.inexact) or packed_format(x, requested):
        return dtype
    requested = jnp.dtype(requested)
    kind = jnp.complexfloating if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.floating
    if not jnp.issubdtype(requested, kind):
        leaf = f"'{path}'" if path else "the value"
        lost = "would lose its imaginary part" if kind is jnp.complexfloating else "is a real float"
        raise ValueError(
            f"{argument}={requested.name} does not fit {leaf} of dtype {dtype.name}, shape {tuple(x.shape)}: "
            f"it {lost}. Use a {'complex' if kind is jnp.complexfloating else 'floating'} dtype, or wrap the "
            f"leaf's module separately, with {argument}=None."
        )
    return requested


# -------------------------------------------------------------------------------------------------- gather of an array


def gather_array_with_mean_grads(
    x: jax.Array,
    axis: int,
    axis_name: AxisNames,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    replicas: Copies | None = None,
) -> jax.Array:
    """Gathers ``x`` along a dim (all-gather); the gradient is reduce-scattered as the *mean* over the axis.

    >>> def loss(shard, x):  # of 1 value on each of 4 devices; x differs by device
    ...     return (gather_array_with_mean_grads(shard, 0, "fsdp") * x).sum()
    >>> grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))
    >>> grad(jnp.ones(4), jnp.array([0.0, 1.0, 2.0, 3.0])).tolist()
    [1.5, 1.5, 1.5, 1.5]

    Args:
      x: this device's shard, [..., d / N, ...]. Integers and PRNG keys are gathered too, uncast and without gradient.
      axis: the dim d along which the shards are concatenated.
      axis_name: an axis or a tuple of axes, outermost first. Each axis has an all-gather, the innermost first.
      gather_dtype: dtype of the all-gather and of the result; ``None``: the dtype of ``x``. With the dtype in which the
        module computes, no cast is left whose result could be saved for the backward pass. "int8" and "float8_e4m3fn"
        are sent in blocks with scales (see docs/quantized.md). The result then has the dtype of ``x``; the gradient
        ignores the rounding and is scattered like any other gradient.
      grad_scatter_dtype: dtype for sums of the gradient; ``None``: float32, or the dtype of ``x`` if wider. The
        gradient is divided by N before the sum, so a float16 sum overflows only where the mean does. On one device
        nothing is sent, and nothing is narrowed.
      replicas: further axes, with copies of ``x``. After the scatter the gradient is averaged over these axes
        too. If the type of ``x`` says that the copies are equal (``check_vma=True``), the gradient is summed instead,
        as JAX sums the gradient of any value of this type, and ``sync_gradients`` divides.
    Returns:
      [..., d, ...] in ``gather_dtype``; in the dtype of ``x`` if ``gather_dtype`` is a format of blocks. The cotangent
      is [..., d / N, ...] in the dtype of ``x``.
    Raises:
      ValueError: an axis is not bound, ``x`` has no dim ``axis``, or a dtype would make floats complex or vice versa.
    """
    axes, communication = as_axis_names(axis_name), Communication.of(gather_dtype, grad_scatter_dtype, replicas)
    collectives.check_bound(axes, caller="gather_array_with_mean_grads")
    collectives.check_bound(communication.copied_axes, caller="gather_array_with_mean_grads, replicas")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"gather_array_with_mean_grads: axis={axis} is no dim of an array of shape {x.shape}.")
    communication.dtypes(x)  # raises here rather than in the backward pass
    return _gather(x, None, axis % x.ndim, axes, communication)


@jax.tree_util.register_static
@dataclass(frozen=True)
class PrimalType:
    """Properties of the gathered value that the backward pass needs: a residual without arrays.

    ``in_loss``: whether a loss of ``training.value_and_grad`` gathers the value, whose gradient is then taken inside
    ``shard_map``. The field does not count in comparisons, by which jit caches.
    """

    shape: tuple[int, ...]
    dtype: DType
    varying: frozenset[str]
    batched: bool
    in_loss: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, x: jax.Array) -> "PrimalType":
        in_loss = bool(RUNNING_LOSS.get().axes)
        return cls(x.shape, x.dtype, collectives.varying_axes(x), isinstance(x, BatchTracer), in_loss)


# ``wire=None``: the wire of ``communication``. ``path`` is the leaf's path, for errors in the backward pass.
@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _gather(
    x: jax.Array, wire: Wire | None, dim: int, axes: tuple[str, ...], communication: Communication, path: str = ""
) -> jax.Array:
    return _whole(x, wire, dim, axes, communication)


def _gather_fwd(
    x: jax.Array, wire: Wire | None, dim: int, axes: tuple[str, ...], communication: Communication, path: str
) -> tuple[jax.Array, PrimalType]:
    return _whole(x, wire, dim, axes, communication), PrimalType.of(x)


def _gather_bwd(
    dim: int, axes: tuple[str, ...], communication: Communication, path: str, primal: PrimalType, cotangent: jax.Array
) -> tuple[jax.Array | np.ndarray, None]:
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(primal.shape, jax.dtypes.float0), None
    # In no other case would a mean over the devices be wrong.
    if isinstance(cotangent, BatchTracer) or not primal.in_loss or RUNNING_LOSS.get().axes:
        check_one_gradient_of_one_batch(path, primal, cotangent, axes, communication.of_layers)
    return _scattered(cotangent, dim, axes, communication, primal), None


_gather.defvjp(_gather_fwd, _gather_bwd)


# Under ``jax.jit`` each function is traced and lowered once for all leaves of one shape (layers in a Python loop,
# say). XLA inlines the calls. Code that inspects tracers or names a leaf stays outside.


@partial(jax.jit, static_argnums=(2, 3, 4))
def _whole(x: jax.Array, wire: Wire | None, dim: int, axes: tuple[str, ...], communication: Communication) -> jax.Array:
    """Returns the unsharded array: the shards ``x`` of the devices of ``axes``, gathered along ``dim`` (forward pass).

    ``wire`` is the format in which shards are sent; None: the format that ``communication`` selects.
    """
    sent = shard_as_sent(x, communication)
    if wire is None and communication.gather_dtype is None:
        return collectives.all_gather(sent, dim, axes)
    wire = wire or communication.wire(x, dim, axes)
    return wire.receive(collectives.all_gather(wire.send(sent), wire.along(dim), axes))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
@not_transposed(5, axes_at=2)
def _scattered(
    cotangent: jax.Array, dim: int, axes: tuple[str, ...], communication: Communication, primal: PrimalType
) -> jax.Array:
    """Returns the gradient of this device's shard from ``cotangent``, the local gradient of the gathered array.

    The backward pass of a gather: a reduce-scatter along ``dim`` with the mean over ``axes``, then the mean over copies
    of the shard. ``primal`` has the type of the shard, and the result has this type.
    """
    # On CPU the product that makes a narrow matrix passes an optimization barrier, for speed. JAX computes the gradient
    # of a weight matrix as a matrix product, followed by a transpose. If nothing else reads the product, XLA drops the
    # transpose and swaps the operands of the product. In bfloat16 the fast product routines of the CPU do not accept
    # this form, and the step of a decoder takes twice as long; in float32 the step is as fast. The first ``.T`` cancels
    # the transpose of JAX, so that XLA finds no transpose between product and barrier.
    if cotangent.ndim == 2 and cotangent.dtype.itemsize < 4 and collectives.spread_axes(axes):
        cotangent = jax.lax.platform_dependent(
            cotangent, cpu=lambda g: jax.lax.optimization_barrier(g.T).T, default=lambda g: g
        )
    terms = terms_to_scatter(cotangent, axes, communication, primal)
    return gradient_of_shard(collectives.reduce_scatter(terms, dim, axes), communication, primal)


def shard_as_sent(x: jax.Array, communication: Communication) -> jax.Array:
    """Returns this device's shard ``x``, cast to the gather dtype and typed as varying along the axes of copies.

    ``communication`` has the gather dtype, and the axes along which devices hold copies of the shard. PRNG keys are not
    cast, and nothing is packed in an 8-bit format: the caller does so by ``Wire.send``. If the type were not cast here,
    JAX would cast the type behind the gather, and the transpose of this cast would sum unsharded gradients.
    """
    if communication.replicas:
        x = collectives.to_varying(x, collectives.spread_axes(communication.copied_axes))
    return x if is_prng_key(x) else x.astype(communication.dtypes(x)[0])


def terms_to_scatter(
    cotangent: jax.Array, axes: tuple[str, ...], communication: Communication, primal: PrimalType
) -> jax.Array:
    """Returns this device's terms of the mean of gradients over ``axes``: the input of the reduce-scatter.

    ``cotangent`` is the local gradient of the unsharded array. The terms are ``cotangent`` divided by the number of
    devices, in the dtype of the sums that ``communication`` selects for the shard's dtype (in ``primal``). If every
    axis has size 1, nothing is divided, and only floats narrower than float32 are cast, to float32.
    """
    if not collectives.spread_axes(axes):
        return widened(cotangent)
    return term_of_mean(cotangent, collectives.axis_size(axes), communication.dtypes(primal)[1])


def gradient_of_shard(scattered: jax.Array, communication: Communication, primal: PrimalType) -> jax.Array:
    """Returns the gradient of this device's shard from ``scattered``, the output of the reduce-scatter.

    The gradient is averaged over the copies of the shard, if there are copies. The result has the dtype and the varying
    axes of the shard, given by ``primal``.
    """
    grad = mean_over_copies(scattered, communication.replicas, primal.varying) if communication.replicas else scattered
    return collectives.to_varying(grad, primal.varying).astype(primal.dtype)


def check_one_gradient_of_one_batch(
    path: str, primal: PrimalType, cotangent: jax.Array, axes: tuple[str, ...], of_layers: bool | None = None
) -> None:
    """Raises a ``ValueError`` in the backward pass of a gather if a mean of gradients over ``axes`` would be wrong.

    First case: ``cotangent`` is batched by ``vmap``, one gradient per example, and the shard (described by ``primal``)
    is not. If the shard is batched too, as in an ensemble, each shard has its own gradient, and nothing is raised.
    Second case: the gather is differentiated within a loss function that is differentiated itself. Under a ``remat``
    inside the ``vmap`` no tracer shows that the shard is one of several; callers then pass ``of_layers=True``, which
    permits the first case. Third case: the gradient is taken from outside of ``shard_map``, where JAX expects a sum
    over the devices. ``path`` names the leaf in the error. If all ``axes`` have size 1, nothing is raised.
    """
    if not collectives.spread_axes(axes):
        return
    if not primal.in_loss and transposes_a_shard_map():
        count = collectives.axis_size(axes)
        raise ValueError(
            f"the gradient of {f'{path!r}' if path else 'a parameter'}, of shape {primal.shape} on this device, is "
            f"taken from outside of shard_map: it would be 1/{count} of the gradient, a mean over the {count} devices "
            f"of {axes} where JAX expects the sum. Take the gradient inside: value_and_grad(loss_fn, axis_names) of "
            "xlstm_jax.distributed, in the function under shard_map, which then returns the gradients."
        )
    for_each_example = isinstance(cotangent, BatchTracer) and not (primal.batched or of_layers)
    if for_each_example or RUNNING_LOSS.get().axes:
        where = "under vmap, for each example" if for_each_example else "in a loss function, which is differentiated"
        raise ValueError(
            f"the gradient of {f'{path!r}' if path else 'a parameter'}, of shape {primal.shape} on this device, is "
            f"taken {where}: it would be a mean over the devices of {axes}. Call full = gather_params(params, "
            "axis_name) first in the loss function, and differentiate with respect to full."
        )


def with_summed_gradient(shard: jax.Array, model_axes: tuple[str, ...], path: str) -> jax.Array:
    """Returns the shard with a gradient that is multiplied by the number of devices along batch axes in ``model_axes``.

    ``model_axes`` are the axes of a gather over which the model itself splits the leaf at ``path``; only a user's code
    gathers over such axes. Batch axes are the axes over which the batch of the running loss is split. The gradient of
    the gather is a mean over the axes. ``sync_gradients`` expects a sum over the axes of the batch, and divides the
    sum; the factor makes the mean a sum. If no loss of ``training.value_and_grad`` is running, the backward pass raises
    a ``ValueError``. If all ``model_axes`` have size 1, the shard is returned unchanged.
    """
    model_axes = collectives.spread_axes(model_axes)
    return _with_summed_gradient(shard, model_axes, RUNNING_LOSS.get().axes, path) if model_axes else shard


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _with_summed_gradient(
    shard: jax.Array, model_axes: tuple[str, ...], batch_axes: tuple[str, ...], path: str
) -> jax.Array:
    return shard


def _with_summed_gradient_bwd(
    model_axes: tuple[str, ...], batch_axes: tuple[str, ...], path: str, residual: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    if not batch_axes:
        raise ValueError(
            f"the model itself splits {f'{path!r}' if path else 'a parameter'} over {model_axes}, by its box, and a "
            "gather over these axes is differentiated: sync_gradients would treat the mean of gradients as a sum. Take "
            "the gradient by training.value_and_grad."
        )
    return (cotangent * collectives.axis_size([axis for axis in model_axes if axis in batch_axes]),)


_with_summed_gradient.defvjp(lambda shard, model_axes, batch_axes, path: (shard, None), _with_summed_gradient_bwd)


def mean_over_copies(grad: jax.Array, copies: Copies, varying: Collection[str] = ()) -> jax.Array:
    """Returns the mean of ``grad``, the gradient of this device's shard, over the devices with copies of the shard.

    ``copies`` has the axes of the copies, and computes the mean. The result is float32 if ``grad`` is narrower.
    ``varying`` are the axes over which the type of the shard varies. Exception: along an axis that ``check_vma=True``
    tracks, and that is not in ``varying``, the result is the sum over the devices instead of the mean. JAX also returns
    sums over such an axis, for other terms of the gradient (of a penalty on the values, say), and adds the terms.
    ``sync_gradients`` or ``value_and_grad`` later divides by the number of devices.
    """
    axes, wide = collectives.spread_axes(copies.axes), widened(grad)
    if not axes:
        return wide
    mean = copies.mean(wide, axes).astype(wide.dtype)
    summed = [axis for axis in axes if collectives.is_tracked(axis) and axis not in varying]
    return mean * collectives.axis_size(summed) if summed else mean


def gather_dims(
    value: jax.Array,
    names: Sequence[AxisEntry],
    axes: Collection[str],
    communication: Communication,
    path: str,
    wire: Wire | None,
) -> tuple[jax.Array, tuple[AxisEntry, ...]]:
    """Gathers each dim of the shard ``value`` over the axes in ``axes`` that split the dim. Returns (array, names).

    ``names`` has an entry of a ``PartitionSpec`` per dim, with the axes that split the dim; the returned names keep
    only axes not in ``axes``. ``communication`` has the dtypes and the axes of copies of the leaf. ``wire`` is the
    format in which shards are sent (``None``: the format that ``communication`` selects). ``path`` names the leaf in
    errors.
    """
    left = list(names)
    for dim, entry in enumerate(names):
        split_axes = entry_axes(entry)
        if set(split_axes).isdisjoint(axes):
            continue
        if set(split_axes) <= set(axes):
            value, left[dim] = _gather(value, wire, dim, split_axes, communication, path), None
        else:
            value, left[dim] = _gather_some(value, wire, dim, split_axes, axes, communication, path)
        communication = replace(communication, replicas=None)  # the mean over copies is taken once per leaf
    return value, tuple(left)


def _gather_some(
    value: jax.Array,
    wire: Wire | None,
    dim: int,
    split_axes: tuple[str, ...],
    axes: Collection[str],
    communication: Communication,
    path: str,
) -> tuple[jax.Array, AxisEntry]:
    """Gathers ``dim``, which is split over ``split_axes``, over only those axes of ``split_axes`` that are in ``axes``.

    Returns (array, entry): the entry of a ``PartitionSpec`` (None, a name or a tuple) with the axes that still split
    the dim. ``wire`` is the format in which shards are sent; None: the format that ``communication`` selects. Raises a
    ``ValueError``, with ``path``, if an axis that stays split lies inside a gathered axis, and the format would round
    values twice.
    """
    first = next(i for i, axis in enumerate(split_axes) if axis in axes)
    outer, inner = split_axes[:first], split_axes[first:]
    remaining = tuple(axis for axis in inner if axis not in axes)
    if not remaining:
        return _gather(value, wire, dim, inner, communication, path), axes_entry(outer)
    if (wire or communication.wire(value, dim, split_axes)).rounds_again:
        raise ValueError(
            f"gather_dtype={communication.gather_dtype}: {f'{path!r}' if path else 'a parameter'} is split over "
            f"{split_axes}, and gathered over {sorted(axes)}: {remaining} stays split inside a gathered axis, so "
            "values would be rounded more than once. Put the axes that stay split first, or pass a floating dtype."
        )
    # A kept axis lies inside a gathered one. Its shards are gathered as well, by an all-gather whose transpose is a
    # sum (they are shards, not copies), and this device's shard is cut out at the end.
    for axis in reversed(inner):
        if axis in axes:
            value, communication = (
                _gather(value, wire, dim, (axis,), communication, path),
                replace(communication, replicas=None),
            )
        else:
            value = collectives.all_gather(value, dim, (axis,))
    return collectives.local_shard(value, dim, remaining), axes_entry(outer + remaining)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_equal_type(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns ``value``, a gathered array, with the type "equal along ``axes``"; the gradient is unchanged.

    The caller knows that ``value`` is equal on all devices along ``axes``; the type of a gather's result still says
    that the value varies. In the backward pass the gradient, equal along ``axes`` too, becomes varying by type.
    """
    # The sum of the first device's value and of zeros has the same bits, NaN included.
    is_first = collectives.axis_index(axes) == 0
    return collectives.all_reduce_sum(jnp.where(is_first, value, jnp.zeros_like(value)), axes)


def _with_equal_type_bwd(axes: tuple[str, ...], residual: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residual
    return (collectives.to_varying(cotangent, axes),)


with_equal_type.defvjp(lambda value, axes: (with_equal_type(value, axes), None), _with_equal_type_bwd)


# ----------------------------------------------------------------------------------------------------- the running loss


OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection whose gradient is its next value


@dataclass(frozen=True)
class RunningLoss:
    """Facts on the loss function under trace, whose gradient will be averaged over ``axes``.

    An evaluation has no ``axes``, since no gradient is averaged; its batch is split over ``evaluated_axes``.
    ``is_reference`` marks the loss of a comparison with one device: its values have no varying types, whatever the
    step has. ``overwrites``: the state of fp8 products is differentiated with the parameters.

    ``model_axes`` are the model's own axes in the boxes of the loss's parameters. (A model may put other boxes, without
    this information, around parameters.) Gathers append the paths of leaves gathered within a branch
    (``lax.cond``) to ``gathered_in_branches``, and (shard, key, gathered value) to ``gathers``: ``leaf.earlier_gather``
    defines the key. ``trace`` is the trace in which the loss is called: a gather in another trace may be in a branch.
    """

    axes: tuple[str, ...] = ()
    evaluated_axes: tuple[str, ...] = ()
    model_axes: frozenset[str] = frozenset()
    gathered_in_branches: list[str] = field(default_factory=list)
    gathers: list[tuple[Any, Any, Any]] = field(default_factory=list)
    is_reference: bool = False
    overwrites: bool = False
    trace: Any = None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which the batch of the loss or evaluation is split; () outside of both."""
        return self.axes or self.evaluated_axes


# Outside of a loss: a ``RunningLoss`` without axes.
RUNNING_LOSS: ContextVar[RunningLoss] = ContextVar("RUNNING_LOSS", default=RunningLoss())  # noqa: B039  # never filled


@contextlib.contextmanager
def set_context(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    """Context manager: sets a context variable to ``value``, yields ``value``, and restores the earlier value after."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)

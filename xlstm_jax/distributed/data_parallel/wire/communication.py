"""Communication of a leaf: its options, the gather of an array, and the backward rule of the gather.

[Note: path of a shard through a gather]
  stored     W[d_fsdp, f]                              each device keeps its shard
  sent       Wire.send(shard)                          the shard was cast to the gather dtype before
  arrived    all-gather of the sent arrays along dim Wire.along(d), in a stage per axis
  used       W[d, f] = Wire.receive(arrived)           unpacked once, after the last stage
  gradient   dW[d, f]  -->  dW[d_fsdp, f]              reduce-scatter, mean over N, then over copies of the shard, as if
                                                       ``send`` and ``receive`` changed no value

``gather_params`` calls the gather, ``gather_dims``, for each leaf of a tree, and so does a box when it is read.
``prefetch`` runs the same steps separately. The gather, its backward rule, ``prefetch`` and plans use only the methods
of ``wire.Wire``, and depend on no format.

The box of a leaf holds the options, ``Communication``:
  gather          shards are sent in ``gather_dtype``; default: the stored dtype
  reduce-scatter  gradients are summed in ``grad_scatter_dtype``; default: float32, or the leaf's dtype if wider
  copies          gradients of copies of a shard are averaged as ``Copies`` defines

Nothing is narrowed unless a user asks. A value gathered in a ``WireFormat`` has the leaf's dtype. Gradients that a mean
over devices would falsify raise an error: ``wrong_gradients``.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import (
    AxisEntry,
    as_axis_names,
    entry_axes,
    is_prng_key,
    term_of_mean,
    value_dtype,
    wide_dtype,
    widened,
)
from xlstm_jax.distributed.data_parallel.wire.copies import Copies, mean_over_copies
from xlstm_jax.distributed.data_parallel.wire.cpu_products import not_transposed_on_cpu
from xlstm_jax.distributed.data_parallel.wire.dtypes import cast_dtype, dtype_name, packed_format
from xlstm_jax.distributed.data_parallel.wire.partial_gather import partial_stages, rounded_twice_error
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS
from xlstm_jax.distributed.data_parallel.wire.wire import WIRE_FORMATS, Unchanged, Wire
from xlstm_jax.distributed.data_parallel.wire.wrong_gradients import check_one_gradient_of_one_batch, not_transposed
from xlstm_jax.private_names import BatchTracer
from xlstm_jax.program_names import INTER_HOST_AXES

# ---------------------------------------------------------------------------------------------------- options of a leaf


class Option:
    """Base class of an option that an extension adds to ``Communication``; a frozen dataclass, by which jit caches."""

    def reduce_scatter(self, terms: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array | None:
        """Returns this device's shard of ``terms`` along ``dim``, summed over the devices of ``axes``; here ``None``.

        ``None``: the option does not change the sum, and ``collectives.reduce_scatter`` computes it.
        """
        return None


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
        """Returns the options of ``self``, with each option at its default (None, say) taken from ``other`` instead.

        An option that is given, and equals the default, counts as not given.
        """
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
    # A mean over the devices can be wrong in these cases alone: the gradient is one of several (``vmap``), or is not
    # the gradient of a loss of the library, or is taken within such a loss.
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
    if cotangent.ndim == 2 and cotangent.dtype.itemsize < 4 and collectives.spread_axes(axes):
        cotangent = not_transposed_on_cpu(cotangent)
    terms = terms_to_scatter(cotangent, axes, communication, primal)
    return gradient_of_shard(collectives.reduce_scatter(terms, dim, axes, communication.options), communication, primal)


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
            communication = replace(communication, replicas=None)  # the mean over copies is taken once per leaf
            continue
        stages, kept, left[dim] = partial_stages(split_axes, axes)
        if kept and (wire or communication.wire(value, dim, split_axes)).rounds_again:
            raise rounded_twice_error(path, communication.gather_dtype, split_axes, axes, kept)
        for stage in stages:
            if set(stage) <= set(axes):
                value = _gather(value, wire, dim, stage, communication, path)
                communication = replace(communication, replicas=None)  # the first stage takes the mean
            else:  # shards, not copies: a gather whose transpose is a sum, and this device's shard is cut out below
                value = collectives.all_gather(value, dim, stage)
        value = collectives.local_shard(value, dim, kept) if kept else value
    return value, tuple(left)


@contextlib.contextmanager
def set_context(variable: ContextVar[Any], value: Any) -> Iterator[Any]:
    """Context manager: sets a context variable to ``value``, yields ``value``, and restores the earlier value after."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)

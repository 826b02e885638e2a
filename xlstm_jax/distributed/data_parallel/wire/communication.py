"""Communication of a leaf: ``Wire``, the format in which a gather sends shards, and the options ``Communication``.

[Note: path of a shard through a gather]
  stored     W[d_fsdp, f]                              each device keeps its shard
  sent       Wire.send(shard)                          the shard was cast to the gather dtype before
  arrived    all-gather of the sent arrays along dim Wire.along(d), in a stage per axis
  used       W[d, f] = Wire.receive(arrived)           unpacked once, after the last stage
  gradient   dW[d, f], reduce-scattered as if ``send`` and ``receive`` changed no value

Callers (the gather ``gather_array`` with its backward rule, the scan ``prefetch`` with gathers ahead, plans) use only
these methods and depend on no format. Formats that users select by ``gather_dtype`` are ``WireFormat``s in separate
files, registered in ``WIRE_FORMATS`` with a row each in ``formats``. A feature computes wires from a module's state as
an ``Extension`` of a unit.

The box of a leaf holds the options, ``Communication``:
  gather          shards are sent in ``gather_dtype``; default: the stored dtype
  reduce-scatter  gradients are summed in ``grad_scatter_dtype``; default: float32, or the leaf's dtype if wider
  copies          gradients of copies of a shard are averaged as ``Copies`` defines

Only floats are ever cast, and only to floats of the same kind (real, complex). Nothing is narrowed unless a user asks.
A value gathered in a ``WireFormat`` has the leaf's dtype.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.formatting import shortened
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

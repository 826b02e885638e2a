"""The rules about how a parameter travels: the dtypes of communication, and the copies of the shards.

  gather          shards are sent in ``gather_dtype``; by default as they are stored
  reduce-scatter  gradients are summed in ``grad_scatter_dtype``; by default in float32, or wider where the leaf is
  copies          gradients of copies of a shard are averaged as ``Copies`` does

Only floats are ever cast, and only to floats of the same kind (real, complex). Nothing is narrowed unless a user asks.
``WIRE_FORMATS`` are for transport alone: a gathered value has the leaf's dtype.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.formats import WIRE_FORMATS
from xlstm_jax.distributed.data_parallel.wire.wires import AsItIs, Wire
from xlstm_jax.program_names import INTER_HOST_AXES
from xlstm_jax.wording import shortened

SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
SHORT_NAMES |= {"fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "float8": "float8_e4m3fn"}
SHORT_NAMES |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}


@dataclass(frozen=True)
class Communication:
    """How a split leaf travels: the dtypes that were asked for, by name or None, and the copies of its shards.

    Of its axes ``inter_host_axes`` are gathered first, whatever the order of the others.
    """

    gather_dtype: str | None = None
    grad_scatter_dtype: str | None = None
    replicas: Copies | None = None
    inter_host_axes: tuple[str, ...] = field(default=INTER_HOST_AXES, repr=False)

    @classmethod
    def of(
        cls,
        gather_dtype: DTypeLike | None,
        grad_scatter_dtype: DTypeLike | None,
        replicas: Copies | None = None,
        inter_host_axes: tuple[str, ...] = INTER_HOST_AXES,
    ) -> "Communication":
        """A ``Communication`` from dtypes as users write them; see ``dtype_name``."""
        gather = dtype_name(gather_dtype, "gather_dtype", tuple(WIRE_FORMATS))
        return cls(gather, dtype_name(grad_scatter_dtype, "grad_scatter_dtype"), replicas, inter_host_axes)

    def or_else(self, other: "Communication") -> "Communication":
        """This object's options; those that are None, or ``inter_host_axes`` at its default, come from ``other``."""
        given = {name: value for name, value in vars(self).items() if value not in (None, INTER_HOST_AXES)}
        return Communication(**{**vars(other), **given})

    def not_copied_along(self, axes: Collection[str]) -> "Communication":
        """The options for a leaf that is split over ``axes``, along which it has shards and no copies."""
        return replace(self, replicas=self.replicas.without(axes) if self.replicas else None)

    @property
    def copied_axes(self) -> tuple[str, ...]:
        """The axes along which there are copies of the shards."""
        return self.replicas.axes if self.replicas else ()

    def dtypes(self, value: Any, path: str | None = None) -> tuple[Any, Any]:
        """The dtype of the gathered value, and the dtype in which its gradient is summed.

        Raises:
          ValueError: a dtype, one of the copies included, does not fit the value; names the leaf at ``path``.
        """
        gathered = cast_dtype(value, self.gather_dtype, "gather_dtype", path)
        summed = cast_dtype(value, self.grad_scatter_dtype, "grad_scatter_dtype", path)
        if self.replicas:  # before the first step, and not in its backward pass
            self.replicas.check(value, path)
        return (gathered, summed) if self.grad_scatter_dtype else (gathered, wide_dtype(summed))

    def format_of(self, value: Any) -> str | None:
        """Returns the name of the wire format in which a value is gathered; None if it travels as a plain array."""
        return packed_format(value, self.gather_dtype)

    def wire(self, shard: Any, dim: int, axes: tuple[str, ...]) -> Wire:
        """Returns how a shard, or its ``Primal``, travels in a gather along ``dim``: as it is where nothing travels."""
        name = self.format_of(shard) if collectives.spread_axes(axes) else None
        return WIRE_FORMATS[name].wire(shard.shape, shard.dtype, dim) if name else AsItIs()


DEFAULT_COMMUNICATION = Communication()


def dtype_name(dtype: DTypeLike | None, argument: str = "dtype", formats: Collection[str] = ()) -> str | None:
    """The name of a dtype, so that equal dtypes compare as equal; None stays None.

    Raises:
      TypeError: it is no dtype.
      ValueError: it is neither one of ``formats`` nor a real or complex float; a parameter is cast to nothing else.
    """
    if dtype is None or (isinstance(dtype, str) and dtype in formats):
        return dtype
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):
        meant = SHORT_NAMES.get(str(dtype).lower(), "bfloat16")
        raise TypeError(
            f"{argument}={shortened(repr(dtype), 60)} is no dtype; write {argument}='{meant}' or jnp.{meant}."
        ) from None
    if found.name not in formats and not jnp.issubdtype(found, jnp.inexact):
        raise ValueError(f"{argument}={found.name}: {_why_not(found.name, formats)}")
    return found.name


def _why_not(name: str, formats: Collection[str]) -> str:
    """Why a dtype that is no float is refused, where ``formats`` are taken."""
    if name in WIRE_FORMATS and name not in formats:
        return (
            f"{name} travels in blocks with scales, which a sum on the way cannot add up; gather_dtype and "
            "Replicas(reduce_dtype=...) alone take it. Use a floating dtype, such as 'bfloat16', or None."
        )
    return (
        f"parameters and gradients are floats, which a cast to {name} would truncate. Use a floating dtype, such as "
        f"'bfloat16'{', or ' + ', '.join(map(repr, formats)) if formats else ''}, or None."
    )


def packed_format(x: Any, requested: DTypeLike | None) -> str | None:
    """Returns ``requested`` if it is one of ``WIRE_FORMATS``, and that takes values of the dtype of x; else None."""
    found = WIRE_FORMATS.get(str(requested))
    return str(requested) if found and found.takes(value_dtype(x)) else None


def cast_dtype(x: Any, requested: DTypeLike | None, argument: str, path: str | None = None) -> DType:
    """The dtype in which ``x`` arrives if it is sent with the option ``requested``.

    It is the dtype of x itself if nothing was requested, if x is no float, or if x travels in one of
    ``WIRE_FORMATS``.

    Raises:
      ValueError: ``requested`` is no floating dtype, or would make a complex value real or a real one complex.
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
            f"it {lost}. Use a {'complex' if kind is jnp.complexfloating else 'floating'} dtype there, or wrap the "
            f"module that owns it by itself, with {argument}=None."
        )
    return requested

"""How a parameter travels: every rule about the dtypes of communication, and about copies of the shards.

  gather   sent in ``gather_dtype``; by default as it is stored
  scatter  gradients are summed in ``grad_scatter_dtype``; by default in float32, or wider where the leaf is
  copies   the gradients of copies of a shard are summed in ``Replicas.reduce_dtype``; by default as in the scatter

Only floats are ever cast, and only to floats of the same kind (real, complex). What nobody asked to narrow is not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.axes import as_axis_names


@dataclass(frozen=True)
class Replicas:
    """Copies of the shards, along axes that cross hosts or slices (hybrid sharding, HSDP).

    The gradient of a shard is averaged over its copies within the backward pass of its layer, beside the computation of
    the layer before.

    >>> Replicas("dp", reduce_dtype="bfloat16")
    Replicas(axis_name=('dp',), reduce_dtype='bfloat16', shard_optimizer_state=False)

    Attributes:
      axis_name: an axis or a tuple of axes, which the parameters are not split over.
      reduce_dtype: dtype in which the copies' gradients are summed; None: float32, or the gradient's own where that is
        wider.
      shard_optimizer_state: split the optimizer's state over these axes too (ZeRO-1): 1/R of its bytes on each device,
        for an all-gather of the updated shards in every step.
    """

    axis_name: AxisNames
    reduce_dtype: Any = None
    shard_optimizer_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_name", as_axis_names(self.axis_name))
        object.__setattr__(self, "reduce_dtype", dtype_name(self.reduce_dtype))

    @property
    def axes(self) -> tuple[str, ...]:
        """``axis_name`` as a tuple."""
        return as_axis_names(self.axis_name)


@dataclass(frozen=True)
class Communication:
    """How a split leaf travels.

    Attributes:
      gather_dtype: None: its own.
      grad_scatter_dtype: None: float32, or its own where that is wider.
      replicas: along which axes there are copies of its shards, and how these are reduced.
    """

    gather_dtype: str | None = None
    grad_scatter_dtype: str | None = None
    replicas: Replicas | None = None

    def check_fits(self, value: Any, path: str) -> None:
        """Raises a ``ValueError`` where one of the dtypes does not fit a leaf's value; names the leaf."""
        cast_dtype(value, self.gather_dtype, "gather_dtype", path)
        scatter_dtype(value, self.grad_scatter_dtype, path)
        cast_dtype(value, self.replicas and self.replicas.reduce_dtype, "reduce_dtype", path)


DEFAULT_COMMUNICATION = Communication()


def dtype_name(dtype: Any) -> str | None:
    """A dtype by its name, so that equal ones compare as equal; None stays None.

    Raises:
      TypeError: it is no dtype.
    """
    return None if dtype is None else jnp.dtype(dtype).name


def is_prng_key(value: Any) -> bool:
    """Whether ``value`` is an array of typed PRNG keys."""
    return jnp.issubdtype(value_dtype(value), jax.dtypes.prng_key)


def value_dtype(value: Any) -> Any:
    """The dtype of an array, an abstract array, or a Python number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which sums run that nobody asked to narrow: float32 for narrower floats, else the dtype itself."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def as_sent(value: jax.Array, dtype: Any) -> jax.Array:
    """What an all-gather sends of a shard: its values in ``dtype``; PRNG keys as they are."""
    return value if is_prng_key(value) else value.astype(dtype)


def sent_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of what ``as_sent`` makes of an array of this shape."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def scatter_dtype(x: Any, requested: Any, path: str | None = None) -> Any:
    """The dtype in which gradients of ``x`` are summed; nothing that was not asked for is narrower than float32.

    Raises:
      ValueError: see ``cast_dtype``.
    """
    dtype = cast_dtype(x, requested, "grad_scatter_dtype", path)
    return wide_dtype(dtype) if requested is None else dtype


def cast_dtype(x: Any, requested: Any, argument: str, path: str | None = None) -> Any:
    """The dtype in which ``x`` travels when ``requested`` was asked for: its own where that is None or x is no float.

    Raises:
      ValueError: ``requested`` is no floating dtype, or would make a complex value real or a real one complex.
    """
    dtype = value_dtype(x)
    if requested is None or not jnp.issubdtype(dtype, jnp.inexact):
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

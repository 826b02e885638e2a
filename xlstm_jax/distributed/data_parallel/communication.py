"""How a parameter travels: every rule about the dtypes of communication, and about copies of the shards."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.axes import as_axis_names


@dataclass(frozen=True)
class Replicas:
    """Copies of the shards, along axes whose links are slower (hybrid sharding, HSDP).

    The gradient of a shard is averaged over its copies within the backward pass of its layer, beside the computation of
    the layer before.

    Attributes:
      axis_name: an axis or a tuple of axes, which the parameters are not split over.
      reduce_dtype: dtype of that reduction on the wire; None: float32, or the gradient's own where that is wider.
      shard_optimizer_state: split the optimizer's state over these axes too (ZeRO-1): 1/R of its bytes on each device,
        for an all-gather of the updated shards in every step.
    """

    axis_name: AxisNames
    reduce_dtype: Any = None
    shard_optimizer_state: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_name", as_axis_names(self.axis_name))
        object.__setattr__(self, "reduce_dtype", dtype_name(self.reduce_dtype))


def dtype_name(dtype: Any) -> str | None:
    """A dtype by its name, so that equal ones compare as equal; None stays None.

    Raises:
      TypeError: it is no dtype.
    """
    return None if dtype is None else jnp.dtype(dtype).name


class Wire(NamedTuple):
    """How a split leaf travels.

    Attributes:
      gather_dtype: None: its own.
      grad_scatter_dtype: None: float32, or its own where that is wider.
      replicas: along which axes there are copies of its shards, and how these are reduced.
    """

    gather_dtype: str | None = None
    grad_scatter_dtype: str | None = None
    replicas: Replicas | None = None


PLAIN_WIRE = Wire()


def is_prng_key(value: Any) -> bool:
    """Whether ``value`` is an array of typed PRNG keys."""
    return jnp.issubdtype(value_dtype(value), jax.dtypes.prng_key)


def value_dtype(value: Any) -> Any:
    """The dtype of an array, an abstract array, or a Python number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which sums run that nobody asked to narrow: float32 for narrower floats, else the dtype itself."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def scatter_dtype(x: Any, requested: Any, path: str | None = None) -> Any:
    """The dtype in which gradients of ``x`` are summed; nothing that was not asked for is narrower than float32.

    Raises:
      ValueError: see ``wire_dtype``.
    """
    dtype = wire_dtype(x, requested, "grad_scatter_dtype", path)
    return wide_dtype(dtype) if requested is None else dtype


def wire_dtype(x: Any, requested: Any, argument: str, path: str | None = None) -> Any:
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

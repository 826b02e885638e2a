"""Dtypes: tests for floats and PRNG keys, and the dtype of sums and means."""

from collections.abc import Callable
from functools import reduce, wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.common_types import DType

P = ParamSpec("P")
Result = TypeVar("Result")


def is_prng_key(value: Any) -> bool:
    """Returns whether ``value`` is an array of typed PRNG keys."""
    return jnp.issubdtype(value_dtype(value), jax.dtypes.prng_key)


def value_dtype(value: Any) -> Any:
    """Returns the dtype of an array, an abstract array, or a Python number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def wide_dtype(dtype: Any) -> Any:
    """Returns the default dtype of sums: float32 for narrower floats, else ``dtype``."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def promoting(fn: Callable[P, Result]) -> Callable[P, Result]:
    """Lets a library function mix dtypes and ranks even if the user's JAX flags forbid promotion.

    The flags apply while JAX traces. A backward rule is traced later, and needs a separate decorator.
    """

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return run


@promoting
def common_dtype(*dtypes: DTypeLike) -> Any:
    """Returns the dtype to which JAX promotes ``dtypes``."""
    return reduce(jnp.promote_types, dtypes)


def widened(value: jax.Array) -> jax.Array:
    """Returns the value in the dtype of sums: floats narrower than float32 in float32, any other value unchanged."""
    return value.astype(wide_dtype(value.dtype))


def term_of_mean(value: jax.Array, count: int, dtype: DType) -> jax.Array:
    """Returns a device's term of a mean over ``count`` devices that is summed in ``dtype``.

    The value is divided before the sum, and before it is narrowed: a float16 sum then overflows only if the mean does.
    """
    # A narrow value is divided by a power of two in its narrow dtype, which gives the same bits: XLA takes the factor
    # into the matrix product that makes the value, and saves a pass over the gradient.
    if value.dtype == dtype != wide_dtype(dtype) and count & (count - 1) == 0:
        return value * (1 / count)
    return (widened(value) / count).astype(dtype)

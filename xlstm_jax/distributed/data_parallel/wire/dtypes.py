"""Dtypes of values: which values are floats or PRNG keys, and the dtype in which a sum or a mean is taken."""

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
    """Whether ``value`` is an array of typed PRNG keys."""
    return jnp.issubdtype(value_dtype(value), jax.dtypes.prng_key)


def value_dtype(value: Any) -> Any:
    """The dtype of an array, an abstract array, or a Python number."""
    return value.dtype if hasattr(value, "dtype") else jnp.result_type(value)


def wide_dtype(dtype: Any) -> Any:
    """The dtype of sums by default: float32 for narrower floats, else the dtype itself."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32 else dtype


def promoting(fn: Callable[P, Result]) -> Callable[P, Result]:
    """Lets a function of this library mix dtypes and ranks, also where the user's flags of JAX forbid it in their code.

    These flags count while JAX traces: a backward rule, which is traced later, is decorated by itself.
    """

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args, **kwargs)

    return run


@promoting
def common_dtype(*dtypes: DTypeLike) -> Any:
    """The dtype that JAX promotes these to."""
    return reduce(jnp.promote_types, dtypes)


def widened(value: jax.Array) -> jax.Array:
    """The value in its ``wide_dtype``."""
    return value.astype(wide_dtype(value.dtype))


def term_of_mean(value: jax.Array, count: int, dtype: DType) -> jax.Array:
    """A device's term of a mean over ``count`` devices that is summed in ``dtype``.

    The value is divided before the sum, and before it is narrowed: a float16 sum then overflows only if the mean does.
    """
    # By a power of two a narrow value is divided as it is, which gives the same bits: XLA takes the factor into the
    # matrix product that makes the value, and saves a pass over the gradient.
    if value.dtype == dtype != wide_dtype(dtype) and count & (count - 1) == 0:
        return value * (1 / count)
    return (widened(value) / count).astype(dtype)

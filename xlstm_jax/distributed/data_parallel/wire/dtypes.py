"""Names of dtypes that users pass for gathers and reduce-scatters: checked, and applied to a leaf.

``gather_dtype`` is a float, or an 8-bit format of ``WIRE_FORMATS``; ``grad_scatter_dtype`` is a float. Only floats are
ever cast, and only to floats of the same kind (real, complex).
"""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.distributed.data_parallel.wire.wire import WIRE_FORMATS
from xlstm_jax.formatting import shortened

SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
SHORT_NAMES |= {"fp8": "float8_e4m3fn", "f8": "float8_e4m3fn", "float8": "float8_e4m3fn"}
SHORT_NAMES |= {"fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}


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
      ValueError: ``requested`` is not a floating dtype, or would make a complex value real or a real value complex; or
        is a format that does not support the dtype of x, a float.
    """
    dtype = value_dtype(x)
    if requested is None or not jnp.issubdtype(dtype, jnp.inexact) or packed_format(x, requested):
        return dtype
    leaf = f"'{path}'" if path else "the value"
    described = f"{leaf} of dtype {dtype.name}, shape {tuple(x.shape)}"
    try:
        requested = jnp.dtype(requested)
    except TypeError:  # the name of a format alone
        raise ValueError(
            f"{argument}={requested} does not fit {described}: the format does not support this dtype. Wrap the leaf's "
            f"module separately, with {argument}=None."
        ) from None
    kind = jnp.complexfloating if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.floating
    if not jnp.issubdtype(requested, kind):
        lost = "would lose its imaginary part" if kind is jnp.complexfloating else "is a real float"
        raise ValueError(
            f"{argument}={requested.name} does not fit {described}: it {lost}. Use a "
            f"{'complex' if kind is jnp.complexfloating else 'floating'} dtype, or wrap the leaf's module separately, "
            f"with {argument}=None."
        )
    return requested

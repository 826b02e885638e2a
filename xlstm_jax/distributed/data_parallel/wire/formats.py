"""Formats for ``gather_dtype`` in addition to floating dtypes: a row per format, added to ``WIRE_FORMATS``.

To add a format, write a subclass of ``WireFormat`` in a new file and add a row; to remove one, remove both.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire.blocks import Blocks
from xlstm_jax.distributed.data_parallel.wire.communication import WIRE_FORMATS

WIRE_FORMATS |= {
    "int8": Blocks("int8"),
    "float8_e4m3fn": Blocks("float8_e4m3fn"),
}


def sent_bytes(shape: Sequence[int], dim: int, gather_dtype: str) -> int:
    """Returns the bytes that a device sends in a gather along ``dim``, for a shard of this shape."""
    if wire_format := WIRE_FORMATS.get(gather_dtype):
        return wire_format.nbytes(tuple(shape), dim)
    return math.prod(shape) * int(sent_itemsize(gather_dtype))


def sent_itemsize(gather_dtype: str) -> float:
    """Returns the bytes sent per value. Text after a space in ``gather_dtype``, which plans may add, is ignored."""
    if wire_format := WIRE_FORMATS.get(gather_dtype):
        return wire_format.itemsize
    return jnp.dtype(gather_dtype.partition(" ")[0]).itemsize

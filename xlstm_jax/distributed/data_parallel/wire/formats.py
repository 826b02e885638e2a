"""The formats that ``gather_dtype`` names beside the dtypes of floats: one row each, from a file of its own.

A further format is a subclass of ``WireFormat`` and a row here; a row and its file can be removed.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire.blocks import Blocks
from xlstm_jax.distributed.data_parallel.wire.wires import WireFormat

WIRE_FORMATS: dict[str, WireFormat] = {
    "int8": Blocks("int8"),
    "float8_e4m3fn": Blocks("float8_e4m3fn"),
}


def sent_bytes(shape: Sequence[int], dim: int, gather_dtype: str) -> int:
    """Returns the bytes that a device sends in a gather along ``dim``, for a shard of this shape."""
    if found := WIRE_FORMATS.get(gather_dtype):
        return found.nbytes(tuple(shape), dim)
    return math.prod(shape) * int(sent_itemsize(gather_dtype))


def sent_itemsize(gather_dtype: str) -> float:
    """Returns the bytes that are sent for one value. A plan may add words to the name of a dtype, behind a space."""
    if found := WIRE_FORMATS.get(gather_dtype):
        return found.itemsize
    return jnp.dtype(gather_dtype.partition(" ")[0]).itemsize

"""Formats for ``gather_dtype`` in addition to floating dtypes: a row per format, added to ``WIRE_FORMATS``.

To add a format, write a subclass of ``WireFormat`` in a new file and add a row; to remove one, remove both.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.wire.blocks import Blocks
from xlstm_jax.distributed.data_parallel.wire.wire import WIRE_FORMATS

WIRE_FORMATS |= {
    "int8": Blocks("int8"),
    "float8_e4m3fn": Blocks("float8_e4m3fn"),
}


def sent_bytes(shape: Sequence[int], dim: int, gather_dtype: str) -> int:
    """Returns the number of bytes of one shard of this ``shape`` as sent: a device's bytes in a gather along ``dim``.

    The number of devices and of stages does not enter: the shard counts once. ``gather_dtype`` is a name in
    ``WIRE_FORMATS`` (bytes of codes, padding and scales), or the name of a dtype, such as "bfloat16".
    """
    if wire_format := WIRE_FORMATS.get(gather_dtype):
        return wire_format.nbytes(tuple(shape), dim)
    return math.prod(shape) * int(sent_itemsize(gather_dtype))


def sent_itemsize(gather_dtype: str) -> float:
    """Returns the bytes per value in a gather: the itemsize of a dtype, or the average of a format in ``WIRE_FORMATS``.

    The average includes a value's part of the scales: 66 / 64 for "int8". Text after a space in ``gather_dtype``, which
    plans may add to a dtype name, is ignored.
    """
    if wire_format := WIRE_FORMATS.get(gather_dtype):
        return wire_format.itemsize
    return jnp.dtype(gather_dtype.partition(" ")[0]).itemsize

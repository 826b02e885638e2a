"""``Replicas``: copies whose gradients are averaged in a chosen dtype, or in blocks of 8 bits."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire import collectives, communication
from xlstm_jax.distributed.data_parallel.wire.collectives import term_of_mean
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.data_parallel.wire.dtypes import cast_dtype, dtype_name, packed_format
from xlstm_jax.distributed.data_parallel.wire.wire import WIRE_FORMATS

PACKED_TWICE = 2  # number of roundings in blocks: of the terms, then of the mean


@dataclass(frozen=True)
class Replicas(Copies):
    """Copies of the shards, along axes that cross hosts or slices (hybrid sharding, HSDP).

    The gradient of a shard is averaged over copies within the backward pass of the layer, in parallel with the
    computation of the layer before.

    >>> Replicas("dp", reduce_dtype="bfloat16")
    Replicas(axis_name=('dp',), reduce_dtype='bfloat16', shard_optimizer_state=False)

    Attributes:
      axis_name: an axis or a tuple of axes over which the parameters are not split.
      reduce_dtype: dtype in which the copies' gradients are summed; ``None``: float32, or the gradient's dtype if
        wider. "int8" and "float8_e4m3fn" are sent in blocks with scales, and summed in float32.
      shard_optimizer_state: split the optimizer's state over these axes too (ZeRO-1): each device stores 1/R of the
        bytes, and every step adds an all-gather of the updated shards.
    """

    reduce_dtype: DTypeLike | None = None
    shard_optimizer_state: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        averaging = [name for name, wire_format in WIRE_FORMATS.items() if wire_format.averages]
        object.__setattr__(self, "reduce_dtype", dtype_name(self.reduce_dtype, "reduce_dtype", averaging))

    @property
    def splits_optimizer_state(self) -> bool:
        return self.shard_optimizer_state

    def check(self, value: Any, path: str | None) -> None:
        cast_dtype(value, self.reduce_dtype, "reduce_dtype", path)

    def mean(self, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        # Each term is divided by the count before the sum: a sum in float16 overflows only where the mean does.
        count = collectives.axis_size(axes)
        if name := packed_format(grad, self.reduce_dtype):
            return WIRE_FORMATS[name].mean_of_terms(term_of_mean(grad, count, grad.dtype), axes)
        term = term_of_mean(grad, count, cast_dtype(grad, self.reduce_dtype, "reduce_dtype"))
        return collectives.all_reduce_sum(term, axes)

    def rounding(self, sizes: np.ndarray, dtype: DType) -> float:
        """Returns an estimate of the L2 norm of the rounding error of ``mean``, which averages a gradient over copies.

        The error comes from sums in ``reduce_dtype``, a narrow dtype or an 8-bit format. 0 if ``reduce_dtype`` is
        ``None``, or a dtype not narrower than ``dtype``, the dtype of the gradient. ``sizes`` has the absolute values
        of the gradient's entries.
        """
        if wire_format := WIRE_FORMATS.get(str(self.reduce_dtype)):
            # Errors are uniform up to half the distance between two codes.
            return PACKED_TWICE / math.sqrt(3) * float(np.linalg.norm(wire_format.mean_error(sizes)))
        if self.reduce_dtype is None or jnp.finfo(self.reduce_dtype).bits >= jnp.finfo(dtype).bits:
            return 0.0
        # Each term and each sum of two is rounded by at most half a unit in the last place.
        return 4 * float(jnp.finfo(self.reduce_dtype).eps) * float(np.linalg.norm(sizes))


# Boxes pickled by version 0.3.0 refer to the class in this module.
setattr(communication, Replicas.__name__, Replicas)

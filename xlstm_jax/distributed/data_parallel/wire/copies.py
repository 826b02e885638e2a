"""Copies of shards along further axes (hybrid sharding, HSDP): ``Copies``, how their gradients become one.

Device (i, j) of a mesh with the axes "dp" and "fsdp" holds shard j of a leaf that is split over "fsdp"; along "dp" lie
its copies. The backward pass of the gather scatters the gradient over "fsdp", and averages the parts over "dp".

A kind of copies is a subclass of ``Copies`` in a file of its own, which users pass as ``replicas=``.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import AxisNames, DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.dtypes import term_of_mean


@dataclass(frozen=True)
class Copies:
    """Averages gradients in their own dtype over the axes of ``axis_name``, along which a shard has copies."""

    axis_name: AxisNames

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_name", as_axis_names(self.axis_name))  # equal copies compare as equal

    @property
    def axes(self) -> tuple[str, ...]:
        """``axis_name`` as a tuple."""
        return as_axis_names(self.axis_name)

    @property
    def splits_optimizer_state(self) -> bool:
        """Whether the optimizer's state is split over these axes, too (ZeRO-1)."""
        return False

    def without(self, axes: Collection[str]) -> "Copies | None":
        """Returns the copies along the axes that are left; None where none is left."""
        left = tuple(axis for axis in self.axes if axis not in axes)
        return replace(self, axis_name=left) if left else None

    def check(self, value: Any, path: str | None) -> None:
        """Raises a ``ValueError`` where gradients of the leaf ``value`` at ``path`` cannot be averaged so."""

    def mean(self, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the mean of ``grad`` over the bound ``axes``, each of several devices; of any floating dtype."""
        return collectives.all_reduce_sum(term_of_mean(grad, collectives.axis_size(axes), grad.dtype), axes)

    def rounding(self, sizes: np.ndarray, dtype: DType) -> float:
        """Returns the norm of what ``mean`` may round, beyond sums in ``dtype``, of gradients as large as ``sizes``."""
        return 0.0

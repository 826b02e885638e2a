"""Copies of shards along further axes (hybrid sharding, HSDP), and the average of their gradients: ``Copies``.

On a mesh with the axes "dp" and "fsdp", device (i, j) holds shard j of a leaf that is split over "fsdp"; the devices
along "dp" hold copies of the shard. The backward pass of the gather scatters the gradient over "fsdp", and averages the
parts over "dp".

A new kind of copies is a subclass of ``Copies`` in a new file, which users pass as ``replicas=``.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import AxisNames, DType
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names, term_of_mean, widened


@dataclass(frozen=True)
class Copies:
    """Average of gradients, in the gradients' dtype, over the axes ``axis_name`` along which a shard has copies.

    ``mean`` averages the gradients of split leaves. Replicated leaves of the same unit are averaged over these axes by
    ``sync_gradients`` or ``value_and_grad``, in float32 or wider.
    """

    axis_name: AxisNames

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis_name", as_axis_names(self.axis_name))  # equal copies compare as equal

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes along which a shard has copies: ``axis_name`` as a tuple."""
        return as_axis_names(self.axis_name)

    @property
    def splits_optimizer_state(self) -> bool:
        """Whether the optimizer's state is split over ``axes``, too (ZeRO-1). Here False; a subclass may override."""
        return False

    def without(self, axes: Collection[str]) -> "Copies | None":
        """Returns this ``Copies`` restricted to its axes that are not in ``axes``; ``None`` if no axis remains."""
        left = tuple(axis for axis in self.axes if axis not in axes)
        return replace(self, axis_name=left) if left else None

    def check(self, value: Any, path: str | None) -> None:
        """Raises a ``ValueError`` if ``mean`` cannot average gradients of the leaf ``value``, whose path is ``path``.

        Here every leaf is accepted; subclasses that cast gradients override the method.
        """

    def mean(self, grad: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the mean of ``grad`` over the bound mesh ``axes``, in the shape and floating dtype of ``grad``.

        ``axes`` are one or more of ``self.axes``, each of size 2 or more. The result must be equal on these devices, by
        its type, too (as a ``psum`` is, and an ``all_gather`` is not). Here the sum is computed in the dtype of
        ``grad``.
        """
        return collectives.all_reduce_sum(term_of_mean(grad, collectives.axis_size(axes), grad.dtype), axes)

    def rounding(self, sizes: np.ndarray, dtype: DType) -> float:
        """Returns the L2 norm of the rounding error that ``mean`` adds to a gradient, beyond that of sums in ``dtype``.

        ``sizes`` has the absolute values of the gradient's entries. Here 0, as ``mean`` sums in the gradient's dtype.
        """
        return 0.0


def mean_over_copies(grad: jax.Array, copies: Copies, varying: Collection[str] = ()) -> jax.Array:
    """Returns the mean of ``grad``, the gradient of this device's shard, over the devices with copies of the shard.

    ``copies`` has the axes of the copies, and computes the mean. The result is float32 if ``grad`` is narrower.
    ``varying`` are the axes over which the type of the shard varies. Exception: along an axis that ``check_vma=True``
    tracks, and that is not in ``varying``, the result is the sum over the devices instead of the mean. JAX also returns
    sums over such an axis, for other terms of the gradient (of a penalty on the values, say), and adds the terms.
    ``sync_gradients`` or ``value_and_grad`` later divides by the number of devices.
    """
    axes, wide = collectives.spread_axes(copies.axes), widened(grad)
    if not axes:
        return wide
    mean = copies.mean(wide, axes).astype(wide.dtype)
    summed = [axis for axis in axes if collectives.is_tracked(axis) and axis not in varying]
    return mean * collectives.axis_size(summed) if summed else mean

"""``DistributedMetrics``: the collective reductions as methods, for code that is made of NNX modules."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from xlstm_jax.common_types import AxisNames, Metrics
from xlstm_jax.distributed.metrics import reductions
from xlstm_jax.distributed.metrics.reductions import DEFAULT_AXIS


class DistributedMetrics(nnx.Module):
    """Reductions of metric dictionaries over devices, inside ``shard_map`` or ``pmap``; a module without state.

    ``all_gather`` and the ``reduce_*`` methods are the functions of ``reductions`` that end in ``_collective``;
    ``collect_from_devices`` is called outside. Each has a static twin ``*_static`` that needs no instance.
    """

    @staticmethod
    def all_gather_static(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
        """See ``reductions.all_gather``."""
        return reductions.all_gather(metrics, axis_name)

    @staticmethod
    def reduce_mean_static(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS, *, weight: Any = None) -> Metrics:
        """See ``reductions.reduce_mean_collective``."""
        return reductions.reduce_mean_collective(metrics, axis_name, weight=weight)

    @staticmethod
    def reduce_sum_static(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
        """See ``reductions.reduce_sum_collective``."""
        return reductions.reduce_sum_collective(metrics, axis_name)

    @staticmethod
    def reduce_max_static(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
        """See ``reductions.reduce_max_collective``."""
        return reductions.reduce_max_collective(metrics, axis_name)

    @staticmethod
    def reduce_min_static(metrics: Metrics, axis_name: AxisNames = DEFAULT_AXIS) -> Metrics:
        """See ``reductions.reduce_min_collective``."""
        return reductions.reduce_min_collective(metrics, axis_name)

    @staticmethod
    def reduce_custom_static(
        metrics: Metrics,
        reduce_fn: Mapping[str, Any] | None = None,
        axis_name: AxisNames = DEFAULT_AXIS,
        *,
        weight: Any = None,
    ) -> Metrics:
        """See ``reductions.reduce_custom_collective``."""
        return reductions.reduce_custom_collective(metrics, reduce_fn, axis_name, weight=weight)

    @staticmethod
    def collect_from_devices_static(metrics: Metrics) -> Metrics:
        """See ``reductions.collect_from_devices``."""
        return reductions.collect_from_devices(metrics)

    # A static function is reached through an instance as it is, so that both names are one implementation.
    all_gather = all_gather_static
    reduce_mean = reduce_mean_static
    reduce_sum = reduce_sum_static
    reduce_max = reduce_max_static
    reduce_min = reduce_min_static
    reduce_custom = reduce_custom_static
    collect_from_devices = collect_from_devices_static

"""Metrics over many devices: three interfaces on the same accumulators and collectives.

  reductions      functions: dictionary of arrays -> one value per name; ``DistributedMetrics`` has them as methods
  pure_metric     states for the training step, as pure functions: empty -> update ... update -> sync -> compute
  stateful        metrics with an internal state, for loops outside of the step
  sums_and_means, spread, classification, ranking    the metrics

Lower layers: ``cells`` are accumulators that merge without losing counts, ``layout`` packs the cells of a state into
one vector per dtype, and ``mesh_state`` is the state of a stateful metric on a mesh.
"""

from typing import TYPE_CHECKING

from xlstm_jax.deferred import names_when_used
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Minimum, Total  # noqa: F401 imported by older code
from xlstm_jax.distributed.metrics.classification import (
    Accuracy,
    Binary,
    ConfusionMatrix,
    FBeta,
    Multiclass,
    Multilabel,
    Precision,
    Recall,
)
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric, Synced, make_log_step
from xlstm_jax.distributed.metrics.ranking import BinnedRanking
from xlstm_jax.distributed.metrics.reductions import (
    all_gather,
    collect_from_devices,
    reduce_custom,
    reduce_custom_collective,
    reduce_max,
    reduce_max_collective,
    reduce_mean,
    reduce_mean_collective,
    reduce_min,
    reduce_min_collective,
    reduce_sum,
    reduce_sum_collective,
)
from xlstm_jax.distributed.metrics.spread import StandardDeviation
from xlstm_jax.distributed.metrics.stateful import Metric, MetricAccumulator, MetricReduceOp, StatefulMetric
from xlstm_jax.distributed.metrics.sums_and_means import (
    Compose,
    GlobalNorm,
    Max,
    Min,
    Perplexity,
    Sum,
    Throughput,
    WeightedMean,
)

if TYPE_CHECKING:
    from xlstm_jax.distributed.metrics.distributed_metrics import DistributedMetrics
else:
    __getattr__ = names_when_used(__name__, {"DistributedMetrics": "xlstm_jax.distributed.metrics.distributed_metrics"})

__all__ = [
    "Accuracy",
    "Binary",
    "BinnedRanking",
    "Compose",
    "ConfusionMatrix",
    "DistributedMetrics",
    "FBeta",
    "GlobalNorm",
    "Local",
    "Max",
    "Metric",
    "MetricAccumulator",
    "MetricReduceOp",
    "Min",
    "Multiclass",
    "Multilabel",
    "Perplexity",
    "Precision",
    "PureMetric",
    "Recall",
    "StandardDeviation",
    "StatefulMetric",
    "Sum",
    "Synced",
    "Throughput",
    "WeightedMean",
    "all_gather",
    "collect_from_devices",
    "make_log_step",
    "reduce_custom",
    "reduce_custom_collective",
    "reduce_max",
    "reduce_max_collective",
    "reduce_mean",
    "reduce_mean_collective",
    "reduce_min",
    "reduce_min_collective",
    "reduce_sum",
    "reduce_sum_collective",
]

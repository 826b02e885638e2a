"""Distributed metrics: reductions of dictionaries, states for the training step, metrics that keep their own state."""

from xlstm_jax.distributed.metrics.catalogue.basic import (
    Compose,
    GlobalNorm,
    Max,
    Min,
    Perplexity,
    Sum,
    Throughput,
    WeightedMean,
)
from xlstm_jax.distributed.metrics.catalogue.classification import (
    Accuracy,
    Binary,
    ConfusionMatrix,
    FBeta,
    Multiclass,
    Multilabel,
    Precision,
    Recall,
)
from xlstm_jax.distributed.metrics.catalogue.ranking import BinnedRanking
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Minimum, Total
from xlstm_jax.distributed.metrics.distributed_metrics import DistributedMetrics
from xlstm_jax.distributed.metrics.log.logger import MetricLogger
from xlstm_jax.distributed.metrics.pure_metric import Local, PureMetric, Synced, make_log_step
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
from xlstm_jax.distributed.metrics.stateful import Metric, MetricAccumulator, MetricReduceOp, StatefulMetric

__all__ = [
    "Accuracy",
    "Binary",
    "BinnedRanking",
    "Compose",
    "ConfusionMatrix",
    "Count",
    "DistributedMetrics",
    "FBeta",
    "GlobalNorm",
    "Local",
    "Max",
    "Maximum",
    "Metric",
    "MetricAccumulator",
    "MetricLogger",
    "MetricReduceOp",
    "Min",
    "Minimum",
    "Multiclass",
    "Multilabel",
    "Perplexity",
    "Precision",
    "PureMetric",
    "Recall",
    "StatefulMetric",
    "Sum",
    "Synced",
    "Throughput",
    "Total",
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

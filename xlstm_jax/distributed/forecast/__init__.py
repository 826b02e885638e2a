"""What a training step will cost on devices that are not there: memory, traffic, time; and what it wastes."""

from xlstm_jax.distributed.forecast.chips import CHIPS, Chip, Roofline, Topology, parse_topology
from xlstm_jax.distributed.forecast.estimate import Forecast, forecast
from xlstm_jax.distributed.forecast.findings import Finding, LintError, lint
from xlstm_jax.distributed.forecast.planner import Fit, Options, fit
from xlstm_jax.distributed.forecast.topology import CompileError
from xlstm_jax.distributed.forecast.traffic import Collective
from xlstm_jax.distributed.forecast.workload import Workload

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "CompileError",
    "Finding",
    "Fit",
    "Forecast",
    "LintError",
    "Options",
    "Roofline",
    "Topology",
    "Workload",
    "fit",
    "forecast",
    "lint",
    "parse_topology",
]

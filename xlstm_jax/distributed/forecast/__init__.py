"""What a training step will cost on devices that are not there: memory, traffic, time; and what it wastes."""

from xlstm_jax.distributed.forecast.compiling.compile_process import CompileError
from xlstm_jax.distributed.forecast.compiling.report_cache import ReportCache
from xlstm_jax.distributed.forecast.cost.axis_traffic import AxisTraffic
from xlstm_jax.distributed.forecast.cost.collective_traffic import Collective
from xlstm_jax.distributed.forecast.cost.roofline import Range, Roofline
from xlstm_jax.distributed.forecast.dispatch import Dispatch, dispatch
from xlstm_jax.distributed.forecast.fitting import Fit, Options, fit
from xlstm_jax.distributed.forecast.forecasting import Forecast, forecast
from xlstm_jax.distributed.forecast.linting.lint import Finding, LintError, lint
from xlstm_jax.distributed.forecast.workload import Workload
from xlstm_jax.distributed.hardware import CHIPS, Chip, Topology, parse_topology

__all__ = [
    "CHIPS",
    "AxisTraffic",
    "Chip",
    "Collective",
    "CompileError",
    "Dispatch",
    "Finding",
    "Fit",
    "Forecast",
    "LintError",
    "Options",
    "Range",
    "ReportCache",
    "Roofline",
    "Topology",
    "Workload",
    "dispatch",
    "fit",
    "forecast",
    "lint",
    "parse_topology",
]

"""Memory, traffic and time of any ``jax.jit`` program on absent devices.

  forecast(jitted, *args, topology="v6e:16x16")     compiles for this slice on this machine and reads the compiled text

hardware     tables: chips, slices, links, NCCL
compiling    compiles a program in a child process; caches compiled texts
hlo          parses compiled text to instructions: data flow, collectives, the module of each collective
cost         computes bytes, FLOP and seconds of instructions
forecasting  runs the pipeline above, and returns a ``Forecast``; ``report`` prints and draws a forecast
training     the only folder that imports ``xlstm_jax.distributed``: describes a training without running the training
             (``Workload``), searches options that fit (``fit``), compares a step with its plan (``lint``, ``dispatch``)
"""

from xlstm_jax.forecast.compiling.compile_process import CompileError
from xlstm_jax.forecast.compiling.report_cache import ReportCache
from xlstm_jax.forecast.cost.axis_traffic import AxisTraffic
from xlstm_jax.forecast.cost.collective_traffic import Collective
from xlstm_jax.forecast.cost.roofline import Roofline
from xlstm_jax.forecast.cost.time_range import Range, TimeRatio
from xlstm_jax.forecast.forecasting import Forecast, forecast
from xlstm_jax.forecast.hardware import CHIPS, Chip, Topology, parse_topology

__all__ = [
    "CHIPS",
    "AxisTraffic",
    "Chip",
    "Collective",
    "CompileError",
    "Forecast",
    "Range",
    "ReportCache",
    "Roofline",
    "TimeRatio",
    "Topology",
    "forecast",
    "parse_topology",
]

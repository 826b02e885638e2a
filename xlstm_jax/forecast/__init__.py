"""The cost of any ``jax.jit`` program on devices that are not there: memory, traffic, time.

  forecast(jitted, *args, topology="v6e:16x16")     compiles for this slice, here and now, and reads the compiled text

hardware     tables: chips, slices, links, NCCL
compiling    a program to compiled text, in a process of its own; a cache of such texts
hlo          compiled text to instructions: who reads what, which collectives, the module that each one serves
cost         instructions to bytes, FLOP and seconds
forecasting  all of the above, in a ``Forecast``; ``report`` prints and draws it
training     the one folder that imports ``xlstm_jax.distributed``: a training that is not run (``Workload``), the
             search for options that fit (``fit``), and a step beside its plan (``lint``, ``dispatch``)
"""

from xlstm_jax.forecast.compiling.compile_process import CompileError
from xlstm_jax.forecast.compiling.report_cache import ReportCache
from xlstm_jax.forecast.cost.axis_traffic import AxisTraffic
from xlstm_jax.forecast.cost.collective_traffic import Collective
from xlstm_jax.forecast.cost.roofline import Range, Roofline
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
    "Topology",
    "forecast",
    "parse_topology",
]

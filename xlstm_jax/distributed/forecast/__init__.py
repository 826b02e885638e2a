"""What a training step will cost on devices that need not be there: memory, traffic, time."""

from xlstm_jax.distributed.forecast.chips import CHIPS, Chip, Roofline, Topology, parse_topology
from xlstm_jax.distributed.forecast.estimate import Forecast, forecast
from xlstm_jax.distributed.forecast.topology import CompileError
from xlstm_jax.distributed.forecast.traffic import Collective
from xlstm_jax.distributed.forecast.workload import Workload

__all__ = [
    "CHIPS",
    "Chip",
    "Collective",
    "CompileError",
    "Forecast",
    "Roofline",
    "Topology",
    "Workload",
    "forecast",
    "parse_topology",
]

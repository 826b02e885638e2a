"""Tables of accelerators for forecasts: chips, TPU slices, links between devices, times of NCCL, packing."""

from xlstm_jax.forecast.hardware.chips import CHIPS, Chip, chip_of
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.packing import packing_limit
from xlstm_jax.forecast.hardware.topologies import Topology, parse_topology

__all__ = ["CHIPS", "Chip", "Links", "Topology", "chip_of", "packing_limit", "parse_topology"]

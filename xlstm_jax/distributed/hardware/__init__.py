"""What is known about accelerators: one table of chips; slices of TPUs, links between devices, XLA's options."""

from xlstm_jax.distributed.hardware.chips import CHIPS, Chip, chip_of
from xlstm_jax.distributed.hardware.links import Links
from xlstm_jax.distributed.hardware.topologies import Topology, parse_topology
from xlstm_jax.distributed.hardware.xla_options import compiler_options

__all__ = ["CHIPS", "Chip", "Links", "Topology", "chip_of", "compiler_options", "parse_topology"]

"""Several processes: how they join, compare what they start with, fail together; and devices simulated on the CPU."""

from xlstm_jax.distributed.processes.agreement import assert_same_everywhere
from xlstm_jax.distributed.processes.joining import initialize_distributed
from xlstm_jax.distributed.processes.simulation import available_devices, simulate_cpu_devices

__all__ = ["assert_same_everywhere", "available_devices", "initialize_distributed", "simulate_cpu_devices"]

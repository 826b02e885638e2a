"""Several processes: how they join, compare what they start with, fail together; and devices simulated on the CPU."""

from xlstm_jax.distributed.processes.devices import available_devices, simulate_cpu_devices
from xlstm_jax.distributed.processes.initialize import initialize_distributed
from xlstm_jax.distributed.processes.same_everywhere import assert_same_everywhere

__all__ = ["assert_same_everywhere", "available_devices", "initialize_distributed", "simulate_cpu_devices"]

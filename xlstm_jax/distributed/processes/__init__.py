"""Runs of several processes: joining a job, comparison of start values, collective errors; simulated CPU devices."""

from xlstm_jax.distributed.processes.devices import available_devices, simulate_cpu_devices
from xlstm_jax.distributed.processes.initialize import initialize_distributed
from xlstm_jax.distributed.processes.same_everywhere import assert_same_everywhere

__all__ = ["assert_same_everywhere", "available_devices", "initialize_distributed", "simulate_cpu_devices"]

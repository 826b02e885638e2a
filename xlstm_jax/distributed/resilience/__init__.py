"""A guard around the training loop: a fault ends every process soon, and little of the run is lost.

What can go wrong in a run, what happens then, and how soon:

  a step hangs in one process         the watchdog writes all stacks, and ends the process         within the timeout
  an exception in one process         it is printed and the process ends; the others get an error  < 3 s
  a process is killed                 the others get an error in their collective                  < 3 s
  SIGTERM to any process              ``should_stop`` is True in all, after the same step          some steps
  a loss or gradient is not finite    ``skip_nonfinite`` skips the update on all devices; too many end the run
  copies of a leaf are not equal      ``check_replicas`` names the leaf and the devices
"""

from xlstm_jax.distributed.optimizers.nonfinite import skip_counts, skip_nonfinite
from xlstm_jax.distributed.processes.leaving import EXIT_FAILED
from xlstm_jax.distributed.resilience.loop_guard import LoopGuard, NonFiniteError
from xlstm_jax.distributed.resilience.replica_check import ReplicaError, check_replicas
from xlstm_jax.distributed.resilience.watchdog import EXIT_HUNG

__all__ = [
    "EXIT_FAILED",
    "EXIT_HUNG",
    "LoopGuard",
    "NonFiniteError",
    "ReplicaError",
    "check_replicas",
    "skip_counts",
    "skip_nonfinite",
]

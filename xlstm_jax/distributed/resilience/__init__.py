"""Fault handling in the training loop: a fault ends every process quickly, so that little of the run is lost.

Faults, reactions and, in the last column, reaction times:

  a step hangs in one process         the watchdog writes every stack and ends the process         within the timeout
  an exception in one process         printed, then the process ends; other processes raise        < 3 s
  a process is killed                 other processes raise in their collective                    < 3 s
  SIGTERM to any process              ``should_stop`` is True at the same step in every process    some steps later
  a loss or gradient is not finite    ``skip_nonfinite`` skips the update on every device; too many skips end the run
  replicas of a leaf differ           ``check_replicas`` names the leaf and the devices
  a device computes wrong numbers     ``training.replayed`` names the device, before the update counts
"""

from xlstm_jax.distributed.optimizers.nonfinite import skip_counts, skip_nonfinite
from xlstm_jax.distributed.processes.exit import EXIT_FAILED
from xlstm_jax.distributed.resilience.disagreement import DisagreementError
from xlstm_jax.distributed.resilience.loop_guard import LoopGuard, NonFiniteError
from xlstm_jax.distributed.resilience.replica_check import ReplicaError, check_replicas
from xlstm_jax.distributed.resilience.watchdog import EXIT_HUNG

__all__ = [
    "EXIT_FAILED",
    "EXIT_HUNG",
    "DisagreementError",
    "LoopGuard",
    "NonFiniteError",
    "ReplicaError",
    "check_replicas",
    "skip_counts",
    "skip_nonfinite",
]

"""Staying alive: a guard around the training loop, so that a fault ends every process soon and loses little.

What clusters do to a run, and what becomes of it:

  a step hangs (a stuck peer)      the watchdog writes all stacks, and ends the process          within the timeout
  an exception in one process      it is printed, the process ends at once, its peers see that   < 2 s
  a process is killed              its peers get an exception in their collective: see above     < 2 s
  SIGTERM to any process           ``should_stop`` is True on all of them, at the same step      some steps
  a loss or gradient is not finite the update is skipped everywhere (``skip_nonfinite``); too many end the run
  copies that should be equal are not   ``check_replicas`` names the leaf and the devices
"""

from xlstm_jax.distributed.optimizers.nonfinite import skip_counts, skip_nonfinite
from xlstm_jax.distributed.resilience.loop_guard import LoopGuard, NonFiniteError
from xlstm_jax.distributed.resilience.replica_check import ReplicaError, check_replicas
from xlstm_jax.distributed.resilience.watchdog import EXIT_FAILED, EXIT_HUNG

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

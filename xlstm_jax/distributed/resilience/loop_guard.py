"""Guard around the training loop: step timeouts, checks of the loss, signals, and a fast exit after errors.

``step_done(n, metrics)`` starts the host transfer of the loss and counters of step n, reads the values of step n - 1,
and restarts the clock of the watchdog. During the wait for step n - 1 the device already has step n to compute, so the
device never waits for the host. Every process detects a bad step one step later, at the same step, because every
process reads the same replicated values.

After an exception a process notifies the other processes and ends with ``os._exit`` (``processes/exit.py``). The
``atexit`` function of JAX would wait in a barrier for the other processes, which wait in a collective for this process,
until a heartbeat times out.

The guard compares the bits of the loss on the local devices: after the average every device has the same loss.
``check_replicas``, which needs an exchange, also compares devices of different processes.

The watchdog checks every local shard of the loss. If a process has died, the collective fails on the devices that
communicate with the dead process, while other devices wait for their neighbours. Reading the loss would only check the
first device.
"""

import math
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.distributed.processes.exit import EXIT_FAILED, EXIT_INTERRUPTED, leave, leave_with_others
from xlstm_jax.distributed.resilience.disagreement import named_devices
from xlstm_jax.distributed.resilience.replica_check import check_local_replicas
from xlstm_jax.distributed.resilience.watchdog import MAX_TIMEOUT_S, Watchdog
from xlstm_jax.program_names import SKIPPED_IN_A_ROW, SKIPPED_STEPS

INTERRUPTED = (
    b"\nCtrl-C: this run saves and ends after its step, with exit code 130; a second Ctrl-C ends it at once.\n"
)
DEFAULT_STEP_TIMEOUT_S = 600.0
DEFAULT_FIRST_STEP_TIMEOUT_S = 3600.0  # the first step compiles
DEFAULT_MAX_SKIPPED_IN_A_ROW = 10
LOSS = "loss"


class NonFiniteError(ArithmeticError):
    """Error: the update of a non-finite loss was applied, or too many consecutive steps were skipped.

    >>> try:
    ...     with LoopGuard() as guard:
    ...         guard.step_done(1, {"loss": np.nan})
    ... except NonFiniteError:
    ...     "restore a checkpoint"
    'restore a checkpoint'
    """


class LoopGuard:
    """Context manager for a training loop: watchdog, fast exit, preemption, and a stop after non-finite steps.

    Every process of a run creates a guard and calls the same methods. With a single process an exception propagates as
    usual. With several processes an exception that leaves the block ends the process immediately with code 13 (130
    after Ctrl-C, the given code after ``sys.exit``): an enclosing ``with`` or ``finally`` does not run. So put a
    checkpointer, which waits for other processes when it closes, outside of the guard, and a metrics writer, which
    closes files, inside.

    Ctrl-C acts as SIGTERM does: ``should_stop`` is True, the loop saves and leaves the block, and the block ends the
    program by ``SystemExit(130)``. A second Ctrl-C raises a ``KeyboardInterrupt``. If the loop never calls
    ``should_stop``, the second ``step_done`` after Ctrl-C raises the ``KeyboardInterrupt``.

    Args:
      step_timeout_s: time limit from one ``step_done`` to the next. After the limit the stacks of every thread are
        written to stderr and the process ends with code 14. The time includes everything between steps: data loading,
        an evaluation that is not ``paused``. None disables the limit, for a debugger.
      first_step_timeout_s: time limit up to the first ``step_done``, which includes compilation.
      max_skipped_in_a_row: with ``skip_nonfinite`` around the optimizer, the largest number of consecutive skipped
        steps; one more raises ``NonFiniteError``. 0 raises at the first skipped step.
    Raises:
      ValueError: a time limit is not positive or is above 292 years; ``max_skipped_in_a_row`` is negative; or, in a
        single process, the guard is entered outside of the main thread, which is the only thread that receives SIGTERM.

    >>> with LoopGuard(step_timeout_s=60) as guard:
    ...     for step in range(1, 4):
    ...         guard.step_done(step, {"loss": 1 / step})  # the metrics of your train_step
    ...         if guard.should_stop(step):
    ...             break  # and save a checkpoint
    """

    def __init__(
        self,
        *,
        step_timeout_s: float | None = DEFAULT_STEP_TIMEOUT_S,
        first_step_timeout_s: float | None = DEFAULT_FIRST_STEP_TIMEOUT_S,
        max_skipped_in_a_row: int = DEFAULT_MAX_SKIPPED_IN_A_ROW,
    ) -> None:
        self._step_timeout_s = _checked_timeout("step_timeout_s", step_timeout_s)
        self._first_step_timeout_s = _checked_timeout("first_step_timeout_s", first_step_timeout_s)
        if max_skipped_in_a_row < 0:
            raise ValueError(f"max_skipped_in_a_row={max_skipped_in_a_row}: it is 0 (stop at the first) or more.")
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._watchdog: Watchdog | None = None  # created on entry of the block
        self._watching: tuple[str, float | None] = ("", None)
        self._pending: tuple[int, dict[str, Any]] | None = None  # the last step and its values
        self._in_flight: list[Any] = []  # losses that may still be computed
        self._sigterm_seen = self._interrupted = self._unheard = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self._watchdog is not None:
            raise ValueError("this LoopGuard is in use, or was; make one for each loop.")
        # Signals first: entering in the wrong thread raises here, before a thread is started.
        self._listen()
        leave_with_others()
        self._watchdog = Watchdog(f"process {jax.process_index()} of {jax.process_count()}", self._failed_shard)
        self._watchdog.start()
        self._watch("the first step", self._first_step_timeout_s)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        # No step follows the last step, so its loss is checked here.
        try:
            if error is None:
                self._check_pending()
        except BaseException as late:
            self._close(late)
            raise
        self._close(error)
        if error is None and self._interrupted:
            raise SystemExit(EXIT_INTERRUPTED)

    def step_done(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Registers that a step was dispatched, and checks the loss and the counters of the preceding step.

        Args:
          step: the step number.
          metrics: the metrics from a step of ``make_train_step``: ``loss`` and, with ``skip_nonfinite`` around the
            optimizer, ``skipped_steps`` and ``skipped_in_a_row`` (in a custom step add ``skip_counts(opt_state)``).
            None skips the check of the loss.
        Raises:
          NonFiniteError: too many consecutive steps were skipped; or, without ``skip_nonfinite``, a loss is not finite.
          ReplicaError: the loss is replicated by its sharding, and devices of this process hold different losses.
          ValueError: ``metrics`` has no ``loss``; the loss of the preceding step was donated; or the guard is outside
            of its ``with`` block.
          KeyboardInterrupt: Ctrl-C was pressed, and the loop does not call ``should_stop``.
        """
        self._entered("step_done")
        # Ctrl-C was pressed before the preceding step, and `should_stop` was not called since: the loop ignores it.
        if self._unheard:
            raise KeyboardInterrupt("a step after Ctrl-C, and the loop has not called should_stop since")
        self._unheard = self._interrupted
        step_and_values = None if metrics is None else (step, _values_to_check(metrics))
        # Set before the wait for the preceding step, in which the watchdog must check both losses. The clock restarts
        # after the wait, because a hanging step is detected during the wait.
        self._in_flight = [values[LOSS] for _, values in filter(None, (self._pending, step_and_values))]
        self._check_pending()
        self._pending = step_and_values
        self._watch(f"step {step + 1}", self._step_timeout_s)

    def should_stop(self, step: int) -> bool:
        """Returns whether to save a checkpoint and leave the loop, because a process received SIGTERM or Ctrl-C.

        Call ``should_stop`` in every process after every step, with the step number. The result becomes True in every
        process after the same step: processes agree on the step through JAX's preemption service, without a collective.
        Raises a ``ValueError`` outside of the guard's ``with`` block.
        """
        self._entered("should_stop")
        self._unheard = False
        # The signalled process must not stop alone: other processes would wait in the collectives of the next step.
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(step)
        return self._sigterm_seen

    @contextmanager
    def paused(self, timeout_s: float | None = None) -> Iterator[None]:
        """Context that suspends the step timeout in a long section, such as an evaluation or the wait for a checkpoint.

        ``timeout_s`` limits the section; None (the default) sets no limit. The clock of the step restarts after the
        section.
        """
        self._entered("paused")
        before = self._watching
        self._watch(f"the paused section after {before[0]} began", _checked_timeout("timeout_s", timeout_s))
        try:
            yield
        finally:
            self._watch(*before)

    def _watch(self, activity: str, timeout_s: float | None) -> None:
        self._watching = (activity, timeout_s)
        self._entered("watch").watch(activity, timeout_s)

    def _entered(self, method: str) -> Watchdog:
        """Returns the guard's watchdog, which is created on entry of the ``with`` block.

        Raises a ``ValueError`` that names ``method``, the calling method, if the block was not entered.
        """
        if self._watchdog is None:
            raise ValueError(f"{method} of a LoopGuard outside of its block; write 'with LoopGuard(...) as guard:'.")
        return self._watchdog

    def _check_pending(self) -> None:
        """Checks the loss and skip counters of the pending step, after a wait until they are computed.

        The pending step is the last step that was passed to ``step_done`` and is not checked yet. Afterwards no step is
        pending. Does nothing if no step is pending.

        Raises:
          ValueError: the loss was donated (with counters: the counter).
          ReplicaError: devices of this process hold different losses.
          NonFiniteError: the loss is not finite; or, with counters of ``skip_nonfinite``, too many consecutive steps
            were skipped.
        """
        if self._pending is None:
            return
        (step, held), self._pending = self._pending, None
        # Checked before the read, because JAX's error ("Array has been deleted") does not name the cause.
        if isinstance(decisive := _decisive(held), jax.Array) and decisive.is_deleted():
            raise ValueError(
                f"the loss of step {step} was donated before it could be looked at, one step later, most likely to a "
                "running mean. Pass a copy of the loss (jnp.copy) to step_done, or donate only the mean."
            )
        self._entered("step_done").rename(f"the wait for the loss of step {step}")
        check_local_replicas(f"the loss of step {step}", held[LOSS])
        if SKIPPED_IN_A_ROW in held:
            _check_skipped(step, held, self._max_skipped_in_a_row)
        elif not np.all(np.isfinite(loss := np.asarray(held[LOSS]))):
            raise NonFiniteError(
                f"the loss of step {step} is {loss}, and its update was applied, so the parameters are spoiled "
                f"since step {step} or earlier. Restore an earlier checkpoint, and put skip_nonfinite(...) around the "
                "optimizer (in a custom step, also add skip_counts(opt_state) to the metrics)."
            )

    def _failed_shard(self) -> str | None:
        """Returns an error text if a local device failed to compute one of the last two losses, else None.

        Does not wait for losses that are still computed. In a run of a single process the result is always None.
        """
        if jax.process_count() == 1:
            return None
        losses = [loss for loss in self._in_flight if isinstance(loss, jax.Array)]
        return next(filter(None, map(_failure_of, losses)), None)

    def _listen(self) -> None:
        """Installs handlers for SIGTERM and Ctrl-C, after which ``should_stop`` is True.

        In a run of several processes JAX's preemption service handles SIGTERM and notifies every process. Ctrl-C is
        handled only if the guard is entered in the main thread and Python's default handler is installed. A second
        Ctrl-C raises a ``KeyboardInterrupt``.

        Raises:
          ValueError: the guard of a single process is entered outside of the main thread.
        """
        several = jax.distributed.is_initialized()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not several and not in_main_thread:
            raise ValueError(
                "LoopGuard was entered outside of the main thread, but only the main thread receives SIGTERM. Enter it "
                "in the main thread."
            )

        def stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._sigterm_seen = True

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                signal.default_int_handler(number, frame)
            self._interrupted = self._sigterm_seen = True
            # Not `sys.stderr`: the handler may interrupt a print, and would wait for the lock of the print.
            os.write(2, INTERRUPTED)
            # JAX's preemption service, in C++, handles only SIGTERM.
            if several:
                os.kill(os.getpid(), signal.SIGTERM)

        # `signal.signal` returns None for a handler that was not installed from Python, and cannot put it back.
        if not several:
            self._previous_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop) or signal.SIG_DFL
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored (nohup)
            self._previous_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)

    def _close(self, error: BaseException | None) -> None:
        """Stops the watchdog and restores the signal handlers, at the end of the ``with`` block.

        After an error in a run of several processes, prints the error and ends this process instead, because other
        processes would wait for it; except after ``sys.exit`` with code 0. ``error`` is the exception that leaves the
        block, or None.
        """
        # `leave` never returns, so the error is printed here.
        if error is not None and jax.process_count() > 1 and (code := _exit_code(error)):
            traceback.print_exception(error)
            leave(code, f"{type(error).__name__}: {error}")
        self._entered("close").stop()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)


def _failure_of(loss: jax.Array) -> str | None:
    """Returns a text with the error of a local device that failed to compute the loss; None if no device has failed.

    Does not wait for shards of the loss that are still computed. A donated loss is no failure.
    """
    shard = None
    try:
        for shard in loss.addressable_shards:
            # A shard whose computation failed is also ready; `block_until_ready` then raises the error.
            if shard.data.is_ready():
                shard.data.block_until_ready()
    except Exception as error:
        # The main thread may donate the loss during these checks; a donated loss is not a failure.
        if shard is None or loss.is_deleted() or shard.data.is_deleted():
            return None
        return f"device {named_devices([shard.device])} failed ({error})"
    return None


def _checked_timeout(name: str, timeout_s: float | None) -> float | None:
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"{name}={timeout_s}: a number of seconds, or None to wait for ever.")
    if timeout_s is not None and timeout_s > MAX_TIMEOUT_S:
        raise ValueError(
            f"{name}={timeout_s:g} s is longer than the {MAX_TIMEOUT_S:g} s that a timer can take. Pass None to wait "
            "for ever."
        )
    return timeout_s


def _values_to_check(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the loss and, if present, the two skip counters from a step's metrics, by name.

    Starts the host transfers of the values that will be read: the loss, and the counter of consecutive skipped steps.
    Raises a ``ValueError`` if the metrics have no loss.
    """
    if LOSS not in metrics:
        raise ValueError(
            f"step_done: the metrics have no {LOSS!r}, their names are {sorted(metrics)}. Pass {{{LOSS!r}: value}}, "
            "or no metrics at all; then no loss is checked."
        )
    decisive_values = {name: metrics[name] for name in (LOSS, SKIPPED_STEPS, SKIPPED_IN_A_ROW) if name in metrics}
    if isinstance(decisive := _decisive(decisive_values), jax.Array):
        decisive.copy_to_host_async()
    if isinstance(loss := metrics[LOSS], jax.Array):
        for shard in loss.addressable_shards:  # the losses of the local devices are compared
            shard.data.copy_to_host_async()
    return decisive_values


def _decisive(values: Mapping[str, Any]) -> Any:
    """Returns the value by which a step is judged: the counter of consecutive skipped steps if present, else the loss.

    ``values`` has the loss and, if the optimizer skips non-finite steps, the counters of skipped steps, by name.
    """
    # With the counter a non-finite loss is not an error: the update was skipped.
    return values.get(SKIPPED_IN_A_ROW, values[LOSS])


def _check_skipped(step: int, values: dict[str, Any], limit: int) -> None:
    in_a_row = int(np.asarray(values[SKIPPED_IN_A_ROW]))
    if in_a_row > limit:
        raise NonFiniteError(
            f"step {step}: the loss or a gradient was not finite in {in_a_row} steps in a row "
            f"({np.asarray(values[SKIPPED_STEPS])} in all), more than max_skipped_in_a_row={limit}; its loss is "
            f"{np.asarray(values[LOSS])}, and the state is that of step {step - in_a_row}. Check these batches, lower "
            "the learning rate or clip gradients: docs/howto/find_a_nan.md."
        )


def _exit_code(error: BaseException) -> int:
    """Returns the exit code for an exception that leaves the guard's block.

    130 for a ``KeyboardInterrupt``; the code of a ``SystemExit`` (0 for ``sys.exit()``, 1 for a text); 13 for any other
    exception.
    """
    # With code 0 the process ends as usual, through JAX's barrier, which every process reaches after success.
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_FAILED

"""The guard around the training loop: the clock of the steps, the values of their losses, signals, and the way out.

``step_done(n, metrics)`` starts the copy of step n's loss and counters to the host, reads those of step n - 1, and
starts the watchdog's clock anew. While it waits for step n - 1 the device has step n to do, so the device never waits
for the host. All processes learn of a bad step one step later, at the same step: they read the same replicated values.

After an exception a process tells the others and ends with ``os._exit`` (``processes/leaving.py``). JAX's ``atexit``
would wait in a barrier for the other processes, which wait in a collective for this one, until a heartbeat times out.

The watchdog looks at every shard of the loss. If a process is gone, the collective fails on the devices that talk to
that process, while other devices wait for their neighbours. A read of the loss would see the first device alone.
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

from xlstm_jax.distributed.processes.leaving import EXIT_FAILED, EXIT_INTERRUPTED, leave, leave_with_others
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
    """The update of a loss that is not finite was applied, or too many steps in a row were skipped.

    >>> try:
    ...     with LoopGuard() as guard:
    ...         guard.step_done(1, {"loss": np.nan})
    ... except NonFiniteError:
    ...     "restore a checkpoint"
    'restore a checkpoint'
    """


class LoopGuard:
    """Guards a training loop: a watchdog, a fast exit, preemption, and an end to non-finite steps.

    Every process of a run makes a guard and calls the same methods. In a single process an exception propagates as
    usual. If an exception leaves the block in a run of several processes, the process ends at once with code 13 (130
    after Ctrl-C, its own code after ``sys.exit``): an enclosing ``with`` or ``finally`` does not run. So put a
    checkpointer, which waits for other processes as it closes, outside of the guard, and a writer of metrics, which
    closes files, inside.

    Ctrl-C works as SIGTERM does: ``should_stop`` is True, the loop saves and leaves the block, and the block ends the
    program by ``SystemExit(130)``. A second Ctrl-C is a ``KeyboardInterrupt``; so is the first in a loop that never
    calls ``should_stop``.

    Args:
      step_timeout_s: a step that takes longer, from one ``step_done`` to the next, ends the process with code 14 after
        the stacks of all threads were written to stderr. The time covers all that the loop does between steps: data, an
        evaluation that is not ``paused``. None watches nothing, for a debugger.
      first_step_timeout_s: the limit up to the first ``step_done``, a time in which the step is compiled.
      max_skipped_in_a_row: with ``skip_nonfinite`` around the optimizer: more skipped steps than this, one after the
        other, raise ``NonFiniteError``. 0 stops at the first.
    Raises:
      ValueError: a limit is not positive, or is longer than 292 years; or a single process enters the guard in another
        thread than the main thread, which alone hears SIGTERM.

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
        self._watchdog: Watchdog | None = None  # from the entry on
        self._watching: tuple[str, float | None] = ("", None)
        self._pending: tuple[int, dict[str, Any]] | None = None  # the last step, with its values
        self._in_flight: list[Any] = []  # losses that may not have been computed
        self._sigterm_seen = self._interrupted = self._unheard = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if self._watchdog is not None:
            raise ValueError("this LoopGuard is in use, or was; make one for each loop.")
        # Signals first: entering in the wrong thread raises here, before any thread is started.
        self._listen()
        leave_with_others()
        self._watchdog = Watchdog(f"process {jax.process_index()} of {jax.process_count()}", self._failed_shard)
        self._watchdog.start()
        self._watch("the first step", self._first_step_timeout_s)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        # The last step has no step after it, in which its loss would be looked at.
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
        """Says that a step was dispatched, and checks the loss and the counters of the step before.

        Args:
          step: its number.
          metrics: what ``make_train_step`` returned: ``loss``, and ``skipped_steps`` and ``skipped_in_a_row`` where
            the optimizer has ``skip_nonfinite`` around it (in a step of your own: ``skip_counts(opt_state)``). None:
            no loss is checked.
        Raises:
          NonFiniteError: too many steps in a row were skipped; or, without ``skip_nonfinite``, a loss is not finite.
          ValueError: ``metrics`` have no ``loss``; or the guard is outside of its ``with`` block.
        """
        self._entered("step_done")
        # Ctrl-C came before the step before, and `should_stop` was not called since: nobody would ever hear it.
        if self._unheard:
            raise KeyboardInterrupt("a step after Ctrl-C, and the loop has not called should_stop since")
        self._unheard = self._interrupted
        held = None if metrics is None else (step, _values_to_check(metrics))
        # Before the wait for the step before, in which the watchdog must see both losses. The clock starts anew after
        # that wait, since the wait is where a step that hangs is noticed.
        self._in_flight = [values[LOSS] for _, values in filter(None, (self._pending, held))]
        self._check_pending()
        self._pending = held
        self._watch(f"step {step + 1}", self._step_timeout_s)

    def should_stop(self, step: int) -> bool:
        """Whether to save a checkpoint and leave: some process has got SIGTERM, or Ctrl-C.

        Call it in every process after every step, with the step's number. It is True in all processes after the same
        step. They agree on that step through JAX's preemption service, without a collective.
        """
        self._entered("should_stop")
        self._unheard = False
        # The process that got the signal must not stop by itself: the others would wait in the next step's collectives.
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(step)
        return self._sigterm_seen

    @contextmanager
    def paused(self, timeout_s: float | None = None) -> Iterator[None]:
        """A section that is no step and may take long, as an evaluation, or the wait for a checkpoint.

        ``timeout_s`` is the section's own limit; by default there is none. The step's clock starts anew after it.
        """
        self._entered("paused")
        before = self._watching
        self._watch(f"the paused section after {before[0]} began", _checked_timeout("timeout_s", timeout_s))
        try:
            yield
        finally:
            self._watch(*before)

    def _watch(self, what: str, timeout_s: float | None) -> None:
        self._watching = (what, timeout_s)
        self._entered("watch").watch(what, timeout_s)

    def _entered(self, method: str) -> Watchdog:
        """The watchdog; raises an error that names ``method`` if the ``with`` block was not entered."""
        if self._watchdog is None:
            raise ValueError(f"{method} of a LoopGuard outside of its block; write 'with LoopGuard(...) as guard:'.")
        return self._watchdog

    def _check_pending(self) -> None:
        """Waits for the values of the step before, and raises if training must not go on with them."""
        if self._pending is None:
            return
        (step, held), self._pending = self._pending, None
        # Checked before the read, whose own error ("Array has been deleted") would not say what deleted it.
        if isinstance(decisive := _decisive(held), jax.Array) and decisive.is_deleted():
            raise ValueError(
                f"the loss of step {step} was donated before it could be looked at, one step later, most likely to a "
                "running mean. Hand the guard a copy of it (jnp.copy), or donate the mean alone."
            )
        self._entered("step_done").rename(f"the wait for the loss of step {step}")
        if SKIPPED_IN_A_ROW in held:
            _check_skipped(step, held, self._max_skipped_in_a_row)
        elif not np.all(np.isfinite(loss := np.asarray(held[LOSS]))):
            raise NonFiniteError(
                f"the loss of step {step} is {loss}, and its update was applied, so the parameters are spoiled "
                f"from step {step} on, or from one before. Restore a checkpoint of an earlier step, and put "
                "skip_nonfinite(...) around the optimizer: it applies no such update. (If the metrics come from a step "
                "of your own that has it, add skip_counts(opt_state) to them.)"
            )

    def _failed_shard(self) -> str | None:
        """The error of a device of this process that could not compute a loss; None with a single process."""
        if jax.process_count() == 1:
            return None
        losses = [loss for loss in self._in_flight if isinstance(loss, jax.Array)]
        return next(filter(None, map(_failure_of, losses)), None)

    def _listen(self) -> None:
        """Installs handlers for SIGTERM and Ctrl-C. With several processes JAX hears SIGTERM, and tells all of them."""
        several = jax.distributed.is_initialized()
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not several and not in_main_thread:
            raise ValueError("LoopGuard was entered outside of the main thread, but only that one can hear SIGTERM.")

        def stop(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._sigterm_seen = True

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                signal.default_int_handler(number, frame)
            self._interrupted = self._sigterm_seen = True
            # A handler may interrupt a print, whose lock `sys.stderr` would then wait for.
            os.write(2, INTERRUPTED)
            # JAX's preemption service hears SIGTERM, in C++, and nothing else.
            if several:
                os.kill(os.getpid(), signal.SIGTERM)

        # `signal.signal` returns None for a handler that was not installed from Python, and cannot put it back.
        if not several:
            self._previous_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop) or signal.SIG_DFL
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored (nohup)
            self._previous_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)

    def _close(self, error: BaseException | None) -> None:
        """Ends the process if others would wait for it; else stops the watchdog and restores the handlers."""
        # `leave` never returns: the error, which Python would print at the end, is printed first.
        if error is not None and jax.process_count() > 1 and (code := _exit_code(error)):
            traceback.print_exception(error)
            leave(code, f"{type(error).__name__}: {error}")
        self._entered("close").stop()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)


def _failure_of(loss: jax.Array) -> str | None:
    """The error of a device that could not compute a loss; None if there is none, or the loss was donated."""
    shard = None
    try:
        for shard in loss.addressable_shards:
            # A shard whose computation failed is ready, too; `block_until_ready` then raises the error.
            if shard.data.is_ready():
                shard.data.block_until_ready()
    except Exception as error:
        # The main thread may donate the loss between any two of these lines, which is no failure.
        if shard is None or loss.is_deleted() or shard.data.is_deleted():
            return None
        return f"device {shard.device.id} failed ({error})"
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
    """The loss and the counters; starts to copy the decisive value to the host."""
    if LOSS not in metrics:
        raise ValueError(
            f"step_done: the metrics have no {LOSS!r}, their names are {sorted(metrics)}. Pass {{{LOSS!r}: value}}, "
            "or no metrics at all; then no loss is checked."
        )
    held = {name: metrics[name] for name in (LOSS, SKIPPED_STEPS, SKIPPED_IN_A_ROW) if name in metrics}
    if isinstance(decisive := _decisive(held), jax.Array):
        decisive.copy_to_host_async()
    return held


def _decisive(held: Mapping[str, Any]) -> Any:
    """The value that is waited for: the counter of skipped steps, or, without this counter, the loss."""
    # With the counter, a loss that is not finite is no error: its update was skipped.
    return held.get(SKIPPED_IN_A_ROW, held[LOSS])


def _check_skipped(step: int, values: dict[str, Any], limit: int) -> None:
    in_a_row = int(np.asarray(values[SKIPPED_IN_A_ROW]))
    if in_a_row > limit:
        raise NonFiniteError(
            f"step {step}: the loss or a gradient was not finite in {in_a_row} steps in a row "
            f"({np.asarray(values[SKIPPED_STEPS])} in all), more than max_skipped_in_a_row={limit}; its loss is "
            f"{np.asarray(values[LOSS])}. None of these updates was applied: parameters and optimizer are those of "
            f"step {step - in_a_row}. Look at the batches of these steps, lower the learning rate or clip gradients, "
            "and go on from the last checkpoint."
        )


def _exit_code(error: BaseException) -> int:
    """The code to leave with after an exception; 0 for a ``sys.exit()`` that means success."""
    # Success is what all processes reach together: the process ends as usual then, through JAX's barrier.
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_FAILED

"""Staying alive: a guard around the training loop, so that a fault ends every process soon and loses little.

What clusters do to a run, and what becomes of it:

  a step hangs (a stuck peer)      the watchdog writes all stacks, and ends the process          within the timeout
  an exception in one process      it is printed, the process ends at once, its peers see that   < 2 s
  a process is killed              its peers get an exception in their collective: see above     < 2 s
  SIGTERM to any process           ``should_stop`` is True on all of them, at the same step      some steps
  a loss or gradient is not finite the update is skipped everywhere (``skip_nonfinite``); too many end the run
  copies that should be equal are not   ``check_replicas`` names the leaf and the devices

Life of a step n in ``step_done(n, metrics)``: its loss and counters start their way to the host; those of step n - 1
are read, which waits until that step is over while the device has step n to do; the watchdog's clock starts anew. So
the device does not wait for the host, and a bad step is known one step later, to all processes at the same step, since
all read the same replicated values.

Why a process does not exit the normal way after an exception: JAX's ``atexit`` waits in a barrier for the peers, which
wait in a collective for this process. Nobody moves until a heartbeat times out, 100 s by default. ``os._exit`` closes
the connections at once.

Why the watchdog looks at the shards of the loss: where a peer is gone, the collective fails on those devices that talk
to it. The others wait for their neighbours, which have given up, and a read of the loss is a read of the first device.
"""

import math
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.distributed.optimizers.nonfinite import SKIPPED_IN_A_ROW, SKIPPED_STEPS
from xlstm_jax.distributed.resilience.watchdog import EXIT_FAILED, Watchdog, leave

EXIT_INTERRUPTED = 128 + signal.SIGINT
DEFAULT_STEP_TIMEOUT_S = 600.0
DEFAULT_FIRST_STEP_TIMEOUT_S = 3600.0  # it compiles
DEFAULT_MAX_SKIPPED_IN_A_ROW = 10
LOSS = "loss"


class NonFiniteError(ArithmeticError):
    """Training has lost its footing: a non-finite loss was applied, or too many steps in a row were skipped."""


class LoopGuard:
    """Guards a training loop: a watchdog, a fast exit, preemption, and an end to non-finite steps.

    ::

        with LoopGuard(step_timeout_s=60) as guard:
            for step in range(start, steps):
                state, metrics = train_step(state, batch, rng)
                guard.step_done(step + 1, metrics)
                if guard.should_stop(step + 1):
                    break
        checkpointer.save(...)

    Every process of a run makes one and does the same with it. Where the block is left by an exception in a run of
    several processes, the process ends there and then with code 13 (130 after Ctrl-C, its own after ``sys.exit``): an
    enclosing ``with`` or ``finally`` does not run. So what waits for other processes as it closes (a checkpointer)
    belongs outside of the guard, what writes files (a ``MetricLogger``) inside. With one process the exception
    propagates as always.

    Args:
      step_timeout_s: a step that takes longer, from one ``step_done`` to the next, ends the process with code 14 after
        the stacks of all threads were written to stderr. Only the clock between steps counts, so it has to cover what
        else the loop does there: data, an evaluation that is not ``paused``. None watches nothing, for a debugger.
      first_step_timeout_s: the same for the time up to the first ``step_done``, in which the step is compiled.
      max_skipped_in_a_row: with ``skip_nonfinite`` around the optimizer: more skipped steps than this, one after the
        other, raise ``NonFiniteError``. 0 stops at the first.
    Raises:
      ValueError: a limit that is no positive number; or it is entered in another thread than the main one, where a
        single process cannot hear SIGTERM.
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
        self._watchdog: Watchdog | None = None
        self._watching: tuple[str, float | None] = ("", None)
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._in_flight: list[Any] = []
        self._sigterm_seen = False
        self._previous_handler: Any = None

    def __enter__(self) -> Self:
        if self._watchdog is not None:
            raise ValueError("this LoopGuard is in use, or was; make one for each loop.")
        if not jax.distributed.is_initialized():
            self._listen_for_sigterm()
        self._watchdog = Watchdog(f"process {jax.process_index()} of {jax.process_count()}", self._failed_shard)
        self._watchdog.start()
        self._watch("the first step", self._first_step_timeout_s)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        del kind, trace
        try:
            if error is None:
                self._check_pending()
        except BaseException as late:
            self._close(late)
            raise
        self._close(error)

    def step_done(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Says that a step was dispatched, and looks at the loss and the counters of the step before.

        Args:
          step: its number.
          metrics: what ``make_train_step`` returned: ``loss``, and ``skipped_steps`` and ``skipped_in_a_row`` where
            the optimizer has ``skip_nonfinite`` around it (in a step of your own: ``skip_counts(opt_state)``). None
            leaves the watchdog alone at work.
        Raises:
          NonFiniteError: too many steps in a row were skipped; or, without ``skip_nonfinite``, a loss is not finite.
          ValueError: ``metrics`` have no ``loss``; or the guard is outside of its ``with`` block.
        """
        self._check_entered("step_done")
        held = None if metrics is None else (step, _looked_at(metrics))
        self._in_flight = [values[LOSS] for _, values in filter(None, (self._pending, held))]
        self._check_pending()
        self._pending = held
        self._watch(f"step {step + 1}", self._step_timeout_s)

    def should_stop(self, step: int) -> bool:
        """Whether to save a checkpoint and leave: some process has got SIGTERM.

        With several processes it is True on all of them at the same step, the first that none has begun (JAX's
        preemption service carries the news, without a collective). Call it on every process after every step.

        Args:
          step: the number of the step, the same on all processes.
        """
        self._check_entered("should_stop")
        if jax.distributed.is_initialized():
            return multihost_utils.reached_preemption_sync_point(step)
        return self._sigterm_seen

    @contextmanager
    def paused(self, timeout_s: float | None = None) -> Iterator[None]:
        """A section that is no step and may take long: an evaluation, a checkpoint that is waited for.

        The clock of the step starts anew after it.

        Args:
          timeout_s: the section's own limit; by default there is none.
        """
        self._check_entered("paused")
        before = self._watching
        self._watch(f"the paused section after {before[0]} began", _checked_timeout("timeout_s", timeout_s))
        try:
            yield
        finally:
            self._watch(*before)

    def _watch(self, what: str, timeout_s: float | None) -> None:
        self._watching = (what, timeout_s)
        self._watchdog.watch(what, timeout_s)

    def _check_entered(self, method: str) -> None:
        if self._watchdog is None:
            raise ValueError(f"{method} of a LoopGuard outside of its block; write 'with LoopGuard(...) as guard:'.")

    def _check_pending(self) -> None:
        """Waits for the values of the step before, and raises if they are the end."""
        if self._pending is None:
            return
        (step, held), self._pending = self._pending, None
        self._watchdog.rename(f"the wait for the loss of step {step}")
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
        """What a device of this process says of a loss that it could not compute; None with a single process."""
        if jax.process_count() == 1:
            return None
        losses = [loss for loss in self._in_flight if isinstance(loss, jax.Array) and not loss.is_deleted()]
        errors = [_error_of(shard.data) for loss in losses for shard in loss.addressable_shards]
        return next(filter(None, errors), None)

    def _listen_for_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("LoopGuard was entered outside of the main thread, but only that one can hear SIGTERM.")

        def note(number, frame):
            del number, frame
            self._sigterm_seen = True

        # None is a handler that was not installed from Python, which cannot be put back.
        self._previous_handler = signal.signal(signal.SIGTERM, note) or signal.SIG_DFL

    def _close(self, error: BaseException | None) -> None:
        """Ends the process where others would wait for it; else puts everything back as it was."""
        if error is not None and jax.process_count() > 1 and (code := _exit_code(error)):
            traceback.print_exception(error)
            leave(code)
        self._watchdog.stop()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)


def _checked_timeout(name: str, timeout_s: float | None) -> float | None:
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(f"{name}={timeout_s}: a number of seconds, or None to wait for ever.")
    return timeout_s


def _looked_at(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The values to look at; the one that decides is on its way to the host."""
    if LOSS not in metrics:
        raise ValueError(
            f"step_done: the metrics have no {LOSS!r}, their names are {sorted(metrics)}. Pass {{{LOSS!r}: value}}, "
            "or no metrics at all, if nobody is to look whether it is finite."
        )
    held = {name: metrics[name] for name in (LOSS, SKIPPED_STEPS, SKIPPED_IN_A_ROW) if name in metrics}
    decisive = held.get(SKIPPED_IN_A_ROW, held[LOSS])
    if isinstance(decisive, jax.Array):
        decisive.copy_to_host_async()
    return held


def _error_of(shard: jax.Array) -> str | None:
    try:
        if shard.is_ready():
            shard.block_until_ready()
    except Exception as error:
        return f"device {next(iter(shard.devices())).id} failed ({error})"
    return None


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
    """0 for a ``sys.exit()`` that means success, which all processes do together."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_FAILED

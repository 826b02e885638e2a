"""Watchdog that ends the process after a timeout.

JAX detects a dead process, but not a stuck process: the other processes wait in a collective, in C, and no Python code
of their main threads runs. Two clocks run beside the main thread:

  a daemon thread   polls several times a second. After the limit it writes the name and duration of the step and the
                    stacks of every thread to stderr, and ends the process with code 14; with code 13 if
                    ``find_failure`` has found a failure
  faulthandler      a timer in C that the thread restarts at each poll. If a C call holds the interpreter lock, the
                    thread cannot run; the timer then writes the stacks and ends the process with code 1

Both clocks write to file descriptor 2 instead of Python's ``sys.stderr``, because the stuck thread may hold the lock of
``sys.stderr``. Neither clock waits for a reader: a pipe without a reader (the launcher hangs) is full after 64 KiB, and
a write to a full pipe never returns. So the daemon thread passes its text to a second thread and waits only briefly,
and the timer writes to a separate non-blocking descriptor. Text beyond the capacity of the pipe is lost; the exit code
is kept.
"""

import contextlib
import faulthandler
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from xlstm_jax.distributed.processes.exit import EXIT_FAILED, in_time, leave

EXIT_HUNG = 14  # exit code of a process that has exceeded a time limit
LOOK_EVERY_S = 0.25
TIMER_GRACE_S = 1.0  # extra time of the timer in C, so that the thread writes its more detailed message first
MAX_TIMEOUT_S = threading.TIMEOUT_MAX - TIMER_GRACE_S  # the longest limit that the timer supports; 292 years
WRITE_TIMEOUT_S = 2.0  # time limit of writing the stacks to stderr
_STDERR = 2


class _Watched(NamedTuple):
    activity: str
    since: float
    timeout_s: float | None


class Watchdog:
    """Watchdog that ends the process if ``watch`` is not called again in time.

    Use only one watchdog at a time, because faulthandler has a single timer.

    Args:
      name: the name of this process in messages.
      find_failure: called at each poll; returns the text of a failure, or None; must not block.
    """

    def __init__(self, name: str, find_failure: Callable[[], str | None]) -> None:
        self._name = name
        self._find_failure = find_failure
        self._watched = _Watched("", time.monotonic(), None)
        self._timer_lock = threading.Lock()
        self._timer_stderr = _STDERR
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def start(self) -> None:
        """Starts the watchdog's thread; without a time limit until the first ``watch``."""
        self._timer_stderr = _stderr_that_does_not_block()
        self._thread.start()

    def watch(self, activity: str, timeout_s: float | None) -> None:
        """Restarts the clock for an operation: the process ends if ``timeout_s`` seconds pass before the next call.

        ``activity`` names the operation in the message, as "step 3". If ``timeout_s`` is None, there is no limit.
        """
        before, self._watched = self._watched, _Watched(activity, time.monotonic(), timeout_s)
        # With an unchanged limit the thread restarts the timer at its next poll, and a step needs no call into C.
        if timeout_s != before.timeout_s:
            self._restart_timer()

    def rename(self, activity: str) -> None:
        """Changes the name of the watched operation in the message; the clock and the limit stay."""
        self._watched = self._watched._replace(activity=activity)

    def stop(self) -> None:
        """Stops watching: ends the watchdog's thread and cancels the timer of faulthandler."""
        # The thread ends first, because a running thread would restart the timer.
        self._stopped.set()
        self._thread.join()
        self._restart_timer()
        if self._timer_stderr != _STDERR:
            os.close(self._timer_stderr)

    def _look(self) -> None:
        """Polls until ``stop``, in a background thread; ends the process after the time limit, or after a failure.

        A failure is a text, returned by the callable ``find_failure`` at two consecutive polls. The exit code is 14
        after the time limit, and 13 after a failure.
        """
        failure = None
        while not self._stopped.is_set():
            watched = self._watched
            left = float("inf") if watched.timeout_s is None else watched.since + watched.timeout_s - time.monotonic()
            if left <= 0:
                took = f"has taken {time.monotonic() - watched.since:.1f} s, more than its {watched.timeout_s:g} s"
                self._end(f"{watched.activity} {took}", EXIT_HUNG)
            # A failure ends the process only at the second poll: a main thread that is not stuck has raised the error
            # by then.
            failed, failure = failure, self._find_failure()
            if failed and failure and not self._stopped.is_set():
                self._end(f"{failure}, and {self._watched.activity} did not end", EXIT_FAILED)
            self._restart_timer()
            self._stopped.wait(min(left, LOOK_EVERY_S))

    def _restart_timer(self) -> None:
        with self._timer_lock:
            timeout_s = self._watched.timeout_s
            if timeout_s is None or self._stopped.is_set():
                faulthandler.cancel_dump_traceback_later()
            else:
                faulthandler.dump_traceback_later(timeout_s + TIMER_GRACE_S, exit=True, file=self._timer_stderr)

    def _end(self, reason: str, code: int) -> None:
        text = f"\n{self._name}: {reason}. The process ends with exit code {code}; the stacks of its threads:\n"

        def write() -> None:
            data = text.encode() + _stacks()
            while data:
                data = data[os.write(_STDERR, data) :]

        in_time(write, WRITE_TIMEOUT_S)
        leave(code, reason)


def _stderr_that_does_not_block() -> int:
    """Returns a new non-blocking file descriptor of stderr if stderr is a pipe or a terminal on Linux; else 2.

    A copy (``os.dup``) would share its flags with every copy, also in other processes, so the descriptor is opened
    again. Files never block. Sockets, and pipes of a different user, cannot be opened again: the timer may then block,
    as Python's timer does.
    """
    mode = os.fstat(_STDERR).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return _STDERR


def _stacks() -> bytes:
    """Returns the stacks of all threads of this process as text, at most 64 KiB, in the format of faulthandler."""
    # Through a pipe, because faulthandler only writes to descriptors. The pipe is read afterwards: text beyond its
    # 64 KiB is dropped, because the write end does not block.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    faulthandler.dump_traceback(file=writer, all_threads=True)
    os.close(writer)
    with open(reader, "rb") as stacks:
        return stacks.read()

"""A watchdog that ends the process when something takes too long.

JAX notices a process that died, but not a process that is stuck: the others wait in a collective, in C, and no Python
code of their main threads runs any more. Two clocks run beside the main thread:

  a daemon thread   looks some times a second. Past the limit it writes what took how long and the stacks of all threads
                    to stderr, and ends the process with code 14; with code 13 if ``find_failure`` has found a failure
  faulthandler      a timer in C that the thread restarts each time it looks. If a C call holds the lock of the
                    interpreter the thread cannot run; the timer then writes the stacks and ends the process with code 1

Both write to file descriptor 2, not to Python's ``sys.stderr``, whose lock the stuck thread may hold. Neither waits for
a reader: a pipe that nobody reads (the launcher hangs) is full after 64 KiB, and a write to it never returns. So the
daemon thread hands its text to a second thread, for which it does not wait long, and the timer writes to a descriptor
of its own that does not block. Text that does not fit is lost; the exit code is not.
"""

import contextlib
import faulthandler
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from xlstm_jax.distributed.processes.leaving import EXIT_FAILED, in_time, leave

EXIT_HUNG = 14
LOOK_EVERY_S = 0.25
TIMER_GRACE_S = 1.0  # the timer in C waits so much longer than the thread, whose message says more
MAX_TIMEOUT_S = threading.TIMEOUT_MAX - TIMER_GRACE_S  # the longest limit that the timer can take; 292 years
WRITE_TIMEOUT_S = 2.0  # the time that a reader of stderr has to take the stacks
_STDERR = 2


class _Watched(NamedTuple):
    what: str
    since: float
    timeout_s: float | None


class Watchdog:
    """Ends the process if ``watch`` is not called again in time. Use one at a time: faulthandler has one timer.

    Args:
      name: the name of this process in messages.
      find_failure: returns a text if something has failed; must not wait.
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
        """Starts the thread; nothing is watched yet."""
        self._timer_stderr = _stderr_that_does_not_block()
        self._thread.start()

    def watch(self, what: str, timeout_s: float | None) -> None:
        """From now on ``what`` may take ``timeout_s`` seconds; None: for ever."""
        before, self._watched = self._watched, _Watched(what, time.monotonic(), timeout_s)
        # With the same limit the thread restarts the timer at its next look, and a step costs no call into C.
        if timeout_s != before.timeout_s:
            self._restart_timer()

    def rename(self, what: str) -> None:
        """Changes what is watched; the clock runs on."""
        self._watched = self._watched._replace(what=what)

    def stop(self) -> None:
        """Ends the thread and the timer."""
        # In this order: the thread would start the timer again.
        self._stopped.set()
        self._thread.join()
        self._restart_timer()
        if self._timer_stderr != _STDERR:
            os.close(self._timer_stderr)

    def _look(self) -> None:
        failure = None
        while not self._stopped.is_set():
            watched = self._watched
            left = float("inf") if watched.timeout_s is None else watched.since + watched.timeout_s - time.monotonic()
            if left <= 0:
                took = f"has taken {time.monotonic() - watched.since:.1f} s, more than its {watched.timeout_s:g} s"
                self._end(f"{watched.what} {took}", EXIT_HUNG)
            # A failure ends the process at the second look only: a main thread that is not stuck has raised it by then.
            failed, failure = failure, self._find_failure()
            if failed and failure and not self._stopped.is_set():
                self._end(f"{failure}, and {self._watched.what} did not end", EXIT_FAILED)
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
    """A new descriptor for stderr that does not block, if stderr is a pipe or a terminal on Linux; else descriptor 2.

    It is opened anew: a copy (``os.dup``) shares its flags with all other copies, in other processes too. Files never
    block. Sockets, and pipes of another user, cannot be opened anew: there the timer may block, as Python's does.
    """
    mode = os.fstat(_STDERR).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):
            return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return _STDERR


def _stacks() -> bytes:
    """The stacks of all threads, as faulthandler writes them."""
    # Through a pipe, since faulthandler writes to descriptors only. Nobody reads meanwhile: what is beyond the pipe's
    # 64 KiB is dropped, since its end does not block.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    faulthandler.dump_traceback(file=writer, all_threads=True)
    os.close(writer)
    with open(reader, "rb") as stacks:
        return stacks.read()

"""How a process leaves its job early: at once, with an exit code of ours, and so that the others leave too.

  the leaving process  posts its reason to the store, for each other process; process 0 then stays for a moment, since
                       JAX aborts all others (SIGABRT) as soon as its coordination service is gone
  each other process   a daemon thread waits for the reason, gives the main thread a moment to fail by itself, prints
                       the reason, and ends the process: its main thread may be stuck, or wait in a collective, where
                       no Python code runs

``initialize_distributed`` starts the thread, and so does a ``LoopGuard``. An exception that nobody catches is seen at
the end of the program, before JAX waits in a barrier for processes that will not come.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax

from xlstm_jax.private_names import job, register_atexit
from xlstm_jax.wording import one_line, shortened

EXIT_FAILED = 13
EXIT_INTERRUPTED = 128 + signal.SIGINT
FLUSH_TIMEOUT_S = 0.5
POST_TIMEOUT_S = 2.0
OWN_ERROR_S = 0.75  # how long a process may still print an error of its own after another has left
COORDINATOR_GRACE_S = 1.5  # how long process 0 stays after the reason was posted: longer than OWN_ERROR_S
WAIT_MS = 3600 * 1000  # for the reason; then the thread waits again
MAX_REASON = 500
_KEY = "xlstm_jax/leaving"  # below it a text for each process; an empty text ends the thread that waits for it


def leave(code: int, reason: str = "") -> None:
    """Ends the process at once: no ``atexit``, no barrier. With a ``reason`` all other processes of the job end too.

    Output is flushed as far as that does not block.
    """
    # `sys.exit` would run JAX's `atexit`, which waits in a barrier for processes that wait for this one.
    if reason and _has_peers():
        why = shortened(one_line(reason).rstrip("."), MAX_REASON)
        text = f"process {job.process_id} has left with exit code {code}: {why}"
        others = [process for process in range(job.num_processes) if process != job.process_id]
        in_time(lambda: _post(job.client, others, text), POST_TIMEOUT_S)
        _let_others_leave()
    _flush()
    os._exit(code)


def in_time(work: Callable[[], object], timeout_s: float) -> None:
    """Does the work in a thread, and leaves the thread behind if it takes longer; errors are dropped."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout_s)


def leave_with_others() -> None:
    """From now on this process leaves if another process leaves, or if an exception that nobody catches ends it."""
    if _has_peers():
        _start_listening()


def _has_peers() -> bool:
    return jax.distributed.is_initialized() and job.num_processes > 1


@cache
def _start_listening() -> None:
    listener = threading.Thread(target=_listen, args=(job.client, job.process_id), name="peers", daemon=True)
    listener.start()
    # Called before Python joins the threads that are no daemons, and after functions that are registered later, such as
    # that of a checkpointer, which waits for its last save.
    register_atexit(_at_the_end, listener)


def _listen(client: Any, me: int) -> None:
    while True:
        try:
            text = client.blocking_key_value_get(f"{_KEY}/{me}", WAIT_MS)
        except Exception as error:  # the service ends with the job, or an hour has passed
            # The client has no other way to tell a timeout.
            if "DEADLINE_EXCEEDED" not in str(error):
                return
            continue
        if not text:
            return
        # Often all processes raise the same error: the main thread then prints its own traceback, and leaves.
        time.sleep(OWN_ERROR_S)
        # Not by `sys.stderr`, whose lock the stuck main thread may hold.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}. Process {me} ends with it.\n".encode())
        _let_others_leave()
        _flush()
        os._exit(EXIT_FAILED)


def _post(client: Any, processes: Sequence[int], text: str) -> None:
    for process in processes:
        # A key can be set once: of several processes that leave, the first gives the reason.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{_KEY}/{process}", text)


def _let_others_leave() -> None:
    if job.process_id == 0:
        time.sleep(COORDINATOR_GRACE_S)


def _at_the_end(listener: threading.Thread) -> None:
    """Leaves if an exception ends the program; else ends the listening thread."""
    if not _has_peers():
        # The program has called jax.distributed.shutdown(), which ends the wait of the thread with an error. Python
        # must not be torn down before the thread has seen the error: the process would end with SIGABRT.
        listener.join(POST_TIMEOUT_S)
        return
    error = getattr(sys, "last_value", None)  # set where Python prints what nobody caught
    if error is not None:
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
        leave(code, f"{type(error).__name__}: {error}")
    # The thread waits in C++, and must have returned before the interpreter is torn down.
    in_time(lambda: _post(job.client, [job.process_id], ""), POST_TIMEOUT_S)
    listener.join(POST_TIMEOUT_S)


def _flush() -> None:
    # In a thread with a limit: a pipe that nobody reads, or a stream whose lock is held, would block for ever.
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    in_time(lambda: [stream.flush() for stream in streams], FLUSH_TIMEOUT_S)

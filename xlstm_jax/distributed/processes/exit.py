"""Early exit of a process from its job: immediately, with a defined exit code, taking the rest of the job along.

  the leaving process  posts its reason to the store, for each other process; process 0 then waits briefly, since JAX
                       aborts the job (SIGABRT) as soon as the coordination service is gone
  each other process   a daemon thread waits for the reason, gives the main thread time to fail by itself, prints the
                       reason, and ends the process: the main thread may be stuck, or wait in a collective, where no
                       Python code runs

``initialize_distributed`` and ``LoopGuard`` start the thread. An uncaught exception is handled at the end of the
program, before JAX waits in a barrier for processes that will not come.
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

from xlstm_jax.formatting import one_line, shortened
from xlstm_jax.private_names import job, register_atexit

EXIT_FAILED = 13  # exit code of every process of a job after an error in one of them
EXIT_INTERRUPTED = 128 + signal.SIGINT  # exit code after Ctrl-C
FLUSH_TIMEOUT_S = 0.5
POST_TIMEOUT_S = 2.0
OWN_ERROR_S = 0.75  # time for a process to print an error of its main thread after another process has left
COORDINATOR_GRACE_S = 1.5  # time that process 0 waits after the reason was posted: longer than OWN_ERROR_S
WAIT_MS = 3600 * 1000  # limit of a single wait for the reason; the thread then waits again
MAX_REASON = 500
_KEY = "xlstm_jax/leaving"  # prefix of a text for each process; an empty text ends the thread that waits for it


def leave(code: int, reason: str = "") -> None:
    """Ends this process at once with exit code ``code``, without functions of ``atexit`` and without a barrier.

    With a ``reason`` the other processes of the job end, too, and print the reason. Output is flushed if flushing does
    not block.
    """
    # `sys.exit` would run JAX's `atexit`, which waits in a barrier for processes that in turn wait for this process.
    if reason and _has_peers():
        why = shortened(one_line(reason).rstrip("."), MAX_REASON)
        text = f"process {job.process_id} has left with exit code {code}: {why}"
        others = [process for process in range(job.num_processes) if process != job.process_id]
        in_time(lambda: _post(job.client, others, text), POST_TIMEOUT_S)
        _release_others()
    _flush()
    os._exit(code)


def in_time(work: Callable[[], object], timeout_s: float) -> None:
    """Runs ``work`` in a daemon thread and waits at most ``timeout_s`` for the end; ignores errors of ``work``."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout_s)


def leave_with_others() -> None:
    """Ties this process to the other processes of the job; does nothing in a job of a single process.

    If another process leaves, a thread ends this process. If an uncaught exception ends this process, this process
    leaves by ``leave``, which ends the other processes.
    """
    if _has_peers():
        _start_listening()


def _has_peers() -> bool:
    return jax.distributed.is_initialized() and job.num_processes > 1


@cache
def _start_listening() -> None:
    listener = threading.Thread(target=_listen, args=(job.client, job.process_id), name="peers", daemon=True)
    listener.start()
    # Python calls this before joining non-daemon threads, and after functions that are registered later, such as a
    # checkpointer's, which waits for its last save.
    register_atexit(_at_the_end, listener)


def _listen(client: Any, me: int) -> None:
    """Waits, in a thread, until another process leaves the job, prints the reason, and ends this process, too.

    The reason is the text that the leaving process posts in the job's key-value store for process ``me``, this process.
    ``client`` is the client of the store. The exit code is ``EXIT_FAILED``. An empty text, or an error of the store,
    ends only the thread.
    """
    while True:
        try:
            text = client.blocking_key_value_get(f"{_KEY}/{me}", WAIT_MS)
        except Exception as error:  # the service ends with the job, or an hour has passed
            # The client reports a timeout only by its text.
            if "DEADLINE_EXCEEDED" not in str(error):
                return
            continue
        if not text:
            return
        # Often every process raises the same error: the main thread then prints its traceback, and leaves.
        time.sleep(OWN_ERROR_S)
        # Avoid `sys.stderr`, whose lock the stuck main thread may hold.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}. Process {me} ends with it.\n".encode())
        _release_others()
        _flush()
        os._exit(EXIT_FAILED)


def _post(client: Any, processes: Sequence[int], text: str) -> None:
    for process in processes:
        # A key can be set once: if several processes leave, the first provides the reason.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(f"{_KEY}/{process}", text)


def _release_others() -> None:
    if job.process_id == 0:
        time.sleep(COORDINATOR_GRACE_S)


def _at_the_end(listener: threading.Thread) -> None:
    """Runs at the end of the program: after an uncaught exception calls ``leave``, which ends the entire job.

    Without an exception ``listener``, the thread that waits for other processes to leave, is ended.
    """
    if not _has_peers():
        # The program has called jax.distributed.shutdown(), which ends the wait of the thread with an error. Python
        # must not be torn down before the thread has received the error: the process would end with SIGABRT.
        listener.join(POST_TIMEOUT_S)
        return
    error = getattr(sys, "last_value", None)  # set when Python prints an uncaught exception
    if error is not None:
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
        leave(code, f"{type(error).__name__}: {error}")
    # The thread waits in C++, and must have returned before the interpreter is torn down.
    in_time(lambda: _post(job.client, [job.process_id], ""), POST_TIMEOUT_S)
    listener.join(POST_TIMEOUT_S)


def _flush() -> None:
    # In a thread with a limit: a pipe without a reader, or a stream whose lock is held, would block forever.
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    in_time(lambda: [stream.flush() for stream in streams], FLUSH_TIMEOUT_S)

"""How a process leaves its job early: at once, with an exit code of ours, and so that the others leave too.

  who gives up         posts why to the store, for each other process; process 0 then stays for a moment, since JAX
                       aborts all others (SIGABRT) as soon as its coordination service is gone
  each other process   a daemon thread waits for that text, prints it, and ends the process: its main thread may be
                       stuck, or wait in a collective, where no Python code runs

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
from jax._src import distributed

from xlstm_jax.wording import one_line, shortened

EXIT_FAILED = 13
EXIT_INTERRUPTED = 128 + signal.SIGINT
FLUSH_TIMEOUT_S = 0.5
POST_TIMEOUT_S = 2.0
COORDINATOR_GRACE_S = 1.0  # that process 0 stays after it was told, or has told, that the job ends
WAIT_MS = 3600 * 1000  # for the text; then the thread waits again
MAX_REASON = 500
_KEY = "xlstm_jax/leaving"  # below it a text for each process; an empty one ends its thread


def leave(code: int, reason: str = "") -> None:
    """Ends the process at once: no ``atexit``, no barrier. With a ``reason`` all other processes of the job end too.

    What was printed is flushed, where that does not block.
    """
    if reason and _has_peers():
        state: Any = distributed.global_state
        why = shortened(one_line(reason).rstrip("."), MAX_REASON)
        text = f"process {state.process_id} has left with exit code {code}: {why}"
        others = [process for process in range(state.num_processes) if process != state.process_id]
        in_time(lambda: _post(state.client, others, text), POST_TIMEOUT_S)
        _let_others_leave()
    _flush()
    os._exit(code)


def in_time(work: Callable[[], object], timeout_s: float) -> None:
    """Does the work in a thread that is left behind if it takes longer, or fails."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout_s)


def leave_with_others() -> None:
    """From now on this process leaves where another one has left, or where an exception ends it that nobody caught."""
    if _has_peers():
        _start_listening()


def _has_peers() -> bool:
    return jax.distributed.is_initialized() and distributed.global_state.num_processes > 1


@cache
def _start_listening() -> None:
    state: Any = distributed.global_state
    listener = threading.Thread(target=_listen, args=(state.client, state.process_id), name="peers", daemon=True)
    listener.start()
    # Before threads that are no daemons are joined; after what was registered later, as a checkpointer's last save.
    threading._register_atexit(_at_the_end, listener)  # type: ignore[attr-defined]


def _listen(client: Any, me: int) -> None:
    while True:
        try:
            text = client.blocking_key_value_get(f"{_KEY}/{me}", WAIT_MS)
        except Exception as error:  # the service ends with the job, or an hour has passed
            if "DEADLINE_EXCEEDED" not in str(error):
                return
            continue
        if not text:
            return
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}. Process {me} ends with it.\n".encode())
        _let_others_leave()
        _flush()
        os._exit(EXIT_FAILED)


def _post(client: Any, processes: Sequence[int], text: str) -> None:
    for process in processes:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # It has one already, of another that leaves.
            client.key_value_set(f"{_KEY}/{process}", text)


def _let_others_leave() -> None:
    if distributed.global_state.process_id == 0:
        time.sleep(COORDINATOR_GRACE_S)


def _at_the_end(listener: threading.Thread) -> None:
    """Leaves after an exception; else ends the thread, which must not wait in C++ while the interpreter goes."""
    if not _has_peers():
        return
    state = distributed.global_state
    error = getattr(sys, "last_value", None)  # set where Python prints what nobody caught
    if error is not None:
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
        leave(code, f"{type(error).__name__}: {error}")
    in_time(lambda: _post(state.client, [state.process_id], ""), POST_TIMEOUT_S)
    listener.join(POST_TIMEOUT_S)


def _flush() -> None:
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    in_time(lambda: [stream.flush() for stream in streams], FLUSH_TIMEOUT_S)

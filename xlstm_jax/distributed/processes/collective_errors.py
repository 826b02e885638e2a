"""Collective errors: if a call fails in one process, every process raises.

If a process failed alone, the rest of the job would wait in the next collective. So after the work every process sends
the text of its error (empty without an error) to every process, and waits for the texts up to a time limit.

Ctrl-C and similar interruptions are not failures of the work. Python raises them between any two instructions, even
within a library, where a handler may turn the interruption into another error. ``interruption`` finds the original
exception, which then propagates unchanged.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import jax

from xlstm_jax.distributed.processes.store import PEER_TIMEOUT_S, KeyValueStore, by_text, exchange_in, named
from xlstm_jax.formatting import one_line
from xlstm_jax.private_names import job

MAX_CAUSE_CHARS = 500
_ENDS = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}
# JAX's caches report an error of a comparison by its text alone, with a line such as "KeyboardInterrupt: ".
_ENDS_AS_TEXT = re.compile(rf"^({'|'.join(_ENDS)})(?=:|$)", re.MULTILINE)
Result = TypeVar("Result")


def raise_on_all(
    work: Callable[[], Result],
    failure: type[Exception] | tuple[type[Exception], ...],
    action: str = "what all processes do together",
    timeout_s: float = PEER_TIMEOUT_S,
) -> Result:
    """Calls ``work`` and returns the result; raises ``failure`` in every process if ``work`` raises in any process.

    Every process must call ``raise_on_all``. The error names the failed processes, with their errors. If errors of
    different types occur, every process raises the type that comes last in the tuple ``failure``.

    Args:
      work: a function that may fail in some processes only, such as reading a file.
      failure: the type of the error to raise, for any error of ``work``; or a tuple of types: an error of a listed type
        keeps its type, and an error of any other type becomes the first listed type.
      action: name of the work for errors, the same in every process.
      timeout_s: seconds to wait for the other processes.
    Raises:
      TimeoutError: a process has not finished ``work`` within ``timeout_s`` of this process; names it, and ``action``.
    """
    kinds = failure if isinstance(failure, tuple) else (failure,)
    results: list[Result] = []
    caught, problem = None, None
    # Catch every error: a process that left here would miss the exchange below, and the others would wait.
    try:
        with interruptions_go_on():
            results.append(work())
    except kinds as error:
        caught, problem = error, [next(i for i, kind in enumerate(kinds) if isinstance(error, kind)), str(error)]
    except Exception as error:  # file systems and storage libraries raise errors of many types
        caught, problem = error, [0, cause_of(error)]
    problems = allgather_text(json.dumps(problem), action, timeout_s)
    groups = by_text(problems, range(len(problems)))
    failed = [(json.loads(text), same) for text, same in groups.items() if text != json.dumps(None)]
    if not failed:
        return results[0]
    texts = [text if len(same) == len(problems) else f"{named(same)}: {text}" for (_, text), same in failed]
    raise kinds[max(kind for (kind, _), _ in failed)]("; ".join(texts)) from caught


@contextmanager
def interruptions_go_on() -> Iterator[None]:
    """Context manager: replaces an error that Ctrl-C has caused by the original ``KeyboardInterrupt``.

    The original is searched among the causes, contexts and group members of an error that is raised inside the context.
    A ``SystemExit`` or similar behind an error is raised in the same way. Any other error leaves the context unchanged.
    """
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        if (original := interruption(error, handled)) is not None:
            raise original from None
        raise


def interruption(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """Returns the ``KeyboardInterrupt``, ``SystemExit`` or similar exception behind an ``error``, or None.

    An error that only quotes such an exception in its text (a line "KeyboardInterrupt: ...", as JAX's caches report it)
    counts, too: a new exception of this type is returned.

    Args:
      error: searched through its causes, contexts, and members of exception groups.
      handled: the exception that was being handled before the work began (``sys.exception()``). Python makes this
        exception a context of every later error, without being a cause.
    """
    seen, left = {id(handled)}, [error]
    while left:
        candidate = left.pop()
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        # asyncio cancels a task because another task has failed.
        if not isinstance(candidate, Exception | BaseExceptionGroup | asyncio.CancelledError):
            return candidate
        if (text := _ENDS_AS_TEXT.search(str(candidate))) is not None:
            return _ENDS[text[1]]()
        members = candidate.exceptions if isinstance(candidate, BaseExceptionGroup) else ()
        left += [other for other in (candidate.__cause__, candidate.__context__, *members) if other is not None]
    return None


def allgather_text(text: str, action: str, timeout_s: float = PEER_TIMEOUT_S) -> list[str]:
    """Returns the texts that all processes of the job pass, in the order of the process indices.

    Every process must call the function. ``action`` names the purpose for errors. Without a job of several processes
    the result is ``[text]``.

    Raises:
      TimeoutError: a process is missing after ``timeout_s`` seconds; names the process, and ``action``.
      ValueError: processes pass different ``action``.
      RuntimeError: there are several processes, which have not joined.
    """
    if not jax.distributed.is_initialized():
        if jax.process_count() > 1:
            raise RuntimeError("these processes have not joined; call initialize_distributed at the start.")
        return [text]
    me, count = job.process_id, job.num_processes
    return exchange_in(KeyValueStore("exchange", me, range(count)), text, action, timeout_s) if count > 1 else [text]


def cause_of(error: BaseException) -> str:
    """Returns "TypeName: message" of the root cause of an error, as one line.

    The root cause is the end of the chain of ``__cause__``. A longer text is cut after ``MAX_CAUSE_CHARS`` characters
    and ends in "...".
    """
    while error.__cause__ is not None:
        error = error.__cause__
    # TensorStore messages end with C++ source locations and long specifications.
    text = one_line(error).split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
    text = f"{type(error).__name__}: {text or 'without a message'}"
    return text if len(text) <= MAX_CAUSE_CHARS else text[:MAX_CAUSE_CHARS] + "..."

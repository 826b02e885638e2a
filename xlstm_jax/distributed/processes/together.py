"""Processes fail together: when a piece of work fails in one process, all of them raise.

A process that gives up alone leaves the others waiting in the next collective. So after the work every process sends
the text of its error, empty where it had none, to all others, and waits for their texts up to a time limit.

Ctrl-C and the like are no failure of the work. Python raises them between any two instructions, so also within a
library that catches them and raises its own error: ``interruption`` finds them there, and they go on as they came.
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
from xlstm_jax.private_names import job
from xlstm_jax.wording import one_line

MAX_CAUSE_CHARS = 500
_ENDS = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit, GeneratorExit)}
# JAX's caches report an error of a comparison by its text alone, one line of which is as "KeyboardInterrupt: ".
_ENDS_AS_TEXT = re.compile(rf"^({'|'.join(_ENDS)})(?=:|$)", re.MULTILINE)
Result = TypeVar("Result")


def fail_together(
    work: Callable[[], Result],
    failure: type[Exception] | tuple[type[Exception], ...],
    what: str = "what all processes do together",
    timeout_s: float = PEER_TIMEOUT_S,
) -> Result:
    """Calls ``work`` and returns its result. If ``work`` raises in one process, ``failure`` is raised in all of them.

    All processes must call it. The error says which processes raised, and what. ``failure`` may be several kinds of
    errors: an error of one of these keeps its kind, any other error becomes the first kind. If processes raise
    different kinds, all raise the kind that comes last in ``failure``.

    Raises:
      TimeoutError: a process has not finished ``work`` within ``timeout_s`` of this one; says which, and ``what``.
    """
    kinds = failure if isinstance(failure, tuple) else (failure,)
    results: list[Result] = []
    caught, problem = None, None
    # Every error is caught: a process that left here would not come to the exchange below, and the others would wait.
    try:
        with interruptions_go_on():
            results.append(work())
    except kinds as error:
        caught, problem = error, [next(i for i, kind in enumerate(kinds) if isinstance(error, kind)), str(error)]
    except Exception as error:  # file systems and storage libraries raise whatever they like
        caught, problem = error, [0, cause_of(error)]
    problems = allgather_text(json.dumps(problem), what, timeout_s)
    groups = by_text(problems, range(len(problems)))
    failed = [(json.loads(text), same) for text, same in groups.items() if text != json.dumps(None)]
    if not failed:
        return results[0]
    texts = [text if len(same) == len(problems) else f"{named(same)}: {text}" for (_, text), same in failed]
    raise kinds[max(kind for (kind, _), _ in failed)]("; ".join(texts)) from caught


@contextmanager
def interruptions_go_on() -> Iterator[None]:
    """Raises Ctrl-C and the like (see ``interruption``) in place of an error that a library has made of it."""
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        if (found := interruption(error, handled)) is not None:
            raise found from None
        raise


def interruption(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """Returns the ``KeyboardInterrupt``, ``SystemExit`` or the like of which a library has made ``error``, if any.

    Args:
      error: its causes, its contexts and the members of a group are searched.
      handled: the exception that was being handled before the work began (``sys.exception()``). Python makes it a
        context of every later error, of which it is no cause.
    """
    seen, left = {id(handled)}, [error]
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        # A task of asyncio is cancelled because another one has failed.
        if not isinstance(found, Exception | BaseExceptionGroup | asyncio.CancelledError):
            return found
        if (text := _ENDS_AS_TEXT.search(str(found))) is not None:
            return _ENDS[text[1]]()
        members = found.exceptions if isinstance(found, BaseExceptionGroup) else ()
        left += [other for other in (found.__cause__, found.__context__, *members) if other is not None]
    return None


def allgather_text(text: str, what: str, timeout_s: float = PEER_TIMEOUT_S) -> list[str]:
    """The texts of all processes, in order. All must call it; ``what`` says for what purpose, as "restore step 3".

    Raises:
      TimeoutError: a process did not call it within ``timeout_s``; says which, and ``what``.
      ValueError: processes call it for different things.
    """
    if not jax.distributed.is_initialized():
        if jax.process_count() > 1:
            raise RuntimeError("these processes have not joined; call initialize_distributed at the start.")
        return [text]
    me, count = job.process_id, job.num_processes
    return exchange_in(KeyValueStore("exchange", me, range(count)), text, what, timeout_s) if count > 1 else [text]


def cause_of(error: BaseException) -> str:
    """The error at the beginning of a chain of errors, as one line of at most ``MAX_CAUSE_CHARS`` characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    # TensorStore ends its messages with lines of its C++ sources and long specifications.
    text = one_line(error).split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
    text = f"{type(error).__name__}: {text or 'without a message'}"
    return text if len(text) <= MAX_CAUSE_CHARS else text[:MAX_CAUSE_CHARS] + "..."

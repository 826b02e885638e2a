"""Processes fail together: when a piece of work fails in one process, all of them raise.

A process that gives up alone leaves the others waiting in the next collective. So after the work every process sends
the text of its error, empty where it had none, to all others.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.wording import one_line

MAX_CAUSE_CHARS = 500
Result = TypeVar("Result")


def fail_together(work: Callable[[], Result], failure: type[Exception]) -> Result:
    """Calls ``work`` and returns its result. If ``work`` raises in one process, ``failure`` is raised in all of them.

    All processes must call it. The error says in which processes ``work`` raised, and what.
    """
    results: list[Result] = []
    caught, problem = None, ""
    try:
        results.append(work())
    except failure as error:
        caught, problem = error, str(error)
    except Exception as error:  # file systems and storage libraries raise whatever they like
        caught, problem = error, cause_of(error)
    problems = allgather_text(problem)
    if not any(problems):
        return results[0]
    several = jax.process_count() > 1
    failed = [f"process {i}: {text}" if several else text for i, text in enumerate(problems) if text]
    raise failure("; ".join(failed)) from caught


def allgather_text(text: str) -> list[str]:
    """The texts of all processes, by process. All must call it."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def cause_of(error: BaseException) -> str:
    """The error at the beginning of a chain of errors, as one line of at most ``MAX_CAUSE_CHARS`` characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error).split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
    text = f"{type(error).__name__}: {text or 'without a message'}"
    return text if len(text) <= MAX_CAUSE_CHARS else text[:MAX_CAUSE_CHARS] + "..."

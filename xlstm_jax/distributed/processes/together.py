"""What processes tell each other: texts, and whether a piece of work has failed on one of them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.distributed.wording import one_line

MAX_CAUSE_CHARS = 500  # letters of an error that are told


def fail_together(work: Callable[[], Any], failure: type[Exception]) -> Any:
    """Does the work on every process, and fails on all of them if it does on one; all must call it.

    So none goes on to where it would wait for another that has given up.

    Raises:
      failure: says on which processes the work raised, and what.
    """
    result, caught, problem = None, None, ""
    try:
        result = work()
    except failure as error:
        caught, problem = error, str(error)
    except Exception as error:  # file systems and storage libraries raise whatever they like
        caught, problem = error, cause_of(error)
    problems = allgather_text(problem)
    if not any(problems):
        return result
    several = jax.process_count() > 1
    told = [f"process {i}: {text}" if several else text for i, text in enumerate(problems) if text]
    raise failure("; ".join(told)) from caught


def allgather_text(text: str) -> list[str]:
    """The texts of all processes, by process; all must call it."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def cause_of(error: BaseException) -> str:
    """What an error comes from, on one line, short enough to be read and sent."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = one_line(error).split(" [source locations=")[0].split(" [tensorstore_spec=")[0]
    text = f"{type(error).__name__}: {text or 'without a message'}"
    return text if len(text) <= MAX_CAUSE_CHARS else text[:MAX_CAUSE_CHARS] + "..."

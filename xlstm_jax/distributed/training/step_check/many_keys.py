"""Steps whose random numbers nobody can follow: means over many keys, of the step and of one device.

Neither is known exactly, and both have a standard error. Each mean of the step is so many times that of one device,
which least squares tell, and a rest beside it. The keys are doubled until ``SURE`` standard errors of both are less
than half of the way from 1 to the next number of devices, 1/2.

  right         each ratio is within SURE standard errors of 1, and no rest is beyond them
  wrong         one is not
  cannot tell   standard errors are still larger after MOST_KEYS keys
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

FEWEST_KEYS, MOST_KEYS, SURE = 8, 256, 6.0
NEXT = 0.5  # the ratio nearest to 1 that is a number of devices, or 1 over it
PATIENCE_S = 3.0

Sample = Callable[[int], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]


class Ratio(NamedTuple):
    """What the mean of a step is of the mean of one device: ``value`` times it, and ``rest`` beside it, relatively.

    ``allowed`` is what noise explains of either: so many standard errors.
    """

    value: float
    rest: float
    allowed: float

    @property
    def is_known(self) -> bool:
        return self.allowed <= NEXT / 2


def ratios(sample: Sample) -> tuple[dict[str, Ratio], int]:
    """Draws ``sample(i)``, what the step and one device make of key i, until all is known; with the number of keys."""
    ours: dict[str, list[np.ndarray]] = {}
    right: dict[str, list[np.ndarray]] = {}
    found: dict[str, Ratio] = {}
    count = 0
    with _bar() as advance:
        for count in range(1, MOST_KEYS + 1):
            for kept, new in zip((ours, right), sample(count), strict=True):
                for path, values in new.items():
                    kept.setdefault(path, []).append(values)
            advance(count)
            if count >= FEWEST_KEYS and count & (count - 1) == 0:
                found = {path: _ratio(np.array(ours[path]), np.array(right[path])) for path in right}
                if all(ratio.is_known for ratio in found.values()):
                    break
    return found, count


def _ratio(ours: np.ndarray, right: np.ndarray) -> Ratio:
    """Of [keys, values]. Each half of the keys is projected onto the mean of the other, which its noise is not in."""
    half, count = len(right) // 2, len(right)
    if not right.any():
        return Ratio(1.0 if not ours.any() else math.inf, 0.0, 0.0)
    halves = (slice(half), slice(half, None)), (slice(half, None), slice(half))
    along = [(ours[own] @ right[other].mean(0), right[own] @ right[other].mean(0)) for own, other in halves]
    a, b = (np.concatenate(parts) for parts in zip(*along, strict=True))
    size = b.mean()  # the square of the norm of what is right
    if size <= 0:
        return Ratio(math.nan, 0.0, math.inf)
    value = float(a.mean() / size)
    error = math.sqrt((a.var(ddof=1) + value**2 * b.var(ddof=1)) / count) / size
    differences = ours - value * right
    rest = float(differences[:half].mean(0) @ differences[half:].mean(0)) / size
    noise = float(differences.var(0, ddof=1).sum()) / half / size / math.sqrt(min(differences.shape[1], count))
    allowed = max(SURE * error, math.sqrt(SURE * noise) * abs(value), 1e-6)
    return Ratio(value, math.sqrt(max(rest, 0.0)), allowed)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int], Any]]:
    """A progress bar on stderr, where it takes longer than a few seconds and somebody looks."""
    columns = TextColumn("check_step, keys"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task, start = progress.add_task("", total=MOST_KEYS), time.monotonic()

    def advance(count: int) -> None:
        progress.update(task, completed=count)
        if time.monotonic() - start > PATIENCE_S and not progress.live.is_started:
            progress.start()

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()

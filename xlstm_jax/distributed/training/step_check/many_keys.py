"""Steps that draw from unknown keys: means over many keys, of the step and of one device, are compared.

Both means have a standard error. Least squares split the mean of the step into a multiple of the mean of one device,
and a rest. The number of keys is doubled until ``SURE`` standard errors of both are less than half the way from 1 to
the next ratio that is a number of devices, 1/2.

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
    """The mean of a step is ``value`` times the mean of one device, and a rest whose relative norm is ``rest``.

    ``allowed`` is how much of either noise explains: ``SURE`` standard errors.
    """

    value: float
    rest: float
    allowed: float

    @property
    def is_known(self) -> bool:
        return self.allowed <= NEXT / 2


def ratios(sample: Sample) -> tuple[dict[str, Ratio], int]:
    """Draws ``sample(i)``, the values of the step and of one device with key i, until all ratios are known.

    Returns the ratios, and the number of keys.
    """
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
    """The ratio of values [keys, values]. Each half of the keys is projected onto the mean of the other half, whose
    noise is independent."""
    half, count = len(right) // 2, len(right)
    if not right.any():
        return Ratio(1.0 if not ours.any() else math.inf, 0.0, 0.0)
    halves = (slice(half), slice(half, None)), (slice(half, None), slice(half))
    along = [(ours[own] @ right[other].mean(0), right[own] @ right[other].mean(0)) for own, other in halves]
    a, b = (np.concatenate(parts) for parts in zip(*along, strict=True))
    size = b.mean()  # the squared norm of the mean of one device
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
    """A progress bar on stderr, once it has taken some seconds."""
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

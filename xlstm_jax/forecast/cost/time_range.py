"""A time that depends on assumptions, as a range; and the ratio of two such times.

    compute              least      rooflines of FLOP and memory, by published rates
                         expected   the compiler's cycles with corrected fills (TPUs), kernels at reached rates (GPUs)
                         most       the compiler's cycles, uncorrected (TPUs); GPUs: equal to expected
    waits                least      bytes at published rates, without latency
                         expected   with latency: TPUs of synchronous collectives, GPUs in the simulated schedule
                         most       with the latency of every collective, hidden or not
    step                 the sum, and no less than the bytes take on the busiest link

``hardware.latency`` has the latencies of TPUs, ``hardware.nccl`` those of GPUs, ``fills`` the correction.
"""

from collections.abc import Iterable
from typing import NamedTuple


class TimeRatio(NamedTuple):
    """A ratio of two times under the assumptions of ``Range``: the least and the largest value, and the expected value.

    >>> f"{TimeRatio(0.944, 0.97, 1.011)}"
    '0.97 (0.94 to 1.01)'
    """

    lowest: float
    expected: float
    highest: float

    def __str__(self) -> str:
        return f"{self.expected:.2f} ({self.lowest:.2f} to {self.highest:.2f})"


class Range(NamedTuple):
    """Seconds under three sets of assumptions; each set applies to the entire step.

    Attributes:
      least: by published rates alone, without latency.
      expected: by the rates that are reached, with the latencies that the schedule waits for.
      most: with the compiler's uncorrected cycles, and every latency exposed.

    >>> Range(least=0.08, expected=0.13, most=0.14).expected
    0.13
    """

    least: float
    expected: float
    most: float

    def plus(self, other: "Range") -> "Range":
        """Returns the sum with another range: least + least, expected + expected, most + most."""
        return Range(*(one + more for one, more in zip(self, other, strict=True)))

    def beyond(self, seconds: float) -> "Range":
        """Returns the range with ``seconds`` subtracted from each of the three times; never below 0."""
        return Range(*(max(one - seconds, 0.0) for one in self))

    def at_least(self, seconds: float) -> "Range":
        """Returns the range with each of the three times raised to ``seconds`` where the time is shorter."""
        return Range(*(max(one, seconds) for one in self))

    def over(self, base: "Range") -> TimeRatio:
        """Returns the ratio to ``base``, under equal assumptions: least by least, expected by expected, most by most.

        ``lowest`` and ``highest`` are the extremes of the three ratios.

        >>> Range(1.0, 3.0, 5.0).over(Range(2.0, 4.0, 4.0))
        TimeRatio(lowest=0.5, expected=0.75, highest=1.25)
        """
        ratios = [one / other for one, other in zip(self, base, strict=True)]
        return TimeRatio(min(ratios), ratios[1], max(ratios))


def total(parts: Iterable[tuple[int, Range]]) -> Range:
    """Returns the sum of executions x range over pairs of (executions, range of one execution); zeros without pairs."""
    sums = [0.0, 0.0, 0.0]
    for count, seconds in parts:
        sums = [known + count * more for known, more in zip(sums, seconds, strict=True)]
    return Range(*sums)

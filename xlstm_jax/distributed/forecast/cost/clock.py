"""The clock of a schedule beside which something travels: collectives over links, arrays to the host and back.

an instruction        the clock goes on by the time that it runs
start of a transfer   the transfer takes its links as soon as they are free: who starts first is served first
end of a transfer     the clock waits for what is left; of a synchronous transfer the end comes with the start
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """Something that travels while a schedule runs, over links that it has for itself.

    Attributes:
      start, end: positions in the schedule, the same where the schedule waits for it.
      links: names of what it travels over.
      seconds: that it takes, alone.
    """

    start: int
    end: int
    links: tuple[str, ...]
    seconds: float


def waits(run: Sequence[float], transfers: Sequence[Transfer]) -> list[float]:
    """How long a schedule waits for each transfer, in seconds, where each instruction runs for so long.

    >>> waits([1.0, 1.0, 0.0], [Transfer(0, 2, ("out",), 3.0), Transfer(1, 1, ("in",), 0.5)])
    [0.5, 0.5]
    """
    starts, ends = defaultdict(list), defaultdict(list)
    for number, transfer in enumerate(transfers):
        starts[transfer.start].append(number)
        ends[transfer.end].append(number)
    now, free, done, waited = 0.0, defaultdict[str, float](float), {}, [0.0] * len(transfers)
    for position, seconds in enumerate(run):
        for number in starts[position]:
            transfer = transfers[number]
            done[number] = max([now, *(free[link] for link in transfer.links)]) + transfer.seconds
            free.update(dict.fromkeys(transfer.links, done[number]))
        for number in ends[position]:
            waited[number] = max(0.0, done[number] - now)
            now += waited[number]
        now += seconds
    return waited

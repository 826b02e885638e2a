"""How long a step waits for its collectives.

On TPUs each collective is alone on its links, and an asynchronous one hides behind the cycles of what runs beside it.
On GPUs the clock (``clock``) runs twice: with kernels and networks at the rates that are published, and at those that
are reached. A loop's body begins with free networks. What a loop waits for counts in its body and does not move the
clock outside.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from xlstm_jax.forecast.cost.clock import Kernels, Spent, Transfer, waits
from xlstm_jax.forecast.cost.collective_traffic import Collective, Timing
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.nccl import Way
from xlstm_jax.forecast.hlo.collective_sites import Site, sites

NOTHING = Way("", 0.0, 0.0)  # of one device alone


def axes_of(links: Links, collective: Collective) -> tuple[str, ...]:
    """The axes that a collective runs over; groups that follow no set of axes may cross any link."""
    return tuple(links.axis_sizes) if collective.axes is None else collective.axes


def with_waits(links: Links, collective: Collective) -> Collective:
    """A collective of TPUs with its times.

    An asynchronous one counts as hidden where the compiler gives no cycles for something that runs beside it, and none
    but zeros for the rest.
    """
    alone = waited = links.seconds(axes_of(links, collective), collective.wire_bytes)
    beside = collective.overlapped
    if beside.cycles is not None and links.chip.clock_hz:
        seconds = beside.cycles / links.chip.clock_hz
        beside, waited = dataclasses.replace(beside, seconds=seconds), max(0.0, alone - seconds)
    elif beside.instructions:
        waited = 0.0
    return dataclasses.replace(collective, overlapped=beside, alone_s=alone, exposed_s=waited)


def timed(least: Kernels, expected: Kernels, collectives: Iterable[Collective], links: Links) -> tuple[Collective, ...]:
    """The collectives of a program for GPUs, with their times.

    Args:
      least, expected: the program's kernels at the rates that are published, and at those that are reached.
      collectives: as ``find_collectives`` gives them.
      links: between the devices of the mesh.
    """
    # The sites of a computation come one after the other.
    pairs = zip(sites(least.program), collectives, strict=True)
    groups = groupby(pairs, key=lambda pair: pair[0].computation.name)
    return tuple(found for _, pairs in groups for found in _timed_in(least, expected, list(pairs), links))


def _timed_in(
    least: Kernels, expected: Kernels, pairs: Sequence[tuple[Site, Collective]], links: Links
) -> Iterator[Collective]:
    """The collectives of one computation."""
    # Each computation has a clock of its own: a collective never reaches from one into another.
    computation = pairs[0][0].computation
    runs, at_peak = (
        [kernels.of(computation, instruction) for instruction in computation.instructions]
        for kernels in (expected, least)
    )
    alone = [_alone(links, collective) for _, collective in pairs]
    # Once with what NCCL needs and kernels reach, and once by published rates alone: the second is a bound from below.
    real = [Transfer(*site.span, own.networks, own.seconds) for (site, _), own in zip(pairs, alone, strict=True)]
    ideal = [dataclasses.replace(whole, seconds=own.bandwidth_s) for whole, own in zip(real, alone, strict=True)]
    waited = waits([spent.total for spent in runs], real)
    by_bandwidth = waits([spent.total for spent in at_peak], ideal)
    for (site, collective), own, waited_s, bandwidth_s in zip(pairs, alone, waited, by_bandwidth, strict=True):
        run = sum(runs[slice(*site.span)], Spent())
        beside = dataclasses.replace(collective.overlapped, seconds=run.total, product_seconds=run.products)
        timing = dataclasses.replace(own, waited_s=waited_s, waited_by_bandwidth_s=bandwidth_s)
        yield dataclasses.replace(collective, overlapped=beside, timing=timing, alone_s=own.seconds, exposed_s=waited_s)


def _alone(links: Links, collective: Collective) -> Timing:
    """A collective's time without regard to the schedule, as if all of it were waited for."""
    axes, sent = axes_of(links, collective), collective.wire_bytes
    bandwidth_s = links.seconds(axes, sent)
    chosen = links.choice(axes, collective.kind, sent) or NOTHING
    return Timing(
        networks=links.networks(axes),
        nic_bytes=links.nic_bytes(axes, sent),
        bandwidth_s=bandwidth_s,
        latency_s=chosen.latency_s,
        waited_s=chosen.seconds,
        waited_by_bandwidth_s=bandwidth_s,
        bytes_s=chosen.bytes_s,
        choice=chosen.name,
    )

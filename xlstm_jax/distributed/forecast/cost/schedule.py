"""When the collectives of a GPU's schedule run, what runs beside each, and how long the schedule waits for it.

The clock (``clock``) runs twice: with kernels (``kernels``) and networks at the rates that are published, and at those
that are reached.

A loop's body begins with free networks. What a loop waits for counts in its body and does not move the clock outside.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from xlstm_jax.distributed.forecast.cost.clock import Transfer, waits
from xlstm_jax.distributed.forecast.cost.collective_traffic import Collective, Timing
from xlstm_jax.distributed.forecast.cost.kernels import Kernels, Seconds
from xlstm_jax.distributed.forecast.hlo.collective_sites import Site, sites
from xlstm_jax.distributed.forecast.hlo.program import Program
from xlstm_jax.distributed.hardware.chips import Chip
from xlstm_jax.distributed.hardware.links import Links
from xlstm_jax.distributed.hardware.nccl import Way

NOTHING = Way("", 0.0, 0.0)  # of one device alone


def timed(program: Program, collectives: Iterable[Collective], links: Links) -> tuple[Collective, ...]:
    """The collectives of a program for GPUs, with their times.

    Args:
      program: that they were found in.
      collectives: as ``find_collectives`` gives them.
      links: between the devices of the mesh.
    """
    least, expected = Kernels(program, links.chip), Kernels(program, links.chip.reached)
    # The sites of a computation come one after the other.
    groups = groupby(zip(sites(program), collectives, strict=True), key=lambda pair: pair[0].computation.name)
    return tuple(found for _, pairs in groups for found in _timed_in(least, expected, list(pairs), links))


def _timed_in(
    least: Kernels, expected: Kernels, pairs: Sequence[tuple[Site, Collective]], links: Links
) -> list[Collective]:
    """The collectives of one computation."""
    computation = pairs[0][0].computation
    times = [expected.seconds_of(computation, instruction) for instruction in computation.instructions]
    runs = [seconds.total for seconds in times]
    at_peak = [least.seconds_of(computation, instruction).total for instruction in computation.instructions]
    until = list(accumulate(times, initial=Seconds()))
    alone = [_alone(links, collective) for _, collective in pairs]
    real = [_transfer(site, timing, timing.seconds) for (site, _), timing in zip(pairs, alone, strict=True)]
    ideal = [_transfer(site, timing, timing.bandwidth_s) for (site, _), timing in zip(pairs, alone, strict=True)]
    timings = [
        dataclasses.replace(timing, waited_s=waited_s, waited_by_bandwidth_s=by_bandwidth_s)
        for timing, waited_s, by_bandwidth_s in zip(alone, waits(runs, real), waits(at_peak, ideal), strict=True)
    ]
    beside = [until[transfer.end] - until[transfer.start] for transfer in real]
    return [
        dataclasses.replace(
            collective,
            overlapped=dataclasses.replace(collective.overlapped, seconds=run.total, product_seconds=run.products),
            timing=timing,
        )
        for (_, collective), run, timing in zip(pairs, beside, timings, strict=True)
    ]


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


def _transfer(site: Site, timing: Timing, seconds: float) -> Transfer:
    start = site.computation.position[site.scheduled.name]
    end = start if site.during is None else start + 1 + len(site.during)
    return Transfer(start, end, timing.networks, seconds)


def kernel_seconds(program: Program, chip: Chip) -> float:
    """The time of all kernels of a step by a chip's rates, one after the other; none of what runs beside them."""
    kernels, entry = Kernels(program, chip), program.entry
    return sum((kernels.seconds_of(entry, instruction) for instruction in entry.instructions), Seconds()).total


def axes_of(links: Links, collective: Collective) -> tuple[str, ...]:
    """The axes that a collective runs over; groups that follow no set of axes may cross any link."""
    return tuple(links.axis_sizes) if collective.axes is None else collective.axes

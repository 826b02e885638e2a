"""Time that a step waits for collectives.

On TPUs each collective counts as alone on the links, and an asynchronous collective hides behind the cycles of the
instructions between start and end, also where another collective hides behind the same instructions. On GPUs the clock
(``clock``) runs twice: with kernels and networks at published rates, and at reached rates. A loop's body begins with
free networks. Waits inside of a loop count in the body and do not move the clock outside.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from xlstm_jax.forecast.cost.clock import Duration, Kernels, Transfer, waits
from xlstm_jax.forecast.cost.collective_traffic import Collective, Timing
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.nccl import Way
from xlstm_jax.forecast.hlo.collective_sites import Site, sites

NOTHING = Way("", 0.0, 0.0)  # a single device sends nothing


def axes_of(links: Links, collective: Collective) -> tuple[str, ...]:
    """Returns the mesh axes of a collective, for computing its time; every mesh axis if ``collective.axes`` is None.

    None means that the groups follow no set of axes, so the collective may use any link.
    """
    return tuple(links.axis_sizes) if collective.axes is None else collective.axes


def with_waits(links: Links, collective: Collective) -> Collective:
    """Returns a copy of a TPU's collective with ``alone_s``, ``exposed_s`` and ``latency_s`` filled in, per execution.

    ``alone_s`` is the time of the bytes on free links, ``exposed_s`` the part of this time that the overlapped
    instructions do not cover, at the compiler's cycles. Both exclude latency. Without overlapped instructions both are
    equal. If the cycles of the overlapped instructions are unknown (``Overlap.cycles`` is None), ``exposed_s`` is 0.
    Known cycles also fill in ``overlapped.seconds``.
    """
    alone = waited = links.seconds(axes_of(links, collective), collective.wire_bytes)
    overlap = collective.overlapped
    if overlap.cycles is not None and links.chip.clock_hz:
        seconds = overlap.cycles / links.chip.clock_hz
        overlap, waited = dataclasses.replace(overlap, seconds=seconds), max(0.0, alone - seconds)
    elif overlap.instructions:
        waited = 0.0
    latency_s = links.latency_s(axes_of(links, collective), collective.kind, collective.wire_bytes)
    return dataclasses.replace(collective, overlapped=overlap, alone_s=alone, exposed_s=waited, latency_s=latency_s)


def timed(least: Kernels, expected: Kernels, collectives: Iterable[Collective], links: Links) -> tuple[Collective, ...]:
    """Returns the collectives of a GPU step, in order, with ``timing``, ``alone_s``, ``exposed_s`` and ``latency_s``.

    Args:
      least, expected: kernels of the program at published rates, and at reached rates.
      collectives: result of ``find_collectives``.
      links: links between the devices of the mesh.
    """
    # The sites of a computation come one after the other.
    pairs = zip(sites(least.program), collectives, strict=True)
    groups = groupby(pairs, key=lambda pair: pair[0].computation.name)
    return tuple(each for _, pairs in groups for each in _timed_in(least, expected, list(pairs), links))


def _timed_in(
    least: Kernels, expected: Kernels, pairs: Sequence[tuple[Site, Collective]], links: Links
) -> Iterator[Collective]:
    """Yields the collectives of one computation with their times filled in: seconds, waits, latency and overlap.

    The order is that of ``pairs``. The schedule of the computation is simulated twice: with NCCL's times and the
    kernels ``expected`` (at reached rates), and with published rates and the kernels ``least``, for a lower bound of
    the waits.

    Args:
      least, expected: kernels of the program at published rates, and at reached rates.
      pairs: (place in the schedule, collective) for each collective of the computation; at least one.
      links: links between the devices of the mesh.
    """
    # Each computation has a separate clock: no collective starts in one computation and ends in another.
    computation = pairs[0][0].computation
    runs, at_peak = (
        [kernels.duration_of(computation, instruction) for instruction in computation.instructions]
        for kernels in (expected, least)
    )
    alone = [_isolated(links, collective) for _, collective in pairs]
    # Once with NCCL's times and the rates that kernels reach, and once by published rates alone, a lower bound.
    real = [
        Transfer(*site.span, alone_timing.networks, alone_timing.seconds)
        for (site, _), alone_timing in zip(pairs, alone, strict=True)
    ]
    ideal = [
        dataclasses.replace(transfer, seconds=alone_timing.bandwidth_s)
        for transfer, alone_timing in zip(real, alone, strict=True)
    ]
    waited = waits([spent.total for spent in runs], real)
    by_bandwidth = waits([spent.total for spent in at_peak], ideal)
    for (site, collective), alone_timing, waited_s, bandwidth_s in zip(pairs, alone, waited, by_bandwidth, strict=True):
        run = sum(runs[slice(*site.span)], Duration())
        overlap = dataclasses.replace(collective.overlapped, seconds=run.total, product_seconds=run.products)
        timing = dataclasses.replace(alone_timing, waited_s=waited_s, waited_by_bandwidth_s=bandwidth_s)
        yield dataclasses.replace(
            collective,
            overlapped=overlap,
            timing=timing,
            alone_s=alone_timing.seconds,
            exposed_s=waited_s,
            latency_s=alone_timing.latency_s,
        )


def _isolated(links: Links, collective: Collective) -> Timing:
    """Returns the ``Timing`` of one execution of a GPU collective that has the links to itself and overlaps nothing.

    So the waits of the result are the full times: by NCCL's rates with latency, and by published rates without latency.
    """
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

"""Traffic along each mesh axis: bytes of weights and activations, and the step's wait for the collectives.

    [Collective, ...] --axis_traffic--> [AxisTraffic(axes, weights, activations, other, seconds, waited_s), ...]

Weights are sent along the axes over which parameters are gathered (FSDP); weight traffic does not grow with the batch.
Activations are sent along the axes of split layers, a split sequence and experts; activation traffic grows with each
token.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from xlstm_jax.forecast.cost.collective_traffic import (
    ACTIVATIONS,
    WEIGHTS,
    Collective,
    executions,
    sum_wire_bytes,
)
from xlstm_jax.forecast.hlo.op_names import OTHER


@dataclass(frozen=True)
class AxisTraffic:
    """Collectives of a step over the same set of axes.

    Attributes:
      axes: mesh axes; None for collectives whose groups follow no set of axes.
      executions: number of executions in a step.
      weights, activations, other: bytes sent by each device in a step, see ``Collective.carries``.
      seconds: total time of the collectives without overlap; None for a device without figures.
      waited_s: expected wait of the step for the collectives; None for a device without figures.

    >>> traffic = AxisTraffic(("cp",), 64, weights=0.0, activations=2e9, other=0.0, seconds=0.04, waited_s=0.002)
    >>> traffic.wire_bytes, traffic.hidden_fraction
    (2000000000.0, 0.95)
    """

    axes: tuple[str, ...] | None
    executions: int
    weights: float
    activations: float
    other: float
    seconds: float | None
    waited_s: float | None

    @property
    def wire_bytes(self) -> float:
        """Total bytes sent by each device over these axes in a step."""
        return self.weights + self.activations + self.other

    @property
    def hidden_fraction(self) -> float | None:
        """Fraction of ``seconds`` that the step does not wait for, 0 to 1; None if unknown, or if ``seconds`` is 0."""
        if not self.seconds or self.waited_s is None:
            return None
        # A GPU's collective also waits for earlier collectives on its links, longer than for its own bytes.
        return max(0.0, 1 - self.waited_s / self.seconds)


def axis_traffic(collectives: Iterable[Collective]) -> tuple[AxisTraffic, ...]:
    """Returns the traffic of a step's collectives, an entry for each set of mesh axes, largest ``wire_bytes`` first.

    Collectives whose groups follow no set of axes share an entry with ``axes=None``. Collectives of single devices,
    which send nothing (``axes=()``), are left out.
    """
    by_axes: dict[tuple[str, ...] | None, list[Collective]] = defaultdict(list)
    for collective in collectives:
        by_axes[collective.axes].append(collective)
    # Collectives of a single device send nothing.
    by_axes.pop((), None)
    return tuple(
        sorted(
            (_traffic_of_axes(axes, some) for axes, some in by_axes.items()), key=lambda traffic: -traffic.wire_bytes
        )
    )


def _traffic_of_axes(axes: tuple[str, ...] | None, some: list[Collective]) -> AxisTraffic:
    # Bytes are known for every device, times only for links with published rates.
    weights, activations, other = (
        sum_wire_bytes(collective for collective in some if collective.carries == content)
        for content in (WEIGHTS, ACTIVATIONS, OTHER)
    )
    seconds = total_seconds((collective.count, collective.alone_s) for collective in some)
    waited_s = total_seconds((collective.count, collective.exposed_s) for collective in some)
    return AxisTraffic(axes, executions(some), weights, activations, other, seconds, waited_s)


def total_seconds(times: Iterable[tuple[int, float | None]]) -> float | None:
    """Returns the sum of executions x seconds over pairs (executions, seconds of one execution); 0 without pairs.

    None if the seconds of a pair are None, which means unknown.
    """
    total = 0.0
    for count, seconds in times:
        if seconds is None:
            return None
        total += count * seconds
    return total

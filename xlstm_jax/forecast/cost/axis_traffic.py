"""What travels along each axis of the mesh: weights and activations apart, and how much of their time is waited for.

    [Collective, ...] --axis_traffic--> [AxisTraffic(axes, weights, activations, other, seconds, waited_s), ...]

Weights travel along the axes that parameters are gathered over (FSDP): that does not grow with the batch. Activations
travel along the axes of split layers, of a split sequence and of experts: that grows with each token.
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
    """The collectives of a step over one set of axes.

    Attributes:
      axes: of the mesh; None for collectives whose groups follow no set of axes.
      executions: how many of them a step executes.
      weights, activations, other: bytes that each device sends in a step, see ``Collective.carries``.
      seconds: what all of them take alone, one after the other; None for a device without figures.
      waited_s: how long the step is expected to wait for them; likewise.

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
        """All bytes that each device sends over these axes in a step."""
        return self.weights + self.activations + self.other

    @property
    def hidden_fraction(self) -> float | None:
        """The part of ``seconds`` that the step does not wait for, 0 to 1; None where it is not known."""
        return 1 - self.waited_s / self.seconds if self.seconds and self.waited_s is not None else None


def axis_traffic(collectives: Iterable[Collective]) -> tuple[AxisTraffic, ...]:
    """The collectives of a step by the axes that they run over, those that send most first.

    Collectives over no axis (of one device alone) are left out.
    """
    by_axes: dict[tuple[str, ...] | None, list[Collective]] = defaultdict(list)
    for collective in collectives:
        by_axes[collective.axes].append(collective)
    # Nothing travels along no axis.
    by_axes.pop((), None)
    return tuple(sorted((_of(axes, some) for axes, some in by_axes.items()), key=lambda found: -found.wire_bytes))


def _of(axes: tuple[str, ...] | None, some: list[Collective]) -> AxisTraffic:
    # Bytes are known on every device, times only where links have published rates.
    weights, activations, other = (
        sum_wire_bytes(one for one in some if one.carries == what) for what in (WEIGHTS, ACTIVATIONS, OTHER)
    )
    seconds = total_seconds((one.count, one.alone_s) for one in some)
    waited_s = total_seconds((one.count, one.exposed_s) for one in some)
    return AxisTraffic(axes, executions(some), weights, activations, other, seconds, waited_s)


def total_seconds(times: Iterable[tuple[int, float | None]]) -> float | None:
    """The sum of (executions, seconds of one); None where one of these times is not known."""
    total = 0.0
    for count, seconds in times:
        if seconds is None:
            return None
        total += count * seconds
    return total

"""Traffic of a mixture of experts in a step, and the cost of an uneven distribution of tokens.

    forecast(step, ..., tokens=n), plan_sharding(model, ...)  --dispatch(imbalance=1.5)-->  (Dispatch, ...)

A compiled program does not contain the number of rows per expert, because the router chooses them. So the caller gives
the imbalance: the rows of the busiest device over the mean, from the metric of a run or as an assumption. Every device
waits for the busiest at the next all-to-all.

    no capacity   the busiest device computes imbalance x the mean
    a capacity    every expert computes its capacity, whatever it receives; rows beyond the capacity are dropped
"""

import math
from dataclasses import dataclass

from xlstm_jax.distributed.plan.expert_plan import ExpertPlan
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.forecast.cost.axis_traffic import total_seconds
from xlstm_jax.forecast.cost.collective_traffic import RAGGED, Collective, sum_wire_bytes
from xlstm_jax.forecast.forecasting import Forecast
from xlstm_jax.forecast.hardware.chips import peak_rate
from xlstm_jax.formatting import format_bytes, format_fraction, format_milliseconds

ALL_TO_ALL = "all-to-all", RAGGED
# FLOP per kernel value and row: 2 forward, 2 for recomputation in the backward pass, and 4 for two gradients.
FLOPS_OF_A_STEP = 8


@dataclass(frozen=True)
class Dispatch:
    """A mixture of experts in a step; bytes and seconds per device and step.

    >>> from xlstm_jax.distributed.plan.expert_plan import ExpertPlan
    >>> mixture = ExpertPlan("moe", 8, 2, None, ("ep",), devices=8, layers=1, expert_bytes=2**20, expert_size=2**18)
    >>> found = Dispatch(mixture, imbalance=1.5, wire_bytes=4e9, seconds=0.1, waited_s=0.1, expert_s=0.2)
    >>> found.ideal_bytes, round(found.imbalance_s, 3)  # 8 devices have room for a token, which goes to 2 of them
    (1000000000.0, 0.1)

    Attributes:
      experts: the mixture's entry in the plan.
      imbalance: the given imbalance: rows of the busiest device over the mean.
      wire_bytes: bytes sent by the mixture's all-to-alls.
      seconds, waited_s: time of the all-to-alls without overlap, and the expected wait; None if unknown.
      expert_s: time of the experts' products for the mean number of rows (with a capacity, for every slot), at the
        rate that the chip reaches; None if the chip or the tokens are unknown.
      is_ragged: whether only rows are sent, instead of parts of equal size.
    """

    experts: ExpertPlan
    imbalance: float
    wire_bytes: float
    seconds: float | None
    waited_s: float | None
    expert_s: float | None
    is_ragged: bool = False

    @property
    def padding(self) -> float:
        """Ratio of sent rows, with padding, to needed rows: a row for each expert that a token chose.

        1 for a ragged exchange, without padding.
        """
        return 1.0 if self.is_ragged else self.experts.padding

    @property
    def ideal_bytes(self) -> float:
        """Bytes that each device would send in a step without padding: ``wire_bytes`` / ``padding``."""
        return self.wire_bytes / self.padding

    @property
    def imbalance_s(self) -> float | None:
        """Seconds by which the imbalance extends a step: (``imbalance`` - 1) x ``expert_s``.

        0 for experts with a capacity, which drop rows instead; else None if ``expert_s`` is None.
        """
        if self.experts.capacity_factor is not None:
            return 0.0
        return None if self.expert_s is None else (self.imbalance - 1) * self.expert_s

    @property
    def dropped_fraction(self) -> float:
        """Fraction of the rows for the busiest device that its experts drop, 0 to 1; 0 without a capacity.

        A row is a token for an expert that the token chose. The result is 1 - ``capacity_factor`` / ``imbalance``, or 0
        if negative.
        """
        capacity = self.experts.capacity_factor
        return 0.0 if capacity is None else max(0.0, 1 - capacity / self.imbalance)

    def __str__(self) -> str:
        sent = f"{format_bytes(self.wire_bytes)} sent, where {format_bytes(self.ideal_bytes)} are rows that are there"
        if self.experts.capacity_factor is not None:
            dropped = format_fraction(self.dropped_fraction)
            cost = f"the busiest device drops {dropped} of its choices"
        else:
            cost = "" if self.imbalance_s is None else f"the step takes {format_milliseconds(self.imbalance_s)} longer"
        return f"{self.experts.path}: {sent}; at {self.imbalance:.3g} x the mean {cost or 'no time is known'}"


def dispatch(forecast: Forecast, plan: ShardingPlan, imbalance: float = 1.0) -> tuple[Dispatch, ...]:
    """Returns the traffic of each mixture of experts in a step, and the cost of an imbalance.

    >>> dispatch(None, None, imbalance=0.5)
    Traceback (most recent call last):
    ValueError: imbalance=0.5: the busiest device has as many rows as the mean at least; pass 1 or more, as 1.5.

    Args:
      forecast: forecast of the step, with ``tokens=``.
      plan: plan of the same model on the same mesh.
      imbalance: rows of the busiest device over the mean of the devices along the axes of experts, from 1 to the
        number of devices.
    Returns:
      An entry for each mixture of ``plan.experts`` that is split over devices.
    Raises:
      ValueError: the imbalance is below 1.
    """
    if not imbalance >= 1:
        raise ValueError(
            f"imbalance={imbalance}: the busiest device has as many rows as the mean at least; pass 1 or more, as 1.5."
        )
    return tuple(_dispatch_of(forecast, plan, experts, imbalance) for experts in plan.experts if experts.devices > 1)


def _dispatch_of(forecast: Forecast, plan: ShardingPlan, experts: ExpertPlan, imbalance: float) -> Dispatch:
    """Returns the ``Dispatch`` of a mixture of experts: times of its all-to-alls and of the experts' matrix products.

    The time of the products is computed for the mean number of rows per device, not for the busiest device; if the
    mixture has a capacity, for all slots of the capacity. Without a chip or ``tokens`` in the forecast, the field for
    this time is None.

    Args:
      forecast, plan: forecast of the step, and plan of its model on the same mesh.
      experts: the mixture's entry in ``plan.experts``.
      imbalance: rows of the busiest device over the mean; copied into the result, and not used for a time.
    """
    serving = [collective for collective in forecast.collectives if serves(collective, experts)]
    seconds = total_seconds((collective.count, collective.alone_s) for collective in serving)
    waited_s = total_seconds((collective.count, collective.exposed_s) for collective in serving)
    chip, expert_s = forecast.chip, None
    if chip and forecast.tokens:
        # Each token goes to top_k experts. Devices along tensor-parallel axes have the same tokens, and repeat the
        # same work.
        equal = math.prod(plan.axis_sizes[axis] for axis, roles in plan.roles.items() if roles == ("tensor",))
        rows = forecast.tokens * experts.top_k * equal / forecast.devices * (experts.capacity_factor or 1.0)
        rate = peak_rate(chip.reached, next(iter(forecast.flops.by_dtype()), "bfloat16"))
        expert_s = rows * experts.layers * FLOPS_OF_A_STEP * experts.expert_size / rate
    is_ragged = any(collective.kind == RAGGED for collective in serving)
    return Dispatch(experts, imbalance, sum_wire_bytes(serving), seconds, waited_s, expert_s, is_ragged)


def serves(collective: Collective, experts: ExpertPlan) -> bool:
    """Returns whether a collective is an all-to-all (ragged or not) in the module of a mixture of experts or below.

    The module is ``experts.path``; with the path "" every all-to-all counts.
    """
    within = (collective.module + "/").startswith(experts.path + "/") or not experts.path
    return collective.kind in ALL_TO_ALL and within

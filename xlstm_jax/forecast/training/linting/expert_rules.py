"""Lint rule for mixtures of experts; the table of rules is in ``rules``."""

from collections.abc import Iterator

from xlstm_jax.forecast.training.dispatch import Dispatch, dispatch
from xlstm_jax.forecast.training.linting.step import Defect, Rule, Step
from xlstm_jax.formatting import format_bytes, format_fraction, format_milliseconds

MIN_FRACTION = 0.05  # fraction of a step's time or traffic
MAX_PADDING = 1.5  # ratio of sent to chosen rows; a usual capacity factor is smaller
MIN_DROPPED = 0.05  # fraction of the choices of the busiest device


def uneven_experts(step: Step) -> Iterator[Defect]:
    """Finds experts with far more sent rows than chosen rows, or whose busiest device delays the step or drops tokens.

    Yields for each mixture of experts up to two defects. One if the mixture sends over 1.5 times the chosen rows, and
    the padding is 5 % of the step's bytes or more. One if the busiest device delays the step by 5 % of its time or more
    or, with a capacity, drops 5 % of its choices or more.
    """
    for exchange in dispatch(step.forecast, step.plan, step.imbalance) if step.plan.experts else ():
        padded = exchange.wire_bytes - exchange.ideal_bytes
        if exchange.padding > MAX_PADDING and padded >= MIN_FRACTION * step.forecast.wire_bytes:
            yield Defect(
                exchange.experts.path,
                f"sends {format_bytes(exchange.wire_bytes)} in a step, {exchange.padding:.3g} times the rows that "
                "its tokens choose: the arrays have room for all tokens on a single device.",
                padded,
                "Pass capacity_factor= to Experts, as 1.25, if tokens may be dropped; or split over fewer devices.",
            )
        yield from _imbalance(step, exchange)


def _imbalance(step: Step, exchange: Dispatch) -> Iterator[Defect]:
    """Yields a defect if the busiest device of a mixture of experts delays the step, and one if it drops tokens.

    The delay must be 5 % of the step's time or more, the dropped fraction 5 % of the device's choices or more.
    ``exchange`` has the traffic and the imbalance of the mixture. A defect has a place, a sentence, bytes (here 0) and
    a cure.
    """
    # With a capacity rows are dropped; without a capacity every device waits. The cause of both is an uneven router.
    cure = "Weight load_balancing_loss more, or split over fewer devices: several experts of a device even out."
    seconds, where = exchange.imbalance_s or 0.0, exchange.experts.path
    if seconds > 0 and seconds >= MIN_FRACTION * step.seconds:
        yield Defect(
            where,
            f"waits for its busiest device: at {exchange.imbalance:.3g} times the mean of rows a step takes "
            f"{format_milliseconds(seconds)} longer.",
            0,
            cure,
        )
    if exchange.dropped_fraction >= MIN_DROPPED:
        yield Defect(
            where,
            f"drops {format_fraction(exchange.dropped_fraction)} of the choices of its busiest device: at "
            f"{exchange.imbalance:.3g} times the mean of rows, "
            f"with capacity_factor={exchange.experts.capacity_factor}.",
            0,
            cure,
        )


UNEVEN_EXPERTS = Rule("uneven-experts", uneven_experts)

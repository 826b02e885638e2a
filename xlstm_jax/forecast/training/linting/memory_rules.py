"""Lint rules for device memory; the table is in ``rules``.

``near_memory_limit`` finds a step so near to the memory limit that XLA recomputes values, or soon will.
``memory_bound`` finds a step whose time is bound by memory, not by arithmetic: at the rates that kernels reach,

    bytes read and written in device memory / bandwidth    >    FLOP of products / rate of products
"""

from collections.abc import Iterator
from typing import NamedTuple

from xlstm_jax.forecast.cost.rematerialization import MARGIN
from xlstm_jax.forecast.training.linting.product_rules import SCORES_PASSES, WIDE
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.formatting import format_bytes, format_fraction, format_milliseconds, listed

MIN_MEMORY_FRACTION = 0.5  # fraction of a step's time
MIN_CAUSE_FRACTION = 0.1  # fraction of the bytes, from which on a cause is named
MAX_USED_FRACTION = 0.7  # fraction of device memory, up to which a step may recompute less


def memory_bound(step: Step) -> Iterator[Defect]:
    """Finds a step that reads and writes device memory for longer than its matrix products take, at reached rates.

    Yields at most one defect, if the memory time is half of the step's time or more. The defect names the causes with a
    tenth of the bytes or more. Nothing for devices without figures.
    """
    forecast, chip = step.forecast, step.forecast.chip
    if forecast.roofline is None or chip is None:
        return
    moved = forecast.roofline.hbm_bytes
    memory_s = moved / chip.reached.hbm_bandwidth
    products_s = forecast.roofline.compute_s / (chip.efficiency.products if chip.efficiency else 1.0)
    if memory_s <= products_s or memory_s < MIN_MEMORY_FRACTION * step.seconds:
        return
    causes = [cause for cause in _causes(step, moved) if cause.nbytes >= MIN_CAUSE_FRACTION * moved]
    yield Defect(
        "the step",
        f"is bound by memory, not by arithmetic: {format_bytes(moved)} are read and written in device memory, which "
        f"takes {format_milliseconds(memory_s)}; the matrix products take {format_milliseconds(products_s)}."
        f"{''.join(f' {cause.text}' for cause in causes)}",
        moved,
        " ".join([*(cause.cure for cause in causes), GENERAL_CURE]),
    )


def near_memory_limit(step: Step) -> Iterator[Defect]:
    """Finds a step in which XLA recomputes values because memory is scarce, or a step at most 5 % below this limit.

    Yields at most one defect. Nothing if the limit is unknown, or if the step does not fit and XLA recomputes nothing.
    """
    forecast, limit = step.forecast, step.forecast.rematerialization_bytes
    if limit is None or forecast.has_margin:
        return
    above = forecast.total_bytes - (1 - MARGIN) * limit
    taken = f"{format_bytes(forecast.total_bytes)}; from {format_bytes(limit)} on XLA computes values again"
    if forecast.rematerialized:
        runs, names = sum(forecast.rematerialized.values()), listed(list(forecast.rematerialized))
        yield Defect(
            "the step",
            f"is so large that XLA computes {runs} instructions again to save memory, which nn.remat did not ask for: "
            f"{names}. It takes {taken}.",
            max(above, 0),
        )
    elif forecast.fits:
        yield Defect("the step", f"is within {MARGIN:.0%} of the limit of memory: it takes {taken}.", above)


class Cause(NamedTuple):
    """A known cause of traffic, with its bytes in a step, a sentence, and a cure."""

    nbytes: float
    text: str
    cure: str


def _causes(step: Step, moved: float) -> Iterator[Cause]:
    """Yields the possible causes of the step's traffic in device memory, small causes included.

    A cause has its bytes in a step, a sentence, and a cure. The causes are float32 products, attention scores in
    memory, the optimizer's update, and needless recomputation. ``moved`` is the number of bytes read and written in a
    step.
    """
    forecast, plan, flops = step.forecast, step.plan, step.forecast.flops
    wide = flops.by_dtype().get(WIDE, 0.0) / flops.total if flops.total else 0.0
    of_products = f"{format_fraction(wide)} of the products are {WIDE}."
    yield Cause(wide * moved, of_products, "Compute in bfloat16: half the bytes.")
    scores = SCORES_PASSES * sum(flops.scores_bytes_per_step.values())
    of_scores = f"Attention scores are {format_fraction(scores / moved)} of the bytes or more."
    yield Cause(scores, of_scores, "Use an attention kernel, which keeps scores out of device memory: docs/kernels.md.")
    # The update reads parameters, gradients and moments, and writes parameters and moments.
    update = 2 * plan.parameters.per_device + plan.gradients.per_device + 2 * plan.optimizer.per_device
    of_update = f"The optimizer's update is {format_fraction(update / moved)} of the bytes."
    yield Cause(update, of_update, "Give each device more tokens: the bytes of an update do not grow with them.")
    recomputes, available = flops.by_direction().get("recompute", 0.0) > 0, forecast.available_bytes
    if recomputes and available and forecast.total_bytes <= MAX_USED_FRACTION * available:
        free = format_bytes(available - forecast.total_bytes)
        yield Cause(
            moved,
            f"The step recomputes activations, and {free} of device memory stay free.",
            "Recompute less: nn.remat with a policy that keeps the results of matrix products, or no nn.remat.",
        )


GENERAL_CURE = (
    "Logits of a large vocabulary are read and written several times: chunked_cross_entropy holds a chunk at a time."
)

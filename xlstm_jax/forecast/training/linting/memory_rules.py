"""Lint rule for a step whose time is bound by device memory, not by arithmetic; the table is in ``rules``.

The rule compares times at the rates that kernels reach:

    bytes read and written in device memory / bandwidth    >    FLOP of products / their rate
"""

from collections.abc import Iterator

from xlstm_jax.forecast.training.linting.product_rules import SCORES_PASSES, WIDE
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.formatting import format_bytes, format_fraction, format_milliseconds

MIN_MEMORY_FRACTION = 0.5  # fraction of a step's time
MIN_CAUSE_FRACTION = 0.1  # fraction of the bytes, from which on a cause is named
MAX_USED_FRACTION = 0.7  # fraction of device memory, up to which a step may recompute less


def memory_bound(step: Step) -> Iterator[Defect]:
    """Finds a step that reads and writes device memory for longer than its products take."""
    forecast, chip = step.forecast, step.forecast.chip
    if forecast.roofline is None or chip is None:
        return
    moved = forecast.roofline.hbm_bytes
    memory_s = moved / chip.reached.hbm_bandwidth
    products_s = forecast.roofline.compute_s / (chip.efficiency.products if chip.efficiency else 1.0)
    if memory_s <= products_s or memory_s < MIN_MEMORY_FRACTION * step.seconds:
        return
    causes = [(what, cure) for nbytes, what, cure in _causes(step) if nbytes >= MIN_CAUSE_FRACTION * moved]
    named = "".join(f" {what}." for what, _ in causes if what)
    yield Defect(
        "the step",
        f"is bound by memory, not by arithmetic: {format_bytes(moved)} are read and written in device memory, which "
        f"takes {format_milliseconds(memory_s)}; the matrix products take {format_milliseconds(products_s)}.{named}",
        moved,
        " ".join([*(cure for _, cure in causes), GENERAL_CURE]),
    )


def _causes(step: Step) -> Iterator[tuple[float, str, str]]:
    """Yields known causes of traffic: bytes at least, a clause that describes them, and the cure."""
    forecast, plan = step.forecast, step.plan
    flops, moved = forecast.flops, forecast.roofline.hbm_bytes if forecast.roofline else 0.0
    wide = flops.by_dtype().get(WIDE, 0.0) / flops.total if flops.total else 0.0
    yield wide * moved, f"{format_fraction(wide)} of the products are {WIDE}", "Compute in bfloat16: half the bytes."
    scores = SCORES_PASSES * sum(flops.scores_bytes_per_step.values())
    yield (
        scores,
        f"Attention scores are {format_fraction(scores / moved)} of the bytes or more",
        "Use an attention kernel, which keeps scores out of device memory: docs/kernels.md.",
    )
    # The update reads parameters, gradients and moments, and writes parameters and moments.
    state = 2 * plan.parameters.per_device + plan.gradients.per_device + 2 * plan.optimizer.per_device
    yield (
        state,
        f"The optimizer's update is {format_fraction(state / moved)} of the bytes",
        "Give each device more tokens: the bytes of an update do not grow with them.",
    )
    recomputed, available = flops.by_direction().get("recompute", 0.0), forecast.available_bytes
    if recomputed and available and forecast.total_bytes <= MAX_USED_FRACTION * available:
        yield (
            moved,
            f"The step recomputes activations, and {format_bytes(available - forecast.total_bytes)} of device memory "
            "stay free",
            "Recompute less: nn.remat with a policy that keeps the results of matrix products, or no nn.remat.",
        )


GENERAL_CURE = (
    "Logits of a large vocabulary are read and written several times: chunked_cross_entropy holds a chunk at a time."
)

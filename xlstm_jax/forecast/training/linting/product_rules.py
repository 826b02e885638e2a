"""Lint rules for needlessly expensive products: wide floats, attention scores; the table is in ``rules``.

The rules read the step's jaxpr. The time of a cost, and its share of the step, are computed from the rates of a chip:
for CPU devices ``float32_model`` finds nothing, and ``held_scores`` applies only its limit in bytes.
"""

from collections import defaultdict
from collections.abc import Iterator

from xlstm_jax.forecast.cost.collective_traffic import sum_wire_bytes
from xlstm_jax.forecast.hardware.chips import peak_rate
from xlstm_jax.forecast.hlo.op_names import BACKWARD
from xlstm_jax.forecast.hlo.text import float_bytes_of
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.formatting import format_bytes, format_fraction, format_milliseconds, path_pattern

WIDE, NARROW, WIDE_BYTES = "float32", "bfloat16", 4
MIN_NARROW_FRACTION = 0.5  # fraction of FLOP of the modules, from which on the model counts as bfloat16
MIN_WIDE_FRACTION = 0.01  # fraction of the step's FLOP; a router or a norm has less
MIN_SCORES_BYTES = 2**30
MIN_SCORES_FRACTION = 0.05  # fraction of a step's memory or time
# Least number of times that a step reads or writes the scores of a layer in device memory, without a kernel. Forward:
# the first product writes scores, softmax and the second product read scores. Backward: the gradient of the values
# reads scores; the gradient of the scores is written, read by softmax's gradient, and read by two products.
SCORES_PASSES = 8


def wide_products(step: Step) -> Iterator[Defect]:
    """Finds modules that multiply in float32, in a model with most FLOP in narrower dtypes.

    Yields a defect for each module, or group of modules that differ only in a number, with 1 % of the step's FLOP or
    more in float32.
    """
    flops, chip = step.forecast.flops, step.forecast.chip
    # Work without a path is the loss or the optimizer, which may need float32, or bfloat16 in a float32 model.
    in_modules = [work for work in flops.work if work.path]
    narrow = sum(work.flops for work in in_modules if work.dtype not in (WIDE, "float64"))
    of_modules = sum(work.flops for work in in_modules)
    if narrow < MIN_NARROW_FRACTION * of_modules:
        return
    by_module: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for work in in_modules:
        if work.dtype == WIDE:
            by_module[path_pattern(f"{work.path}/")[:-1]][work.direction] += work.flops
    for where, directions in by_module.items():
        wide = sum(directions.values())
        if wide < MIN_WIDE_FRACTION * flops.total:
            continue
        # A chip may multiply both dtypes at the same rate: then float32 only costs bytes.
        times = [] if chip is None else [wide / peak_rate(chip, dtype) * 1e3 for dtype in (WIDE, NARROW)]
        slower = f", {times[0]:.3g} ms at least where {NARROW} takes {times[1]:.3g}" if len(set(times)) > 1 else ""
        yield Defect(
            where,
            f"multiplies in {WIDE}: {wide:.3g} FLOP per device and step{slower}, {format_fraction(wide / flops.total)} "
            f"of the step's. Of the products of all modules {format_fraction(narrow / of_modules)} are narrower. Each "
            f"operand of {WIDE} takes twice the bytes.",
            0,
            _GRADIENTS_ALONE if set(directions) == {BACKWARD} else "",
        )


_GRADIENTS_ALONE = (
    "Only its backward pass is wide, because preferred_element_type=float32 makes the gradient of the result float32: "
    "leave the argument out, and cast the result. jax.nn.dot_product_attention uses this argument internally: use a "
    "kernel instead, as attention(q, k, v) of docs/kernels.md."
)


def float32_model(step: Step) -> Iterator[Defect]:
    """Finds a model with more than half of its FLOP in float32; yields at most one defect, nothing without a chip."""
    flops, chip = step.forecast.flops, step.forecast.chip
    of_modules = sum(work.flops for work in flops.work if work.path)
    wide = sum(work.flops for work in flops.work if work.path and work.dtype == WIDE)
    if chip is None or wide <= (1 - MIN_NARROW_FRACTION) * of_modules:
        return
    times = [format_milliseconds(wide / peak_rate(chip, dtype)) for dtype in (WIDE, NARROW)]
    # A chip may multiply both dtypes at the same rate: then float32 only costs bytes.
    slower = f" and take {times[0]} at the peak rate, in {NARROW} {times[1]}" if times[0] != times[1] else ""
    sent = sum_wire_bytes(c for c in step.forecast.collectives if c.leaves and float_bytes_of(c.dtype) == WIDE_BYTES)
    gathers = f", and each device sends {format_bytes(sent)} of float32 weights in a step" if sent else ""
    yield Defect(
        "the model",
        f"computes in {WIDE}: {format_fraction(wide / of_modules)} of its products have operands of {WIDE}{slower}. "
        f"Each activation takes twice the bytes of {NARROW}{gathers}.",
        sent / 2,
    )


def held_scores(step: Step) -> Iterator[Defect]:
    """Finds attention that holds the full array of scores (query x key) in memory.

    Yields a defect for each module, or group of modules that differ only in a number, whose array exceeds 1 GiB, or
    takes 5 % of the step's memory, or whose reads and writes take 5 % of the step's time.
    """
    flops, chip = step.forecast.flops, step.forecast.chip
    alike = defaultdict(list)
    for path in flops.scores_bytes:
        alike[path_pattern(f"{path}/")[:-1]].append(path)
    for pattern, paths in alike.items():
        scores_bytes = max(flops.scores_bytes[path] for path in paths)
        moved = SCORES_PASSES * sum(flops.scores_bytes_per_step.get(path, 0.0) for path in paths)
        of_memory, of_time, costs = 0.0, 0.0, ""
        if chip is not None and step.seconds:
            seconds = moved / chip.reached.hbm_bandwidth
            of_memory, of_time = scores_bytes / step.forecast.total_bytes, seconds / step.seconds
            costs = (
                f" The array is {format_fraction(of_memory)} of the step's memory; {format_bytes(moved)} of scores, "
                f"read and written in a step, take {format_milliseconds(seconds)} at least, {format_fraction(of_time)} "
                "of the step."
            )
        if scores_bytes > MIN_SCORES_BYTES or max(of_memory, of_time) >= MIN_SCORES_FRACTION:
            yield Defect(
                (pattern if len(paths) > 1 else paths[0]) or "the loss",
                f"holds the array of all scores (query x key), {format_bytes(scores_bytes)} per device, and a "
                f"softmax and a gradient of the same size; a kernel holds a block of scores at a time.{costs}",
                scores_bytes,
            )

"""Lint rules for needlessly expensive products: wide floats, attention scores; the table is in ``rules``.

Both rules read the step's jaxpr, so their findings do not depend on the platform.
"""

from collections import defaultdict
from collections.abc import Iterator

from xlstm_jax.forecast.hardware.chips import peak_rate
from xlstm_jax.forecast.hlo.op_names import BACKWARD
from xlstm_jax.forecast.training.linting.step import Defect, Step
from xlstm_jax.formatting import format_bytes, format_fraction, path_pattern

WIDE, NARROW = "float32", "bfloat16"
MIN_NARROW_FRACTION = 0.5  # fraction of FLOP of the modules, from which on the model counts as bfloat16
MIN_WIDE_FRACTION = 0.01  # fraction of the step's FLOP; a router or a norm has less
MIN_SCORES_BYTES = 2**30


def wide_products(step: Step) -> Iterator[Defect]:
    """Finds modules that multiply in float32, in a model that does most of its FLOP in narrower dtypes."""
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


def held_scores(step: Step) -> Iterator[Defect]:
    """Finds attention that holds the array of all scores (query x key) in memory."""
    for path, held in step.forecast.flops.scores_bytes.items():
        if held > MIN_SCORES_BYTES:
            yield Defect(
                path or "the loss",
                f"holds the array of all scores (query x key), {format_bytes(held)} per device, and a softmax and a "
                "gradient of the same size; a kernel holds a block of scores at a time.",
                held,
            )

"""Cost of metrics in a training step, in microseconds and collectives: ``python -m benchmarks.metrics``.

A small training step runs on every device, without and with metrics. Every variant is compiled once; then the variants
take turns in a single process, so that other load on the machine affects every variant alike.

  bare                     a linear model, one all-reduce of its gradient
  update                   + update of a Compose of 20 WeightedMeans
  update and sync          + reduction over devices in every step
  update, sync and compute + the 20 values over every device
  mixed: ...               the same variants with means, sums, counts, maxima and minima
  pmean of each value      + 20 times ``lax.pmean(values.mean())``: code without a library
  clu, merge               + a ``clu.metrics.Collection`` of 20 Averages, merged on each device
  clu, gather and merge    + ``gather_from_model_output`` of clu in every step, for several devices

Every variant observes the same values, columns of the error of the model. The cost of a variant is the median over
rounds of the difference to the bare step in the same round. The reductions are also called and awaited separately.

Collectives are counted in the lowered and in the compiled program: XLA combines independent sums into an all-reduce of
several buffers, which on CPU devices is no faster than several all-reduces.

Twenty output values of a program cost more than the collective that computes them, because each value is an array on
each device. So "sync", with a state of a few vectors as result, is compared with "sync and compute", with 20 arrays.

The aims: an update adds no collective, and a sync of 20 metrics costs at most two ``lax.pmean`` of a scalar.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.metrics_variants import NAIVE_BUDGET, OURS, Measurement, measure
from benchmarks.options import positive
from benchmarks.report import ACCENT, LETTERS, PAGE_DPI, PAGE_WIDTH, QUIET, STRONG, number
from xlstm_jax.formatting import rich_table

SYNC_EVERY = 100  # steps, for the amortised row
CLU_MISSING = "clu.metrics is left out: it is not installed. pip install clu"


def step_rows(result: Measurement) -> list[tuple[str, float, tuple[int, int]]]:
    """Returns rows of (variant, microseconds added, collectives added in the lowered and compiled program)."""
    labels = [prefix + label for prefix in ("", "mixed: ") for label in OURS] + ["pmean of each value"]
    labels += ["clu, merge", "clu, gather and merge"] * result.has_clu
    rows = [(label, result.added(label), result.added_collectives(label)) for label in labels]
    for index, prefix in ((1, ""), (5, "mixed: ")):
        log_step = result.alone[f"{prefix}log step"].microseconds
        amortised = result.added(f"{prefix}update") + log_step / SYNC_EVERY
        row = (f"{prefix}update, log step every {SYNC_EVERY}", amortised, result.added_collectives(f"{prefix}update"))
        rows.insert(index, row)
    return rows


def step_table(result: Measurement) -> Table:
    bare = result.steps["bare"].microseconds
    title = f"what {result.metrics} metrics add to a step of {bare:,.0f} µs, {result.devices}"
    naive = result.added("pmean of each value")
    rows = [
        [label, f"{added:,.0f}", f"{added / naive:.0%}", f"+{lowered}", f"{compiled:+d}"]
        for label, added, (lowered, compiled) in step_rows(result)
    ]
    return rich_table(title, ["in every step", "µs added", "of pmeans", "collectives", "compiled"], rows)


def reduction_table(result: Measurement) -> Table:
    here, alone, rows = result.in_step(), result.alone, []
    for label, cost in alone.items():
        within = _with_quartiles(here[label]) if label in here else ""
        ratio = cost.microseconds / alone["1 pmean"].microseconds
        counts = str(cost.lowered), str(cost.compiled)
        rows.append([label, *counts, within, f"{cost.microseconds:,.0f}", f"{ratio:.1f}"])
    columns = ["of the local state or values", "collectives", "compiled", "µs in a step (quartiles)", "µs alone"]
    return rich_table("one reduction over devices", [*columns, "in pmeans"], rows)


def _with_quartiles(values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def verdicts(result: Measurement) -> list[str]:
    """Formats whether the two aims are met."""
    collectives = [result.added_collectives(label) for label in ("update", "mixed: update")]
    clean = all(pair == (0, 0) for pair in collectives)
    lines = [f"update alone adds no collective: {_met(clean)}"]
    for label in ("sync", "mixed: sync"):
        ratios = result.in_units_of_the_budget(label)
        lines += [
            f"{label} of {result.metrics} metrics, over {NAIVE_BUDGET} pmeans of one scalar, {where}: "
            f"{ratio:.2f}, {_met(ratio <= 1)}"
            for where, ratio in zip(("in the step", "called alone"), ratios, strict=True)
        ]
    return lines


def _met(condition: bool) -> str:
    return "met" if condition else "not met"


def draw(path: Path, result: Measurement) -> None:
    """Draws the microseconds added to a step (left), and reductions inside and outside the step (right)."""
    figure = Figure(figsize=(PAGE_WIDTH, 5), dpi=PAGE_DPI, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    rows = step_rows(result)
    names = [f"{label}\n{_plural(lowered)} more" for label, _, (lowered, _) in rows]
    colors = [STRONG if "pmean" not in label and "clu" not in label else ACCENT for label, *_ in rows]
    _bars(left, names, [("", [added for _, added, _ in rows], colors)])
    bare = result.steps["bare"].microseconds
    left.set_title(f"{result.metrics} metrics: µs added to a step of {bare:,.0f} µs", loc="left", fontsize=10)

    here, alone = {k: float(np.median(v)) for k, v in result.in_step().items()}, result.alone
    labels = list(here)
    series = [("in the step", list(here.values()), STRONG)]
    series += [("called alone, waited for", [alone[label].microseconds for label in labels], QUIET)]
    _bars(right, [f"{label}\n{_plural(alone[label].lowered)}" for label in labels], series)
    budget = f"{NAIVE_BUDGET} pmeans"
    right.axvline(here[budget], color=ACCENT, ls="--", lw=1.2, label=f"{budget} in the step")
    right.legend(frameon=False, fontsize=LETTERS, loc="upper right", bbox_to_anchor=(1, 0.97))
    right.set_title("one reduction, µs", loc="left", fontsize=10)
    figure.suptitle(f"What metrics cost, {result.devices}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def _bars(axes: Any, names: list[str], series: list[tuple[str, list[float], Any]]) -> None:
    """Draws horizontal bars with numbers, the first name at the top."""
    height = 0.75 / len(series)
    for position, (label, values, color) in enumerate(series):
        places = np.arange(len(names)) + (position - (len(series) - 1) / 2) * height
        axes.barh(places, values, height, color=color, label=label)
        for place, value in zip(places, values, strict=True):
            number(axes, place, value, f"{value:,.0f}")
    axes.set_yticks(range(len(names)), names, fontsize=LETTERS)
    axes.tick_params(axis="x", labelsize=LETTERS)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e5e5", lw=0.8)
    axes.set_axisbelow(True)


def _plural(collectives: int) -> str:
    return f"{collectives} collective{'s' * (collectives != 1)}"


# -------------------------------------------------------------------------------------------------------- command line


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("metrics", description="What metrics add to a training step.")
    new.add_argument("--steps", type=positive, default=20, help="calls of a variant in a round (default: 20)")
    new.add_argument("--rounds", type=positive, default=25, help="turns of every variant (default: 25)")
    new.add_argument("--metrics", type=positive, default=20, help="how many metrics (default: 20)")
    new.add_argument("--out", type=Path, help="where to save the picture, a PNG; by default none is drawn")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console = Console()
    with console.status("compiling and measuring"):
        try:
            result = measure(options.steps, options.rounds, options.metrics)
        except ValueError as error:
            Console(stderr=True).print(f"metrics: error: {error}", highlight=False)
            return 2
    for table in (step_table(result), reduction_table(result)):
        console.print(table)
    for line in verdicts(result) + [CLU_MISSING] * (not result.has_clu):
        console.print(line, highlight=False)
    if options.out:
        draw(options.out, result)
        console.print(f"the picture is {options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

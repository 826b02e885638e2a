"""Tables and pictures of benchmarks and training runs: terminal tables, ``loss.png``, ``memory.png``.

Every function depends only on the numbers passed as arguments.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from xlstm_jax.formatting import format_bytes, rich_table

STATE_COLORS = ("#1f4e79", "#5b9bd5", "#f2a65a")
QUIET, STRONG, ACCENT = "#b9cde0", "#1f4e79", "#d1495b"

Row = Mapping[str, float]


def memory_table(layouts: Mapping[str, Mapping[str, int]]) -> Table:
    """Builds the table of bytes per device by kind of state in two layouts, with the ratio of first to second."""
    (first, first_kinds), (second, second_kinds) = layouts.items()
    totals = sum(first_kinds.values()), sum(second_kinds.values())
    sizes = [(kind, size, second_kinds[kind]) for kind, size in first_kinds.items()] + [("total", *totals)]
    rows = [[kind, format_bytes(size), format_bytes(whole), f"{size / whole:.1%}"] for kind, size, whole in sizes]
    return rich_table("Bytes per device", ["state", first, second, "share"], rows)


def comparison_table(held_out_loss: float, baseline: float) -> Table:
    """Builds the table that compares the model with a model of byte frequencies."""
    rows = [
        [name, f"{loss:.3f}", f"{loss / math.log(2):.3f}", f"{math.exp(loss):.2f}"]
        for name, loss in (("byte frequencies", baseline), ("this model", held_out_loss))
    ]
    return rich_table("Held-out text", ["", "nats per byte", "bits per byte", "perplexity"], rows)


def draw_loss(path: Path, title: str, rows: Sequence[Row], baseline: float) -> None:
    """Draws training and held-out loss over steps, with the loss of the byte-frequency model as a line."""
    figure, axes = _figure(7.5, 4.5, title)
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], color=QUIET, lw=1, label="training batch")
    held_out = [(r["step"], r["held_out_loss"]) for r in rows if "held_out_loss" in r]
    axes.plot(*zip(*held_out, strict=True), color=STRONG, lw=2, marker="o", ms=4, label="held-out text")
    axes.axhline(baseline, color=ACCENT, ls="--", lw=1.2, label=f"byte frequencies ({baseline:.2f})")
    step, loss = held_out[-1]
    axes.annotate(f"{loss:.2f}", (step, loss), (6, 0), textcoords="offset points", va="center", color=STRONG)
    axes.set(xlabel="step", ylabel="loss in nats per byte", xlim=(0, step * 1.06), ylim=(0, None))
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def draw_losses(path: Path, title: str, runs: Mapping[str, Sequence[Row]]) -> None:
    """Draws the held-out loss of several runs over steps."""
    figure, axes = _figure(7.5, 4.5, title)
    for (name, rows), color in zip(runs.items(), (STRONG, ACCENT, "#f2a65a", "#5b9bd5"), strict=False):
        points = [(r["step"], r["held_out_loss"]) for r in rows if "held_out_loss" in r]
        axes.plot(
            *zip(*points, strict=True), color=color, lw=2, marker="o", ms=4, label=f"{name} ({points[-1][1]:.3f})"
        )
    axes.set(xlabel="step", ylabel="held-out loss in nats per byte", xlim=(0, None))
    axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def draw_memory(path: Path, title: str, layouts: Mapping[str, Mapping[str, int]]) -> None:
    """Draws a stacked bar for each layout: bytes per device by kind of state."""
    figure, axes = _figure(6.5, 4.5, title)
    totals = [sum(kinds.values()) for kinds in layouts.values()]
    scale, unit = _unit(max(totals))
    below = [0.0] * len(layouts)
    for kind, color in zip(next(iter(layouts.values())), STATE_COLORS, strict=True):
        heights = [kinds[kind] / scale for kinds in layouts.values()]
        axes.bar(list(layouts), heights, bottom=below, color=color, width=0.5, label=kind)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    for index, (height, total) in enumerate(zip(below, totals, strict=True)):
        axes.annotate(format_bytes(total), (index, height), (0, 4), textcoords="offset points", ha="center")
    axes.set(ylabel=f"{unit} on one device", xlim=(-0.6, len(layouts) - 0.4), ylim=(0, max(below) * 1.12))
    axes.legend(frameon=False, reverse=True, loc="upper left")
    FigureCanvasAgg(figure).print_png(path)


def _unit(largest: int) -> tuple[int, str]:
    power = min(3, int(math.log(max(largest, 1), 1024)))
    return 1024**power, ("B", "KiB", "MiB", "GiB")[power]


def _figure(width: float, height: float, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e5e5e5", lw=0.8)
    axes.set_axisbelow(True)
    return figure, axes


# ------------------------------------------------------------------------------------------------ bars of several cases

# A page shows a picture with a width of some 830 pixels, which is two thirds of the drawn width.
PAGE_WIDTH, PAGE_DPI = 10.4, 120
LETTERS, LETTERS_IN_A_LINE = 9, 155
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # box behind a number, to cover lines
NUMBER = {"va": "center", "fontsize": LETTERS, "zorder": 5}

Plots = Mapping[str, Callable[[Any], None]]  # title -> drawing function


def panels(path: Path, title: str, words: str, cases: int, blocks: Mapping[str, Plots]) -> None:
    """Draws horizontal bars of cases: a block per quantity, with a plot per topology in each block.

    Args:
      path: path of the PNG.
      title: title at the top.
      words: explanation of the case names, at the bottom.
      cases: the number of cases.
      blocks: plots by quantity. Blocks with a single plot each are placed side by side.
    """
    lines = textwrap.wrap(words, LETTERS_IN_A_LINE)
    beside = max(map(len, blocks.values())) == 1
    high = [1.4 + 0.21 * cases] if beside else [1.1 + 0.21 * cases] * len(blocks)
    heights = [0.3, *high, 0.12 + 0.18 * len(lines)]
    figure = Figure(figsize=(PAGE_WIDTH, sum(heights)), dpi=PAGE_DPI, layout="constrained")
    head, *middle, foot = figure.subfigures(len(heights), 1, height_ratios=heights)
    head.text(0.01, 0.3, title, fontsize=12, fontweight="bold")
    foot.text(0.01, 0.95, "\n".join(lines), fontsize=LETTERS, va="top", color="#444444", linespacing=1.3)
    parts = middle[0].subfigures(1, len(blocks)) if beside else middle
    for part, (quantity, plots) in zip(np.atleast_1d(parts), blocks.items(), strict=True):
        _draw_block(part, quantity, plots, beside)
    save(figure, path)


def _draw_block(part: Any, quantity: str, plots: Plots, beside: bool) -> None:
    """Draws the plots of a quantity, with case names at the first plot and a shared legend below."""
    row = part.subplots(1, len(plots), sharey=True, squeeze=False)[0]
    for axes, (topology, draw) in zip(row, plots.items(), strict=True):
        draw(axes)
        axes.set_title(topology, loc="left", fontsize=LETTERS)
    row[0].invert_yaxis()
    part.suptitle(quantity, x=0.01, ha="left", fontsize=11)
    handles, labels = row[0].get_legend_handles_labels()
    columns = 3 if beside and len(labels) > 4 else len(labels)  # half a page has room for four
    part.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=LETTERS, frameon=False)


def clean(axes: Any, largest: float) -> None:
    """Sets the axis limit, with room for numbers behind the bars, and removes the frame."""
    axes.set_xlim(0, largest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=LETTERS)


def number(axes: Any, place: float, value: float, text: str) -> None:
    """Writes a number behind a bar."""
    axes.annotate(text, (value, place), (4, 0), textcoords="offset points", bbox=BEHIND, **NUMBER)


def bars(axes: Any, values: Mapping[str, float], at_least: float = 0.0) -> None:
    """Draws a bar with a number for each case; the axis extends at least to ``at_least``."""
    drawn = axes.barh(list(values), list(values.values()), color="#5b9bd5")
    clean(axes, 1.28 * max(*values.values(), at_least, 1e-9))
    for bar, value in zip(drawn, values.values(), strict=True):  # another plot may have cases between
        number(axes, bar.get_y() + bar.get_height() / 2, value, f"{value:.3g}")


def number_within(axes: Any, place: float, value: float, text: str) -> None:
    """Writes a number inside the end of a bar that leaves no room behind it, or extends beyond the plot."""
    end = axes.get_xlim()[1]
    text, x = (f"{text} ▸", end) if value > end else (text, value)
    style = {"color": "white", "ha": "right", "bbox": BEHIND | {"facecolor": "#404040"}}
    axes.annotate(text, (x, place), (-4, 0), textcoords="offset points", **style, **NUMBER)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def ratio(value: float, base: float | None) -> str:
    """Formats a quotient for a table; "" if ``base`` is None or 0."""
    return f"{value / base:.2f}" if base else ""

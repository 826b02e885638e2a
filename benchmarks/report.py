"""What a training run leaves behind: tables for the terminal, ``loss.png``, ``memory.png``.

Everything here is a plain function of numbers; nothing knows how they came about.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from xlstm_jax.wording import format_bytes, rich_table

STATE_COLORS = ("#1f4e79", "#5b9bd5", "#f2a65a")
QUIET, STRONG, ACCENT = "#b9cde0", "#1f4e79", "#d1495b"

Row = Mapping[str, float]


def memory_table(layouts: Mapping[str, Mapping[str, int]]) -> Table:
    """Bytes on one device for each kind of state, in two layouts, and what the first takes of the second."""
    (first, first_kinds), (second, second_kinds) = layouts.items()
    totals = sum(first_kinds.values()), sum(second_kinds.values())
    sizes = [(kind, size, second_kinds[kind]) for kind, size in first_kinds.items()] + [("total", *totals)]
    rows = [[kind, format_bytes(size), format_bytes(whole), f"{size / whole:.1%}"] for kind, size, whole in sizes]
    return rich_table("Bytes per device", ["state", first, second, "share"], rows)


def comparison_table(held_out_loss: float, baseline: float) -> Table:
    """The model beside a model of byte frequencies."""
    rows = [
        [name, f"{loss:.3f}", f"{loss / math.log(2):.3f}", f"{math.exp(loss):.2f}"]
        for name, loss in (("byte frequencies", baseline), ("this model", held_out_loss))
    ]
    return rich_table("Held-out text", ["", "nats per byte", "bits per byte", "perplexity"], rows)


def draw_loss(path: Path, title: str, rows: Sequence[Row], baseline: float) -> None:
    """Training and held-out loss over steps, under the line of the byte-frequency model."""
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


def draw_memory(path: Path, title: str, layouts: Mapping[str, Mapping[str, int]]) -> None:
    """A stacked bar for each layout: the bytes that each kind of state takes on one device."""
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


def clean(axes: Any, title: str, largest: float) -> None:
    """Horizontal bars, the first at the top, with room for the number behind the longest; no frame."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * largest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def key_below(axes: Any) -> None:
    """The legend in a row under the plot, where no bar is."""
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=5, columnspacing=1.2)


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


def ratio(value: float, base: float | None) -> str:
    """Two numbers as a quotient for a table, "" where there is nothing to divide by."""
    return f"{value / base:.2f}" if base else ""

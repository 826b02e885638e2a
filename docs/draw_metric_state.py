"""Draws ``images/metric-state.png``: ``python docs/draw_metric_state.py``."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

LOCAL, SYNCED, INK = "#5b9bd5", "#f2a65a", "#222222"
BEFORE, SEEN = (1.5, 0.2, 3.0, 0.0), (0.5, 1.0, 0.0, 2.0)


def box(axes, x, y, text, color):
    axes.add_patch(FancyBboxPatch((x, y), 1.1, 0.62, boxstyle="round,pad=0.04", fc=color, ec="none", alpha=0.85))
    axes.text(x + 0.55, y + 0.31, text, ha="center", va="center", color="white", fontsize=13, weight="bold")


def arrow(axes, start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})


def main():
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(-2.6, 8.6), ylim=(-0.2, 5.3))
    axes.axis("off")
    rows = ((3.9, BEFORE, LOCAL), (2.2, tuple(a + b for a, b in zip(BEFORE, SEEN, strict=True)), LOCAL))
    for i in range(4):
        x = 1.6 * i
        axes.text(x + 0.55, 4.95, f"device {i}", ha="center", fontsize=11, color=INK)
        for y, values, color in rows:
            box(axes, x, y, f"{values[i]:.1f}", color)
        arrow(axes, (x + 0.55, 3.82), (x + 0.55, 2.92))
        axes.text(x + 0.68, 3.36, f"+ {SEEN[i]:.1f}", va="center", fontsize=11, color=INK)
        arrow(axes, (x + 0.55, 2.12), (x + 0.55, 1.72))
        arrow(axes, (x + 0.55, 1.5), (x + 0.55, 1.1))
        box(axes, x, 0.4, f"{sum(rows[1][1]):.1f}", SYNCED)
    axes.plot([0.55, 5.35], [1.61, 1.61], color=INK, lw=2.5)
    notes = ((4.21, "Local [4, ...]\nP(axes)"), (3.36, "update\nno collective"), (2.51, "Local [4, ...]\nP(axes)"))
    for y, text in (*notes, (1.61, "sync, on log steps\none collective"), (0.71, "Synced [...]\nP()")):
        axes.text(-0.35, y, text, ha="right", va="center", fontsize=11, color=INK)
    axes.text(6.4, 2.51, "compute_local:\n[2.0, 1.2, 3.0, 2.0]", va="center", fontsize=11, color=INK)
    axes.text(6.4, 0.71, "compute: 8.2", va="center", fontsize=11, color=INK)
    FigureCanvasAgg(figure).print_png(Path(__file__).parent / "images" / "metric-state.png")


if __name__ == "__main__":
    main()

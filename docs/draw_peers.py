"""Draws ``images/peers.png``, and prints the table of README.md with the same numbers: ``python docs/draw_peers.py``.

The numbers come from what ``python -m benchmarks.forecasts`` keeps. Each side stands there with XLA's defaults, and
with the options, of those tried, with which its step is expected to take least: that may be none. README is read where
the files are not, so it has its table as text.
"""

import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
KEPT = DOCS.parent / "benchmarks" / "results" / "forecasts"
INK = "#808080"  # read on white and on black
JIT, OURS = "`jit` with shardings", "`xlstm_jax`"
COLORS = {JIT: "#9a9a9a", OURS: "#4c78a8"}
# Of each side the case without options, and those with some.
CASES = {
    JIT: ("jit", "jit, options", "jit, best options"),
    OURS: ("ours", "ours, options", "ours, best options"),
}
MODELS = {"1.3B": "Transformer", "decoder_0.8B": "decoder"}
PARAMETERS = {"1.3B": "1.4e9", "decoder_0.8B": "0.8e9"}
CHIPS = {
    "v5e:16x16": "256 TPU v5e",
    "v5p:4x4x8": "128 TPU v5p",
    "v6e:16x16": "256 TPU v6e",
    "h100:32x8": "256 H100",
}
DEFAULTS, BEST = "default", "best"
COLUMNS = ("GB sent", "GiB held", "ms waited", "ms a step")

TITLES = {"ms waited": "ms waited in a step; lines reach down to bandwidth alone", "ms a step": "ms a step, expected"}


def figures(found):
    """By column what a device sends, holds and takes in a step: (by published rates alone, expected)."""
    seconds, gpu = found["seconds"], found.get("gpu_seconds", {})
    waited = gpu.get("exposed by bandwidth", seconds["exposed"])  # of TPUs without latency in any case
    step = max(gpu.get("kernels", 0), seconds["compute"], seconds["memory"]) + waited
    sent, held = found["wire_bytes"]["total"] / 1e9, found["bytes"]["total"] / 2**30
    times = (1e3 * waited, 1e3 * seconds["exposed"]), (1e3 * step, 1e3 * seconds["step"])
    return dict(zip(COLUMNS, ((sent, sent), (held, held), *times), strict=True))


def rows():
    """(model, chip) -> options -> side -> (the case, its figures), where all of it was compiled."""
    found = {}
    for model, chip in ((model, chip) for model in MODELS for chip in CHIPS):
        path = KEPT / f"{model}_{chip.replace(':', '_')}.json"
        cases = json.loads(path.read_text()) if path.exists() else {}
        cases = {name: figures(one) for name, one in cases.items() if "problem" not in one}
        sides = {side: [name for name in names if name in cases] for side, names in CASES.items()}
        if all(len(names) > 1 for names in sides.values()):
            best = {side: min(names, key=lambda name: cases[name]["ms a step"][1]) for side, names in sides.items()}
            default = {side: names[0] for side, names in sides.items()}
            found[model, chip] = {
                what: {side: (name, cases[name]) for side, name in chosen.items()}
                for what, chosen in {DEFAULTS: default, BEST: best}.items()
            }
    return found


def written(column, figure):
    """A figure as text: of what is waited for also by bandwidth alone, where that differs."""
    digits = {"GB sent": ".1f", "GiB held": ".2f"}.get(column, ".1f" if figure[1] < 10 else ".0f")
    least, expected = (format(number, digits) for number in figure)
    return expected if least == expected or column != "ms waited" else f"{least}-{expected}"


def table():
    """The table of README: ``jit`` / ours in each cell."""
    lines = [["`jit` / `xlstm_jax`", "options", *COLUMNS], ["---", "---", *["---:"] * len(COLUMNS)]]
    for (model, chip), options in rows().items():
        for what, sides in options.items():
            named = f"{PARAMETERS[model]}, {CHIPS[chip].split()[-1]}" if what == DEFAULTS else ""
            lines.append([named, what, *(_cell(column, sides) for column in COLUMNS)])
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def _cell(column, sides):
    return " / ".join(written(column, sides[side][1][column]) for side in (JIT, OURS))


def draw(axes, column, found):
    """Bars of the best of each side, a point where it is with XLA's defaults."""
    for number, (side, color) in enumerate(COLORS.items()):
        places = [i + 0.4 * (number - 0.5) for i in range(len(found))]
        best, default = ([one[what][side][1][column] for one in found.values()] for what in (BEST, DEFAULTS))
        drawn = axes.bar(places, [expected for _, expected in best], 0.37, color=color, label=side.replace("`", ""))
        if column == "ms waited":
            ends = [[expected - least for least, expected in best], [0] * len(best)]
            axes.errorbar(places, [expected for _, expected in best], ends, fmt="none", ecolor=INK, lw=1, capsize=2)
        axes.plot(places, [expected for _, expected in default], "_", ms=16, mew=2, color="#f58518")
        axes.bar_label(drawn, [written(column, (one[1], one[1])) for one in best], fontsize=7, color=INK, padding=1)


def main(path=DOCS / "images" / "peers.png"):
    found = rows()
    names = [f"{PARAMETERS[model]}\n{CHIPS[chip].split()[-1]}" for model, chip in found]
    figure = Figure(figsize=(10.4, 5.2), dpi=100, layout="constrained")
    for axes, column in zip(figure.subplots(2, 2).flat, COLUMNS, strict=True):
        draw(axes, column, found)
        axes.margins(y=0.12)
        axes.set_xticks(range(len(names)), names)
        axes.set_title(TITLES.get(column, f"{column} in a step"), loc="left", fontsize=11, color=INK)
        axes.tick_params(colors=INK, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        axes.patch.set_alpha(0)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    labels = [f"{label}, with the best of options" for label in labels]
    handles.append(figure.axes[0].lines[0])
    where = {"loc": "outside lower center", "ncols": 3, "frameon": False, "labelcolor": INK}
    figure.legend(handles, [*labels, "with XLA's defaults"], **where)
    figure.patch.set_alpha(0)
    # The table stands in the file too, for the test that looks whether the picture is up to date.
    FigureCanvasAgg(figure).print_png(path, metadata={"Description": table()})


if __name__ == "__main__":
    main()
    print(table())

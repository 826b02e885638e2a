"""Draws ``images/peers.png``, and prints the table of README.md with the same numbers: ``python docs/draw_peers.py``.

The numbers come from the files of ``benchmarks/results/``. README is read where these are not, so it has them as text.
"""

import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
INK = "#808080"  # read on white and on black
COLORS = ("#9a9a9a", "#f58518", "#4c78a8")
# What README calls it: the case on TPUs, the case on GPUs. FSDP by hand was compiled without options.
PEERS = {
    "`jit` with shardings": ("jit, options", "jit, best options"),
    "FSDP by hand": ("flat", "flat"),
    "`xlstm_jax`": ("ours, options", "ours, best options"),
}
CHIPS = {"v5e:16x16": "256 TPU v5e", "v5p:4x4x8": "128 TPU v5p", "v6e:16x16": "256 TPU v6e"}
GPUS = {"h100:32x8": "256 H100"}


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def numbers():
    """By quantity and chip what each peer takes, as text; "" where it was not compiled."""
    traffic, memory = load("traffic/1.3B"), load("memory/1.3B")["topologies"]
    gpus = load("traffic/1.3B_gpus")
    sent = {
        name: [f"{traffic[chip]['cases'][tpu]['wire_bytes'] / 1e9:.1f}" for tpu, _ in PEERS.values()]
        for chip, name in CHIPS.items()
    }
    held = {
        name: [f"{memory[chip]['cases'][tpu]['bytes']['total'] / 2**30:.2f}" for tpu, _ in PEERS.values()]
        for chip, name in CHIPS.items()
    }
    waited = {
        name: [f"{1e3 * gpus[chip]['cases'][gpu]['exposed_seconds']:.0f}" for _, gpu in PEERS.values()]
        for chip, name in GPUS.items()
    }
    return {"GB sent": sent, "ms waited": waited, "GiB held": held}


def table():
    """The table of README."""
    lines = [["of a device, in a step", *PEERS], ["---", *["---:"] * len(PEERS)]]
    lines += [[f"{quantity}, {name}", *row] for quantity, rows in numbers().items() for name, row in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(path=DOCS / "images" / "peers.png"):
    found = numbers()
    figure = Figure(figsize=(10.4, 3), dpi=100, layout="constrained")
    widths = [len(rows) + 0.4 for rows in found.values()]
    for axes, (quantity, rows) in zip(figure.subplots(1, 3, width_ratios=widths), found.items(), strict=True):
        for number, (peer, color) in enumerate(zip(PEERS, COLORS, strict=True)):
            places = [i + 0.27 * (number - 1) for i in range(len(rows))]
            drawn = axes.bar(places, [float(row[number]) for row in rows.values()], 0.25, color=color)
            drawn.set_label(peer.replace("`", ""))
            axes.bar_label(drawn, [row[number] for row in rows.values()], fontsize=8, color=INK, padding=1)
        axes.margins(y=0.12)
        axes.set_xticks(range(len(rows)), [name.replace(" TPU ", "\n") for name in rows])
        axes.set_title(f"{quantity} in a step", loc="left", fontsize=11, color=INK)
        axes.tick_params(colors=INK, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK)
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    # The table stands in the file too, for the test that looks whether the picture is up to date.
    FigureCanvasAgg(figure).print_png(path, metadata={"Description": table()})


if __name__ == "__main__":
    main()
    print(table())

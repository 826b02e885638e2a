"""Draws ``images/layers.png`` from the order in ``tests/house/test_layers.py``: ``python docs/draw_layers.py``."""

import re
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
CAPTIONS = {
    "cli": "the command xlstm-jax",
    "forecast": "memory, traffic and time of any program on absent devices; its folder training imports the rest",
    "training": "initialisation, gradients, the ready step",
    "metrics": "reductions, states",
    "plan": "what is split, and bytes",
    "resilience": "watchdog, loop guard",
    "device_mesh": "meshes, batches",
    "checkpoint": "save, restore anywhere",
    "processes": "joining, failing together",
    "optimizers": "norms, clipping, states",
    "model_parallel": "split layers",
    "data_parallel": "the life of a parameter: boxes, gather, gradients, wrapped modules, collectives",
    "origins": "equations that made a traced value",
    "formatting": "numbers as text",
    "accelerators": "XLA options by chip",
    "equations": "of a traced program",
    "program_names": "scopes, axes",
    "introspection": "frames, closures",
    "explicit_axes": "types of arrays",
    "common_types": "a few type names",
    "deferred": "imports that wait",
    "private_names": "of JAX and Flax",
    "quiet_import": "CUDA plugin, silent",
}
CORE = "data_parallel"
WIDTH, HEIGHT, GAP = 10.0, 0.72, 0.14
FILL, FILL_CORE, INK, GREY = "#e3edf7", "#f2a65a", "#222222", "#666666"


def layers():
    """Returns the names of the folders, layer by layer, the lowest first."""
    source = (DOCS.parent / "tests" / "house" / "test_layers.py").read_text()
    order = re.search(r'^ORDER = """(.*?)"""', source, re.M | re.S)[1]
    return [[name.strip() for name in names.split(",")] for names in order.split("<")]


def main(path=DOCS / "images" / "layers.png"):
    rows = layers()
    figure = Figure(figsize=(8, 6.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(-0.55, WIDTH), ylim=(0, len(rows) * (HEIGHT + GAP)))
    axes.axis("off")
    for level, names in enumerate(rows):
        width = (WIDTH - GAP * len(names)) / len(names)
        size = 13 if len(names) < 5 else 10.5
        for i, name in enumerate(names):
            x, y = i * (width + GAP), level * (HEIGHT + GAP)
            color = FILL_CORE if name == CORE else FILL
            axes.add_patch(
                FancyBboxPatch((x, y), width, HEIGHT, boxstyle="round,pad=0,rounding_size=0.1", fc=color, ec="none")
            )
            axes.text(x + width / 2, y + 0.45, name, ha="center", va="center", fontsize=size, color=INK, weight="bold")
            axes.text(x + width / 2, y + 0.17, CAPTIONS[name], ha="center", va="center", fontsize=9.5, color=INK)
    top = len(rows) * (HEIGHT + GAP) - GAP
    axes.annotate("", (-0.2, 0), (-0.2, top), arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.5})
    axes.text(-0.4, top / 2, "imports only from below", rotation=90, ha="center", va="center", fontsize=11, color=GREY)
    # The order stands in the file too, for the test that looks whether the picture is up to date.
    FigureCanvasAgg(figure).print_png(path, metadata={"Description": str(rows)})


if __name__ == "__main__":
    main()

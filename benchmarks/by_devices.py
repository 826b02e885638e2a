"""Memory of a training step per device, against the number of devices: replicated, ``jit`` with shardings, FSDP.

    python -m benchmarks.by_devices            compiles what is not stored; a minute or two per step on one core
    python -m benchmarks.by_devices --redraw   draws the stored results, without compiling

The 1.3B model of ``large_models.py`` (1.44e9 parameters), one sequence of 2048 tokens per device, bfloat16 compute,
float32 AdamW, full remat in all cases, XLA's default options, compiled for TPU v5e. Bytes are read from the compiled
programs: arguments, temporaries, results and the program. No such chip has run them.

Writes ``<out>/1.3B.json`` and ``<out>/1.3B.png``. The letters are large enough for a picture 360 pixels wide.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import forecasts
from benchmarks.cases import CASES, REMAT, SIZES, Case
from benchmarks.forecasts import GIB, forecast_case, path_of, read
from benchmarks.report import ACCENT, STRONG, save
from xlstm_jax.forecast import parse_topology
from xlstm_jax.formatting import rich_table

SIZE = "1.3B"
COMPARED = {"replicated": Case("replicated", options=REMAT), "jit": CASES["jit"], "ours": CASES["ours"]}
TOPOLOGIES = ("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16")
OUT = Path(__file__).parent / "results" / "by_devices"
KEPT = ("program", "mesh", "bytes", "available_bytes", "versions")
GREY, LETTERS = "#5f5f5f", 15
WORDS: dict[str, Any] = {"fontsize": LETTERS}

Rows = dict[str, dict[str, dict[str, Any]]]  # topology -> case -> stored result


def gib(rows: Rows, case: str) -> dict[int, float]:
    """Returns GiB per device by number of devices."""
    found = {parse_topology(topology).num_devices: cases[case]["bytes"]["total"] for topology, cases in rows.items()}
    return {devices: total / GIB for devices, total in sorted(found.items())}


def compute(path: Path, size: str, topologies: Sequence[str], console: Console) -> Rows:
    """Compiles the cases that are stored neither here nor by ``forecasts``, and stores each of them immediately."""
    rows: Rows = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    for topology in topologies:
        kept = read(path_of(forecasts.OUT, size, topology))
        for name, case in COMPARED.items():
            with console.status(f"{size} on {topology}: {name}"):
                known = rows.setdefault(topology, {}).get(name, kept.get(name))
                result = forecast_case(SIZES[size], case, topology, known)
            rows[topology][name] = {key: result[key] for key in KEPT}
            path.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def draw(path: Path, rows: Rows) -> None:
    """Draws GiB per device against the number of devices, and the memory of a device as a dashed line."""
    figure = Figure(figsize=(6, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lines = (("replicated", GREY, "without: replicated"), ("ours", STRONG, "with xlstm_jax"))
    for case, color, label in lines:
        points = gib(rows, case)
        axes.plot(list(points), list(points.values()), color=color, lw=3, marker="o", ms=8, clip_on=False)
        for devices in (min(points), max(points)):
            text = f"{points[devices]:.1f}"
            axes.annotate(text, (devices, points[devices]), (0, 9), textcoords="offset points", ha="center", **WORDS)
        middle = sorted(points)[len(points) // 2]
        place: dict[str, Any] = {"xytext": (0, 10), "textcoords": "offset points", "ha": "left", "color": color}
        axes.annotate(label, (middle, points[middle]), **place, **WORDS)
    available = next(iter(next(iter(rows.values())).values()))["available_bytes"] / GIB
    axes.axhline(available, color=ACCENT, ls="--", lw=2)
    axes.annotate(
        f"a v5e chip has {available:.1f}", (max(points), available), (0, -8), textcoords="offset points",
        ha="right", va="top", color=ACCENT, **WORDS,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(points), [str(devices) for devices in points], fontsize=LETTERS)
    axes.tick_params(axis="y", labelsize=LETTERS)
    axes.minorticks_off()
    axes.set_xlim(min(points) / 1.5, max(points) * 1.5)
    axes.set_ylim(0, 1.18 * max(gib(rows, "replicated").values()))
    axes.set_xlabel("devices (TPU v5e)", fontsize=LETTERS)
    axes.set_title(
        "GiB per device, 1.44e9 parameters\n(predicted, no such chip has run it)", fontsize=LETTERS, loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def table(rows: Rows) -> Any:
    """Builds the table of GiB per device."""
    columns = {case: gib(rows, case) for case in COMPARED}
    lines = [[str(devices), *(f"{column[devices]:.2f}" for column in columns.values())] for devices in columns["ours"]]
    return rich_table("GiB per device", ["devices", *columns], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("by_devices", description="GiB per device against the number of devices.")
    parser.add_argument("--size", choices=SIZES, default=SIZE)
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), help="as v5e:2x2, v5e:16x16")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file and the picture")
    parser.add_argument("--redraw", action="store_true", help="compile nothing; table and picture of stored results")
    options = parser.parse_args(arguments)
    console, path = Console(), options.out / f"{options.size}.json"
    rows = json.loads(path.read_text()) if options.redraw else compute(path, options.size, options.topologies, console)
    console.print(table(rows))
    draw(path.with_suffix(".png"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

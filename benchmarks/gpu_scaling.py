"""How the time that a step waits for collectives grows from one host of 8 GPUs to 64 hosts: compiled for each number.

    python -m benchmarks.gpu_scaling                                1.3B on 8 to 512 H100
    python -m benchmarks.gpu_scaling --hosts 1 4 --sizes small --cases jit ours

Each GPU keeps its 2048 tokens. A step is compiled for each number of hosts; what its schedule waits for follows from
published figures (``forecasts``), with the latencies by which NCCL chooses its algorithm and without any: no GPU has
confirmed either. ``scaling`` has the bounds by formulas alone.
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
from benchmarks.cases import CASES, SIZES, names_in_words
from benchmarks.options import positive
from benchmarks.report import ACCENT, LETTERS, PAGE_DPI, PAGE_WIDTH, QUIET, STRONG, save
from xlstm_jax.forecast import parse_topology
from xlstm_jax.wording import format_bytes, rich_table

OUT = Path(__file__).parent / "results" / "scaling"
GPUS_PER_HOST = 8
HOSTS = (1, 2, 4, 8, 16, 32, 64)
COMPARED = ("jit", "jit, best options", "ours", "ours, best options")
COLORS = (QUIET, ACCENT, "#72b7b2", STRONG)


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """What of a kept forecast is about waiting, in seconds and bytes of a GPU and step."""
    return {
        "exposed_seconds": found["seconds"]["exposed"],
        "exposed_by_bandwidth_seconds": found["gpu_seconds"]["exposed by bandwidth"],
        "kernel_seconds": found["gpu_seconds"]["kernels"],
        "nic_bytes": found["network_bytes"]["nic"],
        "nvlink_bytes": found["network_bytes"]["nvlink"],
        "hidden_share": found["hidden_bytes"]["beside as long"] / found["wire_bytes"]["total"],
        "compiler_options": found["compiler_options"],
        "versions": found["versions"],
    }


def rows_of(results: dict[str, dict[str, Any]], cases: Sequence[str]) -> dict[str, dict[int, Any]]:
    """case -> number of GPUs -> row, from topology -> case -> what is kept."""
    rows: dict[str, dict[int, Any]] = {case: {} for case in cases}
    for topology, found in results.items():
        for case, one in forecasts.compiled(found).items():
            rows[case][gpus_of(topology)] = row_of(one)
    return rows


def gpus_of(topology: str) -> int:
    return parse_topology(topology).num_devices


def table(name: str, chip: str, case: str, rows: dict[int, Any]) -> Any:
    """Numbers of GPUs as rows."""
    cells = [
        [
            f"{gpus:,}",
            f"{1e3 * row['exposed_seconds']:,.1f}",
            f"{1e3 * row['exposed_by_bandwidth_seconds']:,.1f}",
            f"{1e3 * row['kernel_seconds']:,.1f}",
            f"{row['hidden_share']:.0%}",
            format_bytes(row["nic_bytes"]),
        ]
        for gpus, row in rows.items()
    ]
    title = f"{name} on {chip}, {case}: ms of a step, by rooflines"
    return rich_table(title, ["GPUs", "waited", "no latency", "kernels", "hidden", "per NIC"], cells)


def draw(path: Path, name: str, chip: str, rows: dict[str, dict[int, Any]]) -> None:
    """Time waited over the number of GPUs, with latency and without."""
    figure = Figure(figsize=(PAGE_WIDTH, 4.2), dpi=PAGE_DPI, layout="constrained")
    ways = {"with NCCL's latencies": "exposed_seconds", "by bandwidth alone": "exposed_by_bandwidth_seconds"}
    grid = figure.subplots(1, len(ways), squeeze=False)[0]
    for axes, (title, part) in zip(grid, ways.items(), strict=True):
        for (case, found), color in zip(rows.items(), COLORS, strict=False):
            axes.plot(
                list(found), [1e3 * row[part] for row in found.values()], color=color, lw=2, marker="o", label=case
            )
        _dress(axes, title, sorted({gpus for found in rows.values() for gpus in found}))
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=LETTERS)
    title = f"{name} on {chip}, 2048 tokens per GPU: waiting for collectives in a step"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    save(figure, path)


def _dress(axes: Any, title: str, gpus: Sequence[int]) -> None:
    axes.set_title(title, loc="left", fontsize=LETTERS)
    axes.set_xscale("log", base=2)
    axes.set_xticks(gpus, [f"{n:,}" for n in gpus])
    axes.set_ylim(0, None)
    axes.set_xlabel("GPUs", fontsize=LETTERS)
    axes.set_ylabel("ms", fontsize=LETTERS)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", lw=0.6)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("gpu_scaling", description="Time waited for collectives on 8 to 512 GPUs.")
    new.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.3B"], help="models (default: 1.3B)")
    new.add_argument("--chip", default="h100", help="default: h100")
    new.add_argument("--hosts", nargs="+", type=positive, default=list(HOSTS), help="of 8 GPUs each")
    new.add_argument("--cases", nargs="+", choices=CASES, default=list(COMPARED), help="see benchmarks/cases.py")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files and pictures")
    new.add_argument("--kept", type=Path, default=forecasts.OUT, help="folder in which forecasts are kept")
    new.add_argument("--redraw", action="store_true", help="compile nothing; tables and pictures of what is kept")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parser().parse_args(arguments), Console()
    options.topologies = [f"{options.chip}:{hosts}x{GPUS_PER_HOST}" for hosts in sorted(options.hosts)]
    try:
        found = forecasts.results(options, console)
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"gpu_scaling: error: {error}", highlight=False)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for name, topologies in found.items():
        rows = rows_of(topologies, options.cases)
        for case, numbers in rows.items():
            console.print(table(name, options.chip, case, numbers))
        path = options.out / f"{name}_{options.chip}_waiting.json"
        path.write_text(json.dumps(rows, indent=1) + "\n")
        draw(path.with_suffix(".png"), name, options.chip, rows)
    console.print(names_in_words(options.cases), f"{options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

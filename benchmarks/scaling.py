"""How a step scales from 8 to 4096 chips, by the formulas of ``limits`` alone: its time, what bounds it, FSDP or HSDP.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --sizes 7B --chips v5e h100 --batch-tokens 8388608

Nothing is compiled and nothing runs. A step takes at least the longest of its matrix products, its bytes of HBM, and
what it sends over the links inside a fast domain (a slice of TPUs, a node of GPUs) and over the network between
domains, all by published figures. Two ways to grow:

  weak     each chip keeps its tokens, the batch grows
  strong   the batch keeps its tokens, each chip gets fewer; where that is less than a sequence, sequences are shorter

Each with FSDP over all chips, and with the best HSDP: copies of any size that divides a domain and fits into memory.
HSDP takes over at the first number of chips from which on its step is at least 2 % shorter.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.console import Console
from rich.progress import track

from benchmarks.cases import SIZES, counts
from benchmarks.forecasts import installed_versions
from benchmarks.large_models import CONTEXT
from benchmarks.large_models import SIZES as LARGE_SIZES
from benchmarks.limits import NETWORKS, Bounds, Counts, Network, persistent_bytes, step_bounds, temporary_bytes
from benchmarks.options import positive
from benchmarks.report import LETTERS, PAGE_DPI, PAGE_WIDTH, save
from xlstm_jax.wording import rich_table

OUT = Path(__file__).parent / "results" / "scaling"
CHIPS = tuple(2**power for power in range(3, 13))
TOKENS_PER_CHIP = {"v5e": 2048, "v5p": 2048, "v6e": 2048, "h100": 16_384}
BATCH_TOKENS = 2**21
TAKES_OVER = 0.98
BOUNDS = {"compute": "#4c78a8", "memory": "#72b7b2", "links": "#f2a65a", "network": "#e45756"}


def scale(counts: Counts, network: Network, tokens: dict[int, float]) -> list[dict[str, Any]]:
    """A row for each number of chips; ``tokens`` on each of them by that number."""
    rows = []
    for chips, each in tokens.items():
        fsdp = step_bounds(counts, network, chips, each, _sequence(each))
        copies, hsdp = best_hybrid(counts, network, chips, each)
        told = {"fsdp": _told(fsdp), "fits": _fits(counts, network, chips, each)}
        told |= {"replicas": copies, "hsdp": hsdp and _told(hsdp)}
        rows.append({"chips": chips, "tokens_per_chip": each} | told)
    return rows


def _sequence(tokens: float) -> int:
    return int(min(CONTEXT, tokens))


def best_hybrid(counts: Counts, network: Network, chips: int, tokens: float) -> tuple[int | None, Bounds | None]:
    """The number of copies with the shortest step, of several the fewest; None where no copies fit."""
    domain = min(chips, network.domain)
    parts = [chips // 2**power for power in range(1, chips.bit_length())]
    fitting = [n for n in parts if domain % n == 0 and _fits(counts, network, n, tokens)]
    times = {
        chips // n: step_bounds(counts, network, chips, tokens, _sequence(tokens), replicas=chips // n) for n in fitting
    }
    best = min(times, key=lambda copies: times[copies].seconds, default=None)
    return best, times.get(best)


def _fits(counts: Counts, network: Network, parts: int, tokens: float) -> bool:
    taken = persistent_bytes(counts, parts) + temporary_bytes(counts, tokens)
    return taken <= network.chip.usable_hbm_bytes


def _told(bounds: Bounds) -> dict[str, Any]:
    return {"seconds": bounds.seconds, "bound": bounds.bound, "parts": asdict(bounds)}


def takes_over(rows: Sequence[dict[str, Any]]) -> int | None:
    """The number of chips from which on HSDP's step is shorter; None where it never is."""
    shorter = [bool(row["hsdp"]) and row["hsdp"]["seconds"] <= TAKES_OVER * row["fsdp"]["seconds"] for row in rows]
    return next((row["chips"] for i, row in enumerate(rows) if all(shorter[i:])), None)


def compute(sizes: Sequence[str], chips: Sequence[str], tokens: dict[str, int], batch: int) -> dict[str, Any]:
    """size -> chip -> "weak" and "strong" -> rows."""
    found: dict[str, Any] = {}
    for name in track(sizes, description="formulas", transient=True):
        for chip in chips:
            ways = {
                "weak": dict.fromkeys(CHIPS, float(tokens[chip])),
                "strong": {n: batch / n for n in CHIPS},
            }
            found.setdefault(name, {})[chip] = {
                way: scale(counts(SIZES[name]), NETWORKS[chip], each) for way, each in ways.items()
            }
    return found


# ----------------------------------------------------------------------------------------------------- tables, pictures


def table(name: str, chip: str, way: str, rows: Sequence[dict[str, Any]]) -> Any:
    """A row for each number of chips; first the ratio of HSDP's time to FSDP's."""
    at = takes_over(rows)
    title = f"{name} on {chip}, {way} scaling: HSDP takes over {f'from {at:,} chips on' if at else 'nowhere'}"
    columns = ["chips", "ratio", "FSDP", "bound by", "HSDP", "copies", "bound by", "tokens"]
    return rich_table(title, columns, [_row(row) for row in rows])


def _row(row: dict[str, Any]) -> list[str]:
    fsdp, hsdp = row["fsdp"], row["hsdp"]
    cells = [f"{row['chips']:,}", f"{hsdp['seconds'] / fsdp['seconds']:.2f}" if hsdp else ""]
    cells += [_milliseconds(fsdp["seconds"]), fsdp["bound"] if row["fits"] else "too large"]
    cells += [_milliseconds(hsdp["seconds"]), f"{row['replicas']:,}", hsdp["bound"]] if hsdp else ["", "", "too large"]
    return [*cells, f"{row['tokens_per_chip']:,.0f}"]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def draw(path: Path, name: str, chips: dict[str, Any]) -> None:
    """A column for each chip, a row for each way to grow: the bounds as lines, the step's time as the topmost."""
    figure = Figure(figsize=(PAGE_WIDTH, 6.4), dpi=PAGE_DPI, layout="constrained")
    grid = figure.subplots(2, len(chips), squeeze=False, sharex=True)
    for column, (chip, ways) in enumerate(chips.items()):
        for row, (way, rows) in enumerate(ways.items()):
            _draw_bounds(grid[row][column], chip, way, rows)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=LETTERS)
    figure.suptitle(f"{name}: the least time of a step, by formula", x=0.01, ha="left", fontweight="bold")
    save(figure, path)


def _draw_bounds(axes: Any, chip: str, way: str, rows: Sequence[dict[str, Any]]) -> None:
    x = [row["chips"] for row in rows]
    parts = {bound: [1e3 * row["fsdp"]["parts"][bound] for row in rows] for bound in BOUNDS}
    for bound, color in BOUNDS.items():
        axes.plot(x, [value or None for value in parts[bound]], color=color, lw=1.2, label=f"FSDP: {bound}")
    axes.plot(x, [1e3 * row["fsdp"]["seconds"] for row in rows], color="black", lw=2.2, label="FSDP: step")
    hybrid = [1e3 * row["hsdp"]["seconds"] if row["hsdp"] else None for row in rows]
    axes.plot(x, hybrid, color="#54a24b", lw=2, ls="--", label="HSDP: step")
    at = takes_over(rows)
    if at:
        axes.axvline(at, color="#54a24b", lw=0.8, ls=":")
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"HSDP from {at:,}", (at, 0.93), (-4, 0), fontsize=8, color="#54a24b", **place)
    batch = rows[0]["tokens_per_chip"] * rows[0]["chips"]
    tokens = (
        f"{rows[0]['tokens_per_chip']:,.0f} tokens per chip" if way == "weak" else f"{batch / 1e6:.3g}M tokens in all"
    )
    axes.set_title(f"{chip}: {tokens}", loc="left", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x[::3], [f"{n:,}" for n in x[::3]])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(min(min(filter(None, values)) for values in parts.values() if any(values)) / 2, None)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", lw=0.6)
    axes.set_xlabel("chips" if way == "strong" else "", fontsize=LETTERS)
    axes.set_ylabel("ms", fontsize=LETTERS)


# ----------------------------------------------------------------------------------------------------------------- runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("scaling", description="From 8 to 4096 chips, by formula.")
    large = list(LARGE_SIZES)
    new.add_argument("--sizes", nargs="+", choices=SIZES, default=large, help=f"models (default: {' '.join(large)})")
    new.add_argument("--chips", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="default: all")
    new.add_argument("--tokens-per-chip", type=positive, help="weak scaling (default: 2048; 16384 on GPUs)")
    new.add_argument("--batch-tokens", type=positive, default=BATCH_TOKENS, help="strong scaling (default: 2**21)")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files and pictures")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console = Console()
    tokens = {chip: options.tokens_per_chip or TOKENS_PER_CHIP[chip] for chip in options.chips}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, chips in compute(options.sizes, options.chips, tokens, options.batch_tokens).items():
        for chip, ways in chips.items():
            for way, rows in ways.items():
                console.print(table(name, chip, way, rows))
        told = {"versions": installed_versions(), "batch_tokens": options.batch_tokens, "chips": chips}
        (options.out / f"{name}.json").write_text(json.dumps(told, indent=1) + "\n")
        draw(options.out / f"{name}.png", name, chips)
    console.print(f"{options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Four models compared with ``jit`` on five clusters: step time, waiting time, bytes sent, memory, and targets.

    python -m benchmarks.peers                                   everything; hours of compilation, results are stored
    python -m benchmarks.peers --redraw                          tables and picture of stored results
    python -m benchmarks.peers --sizes decoder_small --topologies v5e:2x4 --out DIR --kept DIR
    python -m benchmarks.peers --sizes decoder_0.8B,layers=27,heads=18 --out DIR      a model with other dims

The models are the Transformer of the benchmarks, and three user models in plain Flax, sharded from outside: a decoder,
a mixture of experts, and a vision transformer with layers in a Python loop. Each side, ``jit`` and this library
("ours"), is compiled with XLA's defaults and with further XLA options, ``jit`` also in other layouts; the table shows
the variant with the least expected time. A ratio is a range, too: ``Range.over`` takes each set of assumptions for both
sides alike. Both sides use the same attention (under ``jit`` in ``shard_map``, as trainers call a kernel): cuDNN on
GPUs, JAX's flash attention on TPUs. The TPU kernel does not support the 196 patches of the vision transformer, so both
sides use XLA's attention for this model on TPUs.

The function ``figures`` extracts the values of both sides from the results of ``forecasts``:

  step_range        seconds of a step: least, expected, most, which ``benchmarks.ranges`` computes from the stored
                    results
  step_seconds      the expected one of the three; the sum of ``compute`` and ``waited``
  collectives       executions in a step
  wire_bytes        bytes that a device sends
  busiest_over_mean on a torus, bytes along the busiest axis over the mean of the axes; None for a mesh with one axis,
                    and for GPUs, whose two networks differ in speed
  total_bytes       memory of a device
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks import forecasts
from benchmarks.cases import CASES, SIZES
from benchmarks.forecasts import GIB, compiled
from benchmarks.ranges import as_dict, range_in, times_of
from benchmarks.report import save
from benchmarks.traffic import axis_loads
from xlstm_jax.forecast import TimeRatio, parse_topology
from xlstm_jax.formatting import rich_table

OUT = Path(__file__).parent / "results" / "peers"
MODELS = {
    "1.3B": "Transformer",
    "decoder_0.8B": "decoder",
    "mixture_0.5B": "mixture",
    "vit_L16": "ViT",
}
TOPOLOGIES = ("v5e:16x16", "v5p:4x4x8", "v6e:16x16", "h100:4x8", "h100:32x8")
SIDES = ("jit", "ours")
ON_TPUS = {
    "jit": ("jit", "jit, options", "jit, options, width", "jit, options, two dims"),
    "ours": (
        "ours",
        "ours, options",
        "ours, options, one axis",
        "ours, options, width, one axis",
        "ours, options, one axis, all-reduce",
        "ours, options, width, one axis, all-reduce",
    ),
}
ON_V5E = {
    "jit": (
        *ON_TPUS["jit"],
        "jit, more VMEM",
        "jit, options, more VMEM",
        "jit, width",
        "jit, width, more VMEM",
        "jit, options, width, more VMEM",
    ),
    "ours": (
        *ON_TPUS["ours"],
        "ours, more VMEM",
        "ours, options, more VMEM",
        "ours, options, one axis, more VMEM",
        "ours, width",
        "ours, width, more VMEM",
        "ours, width, one axis",
        "ours, width, one axis, more VMEM",
        "ours, options, width, one axis, more VMEM",
        "ours, options, one axis, all-reduce, more VMEM",
        "ours, width, one axis, all-reduce, more VMEM",
        "ours, options, width, one axis, all-reduce, more VMEM",
    ),
}
ON_GPUS = {
    "jit": (
        "jit, kernel",
        "jit, options, kernel",
        "jit, best options, kernel",
        "jit, best options, width, kernel",
        "jit, best options, two dims, kernel",
    ),
    "ours": tuple(
        f"{case}, kernel"
        for case in (
            "ours",
            "ours, best options",
            "ours, combined",
            "ours, one axis",
            "ours, one axis, combined",
        )
    ),
}
COLORS = {"jit": ("#6f6f6f", "#c8c8c8"), "ours": ("#1f4e79", "#8fb4d9")}  # (line, bar)
BEHIND = ("#a02c3a", "#e9a5ad")

Row = dict[str, Any]
Rows = dict[str, dict[str, dict[str, Row]]]  # model -> topology -> side -> its best case


def sides_of(model: str, topology: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the cases of each side."""
    place = parse_topology(topology)
    if forecasts.on_gpus(place):
        return ON_GPUS
    sides = ON_V5E if place.chip.name == "v5e" else ON_TPUS
    return {side: tuple(f"{case}{', kernel' * SIZES[model].causal}" for case in cases) for side, cases in sides.items()}


def figures(case: str, found: Mapping[str, Any], topology: str) -> Row:
    """Extracts the table values from a stored forecast: seconds and bytes per device and step."""
    times = times_of(found, topology)
    step, waited = times.step.expected, times.wait.expected
    loads = list(axis_loads(dict(found)).values())
    alike = len(loads) > 1 and "gpu_seconds" not in found
    return {
        "case": case,
        "step_seconds": step,
        "compute_seconds": step - waited,
        "waited_seconds": waited,
        **as_dict(times),
        "wire_bytes": found["wire_bytes"]["total"],
        "busiest_over_mean": float(max(loads) / np.mean(loads)) if alike else None,
        "total_bytes": found["bytes"]["total"],
        "versions": found["versions"],
    }


def rows_of(results: forecasts.Results) -> Rows:
    """Selects the case with the least expected step time per side; skips pairs in which a side has no case."""
    rows: Rows = {}
    for model, topologies in results.items():
        for topology, found in topologies.items():
            there = compiled(found)
            sides = {
                side: [figures(case, there[case], topology) for case in names if case in there]
                for side, names in sides_of(model, topology).items()
            }
            if all(sides.values()):
                best = {side: min(cases, key=lambda row: row["step_seconds"]) for side, cases in sides.items()}
                rows.setdefault(model, {})[topology] = best
    return rows


# ------------------------------------------------------------------------------------------------------------- targets

WAITS = 0.15  # fraction of the step that ``jit`` waits, above which a faster step is expected
TARGETS = {
    "step": "step time at most jit's",
    "step, least": "least step time at most jit's least step time",
    "step, most": "largest step time at most jit's largest step time",
    "step, where jit waits": f"step time at most 0.9 of jit's if jit waits more than {WAITS:.0%} of its step",
    "waited": "waiting time at most half of jit's, summed over rows",
    "busiest axis": "busiest axis of a torus at most 1.05 of the mean",
    "memory": "memory at most 1.02 of jit's",
}


def ratio(pair: Mapping[str, Row], what: str) -> float:
    """Returns the value of this library relative to ``jit``; 1 if both are 0, infinity if only ``jit`` is 0."""
    ours, jit = pair["ours"][what], pair["jit"][what]
    return ours / jit if jit else 1.0 if ours == jit else float("inf")


def ratios(pair: Mapping[str, Row]) -> TimeRatio:
    """Returns the step time of this library relative to ``jit`` as a range, under equal assumptions."""
    return range_in(pair["ours"]).over(range_in(pair["jit"]))


def checks(pair: Mapping[str, Row]) -> dict[str, tuple[float, float]]:
    """Returns (value, limit) by target for a model on a cluster; ``judged`` adds the target of waiting."""
    step = ratio(pair, "step_seconds")
    least, _, most = (ours / jit for ours, jit in zip(*(range_in(pair[side]) for side in reversed(SIDES)), strict=True))
    found = {"step": (step, 1.0), "step, least": (least, 1.0), "step, most": (most, 1.0)}
    found["memory"] = ratio(pair, "total_bytes"), 1.02
    if pair["jit"]["waited_seconds"] > WAITS * pair["jit"]["step_seconds"]:
        found["step, where jit waits"] = step, 0.9
    if pair["ours"]["busiest_over_mean"] is not None:
        found["busiest axis"] = pair["ours"]["busiest_over_mean"], 1.05
    return found


def judged(rows: Rows) -> dict[str, dict[str, Any]]:
    """Counts, for each target, how many pairs meet the target, and lists the ratios of the remaining pairs."""
    found: dict[str, dict[str, Any]] = {
        target: {"asked": text, "met": 0, "of": 0, "missed": {}} for target, text in TARGETS.items()
    }
    pairs = [(model, topology, pair) for model, there in rows.items() for topology, pair in there.items()]
    for model, topology, pair in pairs:
        for target, (value, limit) in checks(pair).items():
            one, met = found[target], round(value, 3) <= limit
            one["of"] += 1
            one["met"] += met
            if not met:
                one["missed"][f"{model} on {topology}"] = round(value, 3)
    # `fsum` is exact in every Python release; `sum` of floats only since 3.12.
    ours, jit = (math.fsum(pair[side]["waited_seconds"] for *_, pair in pairs) for side in ("ours", "jit"))
    found["waited"] |= {"of": 1, "met": int(ours <= 0.5 * jit), "in all": ours / jit if jit else 0.0}
    return found


# ----------------------------------------------------------------------------------------------------- tables, pictures

COLUMNS = (
    "chips",
    "ms/step",
    "least",
    "most",
    "ratio, lowest to highest",
    "waiting ms",
    "zero-fills ms",
    "collectives",
    "GB sent",
    "busiest axis",
    "peak GiB",
    "memory ratio",
    "options",
)


def cells(topology: str, pair: Mapping[str, Row]) -> list[str]:
    """Formats a row of the table: ``jit`` / ours, and the ratio of ours to ``jit``."""

    def both(what: str, unit: float, digits: str) -> str:
        return " / ".join(format(pair[side][what] / unit, digits) for side in SIDES)

    def ends(end: str) -> str:
        return " / ".join(f"{getattr(range_in(pair[side]), end) * 1e3:.1f}" for side in SIDES)

    busiest = pair["ours"]["busiest_over_mean"]
    return [
        topology,
        both("step_seconds", 1e-3, ".1f"),
        ends("least"),
        ends("most"),
        str(ratios(pair)),
        both("waited_seconds", 1e-3, ".1f"),
        " / ".join(_zero_fills(pair[side]) for side in SIDES),
        both("collectives", 1, ",.0f"),
        both("wire_bytes", 1e9, ".1f"),
        "" if busiest is None else f"{busiest:.2f}",
        both("total_bytes", GIB, ".2f"),
        f"{ratio(pair, 'total_bytes'):.2f}",
        " / ".join(_options(pair[side]["case"]) for side in SIDES),
    ]


def _zero_fills(row: Row) -> str:
    """Formats the time of zero-fills that the expected time leaves out; "?" where the program's text was not read."""
    seconds = row["zero_fill_seconds"]
    return "?" if seconds is None else f"{seconds * 1e3:.1f}"


def _options(case: str) -> str:
    """Returns the words of a case name without the side and "kernel"; "defaults" if no word is left."""
    return ", ".join(word for word in case.split(", ") if word not in (*SIDES, "kernel")) or "defaults"


def tables(rows: Rows) -> Iterator[Any]:
    """Yields a table for each model, then the table of the targets."""
    for model, there in rows.items():
        title = f"{MODELS.get(model, model)} ({model}), jit / ours"
        yield rich_table(title, list(COLUMNS), [cells(topology, pair) for topology, pair in there.items()])
    yield rich_table("targets", ["target", "met", "missed by"], [list(row) for row in _of_targets(rows)])


def _of_targets(rows: Rows) -> Iterator[tuple[str, str, str]]:
    for one in judged(rows).values():
        in_all = f"{one['in all']:.2f}" if "in all" in one else ""
        missed = ", ".join(f"{where} {value:.3f}" for where, value in one["missed"].items())
        yield one["asked"], f"{one['met']} of {one['of']}", in_all or missed


def markdown(rows: Rows) -> str:
    """Formats the models as a Markdown table."""
    lines = [["model", *COLUMNS], ["---"] * 2 + ["---:"] * (len(COLUMNS) - 1)]
    for model, there in rows.items():
        named = [MODELS.get(model, model)] + [""] * len(there)
        for name, item in zip(named, there.items(), strict=False):
            lines.append([name, *cells(*item)])
    return _as_table(lines)


def markdown_of_targets(rows: Rows) -> str:
    """Formats the targets as a Markdown table."""
    heads = [
        'target ("step time" is the expected time)',
        "rows that meet the target",
        "rows that miss the target, with their ratio",
    ]
    return _as_table([heads, ["---"] * 3, *map(list, _of_targets(rows))])


def _as_table(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


PAGE = Path(__file__).parent / "README.md"


def of_pages(rows: Rows) -> Iterator[tuple[Path, str]]:
    """Yields the page that contains result tables, with each table."""
    yield PAGE, markdown(rows)
    yield PAGE, markdown_of_targets(rows)


def write_pages(rows: Rows) -> None:
    """Replaces the tables on the pages, found by their first two columns."""
    for page, table in of_pages(rows):
        columns = " | ".join(table.split(" | ")[:2])
        before, there, rest = page.read_text().partition(columns)
        if not there:
            raise ValueError(f"{page} has no table that begins with {columns!r}.")
        after = rest.partition("\n\n")[2]
        page.write_text(f"{before}{table}\n{after}")


# Inches, inches, points, dots per inch: readable where a telephone shows the picture at 360 pixels.
WIDTH, ROW, TEXT, DPI = 6.0, 0.27, 12, 135


def draw(path: Path, rows: Rows) -> None:
    """Draws the ratio to ``jit`` for each model and cluster: step time as a bar from lowest to highest, and memory."""
    pairs = [(model, topology, pair) for model, there in rows.items() for topology, pair in there.items()]
    figure = Figure(figsize=(WIDTH, 1.35 + ROW * (len(pairs) + len(rows))), dpi=DPI, layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    places, ticks, place = [], [], 0
    for model in rows:
        ticks.append((place, MODELS.get(model, model), True))
        for topology in rows[model]:
            place += 1
            places.append(place)
            ticks.append((place, topology, False))
        place += 1
    for at, (_, _, pair) in zip(places, pairs, strict=True):
        lowest, expected, highest = ratios(pair)
        ahead = COLORS["ours"] if highest <= 1 else COLORS["jit"] if lowest <= 1 else BEHIND
        time.barh(at, max(highest - lowest, 0.004), 0.62, left=lowest, color=ahead[1])
        time.plot([expected, expected], [at - 0.36, at + 0.36], color=ahead[0], lw=2.5)
        memory.barh(at, ratio(pair, "total_bytes"), 0.62, color=COLORS["ours"][1])
        memory.annotate(f"{ratio(pair, 'total_bytes'):.2f}", (0.03, at), va="center", fontsize=TEXT - 2)
    low, high = time.get_xlim()
    time.set_xlim(low - 0.02, high)
    for axes, title in ((time, "time of a step, jit = 1"), (memory, "memory, jit = 1")):
        axes.axvline(1, color="black", lw=1)
        axes.set_title(title, fontsize=TEXT, loc="left")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=TEXT - 1, left=False)
    time.set_yticks([at for at, _, _ in ticks], [name for _, name, _ in ticks])
    for label, (_, _, bold) in zip(time.get_yticklabels(), ticks, strict=True):
        label.set_fontweight("bold" if bold else "normal")
    time.invert_yaxis()
    words = "Bar: from the lowest to the highest ratio under three\nsets of assumptions; line: expected. "
    words += "Blue: at most 1\nunder all, grey: under some, red: under none."
    figure.supxlabel(words, fontsize=TEXT - 1, x=0.02, ha="left")
    save(figure, path)


# ----------------------------------------------------------------------------------------------------------------- runs


def size_named(name: str) -> str:
    """Parses a model name, optionally with changed dims, ``decoder_0.8B,layers=27,heads=18``; adds it to ``SIZES``."""
    known, *changes = name.split(",")
    if known not in SIZES:
        raise argparse.ArgumentTypeError(f"{known!r} is none of {', '.join(SIZES)}.")
    dims = [field.name for field in dataclasses.fields(SIZES[known]) if field.name != "block"]
    pairs = [change.split("=") for change in changes]
    if wrong := [pair for pair in pairs if len(pair) != 2 or pair[0] not in dims or not pair[1].isdecimal()]:
        raise argparse.ArgumentTypeError(f"{'='.join(wrong[0])!r} is no dim with its size; {known} has {dims}.")
    if pairs:
        SIZES[name] = dataclasses.replace(SIZES[known], **{dim: int(size) for dim, size in pairs})
    return name


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("peers", description="Four models beside jit on five clusters.")
    what = "models (default: the four); with other dims: decoder_0.8B,layers=27,heads=18"
    new.add_argument("--sizes", nargs="+", type=size_named, default=list(MODELS), help=what)
    new.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), help="as v5e:16x16, h100:32x8")
    new.add_argument("--cases", nargs="+", choices=CASES, help="only these of each side's cases")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file and the picture")
    new.add_argument("--kept", type=Path, default=forecasts.OUT, help="folder in which forecasts are kept")
    new.add_argument("--redraw", action="store_true", help="compile nothing; tables and picture of what is kept")
    return new


def gathered(options: argparse.Namespace, console: Console) -> forecasts.Results:
    """Returns the forecasts of both sides by model and cluster; compiles missing forecasts."""
    found: forecasts.Results = {name: {} for name in options.sizes}
    for model, topology in itertools.product(options.sizes, options.topologies):
        cases = [case for names in sides_of(model, topology).values() for case in names]
        cases = [case for case in cases if not options.cases or case in options.cases]
        one = argparse.Namespace(**vars(options) | {"sizes": [model], "topologies": [topology], "cases": cases})
        found[model] |= forecasts.results(one, console)[model]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parser().parse_args(arguments), Console()
    try:
        rows = rows_of(gathered(options, console))
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"peers: error: {error}", highlight=False)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for table in tables(rows):
        console.print(table)
    path = options.out / "peers.json"
    path.write_text(json.dumps({"models": rows, "targets": judged(rows)}, indent=1) + "\n")
    if rows:
        draw(path.with_suffix(".png"), rows)
    if options.out == OUT:
        write_pages(rows)
    console.print(f"{options.out}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

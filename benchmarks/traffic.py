"""Bytes that a training step sends, for cases compiled for TPUs or GPUs, compared with the lower limit of FSDP.

    python -m benchmarks.traffic                                 1.3B on three topologies, all cases
    python -m benchmarks.traffic --topologies h100:32x8          GPUs, their cases: two networks, what is hidden
    python -m benchmarks.traffic --sizes small --topologies v5e:4x4 --cases jit flat ours --detail ours

Writes ``<out>/<size>.json`` and ``<out>/<size>.png`` for each model. The values are read from the scheduled program
(``forecasts``): kind, dtype and mesh axes of each collective, the number of executions including loops, the bytes that
each device sends by the ring algorithm, and whether the collective is asynchronous. ``cost_analysis()`` is not used,
because it counts the body of a loop once.

  limit          ``limits.wire_bytes`` in bfloat16: blocks gathered twice, gradients scattered once
  all-reduced    fraction of bytes sent by all-reduces: beyond small parameters and replicas, an all-reduce replaces a
                 gather or a scatter, and sends twice the bytes
  per NIC        GPUs only: bytes that each network adapter sends to other hosts
  hidden         GPUs only: fraction of bytes beside matrix products that take as long by rooflines; beside: any product
  waited         GPUs only: time that the schedule waits for collectives, with NCCL's latencies
  busiest axis   bytes that each device sends along the mesh axis with the most bytes; a collective over several axes
                 counts in equal parts for each axis. Empty for a mesh with a single axis.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import forecasts
from benchmarks.cases import CASES, ON_GPUS, ON_TPUS, SIZES, counts, limit, names_in_words
from benchmarks.forecasts import GIB, compiled, drawn
from benchmarks.limits import crossing_bytes
from benchmarks.options import add_forecast_options, complete
from benchmarks.report import ACCENT, QUIET, STRONG, clean, number, panels, ratio
from xlstm_jax.forecast import parse_topology
from xlstm_jax.formatting import format_bytes, rich_table

MODELS = ("1.3B",)
TOPOLOGIES = ("v5e:16x16", "v5p:4x4x8", "v6e:16x16")
OUT = Path(__file__).parent / "results" / "traffic"
OTHERS = ("jit", "jit, options", "flat", "flat, HSDP")
UNROTATED = "ours, one order"
KINDS = {"all-gather": "#5b9bd5", "reduce-scatter": "#1f4e79", "all-reduce": "#d1495b", "other": "#b9b9b9"}


def measured(name: str, topology: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Extracts traffic and ratios from the stored forecasts: by case, in bytes per device and step."""
    least = limit(SIZES[name], parse_topology(topology).num_devices)
    there = compiled(cases)
    rows = {
        case: _of_case(found, there, least.total) | _of_gpus(found, name, topology) for case, found in there.items()
    }
    problems = {case: {"problem": found["problem"]} for case, found in cases.items() if "problem" in found}
    return {"limit_bytes": vars(least) | {"total": least.total}, "cases": rows | problems}


def _of_case(found: dict[str, Any], cases: dict[str, Any], least: float) -> dict[str, Any]:
    total = found["wire_bytes"]["total"]
    others = {other: cases[other]["wire_bytes"]["total"] for other in OTHERS if other in cases}
    loads = axis_loads(found)
    unrotated = axis_loads(cases[UNROTATED]) if UNROTATED in cases else {}
    same_mesh = unrotated.keys() == loads.keys()
    return {
        "ratios": {f"sent over {other}": total / theirs for other, theirs in others.items()}
        | {"sent over the limit": total / least}
        | ({"busiest axis over one order": max(loads.values()) / max(unrotated.values())} if same_mesh else {}),
        "wire_bytes": total,
        "asynchronous_share": found["wire_bytes"]["asynchronous"] / total if total else 0.0,
        "all_reduced_share": all_reduced_share(found),
        "wire_bytes_by_axis": loads,
        "executions": sum(one["executions"] for one in found["collectives"]),
        "collectives": found["collectives"],
        "compiler_options": found["compiler_options"],
        "versions": found["versions"],
    }


def _of_gpus(found: dict[str, Any], name: str, topology: str) -> dict[str, Any]:
    """Returns the values of networks, overlap and waiting for GPUs; {} for TPUs."""
    if "network_bytes" not in found:
        return {}
    total, nic = found["wire_bytes"]["total"], found["network_bytes"]["nic"]
    least = crossing_bytes(counts(SIZES[name]), *parse_topology(topology).shape)
    return {
        "nic_bytes": nic,
        "nic_over_the_least": nic / least if least else None,
        "hidden_share": found["hidden_bytes"]["beside as long"] / total,
        "beside_share": found["hidden_bytes"]["beside any"] / total,
        "exposed_seconds": found["seconds"]["exposed"],
        "exposed_by_bandwidth_seconds": found["gpu_seconds"]["exposed by bandwidth"],
        "kernel_seconds": found["gpu_seconds"]["kernels"],
        "collectives_per_layer": found["collectives_per_layer"],
        "compile_seconds": found["compile_seconds"],
    }


def axis_loads(found: dict[str, Any]) -> dict[str, float]:
    """Returns the bytes that each device sends along each mesh axis."""
    loads = dict.fromkeys(found["mesh"], 0.0)
    for one in found["collectives"]:
        over = loads if one["axes"] is None else one["axes"]
        for axis in over:
            loads[axis] += one["wire_bytes"] / len(over)
    return loads


def all_reduced_share(found: dict[str, Any]) -> float:
    """Returns the fraction of bytes sent by all-reduces."""
    total = found["wire_bytes"]["total"]
    reduced = sum(one["wire_bytes"] for one in found["collectives"] if one["kind"] == "all-reduce")
    return reduced / total if total else 0.0


def by_kind(found: dict[str, Any]) -> dict[str, float]:
    """Sums the bytes sent by kind of collective, with rare kinds as "other"."""
    sums = dict.fromkeys(KINDS, 0.0)
    for one in found["collectives"]:
        sums[one["kind"] if one["kind"] in sums else "other"] += one["wire_bytes"]
    return sums


def by_dtype(found: dict[str, Any]) -> dict[str, float]:
    """Sums the bytes sent by dtype, largest first."""
    sums: dict[str, float] = defaultdict(float)
    for one in found["collectives"]:
        sums[one["dtype"]] += one["wire_bytes"]
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


# ----------------------------------------------------------------------------------------------------- tables, pictures


def table(name: str, topology: str, found: dict[str, Any]) -> Any:
    """Builds the table of a topology, with ratios in the first columns."""
    columns = ["case", "of jit", "of flat", "of limit", "sent", "async", "all-reduced", "busiest axis"]
    title = f"{name} on {topology}: sent per device and step; limit {format_bytes(found['limit_bytes']['total'])}"
    return rich_table(title, columns, [_row(*item) for item in found["cases"].items()], right=1)


def _row(case: str, found: dict[str, Any]) -> list[str]:
    if "problem" in found:
        return [case, *[""] * 6, found["problem"]]
    ratios = [found["ratios"].get(f"sent over {other}") for other in ("jit", "flat", "the limit")]
    loads = found["wire_bytes_by_axis"]
    return [
        case,
        *("" if value is None else f"{value:.2f}" for value in ratios),
        format_bytes(found["wire_bytes"]),
        f"{found['asynchronous_share']:.0%}",
        f"{found['all_reduced_share']:.1%}",
        format_bytes(max(loads.values())) if len(loads) > 1 else "",
    ]


def gpu_tables(name: str, topology: str, found: dict[str, Any]) -> tuple[Any, Any]:
    """Builds two tables: traffic between hosts and collectives per layer; hidden bytes and waiting time."""
    there = compiled(found["cases"])
    networks = [
        [
            case,
            "" if one["nic_over_the_least"] is None else f"{one['nic_over_the_least']:.2f}",
            format_bytes(one["nic_bytes"]),
            *(str(number) for number in one["collectives_per_layer"].values()),
            f"{one['compile_seconds']:.0f} s",
        ]
        for case, one in there.items()
    ]
    jit = there["jit"]["exposed_seconds"] if "jit" in there else None
    hidden = [
        [
            case,
            ratio(one["exposed_seconds"], jit),
            *(f"{one[f'{share}_share']:.0%}" for share in ("hidden", "beside")),
            *(
                f"{1e3 * one[part]:,.1f}"
                for part in ("exposed_seconds", "exposed_by_bandwidth_seconds", "kernel_seconds")
            ),
        ]
        for case, one in there.items()
    ]
    where = f"{name} on {topology}"
    titles = f"{where}: between hosts; collectives in a layer", f"{where}: bytes hidden, and ms waited; by rooflines"
    return (
        rich_table(titles[0], ["case", "of least", "per NIC", "forward", "backward", "compiled"], networks),
        rich_table(titles[1], ["case", "of jit", "hidden", "beside", "waited", "no latency", "kernels"], hidden),
    )


def detail_table(name: str, topology: str, case: str, found: dict[str, Any]) -> Any:
    """Builds the table of the collectives of a case."""
    rows = [
        [
            one["kind"] + (f" (for {one['stands_for']})" if one["stands_for"] else ""),
            one["direction"],
            "?" if one["axes"] is None else "+".join(one["axes"]),
            one["dtype"],
            "yes" if one["asynchronous"] else "no",
            f"{one['executions']:,}",
            format_bytes(one["wire_bytes"]),
        ]
        for one in found["collectives"]
    ]
    columns = ["collective", "direction", "axes", "dtype", "async", "executed", "sent"]
    return rich_table(f"{name} on {topology}: {case}", columns, rows, left=3)


def draw(path: Path, name: str, topologies: dict[str, Any]) -> None:
    """Draws bytes by kind with the limit, and the asynchronous fraction, for each topology."""
    there = drawn({topology: found["cases"] for topology, found in topologies.items()})
    names = list(next(iter(there.values())))
    if not names:
        return  # no case exists for every topology; the tables show the existing cases
    limits = {topology: found["limit_bytes"]["total"] / GIB for topology, found in topologies.items()}
    blocks = {
        "GiB, and in units of the limit": {
            topology: partial(_draw_kinds, cases=cases, least=limits[topology]) for topology, cases in there.items()
        },
    }
    on_gpus = all("nic_bytes" in found for cases in there.values() for found in cases.values())
    more = GPU_PLOTS if on_gpus else {"how much of it while the schedule goes on, %": _draw_asynchronous}
    blocks |= {
        what: {topology: partial(one, cases=cases) for topology, cases in there.items()} for what, one in more.items()
    }
    panels(path, f"{name}: what each device sends in a step", names_in_words(names), len(names), blocks)


def _draw_kinds(axes: Any, cases: dict[str, Any], least: float) -> None:
    left = np.zeros(len(cases))
    for kind, color in KINDS.items():
        widths = np.array([by_kind(found)[kind] / GIB for found in cases.values()])
        axes.barh(list(cases), widths, left=left, color=color, label=kind)
        left += widths
    axes.axvline(least, color="black", linestyle="--", linewidth=1, label="limit")
    for place, (total, found) in enumerate(zip(left, cases.values(), strict=True)):
        number(axes, place, total, f"{total:.3g} = {found['ratios']['sent over the limit']:.2f} ×")
    clean(axes, 1.6 * max(left))


def _draw_overlap(axes: Any, cases: dict[str, Any]) -> None:
    """Draws the fractions for GPUs: hidden by rooflines, beside shorter products, beside no matrix product."""
    shares = [
        (100 * found["hidden_share"], 100 * max(found["hidden_share"], found["beside_share"]))
        for found in cases.values()
    ]
    hidden, beside = (np.array(values) for values in zip(*shares, strict=True))
    axes.barh(list(cases), hidden, color=STRONG, label="beside products as long")
    axes.barh(list(cases), beside - hidden, left=hidden, color=QUIET, label="beside shorter ones")
    axes.barh(list(cases), 100 - beside, left=beside, color=ACCENT, alpha=0.35, label="beside none")
    for place, share in enumerate(hidden):
        number(axes, place, 100, f"{share:.0f}")
    clean(axes, 116)


def _draw_waiting(axes: Any, cases: dict[str, Any]) -> None:
    waited = np.array([1e3 * found["exposed_seconds"] for found in cases.values()])
    by_bytes = np.array([1e3 * found["exposed_by_bandwidth_seconds"] for found in cases.values()])
    axes.barh(list(cases), by_bytes, color=ACCENT, label="for bytes")
    axes.barh(list(cases), waited - by_bytes, left=by_bytes, color=QUIET, label="for latency")
    for place, value in enumerate(waited):
        number(axes, place, value, f"{value:.3g}")
    clean(axes, 1.3 * max(waited))


def _draw_asynchronous(axes: Any, cases: dict[str, Any]) -> None:
    shares = np.array([100 * found["asynchronous_share"] for found in cases.values()])
    axes.barh(list(cases), shares, color="#5b9bd5", label="asynchronous")
    axes.barh(list(cases), 100 - shares, left=shares, color=ACCENT, alpha=0.35, label="waited for")
    for place, share in enumerate(shares):
        number(axes, place, 100, f"{share:.0f}")
    clean(axes, 116)


GPU_PLOTS = {
    "beside matrix products that take as long, %": _draw_overlap,
    "waited for in a step, ms by rooflines": _draw_waiting,
}


# ----------------------------------------------------------------------------------------------------------------- runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("traffic", description="What a step sends, for every case.")
    options = {"sizes": SIZES, "models": MODELS, "topologies": TOPOLOGIES, "cases": CASES}
    add_forecast_options(new, **options, out=OUT, kept=forecasts.OUT)
    new.add_argument("--detail", nargs="*", choices=CASES, default=[], help="cases whose collectives are listed")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console, start = Console(), time.monotonic()
    try:
        options = complete(options, ON_TPUS, ON_GPUS)
        found = forecasts.results(options, console)
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"traffic: error: {error}", highlight=False)
        return 2
    for name, topologies in found.items():
        rows = {topology: measured(name, topology, cases) for topology, cases in topologies.items()}
        write(options.out, name, options.suffix, rows, options.detail, console)
    console.print(f"{options.out}, after {time.monotonic() - start:.0f} s", highlight=False)
    return 0


def write(
    out: Path, name: str, suffix: str, topologies: dict[str, Any], detail: Sequence[str], console: Console
) -> None:
    """Prints the tables, and writes the JSON and the picture to the folder."""
    for topology, found in topologies.items():
        console.print(table(name, topology, found))
        if any("nic_bytes" in case for case in found["cases"].values()):
            console.print(*gpu_tables(name, topology, found))
        for case in (case for case in detail if case in compiled(found["cases"])):
            console.print(detail_table(name, topology, case, found["cases"][case]))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}{suffix}.json").write_text(json.dumps(topologies, indent=1) + "\n")
    if topologies:
        draw(out / f"{name}{suffix}.png", name, topologies)


if __name__ == "__main__":
    sys.exit(main())

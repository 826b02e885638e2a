"""Memory per device of a training step, by phase, for cases compiled for TPUs or GPUs, compared with a floor.

    python -m benchmarks.memory                                  1.3B on three topologies, all cases
    python -m benchmarks.memory --sizes small --topologies v5e:2x4 --cases jit flat ours
    python -m benchmarks.memory --topologies h100:32x8           GPUs, their cases
    python -m benchmarks.memory --devices --sizes small          also measured on the local accelerators

Writes, for each model, ``<out>/<size>.json`` and ``<out>/<size>.png`` with one row of plots per topology. The values
are read from XLA's buffer assignment and live ranges (``forecasts``):

  arguments     parameters, optimizer state, batch; outputs reuse their memory
  temporaries   size of the allocation of temporaries, and peak use in the forward pass, the backward pass and the
                optimizer

The floor is the formula of ``limits.temporary_bytes``: with full remat, weights and gradients of one part at a time, in
bfloat16. Cases that keep activations are compared with the same floor.

On accelerators every case runs two steps in a separate process, because the peak cannot be reset.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from benchmarks import forecasts
from benchmarks.cases import CASES, ON_GPUS, ON_TPUS, SIZES, build, counts, device_shape, names_in_words
from benchmarks.forecasts import GIB, compiled, drawn, installed_versions
from benchmarks.limits import persistent_bytes, temporary_bytes
from benchmarks.options import add_forecast_options, complete
from benchmarks.report import ACCENT, clean, number, number_within, panels, ratio
from xlstm_jax.forecast import parse_topology
from xlstm_jax.formatting import format_bytes, rich_table

MODELS = ("1.3B",)
TOPOLOGIES = ("v5e:16x16", "v5p:4x4x8", "v6e:16x16")
OUT = Path(__file__).parent / "results" / "memory"
PHASES = {"forward": "#5b9bd5", "backward": "#e45756", "optimizer": "#9d9da1"}
CHILD_TIMEOUT_S = 1200
NO_COUNT = "the devices at hand, {kind}, do not count their memory; this needs GPUs or TPUs."


def measured(name: str, topology: str, cases: dict[str, Any]) -> dict[str, Any]:
    """Extracts memory and ratios from the stored forecasts: by case, in bytes per device."""
    size, devices = SIZES[name], parse_topology(topology).num_devices
    tokens = next((found["tokens_per_device"] for found in compiled(cases).values()), 0)
    floor = temporary_bytes(counts(size), tokens)
    rows = {case: _of_case(found, compiled(cases), floor) for case, found in compiled(cases).items()}
    problems = {case: {"problem": found["problem"]} for case, found in cases.items() if "problem" in found}
    least = {"temporaries": floor, "arguments": persistent_bytes(counts(size), devices)}
    return {"limit_bytes": least, "cases": rows | problems}


def _of_case(found: dict[str, Any], cases: dict[str, Any], floor: float) -> dict[str, Any]:
    total = found["bytes"]["total"]
    others = {other: cases[other]["bytes"]["total"] for other in ("jit", "jit, options", "flat") if other in cases}
    return {
        "ratios": {f"total over {other}": total / theirs for other, theirs in others.items()}
        | {"temporaries over the floor": found["bytes"]["temporaries"] / floor},
        "bytes": found["bytes"],
        "live_temporary_bytes": found["live_temporary_bytes"],
        "fits": found["fits"],
        "available_bytes": found["available_bytes"],
        "versions": found["versions"],
    }


# ------------------------------------------------------------------------------------------------- devices at hand


def on_devices(names: Sequence[str], cases: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """Measures each case on the local accelerators, in a separate process; returns results by size and case.

    Raises:
      ValueError: the devices do not count their memory.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for case in cases:
            with console.status(f"{name} on the devices at hand: {case}"):
                found.setdefault(name, {})[case] = _run_child(name, case)
    return found


def _run_child(name: str, case: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", "--measure", name, case]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    if done.returncode:
        return {"problem": next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")}
    result = json.loads(done.stdout.splitlines()[-1])
    if "error" in result:
        raise ValueError(result["error"])
    return result


def measure(name: str, case: str) -> dict[str, Any]:
    """Runs two steps on the local devices; returns the bytes in use and the peak, each the maximum over devices.

    Raises:
      ValueError: the devices do not report memory; or the case has no mesh for the number of devices.
    """
    devices = jax.devices()
    if not (devices[0].memory_stats() or {}).get("peak_bytes_in_use"):
        raise ValueError(NO_COUNT.format(kind=f"{len(devices)} x {devices[0].device_kind}"))
    step, (state, batch, _) = build(SIZES[name], CASES[case], device_shape(len(devices)), devices)
    state, batch = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), (state, batch))
    before = max(device.memory_stats()["bytes_in_use"] for device in devices)
    for _ in range(2):
        state, _ = jax.block_until_ready(step(state, batch, jax.random.key(0)))
    peak = max(device.memory_stats()["peak_bytes_in_use"] for device in devices)
    kind = f"{len(devices)} x {devices[0].device_kind}"
    return {"devices": kind, "between_steps_bytes": before, "peak_bytes": peak, "versions": installed_versions()}


def devices_table(name: str, cases: dict[str, Any]) -> Any:
    """Builds the table of the memory measured on accelerators."""
    kinds = {found["devices"] for found in cases.values() if "devices" in found}
    rows = []
    for case, found in cases.items():
        if "problem" in found:
            rows.append([case, "", "", "", found["problem"]])
            continue
        of = [ratio(found["peak_bytes"], cases.get(other, {}).get("peak_bytes")) for other in ("jit", "flat")]
        rows.append([case, *of, format_bytes(found["between_steps_bytes"]), format_bytes(found["peak_bytes"])])
    columns = ["case", "of jit", "of flat", "between steps", "at the peak"]
    return rich_table(f"{name} on {', '.join(kinds) or 'the devices at hand'}: counted there", columns, rows, right=1)


# ----------------------------------------------------------------------------------------------------- tables, pictures


def table(name: str, topology: str, found: dict[str, Any]) -> Any:
    """Builds the table of a topology: total relative to jit and to the flat algorithm, temporaries to the floor."""
    floor = format_bytes(found["limit_bytes"]["temporaries"])
    title = f"{name} on {topology}: bytes per device; floor of the temporaries {floor}"
    columns = ["case", "of jit", "of flat", "of floor", "total", "temporaries", "fits"]
    return rich_table(title, columns, [_row(*item) for item in found["cases"].items()], right=1)


def _row(case: str, found: dict[str, Any]) -> list[str]:
    if "problem" in found:
        return [case, *[""] * 5, found["problem"]]
    ratios, sizes = found["ratios"], found["bytes"]
    shown = [ratios.get(f"total over {other}") for other in ("jit", "flat")] + [ratios["temporaries over the floor"]]
    return [
        case,
        *("" if value is None else f"{value:.2f}" for value in shown),
        *(format_bytes(sizes[part]) for part in ("total", "temporaries")),
        "yes" if found["fits"] else "no",
    ]


def phases_table(name: str, topology: str, found: dict[str, Any]) -> Any:
    """Builds the table of the peak use of temporaries in each phase, with the permanent arguments."""
    rows = [
        [case, *(format_bytes(size) for size in (one["bytes"]["arguments"], *one["live_temporary_bytes"].values()))]
        for case, one in compiled(found["cases"]).items()
    ]
    title = f"{name} on {topology}: arguments, and temporaries in use at most in each phase"
    return rich_table(title, ["case", "arguments", *PHASES], rows)


def draw(path: Path, name: str, topologies: dict[str, Any]) -> None:
    """Draws total bytes, and temporaries by phase with the floor, for each topology."""
    there = drawn({topology: found["cases"] for topology, found in topologies.items()})
    names = list(next(iter(there.values())))
    if not names:
        return  # no case exists for every topology; the tables show the existing cases
    floors = {topology: found["limit_bytes"]["temporaries"] / GIB for topology, found in topologies.items()}
    blocks = {
        "all, GiB": {topology: partial(_draw_total, cases=cases) for topology, cases in there.items()},
        "temporaries in use at most, by phase, GiB": {
            topology: partial(_draw_phases, cases=cases, floor=floors[topology]) for topology, cases in there.items()
        },
    }
    panels(path, f"{name}: memory of one device in a step", names_in_words(names), len(names), blocks)


def _draw_total(axes: Any, cases: dict[str, Any]) -> None:
    parts = {"arguments": "#1f4e79", "temporaries": "#f2a65a"}
    rest = [(f["bytes"]["total"] - sum(f["bytes"][p] for p in parts)) / GIB for f in cases.values()]
    series = {part: [f["bytes"][part] / GIB for f in cases.values()] for part in parts} | {"outputs, program": rest}
    left, limit = np.zeros(len(cases)), _cut([f["bytes"]["total"] / GIB for f in cases.values()])
    for (part, widths), color in zip(series.items(), [*parts.values(), "#b9b9b9"], strict=True):
        axes.barh(list(cases), widths, left=left, color=color, label=part)
        left += widths
    _number(axes, left, limit)
    available = next(iter(cases.values()))["available_bytes"] / GIB
    if available < limit:
        axes.axvline(available, color=ACCENT, linestyle="--", linewidth=1.2, label="available")


def _draw_phases(axes: Any, cases: dict[str, Any], floor: float) -> None:
    height = 0.8 / len(PHASES)
    largest = [max(f["live_temporary_bytes"].values()) / GIB for f in cases.values()]
    for position, (phase, color) in enumerate(PHASES.items()):
        widths = [f["live_temporary_bytes"][phase] / GIB for f in cases.values()]
        places = np.arange(len(cases)) + (position - 1) * height
        axes.barh(places, widths, height, color=color, label=phase)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.axvline(floor, color=ACCENT, linestyle="--", linewidth=1.2, label="floor")
    _number(axes, largest, _cut(largest))


def _cut(values: Sequence[float]) -> float:
    """Returns the end of the axis: at most four times the median, so that a huge bar does not hide small bars."""
    return min(max(values), 4 * float(np.median(values)))


def _number(axes: Any, values: Sequence[float], limit: float) -> None:
    clean(axes, 1.28 * limit)
    for place, value in enumerate(values):
        (number if value <= limit else number_within)(axes, place, value, f"{value:.3g}")


# ----------------------------------------------------------------------------------------------------------------- runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("memory", description="Bytes per device of a step, by phase, for every case.")
    options = {"sizes": SIZES, "models": MODELS, "topologies": TOPOLOGIES, "cases": CASES}
    add_forecast_options(new, **options, out=OUT, kept=forecasts.OUT)
    new.add_argument("--devices", action="store_true", help="also run each case on the accelerators at hand")
    new.add_argument("--measure", nargs=2, metavar=("SIZE", "CASE"), help=argparse.SUPPRESS)  # in a separate process
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.measure:
        return _measure(*options.measure)
    console, start = Console(), time.monotonic()
    try:
        options = complete(options, ON_TPUS, ON_GPUS)
        counted = on_devices(options.sizes, options.cases, console) if options.devices else {}
        found = forecasts.results(options, console)
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"memory: error: {error}", highlight=False)
        return 2
    for name, topologies in found.items():
        rows = {topology: measured(name, topology, cases) for topology, cases in topologies.items()}
        write(options.out, name, options.suffix, rows, counted.get(name), console)
    console.print(f"{options.out}, after {time.monotonic() - start:.0f} s", highlight=False)
    return 0


def write(
    out: Path, name: str, suffix: str, topologies: dict[str, Any], counted: dict[str, Any] | None, console: Console
) -> None:
    """Prints the tables, and writes the JSON and the picture to the folder."""
    for topology, found in topologies.items():
        console.print(table(name, topology, found))
        console.print(phases_table(name, topology, found))
    if counted:
        console.print(devices_table(name, counted))
    out.mkdir(parents=True, exist_ok=True)
    kept = {"topologies": topologies} | ({"devices": counted} if counted else {})
    (out / f"{name}{suffix}.json").write_text(json.dumps(kept, indent=1) + "\n")
    if topologies:
        draw(out / f"{name}{suffix}.png", name, topologies)


def _measure(name: str, case: str) -> int:
    try:
        found = measure(name, case)
    except ValueError as error:
        found = {"error": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

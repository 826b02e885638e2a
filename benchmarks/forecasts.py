"""What the 1.3B and 7B models would cost on TPUs that are not here: bytes per device and bytes sent, in four layouts.

    python -m benchmarks.forecasts                       both models, v5e:16x16 and v5p:4x4x8; some fifteen minutes
    python -m benchmarks.forecasts --sizes 1.3B --topologies v5e:2x4
    python -m benchmarks.forecasts --redraw              the pictures and tables from the JSON that is there

For each model and topology it writes ``<out>/<size>_<topology>.json``, with the versions that it was made with, and for
each model a picture ``<out>/<size>.png``. Every number is read from a compiled program or counted in a jaxpr; the times
are estimates. The layouts:

  replicated        every device holds everything
  FSDP              one flat axis; gathered in bfloat16, scattered in float32; gathered weights are kept for backward
  FSDP, remat       the same; blocks are computed, and their weights gathered, again in backward
  FSDP, staged      remat; scattered in bfloat16, over one mesh axis for each dim of the torus
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.large_models import SIZES, Size, language_model
from xlstm_jax.distributed.forecast import CompileError, Forecast, forecast, parse_topology
from xlstm_jax.distributed.forecast.planner import default_meshes
from xlstm_jax.distributed.forecast.report import rich_table
from xlstm_jax.distributed.plan_leaves import format_bytes

TOPOLOGIES = ("v5e:16x16", "v5p:4x4x8")
OUT = Path(__file__).parent / "results" / "forecasts"
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "FSDP": {"sharded": True},
    "FSDP, remat": {"sharded": True, "remat": True},
    "FSDP, staged": {"sharded": True, "remat": True, "staged": True, "grad_scatter_dtype": jnp.bfloat16},
}
GIB = 2**30


def layout_forecast(
    size: Size, topology: str, *, sharded: bool = False, staged: bool = False, **options: Any
) -> Forecast:
    """One model in one layout on one topology."""
    place = parse_topology(topology)
    mesh = default_meshes(place.shape)[0] if staged else {"fsdp": place.num_devices}
    shard_axes = tuple(mesh) if sharded else ()
    workload = language_model(size, devices=place.num_devices, shard_axes=shard_axes, **options)
    step, args = workload.build_step(mesh)
    return forecast(step, *args, topology=topology, tokens=workload.tokens)


def summary(found: Forecast) -> dict[str, Any]:
    """What is kept of a forecast: sizes in bytes, times in seconds, per device and step."""
    memory, roofline = found.memory, found.roofline
    return {
        "mesh": found.axis_sizes,
        "fits": found.fits,
        "available_bytes": found.available_bytes,
        "bytes": {
            "arguments": memory.argument_bytes,
            "outputs": memory.output_bytes,
            "temporaries": memory.temporary_bytes,
            "constants and program": memory.constant_bytes + found.code_bytes,
            "total": found.total_bytes,
        },
        "wire_bytes": {
            "total": found.wire_bytes,
            "asynchronous": found.wire_bytes * found.asynchronous_fraction,
            **{", ".join(key): sent for key, sent in found.wire_bytes_by("kind", "direction").items()},
        },
        "flops": found.flops.by_direction(),
        "hbm_bytes": found.hbm_bytes.total,
        "seconds": {
            "compute": roofline.compute_s,
            "memory": roofline.memory_s,
            "wire": roofline.wire_s,
            "cycles": found.cycle_seconds,
            "exposed": found.exposed_seconds,
            "step": found.step_seconds,
        },
        "bound": roofline.bound,
        "tokens_per_device": found.tokens / found.devices,
        "ridge_tokens": roofline.ridge_tokens,
        "compile_seconds": found.compile_seconds,
        "versions": found.versions,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------- tables, pictures


def table(name: str, topology: str, layouts: dict[str, Any]) -> Any:
    """Layouts as rows."""
    columns = ["layout", "fits", "per device", "sent", "async", "step", "bound by"]
    return rich_table(f"{name} on {topology}", columns, [_row(*item) for item in layouts.items()])


def _row(layout: str, found: dict[str, Any]) -> list[str]:
    if "problem" in found:
        return [layout, "no", "", "", "", "", found["problem"]]
    wire, seconds = found["wire_bytes"], found["seconds"]
    return [
        layout,
        "yes" if found["fits"] else "no",
        format_bytes(found["bytes"]["total"]),
        format_bytes(wire["total"]),
        f"{wire['asynchronous'] / wire['total']:.0%}" if wire["total"] else "",
        f"{seconds['step'] * 1e3:,.0f} ms",
        found["bound"],
    ]


def draw(path: Path, name: str, results: dict[str, dict[str, Any]]) -> None:
    """Bytes per device and bytes sent per step: a row of two plots for each topology."""
    figure = Figure(figsize=(11, 3.1 * len(results)), dpi=130, layout="constrained")
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (memory, wire), (topology, layouts) in zip(rows, results.items(), strict=True):
        there = {layout: found for layout, found in layouts.items() if "problem" not in found}
        _draw_memory(memory, topology, there)
        _draw_wire(wire, topology, there)
    figure.suptitle(f"{name}, 2048 tokens per device: forecast per device", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path)


def _draw_memory(axes: Any, topology: str, layouts: dict[str, Any]) -> None:
    parts = {"arguments": "#1f4e79", "outputs": "#5b9bd5", "temporaries": "#f2a65a", "constants and program": "#b9b9b9"}
    left = np.zeros(len(layouts))
    for part, color in parts.items():
        width = np.array([found["bytes"][part] / GIB for found in layouts.values()])
        bars = axes.barh(list(layouts), width, left=left, color=color, label=part)
        left += width
    axes.bar_label(bars, [f"{total:.3g}" for total in left], padding=3, fontsize=8)
    available = next(iter(layouts.values()))["available_bytes"] / GIB
    axes.axvline(available, color="#d1495b", linestyle="--", linewidth=1.2, label="available")
    _finish(axes, f"{topology}: memory at the peak, GiB", max(available, *left))


def _draw_wire(axes: Any, topology: str, layouts: dict[str, Any]) -> None:
    total = np.array([found["wire_bytes"]["total"] / GIB for found in layouts.values()])
    hidden = np.array([found["wire_bytes"]["asynchronous"] / GIB for found in layouts.values()])
    axes.barh(list(layouts), hidden, color="#5b9bd5", label="asynchronous")
    bars = axes.barh(list(layouts), total - hidden, left=hidden, color="#d1495b", label="waited for")
    axes.bar_label(bars, [f"{sent:.3g}" for sent in total], padding=3, fontsize=8)
    _finish(axes, f"{topology}: sent per step, GiB", max(total))


def _finish(axes: Any, title: str, largest: float) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * largest)  # room for the number behind the longest bar
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, frameon=False, loc="best")


# ----------------------------------------------------------------------------------------------------------------- runs


def path_of(out: Path, name: str, topology: str) -> Path:
    return out / f"{name}_{topology.replace(':', '_')}.json"


def compute(sizes: Sequence[str], topologies: Sequence[str], out: Path, progress: Progress) -> None:
    """Makes the forecasts, each file as soon as it is complete."""
    task = progress.add_task("", total=len(sizes) * len(topologies) * len(LAYOUTS))
    for name in sizes:
        for topology in topologies:
            found = {}
            for layout, options in LAYOUTS.items():
                progress.update(task, description=f"{name} on {topology}: {layout}")
                found[layout] = _summary_or_problem(SIZES[name], topology, options)
                progress.advance(task)
            path_of(out, name, topology).write_text(json.dumps(found, indent=1) + "\n")


def _summary_or_problem(size: Size, topology: str, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return summary(layout_forecast(size, topology, **options))
    except CompileError as error:  # what is too large by far, the compiler may not finish
        return {"problem": str(error).splitlines()[0]}


def read(sizes: Sequence[str], topologies: Sequence[str], out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each size what is there, by topology."""
    for name in sizes:
        paths = {topology: path_of(out, name, topology) for topology in topologies}
        yield name, {topology: json.loads(path.read_text()) for topology, path in paths.items() if path.exists()}


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("forecasts", description="Forecasts of large models on TPUs that are not here.")
    new.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    new.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES))
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files and pictures")
    new.add_argument("--redraw", action="store_true", help="compile nothing; tables and pictures of what is there")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console, start = Console(), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.redraw:
        columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            try:
                compute(options.sizes, options.topologies, options.out, progress)
            except (ValueError, ImportError) as error:
                Console(stderr=True).print(f"forecasts: error: {error}", highlight=False)
                return 2
    for name, results in read(options.sizes, options.topologies, options.out):
        for topology, layouts in results.items():
            console.print(table(name, topology, layouts))
        draw(options.out / f"{name}.png", name, results)
    console.print(f"{options.out}, after {time.monotonic() - start:.0f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

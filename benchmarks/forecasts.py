"""Forecasts of the compared training steps on absent TPUs and GPUs: compiled once, stored, and read.

    python -m benchmarks.forecasts                       the large models, v5e:16x16 and v5p:4x4x8; some fifteen minutes
    python -m benchmarks.forecasts --sizes small --topologies v5e:2x4
    python -m benchmarks.forecasts --topologies h100:32x8 h200:16x8 b200:8x8
    python -m benchmarks.forecasts --redraw              pictures and tables of stored results, without compiling
    python -m benchmarks.forecasts --reread --sizes ...  compiles stored programs again, for figures that they lack

    size, case, topology --build, compile--> Forecast --summary--> <kept>/<size>_<topology>.json

Bytes, collectives and asynchronous starts are read from the compiled program, FLOP are counted in the jaxpr. Stored
times of TPUs are without latency; ``benchmarks.ranges`` adds the assumptions on reading, and so makes ranges. A stored
result is reused while the program, the compiler options and the versions are unchanged. ``memory`` and ``traffic`` read
the same files and reuse the results. This module draws the overview: memory per device and bytes sent.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.cases import CASES, SIZES, Case, build, exists, names_in_words, options_of
from benchmarks.large_models import SIZES as LARGE_SIZES
from benchmarks.large_models import Size
from benchmarks.options import add_forecast_options, complete
from benchmarks.ranges import times_of
from benchmarks.report import clean, number, panels
from benchmarks.vision import PATCH
from xlstm_jax.forecast import CompileError, Forecast, Topology, forecast, parse_topology
from xlstm_jax.forecast.compiling.compile_process import PLUGIN
from xlstm_jax.forecast.cost.collective_traffic import Collective
from xlstm_jax.forecast.cost.memory import Memory
from xlstm_jax.forecast.hardware.cudnn import traced_for_chip
from xlstm_jax.formatting import format_bytes, rich_table

FORMAT = 2  # version of the stored results
GPU_FORMAT = 2  # version of the additional results for GPUs
TOPOLOGIES = ("v5e:16x16", "v5p:4x4x8")
OVERVIEW = ("replicated", "flat, no remat", "flat", "ours")
GPU_OVERVIEW = ("jit", "jit, best options", "flat", "ours")
OUT = Path(__file__).parent / "results" / "forecasts"
GIB = 2**30

Results = dict[str, dict[str, dict[str, Any]]]  # size -> topology -> case -> stored result


# ------------------------------------------------------------------------------------------------- what is kept of one


def summary(found: Forecast) -> dict[str, Any]:
    """Converts a forecast to the stored result: sizes in bytes, times in seconds, per device and step."""
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
        "live_temporary_bytes": phases(memory),
        "wire_bytes": {"total": found.wire_bytes, "asynchronous": found.wire_bytes * found.asynchronous_fraction},
        "collectives": collectives(found),
        "flops": found.flops.by_direction(),
        "hbm_bytes": found.hbm_bytes.total,
        "seconds": {
            "compute": roofline.compute_s,
            "memory": roofline.memory_s,
            "wire": roofline.wire_s,
            "cycles": found.cycle_seconds,
            "exposed": found.exposed_seconds,
            "step": plain_step_seconds(found),
        },
        "bound": roofline.bound,
        "tokens_per_device": found.tokens / found.devices,
        "ridge_tokens": roofline.ridge_tokens,
        "compile_seconds": found.compile_seconds,
        "versions": found.versions,
    } | (of_gpus(found) if found.on_gpus else of_tpus(found))  # fmt: skip


def plain_step_seconds(found: Forecast) -> float | None:
    """Returns the expected step without the assumptions of ``benchmarks.ranges``, which are added on reading.

    TPUs: the compiler's cycles as they are, and waits without latency. GPUs: ``step_seconds``.
    """
    if found.on_gpus or found.compute_time is None or found.exposed_seconds is None or found.roofline is None:
        return found.step_seconds
    host_s = found.host.waited_s if found.host else 0.0
    return max(found.compute_time.most + found.exposed_seconds + host_s, found.roofline.wire_s)


def of_tpus(found: Forecast) -> dict[str, Any]:
    """Returns the additional results for TPUs: zero-fills that stand for gathers, by the compiler's cycles."""
    if found.fills is None or found.chip is None or found.chip.clock_hz is None:
        return {}
    fills = found.fills
    seconds = fills.cycles / found.chip.clock_hz
    return {"zero_fills": {"count": fills.count, "seconds": seconds, "bytes": fills.written}}


def of_gpus(found: Forecast) -> dict[str, Any]:
    """Returns the additional results for GPUs: bytes by network, hidden bytes by rooflines, collectives per layer."""
    sent = found.wire_bytes
    return {
        "network_bytes": {"nic": found.nic_bytes, "nvlink": found.nvlink_bytes},
        "hidden_bytes": {
            "beside as long": sent * (found.hidden_fraction or 0.0),
            "beside any": sent * (found.beside_products_fraction or 0.0),
        },
        "gpu_seconds": {"kernels": found.kernel_seconds, "exposed by bandwidth": found.exposed_bandwidth_seconds},
        "collectives_per_layer": per_layer(found.collectives),
    }


def per_layer(collectives: Sequence[Collective]) -> dict[str, int]:
    """Counts the collectives per layer, forward and backward; recomputation counts as backward.

    The collectives of the loop over layers execute most often; in a pipelined loop one iteration is outside of the
    loop, so a collective with more than half of the largest count belongs to the loop.
    """
    most = max((one.count for one in collectives), default=1)
    ways = {"forward": ("forward",), "backward": ("recompute", "backward")}
    return {
        way: sum(one.direction in directions and one.count > most / 2 for one in collectives)
        for way, directions in ways.items()
    }


def phases(memory: Memory) -> dict[str, int]:
    """Returns the peak of live temporary bytes in each phase of the step.

    Operations after the last operation with a direction belong to the optimizer. An earlier operation without a
    direction belongs to the phase of the preceding operation.
    """
    last = max((i for i, moment in enumerate(memory.timeline) if moment.direction != "other"), default=-1)
    found, phase = dict.fromkeys(("forward", "backward", "optimizer"), 0), "forward"
    for i, moment in enumerate(memory.timeline):
        phase = {"forward": "forward", "other": phase}.get(moment.direction, "backward")
        name = "optimizer" if i > last else phase
        found[name] = max(found[name], moment.live_bytes)
    return found


def collectives(found: Forecast) -> list[dict[str, Any]]:
    """Groups the collectives of a step that differ only in module and name; the largest group first."""
    groups = defaultdict(list)
    for one in found.collectives:
        groups[one.kind, one.stands_for, one.dtype, one.axes, one.direction, one.asynchronous].append(one)
    names = ("kind", "stands_for", "dtype", "axes", "direction", "asynchronous")
    rows = [
        dict(zip(names, key, strict=True))
        | {"instructions": len(members), "executions": sum(one.count for one in members)}
        | {"payload_bytes": sum(one.count * one.payload_bytes for one in members)}
        | {"wire_bytes": sum(one.wire_bytes_per_step for one in members)}
        | _waits(members)
        for key, members in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["wire_bytes"])


def _waits(members: Sequence[Collective]) -> dict[str, float]:
    """Returns the time that the GPU schedule waits for collectives, and the hidden bytes; {} without timings."""
    waited = [one.count * one.timing.waited_s for one in members if one.timing]
    hidden = sum(one.wire_bytes_per_step for one in members if one.is_hidden)
    return {"waited_seconds": sum(waited), "hidden_bytes": hidden} if waited else {}


# ----------------------------------------------------------------------------------------------------- compile or reuse


def forecast_case(size: Size, case: Case, topology: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the result of a case: ``known`` if it belongs to the same program, else the result of compiling."""
    place = parse_topology(topology)
    options = options_of(case, place)
    with traced_for_chip(place.chip):  # so that cuDNN attention can be traced without a GPU
        step, args = build(size, case, place.shape, gpus=on_gpus(place))
        program = fingerprint(step, args, place, options)
    if known is not None and known["program"] == program:
        return known
    try:
        found = forecast(step, *args, topology=topology, tokens=tokens_of(args), compiler_options=options)
    except CompileError as error:  # the compiler may fail for a program that is far too large
        return {"program": program, "problem": str(error).splitlines()[0]}
    return {"program": program, "compiler_options": options} | summary(found)


def tokens_of(args: tuple[Any, ...]) -> int:
    """Counts the tokens in the global batch: inputs of rows that end in the next token, or patches of images."""
    rows, *dims = jax.tree.leaves(args[1])[0].shape
    return rows * (dims[0] - 1 if len(dims) == 1 else math.prod(side // PATCH for side in dims[:2]))


def fingerprint(step: Any, args: tuple[Any, ...], place: Topology, options: dict[str, Any] | None) -> str:
    """Returns a hash of the lowered program, the compiler options and the versions."""
    text = step.trace(*args).lower(lowering_platforms=(place.platform,)).as_text()
    versions = installed_versions(PLUGIN) | {"format": GPU_FORMAT} if on_gpus(place) else installed_versions()
    told = [FORMAT, place.name, sorted((options or {}).items()), versions, text]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()


def installed_versions(compiler: str = "libtpu") -> dict[str, str]:
    """Returns the versions of the packages that determine compiled programs, including ``compiler``."""

    def of(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    return {name: of(name) for name in ("jax", "jaxlib", compiler, "flax", "optax")}


def on_gpus(place: Topology) -> bool:
    return place.platform == "cuda"


def path_of(kept: Path, name: str, topology: str) -> Path:
    return kept / f"{name}_{topology.replace(':', '_')}.json"


def read(path: Path) -> dict[str, Any]:
    """Reads the stored results by case; skips results without a program hash, from an older format."""
    entries = json.loads(path.read_text()) if path.exists() else {}
    return {case: found for case, found in entries.items() if "program" in found}


def completed(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns a stored result with the figures that it lacks, from a second compilation of the same program.

    Raises:
      ValueError: another program, or a stored figure of the program that differs from the second compilation's.
    """
    timed = ("compile_seconds", "versions")  # may differ between two compilations
    found = json.loads(json.dumps(found))  # JSON has no tuples
    other = [name for name in known if name not in timed and not _same(known[name], found.get(name))]
    if other:
        raise ValueError(f"the stored result differs from a second compilation in {', '.join(other)}; compile it anew.")
    return known | {name: value for name, value in found.items() if name not in known}


def _same(one: Any, other: Any) -> bool:
    """Returns whether two results are equal, floats to rounding: ``sum`` of floats differs between Python releases."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def compute(
    sizes: Sequence[str],
    topologies: Sequence[str],
    cases: Sequence[str],
    kept: Path,
    progress: Any,
    *,
    reread: bool = False,
) -> None:
    """Computes the forecasts that are not stored yet; writes each forecast immediately.

    ``reread`` compiles stored programs again (from the user's cache of compiled programs, if they are there), and adds
    figures that the stored results lack.

    Raises:
      ValueError: an unknown topology; see ``completed``.
      ImportError: the compiler for the topology is not installed, or flatbuffers.
    """
    kept.mkdir(parents=True, exist_ok=True)
    jobs = [(n, t, c) for n in sizes for t in topologies for c in cases if exists(SIZES[n], CASES[c])]
    task = progress.add_task("", total=len(jobs))
    for name, topology, case in jobs:
        progress.update(task, description=f"{name} on {topology}: {case}")
        path = path_of(kept, name, topology)
        known = read(path).get(case)
        found = forecast_case(SIZES[name], CASES[case], topology, None if reread else known)
        if reread and known is not None:
            found = completed(known, found)
        path.write_text(json.dumps(read(path) | {case: found}, indent=1) + "\n")
        progress.advance(task)


def results(options: argparse.Namespace, console: Console) -> Results:
    """Returns the results that the options select; compiles missing results, with a progress bar.

    Raises:
      ValueError, ImportError: see ``compute``.
    """
    if not options.redraw:
        columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            chosen = (options.sizes, options.topologies, options.cases, options.kept)
            compute(*chosen, progress, reread=getattr(options, "reread", False))
    return {name: dict(_of_size(name, options)) for name in options.sizes}


def _of_size(name: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for topology in options.topologies:
        found = read(path_of(options.kept, name, topology))
        if there := {case: found[case] for case in options.cases if case in found}:
            yield topology, there


def compiled(cases: dict[str, Any]) -> dict[str, Any]:
    """Returns the cases that compiled without a problem."""
    return {case: found for case, found in cases.items() if "problem" not in found}


def drawn(topologies: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the cases that every topology has, in the same order, for plots with a shared axis."""
    there = {topology: compiled(cases) for topology, cases in topologies.items()}
    first = next(iter(there.values()), {})
    names = [case for case in first if all(case in cases for cases in there.values())]
    return {topology: {case: cases[case] for case in names} for topology, cases in there.items()}


# ----------------------------------------------------------------------------------------------------- tables, pictures


def table(name: str, topology: str, cases: dict[str, Any]) -> Any:
    """Builds the table of a topology, with cases as rows."""
    columns = ["case", "fits", "per device", "sent", "async", "collectives", "step, least to most", "bound by"]
    return rich_table(f"{name} on {topology}", columns, [_row(*item, topology) for item in cases.items()], right=1)


def _row(case: str, found: dict[str, Any], topology: str) -> list[str]:
    if "problem" in found:
        return [case, "no", "", "", "", "", "", found["problem"]]
    wire, times = found["wire_bytes"], times_of(found, topology)
    least, expected, most = (f"{seconds * 1e3:,.0f}" for seconds in times.step)
    return [
        case,
        "yes" if found["fits"] else "no",
        format_bytes(found["bytes"]["total"]),
        format_bytes(wire["total"]),
        f"{wire['asynchronous'] / wire['total']:.0%}" if wire["total"] else "",
        f"{times.collectives:,}",
        f"{expected} ms ({least} to {most})",
        found["bound"],
    ]


def draw(path: Path, name: str, topologies: dict[str, dict[str, Any]]) -> None:
    """Draws bytes per device and bytes sent per step, for each topology."""
    there = drawn(topologies)
    names = list(next(iter(there.values())))
    if not names:
        return  # no case exists for every topology; the tables show the existing cases
    blocks = {
        what: {topology: partial(draw_one, cases=cases) for topology, cases in there.items()}
        for what, draw_one in {"memory at the peak, GiB": _draw_memory, "sent per step, GiB": _draw_wire}.items()
    }
    title = f"{name}, 2048 tokens per device: forecast of one device"
    panels(path, title, names_in_words(names), len(names), blocks)


def _draw_memory(axes: Any, cases: dict[str, Any]) -> None:
    parts = {"arguments": "#1f4e79", "outputs": "#5b9bd5", "temporaries": "#f2a65a", "constants and program": "#b9b9b9"}
    left = np.zeros(len(cases))
    for part, color in parts.items():
        width = np.array([found["bytes"][part] / GIB for found in cases.values()])
        axes.barh(list(cases), width, left=left, color=color, label=part)
        left += width
    available = next(iter(cases.values()))["available_bytes"] / GIB
    axes.axvline(available, color="#d1495b", linestyle="--", linewidth=1.2, label="available")
    for place, total in enumerate(left):
        number(axes, place, total, f"{total:.3g}")
    clean(axes, max(1.05 * available, *1.2 * left))


def _draw_wire(axes: Any, cases: dict[str, Any]) -> None:
    total = np.array([found["wire_bytes"]["total"] / GIB for found in cases.values()])
    hidden = np.array([found["wire_bytes"]["asynchronous"] / GIB for found in cases.values()])
    axes.barh(list(cases), hidden, color="#5b9bd5", label="asynchronous")
    axes.barh(list(cases), total - hidden, left=hidden, color="#d1495b", label="waited for")
    for place, sent in enumerate(total):
        number(axes, place, sent, f"{sent:.3g}")
    clean(axes, 1.2 * max(total))


# ----------------------------------------------------------------------------------------------------------------- runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("forecasts", description="Forecasts of large models on devices that are not here.")
    options = {
        "sizes": SIZES,
        "models": list(LARGE_SIZES),
        "topologies": TOPOLOGIES,
        "cases": CASES,
    }
    add_forecast_options(new, **options, out=OUT, kept=OUT)
    new.add_argument("--reread", action="store_true", help="compile stored programs again, for figures they lack")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console, start = Console(), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        options = complete(options, OVERVIEW, GPU_OVERVIEW)
        found = results(options, console)
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"forecasts: error: {error}", highlight=False)
        return 2
    for name, topologies in found.items():
        for topology, cases in topologies.items():
            console.print(table(name, topology, cases))
        if topologies:
            draw(options.out / f"{name}{options.suffix}.png", name, topologies)
    console.print(f"{options.out}, after {time.monotonic() - start:.0f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

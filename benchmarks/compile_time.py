"""Time to trace and to compile a step, with layers in a scan or in a loop, for 8 to 512 chips.

    python -m benchmarks.compile_time                            some twenty minutes
    python -m benchmarks.compile_time --size small --layers 2 --chips 8 --rounds 5
    python -m benchmarks.compile_time --before 8 32 96           layers in a Python loop, compared with jit; ten minutes

  tracing      time of ``step.trace(*args)`` for a newly built step of the wrapped model, in ``shard_map``, relative to
               the same model without a wrapper, replicated. The sides take turns, so that other load affects both
               alike; the ratio is the median over rounds.
  compiling    ahead of time for TPUs, once, in a separate process; the time of XLA without the start of the process
  --before     tracing and lowering of three models with a given number of layers in a Python loop, compared with
               ``jit`` with shardings: processor time, both sides in turn in one process, medians of the ratios;
               written to ``<out>/before.json``. Aim: at most 1.2 x.

Times depend on the machine and its load; the size of the program and the ratio of tracing do not. Results are written
to ``<out>/<size>.json`` and ``<out>/<size>.png``. Aim: tracing takes at most 1.3 x the time without a wrapper.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import baselines
from benchmarks.cases import CASES, SIZES, build, mesh_axes, mesh_of, threshold
from benchmarks.decoder import Block, Decoder, DecoderSize, decoder
from benchmarks.forecasts import installed_versions
from benchmarks.large_models import Size
from benchmarks.options import positive
from benchmarks.report import ACCENT, QUIET, STRONG, save
from xlstm_jax.distributed import shard_modules
from xlstm_jax.forecast import CompileError, parse_topology
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.formatting import format_bytes, rich_table

OUT = Path(__file__).parent / "results" / "compile_time"
CHIPS = {8: "v5e:2x4", 64: "v5e:8x8", 256: "v5e:16x16", 512: "v5p:8x8x8"}
LAYERS = (4, 12, 24)
LARGEST_LOOP = 12  # layers; each takes some 5 s
ROUNDS = 15
TRACING_AIM = 1.3
WRAPPED, PLAIN = "ours, no remat", "replicated"  # cases that differ only in the wrapper
# For ``--before``: small models, because only the number of equations matters.
BEFORE = {"transformer": "small", "decoder": "decoder_small", "ViT": "vit_small"}
BEFORE_AIM, BEFORE_CHIPS, BEFORE_ROUNDS = 1.2, 8, 5


# -------------------------------------------------------------------------------------------------------------- tracing


def trace_seconds(builds: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    """Measures the seconds of ``step.trace(*args)`` for new steps, in turn; returns seconds per round by name.

    The first round is dropped, because it traces the functions of ``jax.numpy``, which JAX then caches.
    """
    found: dict[str, list[float]] = {name: [] for name in builds}
    for _ in range(rounds + 1):
        for name, make in builds.items():
            step, args = make()
            start = time.perf_counter()
            step.trace(*args)
            found[name].append(time.perf_counter() - start)
    return {name: np.array(seconds[1:]) for name, seconds in found.items()}


def tracing(size: Size, chips: int, loop: bool, rounds: int) -> dict[str, Any]:
    """Measures tracing of the wrapped and the plain model: median seconds, and the median of the ratio per round."""
    shape = parse_topology(CHIPS[chips]).shape
    builds = {name: lambda case=CASES[name]: build(size, case, shape, loop=loop) for name in (WRAPPED, PLAIN)}
    seconds = trace_seconds(builds, rounds)
    ratio = float(np.median(seconds[WRAPPED] / seconds[PLAIN]))
    return {"ratio": ratio, "seconds": {name: float(np.median(values)) for name, values in seconds.items()}}


# --------------------------------------------------------------------------------------- before a step runs, beside jit


class LoopedDecoder(Decoder):
    """``Decoder`` with layers in a Python loop: ``blocks_0``, ``blocks_1``, ..."""

    @nn.compact
    def __call__(self, tokens):
        c, block = self.size, nn.remat(Block) if self.remat else Block
        embed = nn.Embed(c.vocab_size, c.dim, dtype=jnp.bfloat16, name="embed")
        x = embed(tokens)
        for i in range(c.layers):
            x, _ = block(c, self.attention, self.constrain, name=f"blocks_{i}")(x)
        return embed.attend(nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)).astype(jnp.float32)


def before_seconds(name: str, layers: int, rounds: int) -> dict[str, Any]:
    """Measures processor seconds of tracing and lowering with layers in a loop, and median ratios to ``jit``."""
    size = dataclasses.replace(SIZES[BEFORE[name]], layers=layers)
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "jit": []}
    for _ in range(rounds + 1):
        for case, seconds in found.items():
            seconds.append(_traced_and_lowered(*built_in_a_loop(size, case)))
    ours, jit = (np.array(found[case][1:]) for case in ("ours", "jit"))
    tracing, lowering = map(float, np.median(ours / jit, 0))
    seconds = {case: np.median(found[case][1:], 0).tolist() for case in found}
    return {"model": name, "layers": layers, "tracing": tracing, "lowering": lowering, "seconds": seconds}


def built_in_a_loop(size: Size, case: str) -> tuple[Any, Any]:
    """Builds the step of a case for ``BEFORE_CHIPS`` chips with layers in a Python loop, and its arguments."""
    shape = parse_topology(CHIPS[BEFORE_CHIPS]).shape
    if not isinstance(size, DecoderSize):
        return build(size, CASES[case], shape, loop=type(size) is Size)
    sizes, model = mesh_axes(CASES[case], shape), LoopedDecoder(size)
    if case == "jit":
        workload = dataclasses.replace(decoder(size, devices=BEFORE_CHIPS), model=model)
        return baselines.jit_step(workload, mesh_of(sizes), threshold(size))
    dtypes = {"gather_dtype": jnp.bfloat16, "grad_scatter_dtype": jnp.bfloat16}
    sharded = shard_modules(model, (Block, nn.Embed), tuple(sizes), min_weight_size=threshold(size), **dtypes)
    return dataclasses.replace(decoder(size, devices=BEFORE_CHIPS), model=sharded).build_step(sizes)


def _traced_and_lowered(step: Any, args: Any) -> tuple[float, float]:
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        traced = step.trace(*args)
        middle = time.process_time()
        traced.lower(lowering_platforms=("tpu",))
        return middle - start, time.process_time() - middle
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------------------ compiling


def compiling(size: Size, chips: int, loop: bool, case: str) -> dict[str, Any]:
    """Compiles a case; returns times, program size and versions, or the problem."""
    topology = CHIPS[chips]
    step, args = build(size, CASES[case], parse_topology(topology).shape, loop=loop)
    start = time.perf_counter()
    step.trace(*args)
    traced = time.perf_counter() - start
    try:
        compiled = compile_for_topology(step, *args, topology=topology)
    except (CompileError, TimeoutError) as error:
        return {"problem": str(error).splitlines()[0]}
    code = (compiled.memory or {}).get("generated_code", 0)
    return {
        "trace_seconds": traced,
        "compile_seconds": compiled.seconds,
        "program_bytes": code,
        "versions": compiled.versions,
    }


def plan(layers: Sequence[int], chips: Sequence[int], loops: bool) -> list[dict[str, Any]]:
    """Lists the points to compile: each depth on the fewest chips, each chip count at the median depth, and loops."""
    middle = sorted(layers)[len(layers) // 2]
    points = [(depth, min(chips)) for depth in layers] + [(middle, n) for n in chips if n != min(chips)]
    scans = [{"layers": depth, "chips": n, "loop": False} for depth, n in points]
    shallow = [depth for depth in layers if depth <= LARGEST_LOOP]
    return scans + [{"layers": depth, "chips": min(chips), "loop": True} for depth in shallow if loops]


def compute(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Computes the results that the options select."""
    size, found = SIZES[options.size], {"versions": installed_versions(), "tracing": [], "compiling": []}
    points = plan(options.layers, options.chips, not options.no_loops)
    task = progress.add_task("", total=len(points) * (1 + len(options.cases)))
    for point in points:
        sized = dataclasses.replace(size, layers=point["layers"])
        where = {"chips": point["chips"], "loop": point["loop"]}
        progress.update(task, description=f"tracing {_words(point)}")
        found["tracing"].append(point | tracing(sized, rounds=options.rounds, **where))
        progress.advance(task)
        for case in options.cases:
            progress.update(task, description=f"compiling {_words(point)}: {case}")
            found["compiling"].append(point | {"case": case} | compiling(sized, case=case, **where))
            progress.advance(task)
    return found


def _words(point: dict[str, Any]) -> str:
    return f"{point['layers']} layers in a {'loop' if point['loop'] else 'scan'}, {point['chips']} chips"


# ----------------------------------------------------------------------------------------------------- tables, pictures


def tracing_table(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    """Builds the tracing table, with the ratio first."""
    cells = [
        [_words(row), f"{row['ratio']:.2f}", *(f"{row['seconds'][case] * 1e3:,.0f} ms" for case in (WRAPPED, PLAIN))]
        for row in rows
    ]
    title = f"{name}: tracing a step; aim: at most {TRACING_AIM} x"
    return rich_table(title, ["", "ratio", "wrapped", "not wrapped"], cells)


def before_table(rows: Sequence[dict[str, Any]]) -> Any:
    """Builds the table of ``--before``: ratios to ``jit``, then the times of both sides."""
    cells = []
    for row in rows:
        times = (f"{row['seconds'][case][i] * 1e3:,.0f} ms" for i in (0, 1) for case in ("ours", "jit"))
        cells.append([row["model"], str(row["layers"]), f"{row['tracing']:.2f}", f"{row['lowering']:.2f}", *times])
    title = f"Before a step runs, over jit; aim: at most {BEFORE_AIM} x"
    return rich_table(title, ["model", "layers", "tracing", "lowering", "traced", "jit", "lowered", "jit"], cells)


def compiling_table(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    """Builds the compiling table, with the time relative to ``jit`` if ``jit`` was compiled."""
    of_jit = {_words(row): row.get("compile_seconds") for row in rows if row["case"] == "jit"}
    cells = []
    for row in rows:
        if "problem" in row:
            cells.append([_words(row), row["case"], "", "", "", row["problem"]])
            continue
        base = of_jit.get(_words(row))
        over = f"{row['compile_seconds'] / base:.2f}" if base else ""
        times = f"{row['trace_seconds']:.2f} s", f"{row['compile_seconds']:.1f} s"
        cells.append([_words(row), row["case"], over, *times, format_bytes(row["program_bytes"])])
    columns = ["", "case", "of jit", "tracing", "compiling", "program"]
    return rich_table(f"{name}: compiling a step", columns, cells, left=2, right=1)


def draw(path: Path, name: str, found: dict[str, Any]) -> None:
    """Draws the seconds of compilation by depth and by chips, and the ratio of tracing."""
    figure = Figure(figsize=(12, 3.6), dpi=130, layout="constrained")
    depth, chips, ratio = figure.subplots(1, 3)
    rows = [row for row in found["compiling"] if "problem" not in row]
    few = min(row["chips"] for row in found["tracing"])
    middle = sorted(row["layers"] for row in found["tracing"])[len(found["tracing"]) // 2]
    middle = next((row["layers"] for row in found["tracing"] if row["chips"] != few), middle)
    _lines(depth, [row for row in rows if row["chips"] == few], "layers", f"compiling for {few} chips, s")
    same = [row for row in rows if row["layers"] == middle and not row["loop"]]
    _lines(chips, same, "chips", f"compiling {middle} layers, s")
    labels = [_words(row) for row in found["tracing"]]
    bars = ratio.barh(labels, [row["ratio"] for row in found["tracing"]], color=QUIET)
    ratio.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    ratio.axvline(TRACING_AIM, color=ACCENT, ls="--", lw=1.2)
    ratio.invert_yaxis()
    ratio.margins(x=0.15)
    _frame(ratio, "tracing, over the model without wrapper")
    figure.suptitle(f"{name}: time to trace and compile a step", x=0.01, ha="left", fontweight="bold")
    save(figure, path)


def _lines(axes: Any, rows: Sequence[dict[str, Any]], by: str, title: str) -> None:
    colors = dict(zip(dict.fromkeys(row["case"] for row in rows), (STRONG, ACCENT, "#f2a65a", "#54a24b"), strict=False))
    for case, loop in dict.fromkeys((row["case"], row["loop"]) for row in rows):
        points = sorted((row[by], row["compile_seconds"]) for row in rows if (row["case"], row["loop"]) == (case, loop))
        style = {"color": colors[case], "ls": ":" if loop else "-", "marker": "o", "ms": 4}
        axes.plot(*zip(*points, strict=True), label=f"{case}, {'loop' if loop else 'scan'}", **style)
    ticks = sorted({row[by] for row in rows})
    if by == "chips" and len(ticks) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_ylim(0, None)
    axes.set_xlabel(by, fontsize=8)
    if rows:
        axes.legend(frameon=False, fontsize=7)
    _frame(axes, title)


def _frame(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


# ----------------------------------------------------------------------------------------------------------------- runs


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("compile_time", description="Time to trace and to compile a step.")
    new.add_argument("--size", choices=SIZES, default="1.3B", help="width of the model (default: 1.3B)")
    new.add_argument("--layers", nargs="+", type=positive, default=list(LAYERS), help="default: 4 12 24")
    new.add_argument("--chips", nargs="+", type=int, choices=CHIPS, default=list(CHIPS), help="default: 8 64 256 512")
    new.add_argument("--cases", nargs="*", choices=CASES, default=["jit", "ours"], help="those that are compiled")
    new.add_argument("--rounds", type=positive, default=ROUNDS, help=f"turns of tracing (default: {ROUNDS})")
    new.add_argument("--no-loops", action="store_true", help="leave out layers in a loop, which take minutes")
    new.add_argument("--before", nargs="+", type=positive, metavar="LAYERS", help="tracing and lowering beside jit")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file and the picture")
    return new


def _before(options: argparse.Namespace, console: Console) -> int:
    rounds = min(options.rounds, BEFORE_ROUNDS)
    rows = [before_seconds(name, layers, rounds) for name in BEFORE for layers in options.before]
    console.print(before_table(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"versions": installed_versions(), "rounds": rounds, "rows": rows}
    (options.out / "before.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console, start = Console(), time.monotonic()
    if options.before:
        return _before(options, console)
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        try:
            found = compute(options, progress)
        except (ValueError, ImportError) as error:
            Console(stderr=True).print(f"compile_time: error: {error}", highlight=False)
            return 2
    console.print(tracing_table(options.size, found["tracing"]))
    if found["compiling"]:
        console.print(compiling_table(options.size, found["compiling"]))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.size}.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(options.out / f"{options.size}.png", options.size, found)
    console.print(f"{options.out}, after {time.monotonic() - start:.0f} s", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

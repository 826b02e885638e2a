"""Cost of optimizers in a step: bytes, FLOP, memory and compile time, compiled ahead of time for accelerators.

    python -m benchmarks.optimizers                                     1.3B on three topologies, every optimizer
    python -m benchmarks.optimizers --size small --topologies v5e:2x4 --cases adamw muon
    python -m benchmarks.optimizers --losses adamw=runs/a muon=runs/b   the loss curves of training jobs, drawn together

  adamw            elementwise, without communication: the baseline
  adafactor        factored moments, on global arrays
  muon, optax      ``optax.contrib.muon`` on the same leaves, on global arrays, partitioned by XLA
  muon             ``muon`` of this library: two all-to-alls for each shape of matrices
  muon, bfloat16   ``muon`` of this library with momentum and updates sent in bfloat16

Every optimizer trains the same model by ``make_train_step``. Writes ``<out>/<size>.json`` and ``<out>/<size>.png``.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from rich.console import Console

from benchmarks.cases import CASES as STEPS
from benchmarks.cases import OURS, SIZES, mesh_axes, threshold, training
from benchmarks.forecasts import on_gpus
from benchmarks.large_models import Size
from benchmarks.report import bars, draw_losses, panels
from benchmarks.run_log import read_rows
from xlstm_jax.distributed import muon
from xlstm_jax.distributed.optimizers import matrix_dimensions
from xlstm_jax.forecast import CompileError, Forecast, forecast, parse_topology
from xlstm_jax.formatting import format_bytes, rich_table

RATE = 1e-3
OUT = Path(__file__).parent / "results" / "optimizers"
TOPOLOGIES = ("v5e:2x4", "v5e:16x16", "v5p:4x4x8")
BASE = "adamw"
CASES: dict[str, Callable[[], optax.GradientTransformation]] = {
    BASE: lambda: optax.adamw(RATE),
    "adafactor": lambda: optax.adafactor(RATE),
    "muon, optax": lambda: _per_tree(lambda params: optax.contrib.muon(RATE, muon_weight_dimension_numbers=params)),
    "muon": lambda: muon(RATE),
    "muon, bfloat16": lambda: muon(RATE, exchange_dtype=jnp.bfloat16),
}
WORDS = "adamw: nothing travels for it; muon, optax: optax.contrib.muon on global arrays; muon: this library's."
QUANTITIES = {
    "wire_bytes": "sent more than by AdamW, GB",
    "flops": "FLOP more than AdamW, 1e12",
    "temporary_bytes": "temporaries, GB",
    "compile_seconds": "compilation, s",
}
SCALES = {"wire_bytes": 1e9, "flops": 1e12, "temporary_bytes": 1e9, "compile_seconds": 1.0}


def _per_tree(build: Callable[[Any], optax.GradientTransformation]) -> optax.GradientTransformation:
    """Creates a transform that calls ``build`` with the library's matrix dimensions of each tree."""

    def of(tree: Any) -> optax.GradientTransformation:
        return build(matrix_dimensions()(tree))

    return optax.GradientTransformation(
        lambda params: of(params).init(params), lambda grads, state, params=None: of(grads).update(grads, state, params)
    )


def compiled(size: Size, case: str, topology: str) -> Forecast:
    """Forecasts the step of a model with an optimizer, compiled for a topology."""
    parsed = parse_topology(topology)
    sizes = mesh_axes(STEPS["ours"], parsed.shape, gpus=on_gpus(parsed))
    options = {"devices": parsed.num_devices, "min_weight_size": threshold(size), **OURS, "shard_axes": tuple(sizes)}
    workload = dataclasses.replace(training(size, **options), tx=CASES[case]())
    step, args = workload.build_step(sizes)
    return forecast(step, *args, topology=topology, compiler_options="auto")


def figures(found: Forecast) -> dict[str, float]:
    """Extracts the compared values from a forecast, per device and step."""
    exchanges = [c for c in found.collectives if c.kind == "all-to-all"]
    repeated = max(0.0, (found.shared_flops or 0.0) - found.flops.shared)  # FLOP that devices compute redundantly
    return {
        "wire_bytes": found.wire_bytes,
        "flops": found.flops.total + repeated,
        "temporary_bytes": found.memory.temporary_bytes,
        "compile_seconds": found.compile_seconds,
        "all_to_alls": sum(c.count for c in exchanges),
        "all_to_all_bytes": sum(c.wire_bytes_per_step for c in exchanges),
        "beside_work": sum(c.count for c in exchanges if c.asynchronous),
        "of_optimizer": sum(c.count for c in found.collectives if "muon" in c.op_name),
    }


def measured(size: Size, cases: Sequence[str], topology: str) -> dict[str, dict[str, float]]:
    """Returns the figures of AdamW and of each optimizer in ``cases`` on a topology."""
    found = {}
    for case in dict.fromkeys((BASE, *cases)):
        try:
            found[case] = figures(compiled(size, case, topology))
        except (CompileError, TimeoutError) as error:
            found[case] = {"problem": str(error).splitlines()[0]}
    return found


def more_than_adamw(found: dict[str, dict[str, Any]], quantity: str) -> dict[str, float]:
    """Returns a quantity by optimizer: the difference to AdamW for sent bytes and FLOP, otherwise the total."""
    on_top = quantity in ("wire_bytes", "flops")
    base = found[BASE][quantity] if on_top else 0.0
    return {case: one[quantity] - base for case, one in found.items() if "problem" not in one}


def table(topology: str, found: dict[str, dict[str, Any]]) -> Any:
    """Builds the table: bytes and FLOP in addition to AdamW, with ratios to optax's Muon in the first columns."""
    theirs = {q: more_than_adamw(found, q).get("muon, optax") for q in ("wire_bytes", "flops")}
    rows = []
    for case, one in found.items():
        if "problem" in one:
            rows.append([case, *[""] * 6, one["problem"]])
            continue
        own = {q: more_than_adamw(found, q)[case] for q in theirs}
        ratios = [f"1/{theirs[q] / own[q]:.3g}" if theirs[q] and own[q] else "" for q in theirs]
        shown = [format_bytes(max(own["wire_bytes"], 0)), f"{own['flops']:.3g}", format_bytes(one["temporary_bytes"])]
        rows.append(
            [case, *ratios, *shown, f"{one['flops'] / found[BASE]['flops'] - 1:.1%}", f"{one['compile_seconds']:.0f} s"]
        )
    columns = ["optimizer", "bytes", "FLOP", "sent on top", "FLOP on top", "temporaries", "of AdamW's step", "compile"]
    return rich_table(f"{topology}: per device and step; ratios to optax's Muon", columns, rows, right=1)


def draw(path: Path, size: str, topologies: dict[str, Any]) -> None:
    """Draws a block of plots per quantity, with a plot per topology."""
    names = list(dict.fromkeys(case for found in topologies.values() for case in found))
    blocks = {
        title: {t: partial(_draw, found=found, quantity=quantity) for t, found in topologies.items()}
        for quantity, title in QUANTITIES.items()
    }
    panels(path, f"{size}: what optimizers cost each device in a step", WORDS, len(names), blocks)


def _draw(axes: Any, found: dict[str, Any], quantity: str) -> None:
    values = {case: value / SCALES[quantity] for case, value in more_than_adamw(found, quantity).items()}
    bars(axes, values)


def _draw_runs(path: Path, named_folders: Sequence[str]) -> int:
    folders = dict(one.split("=", 1) for one in named_folders)
    draw_losses(path, "the training job by optimizer", {name: read_rows(Path(at)) for name, at in folders.items()})
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    new = argparse.ArgumentParser("optimizers", description="What an optimizer costs in a step.")
    new.add_argument("--size", choices=SIZES, default="1.3B", help="of the model (default: 1.3B)")
    new.add_argument("--topologies", nargs="+", default=TOPOLOGIES, metavar="TOPOLOGY", help="as v5e:16x16")
    new.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="optimizers")
    new.add_argument("--out", type=Path, default=OUT, help="folder for figures and picture")
    new.add_argument("--losses", nargs="+", metavar="NAME=FOLDER", help="draw these runs of the training job instead")
    options = new.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.losses:
        return _draw_runs(options.out / "losses.png", options.losses)
    console, path = Console(), options.out / f"{options.size}.json"
    topologies = json.loads(path.read_text()) if path.exists() else {}
    for topology in options.topologies:
        topologies[topology] = topologies.get(topology, {}) | measured(SIZES[options.size], options.cases, topology)
        path.write_text(json.dumps(topologies, indent=1) + "\n")
        console.print(table(topology, topologies[topology]))
    draw(path.with_suffix(".png"), options.size, topologies)
    return 0


if __name__ == "__main__":
    sys.exit(main())

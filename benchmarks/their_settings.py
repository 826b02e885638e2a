"""Llama 3.1 8B in the settings of MaxText's recipes: ``jit`` in MaxText's layout, this library, and published times.

    python -m benchmarks.their_settings             compiles missing rows; each some minutes of a core
    python -m benchmarks.their_settings --redraw    table of stored rows, without compiling
    python -m benchmarks.their_settings --rows "v6e:16x16 ours"

Model, batch, layout and remat are those of MaxText's ``llama3_1_8b_8192`` (``maxtext_trillium_model_configs.py`` at
9f1820b, named by tpu-recipes at a9e0929, ``training/trillium/Llama3.1-8B-MaxText/v6e-256``): per_device_batch_size 4,
max_target_length 8192, ici_fsdp_parallelism -1 (one axis over all devices), attention "flash", layers in a scan
(``base.yml``). The recipe keeps five activations of a layer in host memory; both sides here recompute them (remat
"full", the default of ``base.yml``), because the rate of transfers to the host is not known for v6e.

  jit    global arrays and XLA's partitioner; each kernel split along the width of the model over one axis, as
         MaxText's rules ("embed" over "fsdp") do
  ours   ``shard_modules``: one axis for each dim of the torus, gathered and scattered in bfloat16

Both sides have the same loss (from the full logits), AdamW in float32, options of XLA, reader, and substitute for flash
attention, whose products are counted by a formula (``benchmarks.published``).
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from benchmarks import baselines
from benchmarks.cases import CASES, mesh_axes
from benchmarks.decoder import SIZES, decoder
from benchmarks.published import MIN_WEIGHT_SIZE, TRILLIUM, Run, flash_flops, in_place_of_flash
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import CompileError, TimeRatio, parse_topology
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.compiling.report_cache import user_cache
from xlstm_jax.forecast.cost.flops import count_flops
from xlstm_jax.forecast.cost.time_range import Range
from xlstm_jax.forecast.forecasting import read
from xlstm_jax.forecast.training.workload import one_line_text
from xlstm_jax.formatting import rich_table

OUT = Path(__file__).parent / "results" / "their_settings"
KEPT = OUT / "rows.json"
SIDES = ("jit", "ours")
PATIENCE_S = 7200.0  # of a compilation on a busy machine
LONG_V5P = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/1898d3e/training/v5p/Llama3.1-8B-LongContext-Maxtext"
SETTINGS = {
    "v6e:16x16": Run(
        size=SIZES["llama3.1_8B"], topology="v6e:16x16", rows=4, context=8192, seconds=4.546,
        source=f"{TRILLIUM}/Llama3.1-8B-MaxText/v6e-256",
        said="4.546 s, 417 TFLOP/s; five activations of a layer in host memory, JAX 0.6.1",
    ),
    # No recipe has 8,192 tokens on v5p. The nearest has as many tokens a device, in rows of 65,536.
    "v5p:4x4x4": Run(
        size=SIZES["llama3.1_8B"], topology="v5p:4x4x4", rows=4, context=8192, seconds=math.nan, source=LONG_V5P,
        said="none at 8,192 tokens; 10.25 s for half a row of 65,536 tokens a device, of 4 devices each, heads of 256",
    ),
}  # fmt: skip


def step_of(run: Run, side: str) -> tuple[Any, tuple[Any, ...]]:
    """Builds the step of a side, and its abstract arguments."""
    place = parse_topology(run.topology)
    options = {"devices": place.num_devices, "rows": run.rows, "context": run.context, "attention": in_place_of_flash}
    if side == "ours":
        sizes = mesh_axes(CASES["ours"], place.shape)
        sharding = {"shard_axes": tuple(sizes), "min_weight_size": MIN_WEIGHT_SIZE}
        return decoder(run.size, **options, **sharding, grad_scatter_dtype=jnp.bfloat16).build_step(sizes)
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": place.num_devices})
    split = partial(baselines.split_width, run.size.dim)
    return baselines.jit_step(decoder(run.size, **options), mesh, MIN_WEIGHT_SIZE, split)


def row_of(run: Run, side: str) -> dict[str, Any]:
    """Compiles a side, and returns the row that is stored: seconds and bytes per device and step."""
    place = parse_topology(run.topology)
    step, args = step_of(run, side)
    options = compiler_options(place.chip.device_kinds[0], shape=place.shape, chosen_by="forecast")
    asked = {"topology": run.topology, "compiler_options": options, "cache": user_cache(), "timeout_s": PATIENCE_S}
    try:
        compiled = compile_for_topology(step, *args, **asked)
    except CompileError as error:
        return {"problem": one_line_text(error)[:300]}
    found = read(compiled, count_flops(step.trace(*args).jaxpr, compiled.devices), run.rows * run.context)
    assert found.step_time is not None and found.wait_time is not None
    # The products of flash attention, at the rate of the other products; the compiled step has a substitute.
    rates = [chip.peak_flops["bfloat16"] for chip in (run.chip, run.chip.reached, run.chip.reached)]
    attention = Range(*(flash_flops(run) / rate for rate in rates))
    return {
        "step_range": found.step_time.plus(attention)._asdict(),
        "waited_range": found.wait_time._asdict(),
        "attention_range": attention._asdict(),
        "zero_fill_seconds": found.fill_excess_seconds,
        "collectives": sum(one.count for one in found.collectives),
        "wire_bytes": found.wire_bytes,
        "total_bytes": found.total_bytes,
        "available_bytes": found.available_bytes,
        "flops": found.flops.by_direction(),
        "compiler_options": options,
        "compile_seconds": found.compile_seconds,
        "versions": found.versions,
    }


# ------------------------------------------------------------------------------------------------------------ the table

Row = Mapping[str, Any]


def ratio(rows: Mapping[str, Row]) -> TimeRatio | None:
    """Returns the time of ours relative to ``jit`` as a range, under equal assumptions; None without both sides."""
    times = [Range(**rows[side]["step_range"]) for side in reversed(SIDES) if "step_range" in rows.get(side, {})]
    return times[0].over(times[1]) if len(times) == len(SIDES) else None


COLUMNS = ("chips", "", "s/step: least", "expected", "most", "waiting, s", "collectives", "GB sent", "peak GiB")


def cells(topology: str, rows: Mapping[str, Row]) -> list[list[str]]:
    """Formats the rows of a topology: the published time, both sides, and their ratio."""
    run = SETTINGS[topology]
    published = "not published" if math.isnan(run.seconds) else f"{run.seconds:.3f}"
    found = [[topology, "published", "", published, *[""] * 5]]
    for side in SIDES:
        row = rows.get(side, {"problem": "not compiled yet"})
        if "problem" in row:
            found.append([topology, side, "", row["problem"], *[""] * 5])
            continue
        times = [f"{row['step_range'][end]:.3f}" for end in Range._fields]
        memory = f"{row['total_bytes'] / 2**30:.2f} of {row['available_bytes'] / 2**30:.2f}"
        counts = [f"{row['waited_range']['expected']:.3f}", f"{row['collectives']:,}", f"{row['wire_bytes'] / 1e9:.1f}"]
        found.append([topology, side, *times, *counts, memory])
    both = ratio(rows)
    if both is not None:
        found.append([topology, "ours / jit", "", str(both), *[""] * 5])
    return found


def stored() -> dict[str, dict[str, Any]]:
    """Returns the stored rows by topology and side."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(topology: str, side: str, row: Row) -> None:
    """Stores a row, in the order of ``SETTINGS`` and ``SIDES``."""
    kept = stored()
    kept.setdefault(topology, {})[side] = row
    ordered = {t: {s: kept[t][s] for s in SIDES if s in kept[t]} for t in SETTINGS if t in kept}
    OUT.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(ordered, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    names = [f"{topology} {side}" for topology in SETTINGS for side in SIDES]
    parser = argparse.ArgumentParser("their_settings", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=f"of {', '.join(names)}")
    parser.add_argument("--redraw", action="store_true", help="table of the stored rows; compile nothing")
    options = parser.parse_args(arguments)
    for name in () if options.redraw else options.rows:
        topology, side = name.split()
        keep(topology, side, row_of(SETTINGS[topology], side))
    kept = stored()
    rows = [line for topology in SETTINGS for line in cells(topology, kept.get(topology, {}))]
    Console(width=140).print(rich_table("Llama 3.1 8B, 4 x 8,192 tokens a device", list(COLUMNS), rows, left=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

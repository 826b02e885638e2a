"""Memory of training beyond device memory: offload, weight averages, frozen and quantised weights.

    python -m benchmarks.beyond_hbm                            7B on v5e:4x4 and h100:1x8
    python -m benchmarks.beyond_hbm --size small --topologies v5e:2x4 --cases adamw "moments on the host"
    python -m benchmarks.beyond_hbm --redraw                   table and picture of stored results

The Transformers of ``large_models``, with remat of layers and losses by chunks of the vocabulary, are compiled ahead of
time, and not run. Writes ``<out>/<size>.json`` and ``<out>/<size>.png``.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optax
from rich.console import Console

from benchmarks import lora
from benchmarks.cases import CASES as STEPS
from benchmarks.cases import SIZES, mesh_axes
from benchmarks.forecasts import on_gpus
from benchmarks.large_models import Size, language_model
from benchmarks.report import bars, panels
from xlstm_jax.distributed import Offload, with_ema
from xlstm_jax.forecast import CompileError, Forecast, forecast, parse_topology
from xlstm_jax.forecast.training import Workload
from xlstm_jax.formatting import format_bytes, rich_table

OUT = Path(__file__).parent / "results" / "beyond_hbm"
TOPOLOGIES = ("v5e:4x4", "h100:1x8")
GIB = 2**30
RATE, DECAY = 3e-4, 0.999
OF_BASE = ("float32", "bfloat16")


def trained(**changes: Any) -> Callable[..., Workload]:
    """Returns a builder of workloads that train every weight, with changed model options and workload fields."""
    of_workload = {name: changes.pop(name) for name in ("tx", "offload") if name in changes}

    def build(size: Size, **options: Any) -> Workload:
        return dataclasses.replace(language_model(size, **(options | changes)), **of_workload)

    return build


def _adapted(frozen_dtype: str) -> Callable[..., Workload]:
    """Returns a builder of workloads that train adapters; the base is stored and gathered in ``frozen_dtype``."""

    def build(size: Size, **options: Any) -> Workload:
        return lora.adapted(language_model(size, **options), frozen_dtype)

    return build


AVERAGED = with_ema(optax.adamw(RATE), DECAY)
CASES: dict[str, Callable[..., Workload]] = {
    "adamw": trained(),
    "moments on the host": trained(offload=Offload()),
    "an average of the weights": trained(tx=AVERAGED),
    "an average, on the host": trained(tx=AVERAGED, offload=Offload()),
    "gathers in int8": trained(gather_dtype="int8"),
    **{f"LoRA on {dtype}": _adapted(dtype) for dtype in OF_BASE},
}
WORDS = (
    "adamw: all weights are trained, float32, gathered in bfloat16. On the host: the optimizer's state in its memory. "
    "LoRA on ...: adapters of rank 16 are trained, the base is frozen, stored and gathered in that dtype. "
    "Red: what a device has."
)
QUANTITIES = {"total": "memory of a device, GiB", "host": "memory of its host, GiB", "wire": "sent in a step, GB"}
SCALES = {"total": GIB, "host": GIB, "wire": 1e9}


def compiled(size: Size, case: str, topology: str) -> Forecast:
    """Forecasts the step of a case, compiled for a topology."""
    parsed = parse_topology(topology)
    sizes = mesh_axes(STEPS["ours"], parsed.shape, gpus=on_gpus(parsed))
    options = {"devices": parsed.num_devices, "shard_axes": tuple(sizes), "remat": True, "chunked_head": True}
    workload = CASES[case](size, min_weight_size=lora.MIN_WEIGHT_SIZE, **options)
    step, args = workload.build_step(sizes)
    return forecast(step, *args, topology=topology)


def figures(found: Forecast) -> dict[str, Any]:
    """Extracts bytes per device, bytes stored on the host, and the times of the step and of host transfers."""
    return {
        "arguments": found.memory.argument_bytes,
        "temporaries": found.memory.temporary_bytes,
        "total": found.total_bytes,
        "available": found.available_bytes,
        "fits": found.fits,
        "host": found.host.stored_bytes if found.host else 0,
        "host_seconds": found.host.seconds if found.host else 0.0,
        "host_waited_seconds": found.host.waited_s if found.host else 0.0,
        "step_seconds": found.step_seconds,
        "wire": found.wire_bytes,
    }


def measured(size: Size, cases: Sequence[str], topology: str) -> dict[str, dict[str, Any]]:
    """Returns the figures of each case on a topology."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        try:
            found[case] = figures(compiled(size, case, topology))
        except CompileError as error:
            found[case] = {"problem": str(error).splitlines()[0]}
    return found


def table(topology: str, found: dict[str, dict[str, Any]]) -> Any:
    """Builds the table with a row per case; the first column is whether the case fits."""
    rows = []
    for case, one in found.items():
        if "problem" in one:
            rows.append([case, "no", *[""] * 5, one["problem"]])
            continue
        shown = [format_bytes(one[name]) for name in ("total", "arguments", "temporaries", "host", "wire")]
        waited = f"{1e3 * one['host_waited_seconds']:.0f} of {1e3 * one['step_seconds']:.0f} ms"
        rows.append([case, "yes" if one["fits"] else "no", *shown, waited])
    columns = ["what", "fits", "in all", "arguments", "temporaries", "on the host", "sent", "waits for the host"]
    available = next((one["available"] for one in found.values() if "available" in one), None)
    title = f"{topology}: per device and step" + (f"; {format_bytes(available)} are there" if available else "")
    return rich_table(title, columns, rows, right=2)


def draw(path: Path, size: str, topologies: dict[str, Any]) -> None:
    """Draws a block of plots per quantity, with a plot per topology."""
    cases = max(map(len, topologies.values()))
    blocks = {
        title: {t: partial(_draw, found=found, quantity=quantity) for t, found in topologies.items()}
        for quantity, title in QUANTITIES.items()
    }
    panels(path, f"{size}: what training takes beyond and within a device's memory", WORDS, cases, blocks)


def _draw(axes: Any, found: dict[str, Any], quantity: str) -> None:
    values = {case: one.get(quantity, 0) / SCALES[quantity] for case, one in found.items()}
    available = max((one.get("available", 0) for one in found.values()), default=0) / GIB if quantity == "total" else 0
    if available:
        axes.axvline(available, color="#d1495b", lw=1)
    bars(axes, values, available)


def main(arguments: Sequence[str] | None = None) -> int:
    new = argparse.ArgumentParser("beyond_hbm", description="What needs less memory than a device has.")
    new.add_argument("--size", choices=SIZES, default="7B", help="of the model (default: 7B)")
    new.add_argument("--topologies", nargs="+", default=TOPOLOGIES, metavar="TOPOLOGY", help="as v5e:4x4")
    new.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is compared")
    new.add_argument("--out", type=Path, default=OUT, help="folder for figures and picture")
    new.add_argument("--redraw", action="store_true", help="compile nothing")
    options = new.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.size}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for topology in () if options.redraw else options.topologies:
        for case in options.cases:
            kept.setdefault(topology, {}).update(measured(SIZES[options.size], [case], topology))
            path.write_text(json.dumps(kept, indent=1) + "\n")
    for topology, found in kept.items():
        Console().print(table(topology, found))
    draw(path.with_suffix(".png"), options.size, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())

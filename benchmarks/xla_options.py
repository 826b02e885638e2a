"""Effect of XLA options for GPUs on a training step: hidden bytes, waiting time, memory, compile time.

    python -m benchmarks.xla_options                                1.3B on 256 H100, every option, jit and ours
    python -m benchmarks.xla_options --topologies b200:32x8 --options default "8 at once" --cases ours

A row of the table is the same step, compiled without options ("default"), or with one or several options. A compilation
that fails or crashes is a row, too. Results are stored in ``<out>/<size>_<topology>_jax<version>.json``, and reused
while program, options and versions are unchanged.

  hidden    fraction of bytes sent beside matrix products that take at least as long, by rooflines
  beside    fraction of bytes sent beside any matrix product
  waited    time per step that the schedule waits for collectives, with NCCL's latencies
  held      bytes of temporaries
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks.cases import CASES, SIZES
from benchmarks.forecasts import compiled, forecast_case
from benchmarks.xla_flags import OPTIONS
from xlstm_jax.formatting import format_bytes, rich_table

OUT = Path(__file__).parent / "results" / "options"
TOPOLOGIES = ("h100:32x8",)


def measured(name: str, topology: str, case: str, option: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the row of an option: ``known`` if it belongs to the same program, else the result of compiling."""
    chosen = dataclasses.replace(CASES[case], tuned=False, xla_options=OPTIONS[option])
    found = forecast_case(SIZES[name], chosen, topology, known)
    return found if found is known or "problem" in found else row_of(found)


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """Extracts the overlap from a stored forecast: fractions, bytes and seconds per device and step."""
    sent = found["wire_bytes"]["total"]
    return {
        "program": found["program"],
        "compiler_options": found["compiler_options"],
        "hidden_share": found["hidden_bytes"]["beside as long"] / sent,
        "beside_share": found["hidden_bytes"]["beside any"] / sent,
        "asynchronous_share": found["wire_bytes"]["asynchronous"] / sent,
        "exposed_seconds": found["seconds"]["exposed"],
        "exposed_by_bandwidth_seconds": found["gpu_seconds"]["exposed by bandwidth"],
        "kernel_seconds": found["gpu_seconds"]["kernels"],
        "temporary_bytes": found["bytes"]["temporaries"],
        "collectives_per_layer": found["collectives_per_layer"],
        "compile_seconds": found["compile_seconds"],
        "versions": found["versions"],
    }


def path_of(out: Path, name: str, topology: str) -> Path:
    return out / f"{name}_{topology.replace(':', '_')}_jax{jax.__version__}.json"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Reads the stored rows: case -> option -> row."""
    return json.loads(path.read_text()) if path.exists() else {}


def compute(path: Path, name: str, topology: str, cases: Sequence[str], options: Sequence[str], console: Any) -> None:
    """Computes the rows that are not stored yet; writes each row immediately."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for case, option in ((case, option) for case in cases for option in options):
        rows = read(path)
        with console.status(f"{name} on {topology}: {case}, {option}"):
            row = measured(name, topology, case, option, rows.get(case, {}).get(option))
        rows.setdefault(case, {})[option] = row
        path.write_text(json.dumps(rows, indent=1) + "\n")


def table(name: str, topology: str, case: str, rows: dict[str, Any]) -> Any:
    """Builds the table with options as rows, and a table of failed compilations if there are failures."""
    title = f"{name} on {topology}, {case}"
    columns = ["option", "hidden", "beside", "waited", "held", "compiled"]
    cells = [_cells(option, row) for option, row in rows.items()]
    problems = rich_table("Refused", ["option", "by the compiler"], _problems(rows), right=1)
    return rich_table(title, columns, cells), *([problems] if len(compiled(rows)) < len(rows) else [])


def _cells(option: str, row: dict[str, Any]) -> list[str]:
    if "problem" in row:
        return [option, *[""] * 5]
    return [
        option,
        f"{row['hidden_share']:.0%}",
        f"{row['beside_share']:.0%}",
        f"{1e3 * row['exposed_seconds']:,.1f} ms",
        format_bytes(row["temporary_bytes"]),
        f"{row['compile_seconds']:.0f} s",
    ]


def _problems(rows: dict[str, Any]) -> list[list[str]]:
    return [[option, row["problem"]] for option, row in rows.items() if "problem" in row]


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("xla_options", description="What XLA's options for GPUs do to a step.")
    new.add_argument("--sizes", nargs="+", choices=SIZES, default=["1.3B"], help="models (default: 1.3B)")
    new.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), help="as h100:32x8")
    new.add_argument("--cases", nargs="+", choices=CASES, default=["jit", "ours"], help="see benchmarks/cases.py")
    new.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="default: all")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files")
    new.add_argument("--redraw", action="store_true", help="compile nothing; tables of what is kept")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options, console = parser().parse_args(arguments), Console()
    for name, topology in ((name, topology) for name in options.sizes for topology in options.topologies):
        path = path_of(options.out, name, topology)
        try:
            if not options.redraw:
                compute(path, name, topology, options.cases, options.options, console)
        except (ValueError, ImportError) as error:
            Console(stderr=True).print(f"xla_options: error: {error}", highlight=False)
            return 2
        for case, rows in read(path).items():
            console.print(*table(name, topology, case, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

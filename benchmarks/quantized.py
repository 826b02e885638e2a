"""Effect of quantized gathers and reductions on a training: the job of ``wire_dtypes``, from the same seeds.

    python -m benchmarks.quantized                          some ten minutes on the CPU
    python -m benchmarks.quantized --only "int8 copies"     one row, added to the existing rows
    python -m benchmarks.quantized --redraw                 the table from the existing JSON

Shards are replicated along "dp", on 4 x 2 simulated devices. Held-out losses are compared with the float32 losses from
the same seed; ± is the standard error of the difference over seeds.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.wire_dtypes import CONFIG, OUT, SEEDS, SIMULATED_DEVICES, Training, compared, train, versions
from xlstm_jax.distributed import Replicas
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.formatting import rich_table

FILE = OUT / "quantized.json"
BASE = "float32"
FORMATS = {"int8": "int8", "float8": "float8_e4m3fn"}


def trainings() -> dict[str, Training]:
    """Returns the trainings by name; the first training is the baseline."""
    mesh = {"dp": 4, "fsdp": SIMULATED_DEVICES // 4}
    copies = {f"{name} copies": {"replicas": Replicas("dp", dtype)} for name, dtype in FORMATS.items()}
    gathers = {f"{name} gathers": {"gather_dtype": dtype} for name, dtype in FORMATS.items()}
    return {name: Training(mesh, options) for name, options in ({BASE: {}} | copies | gathers).items()}


def table(found: dict[str, Any]) -> Any:
    """Builds the table, with a row for each training."""
    shown = rich_table("held-out loss", ["training", "mean", "beside float32, same seed", "at most", "spread of seeds"])
    for row in compared(found["runs"]):
        off = f"{row['mean difference']:+.4f} ± {row['standard error']:.4f}"
        largest, spread = f"{row['largest difference']:.4f}", f"{row['spread of seeds']:.4f}"
        shown.add_row(row["training"], f"{row['held-out loss']:.4f}", off, largest, spread)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("quantized", description="What packed gathers and reductions do to a training.")
    parser.add_argument("--only", choices=tuple(trainings()), nargs="+", default=list(trainings()), help="these rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="at least two")
    parser.add_argument("--redraw", action="store_true", help="compute nothing; the table of what is there")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file")
    options = parser.parse_args(arguments)
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    available_devices(SIMULATED_DEVICES)  # before JAX initialises its devices
    for name in () if options.redraw else options.only:
        runs[name] = list(train(CONFIG, trainings()[name], options.seeds))
    if not options.redraw:
        runs = {name: runs[name] for name in trainings() if name in runs}
        options.out.write_text(json.dumps({"runs": runs, "steps": CONFIG.steps, "versions": versions()}) + "\n")
    Console().print(table({"runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Effect of Flax's fp8 products, and of fp8 gathers, on a training, compared with bfloat16 from the same seeds.

    python -m benchmarks.fp8                       some ten minutes on the CPU
    python -m benchmarks.fp8 --only bfloat16       one row, added to the existing rows
    python -m benchmarks.fp8 --redraw              the table from the existing JSON

Job and text are the same as in ``wire_dtypes``, for 500 steps, with the projections of the blocks in float8: inputs and
kernels in e4m3, gradients in e5m2. Embedding, norms, attention and the head stay in bfloat16. A CPU has no fp8
products, and multiplies the rounded values.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn
from rich.console import Console

from benchmarks.wire_dtypes import CONFIG, OUT, SEEDS, Training, compared, train, versions
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.formatting import rich_table

FILE = OUT / "fp8.json"
BASE = "bfloat16"
DEVICES = 2
FP8_CONFIG = dataclasses.replace(CONFIG, steps=500, dtype=BASE)


def trainings() -> dict[str, Training]:
    """Returns the trainings by name; the first training is the baseline."""
    mesh, narrow, fp8 = {"fsdp": DEVICES}, {"gather_dtype": BASE}, {"gather_dtype": "float8_e4m3fn"}
    return {
        BASE: Training(mesh, narrow),
        "float8": Training(mesh, product=nn.Fp8DirectDotGeneralOp),
        "float8, blocks gathered so": Training(mesh, fp8, product=nn.Fp8DirectDotGeneralOp, edges=narrow),
        "float8, gathered so": Training(mesh, fp8, product=nn.Fp8DirectDotGeneralOp),
    }


def rows(runs: dict[str, Any]) -> list[list[str]]:
    """Returns a table row for each training."""
    shown = []
    error = {name: np.std([run["held_out"] for run in of], ddof=1) / math.sqrt(len(of)) for name, of in runs.items()}
    for row in compared(runs, BASE):
        name, off, paired = row["training"], row["mean difference"], row["standard error"]
        both = math.hypot(error[name], error[BASE])
        beside = [f"{off:+.4f} ± {paired:.4f}", f"{off / paired:+.1f}", f"{off / both:+.1f}"] if paired else [""] * 3
        shown.append([name, f"{row['held-out loss']:.4f} ± {error[name]:.4f}", *beside])
    return shown


def table(found: dict[str, Any]) -> Any:
    """Builds the table of held-out losses, with differences in standard errors of paired seeds and of two means."""
    columns = ["products", "held-out loss", f"beside {BASE}, same seed", "in its errors", "in those of two means"]
    return rich_table(f"Held-out loss after {found['steps']} steps", columns, rows(found["runs"]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("fp8", description="What products in float8 do to a training.")
    parser.add_argument("--only", choices=tuple(trainings()), nargs="+", default=list(trainings()), help="these rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="at least two")
    parser.add_argument("--steps", type=int, default=FP8_CONFIG.steps, help="of each training")
    parser.add_argument("--redraw", action="store_true", help="compute nothing; the table of what is there")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file")
    options = parser.parse_args(arguments)
    kept = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    available_devices(DEVICES)  # before JAX initialises its devices
    config, runs = dataclasses.replace(FP8_CONFIG, steps=options.steps), kept["runs"]
    for name in () if options.redraw else options.only:
        runs[name] = list(train(config, trainings()[name], options.seeds))
        found = {"runs": {name: runs[name] for name in trainings() if name in runs}, "steps": config.steps}
        options.out.write_text(json.dumps(found | {"versions": versions()}) + "\n")
    if BASE in runs:
        Console().print(table(json.loads(options.out.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

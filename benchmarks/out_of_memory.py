"""Savings and costs of measures against running out of memory: the table of docs/howto/out_of_memory.md.

    python -m benchmarks.out_of_memory                       7B on v5e:2x4, each measure added to the preceding measures
    python -m benchmarks.out_of_memory --show                the table of the stored figures

The 7B Transformer of ``large_models`` with four sequences per device is compiled ahead of time, and not run. Writes
``<out>/<topology>.json``, from which ``table`` builds the rows of the page.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.beyond_hbm import figures, trained
from benchmarks.cases import CASES as STEPS
from benchmarks.cases import mesh_axes
from benchmarks.forecasts import on_gpus
from benchmarks.large_models import CONTEXT, SIZES
from xlstm_jax.distributed import Offload, remat_policy
from xlstm_jax.forecast import Forecast, forecast, parse_topology
from xlstm_jax.forecast.training import Workload

OUT = Path(__file__).parent / "results" / "out_of_memory"
SEQUENCES = 4  # on each device
GIB = 2**30

# Changes by the name on the page: options of the model, fields of the workload, minibatches.
Change = dict[str, Any]
MEASURES: dict[str, Change] = {
    "FSDP alone": {},
    "`reshard_after_forward=True`": {"reshard_after_forward": True},
    f"`num_minibatches={SEQUENCES}`": {"num_minibatches": SEQUENCES},
    'in place of both: `nn.remat`, `remat_policy("dots")`': {
        "reshard_after_forward": False,
        "num_minibatches": 1,
        "remat": remat_policy("dots"),
    },
    "`nn.remat` without a policy": {"remat": True},
    "`chunked_cross_entropy`": {"chunked_head": True},
    "`optax.adamw(mu_dtype=jnp.bfloat16)`": {"tx": optax.adamw(3e-4, mu_dtype=jnp.bfloat16)},
    "`offload=Offload()`": {"offload": Offload()},
}


def changes_up_to(measure: str) -> Change:
    """Returns the combined changes of a measure and the preceding measures."""
    names = list(MEASURES)
    together: Change = {}
    for name in names[: names.index(measure) + 1]:
        together |= MEASURES[name]
    return together


def workload(devices: int, shard_axes: tuple[str, ...], **changes: Any) -> Workload:
    """Creates the workload with ``changes``."""
    made = trained(**changes)(SIZES["7B"], devices=devices, shard_axes=shard_axes)
    tokens = jax.ShapeDtypeStruct((SEQUENCES * devices, CONTEXT + 1), jnp.int32)
    return dataclasses.replace(made, batch=tokens)


def compiled(measure: str, topology: str) -> Forecast:
    """Forecasts the step with a measure and the preceding measures, compiled for a topology."""
    parsed = parse_topology(topology)
    sizes = mesh_axes(STEPS["ours"], parsed.shape, gpus=on_gpus(parsed))
    changes = changes_up_to(measure)
    minibatches = changes.pop("num_minibatches", 1)
    step, args = workload(parsed.num_devices, tuple(sizes), **changes).build_step(sizes, minibatches)
    return forecast(step, *args, topology=topology)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Formats the figures as a Markdown table."""
    rows = ["| added to the rows above | peak GiB | state GiB | host GiB | fits | sent GB | s/step |"]
    rows.append("| --- | ---: | ---: | ---: | --- | ---: | ---: |")
    for measure, one in found.items():
        bytes_ = [f"{one[name] / GIB:.1f}" if one[name] else "" for name in ("total", "arguments", "host")]
        costs = [f"{one['wire'] / 1e9:.0f}", f"{one['step_seconds']:.2f}"]
        rows.append(f"| {' | '.join([measure, *bytes_, 'yes' if one['fits'] else 'no', *costs])} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    new = argparse.ArgumentParser("out_of_memory", description="What each measure saves and costs.")
    new.add_argument("--topology", default="v5e:2x4", help="as v5e:2x4 or h100:1x8 (default: v5e:2x4)")
    new.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES), help="those to compile")
    new.add_argument("--out", type=Path, default=OUT, help="folder for the figures")
    new.add_argument("--show", action="store_true", help="compile nothing")
    options = new.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.topology.replace(':', '_')}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for measure in () if options.show else options.measures:
        kept[measure] = figures(compiled(measure, options.topology))
        path.write_text(json.dumps({name: kept[name] for name in MEASURES if name in kept}, indent=1) + "\n")
    print(table(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())

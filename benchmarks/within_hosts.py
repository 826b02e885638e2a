"""Weights gathered again within a host alone, compared with a gather over hosts and within: two models on 32 x 8 H100.

    python -m benchmarks.within_hosts              compiles the missing programs, some ten minutes of one core
    python -m benchmarks.within_hosts --redraw     the table of the stored programs, with today's constants

Both rows of a model are the library's step with the same options (``ours, best options, kernel`` of ``cases``: full
remat, gathers and gradients in bfloat16, attention of cuDNN). They differ in the policy of ``nn.remat``: full remat
gathers every weight again over both axes, ``remat_policy("nothing", gathered_over="fsdp_host")`` over the axis within a
host alone.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import forecasts
from benchmarks.forecasts import GIB
from benchmarks.peers import figures
from benchmarks.ranges import range_in
from xlstm_jax.formatting import rich_table

OUT = Path(__file__).parent / "results" / "within_hosts"
MODELS = ("decoder_0.8B", "1.3B")
TOPOLOGY = "h100:32x8"
CASES = {
    "over both axes": "ours, best options, kernel",
    "within a host": "ours, best options, within hosts, kernel",
}
TIMES = ("ms/step, least", "expected", "most", "waiting ms")
COLUMNS = ("model", "gathered again", *TIMES, "GB between hosts", "peak GiB")

Rows = dict[str, dict[str, dict[str, Any]]]  # model -> where weights are gathered again -> figures


def rows_of(results: forecasts.Results) -> Rows:
    """Returns the figures of each model and case; ``nic_bytes`` are the bytes that a GPU sends between hosts."""
    found: Rows = {}
    for model, topologies in results.items():
        for name, case in CASES.items():
            if one := forecasts.compiled(topologies.get(TOPOLOGY, {})).get(case):
                nic = {"nic_bytes": one["network_bytes"]["nic"]}
                found.setdefault(model, {})[name] = figures(case, one, TOPOLOGY) | nic
    return found


def cells(model: str, name: str, row: Mapping[str, Any]) -> list[str]:
    """Formats a row of the table."""
    times = [f"{seconds * 1e3:.1f}" for seconds in range_in(row)]
    waits = range_in(row, "waited_range")
    sizes = [f"{row['nic_bytes'] / 1e9:.3f}", f"{row['total_bytes'] / GIB:.2f}"]
    return [model, name, *times, f"{waits.expected * 1e3:.1f}", *sizes]


def table(rows: Rows) -> Any:
    """Builds the table of all models."""
    lines = [cells(model, *item) for model, found in rows.items() for item in found.items()]
    return rich_table(f"Weights gathered again, {TOPOLOGY}", list(COLUMNS), lines, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("within_hosts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(MODELS), help=f"models (default: {' '.join(MODELS)})")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the compiled forecasts and of rows.json")
    parser.add_argument("--redraw", action="store_true", help="compile nothing")
    options, console = parser.parse_args(arguments), Console(width=140)
    chosen = {"topologies": [TOPOLOGY], "cases": list(CASES.values()), "kept": options.out}
    try:
        rows = rows_of(forecasts.results(argparse.Namespace(**vars(options) | chosen), console))
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"within_hosts: error: {error}", highlight=False)
        return 2
    (options.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

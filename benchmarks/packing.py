"""Collectives of a step with and without packing of small leaves, and, compiled, memory and time.

    python -m benchmarks.packing vit_L16 v5e:4x4                           counts and tracing: under a minute
    python -m benchmarks.packing vit_L16 v5e:4x4 --below 3145728 16777216
    python -m benchmarks.packing vit_L16 v5e:4x4 --layers 4 --compile      some minutes for each program; needs libtpu

The step is the case "ours" of ``cases``: a mesh axis for each dim of the torus, full remat, communication in bfloat16.
``below=0`` stands for no packing.

  gathers, scatters   collectives in the traced step, where each counts once for each call
  tracing             processor time of ``step.trace``
  latency             all of these collectives at the latency of ``forecast.hardware.latency``, one after
                      the other and hidden behind nothing: a worst case by assumed figures, not a forecast
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from benchmarks.cases import CASES, SIZES, build, mesh_axes
from xlstm_jax.distributed import PackSmall
from xlstm_jax.equations import named_axes, nested_jaxprs
from xlstm_jax.forecast import forecast, parse_topology
from xlstm_jax.forecast.hardware.latency import torus_latency_s
from xlstm_jax.forecast.hardware.packing import packing_limit
from xlstm_jax.formatting import format_bytes, rich_table

KINDS = ("all_gather", "reduce_scatter")


def row(size: Any, topology: str, below: int, compiled: bool) -> list[str]:
    """Returns the figures of a step that packs leaves with fewer than ``below`` bytes; 0: no packing."""
    place, case = parse_topology(topology), CASES["ours"]
    if below:
        case = dataclasses.replace(case, options={**case.options, "packing": PackSmall(below)})
    sizes = mesh_axes(case, place.shape)
    step, args = build(size, case, place.shape)
    start = time.process_time()
    traced = step.trace(*args)
    seconds = time.process_time() - start
    found = [eqn for eqn in _called(traced.jaxpr.eqns) if eqn.primitive.name in KINDS]
    counts = Counter(eqn.primitive.name for eqn in found)
    latency = sum(
        torus_latency_s(place.chip.name, "all-gather", sizes[axis] // 2) for eqn in found for axis in named_axes(eqn)
    )
    cells = [str(below), *(str(counts[kind]) for kind in KINDS), f"{seconds:.1f} s", f"{1e3 * latency:.1f} ms"]
    if not compiled:
        return cells
    cost = forecast(step, *args, topology=topology)
    assert cost.step_time is not None  # a chip with figures
    count = sum(collective.count for collective in cost.collectives)
    return [*cells, format_bytes(cost.total_bytes), f"{count:,.0f}", str(cost.step_time)]


def _called(eqns: Iterable[Any]) -> Iterator[Any]:
    """Yields equations, those of a function once for each call."""
    for eqn in eqns:
        yield eqn
        for inner in nested_jaxprs(eqn):
            yield from _called(inner.eqns)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("benchmarks.packing", description=__doc__.partition("\n")[0])
    found.add_argument("size", choices=list(SIZES))
    found.add_argument("topology", help='"v5e:4x4", say')
    found.add_argument("--below", type=int, nargs="+", help="bytes; by default packing_limit, and 16 MiB")
    found.add_argument("--layers", type=int, help="by default the layers of the size")
    found.add_argument("--compile", action="store_true", help="compile, and print memory and forecast time")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    size, place = SIZES[options.size], parse_topology(options.topology)
    size = dataclasses.replace(size, layers=options.layers or size.layers)
    limit = packing_limit(place.chip, mesh_axes(CASES["ours"], place.shape))
    columns = ["below", "gathers", "scatters", "tracing", "latency"]
    columns += ["memory", "compiled", "step"] if options.compile else []
    rows = [row(size, options.topology, below, options.compile) for below in (0, *(options.below or (limit, 2**24)))]
    Console(width=140).print(rich_table(f"{options.size}, {size.layers} layers, {place.name}", columns, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

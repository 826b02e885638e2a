"""Accuracy of forecasts, compared with measured values.

    python -m benchmarks.forecast_accuracy

  bytes of the plan             parameters and optimizer state of live arrays on each device                    exact
  bytes of arguments            state and batch of live arrays on each device                                   exact
  collectives of a step         executions per device and name, counted by JAX's profiler                       exact
  bytes at the peak             ``device.memory_stats()`` of an accelerator; in per cent

On a machine without accelerators the devices are simulated, and the peak is not compared. The models are small models
of ``models``; FSDP, hybrid, and replicated.
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console

from benchmarks.large_models import next_token_loss
from benchmarks.models import VOCAB_SIZE, LanguageModel
from xlstm_jax.distributed import (
    DeviceMeshManager,
    bytes_per_device,
    create_train_state,
    make_train_step,
    shard_batch,
    shard_module_params,
)
from xlstm_jax.distributed.plan.planning import plan_sharding
from xlstm_jax.distributed.processes import available_devices
from xlstm_jax.forecast import Forecast, forecast
from xlstm_jax.formatting import rich_table

DEVICES = 8
CASES = {  # name -> block, axes of the mesh as shares of the devices, remat
    "xLSTM, FSDP": ("xlstm", ("fsdp",), True),
    "Transformer, FSDP": ("transformer", ("fsdp",), False),
    "Transformer, hybrid": ("transformer", ("dp", "fsdp"), True),
    "Transformer, replicated": ("transformer", ("dp",), False),
}
NO_ACCELERATOR = "Bytes at the peak are not compared: there is no accelerator here, and a CPU keeps no such statistics."


@dataclass(frozen=True)
class Comparison:
    """Forecast and measured value of a quantity of a case; the values must be equal if ``exact``."""

    case: str
    quantity: str
    forecast: float
    fact: float
    exact: bool = True

    @property
    def error(self) -> float:
        """Returns the relative error; 0 if both values are 0."""
        return (self.forecast - self.fact) / self.fact if self.fact else float(self.forecast != 0)


def build(case: str, devices: Sequence[Any]) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Builds (plan, mesh, step, live arguments) of a case."""
    block, axes, remat = CASES[case]
    sizes = {axes[0]: len(devices)} if len(axes) == 1 else {axes[0]: 2, axes[1]: len(devices) // 2}
    mesh = DeviceMeshManager.create_device_mesh(sizes, devices=devices)
    wrap = partial(shard_module_params, axis_name="fsdp", min_weight_size=2**10) if "fsdp" in axes else None
    model, tx = LanguageModel(block, 64, 3, 4, remat=remat, wrap=wrap), optax.adamw(1e-3)
    tokens = jax.random.randint(jax.random.key(0), (2 * len(devices), 65), 0, VOCAB_SIZE)
    batch = shard_batch(jax.device_get(tokens), mesh, axes)
    # A replicated model has no wrapper with a threshold; the plan gets a threshold above the size of every leaf.
    threshold = {} if wrap else {"min_weight_size": 2**62}
    plan = plan_sharding(model, sizes, batch, tx=tx, **threshold)
    state = create_train_state(
        model, tx, mesh, jax.random.key(1), batch, batch_axes=axes, allow_replicated=wrap is None
    )
    return (
        plan,
        mesh,
        make_train_step(next_token_loss, mesh, axes, allow_replicated=wrap is None),
        (state, batch, jax.random.key(2)),
    )


def compare(case: str, devices: Sequence[Any]) -> Iterator[Comparison]:
    """Yields the comparisons of a case."""
    plan, _, step, (state, batch, key) = build(case, devices)
    found = forecast(step, state, batch, key)
    yield Comparison(case, "plan: parameter bytes", plan.parameters.per_device, bytes_per_device(state.params))
    yield Comparison(case, "plan: optimizer bytes", plan.optimizer.per_device, bytes_per_device(state.opt_state))
    yield Comparison(case, "argument bytes", found.memory.argument_bytes, bytes_per_device((state, batch)))
    state, _ = jax.block_until_ready(step(state, batch, key))  # compiles before the profiled call
    ran = executed(lambda: step(state, batch, key), len(devices))
    planned = Counter({c.name: c.count for c in found.collectives})
    yield Comparison(case, "collectives: names", len(planned), len(ran))
    yield Comparison(case, "collectives: executions", planned.total(), ran.total())
    yield Comparison(case, "collectives: that differ", sum(((planned - ran) + (ran - planned)).values()), 0)
    yield from _peak(case, found, devices[0])


def executed(call: Callable[[], Any], num_devices: int) -> Counter:
    """Counts the collectives that a call runs on each device, by instruction name.

    Raises:
      RuntimeError: a collective ran on some devices more often than on other devices.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    collective = re.compile(
        r"(all[-_]gather|all[-_]reduce|reduce[-_]scatter|all[-_]to[-_]all|collective[-_]permute|psum)"
    )
    counts = Counter(event["name"] for event in events if collective.match(event.get("name", "")))
    uneven = {name: count for name, count in counts.items() if count % num_devices}
    if uneven:
        raise RuntimeError(f"{num_devices} devices ran collectives unequally often: {uneven}")
    return Counter({name: count // num_devices for name, count in counts.items()})


def _peak(case: str, found: Forecast, device: Any) -> Iterator[Comparison]:
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        yield Comparison(case, "bytes at the peak", found.total_bytes, stats["peak_bytes_in_use"], exact=False)


def table(comparisons: Sequence[Comparison]) -> Any:
    rows = [
        [
            c.case,
            c.quantity,
            f"{c.forecast:,.0f}",
            f"{c.fact:,.0f}",
            "exact" if c.forecast == c.fact else f"{c.error:+.2%}",
        ]
        for c in comparisons
    ]
    return rich_table("Forecast and fact", ["model", "per device", "forecast", "fact", "error"], rows, left=2)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("forecast_accuracy", description="Forecasts beside facts.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options, console = parser.parse_args(arguments), Console()
    devices, found = available_devices(DEVICES), []
    with console.status("") as status:
        for case in options.cases:
            status.update(f"{case}: compiled, run, compared")
            found += compare(case, devices)
    console.print(table(found))
    if devices[0].platform == "cpu":
        console.print(NO_ACCELERATOR, highlight=False)
    return int(any(c.exact and c.forecast != c.fact for c in found))


if __name__ == "__main__":
    sys.exit(main())

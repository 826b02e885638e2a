"""Overhead of Python before a step runs: tracing and dispatch compared with ``jit``, by the number of leaves.

    python -m benchmarks.overhead                              10, 50, 200 and 1,000 leaves; some twenty minutes
    python -m benchmarks.overhead --leaves 10 --rounds 2 --out DIR

  tracing    ``step.trace(*args)`` of a newly built step: a decoder with layers in a Python loop, each in ``nn.remat``
             and 9 leaves, for 8 devices
  dispatch   a call of a compiled step until it returns: a stack of tiny ``nn.Dense`` of 2 leaves with AdamW, on one
             device, so that the step itself takes no longer than its dispatch

  jit              the plain model under ``jit`` with shardings
  jit, same work   the same, which returns the norm of the gradients as well, as a step of this library does (dispatch)
  ours             the model wrapped by ``shard_modules``, the step of ``make_train_step``

Each is measured twice: in seconds (processor time of the calling thread, sides in turn in one process, medians over
rounds, and the median of the ratios of rounds) and in calls of Python functions, which do not depend on the load of the
machine. Results are written to ``<out>/leaves.json``.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console

from benchmarks import baselines
from benchmarks.cases import SIZES
from benchmarks.compile_time import built_in_a_loop
from benchmarks.forecasts import installed_versions
from benchmarks.options import positive
from benchmarks.step_time_variants import state_of
from xlstm_jax.distributed import DeviceMeshManager, shard_modules
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.forecast.training import Workload
from xlstm_jax.formatting import rich_table

OUT = Path(__file__).parent / "results" / "overhead"
LEAVES = (10, 50, 200, 1000)
TARGETS = {"tracing": 1.2, "dispatch": 1.1}  # ratio to jit, at most
ROUNDS, CALLS = 7, 20
TRACED, LEAVES_OF_A_LAYER = "decoder_small", 9
JIT, SAME_WORK, OURS = "jit", "jit, same work", "ours"

Work = Callable[[], Any]


def calls_of(work: Work) -> int:
    """Counts the calls of Python functions in ``work()``."""
    count = 0

    def on_event(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count - 1  # without ``work`` itself


@contextlib.contextmanager
def without_garbage() -> Iterator[None]:
    """Collects garbage, and then none within the context."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seconds_of(work: Work) -> float:
    """Returns the processor seconds of this thread in ``work()``, without the collection of garbage."""
    with without_garbage():
        start = time.thread_time()
        work()
        return time.thread_time() - start


def compared(seconds: dict[str, list[float]], calls: dict[str, int]) -> dict[str, Any]:
    """Returns medians by side, and ratios of ``OURS`` to each other side; the first round has warmed up."""
    rounds = {side: np.array(found[1:]) for side, found in seconds.items()}
    others = [side for side in seconds if side != OURS]
    return {
        "seconds": {side: float(np.median(found)) for side, found in rounds.items()},
        "calls": calls,
        "ratio": {side: float(np.median(rounds[OURS] / rounds[side])) for side in others},
        "ratio of calls": {side: calls[OURS] / calls[side] for side in others},
    }


# -------------------------------------------------------------------------------------------------------------- tracing


def tracing(leaves: int, rounds: int) -> dict[str, Any]:
    """Measures the tracing of new steps of a decoder with about ``leaves`` leaves."""
    layers = max(1, round((leaves - 2) / LEAVES_OF_A_LAYER))  # 2: the table and the last norm
    size = dataclasses.replace(SIZES[TRACED], layers=layers)
    seconds: dict[str, list[float]] = {JIT: [], OURS: []}
    calls, count = {}, 0
    for _ in range(rounds + 1):
        for side, found in seconds.items():
            step, args = built_in_a_loop(size, side)
            found.append(seconds_of(lambda step=step, args=args: step.trace(*args)))
            count = len(leaves_with_path(args[0].params))
    for side in seconds:
        step, args = built_in_a_loop(size, side)
        calls[side] = calls_of(lambda step=step, args=args: step.trace(*args))
    return {"leaves": count} | compared(seconds, calls)


# ------------------------------------------------------------------------------------------------------------- dispatch


class Tiny(nn.Module):
    """Stack of ``layers`` small ``nn.Dense`` of width 8, whose step takes as long as its dispatch."""

    layers: int
    constrain: Any = None  # required by ``baselines.jit_step``; unused

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = nn.Dense(8, name=f"layers_{i}")(x)
        return x


def steps_of(leaves: int) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Builds the steps of all sides for one device, and their arguments with equal values, by side."""
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 1}, devices=jax.devices()[:1])
    model, x = Tiny(max(leaves // 2, 1)), jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def loss_fn(params, apply_fn, batch, rng):
        return jnp.mean(apply_fn({"params": params}, batch) ** 2)

    plain = Workload(model, optax.adamw(1e-3), x, loss_fn)
    wrapped = dataclasses.replace(plain, model=shard_modules(model, nn.Dense, "fsdp", min_weight_size=0))
    built = {JIT: baselines.jit_step(plain, mesh, 0), OURS: wrapped.build_step(mesh)}

    def with_norm(state, batch, rng):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch, rng)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    places = jax.tree.map(lambda leaf: leaf.sharding, built[JIT][1][0])
    same_work = jax.jit(with_norm, donate_argnums=0, out_shardings=(places, None)), built[JIT][1]
    built = {JIT: built[JIT], SAME_WORK: same_work, OURS: built[OURS]}
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    values = {path: np.asarray(leaf) for path, leaf in leaves_with_path(params)}
    key = jax.random.key(0)
    args = {
        side: (state_of(one[0], values), jax.device_put(np.ones(x.shape, x.dtype), one[1].sharding), key)
        for side, (_, one) in built.items()
    }
    return {side: step for side, (step, _) in built.items()}, args


def dispatch(leaves: int, rounds: int) -> dict[str, Any]:
    """Measures calls of compiled steps with ``leaves`` leaves; each call starts after the one before has ended."""
    steps, args = steps_of(leaves)
    seconds: dict[str, list[float]] = {side: [] for side in steps}

    def call(side: str) -> None:
        state, *rest = args[side]
        args[side] = (steps[side](state, *rest)[0], *rest)

    def turn(side: str) -> float:
        taken = []
        for _ in range(CALLS):
            start = time.thread_time()
            call(side)
            taken.append(time.thread_time() - start)
            jax.block_until_ready(args[side])
        return float(np.median(taken))

    calls = {}
    for _ in range(rounds + 1):
        for side, found in seconds.items():
            with without_garbage():
                found.append(turn(side))
    for side in steps:
        calls[side] = calls_of(lambda side=side: call(side))
        jax.block_until_ready(args[side])
    return {"leaves": len(leaves_with_path(args[JIT][0].params))} | compared(seconds, calls)


# ----------------------------------------------------------------------------------------------------- tables, pictures


def table(found: dict[str, Any]) -> Any:
    """Builds the table: ratios to ``jit`` in calls and seconds, then both sides' calls and milliseconds."""
    rows = []
    for what, target in TARGETS.items():
        for row in found[what]:
            for base in row["ratio"]:
                ratios = f"{row['ratio of calls'][base]:.2f}", f"{row['ratio'][base]:.2f}"
                calls = (f"{row['calls'][side]:,}" for side in (base, OURS))
                times = (f"{row['seconds'][side] * 1e3:,.2f}" for side in (base, OURS))
                rows.append([f"{what}, at most {target}", base, f"{row['leaves']:,}", *ratios, *calls, *times])
    columns = ["", "compared with", "leaves", "ratio of calls", "of seconds", "calls", "ours", "ms", "ours, ms"]
    return rich_table("Python before a step runs", columns, rows, left=2)


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser("overhead", description="Tracing and dispatch compared with jit, by leaves.")
    new.add_argument("--leaves", nargs="+", type=positive, default=list(LEAVES), help="default: 10 50 200 1000")
    new.add_argument("--rounds", type=positive, default=ROUNDS, help=f"turns of each side (default: {ROUNDS})")
    new.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS), help="default: both")
    new.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file")
    new.add_argument("--redraw", action="store_true", help="table of the stored results; measure nothing")
    return new


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    path, measures = options.out / "leaves.json", {"tracing": tracing, "dispatch": dispatch}
    found = json.loads(path.read_text()) if path.exists() else dict.fromkeys(measures, ())
    if not options.redraw:
        found |= {"versions": installed_versions(), "cores": os.cpu_count(), "rounds": options.rounds}
        options.out.mkdir(parents=True, exist_ok=True)
        for what in options.only:
            found[what] = []
            for leaves in options.leaves:
                found[what].append(measures[what](leaves, options.rounds))
                path.write_text(json.dumps(found, indent=1) + "\n")
    Console(width=140).print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

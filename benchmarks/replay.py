"""Replays of steps: what a replay in every k-th call costs, and how many replays pass without a false alarm.

  python -m benchmarks.replay cost     processor seconds of steps with replays, divided by those without
  python -m benchmarks.replay alarms   replays of a small model, other rows in each step; the first alarm ends the run

Processor seconds of all threads, as wall time on a shared machine says little. Blocks of k steps, of which one is
replayed, and blocks of k steps without replay take turns, and the median of the ratios is shown: whatever else the
machine does disturbs both. With so many rows matrix products are most of a step.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed import (
    DeviceMeshManager,
    ReplayError,
    create_train_state,
    make_train_step,
    replayed,
    shard_module_params,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.training.replay.replayed_step import ReplayedStep
from xlstm_jax.distributed.training.step import TrainStep

AXIS = "fsdp"
BLOCKS = {1: 15, 2: 11, 10: 7, 100: 3}  # blocks for each k
KEY = jax.random.key


class Layers(nn.Module):
    """Residual layers of two matrices with dropout, each layer gathered by itself."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = shard_module_params(nn.Dense, AXIS, min_weight_size=64)
        for _ in range(self.layers):
            h = nn.gelu(dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dropout(0.1, deterministic=not self.has_rng("dropout"))(dense(self.width)(h))
        return x


def training(devices: int, layers: int, width: int, rows: int) -> tuple[TrainStep, Any, jax.Array]:
    """Returns a step, its state and its batch."""
    mesh = DeviceMeshManager.create_device_mesh({AXIS: devices})

    def loss(params: PyTree, apply_fn: Any, batch: jax.Array, rng: jax.Array) -> jax.Array:
        return jnp.mean((apply_fn({"params": params}, batch, rngs={"dropout": rng}) - jnp.roll(batch, 1, -1)) ** 2)

    x = jax.random.normal(KEY(1), (rows, width))
    state = create_train_state(Layers(layers, width), optax.adam(1e-3), mesh, KEY(0), x, allow_replicated=True)
    return make_train_step(loss, mesh, AXIS, allow_replicated=True), state, x


def processor_seconds(step: TrainStep | ReplayedStep, state: Any, x: jax.Array, calls: int) -> tuple[float, Any]:
    """Returns processor seconds of ``calls`` steps by all threads of this process, and the last state."""
    begin = time.process_time()
    for _ in range(calls):
        state, _ = step(state, x, KEY(2))
    jax.block_until_ready(state)
    return time.process_time() - begin, state


def cost(args: argparse.Namespace) -> None:
    """Prints a row for each k: the median ratio, and the lowest and highest."""
    plain, state, x = training(args.devices, args.layers, args.width, args.rows)
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    _, state = processor_seconds(plain, state, x, 2)
    seconds = []
    print(f"JAX {jax.__version__}: {weights:,} weights, {args.rows} rows, {args.devices} devices", flush=True)
    for every, blocks in BLOCKS.items():
        step, ratios = replayed(plain, every), []
        for block in range(blocks + 1):
            without, state = processor_seconds(plain, state, x, every)
            with_replay, state = processor_seconds(step, state, x, every)
            if block:  # the first compiles
                ratios.append(with_replay / without)
                seconds.append(without / every)
        low, median, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"every {every:3}: median of {blocks} blocks {median:.3f}, {low:.3f} to {high:.3f}", flush=True)
    print(f"a step without replay: {statistics.median(seconds):.3f} processor seconds", flush=True)


def alarms(args: argparse.Namespace) -> None:
    """Replays ``args.count`` steps; prints how many passed, and the alarm if there is one."""
    plain, state, x = training(args.devices, layers=2, width=32, rows=8 * args.devices)
    step, begin = replayed(plain, every=1), time.process_time()
    try:
        for call in range(args.count):
            state, _ = step(state, jax.random.normal(KEY(call), x.shape), KEY(2))
    except ReplayError as error:
        print(f"alarm: {error}")
    print(
        f"JAX {jax.__version__}, {args.devices} devices: {step.replays:,} of {args.count:,} replays without an alarm, "
        f"{time.process_time() - begin:.0f} processor seconds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=("cost", "alarms"))
    parser.add_argument("--devices", type=int, default=4, help="simulated devices")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--count", type=int, default=10_000, help="replays of `alarms`")
    args = parser.parse_args()
    simulate_cpu_devices(args.devices)
    {"cost": cost, "alarms": alarms}[args.which](args)


if __name__ == "__main__":
    main()

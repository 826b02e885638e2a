"""Script of one of two processes: ``python -m tests.replay_process RANK COUNT PORT``. A device is wrong in a replay.

Prints, as JSON, the steps that were taken and what the error of the wrong step names.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import io_callback

from xlstm_jax.distributed import (
    DeviceMeshManager,
    ReplayError,
    create_train_state,
    initialize_distributed,
    make_train_step,
    replayed,
    shard_batch,
    shard_module_params,
    simulate_cpu_devices,
)

RANK, COUNT, PORT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
WRONG_PLACE = 3  # in the first run of the third replay: the second device of process 1


def main() -> dict[str, object]:
    simulate_cpu_devices(2)
    initialize_distributed(f"127.0.0.1:{PORT}", COUNT, RANK)
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2 * COUNT})
    calls = [0]

    def factor(place):
        calls[0] += 1  # twice in a run, once for each device of this process
        first_run_of_third_replay = (calls[0] - 1) // 2 == 4
        return np.float32(1.5 if first_run_of_third_replay and place == WRONG_PLACE else 1)

    def loss(params, apply_fn, batch, rng):
        scale = io_callback(factor, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.axis_index("fsdp"))
        return jnp.mean((scale * apply_fn({"params": params}, batch) + jax.random.normal(rng, (4, 16))) ** 2)

    model = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16)
    x = np.random.default_rng(RANK).normal(size=(8, 8)).astype(np.float32)
    batch = shard_batch(x, mesh, "fsdp")
    state = create_train_state(model, optax.adam(1e-2), mesh, jax.random.key(0), batch, batch_axes="fsdp")
    step = replayed(make_train_step(loss, mesh, "fsdp", check_vma=False), every=1)
    named: dict[str, object] = {}
    for _ in range(4):
        try:
            state, _ = step(state, batch, jax.random.key(1))
        except ReplayError as error:
            named = {
                "devices": [device.id for device in error.devices],
                "processes": error.processes,
                "leaves": error.leaves,
            }
    return {
        "steps": int(state.step),
        "replays": step.replays,
        "named": named,
        "own": [d.id for d in jax.local_devices()],
    }


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)

"""A process of two that trains under a set mesh: ``python -m tests.set_mesh_process KIND FOLDER RANK COUNT PORT``.

KIND is "explicit" or "mixed". Creates a state, takes two steps, evaluates, saves, and resumes from the checkpoint for
two more steps, each of which is replayed; publishes the weights twice and exports them; prints the losses, the value of
the evaluation, and the types of a parameter outside of the step.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType

from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    check_replicas,
    create_train_state,
    export_safetensors,
    initialize_distributed,
    make_eval_step,
    make_train_step,
    replayed,
    shard_batch,
    shard_modules,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.checkpoint import publish
from xlstm_jax.distributed.metrics import StandardDeviation, make_log_step

AXES = ("dp", "fsdp")
SEED = 0
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.tanh(nn.Dense(16)(x)))


def rows():
    """The batch of all processes, as NumPy arrays."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 8)).astype(np.float32) * (1 + np.arange(16)[:, None] % 5)
    return {"x": x.astype(np.float32), "y": rng.normal(size=(16, 4)).astype(np.float32)}


def loss_fn(params, apply_fn, batch):
    return jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def errors(params, apply_fn, batch):
    return {"values": jnp.mean((apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2, -1)}


def main(kind: str, folder: str, rank: int, count: int, port: str) -> None:
    simulate_cpu_devices(8 // count)
    initialize_distributed(f"127.0.0.1:{port}", count, rank)
    types = {"explicit": (AxisType.Explicit,) * 2, "mixed": (AxisType.Auto, AxisType.Explicit)}[kind]
    mesh = jax.make_mesh((2, 4), AXES, axis_types=types)
    whole, out = rows(), {}
    own = {name: np.split(array, count)[rank] for name, array in whole.items()}
    with jax.set_mesh(mesh):
        model = shard_modules(Net(), nn.Dense, "fsdp", min_weight_size=16)
        state = create_train_state(model, TX, mesh, jax.random.key(SEED), whole["x"])
        step, metric = make_train_step(loss_fn, mesh), StandardDeviation()
        eval_step, log_step = make_eval_step(errors, mesh, metric=metric), make_log_step(metric, mesh, AXES)
        losses = []

        def train(state, step=step):
            for _ in range(2):
                state, metrics = step(state, shard_batch(own, mesh, AXES))
                losses.append(float(metrics["loss"]))
            return state

        state = train(state)
        value, _ = log_step(eval_step(state, shard_batch(own, mesh, AXES), metric.empty(AXES, mesh)))
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(2, state)
            checkpointer.wait()
            like = abstract_train_state(model, TX, mesh, jax.random.key(SEED), whole["x"])
            restored = checkpointer.restore(like.replace(apply_fn=state.apply_fn, tx=state.tx))
        replays = replayed(step, every=1)
        state = train(restored, replays)
        check_replicas(state)
        published = [publish(state.params, f"{folder}/published")]
        halved = jax.tree.map(lambda x: x / 2, state.params)
        published.append(publish(halved, f"{folder}/published", since=published[0]))
        export_safetensors(state.params, f"{folder}/exported")
        kernel = state.params["Dense_1"]["kernel"].value
        out |= {
            "losses": losses,
            "deviation": float(value),
            "type": str(jax.typeof(kernel)),
            "resharded": str(jax.typeof(jax.sharding.reshard(kernel, jax.P()))),
            "product": str(jax.typeof(jnp.ones((2, 8)) @ kernel)),
            "devices": jax.device_count(),
            "replays": replays.replays,
            "published": published,
        }
    print(json.dumps(out))


if __name__ == "__main__":
    kind, folder, rank, count, port = sys.argv[1:]
    main(kind, folder, int(rank), int(count), port)

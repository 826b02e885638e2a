"""A training loop with all that a run needs: evaluation, logging, checkpoints, and going on where it was stopped.

    python docs/example_loop.py runs/loop 60    # stop it, and start it again as often as you like

The data are made up: each class is a pattern, each example the pattern of its class in noise.
"""

import sys

import jax
import numpy as np
import optax
from flax import linen as nn

from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    available_devices,
    create_train_state,
    make_eval_step,
    make_train_step,
    shard_batch,
    shard_module_params,
)
from xlstm_jax.distributed.metrics import (
    Compose,
    MetricLogger,
    WeightedMean,
    make_log_step,
)

folder, steps = sys.argv[1], int(sys.argv[2])
PATTERNS = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**10)
        return dense(10)(nn.relu(dense(256)(x)))


def examples(seed, count=64):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, count)
    return {"x": PATTERNS[y] + 2 * rng.normal(size=(count, 64)).astype(np.float32), "y": y}


def losses(params, apply_fn, batch):
    logits = apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), logits.argmax(-1) == batch["y"]


def loss_fn(params, apply_fn, batch, rng):  # the mean over this device's batch
    return losses(params, apply_fn, batch)[0].mean()


def eval_fn(params, apply_fn, batch):  # a value and a weight for each row
    loss, right = losses(params, apply_fn, batch)
    return {"loss": (loss, batch["weight"]), "accuracy": (right, batch["weight"])}


devices, axes = available_devices(8), ("dp", "fsdp")
mesh = DeviceMeshManager.create_device_mesh({"dp": -1, "fsdp": min(4, len(devices))})
held_out = [examples(seed=10**6 + i, count=count) for i, count in enumerate([64, 64, 21])]
metric = Compose({"loss": WeightedMean(), "accuracy": WeightedMean()})

step = make_train_step(loss_fn, mesh, axes)
eval_step = make_eval_step(eval_fn, mesh, axes, metric=metric)
log_step, key, done = make_log_step(metric, mesh, axes), jax.random.key(0), 0
state = create_train_state(Classifier(), optax.adam(1e-3), mesh, key, held_out[0]["x"], batch_axes=axes)
with Checkpointer(f"{folder}/steps", save_interval_steps=10) as checkpointer:
    if checkpointer.latest_step() is not None:  # it was stopped, and goes on
        state, done = checkpointer.restore((state, 0))
    with MetricLogger(folder, resume_step=done or -1) as logger:
        for number in range(done + 1, steps + 1):
            state, metrics = step(state, shard_batch(examples(number), mesh, axes), key)
            if number % 10 == 0:
                local = metric.empty(axes, mesh)
                for rows in held_out:  # the last has fewer: they are padded, with weight 0
                    batch, weight = shard_batch(rows, mesh, axes, pad=64)
                    local = eval_step(state, batch | {"weight": weight}, local)
                logger.log(number, metrics | {"eval": log_step(local)[0]})
                logger.flush()  # no row before a checkpoint is lost
                checkpointer.save(number, (state, number))

"""A complete training loop.

    python docs/examples/whole_loop.py

The code of docs/tutorials/whole_loop.md, written by docs/write_examples.py: change the page, and run that.
"""

# ---- Devices, model, data
import json
import os
import signal
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    LoopGuard,
    create_train_state,
    make_eval_step,
    make_train_step,
    shard_batch,
    shard_module_params,
    simulate_cpu_devices,
    skip_nonfinite,
)
from xlstm_jax.distributed.metrics import (
    Compose,
    WeightedMean,
    make_log_step,
)

simulate_cpu_devices(8)
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES = ("dp", "fsdp")  # both axes split the batch


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**10)
        h = nn.relu(dense(256, use_bias=False, name="up")(x))
        return dense(10, use_bias=False, name="head")(h)


model = Classifier()


PATTERNS = np.random.default_rng(0).normal(size=(10, 64)).astype("float32")


def examples(seed, count=64):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, count)
    noise = 2.5 * rng.normal(size=(count, 64)).astype("float32")
    return {"x": PATTERNS[y] + noise, "y": y, "weight": np.ones(count)}


# Three evaluation batches; the last is smaller.
HELD_OUT = [examples([1, i], count) for i, count in enumerate([64, 64, 21])]


# ---- Loss and metrics
metric = Compose({"loss": WeightedMean(), "accuracy": WeightedMean()})


def observe(params, apply_fn, batch):
    logits, weight = apply_fn({"params": params}, batch["x"]), batch["weight"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    right = logits.argmax(-1) == batch["y"]
    return {"loss": (loss, weight), "accuracy": (right, weight)}


def loss_fn(params, apply_fn, batch, rng):  # the mean over the local rows
    observed = observe(params, apply_fn, batch)
    return observed["loss"][0].mean(), observed


# ---- Optimizer and steps
STEPS, EVERY = 60, 20
schedule = jax.jit(optax.warmup_cosine_decay_schedule(0, 5e-3, 20, STEPS))
adamw = optax.adamw(schedule, weight_decay=1e-2)
tx = skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), adamw))

train_step = make_train_step(
    loss_fn,
    mesh,
    AXES,
    num_minibatches=2,
    metric=metric,
    learning_rate=schedule,
)
eval_step = make_eval_step(observe, mesh, AXES, metric=metric)
log_step = make_log_step(metric, mesh, AXES)


# ---- The training loop
def evaluate(state):
    local = metric.empty(AXES, mesh)
    for rows in HELD_OUT:  # padded to 64 rows; padding has weight 0
        rows, real = shard_batch(rows, mesh, AXES, pad=64)
        local = eval_step(state, rows | {"weight": real}, local)
    return log_step(local)[0]


def kept_rows(folder, done):
    """Return the metrics file, without rows of steps that run again."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= done]
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in kept))
    return file


def train(folder, sigterm_at=None):
    """Trains to the last step, or to SIGTERM; returns the state."""
    key = jax.random.key(0)
    example = HELD_OUT[0]["x"]  # only shape and dtype are used
    state = create_train_state(model, tx, mesh, key, example, batch_axes=AXES)
    local, done = metric.empty(AXES, mesh), 0
    with Checkpointer(folder / "steps", save_interval_steps=EVERY) as saver:
        if saver.latest_step() is not None:  # an earlier run was stopped
            state, local, done = saver.restore((state, local, 0))
            print(f"continues after step {done}")
        rows = kept_rows(folder, done)
        with LoopGuard(step_timeout_s=60) as guard, rows.open("a") as log:
            for number in range(done + 1, STEPS + 1):
                batch = shard_batch(examples([0, number]), mesh, AXES)
                state, metrics, local = train_step(state, batch, key, local)
                guard.step_done(number, metrics)
                if number == sigterm_at:  # as a scheduler would
                    os.kill(os.getpid(), signal.SIGTERM)
                with guard.paused(timeout_s=600):  # evaluation, log, save
                    if number % EVERY == 0:
                        seen, local = log_step(local)
                        held_out = evaluate(state)
                        row = metrics | {"train": seen, "eval": held_out}
                        row = {"step": number} | jax.tree.map(float, row)
                        print(json.dumps(row), file=log, flush=True)
                        print(
                            f"step {number:3d} of {STEPS}"
                            f"  loss {seen['loss']:.3f}"
                            f"  held-out {held_out['loss']:.3f}"
                            f"  accuracy {held_out['accuracy']:.1%}"
                        )
                    stop = guard.should_stop(number)
                    saver.save(number, (state, local, number), force=stop)
                if stop:
                    print(f"SIGTERM: saved step {number}")
                    break
    return state


# ---- Stop and resume
runs = Path(tempfile.mkdtemp())
whole = train(runs / "whole")


stopped = train(runs / "stopped", sigterm_at=30)


continued = train(runs / "stopped")


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


leaves = zip(jax.tree.leaves(whole), jax.tree.leaves(continued), strict=True)
print("same bits:", all(np.array_equal(a, b) for a, b in leaves))
rows, of_whole = rows_of(runs / "stopped"), rows_of(runs / "whole")
print("same rows:", rows == of_whole)
print(json.dumps(rows[-1], indent=1))


# ---- Plot the losses and the learning rate
size = {"figsize": (7, 3.2), "layout": "constrained"}
fig, (left, right) = plt.subplots(1, 2, **size)
steps = [row["step"] for row in rows]
for name, label in [("train", "training"), ("eval", "held-out")]:
    losses = [row[name]["loss"] for row in rows]
    left.plot(steps, losses, marker="o", label=label)
left.axvline(30, color="gray", linestyle=":")
left.text(31, left.get_ylim()[1], "SIGTERM", color="gray", va="top")
left.set(xlabel="step", ylabel="loss (nats)")
left.legend(loc="center right")
right.plot(range(STEPS), 1e3 * schedule(np.arange(STEPS)))
right.set(xlabel="step", ylabel="learning rate / 0.001")
right.grid(alpha=0.3)

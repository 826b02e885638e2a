"""Train with Muon and AdamW.

    python docs/examples/muon.py

The code of docs/tutorials/muon.md, written by docs/write_examples.py: change the page, and run that.
"""

# ---- Text and model
import argparse
import inspect

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    muon,
    plan_sharding,
    shard_module_params,
    simulate_cpu_devices,
)

simulate_cpu_devices(4)
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2})
AXES = ("dp", "fsdp")

BYTES = np.frombuffer(inspect.getsource(argparse).encode("ascii"), np.uint8)
TEXT, CONTEXT, WIDTH = BYTES[:80_000].astype(np.int32), 8, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(name="norm")(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, use_bias=False, name="up")(h))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(h), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        wrapped = shard_module_params(Block, "fsdp", min_weight_size=2**10)
        Dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**10)
        x = nn.Embed(128, 16, name="embed")(tokens)
        x = Dense(WIDTH, name="join")(x.reshape(len(x), -1))
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(wrapped, length=6, **axes)(name="blocks")(x, None)
        return Dense(128, name="head")(nn.LayerNorm(name="norm")(x))


def loss_fn(params, apply_fn, windows, rng):
    logits = apply_fn({"params": params}, windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, windows[:, -1]).mean()


def windows(number, rows=128):
    rng = np.random.default_rng(number)
    starts = rng.integers(0, len(TEXT) - CONTEXT, (rows, 1))
    return TEXT[starts + np.arange(CONTEXT + 1)]


# ---- Train with both optimizers
STEPS = 60
schedule = optax.cosine_decay_schedule(5e-3, STEPS)
step = make_train_step(loss_fn, mesh, AXES)


def train(tx):
    where = (mesh, jax.random.key(0), windows(0)[:, :-1])
    state = create_train_state(Model(), tx, *where, batch_axes=AXES)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, windows(number), jax.random.key(1))
        losses.append(metrics["loss"])
    return np.array(losses)


optimizers = {
    "AdamW": optax.adamw(schedule),
    "Muon": muon(schedule, consistent_rms=0.2),
}
curves = {name: train(tx) for name, tx in optimizers.items()}
for name, losses in curves.items():
    print(f"{name:5}  mean loss of the last 20 steps: {losses[-20:].mean():.3f}")


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, losses in curves.items():
    smooth = np.convolve(losses, np.ones(10) / 10, "valid")
    ax.plot(range(9, STEPS), smooth, label=name)
ax.set(xlabel="step", ylabel="loss, mean of 10 steps (nats)")
ax.legend()
ax.grid(alpha=0.3)


# ---- Matrices and owners in the plan
plan = plan_sharding(Model(), mesh.shape, windows(0)[:, :-1], tx=optimizers["Muon"])
for group in plan.matrices:
    print(", ".join(group.leaves))
    print("   ", group)


def kernels_of_blocks(shards):
    sizes = {"dp": 2, "fsdp": shards}
    example = jax.ShapeDtypeStruct((256, CONTEXT), jnp.int32)
    plan = plan_sharding(Model(), sizes, example, tx=optimizers["Muon"])
    return next(g for g in plan.matrices if "blocks/up/kernel" in g.leaves)


for shards in (2, 4, 8, 16):
    group = kernels_of_blocks(shards)
    print(
        f"fsdp {shards:2d}: {group.owners:2d} owners,"
        f" {group.per_owner} of {group.count} matrices for the busiest,"
        f" {group.workless_fraction:.0%} of the owners without one"
    )

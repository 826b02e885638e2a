"""A plain script, before and after.

    python docs/examples/plain_script.py

The code of docs/tutorials/plain_script.md, written by docs/write_examples.py: change the page, and run that.
"""

from xlstm_jax.distributed import simulate_cpu_devices

simulate_cpu_devices(8)


import numpy as np

PATTERNS = np.random.default_rng(0).normal(size=(10, 64)).astype(np.float32)


def batch_of(number):
    """64 examples, x float32[64, 64] and y int[64], drawn with seed ``number``."""
    rng = np.random.default_rng(number)
    y = rng.integers(0, 10, 64)
    noise = rng.normal(size=(64, 64)).astype(np.float32)
    return {"x": PATTERNS[y] + 3 * noise, "y": y}


# ---- The plain script
import jax
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x))
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(x)


def loss_fn(params, apply_fn, batch):
    logits = apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@jax.jit
def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}


model, x = Classifier(), batch_of(0)["x"]
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
params = jax.jit(model.init)(jax.random.key(0), x)["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
losses = []
for number in range(40):
    state, metrics = step(state, batch_of(number))
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")


plain_state, plain_losses = state, losses


# ---- The sharded script
import jax
import optax
from flax import linen as nn
from xlstm_jax.distributed import (
    create_fsdp_mesh,
    create_train_state,
    make_train_step,
    shard_modules,
)


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(256)(x))
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(10)(x)


def loss_fn(params, apply_fn, batch):
    logits = apply_fn({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


model, x = Classifier(), batch_of(0)["x"]
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
mesh = create_fsdp_mesh()
model = shard_modules(model)
state = create_train_state(model, tx, mesh, jax.random.key(0), x)
step = make_train_step(loss_fn, mesh)
losses = []
for number in range(40):
    state, metrics = step(state, batch_of(number))
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")


difference = max(abs(a - b) for a, b in zip(losses, plain_losses, strict=True))
print(f"largest difference of 40 losses: {difference:.1e}")
assert difference < 1e-4


import matplotlib.pyplot as plt

fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(plain_losses, linewidth=6, alpha=0.4, label="plain, one device")
ax.plot(losses, label="sharded, 8 devices")
ax.set(xlabel="step", ylabel="loss (nats)", ylim=(0, None))
ax.legend()
fig.savefig("losses.png")


# ---- Memory per device
from xlstm_jax.distributed import bytes_per_device

for name, tree in {"plain": plain_state, "sharded": state}.items():
    params = bytes_per_device(tree.params) / 2**10
    moments = bytes_per_device(tree.opt_state) / 2**10
    print(f"{name:8}{params:4.0f} KiB params {moments:4.0f} KiB moments")


from xlstm_jax.distributed import plan_sharding

plan = plan_sharding(model, mesh.shape, x, tx=tx)
print(plan)


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
counts = [1, 2, 4, 8, 16]
for x_of_bar, count in enumerate(counts):
    plan = plan_sharding(model, {"fsdp": count}, x, tx=tx)
    bottom = 0
    for color, part in enumerate(["parameters", "gradients", "optimizer"]):
        size = getattr(plan, part).per_device / 2**10
        ax.bar(
            x_of_bar,
            size,
            bottom=bottom,
            color=f"C{color}",
            label=None if x_of_bar else part,
        )
        bottom += size
    print(f"{count:2} devices: {bottom:4.0f} KiB on each")
ax.set(xlabel="devices", ylabel="KiB on each device")
ax.set_xticks(range(len(counts)), counts)
ax.legend()
fig.savefig("bytes.png")

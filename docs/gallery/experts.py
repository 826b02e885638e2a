"""Mixture of experts: eight small networks learn different parts of a picture.

The experts are distributed over the devices of axis "ep" (expert parallelism). A router
sends each point of the picture to one expert, which returns the colour.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from shared import panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    shard_modules,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.model_parallel import Experts

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2, "ep": 2})
AXES = ("dp", "fsdp", "ep")  # "ep" splits the batch and the experts
EXPERTS = 8


def colour(points):
    """A wheel of six wings, in red, green and blue from 0 to 1: float32[..., 3]."""
    radius, angle = (
        np.linalg.norm(points, axis=-1),
        np.arctan2(*np.moveaxis(points, -1, 0)),
    )
    wing = np.floor(3 * angle / np.pi + 1.5 * radius) % 6
    waves = np.cos(np.pi * (wing[..., None] + np.array([0, 2, 4])) / 3)
    return (0.5 + 0.45 * waves * (radius < 0.95)[..., None]).astype(np.float32)


def batch_of(number, rows=1024):
    points = np.random.default_rng(number).uniform(-1, 1, (rows, 2)).astype(np.float32)
    return {"points": points, "colour": colour(points)}


class Expert(nn.Module):
    @nn.compact
    def __call__(self, h):
        return nn.Dense(3)(nn.gelu(nn.Dense(32)(h)))


class Painter(nn.Module):
    axis: str | None = "ep"

    @nn.compact
    def __call__(self, points):
        h = jnp.sin(nn.Dense(64, kernel_init=nn.initializers.normal(3.0))(points))
        return Experts(Expert(), num_experts=EXPERTS, top_k=1, axis=self.axis)(h)


def loss_fn(params, apply_fn, batch, rng):
    colours, sown = apply_fn({"params": params}, batch["points"], mutable=["losses"])
    balance = sown["losses"]["Experts_0"]["load_balance"][0]  # 1 for equal loads
    error = jnp.mean((colours - batch["colour"]) ** 2)
    return error + 1e-3 * balance, {"error": error, "balance": balance}


wrapped = shard_modules(Painter(), (Experts, nn.Dense), "fsdp", min_weight_size=64)
tx, key = optax.adam(optax.cosine_decay_schedule(1e-2, 1500)), jax.random.key(0)
points = batch_of(0)["points"]
state = create_train_state(wrapped, tx, mesh, key, points, batch_axes=AXES)
step = make_train_step(loss_fn, mesh, AXES, has_aux=True)
errors = []
for number in steps(1500):
    state, metrics = step(state, batch_of(number), key)
    errors.append(float(metrics["error"]))
balance = float(metrics["balance"])
print(f"error {errors[0]:.3f} -> {errors[-1]:.4f}; balance {balance:.2f}, 1 is even")


# ---- Predict the full picture with axis=None, and show the expert of each point.
def paint(params, points):
    seen = {"capture_intermediates": lambda module, _: module.name == "router"}
    plain = Painter(axis=None)
    painted, found = plain.apply(
        {"params": params}, points, mutable=["intermediates"], **seen
    )
    logits = found["intermediates"]["Experts_0"]["router"]["__call__"][0]
    return painted, logits.argmax(-1)


side = np.linspace(-1, 1, 96, dtype=np.float32)
grid = np.stack(np.meshgrid(side, side), -1)
painted, expert = jax.jit(paint)(state.params, grid.reshape(-1, 2))
fig, axes = panels(2)
shown = [np.clip(painted, 0, 1).reshape(96, 96, 3), expert.reshape(96, 96)]
for ax, title, image in zip(axes, ("painted", "by expert"), shown):
    ax.imshow(image, cmap="tab10", vmin=0, vmax=9)
    ax.set_title(title)
    ax.set_axis_off()
save(fig, "experts")

"""DPO: a policy for random walks learns from pairs of preferred and rejected walks.

The loss compares the policy with a frozen copy of the initial policy. extra_trees=
passes the copy to each step, sharded, without gradients and without optimizer moments.
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
    shard_module_params,
    simulate_cpu_devices,
)

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES, LENGTH, BETA = ("dp", "fsdp"), 48, 0.3
WANTED = 6 * np.sin(np.arange(LENGTH + 1) * 2 * np.pi / LENGTH)  # never a model input


class Policy(nn.Module):
    """The logits of the next move, down, level or up, at heights float32[rows, t]."""

    @nn.compact
    def __call__(self, heights, times):
        Dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**9)
        waves = times[..., None] * (2 * jnp.pi / LENGTH) * jnp.arange(1, 4)
        seen = [heights[..., None] / 4, jnp.sin(waves), jnp.cos(waves)]
        x = nn.gelu(Dense(64)(jnp.concatenate(seen, -1)))
        return Dense(3, kernel_init=nn.initializers.zeros)(nn.gelu(Dense(64)(x)))


model = Policy()


@jax.jit  # outside of shard_map a sharded model behaves like the plain model
def walk(params, key):
    """Heights of 256 walks that the policy takes, float32[256, LENGTH + 1]."""

    def move(height, now):
        time, key = now
        times = jnp.full((256, 1), time, jnp.float32)
        logits = model.apply({"params": params}, height[:, None], times)[:, 0]
        height += jax.random.categorical(key, logits) - 1
        return height, height

    start, moves = jnp.zeros(256), (jnp.arange(LENGTH), jax.random.split(key, LENGTH))
    return jnp.concatenate([start[None], jax.lax.scan(move, start, moves)[1]]).T


def log_probability(params, apply_fn, heights):
    times = jnp.broadcast_to(jnp.arange(LENGTH) * 1.0, heights[:, 1:].shape)
    logits = apply_fn({"params": params}, heights[:, :-1], times)
    moves = jnp.diff(heights, axis=1).astype(int) + 1
    return jnp.take_along_axis(nn.log_softmax(logits), moves[..., None], -1).sum((1, 2))


def dpo_loss(params, apply_fn, batch, rng, *, reference):
    chosen, rejected = (
        log_probability(params, apply_fn, batch[which])
        - log_probability(reference, apply_fn, batch[which])
        for which in ("chosen", "rejected")
    )
    return -jnp.mean(nn.log_sigmoid(BETA * (chosen - rejected)))


key, like = jax.random.key(0), np.zeros((256, LENGTH), np.float32)
state = create_train_state(
    model, optax.adam(3e-3), mesh, key, like, like, batch_axes=AXES
)
reference = jax.tree.map(jnp.copy, state.params)
step = make_train_step(dpo_loss, mesh, AXES)
losses = []
for number in steps(300):
    # ---- Sample two walks of the reference; prefer the walk nearer to the wave.
    keys = jax.random.split(jax.random.fold_in(key, number))
    pair = np.stack([walk(reference, key) for key in keys])
    nearer = (np.abs(pair - WANTED).sum(-1).argmin(0), np.arange(256))
    batch = {"chosen": pair[nearer], "rejected": pair[1 - nearer[0], nearer[1]]}
    state, metrics = step(state, batch, key, extra_trees={"reference": reference})
    losses.append(float(metrics["loss"]))

before, after = (
    np.array(walk(params, jax.random.key(1))) for params in (reference, state.params)
)
off = [np.abs(heights - WANTED).mean() for heights in (before, after)]
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; off by {off[0]:.1f} -> {off[1]:.1f}")
fig, axes = panels(2, sharey=True)
for ax, title, heights in zip(axes, ("reference", "after DPO"), (before, after)):
    ax.plot(heights[:30].T, color="C0", alpha=0.3, linewidth=1)
    ax.plot(WANTED, color="C1", linewidth=2)
    ax.set(title=title, xlabel="move", ylim=(-12, 12))
axes[0].set_ylabel("height")
save(fig, "dpo")

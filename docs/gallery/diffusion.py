"""Diffusion: a denoising model turns noise into points that spell a word.

A small network learns to remove noise from points. Sampling uses an exponential moving
average of the weights (with_ema), sharded like the weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.core import meta
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from shared import inside, panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    ema_params,
    make_train_step,
    shard_modules,
    simulate_cpu_devices,
    with_ema,
)

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES = ("dp", "fsdp")

# ---- Points inside the letters, float32[points, 2], of variance near 1.
WORD = TextPath((0, 0), "JAX", prop=FontProperties(family="DejaVu Sans", weight="bold"))
LOW, HIGH = WORD.vertices.min(0), WORD.vertices.max(0)
grid = np.random.default_rng(0).uniform(LOW, HIGH, (100_000, 2))
ink = grid[inside(WORD, grid)]
ink = ((ink - ink.mean(0)) / ink.std()).astype(np.float32)


def batch_of(number, rows=1024):
    return ink[np.random.default_rng(number).integers(0, len(ink), rows)]


class Denoiser(nn.Module):
    """The noise in ``x`` float32[rows, 2] at the times ``t`` float32[rows]."""

    @nn.compact
    def __call__(self, x, t):
        seen = jnp.concatenate([x, t[:, None]], -1)
        waves = jnp.outer(seen, jnp.pi * 2.0 ** jnp.arange(-2, 5)).reshape(len(x), -1)
        h = nn.Dense(128)(jnp.concatenate([seen, jnp.sin(waves), jnp.cos(waves)], -1))
        for _ in range(3):
            h = h + nn.Dense(128)(nn.silu(h))
        return nn.Dense(2)(nn.silu(h))


def kept(t):  # fraction of signal at time t, from 1 to 0
    return jnp.cos(0.5 * jnp.pi * t) ** 2


def loss_fn(params, apply_fn, points, rng):  # rng differs between devices
    t = jax.random.uniform(jax.random.fold_in(rng, 0), points.shape[:1])
    noise = jax.random.normal(jax.random.fold_in(rng, 1), points.shape)
    share = kept(t)[:, None]
    noisy = jnp.sqrt(share) * points + jnp.sqrt(1 - share) * noise
    return jnp.mean((apply_fn({"params": params}, noisy, t) - noise) ** 2)


plain, key, points = Denoiser(), jax.random.key(0), batch_of(0)
model = shard_modules(plain, nn.Dense, "fsdp", min_weight_size=2**10)
tx = with_ema(optax.adam(optax.cosine_decay_schedule(4e-3, 3000)), 0.99)
state = create_train_state(model, tx, mesh, key, points, points[:, 0], batch_axes=AXES)
step = make_train_step(loss_fn, mesh, AXES)
losses = []
for number in steps(3000):
    state, metrics = step(state, batch_of(number), key)
    losses.append(metrics["loss"])


@jax.jit
def sample(params, x):
    """Back in time in 80 steps without further noise (DDIM): points after each."""

    def back(x, times):
        now, then = kept(times[0]), kept(times[1])
        noise = plain.apply({"params": params}, x, jnp.full(x.shape[:1], times[0]))
        clean = (x - jnp.sqrt(1 - now) * noise) / jnp.sqrt(now)
        return (x := jnp.sqrt(then) * clean + jnp.sqrt(1 - then) * noise), x

    times = jnp.linspace(0.99, 0, 81)
    return jax.lax.scan(back, x, jnp.stack([times[:-1], times[1:]], 1))[1]


average = meta.unbox(ema_params(state.opt_state, state.params))
way = sample(average, jax.random.normal(jax.random.key(1), (1500, 2)))
print(f"loss {np.mean(losses[:20]):.2f} -> {np.mean(losses[-20:]):.2f}")
fig, axes = panels(2, 2, sharex=True, sharey=True)
for ax, i in zip(axes.flat, (0, 49, 67, 79), strict=True):
    ax.scatter(*way[i].T, s=1.5, linewidths=0)
    ax.set(xlim=(-2.4, 2.4), ylim=(-1.4, 1.4), xticks=[], yticks=[])
    ax.set_title(f"after {i + 1} of 80 steps")
save(fig, "diffusion")

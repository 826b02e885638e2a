"""GAN: a generator learns to draw points that a discriminator accepts.

Generator and discriminator each have a state and a step. extra_trees= passes the
opponent's parameters to a step: gathered on use, without gradients, not donated.
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
AXES = ("dp", "fsdp")


class MLP(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x):
        Dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**9)
        for _ in range(2):
            x = nn.silu(Dense(96)(x))
        return Dense(self.features)(x)


generator, discriminator = MLP(2), MLP(1)


def generate(params, noise):
    return generator.apply({"params": params}, noise)


def score(params, x):  # a point or several points: high for points that look real
    return discriminator.apply({"params": params}, x)[..., 0]


# A relativistic loss: only differences of scores count. The penalty on slopes at real
# and generated points stabilises training.
def discriminator_loss(params, apply_fn, batch, rng, *, generator):
    real, fake = batch["x"], generate(generator, batch["noise"])
    slopes = [jax.grad(lambda x: score(params, x).sum())(x) for x in (real, fake)]
    penalty = sum(jnp.mean((slope**2).sum(-1)) for slope in slopes)
    margin = score(params, real) - score(params, fake)
    return jnp.mean(nn.softplus(-margin)) + 0.1 * penalty


def generator_loss(params, apply_fn, batch, rng, *, discriminator):
    fake = score(discriminator, generate(params, batch["noise"]))
    return jnp.mean(nn.softplus(score(discriminator, batch["x"]) - fake))


def batch_of(number, rows=256):
    """Points of two interleaved moons, and noise to make others of."""
    rng = np.random.default_rng(number)
    angle, side = rng.uniform(0, np.pi, rows), rng.choice([-1, 1], rows)
    moon = np.stack([np.cos(angle) - 0.5, np.sin(angle) - 0.25], 1) * side[:, None]
    noise = rng.normal(size=(rows, 4))
    moon = 1.5 * moon + 0.06 * rng.normal(size=moon.shape)
    return {"x": moon.astype(np.float32), "noise": noise.astype(np.float32)}


rate, first = optax.cosine_decay_schedule(2e-3, 2500), batch_of(0)
tx = optax.adam(rate, b1=0.0, b2=0.95)
keys = jax.random.split(jax.random.key(0))
g = create_train_state(generator, tx, mesh, keys[0], first["noise"], batch_axes=AXES)
d = create_train_state(discriminator, tx, mesh, keys[1], first["x"], batch_axes=AXES)
train_d = make_train_step(discriminator_loss, mesh, AXES)
train_g = make_train_step(generator_loss, mesh, AXES)
for number in steps(2500):
    batch = batch_of(number)
    d, of_d = train_d(d, batch, keys[0], extra_trees={"generator": g.params})
    g, of_g = train_g(g, batch, keys[0], extra_trees={"discriminator": d.params})

new = batch_of(10**6, rows=600)
drawn = np.array(jax.jit(generate)(g.params, new["noise"]))
off = np.linalg.norm(drawn[:, None] - batch_of(1, 4000)["x"], axis=-1).min(1).mean()
print(
    f"losses {of_d['loss']:.2f}, {of_g['loss']:.2f}; drawn points are off by {off:.2f}"
)
side = np.stack(np.meshgrid(*[np.linspace(-3, 3, 80)] * 2), -1).astype(np.float32)
fig, axes = panels(2, sharey=True)
for ax, title, points in zip(axes, ("data", "drawn"), (new["x"], drawn)):
    ax.scatter(*points.T, s=3, color="C1", linewidths=0, zorder=2)
    ax.set(title=title, xlim=(-3, 3), ylim=(-2.2, 2.2))
height = jax.jit(score)(d.params, side)
axes[1].contour(*np.moveaxis(side, -1, 0), height, 7, cmap="Blues", linewidths=0.7)
save(fig, "gan")

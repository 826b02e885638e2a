"""PPO: a policy learns to balance poles on carts (reinforcement learning).

Sixty-four carts are split over the devices like a batch. A rollout runs the sharded
policy under jit, outside of shard_map; the training step learns from the rollout.
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
    shard_batch,
    shard_module_params,
    simulate_cpu_devices,
)

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES, CARTS, TIME, DISCOUNT, TRACE = ("dp", "fsdp"), 64, 64, 0.98, 0.95


class ActorCritic(nn.Module):
    """The log probabilities of a push to the left, the right; what a state is worth."""

    @nn.compact
    def __call__(self, x):
        Dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**8)
        policy, value = (nn.tanh(Dense(64)(nn.tanh(Dense(64)(x)))) for _ in range(2))
        return nn.log_softmax(nn.Dense(2)(policy)), nn.Dense(1)(value)[..., 0]


def push(x, action):
    """Carts [..., 4] (place, speed, angle, turn) after 0.02 seconds, and who fell."""
    _, speed, angle, turn = jnp.moveaxis(x, -1, 0)
    pushed = (20 * action - 10 + 0.05 * turn**2 * jnp.sin(angle)) / 1.1
    spin = 9.8 * jnp.sin(angle) - jnp.cos(angle) * pushed
    spin /= 0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    pushed -= 0.05 * spin * jnp.cos(angle) / 1.1
    x = x + 0.02 * jnp.stack([speed, pushed, turn, spin], -1)
    return x, (jnp.abs(x[..., 0]) > 2.4) | (jnp.abs(x[..., 2]) > 0.21)


def rollout(params, x, key):
    """Runs all carts; of each push how much better it went than expected (``gain``)."""

    def move(x, key):
        log_policy, value = model.apply({"params": params}, x)
        action = jax.random.categorical(key, log_policy)
        after, fell = push(x, action)
        again = 0.05 * jax.random.normal(jax.random.fold_in(key, 1), x.shape)
        said = log_policy[jnp.arange(CARTS), action]
        seen = {"x": x, "action": action, "said": said, "value": value, "fell": fell}
        return jnp.where(fell[:, None], again, after), seen

    def look_back(after, now):
        stands, (gain, value) = 1.0 - now["fell"], after
        ahead = DISCOUNT * (value + TRACE * gain)
        gain = stands * (1 + ahead) - now["value"]
        return (gain, now["value"]), gain

    x, seen = jax.lax.scan(move, x, jax.random.split(key, TIME))
    last = model.apply({"params": params}, x)[1]
    gain = jax.lax.scan(look_back, (0 * last, last), seen, reverse=True)[1]
    seen |= {"worth": gain + seen["value"], "gain": (gain - gain.mean()) / gain.std()}
    return x, jax.tree.map(lambda z: z.reshape(4, -1, *z.shape[2:]), seen)


def loss_fn(params, apply_fn, batch, rng):
    log_policy, value = apply_fn({"params": params}, batch["x"])
    ratio = jnp.exp(log_policy[jnp.arange(len(value)), batch["action"]] - batch["said"])
    near = jnp.clip(ratio, 0.8, 1.2)  # keeps the policy near the rollout policy
    policy = -jnp.minimum(ratio * batch["gain"], near * batch["gain"])
    return jnp.mean(policy + 0.002 * (value - batch["worth"]) ** 2)


model, key, tx = ActorCritic(), jax.random.key(0), optax.adam(2e-3)
carts = shard_batch(np.zeros((CARTS, 4), np.float32), mesh, AXES)
state = create_train_state(model, tx, mesh, key, carts, batch_axes=AXES)
step, run, lives = make_train_step(loss_fn, mesh, AXES), jax.jit(rollout), []
for number in steps(60):
    carts, parts = run(state.params, carts, jax.random.fold_in(key, number))
    lives.append(CARTS * TIME / max(float(parts["fell"].sum()), 1))
    for part in 4 * [0, 1, 2, 3]:
        batch = {name: rows[part] for name, rows in parts.items()}
        state, metrics = step(state, batch, key)

print(f"pushes until a pole falls: {lives[0]:.0f} -> {lives[-1]:.0f}")
fig, ax = panels()
ax.semilogy(lives)
ax.axhline(CARTS * TIME, color="C1", linestyle="--")
ax.text(0, CARTS * TIME * 0.75, "no pole falls", color="C1", va="top")
ax.set(xlabel="rollout of 64 carts", ylabel="pushes until a pole falls")
save(fig, "ppo")

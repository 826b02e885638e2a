"""Mamba: a selective recurrence remembers a pulse for hundreds of steps.

The sequence is split over four devices, along axis "cp". Each device runs the
recurrence on the local part; recurrence_over_axis returns the state of earlier devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from shared import panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    shard_modules,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.model_parallel import recurrence_over_axis

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2, "cp": 4})
LENGTH = 512


def batch_of(seed, rows=16):
    """Pulses up and down in noise, [rows, LENGTH, 1]; the sign of the last one."""
    rng = np.random.default_rng(seed)
    pulses = rng.choice([-1, 0, 1], (rows, LENGTH), p=(0.005, 0.99, 0.005))
    pulses[:, 0] = rng.choice([-1, 1], rows)
    last = np.maximum.accumulate(np.where(pulses, np.arange(LENGTH), 0), axis=1)
    signal = 2.0 * pulses + 0.3 * rng.normal(size=pulses.shape)
    sign = np.take_along_axis(pulses, last, 1)
    return {"signal": signal[..., None].astype(np.float32), "sign": 1.0 * sign}


class Selective(nn.Module):
    """h[s] = a[s] h[s - 1] + u[s], where the input determines a and u."""

    @nn.compact
    def __call__(self, x):
        opened = nn.softplus(nn.Dense(32)(x) - 4.0)
        rates = self.param("rates", nn.initializers.normal(0.5), (32,))
        decay, update = jnp.exp(-opened * jnp.exp(rates)), opened * nn.Dense(32)(x)
        then = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        # The local tokens from state zero; below, add the state of earlier devices.
        decays, own = jax.lax.associative_scan(then, (decay, update), axis=1)
        before = recurrence_over_axis(decays[:, -1], own[:, -1], "cp")
        states = own + decays * before[:, None]
        return nn.Dense(x.shape[-1])(states * nn.silu(nn.Dense(32)(x)))


class Mamba(nn.Module):
    @nn.compact
    def __call__(self, signal):
        x = nn.Dense(32)(nn.gelu(nn.Dense(32)(signal)))
        for _ in range(2):
            x = x + Selective()(x)
        return nn.Dense(1)(x)[..., 0]


def loss_fn(params, apply_fn, batch, rng):
    margin = batch["sign"] * apply_fn({"params": params}, batch["signal"])
    return nn.softplus(-margin).mean()


model = shard_modules(Mamba(), (nn.Dense,), "fsdp", min_weight_size=2**8)
key, signal = jax.random.key(0), batch_of(0)["signal"]
tx = optax.adam(optax.cosine_decay_schedule(1e-2, 300))
state = create_train_state(model, tx, mesh, key, signal, batch_axes="fsdp")
step = make_train_step(loss_fn, mesh, batch_spec=P("fsdp", "cp"))
losses = []
for number in steps(300):
    state, metrics = step(state, batch_of(number), key)
    losses.append(float(metrics["loss"]))

new = batch_of(10**6, rows=64)
said = np.tanh(jax.jit(Mamba().apply)({"params": state.params}, new["signal"]) / 2)
right = (np.sign(said) == new["sign"]).mean()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}; {right:.1%} of signs are right")
fig, axes = panels(1, 2, sharex=True)
axes[0].plot(new["signal"][0, :, 0], linewidth=0.7, color="#7d7d7d")
axes[0].set(ylabel="signal")
axes[1].plot(new["sign"][0], color="C1", linewidth=3, alpha=0.5, label="last pulse")
axes[1].plot(said[0], color="C0", label="model")
axes[1].set(ylabel="sign", xlabel="time", ylim=(-1.2, 2.2))
axes[1].legend(ncols=2, loc="upper right")
for device in range(4):
    axes[0].text(64 + 128 * device, 3.2, f"device {device}", ha="center", fontsize=9)
    for ax in axes:
        ax.axvline(128 * device, color="#7d7d7d", linewidth=0.8, linestyle=":")
save(fig, "mamba")

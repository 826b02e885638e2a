"""Long context: attention recalls facts from a sequence split over four devices.

context_attention sends keys and values around a ring of devices. In the zigzag layout
each device has an early and a late chunk of the sequence, so the work is balanced.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from shared import panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    shard_batch,
    shard_modules,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.model_parallel import context_attention

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2, "cp": 4})
LENGTH, NAMES, NUMBERS, SPEC = 256, 128, 16, P("fsdp", "cp")


def batch_of(seed, rows=16):
    """Each token tells the number of a name, and asks for another's: [rows, LENGTH]."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, NUMBERS, (rows, NAMES))
    told, asked = rng.integers(0, NAMES, (2, rows, LENGTH))
    of = lambda names: np.take_along_axis(numbers, names, 1)
    return {"told": told, "number": of(told), "asked": asked, "answer": of(asked)}


class Reader(nn.Module):
    """Logits of the answer for each query, [rows, t, NUMBERS]."""

    @nn.compact
    def __call__(self, told, number, asked):
        name = nn.Embed(NAMES, 64)  # one table for query and key names
        query = nn.DenseGeneral((4, 16), name="query")(name(asked))
        key = nn.DenseGeneral((4, 16), name="key")(name(told))
        value = nn.DenseGeneral((4, 16), name="value")(nn.Embed(NUMBERS, 64)(number))
        found = context_attention(query, key, value, "cp", impl="ring")
        x = nn.gelu(nn.DenseGeneral(64, axis=(-2, -1), name="out")(found))
        return nn.Dense(NUMBERS)(x)


def inputs(batch):
    return batch["told"], batch["number"], batch["asked"]


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, *inputs(batch))
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, batch["answer"]).mean()


wrapped = (nn.Embed, nn.Dense, nn.DenseGeneral)
model = shard_modules(Reader(), wrapped, "fsdp", min_weight_size=2**9)
tx, key = optax.adam(3e-3), jax.random.key(0)
state = create_train_state(
    model, tx, mesh, key, *inputs(batch_of(0)), batch_axes="fsdp"
)
step = make_train_step(loss_fn, mesh, batch_spec=SPEC, layout="zigzag")
losses = []
for number in steps(250):
    batch = shard_batch(batch_of(number), mesh, batch_spec=SPEC)
    state, metrics = step(state, batch, key)
    losses.append(float(metrics["loss"]))

# ---- Outside of shard_map the model takes the full sequence in natural order.
new = batch_of(10**6, rows=400)
logits = jax.jit(Reader().apply)({"params": state.params}, *inputs(new))
right = (logits.argmax(-1) == new["answer"]).mean(0)
unseen = (1 - 1 / NAMES) ** np.arange(1, LENGTH + 1)  # P(name not seen so far)
last = right[-32:].mean()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; at the end {last:.0%} are right")
fig, ax = panels()
ax.plot(right, ".", markersize=3, label="model")
ax.plot(1 - unseen * (1 - 1 / NUMBERS), color="C1", label="all that can be known")
for chunk, device in enumerate([0, 1, 2, 3, 3, 2, 1, 0]):
    ax.axvspan(32 * chunk, 32 * chunk + 32, 0, 0.09, color=f"C{device + 2}", alpha=0.6)
    ax.text(32 * chunk + 16, 0.015, device, ha="center")
ax.set(xlabel="token, and the device that has it", ylabel="share that is right")
ax.set(xlim=(0, LENGTH), ylim=(0, 1))
ax.legend(loc="center right")
save(fig, "long_context")

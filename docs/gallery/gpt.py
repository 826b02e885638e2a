"""GPT: a character-level language model learns from Python's documentation.

scan_layers runs the layers in a scan and gathers the weights of the next layer while a
layer computes. Muon trains the matrices, AdamW the rest; the learning rate decays.
"""

import pydoc_data.topics
import re

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
    muon,
    scan_layers,
    shard_module_params,
    simulate_cpu_devices,
)

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES, LENGTH, WIDTH = ("dp", "fsdp"), 64, 64

# ---- Text from the Python installation: letters, commas, full stops, spaces.
text = " ".join(pydoc_data.topics.topics.values()).lower()
text = re.sub(r"[^a-z,.]+", " ", text)
symbols, codes = np.unique(list(text), return_inverse=True)


def batch_of(number, rows=32):
    starts = np.random.default_rng(number).integers(0, len(codes) - LENGTH - 1, rows)
    return codes[starts[:, None] + np.arange(LENGTH + 1)]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(h[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, mask=mask)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h), None


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(len(symbols), WIDTH, name="symbols")
        places = self.param("places", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        block = shard_module_params(Block, "fsdp", min_weight_size=2**10)
        x, _ = scan_layers(block, length=3)(name="blocks")(embed(tokens) + places)
        return embed.attend(nn.LayerNorm()(x))


def loss_fn(params, apply_fn, tokens, rng):
    logits = apply_fn({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, tokens[:, 1:]).mean()


# consistent_rms scales Muon's updates to AdamW's, which train embedding and norms.
rate = optax.cosine_decay_schedule(8e-3, 500)
model, key, tx = GPT(), jax.random.key(0), muon(rate, consistent_rms=0.2)
state = create_train_state(model, tx, mesh, key, batch_of(0)[:, 1:], batch_axes=AXES)
step = make_train_step(loss_fn, mesh, AXES)
losses = []
for number in steps(500):
    state, metrics = step(state, batch_of(number), key)
    losses.append(float(metrics["loss"]))


@jax.jit  # outside of shard_map a sharded model behaves like the plain model
def write(params, window, key):
    def one_more(window, key):
        logits = model.apply({"params": params}, window[None])[0, -1]
        new = jax.random.categorical(key, 1.2 * logits)
        return jnp.append(window[1:], new), new

    return jax.lax.scan(one_more, window, jax.random.split(key, 160))[1]


written = "".join(symbols[write(state.params, codes[:LENGTH], jax.random.key(1))])
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats; it writes: {written}")

fig, ax = panels()
ax.plot(losses)
share = np.bincount(codes) / len(codes)
ax.axhline(-(share * np.log(share)).sum(), color="C1", linestyle="--")
ax.text(len(losses), 2.93, "frequencies of letters alone", color="C1", ha="right")
shown = "\n".join(written[i : i + 32] for i in range(0, 160, 32))
ax.text(len(losses), 4.5, shown, ha="right", va="top", family="monospace")
ax.set(xlabel="step", ylabel="nats for a letter", ylim=(1.2, 4.6))
save(fig, "gpt")

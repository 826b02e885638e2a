"""A model you may not edit.

    python docs/examples/third_party.py

The code of docs/tutorials/third_party.md, written by docs/write_examples.py: change the page, and run that.
"""

from xlstm_jax.distributed import simulate_cpu_devices

simulate_cpu_devices(8)  # leave this out where there are accelerators


# ---- The model
import jax
from flax import linen as nn


class Layer(nn.Module):
    width: int

    def setup(self):
        self.attend = nn.MultiHeadAttention(num_heads=4, use_bias=False)
        self.up = nn.Dense(4 * self.width, use_bias=False)
        self.down = nn.Dense(self.width, use_bias=False)

    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        return x + self.attend(x, mask=mask) + self.down(nn.relu(self.up(x)))


class TextModel(nn.Module):
    vocab: int = 64
    width: int = 64
    depth: int = 1

    def setup(self):
        self.embed = nn.Embed(self.vocab, self.width)
        self.layers = [Layer(self.width) for _ in range(self.depth)]
        self.norm = nn.RMSNorm()

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        embedding = self.embed.variables["params"]["embedding"]
        return self.norm(x) @ embedding.T


# ---- Shard the model with `shard_modules`
from xlstm_jax.distributed import DeviceMeshManager, shard_modules

mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES = ("dp", "fsdp")  # the axes that split the batch

theirs = TextModel()
model = shard_modules(theirs, (Layer, nn.Embed), "fsdp", min_weight_size=2**9)
print(type(model).__name__, model.depth)


import numpy as np
import optax
from xlstm_jax.distributed import create_train_state, make_train_step

FOLLOWER = np.random.default_rng(0).permutation(64)


def text(number, rows=32, length=17):
    """Tokens int[rows, length], drawn with seed ``number``."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 64, (rows, length))
    for t in range(1, length):
        follows = rng.random(rows) < 0.8
        tokens[follows, t] = FOLLOWER[tokens[follows, t - 1]]
    return tokens


def loss_fn(params, apply_fn, tokens, rng):
    logits = apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


tx, inputs = optax.sgd(2.0), text(0)[:, :-1]
state = create_train_state(model, tx, mesh, jax.random.key(0), inputs, batch_axes=AXES)
step = make_train_step(loss_fn, mesh, batch_axes=AXES)


# ---- Load pretrained weights
from xlstm_jax.distributed import shardings, unbox
from xlstm_jax.distributed.data_parallel import box_like

pretrained = jax.tree.map(lambda x: 0.9 * np.asarray(x), unbox(state.params))
params = box_like(pretrained, state.params)
params = jax.device_put(params, shardings(params, mesh))
state = state.replace(params=params)
print(params["layers_0"]["up"]["kernel"].names)


# ---- Training
losses = []
for number in range(24):
    state, metrics = step(state, text(number), jax.random.key(1))
    losses.append(float(metrics["loss"]))
print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


import matplotlib.pyplot as plt

p = np.full(64, 0.2 / 64)
p[0] += 0.8
entropy = -(p * np.log(p)).sum()
print(f"{entropy:.2f} nats")

fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(losses, label="loss")
ax.axhline(entropy, color="C1", linestyle=":", label="entropy of the text")
ax.set(xlabel="step", ylabel="nats per token", ylim=(0, None))
ax.legend()
fig.savefig("loss.png")


# ---- Check the gradients with `check_step`
from xlstm_jax.distributed import check_step

print(check_step(step, state, text(0), jax.random.key(2)))


# ---- Choose the modules to shard
from collections import Counter

from xlstm_jax.distributed import plan_sharding
from xlstm_jax.distributed.data_parallel import larger_than

choices = {
    "the model": lambda path, module: path == "",
    "larger_than(2**13)": larger_than(2**13),
    "(Layer, Embed)": (Layer, nn.Embed),
    "(Dense, Embed)": (nn.Dense, nn.Embed),
}
kept, at_once = [], []
for name, where in choices.items():
    chosen = shard_modules(TextModel(depth=2), where, "fsdp", min_weight_size=2**9)
    plan = plan_sharding(chosen, mesh.shape, inputs)
    units = Counter()  # gathered bytes by module
    for row in plan.rows:
        if row.uses:
            units[row.gathered_with] += row.gathered_bytes
    kept.append(plan.parameters.per_device / 2**10)
    at_once.append(max(units.values()) / 2**10)
    print(
        f"{name:18} keeps {kept[-1]:4.0f} KiB, gathers at most "
        f"{at_once[-1]:4.0f} KiB at once, {len(units)} modules"
    )


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
place = np.arange(len(choices))
ax.barh(place - 0.2, kept, height=0.4, label="kept")
ax.barh(place + 0.2, at_once, height=0.4, label="gathered at once")
ax.set_yticks(place, choices)
ax.invert_yaxis()
ax.set(xlabel="KiB of parameters on each device")
ax.legend()
fig.savefig("choices.png")

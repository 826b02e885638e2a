"""CLIP: an image encoder and a text encoder learn matching embeddings.

The contrastive loss compares each picture with the captions of the global batch. An
all-gather sends the embeddings to every device; the transpose returns the gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from shared import digits, panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    make_train_step,
    shard_module_params,
    simulate_cpu_devices,
)

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES = ("dp", "fsdp")  # the axes that split the batch
WORDS = "zero one two three four five six seven eight nine".split()


def batch_of(seed, rows=64):
    """Two printed digits side by side, and their names as letters: "two seven"."""
    (left, tens), (right, ones) = (digits([seed, side], rows) for side in (0, 1))
    captions = [f"{WORDS[i]} {WORDS[j]}".ljust(11) for i, j in zip(tens, ones)]
    letters = np.array([[ord(letter) for letter in caption] for caption in captions])
    return {"image": np.concatenate([left, right], 2), "text": letters}


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Towers(nn.Module):
    """Embeddings of pictures and captions, each float32[rows, 32], of norm 1."""

    @nn.compact
    def __call__(self, image, text):
        Dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**10)
        x = nn.relu(nn.Conv(16, (3, 3), (2, 2))(image[..., None]))
        x = nn.relu(nn.Conv(32, (3, 3), (2, 2))(x)).reshape(len(image), -1)
        y = nn.Embed(128, 16)(text).reshape(len(text), -1)
        x, y = (Dense(32)(nn.gelu(Dense(256)(z))) for z in (x, y))
        scale = self.param("scale", nn.initializers.constant(np.log(10.0)), ())
        return unit(x), unit(y), jnp.exp(scale)


def loss_fn(params, apply_fn, batch, rng):
    image, text, scale = apply_fn({"params": params}, batch["image"], batch["text"])
    # Index of each local caption among the gathered captions.
    partner = jnp.arange(len(image)) + len(image) * lax.axis_index(AXES)
    losses = []
    for own, other in ((image, text), (text, image)):
        logits = scale * own @ lax.all_gather(other, AXES, tiled=True).T
        losses.append(optax.softmax_cross_entropy_with_integer_labels(logits, partner))
    return (losses[0] + losses[1]).mean() / 2


model, key, first = Towers(), jax.random.key(0), batch_of(0)
tx = optax.adamw(optax.cosine_decay_schedule(3e-3, 500))
state = create_train_state(model, tx, mesh, key, *first.values(), batch_axes=AXES)
step = make_train_step(loss_fn, mesh, AXES)
losses = []
for number in steps(500):
    state, metrics = step(state, batch_of(number), key)
    losses.append(float(metrics["loss"]))

# ---- Similarity of ten new pictures and captions; the diagonal should be largest.
new = batch_of(10**6, rows=200)
image, text, _ = jax.jit(model.apply)({"params": state.params}, *new.values())
likeness = np.array(image @ text.T)
same = (new["text"][:, None] == new["text"]).all(-1)
found = same[np.arange(200), likeness.argmax(1)].mean()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {found:.0%} of 200 find their words")
fig, ax = panels()
ax.imshow(likeness[:10, :10], cmap="Blues", vmin=-0.2, vmax=1)
captions = ["".join(map(chr, row)).strip() for row in new["text"][:10]]
ax.set_xticks(range(10), captions, rotation=45, ha="right", fontsize=8)
ax.set_yticks([])
for row, picture in enumerate(new["image"][:10]):
    place = ax.inset_axes((-2.4, row - 0.4, 1.7, 0.8), transform=ax.transData)
    place.imshow(picture, cmap="Greys_r", vmin=-0.5, vmax=1.5, aspect="auto")
    place.set_axis_off()
ax.set_title("likeness of pictures and captions")
save(fig, "clip")

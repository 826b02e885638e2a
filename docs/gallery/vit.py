"""ViT: a vision transformer classifies printed digits.

The model is plain Flax code without mesh axes; shard_modules shards the model without
an edit. The mesh is HSDP: two groups of four devices each hold a replica of the shards.
"""

import jax
import optax
from flax import linen as nn
from shared import digits, panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    create_train_state,
    make_eval_step,
    make_train_step,
    shard_batch,
    shard_modules,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_hsdp_mesh(replicas=2, shards=4)
AXES = ("dp", "fsdp")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(128)(nn.LayerNorm()(x)))
        return x + nn.Dense(64)(h)


class ViT(nn.Module):
    """Pictures [rows, 16, 16] to the logits of ten digits, by 16 patches of 4 x 4."""

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(64, (4, 4), (4, 4))(image[..., None]).reshape(-1, 16, 64)
        x = x + self.param("places", nn.initializers.normal(0.1), (16, 64))
        for _ in range(2):
            x = Block()(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, batch["label"]).mean()


def batch_of(seed, rows=64):
    return dict(zip(("image", "label"), digits(seed, rows), strict=True))


model = shard_modules(
    ViT(), (Block, nn.Conv), "fsdp", min_weight_size=2**9, replicas=Replicas("dp")
)
key, tx = jax.random.key(0), optax.adamw(optax.cosine_decay_schedule(3e-3, 500))
state = create_train_state(model, tx, mesh, key, batch_of(0)["image"], batch_axes=AXES)
step = make_train_step(loss_fn, mesh, AXES)
losses = []
for number in steps(500):
    state, metrics = step(state, batch_of(number), key)
    losses.append(float(metrics["loss"]))


def eval_fn(params, apply_fn, batch):
    logits = apply_fn({"params": params}, batch["image"])
    return {"values": logits.argmax(-1) == batch["label"], "weight": batch["weight"]}


# ---- New digits: each device counts locally; one reduction at the end.
metric, new = WeightedMean(), batch_of(10**6, rows=2001)
evaluate = make_eval_step(eval_fn, mesh, AXES, metric=metric)
rows, weight = shard_batch(new, mesh, AXES, pad=2008)  # 8 devices do not divide 2001
counts = evaluate(state, rows | {"weight": weight}, metric.empty(AXES, mesh))
accuracy = float(make_log_step(metric, mesh, AXES)(counts)[0])
print(
    f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; {accuracy:.1%} of new digits are right"
)

# Outside of shard_map the wrapped model behaves like the plain model.
read = jax.jit(lambda image: model.apply({"params": state.params}, image).argmax(-1))
fig, axes = panels(6, 4)
for ax, image, label, said in zip(axes.flat, *new.values(), read(new["image"])):
    ax.imshow(image, cmap="Greys_r", vmin=-0.5, vmax=1.5)
    ax.set_title(said, color="C2" if said == label else "C3", fontsize=9, pad=2)
    ax.set_axis_off()
save(fig, "vit")

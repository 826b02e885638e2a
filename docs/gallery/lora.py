"""LoRA: small adapters teach a digit classifier to read mirrored digits.

The base weights are frozen and stored in 16 bits, without gradients and optimizer
moments. Only two narrow matrices beside each kernel are trained.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from shared import digits, panels, save, steps
from xlstm_jax.distributed import (
    DeviceMeshManager,
    create_train_state,
    freeze_params,
    make_train_step,
    plan_sharding,
    shard_module_params,
    simulate_cpu_devices,
)

simulate_cpu_devices(8)  # leave this out where there are accelerators
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES = ("dp", "fsdp")


class LoRADense(nn.Dense):  # adds the product of two narrow matrices to the kernel
    @nn.compact
    def __call__(self, x):
        a = self.param("lora_a", nn.initializers.normal(0.1), (x.shape[-1], 4))
        b = self.param("lora_b", nn.initializers.zeros, (4, self.features))
        return super().__call__(x) + x @ a @ b


class Reader(nn.Module):
    """Pictures [rows, 16, 16] to the logits of ten digits."""

    dense: type[nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, image):
        wrapped = shard_module_params(self.dense, "fsdp", min_weight_size=2**9)
        x = image.reshape(-1, 256)
        for layer in range(2):
            x = nn.relu(wrapped(256, name=f"layer_{layer}")(x))
        return wrapped(10, name="head")(x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"right": (logits.argmax(-1) == batch["label"]).mean() * 1.0}


def batch_of(seed, mirrored, rows=128):
    image, label = digits(seed, rows)
    return {"image": image[:, :, ::-1] if mirrored else image, "label": label}


step = make_train_step(loss_fn, mesh, AXES, has_aux=True)


def train(state, mirrored, first):
    """The state after some steps, and the share of digits that were right in each."""
    shares = []
    for number in steps(150):
        batch = batch_of([first, number], mirrored)
        state, metrics = step(state, batch, jax.random.key(1))
        shares.append(float(metrics["right"]))
    return state, shares


image = batch_of(0, mirrored=False)["image"]
given = (optax.adamw(2e-3), mesh, jax.random.key(0), image)
base, learned = train(create_train_state(Reader(), *given, batch_axes=AXES), False, 1)

# ---- Put the base under the adapters: each device casts local shards to bfloat16.
frozen = {"trainable": lambda path: "lora_" in path, "frozen_dtype": "bfloat16"}
adapted = Reader(LoRADense)
state = create_train_state(adapted, *given, batch_axes=AXES, **frozen)
both = {name: state.params[name] | base.params[name] for name in base.params}
state = state.replace(params=freeze_params(both, **frozen))
state, adapted_to = train(state, True, 2)

kept = {}
for name, model, options in ("all", Reader(), {}), ("adapters", adapted, frozen):
    plan = plan_sharding(model, mesh.shape, image, tx=given[0], **options)
    kept[name] = round(plan.bytes_per_device / 1024)
shares = np.mean(learned[-20:]), adapted_to[0], np.mean(adapted_to[-20:])
print("right: {:.0%}; mirrored {:.0%} -> {:.0%};".format(*shares), "KiB:", kept)
fig, (left, right) = panels(2, width_ratios=(2, 1))
left.plot(learned, label="digits: all weights")
left.plot(range(150, 150 + len(adapted_to)), adapted_to, label="mirrored: adapters")
left.set(xlabel="step", ylabel="share that is right", ylim=(0, 1.3))
left.set_yticks([0, 0.5, 1])
left.legend(loc="upper left", fontsize=9)
right.bar(list(kept), list(kept.values()), color=["C0", "C1"])
right.set(ylabel="KiB that a device keeps")
save(fig, "lora")

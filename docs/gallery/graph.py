"""Graph network: a network predicts the groups of 240 people from 16 labels.

The nodes are split over the devices; each layer all-gathers the node features. Labels
per device differ, so the loss returns sum and weight (weighted=True) for an exact mean.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from matplotlib.collections import LineCollection
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
AXES, PEOPLE, GROUPS = ("dp", "fsdp"), 240, 4

# ---- A random graph: more edges within a group; noisy features (traits) per person.
rng = np.random.default_rng(0)
group = rng.integers(0, GROUPS, PEOPLE)
likely = np.where(group[:, None] == group, 0.12, 0.006)
knows = np.triu(rng.uniform(size=likely.shape) < likely, 1)
knows = (knows | knows.T | np.eye(PEOPLE, dtype=bool)).astype(np.float32)
traits = 0.8 * np.eye(8)[group] + rng.normal(size=(PEOPLE, 8))
told = np.zeros(PEOPLE, np.float32)
for one in range(GROUPS):
    told[np.flatnonzero(group == one)[:4]] = 1
batch = {
    "friends": knows / knows.sum(1, keepdims=True),  # rows sum to 1
    "traits": traits.astype(np.float32),
    "group": group,
    "told": told,
}


class GraphNetwork(nn.Module):
    axes: tuple[str, ...] = AXES  # () for the plain model

    @nn.compact
    def __call__(self, friends, x):
        """friends[local people, all people], x[local people, 8] -> logits."""
        Dense = shard_module_params(nn.Dense, "fsdp", min_weight_size=2**8)
        for _ in range(2):
            everyone = Dense(32)(x)
            if self.axes and not self.is_initializing():
                everyone = lax.all_gather(everyone, self.axes, tiled=True)
            x = nn.gelu(friends @ everyone)
        return nn.Dense(GROUPS)(x)


def loss_fn(params, apply_fn, batch, rng):
    logits = apply_fn({"params": params}, batch["friends"], batch["traits"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["group"])
    # A device may have no label: the step adds sums and weights over all devices.
    return (losses * batch["told"]).sum(), batch["told"].sum()


inputs, key = (batch["friends"], batch["traits"]), jax.random.key(0)
tx = optax.adamw(3e-3, weight_decay=0.3)
state = create_train_state(GraphNetwork(), tx, mesh, key, *inputs, batch_axes=AXES)
step = make_train_step(loss_fn, mesh, AXES, weighted=True)
losses = []
for _ in steps(100):
    state, metrics = step(state, batch, key)
    losses.append(float(metrics["loss"]))

logits = jax.jit(GraphNetwork(axes=()).apply)({"params": state.params}, *inputs)
found = np.array(logits.argmax(-1))
right = (found == group)[told == 0].mean()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.4f}; of the others {right:.0%} are right")

# ---- Lay out the graph from its edges: edges attract, nodes repel.
place = rng.normal(size=(PEOPLE, 2))
for _ in range(200):
    apart = place[:, None] - place
    push = apart / ((apart**2).sum(-1, keepdims=True) + 0.01)
    place += 0.05 * (0.08 * push.sum(1) - (knows[..., None] * apart).sum(1))
fig, ax = panels()
ends = place[np.argwhere(np.triu(knows, 1))]
ax.add_collection(LineCollection(ends, colors="#7d7d7d", linewidths=0.4, alpha=0.35))
ax.scatter(*place.T, c=[f"C{i}" for i in found], s=14, zorder=2)
ax.scatter(*place[told == 1].T, s=60, facecolors="none", edgecolors="#7d7d7d", zorder=2)
ax.scatter(*place[found != group].T, marker="x", s=24, color="#7d7d7d", zorder=3)
ax.set_title("groups that were found; rings told theirs, crosses are wrong", fontsize=9)
ax.set_axis_off()
save(fig, "graph")

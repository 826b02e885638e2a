"""LoRA on a frozen base.

    python docs/examples/lora.py

The code of docs/tutorials/lora.md, written by docs/write_examples.py: change the page, and run that.
"""

import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import linen as nn
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_train_state,
    create_train_state,
    export_safetensors,
    freeze_params,
    import_safetensors,
    make_train_step,
    plan_sharding,
    shard_module_params,
    simulate_cpu_devices,
    unbox,
)

simulate_cpu_devices(8)
mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 4})
AXES = ("dp", "fsdp")
wrap = partial(shard_module_params, axis_name="fsdp", min_weight_size=2**10)


# ---- A layer with an adapter
class LoRADense(nn.Dense):
    rank: int = 8

    @nn.compact
    def __call__(self, x):
        shapes = (x.shape[-1], self.rank), (self.rank, self.features)
        a = self.param("lora_a", nn.initializers.normal(0.1), shapes[0])
        b = self.param("lora_b", nn.initializers.zeros, shapes[1])
        return super().__call__(x) + x @ a @ b


class Block(nn.Module):
    dense: type[nn.Module] = nn.Dense

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.RMSNorm(name="norm")(x)
        h = nn.gelu(self.dense(4 * width, use_bias=False, name="up")(h))
        return x + self.dense(width, use_bias=False, name="down")(h), None


class Model(nn.Module):
    """Logits of the next token; the blocks are one scan."""

    dense: type[nn.Module] = nn.Dense
    width: int = 64
    layers: int = 2
    vocabulary: int = 64

    @nn.compact
    def __call__(self, tokens):
        table = self.vocabulary, self.width
        # The adapted model stores this table frozen in bfloat16; activations stay float32.
        embed = wrap(nn.Embed)(*table, dtype=jnp.float32, name="embed")
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        blocks = nn.scan(nn.remat(wrap(Block)), length=self.layers, **axes)
        x = blocks(self.dense, name="blocks")(embed(tokens))[0]
        return wrap(nn.Dense)(self.vocabulary, use_bias=False, name="head")(x)


def loss_fn(params, apply_fn, tokens, rng):
    logits = apply_fn({"params": params}, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits, tokens[:, 1:]).mean()


# ---- Train and export a base model
def counting(by, seed, rows=32, length=9):
    start = np.random.default_rng(seed).integers(0, 64, (rows, 1))
    return (start + by * np.arange(length)) % 64


step = make_train_step(loss_fn, mesh, AXES)


def train(state, by, steps):
    losses = []
    for number in range(steps):
        tokens = counting(by, [by, number])
        state, metrics = step(state, tokens, jax.random.key(1))
        losses.append(metrics["loss"])
    return state, np.array(losses)


inputs = (jax.random.key(0), counting(1, 0)[:, :-1])
base, of_base = train(
    create_train_state(Model(), optax.sgd(1.0), mesh, *inputs, batch_axes=AXES),
    by=1,
    steps=25,
)
folder = tempfile.mkdtemp()
export_safetensors(base.params, f"{folder}/base")
print(f"loss when counting by one: {of_base[0]:.2f} -> {of_base[-1]:.4f}")


# ---- Add adapters to the base model, in bfloat16
frozen = {"trainable": lambda path: "lora_" in path, "frozen_dtype": "bfloat16"}
adapted = Model(LoRADense)
state = create_train_state(
    adapted, optax.adamw(3e-2), mesh, *inputs, batch_axes=AXES, **frozen
)

plain = abstract_train_state(Model(), optax.identity(), mesh, *inputs, batch_axes=AXES)
read = import_safetensors(f"{folder}/base", plain.params)


def with_base(params, base):
    """Return ``params`` with the leaves that ``base`` contains replaced."""
    if not isinstance(base, dict):
        return base
    return {
        name: with_base(leaf, base[name]) if name in base else leaf
        for name, leaf in params.items()
    }


narrowed = jax.jit(partial(freeze_params, **frozen))
state = state.replace(params=narrowed(with_base(state.params, read)))

sizes, like = dict(mesh.shape), inputs[1]
plan = plan_sharding(adapted, sizes, like, tx=optax.adamw(3e-2), **frozen)
print("leaf                   stored as  trained  bytes of weights, moments")
for row in plan.rows:
    if row.path.startswith("blocks/up/"):
        each = row.parameters.per_device, row.optimizer.per_device
        print(f"{row.path:21}  {row.dtype:9}  {row.trainable!s:7}  {each}")


before = jax.tree.map(np.asarray, unbox(state.params))
state, of_adapters = train(state, by=3, steps=25)
after = unbox(state.params)
same = np.array_equal(before["head"]["kernel"], after["head"]["kernel"])
print(f"loss when counting by three: {of_adapters[0]:.2f}", end=" -> ")
print(f"{of_adapters[-1]:.4f}; the base is unchanged: {same}")
print(state)


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
ax.plot(of_base, label="all weights: count by one")
ax.plot(range(25, 50), of_adapters, label="adapters alone: count by three")
ax.set(xlabel="step", ylabel="loss (nats)")
ax.legend()
ax.grid(alpha=0.3)


# ---- Memory of LoRA compared with full fine-tuning
tokens = jax.ShapeDtypeStruct((8, 2048), jnp.int32)
adamw = optax.adamw(1e-4)
large = partial(Model, width=8192, layers=32, vocabulary=32768)
plans = {"all weights": plan_sharding(large(), sizes, tokens, tx=adamw)}
for dtype in ("float32", "bfloat16"):
    options = frozen | {"frozen_dtype": dtype}  # trainable=, and the stored dtype
    plan = plan_sharding(large(LoRADense), sizes, tokens, tx=adamw, **options)
    plans[f"LoRA on {dtype}"] = plan

print(f"{'GB of each device':18}  parameters  gradients  moments   in all")
parts = {}
for name, plan in plans.items():
    counts = (plan.parameters, plan.gradients, plan.optimizer)
    parts[name] = [count.per_device / 1e9 for count in counts]
    each = "  ".join(f"{gb:9.2f}" for gb in parts[name])
    print(f"{name:18}  {each}  {sum(parts[name]):8.2f}")


fig, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
left = np.zeros(len(parts))
for index, what in enumerate(["parameters", "gradients", "moments"]):
    widths = np.array([part[index] for part in parts.values()])
    ax.barh(list(parts), widths, left=left, label=what)
    left += widths
ax.invert_yaxis()
ax.set_xlabel("GB of each device")
ax.legend(loc="lower right")
ax.grid(alpha=0.3, axis="x")


# ---- Merge the adapters and export
def merged(params):
    """W + A B in place of W, A and B."""
    if not isinstance(params, dict):
        return params
    adapter = params.get("lora", params)  # NNX has a module "lora" here
    if "lora_a" not in adapter:
        return {name: merged(leaf) for name, leaf in params.items()}
    change = adapter["lora_a"] @ adapter["lora_b"]
    return {"kernel": params["kernel"] + change}


weights = jax.jit(lambda params: merged(nn.unbox(params)))(state.params)
export_safetensors(weights, f"{folder}/merged")
like = jax.tree.map(np.zeros_like, weights)
exported = import_safetensors(f"{folder}/merged", like)

tokens = counting(3, seed=[9, 9])
logits = np.asarray(jax.jit(Model().apply)({"params": exported}, tokens))
print("the plain model continues", tokens[0, 3:6], "with", end=" ")
print(logits[0, 3:6].argmax(-1))

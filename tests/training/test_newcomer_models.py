"""Models as a newcomer writes them, sharded by the five lines: a U-Net, a decoder with adapters, a mixer.

The models know nothing of the library, and stand in no other repository. Each trains two steps on one device by Flax
and optax alone, and two steps on a mesh: a plain one, and one that ``jax.set_mesh`` has set with ``Auto`` or explicit
axes.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType

from tests.support import AXES, assert_same_params, split_share
from xlstm_jax.distributed import (
    check_step,
    create_nnx_module,
    create_train_state,
    make_train_step,
    nnx_model,
    nnx_value_and_grad,
    shard_modules,
    unbox,
)

KEY, ROWS, STEPS = jax.random.key(0), 16, 2
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-2))
SCALE = 1 + np.arange(ROWS) % 3  # rows differ, so that no share of them is the mean

# ------------------------------------------------------------------------------------------------------------ the U-Net


class DoubleConv(nnx.Module):
    def __init__(self, din, dout, stats_axes, rngs):
        self.conv1 = nnx.Conv(din, dout, (3, 3), use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(dout, axis_name=stats_axes, rngs=rngs)
        self.conv2 = nnx.Conv(dout, dout, (3, 3), use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(dout, axis_name=stats_axes, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.bn1(self.conv1(x)))
        return nnx.silu(self.bn2(self.conv2(x)))


class UNet(nnx.Module):
    """Two levels: the way down keeps its features, the way up concatenates them."""

    def __init__(self, rngs, stats_axes=None, width=8):
        widths = [width, 2 * width]
        self.down = nnx.List()
        self.up = nnx.List()
        din = 3
        for dout in widths:
            self.down.append(DoubleConv(din, dout, stats_axes, rngs))
            din = dout
        self.middle = DoubleConv(din, 2 * din, stats_axes, rngs)
        self.time = nnx.Linear(1, 2 * din, rngs=rngs)
        din = 2 * din
        for dout in reversed(widths):
            up = {"conv": nnx.ConvTranspose(din, dout, (2, 2), strides=(2, 2), rngs=rngs)}
            up["block"] = DoubleConv(2 * dout, dout, stats_axes, rngs)
            self.up.append(nnx.Dict(**up))
            din = dout
        self.head = nnx.Conv(din, 3, (1, 1), rngs=rngs)

    def __call__(self, x, t):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = self.middle(x) + self.time(t[:, None])[:, None, None]
        for stage in self.up:
            x = stage["conv"](x)
            x = stage["block"](jnp.concatenate([x, skips.pop()], axis=-1))
        return self.head(x)


def images(size=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, size, size, 3)) * SCALE[:, None, None, None]
    return {"x": np.float32(x), "t": np.float32(rng.uniform(size=ROWS)), "noise": np.float32(rng.normal(size=x.shape))}


def diffusion(apply, batch):
    noisy = batch["x"] + batch["t"][:, None, None, None] * batch["noise"]
    return apply(noisy, batch["t"])


def of_noise(out, batch):
    return jnp.mean((out - batch["noise"]) ** 2)


# ------------------------------------------------------------------------------ a decoder with grouped queries and LoRA

VOCAB, WIDTH, HEADS, GROUPS, DIM, LENGTH = 64, 32, 4, 2, 8, 8


class GroupedAttention(nnx.Module):
    def __init__(self, rngs):
        def linear(din, dout):
            return nnx.LoRALinear(din, dout, lora_rank=4, use_bias=False, rngs=rngs)

        self.wq, self.wo = linear(WIDTH, HEADS * DIM), linear(HEADS * DIM, WIDTH)
        self.wk, self.wv = linear(WIDTH, GROUPS * DIM), linear(WIDTH, GROUPS * DIM)

    def __call__(self, x, mask):
        b, t, _ = x.shape
        q = self.wq(x).reshape(b, t, GROUPS, HEADS // GROUPS, DIM)
        k, v = (layer(x).reshape(b, t, GROUPS, DIM) for layer in (self.wk, self.wv))
        scores = jnp.einsum("btgrd,bsgd->bgrts", q, k) / DIM**0.5
        scores = jnp.where(mask, scores, -1e9)
        mixed = jnp.einsum("bgrts,bsgd->btgrd", jax.nn.softmax(scores, -1), v)
        return self.wo(mixed.reshape(b, t, HEADS * DIM))


class DecoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.ln1, self.ln2 = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attn = GroupedAttention(rngs)
        self.fc1 = nnx.LoRALinear(WIDTH, 4 * WIDTH, lora_rank=4, rngs=rngs)
        self.fc2 = nnx.LoRALinear(4 * WIDTH, WIDTH, lora_rank=4, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attn(self.ln1(x), mask)
        return x + self.fc2(jax.nn.gelu(self.fc1(self.ln2(x))))


class Decoder(nnx.Module):
    """The table of tokens is the head, too."""

    def __init__(self, rngs):
        self.wte = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.wpe = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([DecoderBlock(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe[: tokens.shape[1]]
        mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        for block in self.blocks:
            x = block(x, mask)
        return self.wte.attend(self.norm(x))


def tokens():
    rng = np.random.default_rng(1)
    return {"tokens": rng.integers(0, VOCAB, (ROWS, LENGTH)), "factor": np.float32(SCALE)}


def next_token(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:]).mean(-1)
    return jnp.mean(losses * batch["factor"])


# -------------------------------------------------------------------------------------------------------------- a mixer

PATCHES, CHANNELS, DEPTH = 16, 32, 3


class Mlp(nnx.Module):
    def __init__(self, dim, hidden, rate, rngs):
        self.fc1, self.fc2 = nnx.Linear(dim, hidden, rngs=rngs), nnx.Linear(hidden, dim, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.fc2(self.drop(nnx.gelu(self.fc1(x))))


class MixerBlock(nnx.Module):
    def __init__(self, rate, rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(CHANNELS, rngs=rngs), nnx.LayerNorm(CHANNELS, rngs=rngs)
        self.tokens, self.channels = Mlp(PATCHES, 64, rate, rngs), Mlp(CHANNELS, 128, rate, rngs)

    def __call__(self, x):
        x = x + self.tokens(self.ln1(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(self.ln2(x))


class Mixer(nnx.Module):
    """``nnx.scan`` over layers; dropout draws in each of them."""

    def __init__(self, rngs, rate=0.0):
        self.stem = nnx.Conv(3, CHANNELS, (4, 4), strides=(4, 4), rngs=rngs)

        @nnx.split_rngs(splits=DEPTH)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return MixerBlock(rate, rngs)

        self.blocks = make(rngs)
        self.norm, self.head = nnx.LayerNorm(CHANNELS, rngs=rngs), nnx.Linear(CHANNELS, 10, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        x = x.reshape(x.shape[0], PATCHES, CHANNELS)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, block):
            return block(x)

        return self.head(self.norm(forward(x, self.blocks)).mean(1))


class LinenMlp(nn.Module):
    hidden: int
    rate: float

    @nn.compact
    def __call__(self, x):
        h = nn.Dropout(self.rate, deterministic=self.rate == 0)(nn.gelu(nn.Dense(self.hidden)(x)))
        return nn.Dense(x.shape[-1])(h)


class LinenBlock(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, x, _):
        x = x + LinenMlp(64, self.rate)(nn.LayerNorm()(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + LinenMlp(128, self.rate)(nn.LayerNorm()(x)), None


class LinenMixer(nn.Module):
    """The Linen version of ``Mixer``."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(CHANNELS, (4, 4), strides=(4, 4))(images)
        x = x.reshape(x.shape[0], PATCHES, CHANNELS)
        scan = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
        x, _ = scan(self.rate)(x, None)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def classified():
    return {"x": images(16)["x"], "label": np.random.default_rng(2).integers(0, 10, ROWS)}


def of_labels(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


# ------------------------------------------------------------------------------------------------------------ the tests


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its batch, a call of the model, the loss of its output, and the parameters that are trained."""

    make: Callable[..., Any]
    batch: dict[str, np.ndarray]
    call: Callable[..., Any]
    loss: Callable[..., Any]
    trainable: Any = nnx.Param
    has_stats: bool = False

    @property
    def inputs(self):
        """Returns the example inputs of ``init``."""
        return (self.batch["x"], self.batch["t"]) if "t" in self.batch else (next(iter(self.batch.values())),)


CASES = {
    "u-net": Case(UNet, images(), diffusion, of_noise, has_stats=True),
    "decoder": Case(Decoder, tokens(), lambda apply, batch: apply(batch["tokens"]), next_token),
    "decoder, adapters": Case(
        Decoder, tokens(), lambda apply, batch: apply(batch["tokens"]), next_token, nnx.LoRAParam
    ),
    "mixer": Case(Mixer, classified(), lambda apply, batch: apply(batch["x"]), of_labels),
}


# Mesh and mode; the first two in `make test-rest`, and all in `make test-all`.
FIRST, OTHERS = [("explicit", True), ("plain", False)], [("auto", True), ("explicit", False), ("plain", True)]
EACH = [*FIRST, *[pytest.param(*one, marks=pytest.mark.slow) for one in [*OTHERS, ("auto", False)]]]


def with_adapters(make):
    """Returns ``make`` with adapters that are not zero, so that both of their factors have gradients."""

    def made(rngs, **options):
        module = make(rngs, **options)
        for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.LoRAParam)):
            if path[-1] == "lora_b":
                leaf[...] = 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)
        return module

    return made


def meshes(kind):
    mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2)
    return mesh, contextlib.nullcontext() if kind == "plain" else jax.set_mesh(mesh)


def of_one_device(case, steps=STEPS, rows=slice(None)):
    """Trains by NNX alone: losses, parameters and statistics as nested dicts."""
    module = with_adapters(case.make)(nnx.Rngs(KEY))
    optimizer = nnx.Optimizer(module, TX, wrt=case.trainable)
    batch = jax.tree.map(lambda x: x[rows], case.batch)

    @nnx.jit
    def step(module, optimizer, batch):
        def loss_fn(module):
            return case.loss(case.call(module, batch), batch)

        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, case.trainable))(module)
        optimizer.update(module, grads)
        return loss

    losses = [float(step(module, optimizer, batch)) for _ in range(steps)]
    return losses, nnx_model(case.make).unbind(module)


@pytest.fixture(scope="module")
def wanted():
    return {name: of_one_device(case) for name, case in CASES.items()}


@pytest.mark.parametrize("kind, check_vma", EACH)
@pytest.mark.parametrize("name", CASES)
def test_model_of_a_newcomer_trains_by_five_lines_as_on_a_single_device(name, kind, check_vma, wanted):
    case = CASES[name]
    losses, want = wanted[name]
    make = with_adapters(case.make)

    def loss_fn(params, apply_fn, batch):
        return case.loss(case.call(lambda *args: apply_fn({"params": params}, *args), batch), batch)

    def loss_of_stats(params, apply_fn, batch, collections):
        def apply(*args):
            return apply_fn({"params": params, **collections}, *args, mutable=["batch_stats"])

        out, updated = case.call(apply, batch)
        return case.loss(out, batch), updated

    mesh, context = meshes(kind)
    with context:
        options = {"stats_axes": AXES} if case.has_stats else {}
        model = shard_modules(nnx_model(lambda rngs: make(rngs, **options)), min_weight_size=32)
        freezing = {} if case.trainable is nnx.Param else {"trainable": case.trainable}
        state = create_train_state(model, TX, mesh, KEY, *case.inputs, **freezing)
        step = make_train_step(loss_of_stats if case.has_stats else loss_fn, mesh, check_vma=check_vma)
        got = []
        for _ in losses:
            state, metrics = step(state, case.batch)
            got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same_params(unbox(jax.device_get(state.params)), want["params"])
    if case.has_stats:
        assert_same_params(unbox(jax.device_get(dict(state.collections))), {"batch_stats": want["batch_stats"]})
    assert_split_and_uneven(state, case, losses)


def assert_split_and_uneven(state, case, losses):
    """Guards: nearly all values are split, and devices have different rows."""
    assert split_share(state.params) > 0.95
    assert not np.allclose(of_one_device(case, 1, slice(2))[0], losses[0], rtol=1e-3)


@pytest.mark.parametrize("kind, check_vma", EACH)
@pytest.mark.parametrize("name", CASES)
def test_model_of_a_newcomer_trains_by_two_calls_of_nnx_as_on_a_single_device(name, kind, check_vma, wanted):
    """``create_nnx_module`` and ``nnx_value_and_grad``; the rest of the script, and the model, are unchanged."""
    case = CASES[name]
    losses, want = wanted[name]
    mesh, context = meshes(kind)
    with context:
        model = shard_modules(nnx_model(with_adapters(case.make)), min_weight_size=32)
        module = create_nnx_module(model, KEY, *case.inputs, mesh=mesh)
        optimizer = nnx.Optimizer(module, TX, wrt=case.trainable)

        @nnx.jit
        def step(module, optimizer, batch):
            def loss_fn(module, batch):
                return case.loss(case.call(module, batch), batch)

            loss, grads = nnx_value_and_grad(loss_fn, wrt=case.trainable, check_vma=check_vma)(module, batch)
            optimizer.update(module, grads)
            return loss

        got = [float(step(module, optimizer, case.batch)) for _ in losses]
        after = jax.device_get(unbox(nnx_model(case.make).unbind(module)))
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    for collection, tree in want.items():
        assert_same_params(after[collection], tree)


# ---------------------------------------------------------------------------------------------- the mixer, with dropout


def mixer_loss(params, apply_fn, batch, rng):
    return of_labels(apply_fn({"params": params}, batch["x"], rngs=rng), batch)


def linen_loss(params, apply_fn, batch, rng):
    return of_labels(apply_fn({"params": params}, batch["x"], rngs={"dropout": rng}), batch)


DROPPING = {
    "nnx": (nnx_model(lambda rngs: Mixer(rngs, rate=0.5)), mixer_loss),
    "linen": (LinenMixer(0.5), linen_loss),
}


@pytest.mark.slow  # check_step trains on one device, device by device
@pytest.mark.parametrize("kind, check_vma", [("plain", True), ("auto", False), ("explicit", True)])
@pytest.mark.parametrize("system", DROPPING)
def test_mixer_with_dropout_in_a_scan_takes_the_step_of_one_device_with_its_draws(system, kind, check_vma):
    model, loss = DROPPING[system]
    mesh, context = meshes(kind)
    with context:
        state = create_train_state(shard_modules(model, min_weight_size=32), TX, mesh, KEY, classified()["x"])
        step = make_train_step(loss, mesh, check_vma=check_vma)
        assert check_step(step, state, classified(), KEY).verdict == "right"
        equal = {"x": np.repeat(classified()["x"][:1], ROWS, 0), "label": np.zeros(ROWS, int)}
        losses = [float(step(jax.tree.map(jnp.copy, state), equal, jax.random.key(seed))[1]["loss"]) for seed in (1, 2)]
    assert abs(losses[0] - losses[1]) > 1e-4  # guard: it does draw


@pytest.mark.parametrize("kind, check_vma", EACH)
def test_mixer_in_linen_trains_by_five_lines_as_on_a_single_device(kind, check_vma):
    plain, batch = LinenMixer(), classified()

    def loss_fn(params, apply_fn, batch):
        return of_labels(apply_fn({"params": params}, batch["x"]), batch)

    params = jax.jit(plain.init)(KEY, batch["x"])["params"]
    opt_state, losses = TX.init(params), []
    for _ in range(STEPS):
        loss, grads = jax.value_and_grad(loss_fn)(params, plain.apply, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    params = jax.device_get(params)
    mesh, context = meshes(kind)
    with context:
        state = create_train_state(shard_modules(plain, min_weight_size=32), TX, mesh, KEY, batch["x"])
        step, got = make_train_step(loss_fn, mesh, check_vma=check_vma), []
        for _ in losses:
            state, metrics = step(state, batch)
            got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same_params(unbox(jax.device_get(state.params)), params)
    assert split_share(state.params) > 0.9

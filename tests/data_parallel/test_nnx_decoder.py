"""Tests of NNX models written as Flax's examples are: a decoder as ``examples/gemma``, adapters, ``nnx.WeightNorm``.

Two steps on a mesh equal two steps of the same module on one device, by ``nnx.merge`` and optax, without the library.
"""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.support import AXES, assert_same_params, integers, mesh_of
from xlstm_jax.distributed import (
    Checkpointer,
    abstract_train_state,
    create_train_state,
    export_safetensors,
    import_safetensors,
    make_train_step,
    nnx_model,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, sharded_leaves

WIDTH, HEADS, DIM, VOCAB = 16, 4, 8, 32
# In Flax 0.12.8 the scales of nnx.WeightNorm are arrays and no parameters.
SCALES = flax.__version__ != "0.12.8"
TOKENS = integers(1, (16, 6), 0, VOCAB)
TX = optax.sgd(0.05, momentum=0.9)
KEY = jax.random.key(0)
RULES = (("vocab", None), ("embed", "fsdp"), ("heads", None), ("mlp", None), ("dim", None))


def named(init, *names):
    """Wraps an initialiser by ``nnx.with_partitioning``, with names that ``sharding_rules`` of the variable map."""
    return nnx.with_partitioning(init, names, sharding_rules=RULES)


class Einsum(nnx.Module):
    """The layer ``Einsum`` of ``examples/gemma``: a parameter of any rank."""

    def __init__(self, equation, shape, names, rngs):
        init = named(nnx.initializers.normal(0.2), *names)
        self.equation, self.w = equation, nnx.Param(init(rngs.params(), shape, jnp.float32))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class RMSNorm(nnx.Module):
    def __init__(self, rngs):
        del rngs
        self.scale = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return normed * (1 + self.scale[...])


class Embedder(nnx.Module):
    def __init__(self, rngs):
        init = named(nnx.initializers.normal(0.2), "vocab", "embed")
        self.input_embedding = nnx.Param(init(rngs.params(), (VOCAB, WIDTH), jnp.float32))

    def encode(self, tokens):
        return self.input_embedding[(tokens,)] * WIDTH**0.5

    def decode(self, x):
        return jnp.dot(x, self.input_embedding[...].T)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_einsum = Einsum("BTD,NDH->BTNH", (HEADS, WIDTH, DIM), ("heads", "embed", "dim"), rngs)
        self.kv_einsum = Einsum("BSD,CKDH->CBSKH", (2, 1, WIDTH, DIM), (None, "heads", "embed", "dim"), rngs)
        self.attn_vec_einsum = Einsum("BTNH,NHD->BTD", (HEADS, DIM, WIDTH), ("heads", "dim", "embed"), rngs)

    def __call__(self, x):
        q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        scores = jnp.einsum("BTNH,BSKH->BTNS", q, k) * DIM**-0.5
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, :, None]
        weights = nnx.softmax(jnp.where(mask, scores, -1e30))
        return self.attn_vec_einsum(jnp.einsum("BTNS,BSKH->BTNH", weights, v))


class FeedForward(nnx.Module):
    def __init__(self, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        columns, rows = (named(nnx.initializers.lecun_normal(), *n) for n in (("embed", "mlp"), ("mlp", "embed")))
        self.gate_proj, self.up_proj = (linear(WIDTH, 64, kernel_init=columns) for _ in range(2))
        self.down_proj = linear(64, WIDTH, kernel_init=rows)

    def __call__(self, x):
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.pre_attention_norm, self.pre_ffw_norm = RMSNorm(rngs), RMSNorm(rngs)
        self.attn, self.mlp = Attention(rngs), FeedForward(rngs)

    def __call__(self, x):
        x = x + self.attn(self.pre_attention_norm(x))
        return x + self.mlp(self.pre_ffw_norm(x))


class Gemma(nnx.Module):
    """The decoder of ``examples/gemma``: a list of blocks, and a tied head with a soft cap."""

    def __init__(self, rngs):
        self.embedder = Embedder(rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.final_norm = RMSNorm(rngs)

    def __call__(self, tokens):
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x)
        return 30 * jnp.tanh(self.embedder.decode(self.final_norm(x)) / 30)


class Ensemble(nnx.Module):
    """Equal layers beside each other, which ``nnx.vmap`` runs."""

    def __init__(self, rngs):
        self.members = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        run = nnx.remat(lambda member, x: jnp.tanh(member(x)))
        return nnx.vmap(run, in_axes=(0, None))(self.members, x).mean(0)


class Adapted(nnx.Module):
    """Layers of Flax under adapters (``nnx.LoRA``), and under ``nnx.WeightNorm``; an ensemble under ``nnx.vmap``."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.adapted = nnx.LoRA(WIDTH, 4, WIDTH, base_module=nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.adapted.lora_b[...] = 0.1 * jax.random.normal(rngs.params(), (4, WIDTH))
        self.normed = nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), use_scale=SCALES, rngs=rngs)
        self.ensemble = Ensemble(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.adapted(self.embed(tokens))
        x = x + jnp.tanh(self.normed(x))
        return self.head(x + self.ensemble(x))


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)).mean()


def loss_fn(params, apply_fn, tokens, rng):
    return cross_entropy(apply_fn({"params": params}, tokens), tokens)


def trained_on_one_device(make, steps=2):
    with nnx.use_eager_sharding(False):
        module = make(nnx.Rngs(KEY))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def values(params):
        nnx.update(module, params)
        return jax.tree.map(jnp.copy, unbox(nnx_model(make).unbind(module)["params"]))

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(
            lambda params: cross_entropy(nnx.merge(graphdef, params, rest, copy=True)(TOKENS), TOKENS)
        )(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    start, opt_state, losses = values(params), TX.init(params), []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(loss)
    return start, losses, values(params)


# nnx.WeightNorm writes the kernel of its layer while it runs: this kernel stays replicated.
# An ensemble gathers before nnx.vmap.
LAYERS = nnx.All(
    nnx.Any(nnx.Embed, nnx.LoRA, nnx.Linear, Ensemble), nnx.Not(nnx.Any(*map(nnx.PathContains, ("normed", "members"))))
)
CASES = {
    "gemma, by its names alone": (nnx_model(Gemma), Gemma),
    "gemma, by blocks": (shard_modules(nnx_model(Gemma), (Block, Embedder), "fsdp", 32), Gemma),
    "gemma, by the default rule": (shard_modules(nnx_model(Gemma), axis_name="fsdp", min_weight_size=32), Gemma),
    "adapters": (shard_modules(nnx_model(Adapted), LAYERS, "fsdp", 32), Adapted),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_two_steps_are_those_of_one_device(case, check_vma):
    model, make = CASES[case]
    mesh = mesh_of(2, 4)
    state = create_train_state(model, TX, mesh, KEY, TOKENS, batch_axes=AXES, allow_replicated=True)
    step, losses = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True), []
    for _ in range(2):
        state, metrics = step(state, TOKENS, KEY)
        losses.append(metrics["loss"])
    start, wanted, want = trained_on_one_device(make)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_same_params(state.params, want)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), start, want)
    assert min(jax.tree.leaves(moved)) > 1e-6  # guard: every parameter has trained
    split = {path for path, leaf in sharded_leaves(state.params) if leaf.axes}
    if make is Gemma:
        assert {"layers/0/attn/kv_einsum/w", "embedder/input_embedding", "layers/1/mlp/up_proj/kernel"} <= split
        assert leaf_of(state.params["layers"]["0"]["attn"]["q_einsum"]["w"]).names == (None, "fsdp", None)
    else:
        assert {"adapted/lora_a", "adapted/base_module/kernel", "ensemble/members/kernel"} <= split
        assert (
            leaf_of(state.params["ensemble"]["members"]["kernel"]).names[0] is None
        )  # the ensemble's dim is not split


def test_checkpoints_and_safetensors_by_paths_of_nnx(tmp_path):
    """Values written from one mesh arrive on another mesh, and in the plain module, bit for bit."""
    for case in ("gemma, by blocks", "adapters"):
        model, make = CASES[case]
        state = create_train_state(model, TX, mesh_of(2, 4), KEY, TOKENS, batch_axes=AXES)
        state, _ = make_train_step(loss_fn, mesh_of(2, 4), AXES)(state, TOKENS, KEY)
        other = abstract_train_state(model, TX, mesh_of(1, 2), KEY, TOKENS, batch_axes=AXES)
        with Checkpointer(tmp_path / make.__name__) as checkpointer:
            checkpointer.save(1, state)
            restored = checkpointer.restore(other)
        file = tmp_path / f"{make.__name__}.safetensors"
        export_safetensors(state.params, file)
        names = {path for path, _ in leaves_with_path(unbox(state.params))}
        assert ("layers/0/attn/q_einsum/w" if make is Gemma else "normed/layer_instance/kernel") in names
        plain = jax.jit(nnx_model(make).init)(KEY)["params"]
        for got in (restored.params, import_safetensors(file, other.params), import_safetensors(file, unbox(plain))):
            for (path, a), (_, b) in zip(
                leaves_with_path(unbox(got)), leaves_with_path(unbox(state.params)), strict=True
            ):
                np.testing.assert_array_equal(a, b, err_msg=path)
        bound = nnx_model(make).bind({"params": import_safetensors(file, unbox(plain))})
        outputs = model.apply({"params": unbox(state.params)}, TOKENS)
        largest = np.abs(outputs).max()  # of which rounding is a part: a small output is a sum of terms as large
        np.testing.assert_allclose(bound(TOKENS), outputs, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", [None, nnx.Linear], ids=["by the default rule", "by its class"])
def test_a_unit_that_nnx_vmap_runs_under_remat_trains_as_on_one_device(where, check_vma):
    """The shards of all members are gathered at once, and each member has its own gradient."""
    chosen = {} if where is None else {"where": where}
    model = shard_modules(nnx_model(Ensemble), axis_name="fsdp", min_weight_size=32, **chosen)
    x = jax.random.normal(KEY, (16, WIDTH)) * (1 + jnp.arange(16) % 3)[:, None]
    state = create_train_state(model, optax.sgd(0.1), mesh_of(2, 4), KEY, x, batch_axes=AXES)
    assert leaf_of(state.params["members"]["kernel"]).names == (None, None, "fsdp")
    step = make_train_step(
        lambda params, apply_fn, x: jnp.mean((apply_fn({"params": params}, x) - x) ** 2),
        mesh_of(2, 4),
        AXES,
        check_vma=check_vma,
    )
    module = Ensemble(nnx.Rngs(KEY))
    loss, grads = nnx.value_and_grad(lambda module: jnp.mean((module(x) - x) ** 2))(module)
    nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(module, nnx.Param), grads))
    state, metrics = step(state, x)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_same_params(state.params, nnx_model(Ensemble).unbind(module)["params"])
    each = np.abs(np.asarray(grads["members"]["kernel"][...])).max((1, 2))
    assert np.abs(np.diff(each)).min() > 1e-4  # guard: the members have different gradients


def test_a_split_kernel_under_weight_norm_is_refused():
    model = shard_modules(nnx_model(Adapted), Adapted, "fsdp", 32)
    state = abstract_train_state(model, TX, mesh_of(2, 4), KEY, TOKENS, batch_axes=AXES)
    with pytest.raises(ValueError, match=r"is split .* leave layers that write their kernel \(nnx.WeightNorm"):
        make_train_step(loss_fn, mesh_of(2, 4), AXES).lower(state, TOKENS, KEY)

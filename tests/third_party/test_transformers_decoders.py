"""Decoders of this library in transformers' own PyTorch classes, and theirs on a mesh: equal logits in float32.

Both sides have random weights. The files lie in a local folder; nothing is loaded from a hub.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import AXES, fsdp, mesh_of
from xlstm_jax.distributed import abstract_train_state, init_sharded, nnx_model, shard_modules
from xlstm_jax.distributed.checkpoint import (
    Divided,
    Joined,
    Stored,
    Unstacked,
    import_in_layout,
    import_safetensors,
    publish,
)
from xlstm_jax.distributed.model_parallel.experts import Experts

NEEDED = "needs transformers and PyTorch: pip install '.[models,torch]'"
torch = pytest.importorskip("torch", reason=NEEDED)
transformers = pytest.importorskip("transformers", reason=NEEDED)

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, EXPERTS, VOCABULARY, LENGTH = 2, 16, 4, 2, 8, 24, 4, 32, 8
THETA, EPSILON = 10_000.0, 1e-5
QUERY, KV = HEADS * HEAD, KV_HEADS * HEAD
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (8, LENGTH))
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "torch_dtype": "float32",
}


# ------------------------------------------------------------------------------------------------------ models of Flax


def turned(x):
    """Rotary embeddings; the second half of a head is the partner of the first: [b, t, h, d]."""
    angles = np.arange(LENGTH)[:, None] * THETA ** -(np.arange(0, HEAD, 2) / HEAD)
    cos, sin = (np.float32(np.tile(f(angles), 2))[:, None] for f in (np.cos, np.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def attended(q, k, v):
    """Causal attention of 4 heads with 2 heads of keys and values: [b, t, h, d]."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (turned(k), v))
    scores = jnp.einsum("bthd,bshd->bhts", turned(q), k) * HEAD**-0.5
    scores = jnp.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", nn.softmax(scores), v)


class Attention(nn.Module):
    joined: bool

    @nn.compact
    def __call__(self, x):
        def heads(count, name):
            return nn.DenseGeneral((count, HEAD), use_bias=False, name=name)(x)

        if self.joined:
            q, k, v = jnp.split(heads(HEADS + 2 * KV_HEADS, "qkv"), [HEADS, HEADS + KV_HEADS], axis=2)
        else:
            q, k, v = heads(HEADS, "q"), heads(KV_HEADS, "k"), heads(KV_HEADS, "v")
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o")(attended(q, k, v))


class MLP(nn.Module):
    joined: bool

    @nn.compact
    def __call__(self, x):
        def dense(width, name):
            return nn.Dense(width, use_bias=False, name=name)

        if self.joined:
            gate, up = jnp.split(dense(2 * HIDDEN, "gate_up")(x), 2, -1)
        else:
            gate, up = dense(HIDDEN, "gate")(x), dense(HIDDEN, "up")(x)
        return dense(WIDTH, "down")(nn.silu(gate) * up)


class Layer(nn.Module):
    joined: bool
    mixture: bool

    @nn.compact
    def __call__(self, x, _):
        x = x + Attention(self.joined, name="attention")(nn.RMSNorm(EPSILON, name="attention_norm")(x))
        mlp = MLP(self.joined, name=None if self.mixture else "mlp")
        if self.mixture:
            mlp = Experts(mlp, EXPERTS, top_k=2, axis="dp", normalize=True, batch_axes=AXES, block_size=4, name="moe")
        return x + mlp(nn.RMSNorm(EPSILON, name="mlp_norm")(x)), None


class Decoder(nn.Module):
    joined: bool = False
    mixture: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = fsdp(nn.Embed)(VOCABULARY, WIDTH, name="embed")(tokens)
        layers = nn.scan(fsdp(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = layers(self.joined, self.mixture, name="blocks")(x, None)
        return fsdp(nn.Dense)(VOCABULARY, use_bias=False, name="head")(nn.RMSNorm(EPSILON, name="norm")(x))


NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": Stored("lm_head.weight", "d v -> v d"),
    "blocks/attention_norm/scale": "model.layers.{layer}.input_layernorm.weight",
    "blocks/mlp_norm/scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "blocks/attention/o/kernel": Stored("model.layers.{layer}.self_attn.o_proj.weight", "h w d -> d (h w)"),
    r"blocks/attention/(\w+)/kernel": Stored(r"model.layers.{layer}.self_attn.\1_proj.weight", "d h w -> (h w) d"),
    r"blocks/mlp/(\w+)/kernel": Stored(r"model.layers.{layer}.mlp.\1_proj.weight", "i o -> o i"),
    "blocks/moe/router/kernel": Stored("model.layers.{layer}.block_sparse_moe.gate.weight", "i o -> o i"),
    r"blocks/moe/experts/(\w+)/kernel": Stored(r"model.layers.{layer}.mlp.experts.\1_proj", "e i o -> e o i"),
}
SPLIT = [
    Divided(
        r"(.+)\.qkv_proj\.weight", (r"\1.q_proj.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"), (QUERY, KV, KV)
    ),
    Divided(r"(.+mlp)\.gate_up_proj\.weight", (r"\1.gate_proj.weight", r"\1.up_proj.weight")),
    Divided(r"(.+)\.experts\.gate_up_proj", (r"\1.experts.gate_proj", r"\1.experts.up_proj"), dim=1),
]
UNSTACK = [
    Unstacked(rf"(.+)\.mlp\.experts\.{name}_proj", rf"\1.block_sparse_moe.experts.{{n}}.{w}.weight")
    for name, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
]
JOIN = [
    Joined((r"(.+)\.q_proj\.weight", r"\1.k_proj.weight", r"\1.v_proj.weight"), r"\1.qkv_proj.weight"),
    Joined((r"(.+mlp)\.gate_proj\.weight", r"\1.up_proj.weight"), r"\1.gate_up_proj.weight"),
]
# Class of transformers; the model's options; rules.
CASES = {
    "Llama": ("Llama", Decoder(), []),
    "Llama, from joined kernels": ("Llama", Decoder(joined=True), SPLIT),
    "Phi3, from kernels apart": ("Phi3", Decoder(), JOIN),
    "Phi3": ("Phi3", Decoder(joined=True), []),
    "Mixtral": ("Mixtral", Decoder(mixture=True), UNSTACK),
    "Mixtral, from joined kernels": ("Mixtral", Decoder(joined=True, mixture=True), [*SPLIT, *UNSTACK]),
}


class NnxDecoder(nnx.Module):
    """The Llama of one layer per attribute, in NNX."""

    def __init__(self, rngs):
        def linear(width, out):
            return nnx.Linear(width, out, use_bias=False, rngs=rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm, self.head = nnx.RMSNorm(WIDTH, epsilon=EPSILON, rngs=rngs), linear(WIDTH, VOCABULARY)
        self.layers = nnx.List([NnxLayer(linear, rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class NnxLayer(nnx.Module):
    def __init__(self, linear, rngs):
        self.input_layernorm = nnx.RMSNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
        self.q, self.o = linear(WIDTH, QUERY), linear(QUERY, WIDTH)
        self.k, self.v = linear(WIDTH, KV), linear(WIDTH, KV)
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def __call__(self, x):
        h = self.input_layernorm(x)
        q, k, v = (f(h).reshape(*x.shape[:2], -1, HEAD) for f in (self.q, self.k, self.v))
        x = x + self.o(attended(q, k, v).reshape(*x.shape[:2], QUERY))
        h = self.post_attention_layernorm(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


NNX_NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": Stored("lm_head.weight", "d v -> v d"),
    r"layers/(\d+)/(\w+_layernorm)/scale": r"model.layers.\1.\2.weight",
    r"layers/(\d+)/(q|k|v|o)/kernel": Stored(r"model.layers.\1.self_attn.\2_proj.weight", "i o -> o i"),
    r"layers/(\d+)/(\w+)/kernel": Stored(r"model.layers.\1.mlp.\2_proj.weight", "i o -> o i"),
}


# ---------------------------------------------------------------------------------------------------------------- tests


def classes_of(kind):
    options = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2} if kind == "Mixtral" else {}
    options |= {"pad_token_id": 0} if kind == "Phi3" else {}
    config = getattr(transformers, f"{kind}Config")(**CONFIG, **options)
    return getattr(transformers, f"{kind}ForCausalLM"), config


def random_params(params):
    """Wide values, so that every leaf shows in the logits."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(
        tree, [jax.device_put(np.float32(0.4 * rng.normal(size=x.shape) + (x.ndim < 3)), x.sharding) for x in leaves]
    )


def ours_on(mesh, model, params):
    """Logits of the sharded model, inside ``shard_map``."""
    spec = jax.tree.map(lambda x: x.sharding.spec, params)

    def apply(params, tokens):
        return model.apply({"params": params}, tokens)

    split = jax.P(AXES)
    run = jax.shard_map(apply, mesh=mesh, in_specs=(spec, split), out_specs=split, check_vma=False)
    return np.asarray(jax.jit(run)(params, TOKENS))


def theirs(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def close(got, want):
    return np.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_transformers_classes_load_a_published_decoder_and_have_its_logits(case, tmp_path):
    kind, model, layout = CASES[case]
    cls, config = classes_of(kind)
    mesh = mesh_of(2, 4)
    params = random_params(init_sharded(model, mesh, jax.random.key(0), TOKENS, batch_axes=AXES)["params"])
    want = ours_on(mesh, model, params)

    publish(params, tmp_path / "ours", names=NAMES, layout=layout, max_file_bytes=4096)
    config.save_pretrained(tmp_path / "ours")
    loaded, report = cls.from_pretrained(tmp_path / "ours", output_loading_info=True, local_files_only=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    got = theirs(loaded)
    assert want.std() > 0.1 and close(got, want), np.abs(got - want).max()

    # The other way: the file of transformers, on another mesh.
    theirs_again = cls(config).eval()
    theirs_again.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    other = mesh_of(4, 2) if kind != "Mixtral" else mesh
    target = abstract_train_state(
        model, optax.sgd(0.1), other, jax.random.key(0), TOKENS, batch_axes=AXES, allow_replicated=True
    ).params
    imported = import_in_layout(tmp_path / "theirs", target, layout, names=NAMES)
    got, want = ours_on(other, model, imported), theirs(theirs_again)
    assert want.std() > 0.1 and close(got, want), np.abs(got - want).max()


@pytest.mark.parametrize("one, other", [("k", "v"), ("gate", "up")])
def test_transformers_logits_change_if_two_tensors_have_each_others_names(one, other, tmp_path):
    model, mesh = Decoder(), mesh_of(2, 4)
    params = random_params(init_sharded(model, mesh, jax.random.key(0), TOKENS, batch_axes=AXES)["params"])
    want = ours_on(mesh, model, params)
    cls, config = classes_of("Llama")
    exchanged = [
        Joined((rf"(.+)\.{old}_proj\.weight",), rf"\1.{new}_proj.weight")
        for old, new in ((one, "other"), (other, one), ("other", other))
    ]
    for folder, layout in {"right": [], "wrong": exchanged}.items():
        publish(params, tmp_path / folder, names=NAMES, layout=layout)
        config.save_pretrained(tmp_path / folder)
        got = theirs(cls.from_pretrained(tmp_path / folder, local_files_only=True))
        assert close(got, want) == (folder == "right"), (folder, np.abs(got - want).max())


def test_an_nnx_decoder_has_the_logits_of_transformers_there_and_back(tmp_path):
    cls, config = classes_of("Llama")
    mesh = mesh_of(2, 4)
    model = shard_modules(nnx_model(NnxDecoder), (nnx.Linear, nnx.Embed), "fsdp", min_weight_size=32)
    variables = init_sharded(model, mesh, jax.random.key(0), TOKENS, batch_axes=AXES)
    params = random_params(variables["params"])
    want = ours_on(mesh, model, params)
    publish(params, tmp_path / "ours", names=NNX_NAMES)
    config.save_pretrained(tmp_path / "ours")
    got = theirs(cls.from_pretrained(tmp_path / "ours", local_files_only=True))
    assert want.std() > 0.1 and close(got, want), np.abs(got - want).max()
    other = cls(config).eval()
    other.save_pretrained(tmp_path / "theirs", safe_serialization=True)
    imported = import_safetensors(tmp_path / "theirs", params, names=NNX_NAMES)
    assert not close(theirs(other), want)  # guard
    assert close(ours_on(mesh, model, imported), theirs(other))

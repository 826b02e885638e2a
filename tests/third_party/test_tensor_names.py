"""Tests of files with PyTorch's names: transformers reads exported files, and an import has the same bits."""

import flax
import jax
import numpy as np
import optax
import pytest
import transformers
from flax import linen as nn
from transformers.models.llama.modeling_flax_llama import FlaxLlamaDecoderLayer

from tests.support import AXES, assert_same_bits, mesh_of
from xlstm_jax.distributed import (
    create_train_state,
    export_safetensors,
    import_safetensors,
    make_train_step,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.checkpoint import TRANSFORMERS
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {"vocab_size": 64, "max_position_embeddings": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 16}
MODELS = {
    "Llama": ("FlaxLlamaForCausalLM", transformers.LlamaConfig(**SMALL, **WORDS)),
    "Mistral": ("FlaxMistralForCausalLM", transformers.MistralConfig(**SMALL, **WORDS, num_key_value_heads=2)),
    "Gemma": (
        "FlaxGemmaForCausalLM",
        transformers.GemmaConfig(**SMALL, **WORDS, num_key_value_heads=1, head_dim=8),
    ),
    "GPT-2": ("FlaxGPT2LMHeadModel", transformers.GPT2Config(**GPT2)),
    "ViT": ("FlaxViTForImageClassification", transformers.ViTConfig(**SMALL, image_size=16, patch_size=4)),
}


def split_on(mesh, params):
    def spec(x):
        return jax.P(*("fsdp" if size % 8 == 0 and i == x.ndim - 1 else None for i, size in enumerate(x.shape)))

    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec(x))), params
    )


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_exported_files_and_import_restores_the_parameters(name, tmp_path):
    cls, config = MODELS[name]
    model = getattr(transformers, cls)(config, seed=0)
    export_safetensors(model.params, tmp_path, names=TRANSFORMERS)
    config.save_pretrained(tmp_path)
    theirs = getattr(transformers, cls).from_pretrained(tmp_path, from_pt=True)  # transformers' conversion
    ours, found = (flax.traverse_util.flatten_dict(tree) for tree in (model.params, theirs.params))
    assert ours.keys() == found.keys() and len(ours) > 10
    assert not [path for path in ours if not np.array_equal(ours[path], found[path])]

    again = import_safetensors(tmp_path, split_on(mesh_of(1, 8), model.params), names=TRANSFORMERS)
    assert jax.tree.structure(again) == jax.tree.structure(model.params)
    assert_same_bits(again, model.params)


def far(a, b):
    """Returns the largest distance of two trees."""
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(), a, b)))


@pytest.mark.parametrize("kind, names", [("Flax", {r"(.+)": r"\1"}), ("", TRANSFORMERS)], ids=["Flax", "PyTorch"])
def test_llama_of_transformers_imports_trains_sharded_and_exports_back(kind, names, tmp_path):
    """A Llama goes from transformers' file through a sharded step to a file that transformers reads."""
    if not kind:
        pytest.importorskip("torch")
    name, config = MODELS["Llama"]
    cls = getattr(transformers, kind + name.removeprefix("Flax"))
    cls(config).save_pretrained(tmp_path / "theirs", safe_serialization=True)
    plain = getattr(transformers, name)(config, seed=1)  # other weights

    mesh, tokens = mesh_of(2, 4), np.arange(8 * 16).reshape(8, 16) % 64
    inputs = tokens, np.ones_like(tokens), np.broadcast_to(np.arange(16), tokens.shape)
    model = shard_modules(plain.module, (FlaxLlamaDecoderLayer, nn.Embed), "fsdp", min_weight_size=64)
    state = create_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), *inputs, batch_axes=AXES)
    state = state.replace(params=import_safetensors(tmp_path / "theirs", state.params, names=names))
    begun = import_safetensors(tmp_path / "theirs", plain.params, names=names)

    def loss(params, apply_fn, batch, rng=None):
        logits = apply_fn({"params": params}, *batch).logits[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[0][:, 1:]).mean()

    grads = jax.jit(jax.grad(loss), static_argnums=1)(begun, plain.module.apply, inputs)
    want = jax.tree.map(lambda param, grad: np.asarray(param - 0.1 * grad), begun, grads)
    state, _ = make_train_step(loss, mesh, AXES)(state, inputs, jax.random.key(1))
    got = unbox(state.params)
    assert any(is_box(leaf) for _, leaf in leaves_with_path(state.params))
    assert far(got, want) < 1e-6 < 1e-4 < far(begun, want)

    export_safetensors(state.params, tmp_path / "ours", names=TRANSFORMERS)
    config.save_pretrained(tmp_path / "ours")
    if kind:
        found = getattr(transformers, name).from_pretrained(tmp_path / "ours", from_pt=True).params
    else:
        cls.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "again", safe_serialization=True)
        found = import_safetensors(tmp_path / "again", plain.params, names=TRANSFORMERS)
    assert far(found, got) == 0.0

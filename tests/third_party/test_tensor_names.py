"""Files with the names of PyTorch's models: what is exported is read by transformers, and imported to the same bits."""

import flax
import jax
import numpy as np
import pytest
import transformers

from tests.support import mesh_of
from xlstm_jax.distributed import export_safetensors, import_safetensors
from xlstm_jax.distributed.checkpoint import TRANSFORMERS

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


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_exported_and_it_comes_back(name, tmp_path):
    cls, config = MODELS[name]
    model = getattr(transformers, cls)(config, seed=0)
    export_safetensors(model.params, tmp_path, names=TRANSFORMERS)
    config.save_pretrained(tmp_path)
    theirs = getattr(transformers, cls).from_pretrained(tmp_path, from_pt=True)  # its own conversion of names and dims
    ours, found = (flax.traverse_util.flatten_dict(tree) for tree in (model.params, theirs.params))
    assert ours.keys() == found.keys() and len(ours) > 10
    assert all(np.array_equal(ours[path], found[path]) for path in ours)

    mesh = mesh_of(1, 8)
    split = lambda x: jax.P(*("fsdp" if size % 8 == 0 and i == x.ndim - 1 else None for i, size in enumerate(x.shape)))  # noqa: E731
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, split(x))), model.params
    )
    again = import_safetensors(tmp_path, target, names=TRANSFORMERS)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again, model.params)))

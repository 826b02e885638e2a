"""Tests of the NNX blocks in tabs of pages, which the site shows beside executed blocks of Linen and does not run.

Each block makes a model: its parameters are split on the page's mesh, and a step of training can be traced.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.support import blocks_of
from xlstm_jax.distributed import PackSmall, abstract_train_state, make_train_step, shard_modules
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves

DOCS = Path(__file__).parents[2] / "docs"
AFTER_LINEN = re.compile(r"^```py(?:thon)?\n(?:(?!^```).)*?^```\n\n```python nnx\n", re.MULTILINE | re.DOTALL)
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.md")) if blocks_of(page, "python nnx")}
CONFIG = SimpleNamespace(vocab=64, width=64, hidden=192, layers=4, heads=4, kv_heads=2, min_weight_size=2**9)


def floats(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Inputs of the model of each page.
INPUTS = {
    "howto/actor_critic.md": [floats(16, 16)],
    "howto/compilation_cache.md": [floats(8, 32)],
    "howto/contrastive.md": [floats(16, 16), floats(16, 16)],
    "howto/data.md": [floats(16, 16)],
    "howto/distill.md": [floats(16, 16)],
    "howto/dpo.md": [tokens(16, 11)],
    "howto/export.md": [floats(8, 32)],
    "howto/find_a_nan.md": [floats(64, 16)],
    "howto/five_lines.md": [tokens(16, 32)],
    "howto/float16.md": [floats(16, 16)],
    "howto/gan.md": [floats(16, 2)],
    "howto/local_checkpoints.md": [floats(8, 8)],
    "howto/log.md": [floats(64, 64)],
    "howto/mesh.md": [floats(8, 2048)],
    "howto/notebooks.md": [floats(16, 64)],
    "howto/out_of_memory.md": [floats(8, 16, 2048, dtype=jnp.bfloat16)],
    "howto/own_step.md": [floats(32, 16)],
    "howto/publish.md": [floats(16, 64)],
    "howto/slow_step.md": [floats(64, 256)],
    "howto/small_leaves.md": [floats(16, 64)],
    "howto/stop_and_resume.md": [floats(8, 8)],
    "howto/weight_decay.md": [tokens(16, 8)],
    "howto/within_hosts.md": [floats(16, 256)],
    "howto/wrong_numbers.md": [floats(32, 8)],
    "tutorials/decoder.md": [tokens(8, 16)],
    "tutorials/diffusion.md": [floats(16, 2), floats(16)],
    "tutorials/forecasting.md": [floats(8, 16, 2048, dtype=jnp.bfloat16)],
    "tutorials/generation.md": [tokens(8, 16)],
    "tutorials/lora.md": [tokens(8, 16)],
    "tutorials/machines.md": [floats(8, 16)],
    "tutorials/moe.md": [tokens(8, 16)],
    "tutorials/plain_script.md": [floats(64, 64)],
    "tutorials/third_party.md": [tokens(8, 16)],
    "tutorials/vision.md": [floats(8, 8, 8, 1)],
    "tutorials/whole_loop.md": [floats(16, 64)],
    "tutorials/wrong_step.md": [floats(64, 16)],
}
# The expression of the model that the page trains; "model" on other pages.
MODELS = {
    "howto/contrastive.md": "wrapped",
    "howto/gan.md": "discriminator",
    "howto/small_leaves.md": "shard_modules(plain, Block, 'fsdp', min_weight_size=32, packing=PackSmall(below=2**20))",
    "howto/weight_decay.md": "wrapped",
    "howto/within_hosts.md": (
        "shard_modules(plain, Block, ('dp', 'fsdp'), min_weight_size=1024, inter_host_axes='dp', "
        "reshard_after_forward='fsdp')"
    ),
    "tutorials/decoder.md": "Decoder(CONFIG)",
    "tutorials/lora.md": "Model(LoRADense)",
    "tutorials/moe.md": "Model()",
}
AXES = {"howto/mesh.md": ("fsdp_host", "fsdp_device")}
OPTIONS = {"howto/own_step.md": {"train": True}}
# Definitions of blocks of the page that come earlier.
EARLIER = {
    "howto/small_leaves.md": {"PackSmall": PackSmall, "shard_modules": shard_modules},
    "howto/within_hosts.md": {"shard_modules": shard_modules},
    "tutorials/decoder.md": {"rotate": lambda x: x},
    "tutorials/generation.md": {"LETTERS": list("abcdefgh")},
}


def test_every_page_with_an_nnx_block_has_inputs_here():
    assert PAGES.keys() == INPUTS.keys()


@pytest.mark.parametrize("page", PAGES)
def test_nnx_block_follows_the_block_of_linen(page):
    assert len(AFTER_LINEN.findall(PAGES[page].read_text())) == len(blocks_of(PAGES[page], "python nnx")) == 1


@pytest.mark.parametrize("page", PAGES)
def test_model_of_an_nnx_block_is_split_and_a_step_of_training_can_be_traced(page):
    (block,) = blocks_of(PAGES[page], "python nnx")
    names = {"__name__": "page", "CONFIG": CONFIG, **EARLIER.get(page, {})}
    exec(block, names)
    model = eval(MODELS.get(page, "model"), names)
    axes, inputs, options = AXES.get(page, ("dp", "fsdp")), INPUTS[page], OPTIONS.get(page, {})
    mesh = jax.make_mesh((2, 4), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def outputs(params, batch, rng, collections):
        variables = {"params": params, **collections}
        return model.apply(variables, *batch, rngs=rng, mutable=list(collections), **options)

    def mean(out):
        return sum(jnp.mean(x.astype(jnp.float32)) for x in jax.tree.leaves(out))

    def loss(params, apply_fn, batch, rng, *collections):
        out, updated = outputs(params, batch, rng, collections[0] if collections else {})
        return (mean(out), updated) if collections else mean(out)

    key = jax.random.key(0)
    state = abstract_train_state(model, optax.sgd(0.1), mesh, key, *inputs, batch_axes=axes, **options)
    split = [path for path, leaf in sharded_leaves(state.params) if leaf.gathered_axes]
    assert split, "no parameter is split"
    after, _ = make_train_step(loss, mesh, axes).eval_shape(state, tuple(inputs), key)
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)

"""What is generated on shards is what the plain model would write, token for token, whenever weights are gathered."""

from collections.abc import Callable
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import AXES, fsdp, mesh_of, plain
from xlstm_jax.distributed import init_sharded, make_generate, unbox
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.forecast.cost.collective_traffic import find_collectives
from xlstm_jax.distributed.forecast.hlo.program import parse

MESH = mesh_of(2, 4)
VOCAB, DIM, LENGTH, KEY = 32, 16, 10, jax.random.key(0)


class Block(nn.Module):
    decode: bool

    @nn.compact
    def __call__(self, x):
        """Flax's own attention, which keeps keys and values in its cache."""
        mask = None if self.decode else nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, decode=self.decode, name="attention")(
            nn.LayerNorm()(x), mask=mask
        )
        return x + nn.Dense(DIM)(nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x)))), None


class Writer(nn.Module):
    """Tokens [b, t] -> logits [b, t, VOCAB]; its layers are a scan or a loop."""

    wrap: Callable = plain
    scan: bool = True
    decode: bool = False
    layers: int = 2

    @nn.compact
    def __call__(self, tokens):
        # Large initial values, so that what is written is no constant.
        x = self.wrap(nn.Embed)(VOCAB, DIM, embedding_init=nn.initializers.normal(2.0))(tokens)
        block = self.wrap(Block)
        if self.scan:
            axes = {"params": 0, "cache": 0}
            x, _ = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=self.layers)(
                self.decode, name="blocks"
            )(x)
        else:
            for number in range(self.layers):
                x, _ = block(self.decode, name=f"block_{number}")(x)
        return self.wrap(nn.Dense)(VOCAB)(x)


@cache
def params_of(mesh, scan=True, layers=2):
    model, tokens = Writer(fsdp(), scan, layers=layers), jnp.zeros((8, LENGTH), jnp.int32)
    return init_sharded(model, mesh, KEY, tokens, batch_axes=AXES)["params"]


@cache
def generator(mesh=MESH, scan=True, layers=2, length=LENGTH, **options):
    return make_generate(Writer(fsdp(), scan, decode=True, layers=layers), mesh, AXES, length, **options)


PROMPT = np.random.default_rng(0).integers(0, VOCAB, (8, 3), np.int32)
PROMPT[2:4, 2], PROMPT[4, 1:] = -1, -1  # rows of different lengths


def by_the_plain_model(params, prompt, scan=True, forgetful=False):
    """Without a cache and without a mesh: the whole text is read again for every token (but for all that is before the
    last one, where the model is ``forgetful``)."""
    apply, tokens = jax.jit(Writer(scan=scan).apply), np.zeros((8, LENGTH), np.int32)
    given = np.pad(prompt, [(0, 0), (0, LENGTH - prompt.shape[1])], constant_values=-1)
    tokens[:, 0] = given[:, 0]
    for position in range(1, LENGTH):
        read = slice(position - 1, position) if forgetful else slice(LENGTH)
        logits = apply({"params": params}, tokens[:, read])[:, 0 if forgetful else position - 1]
        likeliest = np.argmax(logits, axis=-1)
        tokens[:, position] = np.where(given[:, position] < 0, likeliest, given[:, position])
    return tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "gather, scan, check_vma",
    [("each_token", True, True), ("once", True, False), ("each_token", False, False), ("once", False, True)],
)
def test_the_text_is_that_of_the_plain_model(gather, scan, check_vma):
    params = jax.device_get(unbox(params_of(MESH, scan)))
    want = by_the_plain_model(params, PROMPT, scan)
    got = generator(scan=scan, gather=gather, check_vma=check_vma)(params_of(MESH, scan), PROMPT)
    np.testing.assert_array_equal(got, want)
    assert np.any(want != by_the_plain_model(params, PROMPT, scan, forgetful=True))  # guard: the cache is needed


def test_what_is_drawn_depends_on_the_key_and_not_on_the_mesh():
    """At the temperature of the model itself, each row from a key of its own."""
    prompt = np.tile(PROMPT[:1], (8, 1))
    drawn = {
        (mesh, seed): np.asarray(generator(mesh, temperature=2.0)(params_of(mesh), prompt, jax.random.key(seed)))
        for mesh, seed in [(MESH, 1), (MESH, 2), (mesh_of(1, 1), 1)]
    }
    np.testing.assert_array_equal(drawn[MESH, 1], drawn[mesh_of(1, 1), 1])
    assert len(np.unique(drawn[MESH, 1], axis=0)) == 8 and np.any(drawn[MESH, 1] != drawn[MESH, 2])  # guard


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_they_are_likely():
    """One token of 4096 rows: of probability p, within five standard deviations, sqrt(p (1 - p) / rows) each."""
    rows = 4096
    generate = generator(length=2, temperature=2.0)
    drawn = np.asarray(generate(params_of(MESH), np.zeros((rows, 1), np.int32), KEY))[:, 1]
    logits = Writer().apply({"params": jax.device_get(unbox(params_of(MESH)))}, jnp.zeros((1, 1), jnp.int32))[0, 0]
    p = np.asarray(jax.nn.softmax(logits / 2.0))
    share = np.bincount(drawn, minlength=VOCAB) / rows
    np.testing.assert_array_less(np.abs(share - p), 5 * np.sqrt(p * (1 - p) / rows) + 1 / rows)


def test_a_row_without_a_first_token_comes_back_as_such():
    prompt = PROMPT.copy()
    prompt[6, 0] = -1
    got = np.asarray(generator()(params_of(MESH), prompt))
    np.testing.assert_array_equal(got[6], -1)
    assert (got[[0, 1, 2, 3, 4, 5, 7]] >= 0).all()


# ------------------------------------------------------------------------------------------------------- what it costs


@cache
def compiled(gather, layers=2):
    return generator(gather=gather, layers=layers).lower(params_of(MESH, layers=layers), PROMPT).compile()


@pytest.mark.parametrize("gather, times", [("each_token", LENGTH - 1), ("once", 1)])
def test_weights_are_gathered_as_often_as_was_said(gather, times):
    """Also in the compiled program, where loops are counted: XLA moves out of a loop what it does not change."""
    found = find_collectives(parse(compiled(gather).as_text()), MESH.shape)
    leaves = [leaf for _, leaf in trees.leaves_with_path(params_of(MESH)) if leaf_of(leaf).axes]
    assert {collective.kind for collective in found} == {"all-gather"}
    gathered = sum(collective.count * collective.payload_bytes for collective in found)
    assert gathered == times * sum(leaf.value.nbytes for leaf in leaves)


@pytest.mark.slow
def test_only_a_generation_that_gathers_once_holds_all_weights():
    layer = sum(leaf.nbytes // 2 for leaf in jax.tree.leaves(params_of(MESH)["blocks"]))
    cache = 2 * 4 * LENGTH * DIM  # keys and values of one row on each device
    temporary = {
        (gather, layers): compiled(gather, layers).memory_analysis().temp_size_in_bytes
        for gather in ("each_token", "once")
        for layers in (2, 6)
    }
    # The loop over layers may hold the cache before and after it.
    assert temporary["each_token", 6] - temporary["each_token", 2] < 4 * 3 * cache < 4 * layer
    assert temporary["once", 6] - temporary["once", 2] >= 4 * layer


# ------------------------------------------------------------------------------------------------------------ refusals

WRONG = {
    "gather": ({"gather": "never"}, (), r"gather='never' is none of \('each_token', 'once'\)"),
    "temperature": ({"temperature": -1.0}, (), r"temperature=-1.0 is not 0 \(the likeliest token\) or more"),
    "length": ({"length": 0}, (), "length=0 is not a positive number of tokens"),
    "no key": ({"temperature": 1.0}, (PROMPT,), r"temperature=1.0 draws tokens: pass .*jax.random.key\(0\)"),
    "too long": ({"length": 2}, (PROMPT,), r"prompt of shape \(8, 3\) has 3 tokens, not 1 to"),
    "rows": ({}, (PROMPT[:5],), r"batch\['prompt'\] of shape \(5, 3\).* 8 devices does not divide"),
    "mesh": ({"mesh": mesh_of(4, 2)}, (PROMPT,), r"'params/.*' lies on a mesh \{'dp': 2, 'fsdp': 4\}"),
}


@pytest.mark.parametrize("options, given, match", WRONG.values(), ids=WRONG)
def test_what_cannot_be_generated_is_refused(options, given, match):
    with pytest.raises(ValueError, match=match):
        generator(**options).trace(params_of(MESH), *given)


def test_a_model_that_does_not_decode_is_refused():
    with pytest.raises(ValueError, match=r"makes \['params'\] and no 'cache'.*model.clone\(decode=True\)"):
        make_generate(Writer(fsdp()), MESH, AXES, LENGTH).trace(params_of(MESH), PROMPT)
    with pytest.raises(TypeError, match=r"the prompt is an array float32\[8, 3\], and must be integers"):
        generator().trace(params_of(MESH), PROMPT.astype(np.float32))
    with pytest.raises(TypeError, match="the model is the class Writer; pass an instance"):
        make_generate(Writer, MESH, AXES, LENGTH)

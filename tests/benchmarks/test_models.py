"""Tests of the benchmarks' models: attention without a score matrix, loss without logits, equal to plain versions."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose

from benchmarks import decoder, lora, vision
from benchmarks.cases import CASES, WORDS, counts, exists, names_in_words, training
from benchmarks.large_models import Size, language_model, next_token_loss
from benchmarks.models import LanguageModel, causal_attention
from benchmarks.step_time import STEP_WORDS, TORCH_CASES
from benchmarks.step_time_variants import CASES as STEP_CASES
from tests.support import AXES, fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import (
    create_train_state,
    make_train_step,
    plan_sharding,
    unbox,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

ROUNDING = {jnp.float32: 2e-6, jnp.bfloat16: 2e-2, jnp.float64: 1e-13}


def plain_attention(q, k, v):
    """Reference attention with all scores at once."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=wide) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def qkv(length=24, dtype=jnp.float32):
    return [2 * jax.random.normal(key, (2, 3, length, 8), dtype) for key in jax.random.split(jax.random.key(0), 3)]


def gradients(attention):
    def loss(q, k, v):
        out = attention(q, k, v)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def close(got, want, tolerance, name=""):
    assert got.dtype == want.dtype, name
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("block_size", [1, 8, 10, 24, 100])
def test_blockwise_causal_attention_equals_plain_attention(block_size, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        arrays, attention = qkv(dtype=dtype), partial(causal_attention, block_size=block_size)
        close(jax.jit(attention)(*arrays), plain_attention(*arrays), ROUNDING[dtype])
        for got, want in zip(gradients(attention)(*arrays), gradients(plain_attention)(*arrays), strict=True):
            close(got, want, ROUNDING[dtype])


@pytest.mark.parametrize("check_vma", [True, False])
def test_blockwise_attention_gradients_in_shard_map_with_remat_equal_plain_attention(check_vma):
    mesh, split, arrays = mesh_of(1, 2), PartitionSpec(AXES), qkv()
    run = on_mesh(gradients(jax.remat(partial(causal_attention, block_size=10))), mesh, check_vma, split, split)
    for got, want in zip(run(*arrays), gradients(plain_attention)(*arrays), strict=True):
        # The loss weights are the weights of the first row: each device numbers its rows from 0.
        close(got[:1], want[:1], 2e-6)


def sizes_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (var.aval.size for var in eqn.outvars if hasattr(var.aval, "size"))
        for sub in jaxprs_in_params(eqn.params):
            yield from sizes_in(getattr(sub, "jaxpr", sub))


@pytest.mark.parametrize(
    "around", [lambda f: f, partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)]
)
def test_blockwise_attention_holds_no_full_score_matrix_under_any_remat_policy(around):
    length, block = 512, 16
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv(length)]
    largest = {
        name: max(sizes_in(jax.make_jaxpr(gradients(around(attention)))(*arrays).jaxpr))
        for name, attention in {"all": plain_attention, "blocks": partial(causal_attention, block_size=block)}.items()
    }
    assert largest == {"all": 6 * length * length, "blocks": 6 * block * length}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("block", ["xlstm", "transformer"])
def test_language_model_losses_equal_cross_entropy_of_the_logits(block):
    model = LanguageModel(block, 16, 2, 2, wrap=fsdp, remat=jax.checkpoint_policies.dots_saveable)
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 256)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    found = jax.jit(partial(model.apply, method="losses"))(variables, tokens[:, :-1], tokens[:, 1:])
    logits = jax.jit(model.apply)(variables, tokens[:, :-1])
    assert_allclose(found.loss, optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]), rtol=1e-5)
    assert found.loss.std() > 0.01  # guard: the labels matter


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "shard_axes, remat", [((), False), (AXES, True), (AXES, jax.checkpoint_policies.dots_saveable)]
)
def test_sharding_remat_and_chunked_head_leave_loss_and_gradients_unchanged(shard_axes, remat):
    size, options = Size(32, 2, 2, 64), {"min_weight_size": 64, "gather_dtype": None}
    batch = jax.random.randint(jax.random.key(0), (2, 65), 0, size.vocab_size)

    def loss_and_grad(**options):
        workload = language_model(size, devices=2, **options)
        params = jax.jit(workload.model.init)(jax.random.key(0), batch)["params"]
        value = lambda params: workload.loss_fn(params, workload.model.apply, batch, None)  # noqa: E731
        return jax.jit(jax.value_and_grad(value))(params)

    want, want_grads = loss_and_grad()
    got, grads = loss_and_grad(remat=remat, shard_axes=shard_axes, chunked_head=True, constrain=lambda x: x, **options)
    assert_allclose(got, want, rtol=2e-3)  # the logits of the plain loss are rounded to bfloat16
    for (path, right), grad in zip(leaves_with_path(want_grads), jax.tree.leaves(grads), strict=True):
        close(grad, right, 5e-2, path)


def test_next_token_loss_of_a_single_row_scatters_label_gradients_without_the_row_dim():
    table = jax.random.normal(jax.random.key(0), (16, 16))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 16)

    def loss(table, tokens):
        return next_token_loss(table, lambda variables, inputs: variables["params"][inputs], tokens, None)

    rows = [jax.value_and_grad(loss)(table, tokens[i : i + 1]) for i in (0, 1)]
    jax.tree.map(partial(assert_allclose, rtol=1e-5), jax.value_and_grad(loss)(table, tokens), mean_of(rows))

    def dims(count):  # the scatters into label gradients: lookups with batching dims
        lowered = jax.jit(jax.grad(loss)).lower(table, tokens[:count]).as_text()
        scatters = re.findall(r"input_batching_dims = \[[\d, ]+\].*?tensor<([\dx]+)xf32>", lowered, re.DOTALL)
        return {len(shape.split("x")) for shape in scatters}

    assert dims(1) == {2} and dims(2) == {3}


def mean_of(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def attention_of_each_group(q, k, v):
    """Attention in which head h of the queries reads key head h // (heads / kv_heads)."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    return jnp.swapaxes(plain_attention(q, k, v), 1, 2)


OF_USERS = {
    "a mixture": decoder.DecoderSize(32, 1, 4, 64, hidden=24, kv_heads=2, experts=4),
    "images": vision.VisionSize(32, 1, 4, 16),
    "a decoder": decoder.DecoderSize(32, 2, 4, 64, hidden=48, kv_heads=2),
    "a decoder, untied": decoder.DecoderSize(32, 2, 4, 64, hidden=48, kv_heads=2, tied=False),
}


@pytest.mark.parametrize("name", [*list(OF_USERS)[:3], pytest.param("a decoder, untied", marks=pytest.mark.slow)])
def test_sharded_decoder_and_vision_models_have_the_gradients_of_the_plain_models(name):
    size = OF_USERS[name]
    options = {"images": 1} if name == "images" else {"context": 24}
    other = {} if name == "images" else {"attention": attention_of_each_group}
    made = training(size, devices=4, shard_axes=AXES, min_weight_size=64, gather_dtype=None, **options, **other)
    plain = training(size, devices=4, remat=False, **options)
    batch = jax.tree.map(drawn, made.batch)
    inputs = [batch["images"] if name == "images" else batch]
    mesh = mesh_of(2, 2)
    state = create_train_state(made.model, optax.sgd(1.0), mesh, jax.random.key(1), *inputs, batch_axes=AXES)
    start = jax.device_get(unbox(state.params))  # before the step donates the state
    state, metrics = make_train_step(made.loss_fn, mesh, AXES)(state, batch, jax.random.key(2))

    value = jax.jit(jax.value_and_grad(lambda params, batch: plain.loss_fn(params, plain.model.apply, batch, None)))
    loss, want = value(start, batch)
    assert_allclose(metrics["loss"], loss, rtol=2e-3)
    found = jax.tree.map(lambda before, after: before - after, start, jax.device_get(unbox(state.params)))
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    for (path, right), got in zip(leaves_with_path(want), jax.tree.leaves(found), strict=True):
        # A softmax ignores a common shift of all scores: the gradient of the key bias is pure rounding.
        if np.abs(right).max() > 1e-3 * largest:
            close(got, np.asarray(right), 5e-2, path)
    of_a_device = value(start, jax.tree.map(lambda rows: rows[:1], batch))[1]
    pairs = zip(*map(jax.tree.leaves, (of_a_device, want)), strict=True)
    differ = [np.abs(one - right).mean() / np.abs(right).mean() for one, right in pairs]
    assert np.median(differ) > 0.5  # guard


def drawn(rows):
    """Returns a random batch of this shape: tokens or classes, or pixels."""
    if jnp.issubdtype(rows.dtype, jnp.integer):
        return jax.random.randint(jax.random.key(0), rows.shape, 0, 16)
    return jax.random.normal(jax.random.key(0), rows.shape, rows.dtype)


def test_decoder_and_vision_sizes_have_the_published_parameter_counts():
    found = {name: counts(size).total for name, size in decoder.SIZES.items()}
    assert found["llama3.2_1B"] == 1_235_814_400 and found["llama3.1_8B"] == 8_030_261_248
    assert round(found["decoder_0.8B"] / 1e9, 3) == 0.825 and round(found["mixture_0.5B"] / 1e9, 3) == 0.480
    assert round(counts(vision.SIZES["vit_L16"]).total / 1e9, 3) == 0.304


def test_decoder_benchmark_excludes_cases_in_need_of_edited_model_source():
    there = [name for name, case in CASES.items() if exists(decoder.SIZES["decoder_small"], case)]
    assert {"jit", "ours", "ours, ZeRO-1"} < set(there)
    assert not {"flat", "ours, chunked head", "ours, ahead"} & set(there)


def test_names_in_words_explains_every_case_name_of_the_pictures():
    assert names_in_words(["flat, HSDP", "flat"]) == f"flat: {WORDS['flat']}; HSDP: {WORDS['HSDP']}."
    told = names_in_words(CASES), names_in_words([*STEP_CASES, *TORCH_CASES], STEP_WORDS)
    assert all("over one axis" in text for text in told)  # and each word has an entry, else KeyError


def test_lora_workload_freezes_a_bfloat16_base_and_trains_only_float32_adapters():
    made, tokens = lora.workload("1.3B", 8, "bfloat16"), jax.ShapeDtypeStruct((8, 16), jnp.int32)
    plan = plan_sharding(made.model, {"fsdp": 8}, tokens, tx=made.tx, **made.freezing)
    rows = [row for row in plan.rows if row.collection == "params"]
    assert {(row.trainable, row.dtype) for row in rows} == {(False, "bfloat16"), (True, "float32")}
    assert {row.path.split("/")[-1] for row in rows if row.trainable} == {"lora_a", "lora_b"}
    assert sum(row.optimizer.total for row in rows) < 0.02 * plan.parameters.total * 4

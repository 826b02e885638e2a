"""Tests of ``batch_spec``: steps, evaluations and ``check_step`` on split sequences equal one device."""

import math
import re
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose

from tests.support import FLOAT32_ROUNDING, assert_each_leaf, assert_same_params, in_case
from xlstm_jax.distributed import (
    DeviceMeshManager,
    Replicas,
    TrainState,
    check_step,
    create_train_state,
    make_eval_step,
    make_train_step,
    partition_specs,
    shard_batch,
    shard_modules,
    unbox,
    value_and_grad,
)
from xlstm_jax.distributed.device_mesh.batch_layout import batch_layout
from xlstm_jax.distributed.device_mesh.zigzag import to_zigzag
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.model_parallel import ColumnDense, context_attention, context_positions, in_layout
from xlstm_jax.distributed.training.gradients import LossFunction
from xlstm_jax.distributed.training.step_check.one_device import OneDevice
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.training.fitting import Options, code_of, layout_of_step
from xlstm_jax.forecast.training.workload import Workload

ROWS, TOKENS, VOCABULARY, WIDTH = 8, 16, 13, 16
KEY = jax.random.key(0)


class Transformer(nn.Module):
    """Embedding, a block with causal attention over a split sequence, head."""

    impl: str = "gather"
    exchange: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, segments):
        positions = context_positions(tokens.shape[1], "cp")
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + nn.Embed(TOKENS, WIDTH)(positions)
        h = nn.LayerNorm()(x)
        q, k, v = (nn.DenseGeneral((2, 8), use_bias=False, name=name)(h) for name in "qkv")
        if self.exchange:
            y = context_attention(q, k, v, "cp", impl=self.impl, segment_ids=segments, block_size=2)
        else:  # each device attends to local tokens alone
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(y)
        x = nn.Dropout(self.dropout, deterministic=not self.dropout)(x)
        return nn.Dense(VOCABULARY, name="head")(nn.gelu(x))


def losses_of(params, apply_fn, batch, rng):
    rngs = {"rngs": {"dropout": rng}} if rng is not None else {}
    logits = apply_fn({"params": params}, batch["tokens"], batch["segments"], **rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])


def mean_loss(params, apply_fn, batch, rng):
    return (losses_of(params, apply_fn, batch, rng) * batch["scale"]).mean()


def weighted_loss(params, apply_fn, batch, rng):
    weight = batch["weights"] * batch["of_row"][:, None]
    return (losses_of(params, apply_fn, batch, rng) * weight).sum() * batch["scale"], weight.sum()


def data() -> dict[str, Any]:
    """Returns packed documents, and token weights with a different sum on every device."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, (ROWS, TOKENS + 1))
    text = np.where(np.arange(TOKENS + 1) % 3 == 0, np.arange(ROWS)[:, None], text)
    places = np.arange(TOKENS)
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "segments": np.cumsum(rng.random((ROWS, TOKENS)) < 0.2, axis=1),
        "weights": (places < rng.integers(3, TOKENS, (ROWS, 1))).astype(np.float32) * (1 + places % 4),
        "of_row": 1 + np.arange(ROWS, dtype=np.float32),
        "scale": np.float32(1.5),
    }


BATCH = data()
MESHES = {
    "dp_cp": ({"dp": 2, "cp": 4}, "dp", "dp"),
    "fsdp_cp": ({"fsdp": 4, "cp": 2}, "fsdp", "fsdp"),
    "dp_fsdp_cp": ({"dp": 2, "fsdp": 2, "cp": 2}, ("dp", "fsdp"), "fsdp"),
    "hsdp": ({"dp": 2, "fsdp": 2, "cp": 2}, ("dp", "fsdp"), ("fsdp", "cp")),  # parameters are split over "cp", too
}


def specs_of(name):
    mesh, rows, _ = MESHES[name]
    of_tokens = dict.fromkeys(("tokens", "targets", "segments", "weights"), P(rows, "cp"))
    return DeviceMeshManager.create_device_mesh(mesh), of_tokens | {"of_row": P(rows), "scale": P()}


def split_model(name, replicas=None, **options):
    classes = nn.Dense, nn.DenseGeneral, nn.Embed
    return shard_modules(Transformer(**options), classes, MESHES[name][2], 64, replicas=replicas)


def state_of(name, tx, **options):
    mesh, _ = specs_of(name)
    inputs = BATCH["tokens"], BATCH["segments"]
    return create_train_state(split_model(name, **options), tx, mesh, KEY, *inputs, batch_axes=MESHES[name][1])


def optimizer():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


@cache
def one_device(loss_fn, steps=4):
    """Returns losses, first gradient and last parameters of one device, with the batch in natural order."""
    model, tx = Transformer(), optimizer()
    params = jax.jit(model.init)(KEY, BATCH["tokens"], BATCH["segments"])["params"]

    def loss(params):
        found = loss_fn(params, model.apply, BATCH, None)
        return found[0] / found[1] if isinstance(found, tuple) else found

    gradient = jax.jit(jax.value_and_grad(loss))
    opt_state, losses, first = tx.init(params), [], None
    for _ in range(steps):
        value, grads = gradient(params)
        first = grads if first is None else first
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, first, params


def norm_of(tree):
    return math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(tree)))


CASES = [
    ("fsdp_cp", True, "ring", weighted_loss, 1),
    ("dp_fsdp_cp", False, "gather", weighted_loss, 2),
    pytest.param("hsdp", True, "gather", mean_loss, 1, marks=pytest.mark.slow),
    *[
        pytest.param(name, check_vma, impl, loss, minibatches, marks=pytest.mark.slow)
        for name, impl in [*zip(MESHES, ("ring", "gather", "ring", "gather"), strict=True), ("hsdp", "ulysses")]
        for check_vma in (True, False)
        for loss, minibatches in ((mean_loss, 2), (weighted_loss, 1), (weighted_loss, 2))
    ],
]


@pytest.mark.parametrize("name, check_vma, impl, loss_fn, minibatches", CASES)
def test_training_on_split_sequences_matches_a_single_device(name, check_vma, impl, loss_fn, minibatches):
    mesh, spec = specs_of(name)
    state = state_of(name, optimizer(), impl=impl)
    step = make_train_step(
        loss_fn,
        mesh,
        batch_spec=spec,
        layout="zigzag",
        num_minibatches=minibatches,
        weighted=loss_fn is weighted_loss,
        check_vma=check_vma,
    )
    batch = shard_batch(BATCH, mesh, batch_spec=spec)
    got = []
    losses, grads, params = one_device(loss_fn)
    for _ in losses:
        state, metrics = step(state, batch, KEY)
        got.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert_allclose([loss for loss, _ in got], losses, rtol=FLOAT32_ROUNDING)
    assert_allclose(got[0][1], norm_of(grads), rtol=FLOAT32_ROUNDING)
    assert got[0][1] > 0.5  # guard: gradients are clipped
    assert_same_params(state.params, params, tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize("accumulation", ["reduce_each", "reduce_once", "reduce_replicas_once"])
def test_minibatches_of_split_sequences_with_replicas_match_a_single_device(accumulation, check_vma):
    """Minibatches equal one device with parameters split over "fsdp", and copies along "dp" and "cp"."""
    mesh, spec = specs_of("dp_fsdp_cp")
    state = state_of("dp_fsdp_cp", keep_gradients(), replicas=Replicas(("dp", "cp")))
    how = {"num_minibatches": 2, "accumulation": accumulation, "weighted": True, "check_vma": check_vma}
    step = make_train_step(weighted_loss, mesh, batch_spec=spec, **how)
    state, _ = step(state, to_zigzag(BATCH, 2), KEY)
    assert_same_params(state.opt_state, one_device(weighted_loss)[1])


def keep_gradients():
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (jax.tree.map(jnp.zeros_like, updates), updates),
    )


def distilled(params, apply_fn, batch, rng, *, teacher):
    """Distillation loss: squared distance to the teacher's logits; both models see the full sequence."""
    of_student, of_teacher = (
        apply_fn({"params": values}, batch["tokens"], batch["segments"]) for values in (params, teacher)
    )
    weight = batch["weights"] * batch["of_row"][:, None]
    return (((of_student - of_teacher) ** 2).mean(-1) * weight).sum(), weight.sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check_vma", [False, True], ids=["no_vma", "vma"])
def test_distillation_with_a_teacher_on_split_sequences_matches_a_single_device(check_vma):
    mesh, spec = specs_of("hsdp")
    student = state_of("hsdp", keep_gradients(), impl="ring")
    teacher = jax.tree.map(lambda x: 0.5 * x + 0.01, student.params)
    params, fixed = (jax.tree.map(np.asarray, unbox(tree)) for tree in (student.params, teacher))

    def loss(params):
        total, weight = distilled(params, Transformer().apply, BATCH, None, teacher=fixed)
        return total / weight

    want, grads = jax.jit(jax.value_and_grad(loss))(params)
    step = make_train_step(distilled, mesh, batch_spec=spec, weighted=True, check_vma=check_vma)
    batch = shard_batch(to_zigzag(BATCH, 2), mesh, batch_spec=spec)
    state, metrics = step(student, batch, KEY, extra_trees={"teacher": teacher})
    assert_allclose(metrics["loss"], want, rtol=FLOAT32_ROUNDING)
    assert_same_params(state.opt_state, grads)
    assert want > 1e-3 and norm_of(grads) > 1e-3  # guard


def test_weighted_gradients_on_split_sequences_are_no_mean_of_device_means():
    """A batch laid out by ``shard_batch``, with weights in natural order, gives the gradients of one device."""
    mesh, spec = specs_of("fsdp_cp")
    batch = shard_batch(to_zigzag(BATCH, 2) | {"weights": BATCH["weights"]}, mesh, batch_spec=spec)
    found = {}
    for weighted in (True, False):
        of_tokens = lambda *args: (lambda total, weight: total / weight)(*weighted_loss(*args))  # noqa: E731
        step = make_train_step(weighted_loss if weighted else of_tokens, mesh, batch_spec=spec, weighted=weighted)
        found[weighted] = step(state_of("fsdp_cp", keep_gradients()), batch, KEY)[0].opt_state
    _, want, _ = one_device(weighted_loss)
    assert_same_params(found[True], want)
    with pytest.raises(AssertionError, match="off by"):  # guard: devices have different weights
        assert_same_params(found[False], want, tolerance=0.05)


def test_devices_with_different_tokens_draw_different_random_numbers():
    mesh, spec = specs_of("fsdp_cp")

    def loss_fn(params, apply_fn, batch, rng):
        u = jax.random.uniform(rng)
        loss = mean_loss(params, apply_fn, batch, None)
        return loss, {"u": u, "square": u * u}

    step = make_train_step(loss_fn, mesh, batch_spec=spec, has_aux=True, check_vma=False)
    metrics = step(state_of("fsdp_cp", optax.sgd(0.1)), BATCH, KEY)[1]
    seen = jnp.stack([jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, 0), i)) for i in range(8)])
    assert_allclose(metrics["u"], seen.mean(), rtol=1e-6)
    assert_allclose(metrics["square"], (seen**2).mean(), rtol=1e-6)


# ---------------------------------------------------------------------------------------------------- an evaluation


def eval_fn(params, apply_fn, batch):
    return {"values": losses_of(params, apply_fn, batch, None), "weight": batch["weights"] * batch["of_row"][:, None]}


@pytest.mark.parametrize("name, check_vma", [("fsdp_cp", True), pytest.param("hsdp", False, marks=pytest.mark.slow)])
def test_evaluation_of_split_sequences_matches_a_single_device(name, check_vma):
    mesh, spec = specs_of(name)
    axes, metric = tuple(mesh.shape), WeightedMean()
    state = state_of(name, optax.sgd(0.1), impl="ring")
    step = make_eval_step(eval_fn, mesh, batch_spec=spec, layout="zigzag", metric=metric, check_vma=check_vma)
    local = metric.empty(axes, mesh)
    for rows in (BATCH, {key: x[:3] if np.ndim(x) else x for key, x in BATCH.items()}):
        batch, weight = shard_batch(rows, mesh, batch_spec=spec, pad=ROWS)
        local = step(state, batch | {"of_row": batch["of_row"] * weight}, local)
    got = make_log_step(metric, mesh, axes)(local)[0]
    losses = losses_of(jax.device_get(unbox(state.params)), Transformer().apply, BATCH, None)
    weight = BATCH["weights"] * BATCH["of_row"][:, None]
    total, count = ((x.sum() + x[:3].sum()) for x in (losses * weight, weight))
    assert_allclose(got, total / count, rtol=FLOAT32_ROUNDING)


# ------------------------------------------------------------------------------------------------------- check_step


class PerToken(nn.Module):
    """Model that treats each token separately."""

    @nn.compact
    def __call__(self, tokens, segments):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)
        return nn.Dense(VOCABULARY, name="head")(nn.gelu(x))


def per_device_mean(params, apply_fn, batch, rng):
    total, weight = weighted_loss(params, apply_fn, batch, rng)
    return total / weight


CHECKED = {
    "right, with exchange": (Transformer(impl="ring"), weighted_loss, None),
    "right, tokens alone": (PerToken(), weighted_loss, None),
    "mean of means, tokens alone": (PerToken(), per_device_mean, r"no mean over rows.*\(sum, weight\) with weighted"),
    "mean of means": (Transformer(), per_device_mean, r"with weights is \(sum, weight\), with weighted=True"),
    "no exchange": (Transformer(exchange=False), mean_loss, r"must exchange them over 'cp' \(context_attention"),
}
SLOW = {"mean of means", "mean of means, tokens alone"}


def test_one_device_has_the_batch_in_natural_order():
    mesh, spec = specs_of("fsdp_cp")
    params = {"w": jax.device_put(jnp.ones(4), NamedSharding(mesh, P()))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    batch = shard_batch(to_zigzag(BATCH, 2), mesh, batch_spec=spec)
    assert not np.array_equal(batch["tokens"], BATCH["tokens"])  # guard
    loss = LossFunction(weighted_loss, True)
    one_device = OneDevice(loss, batch_layout(mesh, None, spec), 1, state, batch, mesh)
    assert_each_leaf(np.testing.assert_array_equal, dict(one_device.batch), dict(BATCH))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CHECKED]
)
def test_check_step_gives_the_expected_verdict_on_split_sequences(case):
    plain, loss_fn, finding = CHECKED[case]
    mesh, spec = specs_of("fsdp_cp")
    model = shard_modules(plain, (nn.Dense, nn.DenseGeneral, nn.Embed), "fsdp", 64)
    batch = shard_batch(to_zigzag(BATCH, 2), mesh, batch_spec=spec)
    state = create_train_state(model, optax.sgd(0.1), mesh, KEY, BATCH["tokens"], BATCH["segments"], batch_axes="fsdp")
    step = make_train_step(loss_fn, mesh, batch_spec=spec, weighted=loss_fn is weighted_loss)
    found = check_step(step, state, batch, KEY)
    assert found.verdict == ("wrong" if finding else "right"), found
    if finding:
        assert re.search(finding, " ".join(found.findings)), found.findings


@pytest.mark.slow
@pytest.mark.parametrize("case", ["right", "no exchange"])
def test_check_step_of_a_custom_step_finds_a_missing_exchange_over_cp(case):
    mesh, spec = specs_of("fsdp_cp")
    state = state_of("fsdp_cp", optax.sgd(0.1), exchange=case == "right")
    specs = partition_specs(state.params, mesh)

    @jax.jit
    def step(state, batch, rng):
        gradients = value_and_grad(lambda params, batch: mean_loss(params, state.apply_fn, batch, None), ("fsdp", "cp"))

        def on_device(params, batch):
            with in_layout(batch, "zigzag", "cp") as batch:
                return gradients(params, batch)

        on_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, spec), out_specs=(P(), specs))
        loss, grads = on_mesh(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    batch = shard_batch(to_zigzag(BATCH, 2), mesh, batch_spec=spec)
    found = check_step(step, state, batch, KEY, loss_fn=mean_loss, batch_spec=spec)
    assert found.ok == (case == "right"), found
    assert found.ok or "must exchange them over 'cp'" in " ".join(found.findings), found


def test_train_and_eval_steps_raise_for_a_tensor_parallel_axis_in_batch_spec():
    mesh, metric = DeviceMeshManager.create_device_mesh({"fsdp": 4, "tp": 2}), WeightedMean()
    x, spec = jnp.ones((8, 4, 6)), P("fsdp", "tp")
    state = create_train_state(
        ColumnDense(16, axis_name="tp"), optax.sgd(0.1), mesh, KEY, x, batch_axes="fsdp", allow_replicated=True
    )
    loss_fn = lambda params, apply_fn, x, rng: apply_fn({"params": params}, x).mean()  # noqa: E731
    eval_fn = lambda params, apply_fn, x: {"values": apply_fn({"params": params}, x)}  # noqa: E731
    for check_vma in (True, False):
        with (
            in_case(check_vma=check_vma),
            pytest.raises(ValueError, match=r"'tp' splits this layer, and the loss is averaged over \('fsdp', 'tp'\)"),
        ):
            make_train_step(loss_fn, mesh, batch_spec=spec, check_vma=check_vma)(state, x, KEY)
        with (
            in_case(check_vma=check_vma),
            pytest.raises(ValueError, match=r"'tp' splits this layer, and the loss is averaged over \('fsdp', 'tp'\)"),
        ):
            step = make_eval_step(eval_fn, mesh, batch_spec=spec, metric=metric, check_vma=check_vma)
            step(state, x, metric.empty(("fsdp", "tp"), mesh))


# -------------------------------------------------------------------------------------------------------- a forecast


def test_forecast_counts_the_bytes_of_the_sequence_slice_of_a_device():
    """A forecast counts a quarter of the rows and half of the tokens per device, and an exchange over "cp"."""
    mesh, spec = specs_of("fsdp_cp")
    training = Workload(
        split_model("fsdp_cp"),
        optax.sgd(0.1),
        BATCH,
        weighted_loss,
        inputs=(BATCH["tokens"], BATCH["segments"]),
        weighted=True,
        batch_spec=spec,
        layout="zigzag",
    )
    step, args = training.build_step(mesh)
    assert "    layout='zigzag',\n)" in code_of(Options(dict(mesh.shape)), (), P("fsdp", "cp"), layout_of_step(step))
    parts = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), args[1])
    assert parts["tokens"] == (2, 8) and parts["of_row"] == (2,) and parts["scale"] == ()
    found = forecast(step, *args)
    assert ("cp",) in {collective.axes for collective in found.collectives if collective.kind == "all-gather"}
    of_batch = 4 * (4 * 2 * 8 + 2 + 1)
    of_state = sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(unbox(args[0].params)))
    assert found.memory.argument_bytes == of_state + of_batch + 4  # 4: the step number; the key is unused

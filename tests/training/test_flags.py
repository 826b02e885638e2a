"""Tests of JAX's type flags: the library raises under none of them, in ordinary combinations of step options.

A step is traced under each flag. No case contains code of optax or Flax that raises by itself: Adam's bias correction,
``optax.contrib.muon``, ``sam``, ``lookahead``, ``MultiSteps``, ``reduce_on_plateau``, cosine schedules mix ints, bools
and floats, as does a Flax module whose weights arrive in another dtype than its ``dtype``.
"""

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.model_parallel import test_axes_together as together
from tests.support import AXES, fsdp, mesh_of
from xlstm_jax.distributed import (
    LMHead,
    Offload,
    Replicas,
    abstract_train_state,
    clip_by_global_norm,
    create_train_state,
    make_eval_step,
    make_train_step,
    muon,
    nnx_model,
    scan_layers,
    shard_batch,
    shard_modules,
    skip_nonfinite,
    with_ema,
)
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.metrics.cells import Count, Maximum, Total
from xlstm_jax.distributed.optimizers import on_unsharded_matrices

FLAGS = {
    "strict": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "x64": lambda: jax.enable_x64(True),
}
ROWS = 16
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, 10), jnp.float32),
    "y": jax.ShapeDtypeStruct((ROWS, 6), jnp.float32),
    "weight": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
}
TOKENS = {name: jax.ShapeDtypeStruct((ROWS, 8), jnp.int32) for name in ("tokens", "labels")}


class Net(nn.Module):
    wrapping: dict = field(default_factory=dict)
    dtype: Any = None
    normed: bool = False
    layers: str = ""

    @nn.compact
    def __call__(self, x):
        wrap = fsdp(min_weight_size=16, **self.wrapping)
        x = wrap(nn.Dense)(16, dtype=self.dtype)(x)
        if self.normed:
            x = nn.BatchNorm(use_running_average=False, axis_name=AXES)(x)
        if self.layers:
            block = wrap(Block)
            if self.layers == "prefetched":
                stack = scan_layers(block, 2)
            else:
                block = nn.remat(block, prevent_cse=False)
                stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = stack(name="blocks")(x, None)
        return wrap(nn.Dense)(6, dtype=self.dtype)(nn.relu(x))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16)(x), None


class Complex(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = fsdp(nn.Dense, min_weight_size=16)(6, dtype=jnp.complex64, param_dtype=jnp.complex64)(
            x.astype(jnp.complex64)
        )
        return jnp.abs(x)


class Language(nn.Module):
    vocabulary: int = 32
    options: dict = field(default_factory=dict)

    @nn.compact
    def __call__(self, tokens, labels):
        wrap = fsdp(min_weight_size=16)
        x = wrap(nn.Embed)(self.vocabulary, 16)(tokens)
        return wrap(LMHead)(32, chunk_size=16, **self.options).losses(x, labels)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(10, 16, rngs=rngs), nnx.Linear(16, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=AXES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def errors(params, apply_fn, batch):
    found = apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
    return jnp.mean((found - batch["y"].astype(jnp.float32)) ** 2, axis=-1)


def mean(params, apply_fn, batch, rng):
    return jnp.mean(errors(params, apply_fn, batch))


def weighted(params, apply_fn, batch, rng):
    weight = batch["weight"].astype(jnp.float32)
    return jnp.sum(errors(params, apply_fn, batch) * weight), jnp.sum(weight)


def counted(params, apply_fn, batch, rng):
    return jnp.sum(errors(params, apply_fn, batch)), jnp.sum(batch["weight"] > 0)


def beside(params, apply_fn, batch, rng):
    loss = mean(params, apply_fn, batch, rng)
    cells = {"n": Count.of(batch["weight"] > 0), "total": Total.of(batch["weight"]), "most": Maximum.of(loss)}
    bools = {"ok": jnp.all(batch["weight"] > 0), "python": True}
    return loss, {"half": loss.astype(jnp.bfloat16), "number": 0.5, **cells, **bools}


def weighted_beside(params, apply_fn, batch, rng):
    return weighted(params, apply_fn, batch, rng), beside(params, apply_fn, batch, rng)[1]


def observed(params, apply_fn, batch, rng):
    loss = mean(params, apply_fn, batch, rng)
    return loss, {"values": loss, "weight": jnp.sum(batch["weight"])}


def with_statistics(params, apply_fn, batch, rng, collections):
    found, new = apply_fn({"params": params, **collections}, batch["x"], mutable=[*collections])
    return jnp.mean((found - batch["y"].astype(found.dtype)) ** 2), new


def of_tokens(params, apply_fn, batch, rng):
    found = apply_fn({"params": params}, batch["tokens"], batch["labels"])
    return found.loss.sum() + jnp.asarray(1e-3, found.loss.dtype) * found.log_normalizer.sum(), (
        batch["labels"] >= 0
    ).sum()


def of_layers(params, apply_fn, batch, rng):
    return of_tokens(params, apply_fn, dict(zip(("tokens", "labels"), batch, strict=True)), rng)


@dataclass(frozen=True)
class Case:
    """A model, the loss, an optimizer, and options of the state and of the step."""

    model: Any = field(default_factory=Net)
    loss: Any = mean
    tx: Any = field(default_factory=lambda: optax.sgd(0.1, momentum=0.9))
    step: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)
    batch: Any = field(default_factory=lambda: BATCH)
    inputs: tuple = ("x",)


LINEAR, ACCUMULATED = optax.linear_schedule(0.1, 0.0, 10), {"num_minibatches": 2}
ALL_OF_OURS = skip_nonfinite(with_ema(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)), lambda count: 0.9))
LANGUAGE = {"loss": of_tokens, "batch": TOKENS, "inputs": ("tokens", "labels"), "step": {"weighted": True}}
BF16 = {"gather_dtype": "bfloat16", "grad_scatter_dtype": "bfloat16"}


def of_nnx():
    return shard_modules(nnx_model(lambda rngs: Nnx(rngs)), nnx.Linear, "fsdp", 16)


def is_last(path):
    return "Dense_1" in path


CASES = {
    "no types": Case(step={"check_vma": False}),
    "minibatches": Case(step=ACCUMULATED),
    "counts as weights": Case(loss=counted, step=ACCUMULATED | {"weighted": True, "accumulation": "reduce_once"}),
    "beside": Case(loss=beside, step=ACCUMULATED | {"has_aux": True}),
    "weighted beside": Case(loss=weighted_beside, step={"has_aux": True, "weighted": True}),
    "metric": Case(loss=observed, step=ACCUMULATED | {"metric": WeightedMean()}),
    "collections": Case(Net(normed=True), with_statistics, ALL_OF_OURS, step=ACCUMULATED),
    "learning rate": Case(tx=optax.sgd(LINEAR), step={"learning_rate": LINEAR}),
    # Another schedule than the optimizer's, because optax cannot call that schedule under the flags.
    "another learning rate": Case(step={"learning_rate": {"all": optax.cosine_decay_schedule(0.1, 100)}}),
    "all of ours": Case(tx=ALL_OF_OURS),
    "muon": Case(tx=muon(LINEAR, adaptive=True, exchange_dtype="bfloat16", consistent_rms=0.2, weight_decay=0.1)),
    "whole matrices": Case(tx=optax.chain(on_unsharded_matrices(optax.contrib.normalize()), optax.scale(-0.1))),
    "line search": Case(tx=optax.lbfgs()),
    "offload": Case(tx=ALL_OF_OURS, state={"offload": Offload()}),
    "frozen": Case(Net(dtype=jnp.bfloat16), state={"trainable": is_last, "frozen_dtype": "bfloat16"}),
    "bfloat16": Case(Net(BF16, jnp.bfloat16), step=ACCUMULATED | {"accumulation": "reduce_once"}),
    "int8": Case(Net({"gather_dtype": "int8"}), step=ACCUMULATED),
    "padded": Case(Net({"uneven": "pad"}), tx=muon(0.1)),
    "again": Case(Net({"reshard_after_forward": True}, layers="remat")),
    "copies": Case(
        Net({"replicas": Replicas("dp", shard_optimizer_state=True)}),
        step=ACCUMULATED | {"accumulation": "reduce_replicas_once"},
    ),
    "prefetched": Case(Net(layers="prefetched")),
    "complex": Case(Complex(), tx=ALL_OF_OURS, step=ACCUMULATED),
    "nnx": Case(of_nnx(), with_statistics, step=ACCUMULATED),
    "head": Case(Language(options={"dtype": jnp.bfloat16}), **LANGUAGE),
    "pieces": Case(Language(options={"by_pieces": True}), **LANGUAGE),
    "rows": Case(Language(4096), **LANGUAGE),
}


def trace(case):
    mesh, inputs = mesh_of(2, 4), [case.batch[name] for name in case.inputs]
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = abstract_train_state(
        case.model, case.tx, mesh, key, *inputs, batch_axes=AXES, allow_replicated=True, **case.state
    )
    metric = case.step.get("metric")
    local = [] if metric is None else [jax.eval_shape(lambda: metric.empty(AXES, mesh))]
    step = make_train_step(case.loss, mesh, AXES, allow_replicated=True, **case.step)
    return jax.eval_shape(step, state, case.batch, key, *local)[0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", CASES)
def test_train_step_traces_under_each_jax_config_flag(name, flag):
    with FLAGS[flag]():
        assert trace(CASES[name]).params


SPLIT = {"tp": {"tp": 2}, "sp": {"tp": 2}, "ep": {"ep": 2}, "cp": {"cp": 2}}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("axis", SPLIT)
def test_model_parallel_layers_trace_under_each_jax_config_flag(axis, flag):
    mesh, tokens = together.mesh_of(SPLIT[axis]), jax.ShapeDtypeStruct(together.TOKENS.shape, jnp.int32)
    wrap, key = partial(fsdp, min_weight_size=16), jax.eval_shape(lambda: jax.random.key(0))
    model = together.Decoder(axis == "ep", axis == "sp", stacked=True, wrap=wrap)
    with FLAGS[flag]():
        state = abstract_train_state(
            model, optax.sgd(0.1), mesh, key, tokens, tokens, batch_axes=together.BATCH_AXES[:-1], allow_replicated=True
        )
        step = make_train_step(
            of_layers, mesh, batch_spec=together.BATCH_SPEC, weighted=True, allow_replicated=True, **ACCUMULATED
        )
        assert jax.eval_shape(step, state, (tokens, tokens), key)[0].params


@pytest.mark.parametrize("flag", FLAGS)
def test_eval_step_traces_under_each_jax_config_flag(flag):
    metric, mesh = WeightedMean(), mesh_of(2, 4)

    def observe(params, apply_fn, batch):
        return {"values": errors(params, apply_fn, batch), "weight": batch["weight"]}

    with FLAGS[flag]():
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = abstract_train_state(Net(), optax.sgd(0.1), mesh, key, BATCH["x"], batch_axes=AXES)
        local = jax.eval_shape(lambda: metric.empty(AXES, mesh))
        assert jax.eval_shape(make_eval_step(observe, mesh, AXES, metric=metric), state, BATCH, local)


@cache
def numbers():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.uniform(size=leaf.shape), leaf.dtype) for name, leaf in BATCH.items()}


def test_train_step_with_finite_values_runs_under_debug_nans():
    mesh = mesh_of(2, 4)
    with jax.debug_nans(True):
        model, batch = Net({"uneven": "pad"}), shard_batch(numbers(), mesh, AXES)
        state = create_train_state(model, ALL_OF_OURS, mesh, jax.random.key(0), batch["x"], batch_axes=AXES)
        step = make_train_step(weighted_beside, mesh, AXES, has_aux=True, weighted=True, **ACCUMULATED)
        _, metrics = step(state, batch, jax.random.key(1))
        assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize("flag", FLAGS)
def test_guard_jax_config_flags_are_active_while_a_step_is_traced(flag):
    """Guard: each flag forbids, or changes, the loss of the test."""

    def loss(params, apply_fn, batch, rng):
        mixed = batch["weight"] * (batch["weight"] > 0) if flag == "strict" else batch["y"] * batch["y"][0]
        return mean(params, apply_fn, batch, rng) + jnp.mean(mixed)

    with FLAGS[flag]():
        if flag == "x64":
            assert jax.eval_shape(lambda: jnp.ones(2) * 1.0).dtype == jnp.float64
            return
        with pytest.raises((TypeError, ValueError), match="promotion"):
            trace(Case(loss=loss))

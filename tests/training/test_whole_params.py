"""Tests of warnings about replicated parameters: one warning, with the cause and the cure.

Cases: nothing is split; 5 % of the parameters' bytes are replicated; a wrapper gathers all layers at once.
"""

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from tests.support import AXES, KEPT, Block, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_train_state,
    create_train_state,
    init_sharded,
    make_train_step,
    nnx_model,
    plan_sharding,
    shard_module_params,
    shard_modules,
    unbox,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.trees import paths_of_replicated
from xlstm_jax.distributed.model_parallel import split_modules
from xlstm_jax.distributed.training import mistakes
from xlstm_jax.distributed.training.mistakes import ModelFacts, warn_of_replicated
from xlstm_jax.distributed.training.moments import CreatedState
from xlstm_jax.distributed.training.state import TrainState

KEY, BATCH = jax.random.key(0), data()
SCAN = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}


def create(model, mesh, **options):
    return create_train_state(model, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES, **options)


def traced(state, mesh, **options):
    return make_train_step(mean_loss, mesh, AXES, **options).trace(state, BATCH, KEY)


NOTHING = r"no parameter is split: each of the 8 devices of the mesh dp=2,fsdp=4 holds all 144 B of parameters"
CAUSES = {
    "default threshold": (
        shard_module_params(nn.Dense, "fsdp")(4),
        r"'kernel', 128 B \(32 values are fewer than min_weight_size=262144\).*Lower min_weight_size",
    ),
    "no wrapper": (nn.Dense(4), r"'kernel', 128 B \(no wrapped module owns it\).*Wrap the modules that own them"),
}


@pytest.mark.parametrize("model, says", CAUSES.values(), ids=CAUSES)
def test_create_train_state_warns_once_of_fully_replicated_parameters(model, says):
    mesh = mesh_of(2, 4)
    with pytest.warns(UserWarning, match=f"{NOTHING}.*{says}.*pass allow_replicated=True") as told:
        state = create(model, mesh)
    assert len(told) == 1 and told[0].filename == __file__
    create(model, mesh)  # warned before
    traced(state, mesh)


def test_create_train_state_warns_of_a_dim_not_divisible_by_the_axis():
    with pytest.warns(UserWarning, match=r"4 divides no free dim of shape \(7, 5\).*Pass uneven='pad'"):
        create_train_state(fsdp(nn.Dense)(5), optax.sgd(0.1), mesh_of(2, 4), KEY, jnp.ones((8, 7)), batch_axes=AXES)


@pytest.mark.parametrize("whole", ["initialised elsewhere", "lost boxes"])
def test_train_step_warns_of_replicated_parameters_without_boxes(whole):
    model, mesh = fsdp(nn.Dense)(4), mesh_of(2, 4)
    params = model.init(KEY, BATCH["x"])["params"] if whole[0] == "i" else unbox(create(model, mesh).params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    with pytest.warns(UserWarning, match=rf"{NOTHING}.*'kernel', 128 B.*boxes were lost.*create_train_state") as told:
        traced(state, mesh)
    assert len(told) == 1 and told[0].filename == __file__
    traced(state, mesh)


def test_no_replication_warning_for_split_parameters_a_single_device_or_allow_replicated():
    mesh = mesh_of(2, 4)
    for model, where, options in [
        (fsdp(nn.Dense)(4), mesh, {}),
        (fsdp(nn.Dense)(4), mesh_of(8, 1), {}),
        (nn.Dense(4), mesh_of(1, 1), {}),
        (nn.Dense(4), mesh, {"allow_replicated": True}),
    ]:
        traced(create(model, where, **options), where, **options)
    with pytest.warns(UserWarning, match=NOTHING):  # guard
        create(nn.Dense(4), mesh)


def test_replicated_paths_are_those_without_axes_and_none_on_a_single_device():
    params = {"split": Sharded(np.ones(4), ("fsdp",)), "whole": np.ones(4)}
    assert paths_of_replicated(params, mesh_of(2, 4)) == ["whole"]
    assert paths_of_replicated(params, mesh_of(1, 1)) == []


# ------------------------------------------------------------------------------------------- partly replicated models

TOKENS = jnp.zeros((8, 4), jnp.int32)


class GPT(nn.Module):
    """Typical GPT: attention with ``nn.DenseGeneral``, and a few parameters of the model class."""

    width: int = 64
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(512, self.width, name="embed")(tokens)
        x = x + self.param("positions", nn.initializers.normal(), (8, self.width))[: tokens.shape[1]]
        attention = nn.MultiHeadDotProductAttention
        x = x + (nn.remat(attention) if self.remat else attention)(4, name="attention")(nn.LayerNorm()(x))
        x = x + nn.Dense(self.width, name="down")(nn.gelu(nn.Dense(4 * self.width, name="up")(nn.LayerNorm()(x))))
        return nn.Dense(512, name="head")(x)


class NnxGPT(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(512, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.head = nnx.Linear(64, 512, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(x))


def tokens_loss(params, apply_fn, tokens, rng):
    return jnp.mean(apply_fn({"params": params}, tokens) ** 2)


def state_of(model, mesh=None, **options):
    axes = options.pop("axes", AXES)
    return abstract_train_state(model, optax.sgd(0.1), mesh or mesh_of(2, 4), KEY, TOKENS, batch_axes=axes, **options)


def state_by_hand(model):
    """Returns Flax's ``TrainState`` of parameters made by ``init_sharded``."""
    init = partial(init_sharded, model, mesh_of(2, 4), batch_axes=AXES)
    params = jax.eval_shape(init, KEY, TOKENS)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=KEPT)


def told_by(run):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in told if "not split" in str(warning.message)]


LINEN_GPT = shard_modules(GPT(remat=True), nn.Dense, "fsdp", 64)
PARTLY = {
    "linen": (LINEN_GPT, "nn.Dense, nn.Embed, nn.DenseGeneral"),
    "nnx": (shard_modules(nnx_model(NnxGPT), nnx.Linear, "fsdp", 64), "nnx.Linear, nnx.Embed, nnx.LinearGeneral"),
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["abstract_train_state", "by hand"])
@pytest.mark.parametrize("model, classes", PARTLY.values(), ids=PARTLY)
def test_train_state_or_step_warns_once_of_partly_replicated_parameters(model, classes, by_hand):
    step = make_train_step(tokens_loss, mesh_of(2, 4), AXES)
    make = state_by_hand if by_hand else state_of
    texts = told_by(lambda: step.trace(make(model), TOKENS, KEY))
    assert len(texts) == 1, f"{len(texts)} warnings: {texts}"
    text = texts[0]
    plan = plan_sharding(model, mesh_of(2, 4).shape, TOKENS)
    of_all = sum(row.parameters.total for row in plan.replicated) / plan.parameters.total
    assert text.startswith(f"{of_all:.0%} of the parameters' bytes are not split, "), text
    why = "" if by_hand else r" \(no wrapped module owns it\)"
    assert re.search(rf"8 devices of the mesh dp=2,fsdp=4 .* The largest: 'embed/embedding', 128 KiB{why}; ", text)
    assert f"shard_modules(model, ({classes}), axis_name). If it is meant, pass allow_replicated=True" in text
    again = make_train_step(tokens_loss, mesh_of(2, 4), AXES)
    assert not told_by(lambda: again.trace(make(model), TOKENS, KEY)), "the same parameters are warned of twice"


@pytest.mark.parametrize("share, warns", [(0.06, True), (0.5, True), (0.04, False)])
def test_replicated_parameters_warn_from_a_twentieth_of_the_bytes(share, warns, monkeypatch):
    monkeypatch.setitem(mistakes.FACTS, CreatedState, lambda context: ModelFacts({}, {}))
    size = 2**22
    arrays = {
        name: jax.ShapeDtypeStruct((round(size * of),), np.float32) for name, of in [("a", 1 - share), ("b", share)]
    }
    params = {"a": Sharded(arrays["a"], ("fsdp",)), "b": arrays["b"]}
    empty = dict.fromkeys(CreatedState._fields)
    state = CreatedState(**empty | {"params": params, "mesh": mesh_of(2, 4)})
    told = told_by(lambda: warn_of_replicated(state))
    assert len(told) == warns and all(text.startswith(f"{share:.0%} of the parameters' bytes") for text in told)


def test_replication_warning_suggests_a_lower_min_weight_size_for_small_leaves():
    [text] = told_by(lambda: state_of(shard_modules(GPT(), (nn.Dense, nn.DenseGeneral, nn.Embed), "fsdp", 2**14)))
    assert re.search(r"4096 values are fewer than min_weight_size=16384.* Lower min_weight_size of the wrapper", text)
    assert "shard_modules(model" not in text


def test_replication_warning_counts_frozen_leaves_but_no_tensor_parallel_leaves():
    frozen = {"trainable": lambda path: path.startswith("head")}
    assert told_by(lambda: state_of(shard_modules(GPT(), nn.Dense, "fsdp", 64), **frozen))
    split = {"attention/(query|key|value)|up": "column", "attention/out|down": "row", "embed|head": "vocabulary"}
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 4, "tp": 2})
    wrapped = shard_modules(GPT(), lambda path, module: path == "up", "fsdp", 64)
    assert told_by(lambda: state_of(wrapped, mesh, axes="fsdp"))  # guard
    assert not told_by(lambda: state_of(split_modules(wrapped, split), mesh, axes="fsdp"))


SILENT = {
    "the cure": ((nn.Dense, nn.DenseGeneral, nn.Embed), 64, (2, 4), {}),
    "it is meant": (nn.Dense, 64, (2, 4), {"allow_replicated": True}),
    "fsdp=1": (nn.Dense, 64, (8, 1), {}),
    "a toy": (nn.Dense, 8, (2, 4), {}),
    "little beside the rest": ((nn.Dense, nn.Embed), 512, (2, 4), {}),
}


@pytest.mark.parametrize("where, width, mesh, options", SILENT.values(), ids=SILENT)
def test_no_replication_warning_for_allowed_small_or_intended_replication(where, width, mesh, options):
    model = shard_modules(GPT(width), where, "fsdp", 64)
    if width == 512:  # 2 KiB of biases and scales
        model = shard_modules(model, nn.DenseGeneral, "fsdp", 1024)
    assert not told_by(lambda: state_of(model, mesh_of(*mesh), **options))


class Outer(nn.Module):
    scanned: type

    @nn.compact
    def __call__(self, x):
        x, _ = self.scanned(name="layers")(fsdp(nn.Dense)(16)(x), None)
        return nn.Dense(4)(x)


AT_ONCE = {
    "the scan is wrapped": partial(Outer, fsdp(nn.scan(Block, **SCAN))),
    "under remat": partial(Outer, fsdp(nn.remat(nn.scan(Block, **SCAN)))),
    "the model is wrapped": partial(fsdp(Outer), nn.scan(Block, **SCAN)),
}
ONE_BY_ONE = {
    "what is scanned is wrapped": partial(Outer, nn.scan(fsdp(Block), **SCAN)),
    "and remat": partial(Outer, nn.scan(nn.remat(fsdp(Block)), **SCAN)),
    "and the model": partial(fsdp(Outer), nn.scan(fsdp(Block), **SCAN)),
    "one layer over time": partial(
        Outer, fsdp(nn.scan(Block, variable_broadcast="params", split_rngs={"params": False}, length=3))
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", AT_ONCE.values(), ids=AT_ONCE)
def test_create_train_state_warns_of_a_wrapper_around_a_scan(make):
    says = r"'layers' scans over layers of Block within .* all layers at once.*nn\.scan\(shard_module_params\(Block"
    mesh = mesh_of(1, 8)
    with pytest.warns(UserWarning, match=says) as told:
        state = create(make(), mesh)
    assert len(told) == 1
    traced(state, mesh)  # warned before
    mistakes._warned.clear()
    with pytest.warns(UserWarning, match=says):
        traced(state, mesh)
    traced(create(make(), mesh_of(1, 1)), mesh_of(1, 1))


@pytest.mark.parametrize("make", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_scan_around_a_wrapper_gives_no_warning(make):
    with warnings.catch_warnings(record=True) as told:
        traced(create(make(), mesh_of(1, 8)), mesh_of(1, 8))
    assert not [warning for warning in told if re.search("at once", str(warning.message))]

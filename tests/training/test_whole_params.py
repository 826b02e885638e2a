"""Sharding that was asked for and does not happen is told: once, with the cause and the cure."""

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from tests.support import AXES, Block, data, fsdp, mean_loss, mesh_of
from xlstm_jax.distributed import create_train_state, make_train_step, shard_module_params, unbox
from xlstm_jax.distributed.training import mistakes
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
def test_a_state_that_is_whole_everywhere_is_told_once_with_cause_and_cure(model, says):
    mesh = mesh_of(2, 4)
    with pytest.warns(UserWarning, match=f"{NOTHING}.*{says}.*pass whole_ok=True") as told:
        state = create(model, mesh)
    assert len(told) == 1 and told[0].filename == __file__
    create(model, mesh)  # has been told
    traced(state, mesh)


def test_an_axis_that_does_not_divide_is_a_cause():
    with pytest.warns(UserWarning, match=r"4 divides no free dim of shape \(7, 5\).*Pass uneven='pad'"):
        create_train_state(fsdp(nn.Dense)(5), optax.sgd(0.1), mesh_of(2, 4), KEY, jnp.ones((8, 7)), batch_axes=AXES)


@pytest.mark.parametrize("whole", ["initialised elsewhere", "lost boxes"])
def test_a_step_tells_of_parameters_that_nobody_split(whole):
    model, mesh = fsdp(nn.Dense)(4), mesh_of(2, 4)
    params = model.init(KEY, BATCH["x"])["params"] if whole[0] == "i" else unbox(create(model, mesh).params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    with pytest.warns(UserWarning, match=rf"{NOTHING}.*'kernel', 128 B.*boxes were lost.*create_train_state") as told:
        traced(state, mesh)
    assert len(told) == 1
    traced(state, mesh)


def test_it_is_silent_where_parameters_are_split_or_one_device_has_all_or_the_user_says_so():
    mesh = mesh_of(2, 4)
    for model, where, options in [
        (fsdp(nn.Dense)(4), mesh, {}),
        (fsdp(nn.Dense)(4), mesh_of(8, 1), {}),
        (nn.Dense(4), mesh_of(1, 1), {}),
        (nn.Dense(4), mesh, {"whole_ok": True}),
    ]:
        traced(create(model, where, **options), where, **options)
    with pytest.warns(UserWarning, match=NOTHING):  # guard
        create(nn.Dense(4), mesh)


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
def test_a_wrapper_around_a_scan_is_told(make):
    says = r"'layers' scans over layers of Block within .* all layers at once.*nn\.scan\(shard_module_params\(Block"
    mesh = mesh_of(1, 8)
    with pytest.warns(UserWarning, match=says) as told:
        state = create(make(), mesh)
    assert len(told) == 1
    traced(state, mesh)  # has been told
    mistakes._warned.clear()
    with pytest.warns(UserWarning, match=says):
        traced(state, mesh)
    traced(create(make(), mesh_of(1, 1)), mesh_of(1, 1))


@pytest.mark.parametrize("make", ONE_BY_ONE.values(), ids=ONE_BY_ONE)
def test_a_scan_around_a_wrapper_is_fine(make):
    with warnings.catch_warnings(record=True) as told:
        traced(create(make(), mesh_of(1, 8)), mesh_of(1, 8))
    assert not [warning for warning in told if re.search("at once", str(warning.message))]

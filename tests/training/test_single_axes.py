"""Tests of reductions that name all axes of the batch, on meshes on which one of the axes has a single device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import AXES, assert_same_params, data, fsdp, mesh_of, on_mesh, plain
from xlstm_jax.distributed import check_step, create_train_state, make_eval_step, make_train_step, unbox
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.training import single_axes
from xlstm_jax.distributed.training.single_axes import with_single_axes

BATCH, KEY = data(), jax.random.key(0)
ONE_DEVICE_ALONG = [(1, 8), (8, 1)]


class Normed(nn.Module):
    """Two layers with statistics of the batch between them, in one unit each."""

    wrap: object = plain
    axes: object = None

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense)(16, name="up")(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5, axis_name=self.axes, name="norm")(x)
        return self.wrap(nn.Dense)(4, name="down")(nn.gelu(x, approximate=True))


def loss_fn(params, apply_fn, batch, collections):
    out, updated = apply_fn({"params": params, **collections}, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), updated


def trained_on_one_device(variables, steps):
    variables, losses = dict(variables), []
    for _ in range(steps):
        params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
        (loss, updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, Normed().apply, BATCH, stats)
        losses.append(loss)
        variables = {"params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), **updated}
    return variables, losses


def state_of(mesh):
    # A leaf that is split over both axes has an axis of size 1 in its box.
    model = Normed(lambda cls: fsdp(cls, axis_name=AXES, min_weight_size=16), AXES)
    return create_train_state(model, optax.sgd(0.1), mesh, KEY, BATCH["x"], batch_axes=AXES, allow_replicated=True)


@pytest.mark.parametrize("shape", ONE_DEVICE_ALONG, ids=str)
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_batch_norm_over_all_axes_of_the_batch_trains_where_an_axis_has_one_device(check_vma, shape):
    mesh = mesh_of(*shape)
    state = state_of(mesh)
    start = {"params": unbox(jax.device_get(state.params)), **jax.device_get(state.collections)}
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma, allow_replicated=True)
    want, losses = trained_on_one_device(start, 3)
    for loss in losses:
        state, metrics = step(state, BATCH)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_same_params(state.params, want["params"])
    assert_same_params(state.collections, {"batch_stats": want["batch_stats"]})


def test_guard_jax_refuses_the_batch_norm_without_the_casts(monkeypatch):
    monkeypatch.setattr(single_axes, "MIXED_AXES", re.compile("another text"))
    mesh = mesh_of(1, 8)
    with pytest.raises(ValueError, match="is equal along some of these axes"):
        make_train_step(loss_fn, mesh, AXES, allow_replicated=True).trace(state_of(mesh), BATCH)


def squares(params, apply_fn, batch, collections):
    """Returns the error of each row, divided by the mean error over all rows of the global batch."""
    out, _ = apply_fn({"params": params, **collections}, batch["x"], mutable=["batch_stats"])
    errors = jnp.mean((out - batch["y"]) ** 2, -1)
    return {"values": errors / jax.lax.pmean(jnp.mean(errors), AXES), "weight": batch["weight"]}


@pytest.mark.parametrize("shape", ONE_DEVICE_ALONG, ids=str)
def test_eval_step_with_a_mean_over_all_axes_matches_a_single_device(shape):
    mesh, metric = mesh_of(*shape), WeightedMean()
    state = state_of(mesh)
    local = make_eval_step(squares, mesh, AXES, metric=metric)(state, BATCH, metric.empty(AXES, mesh))
    variables = {"params": unbox(state.params), **state.collections}
    out, _ = Normed().apply(variables, BATCH["x"], mutable=["batch_stats"])
    errors = jnp.mean((out - BATCH["y"]) ** 2, -1)
    want = np.average(errors / errors.mean(), weights=BATCH["weight"])
    np.testing.assert_allclose(make_log_step(metric, mesh, AXES)(local)[0], want, rtol=1e-5)


def test_check_step_accepts_a_batch_norm_over_an_axis_of_size_one():
    mesh = mesh_of(1, 8)
    state, step = state_of(mesh), make_train_step(loss_fn, mesh, AXES, allow_replicated=True)
    assert check_step(step, state, BATCH).verdict == "right"


def test_with_single_axes_calls_once_unless_jax_refuses_a_reduction(monkeypatch):
    mesh, calls = mesh_of(1, 8), []

    def loss(x, over):
        calls.append(over)
        return jax.lax.pmean(jnp.mean(x), over)

    def run(over):
        fn = with_single_axes(lambda x: loss(x, over), AXES)
        return on_mesh(lambda x: jax.lax.pmean(fn(x), AXES[0]), mesh, True, jax.P("fsdp"), jax.P())(jnp.arange(8.0))

    assert run("fsdp") == 3.5 and len(calls) == 1
    assert run(AXES) == 3.5 and len(calls) == 3
    monkeypatch.setattr(jax.lax, "pmean", lambda x, axes: int("another error"))
    with pytest.raises(ValueError, match="another error"):
        run("fsdp")
    assert len(calls) == 4

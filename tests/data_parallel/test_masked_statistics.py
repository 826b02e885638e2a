"""Tests of ``nn.BatchNorm`` under a mask: the statistics are those of the unmasked rows of all devices.

Devices have 1, 1, 2, 2, 2, 2, 0 and 0 unmasked rows; the mean of the means of devices is NaN. Other normalisations, of
which Flax would compute this mean, are refused.
"""

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.support import AXES, assert_same_params, fsdp, mesh_of, normal, on_mesh, plain
from xlstm_jax.distributed import accumulate_gradients, create_train_state, make_eval_step, make_train_step, unbox
from xlstm_jax.distributed import value_and_grad as grad_on_mesh
from xlstm_jax.distributed.data_parallel.extensions.masked_statistics import MaskedStatistics
from xlstm_jax.distributed.metrics import WeightedMean, make_log_step
from xlstm_jax.distributed.training.evaluation import _Evaluation

KEY = jax.random.key(0)
ROWS = np.arange(16)
MASK = (ROWS >= 1) & (ROWS != 3) & (ROWS < 12)
X = normal(1, (16, 8)) + np.float32(ROWS[:, None] / 4)
BATCH = {"x": X, "mask": MASK}


class Own(nn.BatchNorm):
    """Subclass with another ``__call__``, whose flag is an argument of the parent's."""

    @nn.compact
    def __call__(self, x, mask, train):
        return super().__call__(x, not train, mask=mask)


class Block(nn.Module):
    axis_name: Any

    @nn.compact
    def __call__(self, x, mask, train):
        x = nn.Dense(8)(x)
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.5, axis_name=self.axis_name)
        return nn.gelu(norm(x, mask=mask[:, None]))


class Net(nn.Module):
    """Statistics in a wrapped module and outside of it, by both formulas of the variance."""

    wrap: Any = plain
    axis_name: Any = None

    @nn.compact
    def __call__(self, x, mask, train=True):
        x = self.wrap(Block)(self.axis_name)(x, mask, train)
        own = Own(momentum=0.5, axis_name=self.axis_name, use_fast_variance=False)
        return nn.Dense(2)(jnp.sin(own(x, mask[:, None], train)))


def loss_fn(params, apply_fn, batch, rng, collections):
    del rng
    out, updated = apply_fn({"params": params, **collections}, batch["x"], batch["mask"], mutable=["batch_stats"])
    return (jnp.sum(out**2 * batch["mask"][:, None]), jnp.sum(batch["mask"], dtype=jnp.float32)), updated


@cache
def of_one_device():
    """Returns (initial variables, loss, gradients, updated collections) of the plain model on one device."""
    variables = Net().init(KEY, X, MASK)

    def loss(params):
        (total, weight), updated = loss_fn(params, Net().apply, BATCH, None, {"batch_stats": variables["batch_stats"]})
        return total / weight, updated

    (value, updated), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    old, new = (tree["batch_stats"]["Own_0"]["var"] for tree in (variables, updated))
    assert np.abs(old - new).max() > 0.1  # guards: statistics change,
    unlike = np.mean(X, 0), np.mean(X, 0, where=MASK[:, None])
    assert np.abs(unlike[0] - unlike[1]).max() > 0.1  # and the masked rows are unlike the others
    return variables, value, grads, updated


def state_on_mesh():
    return create_train_state(Net(fsdp(), AXES), optax.sgd(1.0), mesh_of(2, 4), KEY, X, MASK, batch_axes=AXES)


@pytest.mark.parametrize("check_vma", [True, False])
def test_step_with_masked_batch_norm_equals_one_device(check_vma):
    variables, loss, grads, updated = of_one_device()
    step = make_train_step(loss_fn, mesh_of(2, 4), AXES, weighted=True, check_vma=check_vma)
    state, metrics = step(state_on_mesh(), BATCH, KEY)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert_same_params(state.collections, updated)
    assert_same_params(unbox(state.params), jax.tree.map(lambda p, g: p - g, variables["params"], grads))


def test_masked_batch_norm_under_vmap_has_the_statistics_of_all_unmasked_rows():
    """The new running averages are halfway between the old ones and these statistics, which normalise the rows."""
    norm = nn.BatchNorm(False, momentum=0.5, axis_name="devices", use_scale=False, use_bias=False)
    old = {"mean": np.float32([0, 1, 2]), "var": np.float32([1, 2, 3])}
    x, mask = normal(1, (4, 2, 3)), np.array([[1, 1], [0, 0], [1, 0], [0, 1]], bool)[..., None]

    def on_device(x, mask):
        with MaskedStatistics().around_models():
            return norm.apply({"batch_stats": old}, x, mask=mask, mutable=["batch_stats"])

    out, updated = jax.jit(jax.vmap(on_device, axis_name="devices"))(x, mask)
    rows = x[mask[..., 0]]
    assert not np.allclose(rows.mean(0), x.reshape(-1, 3).mean(0), atol=0.1)  # guard
    np.testing.assert_allclose(out, (x - rows.mean(0)) / np.sqrt(rows.var(0) + norm.epsilon), rtol=1e-4, atol=1e-5)
    for name, new in (("mean", rows.mean(0)), ("var", rows.var(0))):
        np.testing.assert_allclose(updated["batch_stats"][name], [(old[name] + new) / 2] * 4, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_custom_step_with_masked_batch_norm_equals_one_device(check_vma):
    """``value_and_grad`` and ``accumulate_gradients`` of a model without wrapped modules."""
    variables, loss, grads, updated = of_one_device()
    model = Net(plain, AXES)

    def on_device(params, kept, batch):
        def local(params):
            return loss_fn(params, model.apply, batch, None, kept)

        def of_minibatch(params, batch, rng, kept):
            return loss_fn(params, model.apply, batch, rng, kept)

        first = grad_on_mesh(local, AXES, has_aux=True, weighted=True)(params)
        options = {"num_minibatches": 1, "weighted": True, "collections": kept}
        return first, accumulate_gradients(of_minibatch, params, batch, None, AXES, **options)

    run = on_mesh(on_device, mesh_of(2, 4), check_vma, (P(), P(), P(AXES)), P())
    kept = {"batch_stats": variables["batch_stats"]}
    ((value, aux), of_value), accumulated = run(variables["params"], kept, BATCH)
    for got in (value, of_value, aux), accumulated:
        np.testing.assert_allclose(got[0], loss, rtol=1e-5)
        assert_same_params(got[1], grads)
        assert_same_params(got[2], updated)


def test_statistics_of_losses_and_evaluations_are_means_over_the_unmasked_rows_of_all_devices():
    """The unmasked rows 1, 2 and 3 have the mean 2; the mean of the means of both devices is 2.25."""
    norm = nn.BatchNorm(False, axis_name=AXES, momentum=0.0, use_bias=False, use_scale=False)
    kept = {"batch_stats": {"mean": np.zeros(1, np.float32), "var": np.ones(1, np.float32)}}

    def mean_of(batch):
        _, updated = norm.apply(kept, batch["x"], mask=batch["mask"], mutable=["batch_stats"])
        return updated["batch_stats"]["mean"]

    def eval_fn(params, apply_fn, batch):
        return {"values": mean_of(batch)}

    evaluation = SimpleNamespace(layout=SimpleNamespace(axes=AXES), eval_fn=eval_fn, is_watched=False)
    evaluation.metric = SimpleNamespace(update=lambda local, values: values)

    def on_device(batch):
        (_, of_loss), _ = grad_on_mesh(lambda w: (w, mean_of(batch)), AXES, has_aux=True)(jnp.float32(1))
        trees = {"params": {}, "collections": {}, "extra_trees": {}}
        return of_loss, _Evaluation._observed(evaluation, None, trees, batch, None)

    batch = {"x": np.float32([[1], [2], [3], [9]]), "mask": np.array([[True], [True], [True], [False]])}
    found = on_mesh(on_device, mesh_of(1, 2), False, P(AXES), P())(batch)
    np.testing.assert_allclose(found, [[2], [2]], rtol=1e-6)


def test_evaluation_with_masked_batch_norm_equals_one_device():
    """Both by the statistics of the rows and by the running averages."""

    def eval_fn(params, apply_fn, batch, collections):
        variables, args = {"params": params, **collections}, (batch["x"], batch["mask"])
        of_rows, _ = apply_fn(variables, *args, mutable=["batch_stats"])
        values = jnp.sum(of_rows + 10 * apply_fn(variables, *args, False), -1)
        return {"values": values, "weight": batch["mask"].astype(jnp.float32)}

    variables, metric, mesh = Net().init(KEY, X, MASK), WeightedMean(), mesh_of(2, 4)
    seen = eval_fn(variables["params"], Net().apply, BATCH, {"batch_stats": variables["batch_stats"]})
    step = make_eval_step(eval_fn, mesh, AXES, metric=metric)
    mean, _ = make_log_step(metric, mesh, AXES)(step(state_on_mesh(), BATCH, metric.empty(AXES, mesh)))
    np.testing.assert_allclose(mean, np.mean(seen["values"], where=MASK), rtol=1e-5)


class OwnNorm(nn.LayerNorm):
    """Subclass with another ``__call__``, which calls the parent's."""

    @nn.compact
    def __call__(self, x, *, mask):
        return super().__call__(x, mask=mask)


class Normed(nn.Module):
    """A normalisation of rows [b, t, d], over devices."""

    norm: Any
    axis_name: Any

    @nn.compact
    def __call__(self, x, mask):
        return self.norm(axis_name=self.axis_name, name="norm")(x, mask=mask)


NORMS = [nn.LayerNorm, nn.RMSNorm, partial(nn.GroupNorm, num_groups=2), nn.InstanceNorm, OwnNorm]


@pytest.mark.parametrize("norm", NORMS, ids=["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "OwnNorm"])
def test_other_normalisation_of_several_devices_under_a_mask_is_refused(norm):
    x = jnp.ones((16, 3, 8))
    params = Normed(norm, None).init(KEY, x, x > 0)

    def traced(axis_name, mesh, has_mask=True):
        def loss(params, x):
            return jnp.mean(Normed(norm, axis_name).apply(params, x, x > 0 if has_mask else None) ** 2)

        return jax.eval_shape(on_mesh(grad_on_mesh(loss, AXES), mesh, True, (P(), P(AXES)), P()), params, x)

    message = r"nn.\w+Norm at 'norm' has axis_name=\('dp', 'fsdp'\) and is called with a mask: .* of these 8 devices"
    with pytest.raises(ValueError, match=message):
        traced(AXES, mesh_of(2, 4))
    # Guards: these are right.
    traced(None, mesh_of(2, 4))
    traced(AXES, mesh_of(2, 4), has_mask=False)
    traced(AXES, mesh_of(1, 1))

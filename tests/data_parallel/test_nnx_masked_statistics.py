"""Tests of ``nnx.BatchNorm`` under a mask, in a step: the statistics are those of the unmasked rows of all devices.

``nnx_value_and_grad`` is tested in ``tests/training/test_nnx_gradients.py``. Other normalisations are refused.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.support import AXES, assert_same_params, mesh_of, normal, on_mesh
from xlstm_jax.distributed import create_train_state, make_train_step, nnx_model, shard_modules, unbox, value_and_grad
from xlstm_jax.distributed.data_parallel.extensions.nnx_masked_statistics import NnxMaskedStatistics

KEY = jax.random.key(0)
ROWS = np.arange(16)
MASK = (ROWS >= 1) & (ROWS != 3) & (ROWS < 12)
X = normal(1, (16, 8)) + np.float32(ROWS[:, None] / 4)
BATCH = {"x": X, "mask": MASK}


class Own(nnx.BatchNorm):
    """Subclass with another ``__call__``, which calls the parent's."""

    def __call__(self, x, mask):
        return super().__call__(x, False, mask=mask)


class Net(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.norm = nnx.BatchNorm(8, momentum=0.5, axis_name=axis_name, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.own = Own(8, momentum=0.5, axis_name=axis_name, use_fast_variance=False, rngs=rngs)

    def __call__(self, x, mask):
        return self.own(jnp.sin(self.dense(self.norm(x, mask=mask[:, None]))), mask[:, None])


def loss_fn(params, apply_fn, batch, rng, collections):
    del rng
    out, updated = apply_fn({"params": params, **collections}, batch["x"], batch["mask"], mutable=["batch_stats"])
    return (jnp.sum(jnp.sin(out) ** 2 * batch["mask"][:, None]), jnp.sum(batch["mask"], dtype=jnp.float32)), updated


@pytest.mark.parametrize("check_vma", [True, False])
def test_step_with_masked_batch_norm_equals_one_device(check_vma):
    """Of a BatchNorm that gathers its scale, and of a subclass; devices have 0 to 2 unmasked rows."""
    plain = nnx_model(lambda rngs: Net(None, rngs))
    variables = plain.init(KEY, X, MASK)

    def loss(params):
        (total, weight), updated = loss_fn(params, plain.apply, BATCH, None, {"batch_stats": variables["batch_stats"]})
        return total / weight, updated

    (value, updated), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    where = lambda path, module: path in ("norm", "dense")  # noqa: E731
    model = shard_modules(nnx_model(lambda rngs: Net(AXES, rngs)), where, "fsdp", min_weight_size=8)
    state = create_train_state(model, optax.sgd(1.0), mesh_of(2, 4), KEY, X, MASK, batch_axes=AXES)
    assert state.params["norm"]["scale"].names == ("fsdp",)  # guard
    step = make_train_step(loss_fn, mesh_of(2, 4), AXES, weighted=True, check_vma=check_vma)
    state, metrics = step(state, BATCH, KEY)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert_same_params(state.collections, updated)
    assert_same_params(unbox(state.params), jax.tree.map(lambda p, g: p - g, variables["params"], grads))
    assert np.abs(updated["batch_stats"]["own"]["var"] - variables["batch_stats"]["own"]["var"]).max() > 0.1  # guard


@pytest.mark.parametrize("cls", [nnx.BatchNorm, Own])
def test_masked_batch_norm_under_vmap_has_the_statistics_of_all_unmasked_rows(cls):
    """The new running averages are halfway between zeros and ones, the old ones, and these statistics."""
    x, mask = normal(1, (4, 2, 3)), np.array([[1, 1], [0, 0], [1, 0], [0, 1]], bool)[..., None]

    def on_device(x, mask):
        norm = cls(3, momentum=0.5, axis_name="devices", use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
        NnxMaskedStatistics().change_module(norm)
        out = norm(x, mask) if cls is Own else norm(x, mask=mask)
        return out, norm.mean[...], norm.var[...]

    out, mean, var = jax.jit(jax.vmap(on_device, axis_name="devices"))(x, mask)
    rows = x[mask[..., 0]]
    assert not np.allclose(rows.mean(0), x.reshape(-1, 3).mean(0), atol=0.1)  # guard
    np.testing.assert_allclose(out, (x - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean, [rows.mean(0) / 2] * 4, rtol=1e-5)
    np.testing.assert_allclose(var, [(1 + rows.var(0)) / 2] * 4, rtol=1e-5)


class OwnNorm(nnx.RMSNorm):
    """Subclass with another ``__call__``, which calls the parent's."""

    def __call__(self, x, *, mask):
        return super().__call__(x, mask)


NORMS = [nnx.LayerNorm, nnx.RMSNorm, partial(nnx.GroupNorm, num_groups=2), nnx.InstanceNorm, OwnNorm]


@pytest.mark.parametrize("norm", NORMS, ids=["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "OwnNorm"])
def test_other_normalisation_of_several_devices_under_a_mask_is_refused(norm):
    x = jnp.ones((16, 3, 8))

    def traced(axis_name, mesh, has_mask=True):
        model = nnx_model(lambda rngs: norm(8, axis_name=axis_name, rngs=rngs))
        params = nnx_model(lambda rngs: norm(8, rngs=rngs)).init(KEY)

        def loss(params, x):
            return jnp.mean(model.apply(params, x, mask=x > 0 if has_mask else None) ** 2)

        return jax.eval_shape(on_mesh(value_and_grad(loss, AXES), mesh, True, (P(), P(AXES)), P()), params, x)

    message = r"nnx.\w+Norm has axis_name=\('dp', 'fsdp'\) and is called with a mask: .* of these 8 devices"
    with pytest.raises(ValueError, match=message):
        traced(AXES, mesh_of(2, 4))
    # Guards: these are right.
    traced(None, mesh_of(2, 4))
    traced(AXES, mesh_of(2, 4), has_mask=False)
    traced(AXES, mesh_of(1, 1))

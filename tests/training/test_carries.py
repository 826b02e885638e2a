"""Tests of carries between minibatches: a user-defined carry, a removed carry, and the loop over minibatches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tests.house.test_layers import MODULES, imported
from tests.support import AXES, fsdp, mesh_of, on_mesh
from xlstm_jax.distributed import accumulate_gradients, create_train_state, make_train_step
from xlstm_jax.distributed.data_parallel.wire.running_loss import OVERWRITTEN
from xlstm_jax.distributed.metrics import WeightedMean
from xlstm_jax.distributed.training.accumulation import MinibatchResult, mean_over
from xlstm_jax.distributed.training.carries import CARRIES
from xlstm_jax.distributed.training.carries.carry import Carry

X = jnp.arange(32.0)


class Counted(Carry):
    """Carry with the number of earlier minibatches, which the loss function reads."""

    @classmethod
    def from_inputs(cls, inputs):
        return cls() if "count" in inputs.collections else None

    def collection_names(self):
        return ("count",)

    def start(self):
        return jnp.int32(0)

    def read(self, state):
        return {"count": state}

    def next(self, state, loss, args, local):
        return state + 1

    def finish(self, state, result):
        return result._replace(collections={**result.collections, "count": state})


def counting_loss(w, x, rng, collections):
    return w * jnp.mean(x) * (1 + collections["count"]), {}


@pytest.mark.parametrize("check_vma", [True, False])
def test_custom_carry_in_the_registry_works_in_accumulate_gradients(check_vma, monkeypatch):
    def step(w, x):
        return accumulate_gradients(counting_loss, w, x, None, AXES, 2, collections={"count": jnp.int32(0)})

    # Reference on one device: each of 8 devices has two minibatches of two rows.
    parts = np.asarray(X).reshape(8, 2, 2).mean((0, 2))
    want = np.mean(parts * (1 + np.arange(2)))
    run = on_mesh(step, mesh_of(2, 4), check_vma, (P(), P(AXES)), P())
    monkeypatch.setattr("xlstm_jax.distributed.training.carries.CARRIES", [Counted, *CARRIES])
    loss, grad, collections = run(jnp.float32(3), X)
    np.testing.assert_allclose((loss, grad), (3 * want, want), rtol=1e-6)
    assert int(collections["count"]) == 2
    assert not np.isclose(want, parts.mean())  # guard: the count is in the loss


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=AXES)(fsdp(nn.Dense)(16)(x))
        return nn.Dense(1)(x)[:, 0]


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fsdp(nn.Dense)(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)(x)[:, 0]


def kept_loss(params, apply_fn, x, rng, collections):
    out, updated = apply_fn({"params": params, **collections}, x, mutable=list(collections))
    return jnp.mean(out**2), updated


def observed_loss(params, apply_fn, x, rng):
    out = apply_fn({"params": params}, x)[:, 0]
    return jnp.mean(out**2), {"values": out, "weight": jnp.ones_like(out)}


USES = {  # carry: (model, loss, options)
    "KeptCollections": (Normalised, kept_loss, {}),
    "OverwrittenScales": (Scaled, kept_loss, {}),
    "MetricState": (lambda: fsdp(nn.Dense)(16), observed_loss, {"metric": WeightedMean()}),
}


def lowered(name):
    make_model, loss_fn, options = USES[name]
    mesh, x = mesh_of(2, 4), jnp.ones((32, 16))
    state = create_train_state(make_model(), optax.sgd(0.1), mesh, jax.random.key(0), x, batch_axes=AXES)
    last = [options["metric"].empty(AXES, mesh)] if options else []
    step = make_train_step(loss_fn, mesh, AXES, 2, allow_replicated=True, **options)
    return step.lower(state, x, jax.random.key(1), *last).as_text(), state


@pytest.mark.parametrize("removed", USES)
def test_removing_a_carry_leaves_the_programs_of_other_carries_unchanged(removed, monkeypatch):
    others = [name for name in USES if name != removed]
    before = [lowered(name)[0] for name in others]
    kinds = [kind for kind in CARRIES if kind.__name__ != removed]
    assert len(kinds) == len(CARRIES) - 1 == len(others)  # guard: CARRIES contained the removed carry
    monkeypatch.setattr("xlstm_jax.distributed.training.carries.CARRIES", kinds)
    # Without its carry, scales would pass unchanged, as an ordinary collection.
    if removed != "OverwrittenScales":
        with pytest.raises(AssertionError, match="no carry takes the"):
            lowered(removed)
    assert [lowered(name)[0] for name in others] == before


def test_guard_models_of_carry_cases_have_the_intended_collections():
    """Guard of the test above: the models have the collections of their cases."""
    assert set(lowered("KeptCollections")[1].collections) == {"batch_stats"}
    assert set(lowered("OverwrittenScales")[1].collections) == {OVERWRITTEN}


@pytest.mark.parametrize("kind", CARRIES, ids=lambda kind: kind.__name__)
def test_carry_modules_are_imported_by_the_registry_only(kind):
    importers = [name for name in MODULES if kind.__module__ in imported(name)]
    assert importers == ["xlstm_jax.distributed.training.carries"]


@pytest.mark.parametrize("weights", [(1, 2, 3), (0, 2, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_mean_over_averages_by_weight_and_passes_carries_on(weights):
    values, given = np.arange(1.0, 4, dtype=np.float32), jnp.asarray(weights, jnp.float32)

    def on_minibatch(index, carry):
        value = jnp.asarray(values)[index]
        return MinibatchResult({"x": value.astype(jnp.bfloat16)}, [value], given[index], carry * 2 + index, value)

    found = jax.jit(lambda: mean_over(on_minibatch, 3, jnp.int32(1)))()
    want = np.average(values, weights=weights) if any(weights) else 0
    np.testing.assert_allclose(found.grads[0], want, rtol=1e-6)
    np.testing.assert_allclose(found.values["x"], want, rtol=1e-2)
    assert found.values["x"].dtype == jnp.bfloat16
    assert int(found.carries) == ((1 * 2 + 0) * 2 + 1) * 2 + 2
    np.testing.assert_array_equal(found.stacked, values)

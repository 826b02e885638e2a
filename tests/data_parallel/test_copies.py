"""Tests of a user-defined reduction over copies: one device of each group sends the gradient for all devices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.support import AXES, assert_same_params, data, fsdp, mean_loss, mesh_of, on_mesh, plain, train_on_one_device
from xlstm_jax.distributed import check_step, create_train_state, make_train_step, unbox
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.distributed.training.gradients import varying_leaves

BATCH, TX = data(), optax.sgd(0.1)


@dataclass(frozen=True)
class Rotating(Copies):
    """Sums in rounds: each round passes the terms on to the next device along an axis."""

    scale: float = 1.0  # other than 1: a wrong mean

    def mean(self, grad, axes):
        for axis in axes:
            count = collectives.axis_size((axis,))
            term = total = grad / count
            for _ in range(count - 1):
                term = jax.lax.ppermute(term, axis, [(i, (i + 1) % count) for i in range(count)])
                total = total + term
            grad = total
        return self.scale * grad


class Two(nn.Module):
    wrap: object = staticmethod(plain)

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4)(nn.tanh(self.wrap(nn.Dense)(24)(x)))


def state_of(copies, mesh):
    model = Two(fsdp(replicas=copies))
    return create_train_state(model, TX, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_train_step_averages_gradients_with_a_custom_replicas_kind(scale):
    mesh = mesh_of(2, 4)
    state = state_of(Rotating("dp", scale), mesh)
    kinds = {leaf_of(leaf).communication.replicas for _, leaf in leaves_with_path(state.params) if leaf_of(leaf).axes}
    assert kinds == {Rotating("dp", scale)}
    params = jax.device_get(unbox(state.params))
    step = make_train_step(mean_loss, mesh, AXES, check_vma=False)
    text = step.lower(state, BATCH, jax.random.key(0)).as_text()
    assert "collective_permute" in text  # guard: the kind is used
    for _ in range(2):
        state, _ = step(state, BATCH, jax.random.key(0))
    want, _, _ = train_on_one_device(Two(), TX, params, mean_loss, BATCH, steps=2)
    if scale == 1:
        assert_same_params(state.params, want)
    else:
        with pytest.raises(AssertionError, match="off by"):  # guard: the mean matters
            assert_same_params(state.params, want)


def test_check_step_fails_for_a_wrong_mean_over_replicas():
    mesh = mesh_of(2, 4)
    step = make_train_step(mean_loss, mesh, AXES, check_vma=False)
    right, wrong = (
        check_step(step, state_of(Rotating("dp", scale), mesh), BATCH, jax.random.key(0)) for scale in (1.0, 0.5)
    )
    assert right.ok and not wrong.ok


def test_copies_without_removes_axes_and_returns_none_if_no_axis_is_left():
    assert Rotating(("dp", "tp"), 2.0).without(("tp",)) == Rotating(("dp",), 2.0)
    assert Rotating("dp").without(("dp",)) is None


def test_leaf_with_copies_stays_equal_by_type_along_the_axis_of_its_copies_beside_other_leaves():
    """The gather casts the leaf over the other axis: its gradient is then averaged by ``mean``, not summed by JAX."""
    copied = Sharded(jnp.ones(8), ("fsdp",), communication=Communication(replicas=Copies("dp")))
    split = Sharded(jnp.ones(8), ("fsdp",))
    types = []

    def run(x):
        leaves = varying_leaves([copied.replace(value=x), split.replace(value=x), jnp.ones(2)], AXES)
        types.extend(collectives.varying_axes(leaf_of(leaf).value) for leaf in leaves)
        return x

    jax.eval_shape(on_mesh(run, mesh_of(2, 4), True, jax.P("fsdp"), jax.P("fsdp")), jnp.ones(8))
    assert types == [{"fsdp"}, {"dp", "fsdp"}, {"dp", "fsdp"}]


def test_copies_mean_averages_in_the_dtype_of_the_gradient():
    def mean(x):
        return Copies("dp").mean(x, ("dp",))

    x = jnp.arange(16.0).reshape(2, 8)
    run = jax.shard_map(mean, mesh=mesh_of(2, 4), in_specs=jax.P("dp"), out_specs=jax.P(), check_vma=False)
    np.testing.assert_array_equal(run(x), x.mean(axis=0, keepdims=True))

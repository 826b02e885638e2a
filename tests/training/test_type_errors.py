"""Tests of JAX's type errors under ``check_vma=True``: the text names the cause and a step that works."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from tests.mistaken_models import OfRow, Vmapped, with_statistics
from tests.support import AXES, mesh_of
from xlstm_jax.distributed import abstract_train_state, make_train_step

X = jnp.ones((16, 3, 4))


def trace(model, loss, mesh=None, **options):
    mesh = mesh or mesh_of(2, 4)
    state = abstract_train_state(
        model, optax.sgd(0.1), mesh, jax.random.key(0), X, batch_axes=AXES, allow_replicated=True
    )
    make_train_step(loss, mesh, AXES, allow_replicated=True, **options).trace(state, X, jax.random.key(1))


def of_dense(change):
    """Returns a loss of one layer with ``change`` applied to the output."""
    return lambda params, apply_fn, batch, rng: jnp.mean(change(apply_fn({"params": params}, batch)) ** 2)


@pytest.mark.parametrize(
    "axes, says",
    [
        (("v", *AXES), r"jax.lax.psum over .* reduces over 'v', as jax.vmap or nn.vmap.*[Pp]ass check_vma=False"),
        (("v",), r"an axis that the mesh does not have, as jax.vmap.*Pass check_vma=False"),
    ],
    ids=["with axes of the batch", "alone"],
)
def test_train_step_raises_for_a_psum_over_a_vmapped_axis_with_a_cure(axes, says):
    with pytest.raises(ValueError, match=says + ".*also names the axes of the batch"):
        trace(Vmapped(axes), with_statistics)
    if axes == ("v",):  # then statistics are of local rows
        with pytest.raises(ValueError, match=r"'batch_stats/.*would differ .*axis_name=\('dp', 'fsdp'\)"):
            trace(Vmapped(axes), with_statistics, check_vma=False)
        axes = ("v", *AXES)
    trace(Vmapped(axes), with_statistics, check_vma=False)


def test_train_step_raises_for_batch_norm_over_a_mesh_axis_without_batch_rows():
    """BatchNorm over a mesh axis that does not split the batch raises an error with the cure."""
    mesh, model = jax.sharding.AbstractMesh((2, 2, 2), (*AXES, "tp")), OfRow((*AXES, "tp"))
    with pytest.raises(ValueError, match=r"'tp'.* is equal along some of these axes.*for a BatchNorm, the axes"):
        trace(model, with_statistics, mesh)
    trace(model, with_statistics, mesh, check_vma=False)


def test_error_without_jax_auto_pcast_names_the_flag_and_not_gelu():
    jax.config.update("jax_auto_pcast", False)
    try:
        with pytest.raises(ValueError, match=r"mixes types, and jax_auto_pcast is False") as raised:
            trace(nn.Dense(8), of_dense(nn.relu))
        trace(nn.Dense(8), of_dense(nn.relu), check_vma=False)
    finally:
        jax.config.update("jax_auto_pcast", True)
    assert "gelu" not in str(raised.value)


def test_error_for_mixed_types_in_cond_under_vmap_does_not_mention_gelu():
    def by_row(x):
        row = lambda row: jax.lax.cond(row.sum() > 0, lambda a: a + 1, lambda a: a, 1.0)  # noqa: E731
        return jax.vmap(row)(x)

    with pytest.raises(ValueError, match=r"mixes types in the primitive .* Pass check_vma=False") as raised:
        trace(nn.Dense(8), of_dense(by_row))
    assert "gelu" not in str(raised.value)
    trace(nn.Dense(8), of_dense(by_row), check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
def test_train_step_raises_for_a_constrained_activation_with_a_cure(check_vma):
    def constrained(x, is_manual=True):
        manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
        return jax.lax.with_sharding_constraint(x, jax.P(AXES)) if manual == is_manual else x

    with pytest.raises(ValueError, match=r"constrains the sharding of an activation .*P\(.*if not .*manual_axes"):
        trace(nn.Dense(8), of_dense(constrained), check_vma=check_vma)
    trace(nn.Dense(8), of_dense(lambda x: constrained(x, False)), check_vma=check_vma)  # the cure


def test_train_step_raises_for_cond_branches_of_two_types_with_a_cure():
    def one_constant(x):
        return jax.lax.cond(jax.lax.psum(x.sum(), AXES) > 0, lambda: x.sum(), lambda: 0.0)

    with pytest.raises(TypeError, match=r"a branch of this model .* Pass check_vma=False.*pcast\("):
        trace(nn.Dense(8), of_dense(one_constant))
    trace(nn.Dense(8), of_dense(one_constant), check_vma=False)

"""Tests of ``with_leaf_norms``: norms of each leaf's gradient, parameter and update equal those of a single device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from tests.support import AXES, fsdp, mesh_of, on_mesh, plain
from xlstm_jax.distributed import create_train_state, make_train_step, partition_specs, shard_modules, unbox
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.optimizers import leaf_norms, with_leaf_norms
from xlstm_jax.distributed.optimizers.leaf_norms import _norms

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05))
KEY = jax.random.key(0)


class Mlp(nn.Module):
    wrap: object = plain

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(self.wrap(nn.Dense)(24, name="in")(x))
        x = nn.gelu(nn.Dense(12, name="middle")(x))  # replicated, between split leaves
        return self.wrap(nn.Dense)(4, name="out")(x)


def loss_fn(params, apply_fn, batch, rng):
    del rng
    return jnp.mean((apply_fn({"params": params}, batch) - 1) ** 2)


def batch_of(step):
    return np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)


def norms_of_single_device(steps, tx=TX):
    """Returns the norms of the last step, in float64 by NumPy, of a training without the library."""
    model = Mlp()
    params = model.init(KEY, batch_of(0))["params"]
    state = tx.init(params)
    for step in range(steps):
        before = params
        grads = jax.grad(lambda params, x: jnp.mean((model.apply({"params": params}, x) - 1) ** 2))(
            params, batch_of(step)
        )
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    trees = {"gradients": grads, "parameters": before, "updates": updates}
    return {
        kind: {
            "/".join(key.key for key in path): np.sqrt(np.sum(np.square(np.asarray(leaf, np.float64))))
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        for kind, tree in trees.items()
    }


def assert_same_norms(found, expected):
    assert found.keys() == expected.keys()
    for kind, norms in expected.items():
        assert found[kind].keys() == norms.keys()
        for path, norm in norms.items():
            np.testing.assert_allclose(found[kind][path], norm, rtol=2e-5, err_msg=f"{kind} of {path}")


def trained(steps, tx, check_vma=True, model=None):
    mesh = mesh_of(2, 4)
    state = create_train_state(model or Mlp(fsdp), tx, mesh, KEY, batch_of(0), batch_axes=AXES)
    step = make_train_step(loss_fn, mesh, AXES, check_vma=check_vma)
    for number in range(steps):
        state, _ = step(state, batch_of(number), KEY)
    return state


@pytest.mark.parametrize("check_vma", [True, False])
def test_leaf_norms_of_a_train_step_match_a_single_device(check_vma):
    state = trained(3, with_leaf_norms(TX), check_vma)
    assert_same_norms(leaf_norms(state.opt_state, state.params), norms_of_single_device(3))
    # Clipping is inside: the norms of gradients are those before clipping. Of a shard the norm would be smaller.
    unclipped = norms_of_single_device(3)["gradients"]
    assert np.sqrt(sum(norm**2 for norm in unclipped.values())) > 0.5
    of_shard = np.linalg.norm(np.asarray(unbox(state.params)["in"]["kernel"].addressable_shards[0].data))
    assert of_shard < 0.9 * leaf_norms(state.opt_state, state.params)["parameters"]["in/kernel"]


def test_leaf_norms_leave_parameters_unchanged():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.5))  # AdamW would divide rounding by small roots
    with_norms, without, start = trained(2, with_leaf_norms(tx)), trained(2, tx), trained(0, tx)
    assert not np.allclose(without.params["in"]["kernel"], start.params["in"]["kernel"], rtol=1e-3)  # guard: they train
    for (path, one), other in zip(
        jax.tree.leaves_with_path(unbox(with_norms.params)), jax.tree.leaves(unbox(without.params)), strict=True
    ):
        # Not to the bit: XLA may fuse the update with the norms in another way.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("check_vma", [True, False])
def test_leaf_norms_inside_shard_map_take_a_collective_for_each_set_of_axes(check_vma):
    mesh = mesh_of(2, 4)
    tx = with_leaf_norms(optax.sgd(0.1))
    state = create_train_state(Mlp(fsdp), tx, mesh, KEY, batch_of(0), batch_axes=AXES)
    specs = partition_specs(state.params, mesh)

    def update(params):
        _, after = tx.update(jax.tree.map(lambda p: 2 * p, params), tx.init(params), params)
        return after.norms

    program = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma))
    params = unbox(state.params)
    expected = np.stack([[scale * np.linalg.norm(leaf) for leaf in jax.tree.leaves(params)] for scale in (2, 1, -0.2)])
    np.testing.assert_allclose(program(state.params), np.abs(expected), rtol=1e-5)
    # "fsdp" splits the leaves of `in` and `out`; the leaves of `middle` are replicated, and need no collective.
    assert program.lower(state.params).as_text().count("stablehlo.all_reduce") == 1


def test_norms_inside_shard_map_are_of_full_leaves_in_the_order_of_the_tree():
    """Two devices hold halves (3, 4) and (6, 8) of the first and the last leaf, and all of the leaf between."""

    def norms(first, middle, last):
        return _norms([{"a": Sharded(first, ("fsdp",)), "b": middle, "c": Sharded(last, ("fsdp",))}])

    run = on_mesh(norms, mesh_of(1, 2), True, (P("fsdp"), P(), P("fsdp")), P())
    assert run(np.float32([3, 4]), np.float32([2]), np.float32([6, 8])).tolist() == [[5, 2, 10]]


def test_leaf_norms_add_a_single_collective_to_a_train_step():
    def all_reduces(tx):
        mesh = mesh_of(2, 4)
        state = create_train_state(Mlp(fsdp), tx, mesh, KEY, batch_of(0), batch_axes=AXES)
        step = make_train_step(loss_fn, mesh, AXES)
        return step.trace(state, batch_of(0), KEY).lower().compile().as_text().count(" all-reduce(")

    assert all_reduces(with_leaf_norms(TX)) == all_reduces(TX) + 1


def test_leaf_norms_are_computed_at_each_kth_update():
    tx = with_leaf_norms(optax.sgd(0.5), every=2)
    params = {"w": np.float32([3, 4]), "b": np.float32([2])}
    state, found = tx.init(params), []
    for scale in (1, 2, 3):
        _, state = tx.update(jax.tree.map(lambda leaf, scale=scale: scale * leaf, params), state, params)
        found.append(leaf_norms(state, params))
    for norms, scale in zip(found, (1, 1, 3), strict=True):  # not computed at the second update
        expected = {"gradients": scale, "parameters": 1, "updates": scale * 0.5}
        assert_same_norms(norms, {kind: {"b": 2 * by, "w": 5 * by} for kind, by in expected.items()})


def test_leaf_norms_of_a_tree_without_floats_are_three_empty_rows():
    params, tx = {"count": jnp.array([7])}, with_leaf_norms(optax.set_to_zero())
    state = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params)[1], params)
    assert state.norms.shape == (3, 0), "rows are gradients, parameters and updates"


def test_leaf_norms_leave_out_frozen_leaves():
    model = shard_modules(Mlp(), lambda path, _: path == "in", "fsdp", min_weight_size=8, trainable=False)
    state = trained(1, with_leaf_norms(TX), model=model)
    for kind, norms in leaf_norms(state.opt_state, state.params).items():
        assert sorted(norms) == ["middle/bias", "middle/kernel", "out/bias", "out/kernel"], kind


def test_with_leaf_norms_drops_arguments_that_the_inner_transform_does_not_take():
    params, tx = np.ones(2, np.float32), with_leaf_norms(optax.scale(-0.5))
    updates, _ = tx.update(params, tx.init(params), params, value=np.float32(3))
    assert updates.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_with_leaf_norms_raises_for_every_below_1_or_not_an_integer(every):
    with pytest.raises(ValueError, match=r"with_leaf_norms: every=.*; pass the number of updates between norms"):
        with_leaf_norms(TX, every=every)


def test_leaf_norms_raise_without_norms_or_for_other_parameters():
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"holds norms of 0 optimizers.*Put with_leaf_norms\(tx\) around"):
        leaf_norms(TX.init(params), params)
    with pytest.raises(ValueError, match=r"holds norms of 2 leaves, and the parameters have 1 that are trained"):
        leaf_norms(with_leaf_norms(TX).init(params), {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"with_leaf_norms: update needs the parameters"):
        with_leaf_norms(TX).update(params, with_leaf_norms(TX).init(params))

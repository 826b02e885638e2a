"""A state saved on N devices and restored on M is the same, bit for bit, whatever is split where."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.faults.report import record
from tests.support import AXES, fsdp, mesh_of
from xlstm_jax.distributed import bytes_per_device, create_train_state, make_train_step, unbox
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.training.state import abstract_train_state

COUNTS = (1, 2, 4, 8)
SAVED_MIN_SIZE, RESTORED_MIN_SIZE = 32, 8  # biases and scales are whole in the one, and split in the other
TX = optax.adamw(1e-2)
X = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)


class Net(nn.Module):
    """Leaves that 8, 4 and 2 divide, one that only 4 and 2 do, and one that none does."""

    min_weight_size: int

    @nn.compact
    def __call__(self, x):
        dense = fsdp(nn.Dense, min_weight_size=self.min_weight_size)
        x = nn.gelu(dense(12, name="twelve")(x))
        x = nn.LayerNorm()(dense(16)(x))
        return fsdp(nn.Dense, min_weight_size=self.min_weight_size)(5, name="odd")(x[:, :7])


def trained(mesh):
    """A state that has made two steps, so that no leaf is what the initialisation would give."""
    state = create_train_state(Net(SAVED_MIN_SIZE), TX, mesh, jax.random.key(0), X, batch_axes=AXES)
    step = make_train_step(
        lambda p, apply, batch, rng: jnp.mean((apply({"params": p}, batch["x"]) - 1) ** 2), mesh, AXES
    )
    for _ in range(2):
        state, _ = step(state, {"x": X}, jax.random.key(1))
    return state


@pytest.fixture(scope="module", params=COUNTS, ids="saved on {}".format)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elastic") / "checkpoints"
    state = trained(mesh_of(1, request.param))
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, state)
    return folder, jax.tree.map(np.asarray, unbox(state))


@pytest.mark.parametrize("count", COUNTS, ids="restored on {}".format)
def test_checkpoint_restores_bit_equal_for_each_pair_of_device_counts(saved, count):
    folder, want = saved
    dp = 2 if count > 2 else 1  # another mesh, too
    where = (mesh_of(dp, count // dp), jax.random.key(0), X)
    target = abstract_train_state(Net(RESTORED_MIN_SIZE), TX, *where, batch_axes=AXES)
    with Checkpointer(folder) as checkpointer:
        got = checkpointer.restore(target)
    boxed = [is_box(leaf) for _, leaf in leaves_with_path(target)]
    assert boxed == [is_box(leaf) for _, leaf in leaves_with_path(got)] and any(boxed)
    assert got.tx is TX
    for (path, a), b, like in zip(
        leaves_with_path(unbox(got)), jax.tree.leaves(want), jax.tree.leaves(target), strict=True
    ):
        assert a.sharding == like.sharding and a.dtype == b.dtype, path
        assert np.asarray(a).tobytes() == b.tobytes(), path
    if count // dp > 1:
        assert bytes_per_device(got.params) < sum(leaf.nbytes for leaf in jax.tree.leaves(want.params))
    record("restored on 1, 2, 4 or 8 devices", 1, None, "nothing", "bit-equal")


def test_elastic_model_has_indivisible_leaves_and_a_leaf_split_in_a_single_tree():
    """The guard: there is a leaf that does not divide, and one that is whole in one tree and split in the other."""

    def boxed(size, count):
        tree = abstract_train_state(Net(size), TX, mesh_of(1, count), jax.random.key(0), X, batch_axes=AXES)
        return {path for path, leaf in leaves_with_path(tree.params) if is_box(leaf)}

    assert "odd/kernel" not in boxed(RESTORED_MIN_SIZE, 8) and "twelve/bias" not in boxed(RESTORED_MIN_SIZE, 8)
    assert "twelve/bias" in boxed(RESTORED_MIN_SIZE, 4) - boxed(SAVED_MIN_SIZE, 4)
    assert "Dense_0/kernel" in boxed(SAVED_MIN_SIZE, 8)


def test_chain_of_restarts_on_other_device_counts_keeps_the_state_bit_for_bit(tmp_path):
    """8 to 4 to 2 to 1 to 8, each restored from what the one before it saved."""
    want = None
    for step, count in enumerate([8, 4, 2, 1, 8], start=1):
        mesh = mesh_of(1, count)
        target = abstract_train_state(Net(SAVED_MIN_SIZE), TX, mesh, jax.random.key(0), X, batch_axes=AXES)
        with Checkpointer(tmp_path) as checkpointer:
            state = checkpointer.restore(target) if want else trained(mesh)
            checkpointer.save(step, state)
        want = want or [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
        assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)] == want

"""A store of somebody else's, in a file of its own: leaves that devices keep transposed."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import AXES, assert_same_params, data, fsdp, mean_loss, mesh_of, plain, train_on_one_device
from xlstm_jax.distributed import Checkpointer, create_train_state, make_train_step, unbox
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box
from xlstm_jax.distributed.data_parallel.store import Store
from xlstm_jax.distributed.optimizers.sharded_optimizer import sharded_optimizer

BATCH, TX = data(), optax.adam(0.1)


@dataclass(frozen=True)
class Transposed(Store):
    """Keeps the transpose of a matrix."""

    def shape(self, stored, counts):
        return super().shape(stored, counts)[::-1]

    def read(self, stored, is_split):
        assert not any(is_split)
        return stored.T

    def write(self, value, shape):
        return value.T


class Two(nn.Module):
    wrap: object = staticmethod(plain)

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4)(nn.tanh(self.wrap(nn.Dense)(24)(x)))


def transposed_state(mesh):
    """A state whose split kernels are stored transposed; the names of dims go along."""
    state = create_train_state(Two(fsdp()), TX, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)

    def stored(leaf):
        if not is_box(leaf) or leaf.value.ndim != 2:
            return leaf
        value = jax.device_put(np.asarray(leaf.value).T, NamedSharding(mesh, P(*leaf.names[::-1])))
        return Sharded(value, leaf.names[::-1], unit_depth=leaf.unit_depth, store=Transposed())

    params = trees.map_leaves(stored, state.params)
    made = sharded_optimizer(TX, params, mesh)
    return state.replace(params=params, opt_state=made.init(params))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_store_of_ones_own_is_one_class(check_vma, tmp_path):
    """Loss, gradients, moments and a checkpoint, which holds the values of the plain model."""
    mesh = mesh_of(2, 4)
    state = transposed_state(mesh)
    kernels = [leaf for _, leaf in trees.leaves_with_path(state.params) if is_box(leaf) and leaf.value.ndim == 2]
    assert len(kernels) == 2 and all(leaf.true_shape == leaf.value.shape[::-1] for leaf in kernels)  # guard
    start = jax.device_get(unbox(state.params))
    step = make_train_step(mean_loss, mesh, AXES, check_vma=check_vma)
    for _ in range(2):
        state, _ = step(state, BATCH, jax.random.key(1))
    want, moments, _ = train_on_one_device(Two(), TX, start, mean_loss, BATCH, steps=2)
    assert_same_params(state.params, want)
    assert_same_params(state.opt_state[0].mu, moments[0].mu)
    with pytest.raises(AssertionError, match="off by"):  # guard: two steps move the parameters
        assert_same_params(state.params, start)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state.params)
        whole = NamedSharding(mesh, P())
        of_plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), start)
        read = checkpointer.restore(of_plain)
        assert jax.tree.all(jax.tree.map(np.array_equal, read, jax.device_get(unbox(state.params))))
        again = checkpointer.restore(state.params)
    assert jax.tree.all(jax.tree.map(np.array_equal, *map(jax.device_get, (again, state.params))))


def test_a_part_of_a_padded_leaf_keeps_its_zeros():
    """Of 5 rows stored as 8, on one device all, and on two devices four each."""
    store, stored = ZeroPadding((5, None)), jnp.pad(jnp.ones((5, 3)), ((0, 3), (0, 0)))
    assert store.read(stored, (False, False)).shape == store.shape((8, 3), (1, 1)) == (5, 3)
    assert store.read(stored[:4], (True, False)).shape == (4, 3)
    assert store.read(stored, (True, False)).shape == (8, 3)
    assert np.array_equal(store.write(jnp.ones((5, 3)), (8, 3)), stored)


def test_a_box_that_was_pickled_before_boxes_had_a_store_is_read():
    box = Sharded(jnp.ones((8, 3)), ("fsdp", None), store=ZeroPadding((5, None)))
    fields = {name: field for name, field in box.__getstate__().items() if name != "store"}
    old = object.__new__(Sharded)
    old.__setstate__(fields | {"true_sizes": (5, None)})
    assert old.true_shape == (5, 3) and jax.tree.structure(old) == jax.tree.structure(box)
    old.__setstate__(fields | {"true_sizes": ()})
    assert old.stores_value and old.true_shape == (8, 3)

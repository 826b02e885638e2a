"""Tests of a user-defined store: leaves that devices keep transposed."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import (
    AXES,
    assert_same_bits,
    assert_same_params,
    data,
    fsdp,
    mean_loss,
    mesh_of,
    plain,
    train_on_one_device,
)
from xlstm_jax.distributed import (
    Checkpointer,
    Replicas,
    check_step,
    create_train_state,
    make_train_step,
    muon,
    plan_sharding,
    scan_layers,
    unbox,
)
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.store import UNCHANGED_STORE, UNEVEN, LeafToSplit, Store

BATCH, TX = data(), optax.adam(0.1)


@dataclass(frozen=True)
class Transposed(Store):
    """Store of matrices with the last two dims exchanged, after ``layers`` leading dims."""

    layers: int = 0

    def order(self, ndim):
        return (*range(self.layers), self.layers + 1, self.layers)

    def shape(self, stored, counts):
        whole = super().shape(stored, counts)
        return tuple(whole[dim] for dim in self.order(len(whole)))

    def read(self, stored, is_split):
        return jnp.swapaxes(stored, -1, -2)

    def write(self, value, shape):
        return jnp.swapaxes(value, -1, -2)

    def after_read(self):
        return UNCHANGED_STORE

    def with_dim(self, index):
        return Transposed(self.layers + 1)

    def without_dim(self, index):
        return Transposed(self.layers - 1)

    def of_last_dims(self, ndim):
        return Transposed(ndim - 2)


class Transpose:
    """``uneven="transpose"``: split matrices are stored transposed."""

    def reason(self, dim, size, parts):
        return None

    def prepare_for_split(self, leaf, parts):
        value = leaf.value
        if value.ndim != 2 or isinstance(leaf.store, Transposed):
            return leaf
        abstract = isinstance(value, jax.ShapeDtypeStruct)
        value = jax.ShapeDtypeStruct(value.shape[::-1], value.dtype) if abstract else value.T
        return LeafToSplit(value, leaf.names[::-1], 1 - leaf.dim, Transposed())


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    monkeypatch.setitem(UNEVEN, "transpose", Transpose())


class Two(nn.Module):
    wrap: object = staticmethod(plain)

    @nn.compact
    def __call__(self, x):
        return self.wrap(nn.Dense)(4)(nn.tanh(self.wrap(nn.Dense)(24)(x)))


def transposed_leaves(params):
    return [leaf for _, leaf in trees.sharded_leaves(params) if isinstance(leaf.store, Transposed)]


def transposed_state(mesh, tx=TX, make=Two, **options):
    model = make(fsdp(uneven="transpose", **options))
    return create_train_state(model, tx, mesh, jax.random.key(0), BATCH["x"], batch_axes=AXES)


@pytest.mark.parametrize("check_vma", [True, False])
def test_custom_store_trains_exactly_and_checkpoints_plain_values(check_vma, tmp_path):
    """A user-defined store keeps loss, gradients and moments exact; a checkpoint has the plain model's values."""
    mesh = mesh_of(2, 4)
    state = transposed_state(mesh)
    kernels = transposed_leaves(state.params)
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
        assert_same_bits(read, unbox(state.params))
        again = checkpointer.restore(state.params)
    assert jax.tree.structure(again) == jax.tree.structure(state.params)
    assert_same_bits(again, state.params)


def test_zero_padding_keeps_zeros_on_a_shard_and_drops_padding_on_a_full_dim():
    """A ``ZeroPadding`` of 5 rows stored as 8 reads 5 rows on one device, and four on each of two devices."""
    store, stored = ZeroPadding((5, None)), jnp.pad(jnp.ones((5, 3)), ((0, 3), (0, 0)))
    assert store.read(stored, (False, False)).shape == store.shape((8, 3), (1, 1)) == (5, 3)
    assert store.read(stored[:4], (True, False)).shape == (4, 3)
    assert store.read(stored, (True, False)).shape == (8, 3)
    assert np.array_equal(store.write(jnp.ones((5, 3)), (8, 3)), stored)


def test_unpickling_converts_the_true_sizes_field_of_old_boxes_to_a_store():
    box = Sharded(jnp.ones((8, 3)), ("fsdp", None), store=ZeroPadding((5, None)))
    fields = {name: field for name, field in box.__getstate__().items() if name != "store"}
    old = object.__new__(Sharded)
    old.__setstate__(fields | {"true_sizes": (5, None)})
    assert old.true_shape == (5, 3) and jax.tree.structure(old) == jax.tree.structure(box)
    old.__setstate__(fields | {"true_sizes": ()})
    assert old.stores_value and old.true_shape == (8, 3)


class Blocks(nn.Module):
    """Layers of a scan, by ``scan_layers`` or by ``nn.scan``."""

    wrap: object = staticmethod(plain)
    prefetch: bool = False

    @nn.compact
    def __call__(self, x):
        block = self.wrap(Block)
        if self.prefetch:
            layers = scan_layers(block, length=3)(name="layers")
        else:
            layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="layers")
        x, _ = layers(nn.Dense(16)(x), None)
        return nn.Dense(4)(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16)(nn.tanh(nn.Dense(32)(x))), None


CASES = {
    "two axes": ({"axis_name": AXES}, Two, TX),
    "copies": ({"replicas": Replicas("dp")}, Two, TX),
    "scan": ({}, Blocks, TX),
    "prefetch": ({}, partial(Blocks, prefetch=True), TX),
    "adafactor": ({}, Two, optax.adafactor(0.01, min_dim_size_to_factor=4)),
    "muon": ({}, Two, muon(0.01)),
    "remat": ({"reshard_after_forward": True}, Two, TX),
}


@pytest.mark.parametrize("case", CASES)
def test_custom_store_trains_exactly_in_combination_with_each_feature(case):
    options, make, tx = CASES[case]
    mesh = mesh_of(2, 4)
    state = transposed_state(mesh, tx, make, **options)
    assert len(transposed_leaves(state.params)) == 2  # guard
    params = jax.device_get(unbox(state.params))
    step = make_train_step(mean_loss, mesh, AXES)
    for _ in range(2):
        state, _ = step(state, BATCH, jax.random.key(1))
    want, _, _ = train_on_one_device(make(), tx, params, mean_loss, BATCH, steps=2)
    assert_same_params(state.params, want)
    with pytest.raises(AssertionError, match="off by"):  # guard: two steps move the parameters
        assert_same_params(state.params, params)


def test_plan_and_check_step_read_leaves_through_a_custom_store():
    mesh = mesh_of(2, 4)
    plan = plan_sharding(Two(fsdp(uneven="transpose")), mesh.shape, BATCH["x"])
    plain = plan_sharding(Two(fsdp()), mesh.shape, BATCH["x"])
    shown = [
        [(row.path, row.shape, row.names, row.parts, row.uses, row.gathered_bytes) for row in p.rows]
        for p in (plan, plain)
    ]
    assert shown[0] == shown[1]
    step = make_train_step(mean_loss, mesh, AXES)
    assert check_step(step, transposed_state(mesh), BATCH, jax.random.key(0)).ok

"""Tests of the device memory that offload saves, by compiler reports for absent devices."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

from xlstm_jax.distributed import (
    BLOCK_INPUT,
    DeviceMeshManager,
    abstract_train_state,
    partition_specs,
    remat_policy,
    shard_module_params,
)
from xlstm_jax.distributed.optimizers.streaming import GROUP_BYTES, streamed
from xlstm_jax.forecast import forecast

GIB = 2**30
V5E = pytest.param("v5e:2x4", marks=pytest.mark.libtpu, id="v5e")
H100 = pytest.param("h100:1x8", marks=pytest.mark.cuda_plugin, id="h100")


def adams_update(shapes, topology, on_host):
    """Returns the forecast of Adam on 8 devices: parameters and gradients in HBM, moments there or on the host."""
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 8})
    split = [jax.NamedSharding(mesh, jax.P(*[None] * (len(shape) - 2), "fsdp")) for shape in shapes]
    at_home = [sharding.with_memory_kind("pinned_host") if on_host else sharding for sharding in split]
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = [of(shape, sharding=sharding) for shape, sharding in zip(shapes, split, strict=True)]
    moments = [of(shape, sharding=sharding) for shape, sharding in zip(shapes, at_home, strict=True)]
    tx = optax.adam(1e-3)
    state = optax.tree.map_params(tx, lambda _, moment: moment, jax.eval_shape(tx.init, params), moments)
    whole = jax.NamedSharding(mesh, jax.P())
    where = optax.tree.map_params(tx, lambda _, sharding: sharding, state, split, transform_non_params=lambda _: whole)
    owners = [str(i % len(shapes)) for i in range(-1, 2 * len(shapes))]

    def update(params, state, grads):
        def next_state(state):
            updates, state = tx.update(grads, state, params)
            return jax.lax.with_sharding_constraint((state, optax.apply_updates(params, updates)), (where, split))

        return streamed(next_state, state, lambda _: where, lambda: owners)

    return forecast(jax.jit(update, donate_argnums=(0, 1)), params, state, params, topology=topology)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [V5E])
def test_offload_moves_half_of_20_gib_to_the_host_and_the_rest_fits(topology):
    shapes = [(32768, 8192)] * 40  # 40 GiB: 5 GiB per device
    found, bytes_ = adams_update(shapes, topology, True), 4 * sum(map(math.prod, shapes)) // 8
    assert bytes_ == 5 * GIB and found.fits
    assert found.total_bytes <= 1.15 * 2 * bytes_  # parameters and gradients
    assert found.host.stored_bytes == found.host.to_device_bytes == found.host.to_host_bytes == 2 * bytes_
    assert adams_update(shapes, topology, False).fits is False  # guard: offload makes the model fit


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [V5E, H100])
def test_offload_saves_at_least_40_percent_of_moment_bytes_with_small_leaves(topology):
    shapes = [(8192, 1024)] * 64  # 256 MiB each of parameters and gradients per device, in leaves of 4 MiB
    on_host, on_device = (adams_update(shapes, topology, there) for there in (True, False))
    assert on_device.total_bytes - on_host.total_bytes >= 0.4 * 2 * 256 * 2**20
    if topology.startswith("v5e"):  # groups in transfer, and arrays other than moments
        assert on_host.memory.temporary_bytes <= 5 * GROUP_BYTES


@pytest.mark.parametrize("topology", [V5E])
def test_offload_of_stacked_layers_takes_at_most_3_5_times_the_leaf_bytes(topology):
    shapes, bytes_ = [(8192, 1024)] * 24 + [(40, 8192, 1024)], 160 * 2**20  # the last on each device
    found = adams_update(shapes, topology, True)
    assert found.memory.temporary_bytes <= 3.5 * bytes_  # both moments and their new values would take 4 times
    assert found.memory.temporary_bytes >= 2 * bytes_  # guard: a stacked leaf is one group


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(nn.Dense(1024, use_bias=False, dtype=x.dtype)(x)), None


def backward_of_layers(topology, offload):
    """Returns the forecast of the gradient of 40 layers, each keeping its input: 4 MiB on each of 8 devices."""
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 8})
    x = jax.ShapeDtypeStruct((8 * 2048, 1024), jnp.bfloat16, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
    block = nn.remat(shard_module_params(Layer, "fsdp"), policy=remat_policy("nothing", offload=offload))
    model = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=40)()
    params = abstract_train_state(model, optax.sgd(0.1), mesh, jax.random.key(0), x, None, batch_axes="fsdp").params
    specs = partition_specs(params, mesh)

    def loss(params, x):
        return jnp.sum(model.apply({"params": params}, x, None)[0] ** 2)

    step = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs, x.sharding.spec), out_specs=specs))
    return forecast(step, params, x, topology=topology)


@pytest.mark.slow
@pytest.mark.parametrize("topology", [V5E])
def test_offloaded_activations_at_least_halve_temporary_memory(topology):
    there, here = (backward_of_layers(topology, names) for names in ([BLOCK_INPUT], []))
    assert here.memory.temporary_bytes >= 40 * 4 * 2**20  # guard: the inputs fill HBM
    assert there.memory.temporary_bytes <= 0.5 * here.memory.temporary_bytes
    assert there.host.to_device_bytes == there.host.to_host_bytes == 40 * 4 * 2**20

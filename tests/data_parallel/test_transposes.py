"""Tests of rows sent between devices: padded, and ragged as on TPUs, by an exchange that runs on CPUs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tests.support import assert_each_leaf, normal
from xlstm_jax.accelerators import absent_device
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.distributed.data_parallel.wire import transposes
from xlstm_jax.distributed.data_parallel.wire.transposes import Exchange, send_back, send_rows
from xlstm_jax.forecast.compiling.compile import compile_for_topology

COUNT, MOST, LENGTH, WIDTH = 4, 5, 12, 3
SENT = np.array([[5, 0, 3, 1], [0, 0, 0, 0], [2, 5, 4, 1], [1, 1, 1, 1]])  # rows of device i for device j
AXES = ("ep",)


def like_a_tpus(value, out, starts, sizes, places, coming, axis_name):
    """Implements the documentation of ``lax.ragged_all_to_all``, from the gathered rows of all devices."""
    everyones = [lax.all_gather(x, axis_name) for x in (value, starts, sizes, places)]
    me = lax.axis_index(axis_name)
    for device in range(len(everyones[0])):
        rows, start, size, place = (x[device] for x in everyones)
        shifted = jnp.arange(len(out)) - place[me]
        own = (shifted >= 0) & (shifted < size[me])
        out = jnp.where(own[:, None], rows[jnp.where(own, start[me] + shifted, 0)], out)
    return out


def there_and_back(rows, counts):
    """Returns for this device the received rows, the rows sent back, and the gradient of the round trip."""
    counts = counts[0]
    coming = lax.all_to_all(counts, AXES, 0, 0, tiled=True)
    exchange = counts, coming, Exchange(AXES, MOST, LENGTH)

    def loss(rows):
        arrived = send_rows(rows, *exchange)
        back = send_back(arrived * (1 + lax.axis_index("ep") + jnp.arange(len(arrived))[:, None]), *exchange)
        return jnp.sum(back**2), (arrived, back)

    grad, found = jax.grad(loss, has_aux=True)(rows)
    return *found, grad


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_gradients_of_parts_and_of_gathered_parts_are_those_of_the_table(check_vma):
    """Each device's loss is the same function of the gathered parts, and a different one of its part."""
    mesh = DeviceMeshManager.create_device_mesh({"ep": COUNT}, devices=jax.devices()[:COUNT])
    x = jnp.arange(8.0)

    def gradients(x):
        part = transposes.local_part(x, 0, AXES)
        of_parts = jax.vjp(lambda part: transposes.all_parts(part, 0, AXES), part)[1](x**2)[0]
        of_all = jax.vjp(lambda x: transposes.local_part(x, 0, AXES), x)[1](part**2)[0]
        return of_parts, of_all

    on_mesh = jax.shard_map(gradients, mesh=mesh, in_specs=P(), out_specs=(P("ep"), P()), check_vma=check_vma)
    of_parts, of_all = jax.jit(on_mesh)(x)
    np.testing.assert_array_equal(of_parts, x**2)
    np.testing.assert_array_equal(of_all, x**2)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_ragged_all_to_all_exchange_equals_the_padded_exchange(monkeypatch, check_vma):
    mesh = DeviceMeshManager.create_device_mesh({"ep": COUNT}, devices=jax.devices()[:COUNT])
    rows = normal(0, (COUNT * LENGTH, WIDTH))

    def run():
        how = {"in_specs": P("ep"), "out_specs": P("ep"), "check_vma": check_vma}
        return jax.jit(jax.shard_map(lambda *args: there_and_back(*args), mesh=mesh, **how))(rows, SENT)

    padded = run()
    monkeypatch.setattr(transposes, "has_ragged_all_to_all", lambda: True)
    monkeypatch.setattr(lax, "ragged_all_to_all", like_a_tpus)
    assert_each_leaf(np.testing.assert_array_equal, run(), padded)
    arrived, back, grad = padded
    # Device 2 receives 3 rows of device 0, none of 1, 4 of 2 and 1 of 3, each group at its offset.
    of_two = np.asarray(arrived).reshape(COUNT, COUNT, MOST, WIDTH)[2]
    assert [int(np.any(part, axis=1).sum()) for part in of_two] == SENT[:, 2].tolist()
    np.testing.assert_array_equal(of_two[0, :3], rows[5:8])
    factors = np.where(np.asarray(rows), np.asarray(back) / np.asarray(rows), 0)
    np.testing.assert_allclose(grad, 2 * factors**2 * rows, rtol=1e-5)
    assert not np.asarray(back).reshape(COUNT, LENGTH, WIDTH)[0, 9:].any()  # rows without a destination


def test_rows_arrive_by_sender_and_come_back_in_order(monkeypatch):
    """Device 0 sends row 1 to itself and 2 to device 1, device 1 both rows to device 0; each has room for 2."""
    mesh = DeviceMeshManager.create_device_mesh({"ep": 2}, devices=jax.devices()[:2])
    rows, counts = np.float32([[1], [2], [3], [4]]), np.array([[1, 1], [2, 0]], np.int32)

    def local(rows, counts):
        coming = lax.all_to_all(counts[0], AXES, 0, 0, tiled=True)
        exchange = counts[0], coming, Exchange(AXES, 2, 2)
        back = send_back(send_rows(rows, *exchange), *exchange)
        monkeypatch.setattr(transposes, "has_ragged_all_to_all", lambda: True)
        monkeypatch.setattr(lax, "ragged_all_to_all", like_a_tpus)
        return back, send_rows(rows, *exchange)

    split = jax.shard_map(local, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    back, arrived = jax.jit(split)(rows, counts)
    assert back.ravel().tolist() == [1, 2, 3, 4]
    assert arrived.ravel().tolist() == [1, 0, 3, 4, 2, 0, 0, 0]


@pytest.mark.parametrize(
    "kind, ragged", [("TPU v5 lite", False), ("TPU v5", True), ("TPU v6 lite", True), (None, False)], ids=str
)
def test_tpus_except_v5e_exchange_rows_by_ragged_all_to_all(kind, ragged):
    mesh = jax.sharding.AbstractMesh((4,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    with absent_device(kind), jax.sharding.use_abstract_mesh(mesh):
        assert transposes.has_ragged_all_to_all() is ragged


@pytest.mark.slow
@pytest.mark.libtpu
def test_exchange_on_a_3d_torus_compiles_to_ragged_all_to_all_only():
    how = {"axis_types": (jax.sharding.AxisType.Auto,) * 2}
    mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "ep"), **how)

    def local(rows, counts):
        counts = counts[0]
        exchange = counts, lax.all_to_all(counts, AXES, 0, 0, tiled=True), Exchange(AXES, 256, 512)
        return jax.grad(lambda rows: jnp.sum(send_back(send_rows(rows, *exchange), *exchange) ** 2))(rows)

    split = P(("dp", "ep"))
    sharded = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, split))
    arrays = sharded((8 * 512, 128), jnp.float32), sharded((8, 4), jnp.int32)
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split))
    program = compile_for_topology(step, *arrays, topology="v5p:2x2x2", cache=None)
    assert (
        program.hlo.count(" ragged-all-to-all(") == 4 and " all-to-all(f32" not in program.hlo
    )  # each kernel and its gradient

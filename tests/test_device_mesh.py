"""Meshes by name and size, and simulated devices."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from xlstm_jax.distributed import DeviceMeshManager, simulate_cpu_devices

create = DeviceMeshManager.create_device_mesh


@pytest.mark.parametrize(
    "shape, want",
    [
        ({"dp": 2, "fsdp": 4}, {"dp": 2, "fsdp": 4}),
        ([("dp", 4), ("fsdp", 2)], {"dp": 4, "fsdp": 2}),
        ({"dp": 2, "fsdp": -1}, {"dp": 2, "fsdp": 4}),
        ({"fsdp": -1}, {"fsdp": 8}),
    ],
    ids=str,
)
def test_axes_have_the_sizes_asked_for_and_are_auto(shape, want):
    mesh = create(shape)
    assert dict(mesh.shape) == want
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_devices_lie_in_the_order_given():
    devices = jax.devices()[::-1][:4]
    mesh = create({"dp": 2, "fsdp": 2}, devices)
    assert mesh.devices.flatten().tolist() == devices


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            {"dp": 2, "fsdp": 3},
            r"takes 6 devices, but there are 8. With 'fsdp' = 4 it would fit; or pass devices=jax.devices\(\)\[:6\]",
        ),
        ({"dp": 3, "fsdp": -1}, r"takes 3 devices or a multiple, but there are 8. Divisors of 8 fit"),
        ({"dp": -1, "fsdp": -1}, r"at most one of them -1"),
        ({"fsdp": 0}, r"a size is a positive integer"),
        ({}, r"names no mesh axis"),
        (8, r"mesh_shape=8 has no axis names; write {'fsdp': 8}, say"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(shape, message):
    with pytest.raises(ValueError, match=message):
        create(shape)


def test_simulating_too_late_says_so():
    simulate_cpu_devices(8)  # what is there already is fine
    with pytest.raises(
        RuntimeError, match=r"simulate_cpu_devices\(4\) came too late: JAX already runs on 8 cpu device"
    ):
        simulate_cpu_devices(4)


def test_simulating_in_a_fresh_process():
    code = "from xlstm_jax.distributed import simulate_cpu_devices as s; s(3); import jax; print(jax.device_count())"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "3"
    )


MANY_IN_FLIGHT = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from xlstm_jax.distributed import DeviceMeshManager, simulate_cpu_devices
simulate_cpu_devices(8)
mesh = DeviceMeshManager.create_device_mesh({"dp": 8})
on_mesh = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))
def chain(x):
    for _ in range(5):
        x = x @ jnp.ones((64, 64)) * 0.01 + jax.lax.psum(x, "dp") * 1e-3
    return x
step, reduced, total = on_mesh(chain), on_mesh(lambda x: x + jax.lax.psum(x, "dp")), jax.jit(jnp.sum)
x = jnp.ones((512, 64))
for i in range(400):
    x = step(x)
    seen = reduced(x[:8, 0]), reduced(x[8:16, 1])
    logged = [total(v) for v in seen] if i % 5 == 0 else None
    if i % 20 == 19:
        jax.block_until_ready((x, seen, logged))
print("done")
"""


def test_programs_in_flight_together_do_not_wait_for_each_other_for_ever():
    """Without the threads that simulate_cpu_devices asks for, two runs in five never end on JAX 0.10."""
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", MANY_IN_FLIGHT], capture_output=True, text=True, timeout=60)
        assert run.stdout == "done\n", run.stderr

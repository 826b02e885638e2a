"""Tests of meshes by name and size, and of simulated devices. (``tests/processes``: meshes over several processes.)"""

import itertools
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from xlstm_jax.distributed import (
    DeviceMeshManager,
    abstract_batch,
    shard_batch,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.device_mesh.meshes import filled_sizes
from xlstm_jax.distributed.device_mesh.topology import _on_hosts, crossing_sizes, fsdp_layout, mesh_by_topology
from xlstm_jax.distributed.processes import devices

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
def test_create_device_mesh_has_the_given_axis_sizes_and_auto_axes(shape, want):
    mesh = create(shape)
    assert dict(mesh.shape) == want
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_create_device_mesh_keeps_the_order_of_given_devices():
    devices = jax.devices()[::-1][:4]
    mesh = create({"dp": 2, "fsdp": 2}, devices)
    assert mesh.devices.flatten().tolist() == devices


@pytest.mark.parametrize(
    "devices, error, message",
    [
        (
            [],
            ValueError,
            r"devices: 0, of which 0 differ\. Name at least one, each once, as jax\.devices\(\)\[:4\]; or leave",
        ),
        ([0, 1], TypeError, r"devices holds 0, a int; pass devices, as jax\.devices\(\)\[:4\]"),
        (2, TypeError, r"devices holds 2, a int"),
        (jax.devices()[:1] * 2, ValueError, r"devices: 2, of which 1 differ"),
    ],
    ids=["none", "numbers", "a number", "one twice"],
)
def test_create_device_mesh_raises_for_invalid_devices(devices, error, message):
    with pytest.raises(error, match=message):
        create({"fsdp": 2}, devices)
    assert create({"fsdp": 4}, np.array(jax.devices()[:4]).reshape(2, 2)).size == 4  # guard: an array of devices passes


def test_shard_batch_raises_for_an_abstract_mesh():
    abstract = DeviceMeshManager.create_abstract_mesh({"fsdp": 8})
    assert abstract_batch({"x": np.ones(8)}, abstract, "fsdp")["x"].shape == (8,)  # guard: the mesh is usable
    with pytest.raises(ValueError, match=r"batch\['x'\] .* has 10 rows, which the 8 devices .* Take 16 rows"):
        abstract_batch({"x": np.ones(10)}, abstract, "fsdp")
    with pytest.raises(
        TypeError, match=r"is an AbstractMesh, which has no devices; .*create_device_mesh\({'fsdp': 8}\)"
    ):
        shard_batch({"x": np.ones(8)}, abstract, "fsdp")


@pytest.mark.parametrize("count, sizes", [(8, (3, 3)), (12, (5, 1, 3)), (7, (2, -1)), (24, (3, 5, 7))], ids=str)
def test_filled_sizes_error_suggests_the_nearest_mesh_shapes(count, sizes):
    """The suggested shapes are the nearest of all possible shapes."""

    def away(shape):
        return sum(abs(np.log(new / old)) for new, old in zip(shape, sizes, strict=True) if old > 0)

    every = [shape for shape in itertools.product(range(1, count + 1), repeat=len(sizes)) if np.prod(shape) == count]
    with pytest.raises(ValueError, match=rf"but there are {count}. Nearest shapes that fit: ") as told:
        filled_sizes(dict(zip("abc", sizes, strict=False)), count)
    shown = [
        tuple(int(size) for size in re.findall(r": (\d+)", text))
        for text in re.findall(r"{[^}]*}", str(told.value).split("fit: ")[1])
    ]
    assert len(shown) == min(3, len(every)) and set(shown) <= set(every)
    np.testing.assert_allclose([away(shape) for shape in shown], sorted(map(away, every))[: len(shown)])


@pytest.mark.parametrize(
    "sizes, units, want",
    [((2, 4), 2, (2, 1)), ((1, 8), 2, (1, 2)), ((3, 4), 6, (3, 2)), ((4, 9), 6, (2, 3)), ((2, 2, 8), 8, (2, 2, 2))],
    ids=str,
)
def test_crossing_sizes_puts_the_first_axes_across_slow_links(sizes, units, want):
    assert crossing_sizes(sizes, units) == want


def tpu(x, y, *, slice_index=0, core=0):
    return SimpleNamespace(
        platform="tpu", process_index=0, slice_index=slice_index, coords=(x, y, 0), core_on_chip=core
    )


def gpu(process, number=0):
    return SimpleNamespace(platform="gpu", process_index=process, slice_index=None, number=number)


def test_layout_of_tpus_has_an_axis_for_each_dim_of_the_box_that_they_fill():
    box = [tpu(x, y) for x in (4, 5) for y in (8, 9, 10)]
    array, names = fsdp_layout(box[::-1])
    assert names == ("fsdp_x", "fsdp_y") and array.tolist() == [box[:3], box[3:]]
    line, names = fsdp_layout(box[:3])
    assert names == ("fsdp",) and line.tolist() == box[:3]
    single, names = fsdp_layout(box[:1])
    assert names == ("fsdp",) and single.tolist() == box[:1]
    chips = [tpu(x, 0, slice_index=which, core=core) for which in (1, 3) for x in (0, 1) for core in (0, 1)]
    array, names = fsdp_layout(chips[::-1])
    assert names == ("fsdp_slice", "fsdp_x", "fsdp_core") and array.ravel().tolist() == chips


def test_layout_of_tpus_names_the_first_place_without_a_device():
    devices = [tpu(x, y, slice_index=which) for which in (2, 7) for x in (4, 5) for y in (8, 9, 10)]
    with pytest.raises(
        ValueError, match=r"11 do not fill the box of 2 x 2 x 3 = 12 places .* coords \(5, 9, 0\) of slice 7"
    ):
        fsdp_layout(devices[:-2] + devices[-1:])
    with pytest.raises(ValueError, match=r"2 do not fill the box of 3 = 3 places .* coords \(1, 0, 0\) of slice 0"):
        fsdp_layout([tpu(0, 0), tpu(2, 0)])


def test_layout_of_other_devices_has_hosts_in_order_and_keeps_the_order_within_a_host():
    devices = [gpu(1, 5), gpu(0, 3), gpu(1, 4), gpu(0, 9)]
    array, names = fsdp_layout(devices)
    assert names == ("fsdp_host", "fsdp_device")
    assert array.tolist() == [[devices[1], devices[3]], [devices[0], devices[2]]]
    assert fsdp_layout(devices[::2])[1] == ("fsdp",)
    with pytest.raises(ValueError, match=r"hosts hold different numbers of them, \{1: 2, 0: 1\}"):
        fsdp_layout(devices[:3])
    with pytest.raises(ValueError, match=r"processes have different numbers of devices: \{1: 2, 0: 1\}"):
        mesh_by_topology((3,), ("fsdp",), devices[:3])
    of_slices = [tpu(0, 0, slice_index=0), tpu(0, 0, slice_index=1), tpu(1, 0, slice_index=1)]
    with pytest.raises(ValueError, match=r"slices have different numbers of devices: \{0: 1, 1: 2\}"):
        mesh_by_topology((3,), ("fsdp",), of_slices)


TWO_SLICES = """
import jax
jax.config.update("jax_platforms", "cpu")
from jax.experimental import topologies
from xlstm_jax.distributed.device_mesh.topology import mesh_by_topology
devices = topologies.get_topology_desc("v5e:2x4", "tpu", num_slices=2).devices
for sizes in ((2, 8), (8, 2), (1, 16)):
    mesh = mesh_by_topology(sizes, ("dp", "fsdp"), devices[::-1])
    print([[device.slice_index for device in row] for row in mesh.devices])
"""


def test_first_mesh_axes_cross_the_slices_of_a_simulated_tpu():
    """The first axes cross the slices of an absent TPU: two slices of eight chips on two hosts each; needs libtpu."""
    pytest.importorskip("libtpu")
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    run = subprocess.run([sys.executable, "-c", TWO_SLICES], capture_output=True, text=True, env=environment)
    assert run.stdout.splitlines() == [
        str([[0] * 8, [1] * 8]),
        str([[0, 0]] * 4 + [[1, 1]] * 4),
        str([[0] * 8 + [1] * 8]),
    ], run.stderr


def test_preset_mesh_constructors_return_the_expected_axes_and_sizes():
    one = [DeviceMeshManager.create_data_parallel_mesh(), DeviceMeshManager.create_data_parallel_mesh(4)]
    assert [dict(mesh.shape) for mesh in one] == [{"data": 8}, {"data": 4}]
    assert one[1].devices.tolist() == jax.devices()[:4]
    assert dict(DeviceMeshManager.create_model_parallel_mesh(2).shape) == {"model": 2}
    assert dict(DeviceMeshManager.create_hybrid_mesh(2, 4).shape) == {"data": 2, "model": 4}
    assert dict(DeviceMeshManager.create_hybrid_mesh(2, -1).shape) == {"data": 2, "model": 4}
    hsdp = DeviceMeshManager.create_hsdp_mesh(-1, 4)
    assert hsdp.axis_names == ("dp", "fsdp") and dict(hsdp.shape) == {"dp": 2, "fsdp": 4}
    assert {kind for mesh in [*one, hsdp] for kind in mesh.axis_types} == {AxisType.Auto}


@pytest.mark.parametrize(
    "mesh, shape",
    [
        (lambda: create({"data": 4}), {"data": 4}),
        (lambda: create([("dp", 1), ("fsdp", 3)]), {"dp": 1, "fsdp": 3}),
        (lambda: create({"dp": 2, "fsdp": 2}, jax.devices()[:6]), {"dp": 2, "fsdp": 2}),
        (lambda: DeviceMeshManager.create_hybrid_mesh(2, 2), {"data": 2, "model": 2}),
        (lambda: DeviceMeshManager.create_hsdp_mesh(2, 2), {"dp": 2, "fsdp": 2}),
        (lambda: DeviceMeshManager.create_model_parallel_mesh(5), {"model": 5}),
    ],
    ids=["one axis", "pairs", "of a list", "hybrid", "hsdp", "model"],
)
def test_meshes_with_fewer_devices_take_the_first_devices(mesh, shape):
    mesh = mesh()
    assert dict(mesh.shape) == shape and set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.ravel().tolist() == jax.devices()[: mesh.size]


def test_get_mesh_info_returns_sizes_platform_and_processes():
    info = DeviceMeshManager.get_mesh_info(create({"dp": 2, "fsdp": 4}))
    assert info == {
        "total_devices": 8,
        "axes": {"dp": 2, "fsdp": 4},
        "processes": 1,
        "platform": "cpu",
        "device_kind": "cpu",
        "axes_across_processes": [],
    }


@pytest.mark.parametrize(
    "sizes", [{"dp": -1, "fsdp": -1}, {"dp": True, "fsdp": 4}, {"dp": 0}, {"dp": -2}, {"dp": 2.0}], ids=str
)
def test_mesh_sizes_are_positive_integers_of_which_one_may_be_left_open(sizes):
    with pytest.raises(ValueError, match="a size is a positive integer, and at most one of them -1"):
        filled_sizes(sizes, 8)
    assert filled_sizes({"dp": np.int64(2), "fsdp": -1}, 8) == (2, 4)
    assert filled_sizes({"dp": 3}, 8) == (3,)  # devices may be left over


def test_mesh_of_the_first_devices_takes_up_to_all_of_them():
    assert DeviceMeshManager.create_model_parallel_mesh(8).size == 8
    with pytest.raises(ValueError, match=r"num_devices=9 for the axis 'model': there are 8 devices, 1 to 8 fit"):
        DeviceMeshManager.create_model_parallel_mesh(9)


def test_mesh_without_a_device_of_a_process_raises_and_names_the_first_such_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)  # all devices are of process 0
    with pytest.raises(ValueError, match="the first 4 of 8 devices leave process 1 without a device"):
        create({"fsdp": 4})
    assert create({"fsdp": 4}, jax.devices()).size == 4  # a list may leave processes out


def test_simulate_cpu_devices_raises_for_a_call_after_jax_started():
    simulate_cpu_devices(8)  # a second call passes
    with pytest.raises(
        RuntimeError, match=r"simulate_cpu_devices\(4\) came too late: JAX already runs on 8 cpu device"
    ):
        simulate_cpu_devices(4)


def test_simulate_cpu_devices_overrides_only_the_device_count_in_xla_flags(tmp_path):
    code = "from xlstm_jax.distributed import simulate_cpu_devices as s; s(3); import jax, jax.numpy as jnp; "
    code += "jax.jit(jnp.sin)(1.0); print(jax.device_count())"
    flags = f"--xla_force_host_platform_device_count=5 --xla_dump_to={tmp_path}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == "3" and any(tmp_path.iterdir())


@pytest.mark.parametrize("call, nproc", [("available_devices", None), ("simulate_cpu_devices", 12)])
def test_simulate_cpu_devices_sets_nproc_and_available_devices_does_not(call, nproc):
    code = f"import os, jax, xlstm_jax.distributed.processes as d; assert 'NPROC' not in os.environ; d.{call}(3); "
    code += "print(jax.device_count(), os.environ.get('NPROC'))"
    environment = {key: value for key, value in os.environ.items() if key != "NPROC"} | {"JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout == f"3 {nproc}\n"


@pytest.mark.parametrize("before", [None, "5"])
def test_number_of_devices_is_told_to_jax_with_four_threads_each_unless_nproc_is_set(monkeypatch, before):
    told = {}
    monkeypatch.setattr(devices.jax.config, "update", lambda name, value: told.update({name: value}))
    monkeypatch.delenv("NPROC", raising=False)
    if before:
        monkeypatch.setenv("NPROC", before)
    simulate_cpu_devices(3)
    assert told == {"jax_platforms": "cpu", "jax_num_cpu_devices": 3} and os.environ["NPROC"] == (before or "12")
    monkeypatch.delenv("NPROC")
    if before:
        monkeypatch.setenv("NPROC", before)
    assert len(devices.available_devices(3)) == 8  # JAX has started eight
    assert told["jax_num_cpu_devices"] == 3 and os.environ.get("NPROC") == before


@pytest.mark.parametrize("count", [0, -1])
def test_number_of_simulated_devices_is_positive(count):
    with pytest.raises(ValueError, match=rf"simulate_cpu_devices\({count}\): the number of devices is positive"):
        simulate_cpu_devices(count)


def test_plugins_are_modules_of_the_package_of_plugins_and_entry_points(monkeypatch, tmp_path):
    (tmp_path / "xla_cuda12.py").touch()
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    entries = {"jax_plugins": [SimpleNamespace(name="of_a_cloud")]}
    monkeypatch.setattr(devices.metadata, "entry_points", lambda group: entries[group])
    monkeypatch.setattr(devices, "find_spec", {"jax_plugins": package}.get)
    assert devices._plugins() == {"xla_cuda12", "of_a_cloud"}
    monkeypatch.setattr(devices, "find_spec", {}.get)
    assert devices._plugins() == {"of_a_cloud"}


@pytest.mark.parametrize("slices, hosts", [((0, 0, 0, 0), "a b, c d"), ((3, 1, 1, 3), "b c, a d")], ids=["one", "two"])
def test_devices_of_a_host_are_those_of_a_process_or_of_a_slice_if_there_are_several(slices, hosts):
    """Four devices of the processes 5, 5, 7, 7."""
    devices = [
        SimpleNamespace(name=name, platform="gpu", process_index=process, slice_index=number)
        for name, process, number in zip("abcd", (5, 5, 7, 7), slices, strict=True)
    ]
    found = {place: device.name for place, device in _on_hosts(devices).items()}
    expected = {(i, j): name for i, host in enumerate(hosts.split(", ")) for j, name in enumerate(host.split())}
    assert found == expected


@pytest.mark.parametrize("nproc", [None, "5"])
def test_available_devices_sets_the_number_of_cpu_devices_before_jax_starts_them(monkeypatch, nproc):
    if nproc:
        monkeypatch.setenv("NPROC", nproc)
    else:
        monkeypatch.delenv("NPROC", raising=False)
    settings = []
    monkeypatch.setattr(devices.jax.config, "update", lambda *setting: settings.append(setting))
    monkeypatch.setattr(devices.jax, "devices", lambda: [(tuple(settings), os.environ["NPROC"])])
    monkeypatch.setattr(devices, "_has_only_cpus", lambda: False)
    ((before, threads),) = devices.available_devices(3)
    assert before == (("jax_num_cpu_devices", 3),) and threads == (nproc or "12")  # 4 threads for each device
    assert os.environ.get("NPROC") == nproc


def test_available_devices_prints_no_libtpu_warning_without_an_accelerator():
    pytest.importorskip("libtpu")
    if not devices._has_only_cpus():
        pytest.skip("this machine may have an accelerator")
    code = "from xlstm_jax.distributed.processes import available_devices as a; print(len(a(3)))"
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.stdout, run.stderr) == ("3\n", "")


@pytest.mark.parametrize("file", ["/dev/accel0", "/dev/vfio/0", "/dev/nvidia0", "/dev/kfd"])
def test_has_only_cpus_is_false_with_accelerator_files_or_cloud_plugins(monkeypatch, file):
    monkeypatch.setattr(devices, "_plugins", set)
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [])
    assert devices._has_only_cpus()  # guard
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [file] if fnmatch(file, pattern) else [])
    assert not devices._has_only_cpus()
    monkeypatch.setattr(devices.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(devices, "_plugins", lambda: {"xla_cuda12"})  # to compile with: a card would have a file
    assert devices._has_only_cpus()
    monkeypatch.setattr(devices, "_plugins", lambda: {"xla_cuda12", "of_a_cloud"})
    assert not devices._has_only_cpus()


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


@pytest.mark.slow
def test_concurrent_programs_on_simulated_cpu_devices_do_not_deadlock():
    """Concurrent programs end with the threads of ``simulate_cpu_devices``; without them two runs in five hang."""
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", MANY_IN_FLIGHT], capture_output=True, text=True, timeout=180)
        assert run.stdout == "done\n", run.stderr


def test_axes_of_a_mesh_keep_their_order():
    mesh = DeviceMeshManager.create_abstract_mesh({"tp": 2, "dp": 4})
    assert (mesh.axis_names, mesh.axis_sizes) == (("tp", "dp"), (2, 4))

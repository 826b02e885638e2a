"""A mesh axis along each axis of a TPU's torus, and across hosts: on topologies that are not there, and processes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType

from tests.ports import reserved_port
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast.compiling.compile_process import CHILD_ENVIRONMENT

create = DeviceMeshManager.create_fsdp_mesh
ROOT = Path(__file__).parents[2]
LIMIT_S = 120

# Devices of a topology in an order that says nothing: by coordinates, the last one first, every other one moved back.
TOPOLOGIES = """
import json, sys
from jax.experimental import topologies
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast.hardware.topologies import parse_topology

def devices_of(name, slices):
    several = {"num_slices": slices} if slices > 1 else {}
    devices = topologies.get_topology_desc(**parse_topology(name).description(), **several).devices
    return [*devices[::-2], *devices[-2::-2]]

def described(devices):
    try:
        mesh = DeviceMeshManager.create_fsdp_mesh(devices)
    except ValueError as error:
        return str(error)
    rows = [[getattr(d, "slice_index", None) or 0, *d.coords] for d in mesh.devices.flat]
    return {"axes": mesh.shape_tuple, "types": [kind.name for kind in mesh.axis_types], "places": rows}

out = {f"{slices} {name}": described(devices_of(name, slices)) for name, slices in json.loads(sys.argv[1])}
pod = devices_of("v5e:16x16", 1)
out["box"] = described([d for d in pod if 4 <= d.coords[0] < 8 and d.coords[1] >= 8])
out["one less"] = described([d for d in pod if tuple(d.coords) != (3, 5, 0)])
out["gap"] = described([d for d in pod if d.coords[0] in (0, 2)])
out["line"] = described([d for d in pod if d.coords[1] == 7])
two = devices_of("v5e:2x4", 2)
out["one less of two"] = described([d for d in two if (d.slice_index, *d.coords) != (1, 1, 2, 0)])
print(json.dumps(out))
"""
SHAPES = {
    ("v5e:16x16", 1): [("fsdp_x", 16), ("fsdp_y", 16)],
    ("v5p:4x4x8", 1): [("fsdp_x", 4), ("fsdp_y", 4), ("fsdp_z", 8)],
    ("v5e:2x4", 1): [("fsdp_x", 2), ("fsdp_y", 4)],
    ("v4:2x2x1", 1): [("fsdp_x", 2), ("fsdp_y", 2)],
    ("v5e:1x1", 1): [("fsdp", 1)],
    ("v5e:4x4", 2): [("fsdp_slice", 2), ("fsdp_x", 4), ("fsdp_y", 4)],
}


@pytest.fixture(scope="module")
def tpus():
    pytest.importorskip("libtpu")
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | CHILD_ENVIRONMENT
    run = subprocess.run(
        [sys.executable, "-c", TOPOLOGIES, json.dumps(list(SHAPES))],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=LIMIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:].splitlines()[-1:]
    return json.loads(run.stdout.splitlines()[-1])


def distances(mesh):
    """For each axis the steps on the torus between all pairs of neighbours along it."""
    sizes = [size for _, size in mesh["axes"]]
    places = dict(zip(itertools.product(*map(range, sizes)), mesh["places"], strict=True))
    for dim in range(len(sizes)):
        steps = set()
        for index, place in places.items():
            after = places.get((*index[:dim], index[dim] + 1, *index[dim + 1 :]))
            if after is not None:
                steps.add(tuple(there - here for here, there in zip(place, after, strict=True)))
        yield steps


@pytest.mark.parametrize("name, slices", SHAPES, ids=str)
def test_create_fsdp_mesh_lays_a_mesh_axis_along_each_torus_axis(tpus, name, slices):
    mesh = tpus[f"{slices} {name}"]
    assert [tuple(axis) for axis in mesh["axes"]] == SHAPES[name, slices]
    assert set(mesh["types"]) == {"Auto"}
    units = {"fsdp_slice": (1, 0, 0, 0), "fsdp_x": (0, 1, 0, 0), "fsdp_y": (0, 0, 1, 0), "fsdp_z": (0, 0, 0, 1)}
    assert list(distances(mesh)) == [{units[axis]} if size > 1 else set() for axis, size in mesh["axes"]]


def test_reordered_devices_are_no_torus_neighbours_along_mesh_axes(tpus):
    """Guard: the devices as they come are no neighbours along the axes."""
    mesh = tpus["1 v5p:4x4x8"]
    moved = mesh | {"places": mesh["places"][::2] + mesh["places"][1::2]}
    assert any(len(steps) > 1 for steps in distances(moved))


def test_create_fsdp_mesh_lays_axes_over_a_box_or_a_line_of_the_torus(tpus):
    box, line = tpus["box"], tpus["line"]
    assert not isinstance(box, str), box
    assert box["axes"] == [["fsdp_x", 4], ["fsdp_y", 8]]
    assert box["places"][0] == [0, 4, 8, 0]
    assert list(distances(box)) == [{(0, 1, 0, 0)}, {(0, 0, 1, 0)}]
    assert not isinstance(line, str), line
    assert line["axes"] == [["fsdp", 16]]
    assert [len(steps) for steps in distances(line)] == [1], f"no neighbours along the line: {line['places']}"


def test_create_fsdp_mesh_raises_for_an_incomplete_box_with_the_missing_coords(tpus):
    assert tpus["one less"].startswith(
        "devices: 255 do not fill the box of 16 x 16 = 256 places that they span: there is none at coords (3, 5, 0) of "
        "slice 0. Pass all devices of a slice, as jax.devices(), or of a box of its torus, or lay one axis over them"
    )
    assert "32 do not fill the box of 3 x 16 = 48 places that they span: there is none at coords (1, 0" in tpus["gap"]
    assert (
        "2 x 2 x 4 = 16 places that they span: there is none at coords (1, 2, 0) of slice 1"
        in (tpus["one less of two"])
    )


@pytest.mark.parametrize("count", [1, 6, 8])
def test_create_fsdp_mesh_on_a_single_host_has_a_single_fsdp_axis(count):
    devices = jax.devices()[:count][::-1]
    mesh = create(devices)
    assert dict(mesh.shape) == {"fsdp": count} and mesh.axis_types == (AxisType.Auto,)
    assert mesh.devices.tolist() == devices
    assert create().devices.tolist() == jax.devices()


@pytest.mark.parametrize("devices, message", [([], r"devices: 0, of"), ([0, 0], r"devices: 2, of which 1 differ")])
def test_create_fsdp_mesh_raises_for_no_devices_or_duplicates(devices, message):
    with pytest.raises(ValueError, match=message):
        create([jax.devices()[i] for i in devices])


PROCESSES = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from xlstm_jax.distributed import DeviceMeshManager, gather_params, initialize_distributed, shard_params
from xlstm_jax.distributed import simulate_cpu_devices

rank, port = int(sys.argv[1]), sys.argv[2]
simulate_cpu_devices(3)
initialize_distributed(f"127.0.0.1:{port}", 2, rank)
mesh = DeviceMeshManager.create_fsdp_mesh(jax.devices()[::-1])
out = {"axes": dict(mesh.shape), "processes": [[d.process_index for d in row] for row in mesh.devices]}
try:
    DeviceMeshManager.create_fsdp_mesh(jax.devices()[:5])
except ValueError as error:
    out["uneven"] = str(error)
w = np.arange(12.0 * 4).reshape(12, 4)

def through(w):
    shard = shard_params({"w": w}, mesh.axis_names, 0)
    return shard["w"].value, gather_params(shard, mesh.axis_names)["w"]

specs = (P(mesh.axis_names), P())
shards, whole = jax.jit(jax.shard_map(through, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False))(w)
out["shard"] = shards.addressable_shards[0].data.shape
out["whole"] = all(np.array_equal(np.asarray(part.data), w) for part in whole.addressable_shards)
print(json.dumps(out))
"""


def test_create_fsdp_mesh_across_processes_has_a_host_axis_and_a_device_axis():
    port = str(reserved_port())
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESSES, str(rank), port],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        done = [process.communicate(timeout=LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], [err[-3000:] for _, err in done]
    for told in (json.loads(output.splitlines()[-1]) for output, _ in done):
        assert told["axes"] == {"fsdp_host": 2, "fsdp_device": 3}
        assert told["processes"] == [[0] * 3, [1] * 3]
        assert told["shard"] == [2, 4] and told["whole"]
        assert "hosts hold different numbers of them, {0: 3, 1: 2}. Pass as many of each, or lay one" in told["uneven"]

"""A step compiled for GPUs that are not there: what is read of it, what is refused, and which compiler it takes."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.forecast.test_forecast import LAYERS, workload
from xlstm_jax.distributed import DeviceMeshManager
from xlstm_jax.forecast import forecast
from xlstm_jax.forecast.compiling import compile_process
from xlstm_jax.forecast.compiling.compile import StepCall, begin_for_topology
from xlstm_jax.forecast.compiling.compile_process import child_environment
from xlstm_jax.forecast.hardware.chips import CHIPS
from xlstm_jax.forecast.hardware.topologies import parse_topology

WIDTH, ROWS, FLOAT = 512, 64, 4
# The model of test_forecast: two kernels and two biases a layer, a head of 32. Adam keeps two more of each leaf.
SPLIT = LAYERS * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH) + 32 * WIDTH  # a stack of biases of 4 * WIDTH has 2**10 too
WHOLE = LAYERS * WIDTH + 32


@pytest.mark.one_in(2)
@pytest.mark.cuda_plugin
@pytest.mark.parametrize(
    "topology, mesh, kind",
    [("h100:1x8", {"fsdp": 8}, "NVIDIA H100 80GB HBM3"), ("b200:2x4", {"dp": 2, "fsdp": 4}, "NVIDIA B200")],
)
def test_forecast_for_gpus_without_a_gpu_reports_memory_modules_and_collectives(topology, mesh, kind):
    training = workload(rows=ROWS, width=WIDTH)
    step, args = training.build_step(mesh)
    found = forecast(step, *args, topology=topology, tokens=training.tokens)
    assert (found.platform, found.device_kind, found.topology) == ("gpu", kind, topology)
    assert found.fits and found.available_bytes == parse_topology(topology).chip.usable_hbm_bytes
    assert {"jaxlib", "jax-cuda12-plugin"} <= found.versions.keys()
    # The leaves and both moments, the batch; two counts of steps.
    held = 3 * FLOAT * (SPLIT // mesh["fsdp"] + WHOLE) + FLOAT * WIDTH * ROWS // 8
    assert found.memory.argument_bytes == pytest.approx(held, abs=64)
    modules = found.memory.by_module()
    assert {"blocks/up", "blocks/down"} & modules.keys() and sum(modules.values()) == found.memory.peak_live_bytes > 0
    gathers = [c for c in found.collectives if c.kind == "all-gather" and "blocks/up/kernel" in c.leaves]
    # XLA may peel off one trip of the loop that goes backward, so as to gather before it.
    assert sum(c.count for c in gathers) == 2 * LAYERS and {"forward", "recompute"} <= {c.direction for c in gathers}
    assert {c.axes for c in gathers} == {("fsdp",)}
    scattered = [c for c in found.collectives if c.kind == "reduce-scatter" and c.module.startswith("blocks")]
    assert scattered and {c.axes for c in scattered} == {("fsdp",)} and {c.direction for c in scattered} == {"backward"}
    assert (("dp",) in {c.axes for c in found.collectives}) == ("dp" in mesh)


@pytest.mark.cuda_plugin
def test_forecast_for_h100_reports_a_step_beyond_hbm_as_not_fitting():
    mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 8})
    sharding = NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((8, 2**15, 2**20), jnp.float32, sharding=sharding)  # 128 GiB on each
    step = jax.jit(lambda x: jnp.sin(x).sum(), out_shardings=NamedSharding(mesh, P()))
    found = forecast(step, x, topology="h100:8")
    assert found.fits is False and found.memory.argument_bytes == 2**37
    assert forecast(step, x, topology="b200:8").fits  # guard: 180 GB are enough


CUDA_CHILD = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
for arguments in json.loads(sys.argv[1]):
    devices = get_topology_desc(**arguments).devices
    x = jax.ShapeDtypeStruct((144, 256), jnp.float32, sharding=NamedSharding(Mesh(np.array(devices), "i"), P("i")))
    text = jax.jit(jnp.sum).lower(x).compile().as_text()
    print(json.dumps([len(devices), devices[0].device_kind, "all-reduce" in text]))
"""


@pytest.mark.cuda_plugin
def test_xla_accepts_the_topology_description_of_every_listed_gpu():
    names = [chip.name for chip in CHIPS.values() if not chip.torus_axes]
    topologies = [parse_topology(f"{name}:2x{CHIPS[name].devices_per_node}") for name in names]
    command = [sys.executable, "-c", CUDA_CHILD, json.dumps([topology.description() for topology in topologies])]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    described = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert described == [[t.num_devices, t.chip.device_kinds[0], True] for t in topologies]


@pytest.mark.cuda_plugin
def test_cache_key_depends_on_gpu_topology_and_plugin_version(monkeypatch):
    def key(topology):
        mesh = DeviceMeshManager.create_abstract_mesh({"fsdp": 8})
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
        return begin_for_topology(StepCall(jax.jit(jnp.sum), (x,), topology=parse_topology(topology))).key

    keys = [key("h100:1x8"), key("h100:2x4"), key("h200:1x8")]
    assert key("h100:8") == keys[0] and len(set(keys)) == 3
    version = compile_process.version
    monkeypatch.setattr(compile_process, "version", lambda name: version(name) + "+" * name.startswith("nvidia"))
    assert key("h100:1x8") not in keys


# --------------------------------------------------------------------------------------------------------- the compiler


def installed(monkeypatch, **versions):
    """Another set of installed packages, with - written as _."""

    def version(name):
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(compile_process, "version", version)


WHOLE_SET = {
    "jaxlib": "0.12.0",
    "jax_cuda12_plugin": "0.12.0",
    "jax_cuda12_pjrt": "0.12.0",
    "nvidia_cuda_nvcc_cu12": "12.9.86",
    "flatbuffers": "25",
}


def forecast_of_a_sum():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return forecast(jax.jit(jnp.sum), x, topology="h100:1")


@pytest.mark.parametrize(
    "missing, said",
    [
        (["jax_cuda12_plugin", "jax_cuda12_pjrt"], "jax-cuda12-plugin and jax-cuda12-pjrt"),
        (["nvidia_cuda_nvcc_cu12"], "nvidia-cuda-nvcc-cu12"),
    ],
    ids=["plugin", "assembler"],
)
def test_forecast_for_gpus_raises_for_missing_compiler_packages_with_the_pip_extra(monkeypatch, missing, said):
    installed(monkeypatch, **{name: found for name, found in WHOLE_SET.items() if name not in missing})
    with pytest.raises(ImportError, match=rf"GPU topology needs {said}, on a machine without GPUs.*\[forecast-gpu\]"):
        forecast_of_a_sum()


def test_forecast_for_gpus_raises_for_a_cuda_plugin_and_jaxlib_version_mismatch(monkeypatch):
    installed(monkeypatch, **WHOLE_SET)
    assert "jax-cuda12-plugin" in compile_process.check_compiler("cuda")  # guard: the whole set is taken
    installed(monkeypatch, **WHOLE_SET | {"jax_cuda12_plugin": "0.11.2"})
    cure = r"pip install jax-cuda12-plugin==0\.12\.0 jax-cuda12-pjrt==0\.12\.0"
    with pytest.raises(ImportError, match=rf"jax-cuda12-plugin 0\.11\.2 cannot compile with jaxlib 0\.12\.0;.*{cure}"):
        forecast_of_a_sum()


def test_forecast_raises_for_a_mesh_size_unequal_to_the_gpu_count():
    step, args = workload(rows=ROWS).build_step({"fsdp": 8})
    with pytest.raises(ValueError, match=r"mesh \{'fsdp': 8\} has 8 devices, but topology='h100:2x8' has 16"):
        forecast(step, *args, topology="h100:2x8")

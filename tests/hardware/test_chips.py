"""The table of chips agrees with itself and with libtpu; rooflines with the sums worked out by hand."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from xlstm_jax.accelerators import TPUS as KNOWN_TO_TRAINING
from xlstm_jax.accelerators import Tpu, compiler_options, slices_up_to
from xlstm_jax.forecast.compiling.compile_process import CHILD_ENVIRONMENT
from xlstm_jax.forecast.cost.roofline import step_bounds
from xlstm_jax.forecast.hardware.chips import CHIPS, Chip, chip_of
from xlstm_jax.forecast.hardware.gpu_targets import target_config
from xlstm_jax.forecast.hardware.links import Links
from xlstm_jax.forecast.hardware.topologies import parse_topology

TPUS = [chip for chip in CHIPS.values() if chip.torus_axes]
MULTIPLIERS = {"v4": 8 * 128**2, "v5e": 4 * 128**2, "v5p": 8 * 128**2, "v6e": 4 * 256**2, "tpu7x": 4 * 256**2}


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_peak_flops_of_tpus_equal_multipliers_times_clock(chip):
    assert chip.peak_flops["bfloat16"] == pytest.approx(2 * MULTIPLIERS[chip.name] * chip.clock_hz, rel=0.003)
    assert 0.95 * chip.hbm_bytes < chip.usable_hbm_bytes < chip.hbm_bytes


# FLOP per byte on all links, both ways: what a fully sharded layer needs of tokens per chip, from the literature.
@pytest.mark.parametrize("name, ratio", [("v5e", 1094), ("v5p", 850), ("v6e", 2550)])
def test_compute_to_wire_ratio_of_tpus_matches_the_published_ratio(name, ratio):
    chip = CHIPS[name]
    assert chip.peak_flops["bfloat16"] / (2 * chip.link_bandwidth * chip.torus_axes) == pytest.approx(ratio, rel=0.001)


@pytest.mark.parametrize(
    "device_kind, name",
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4", "v4"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA B300", "b300"),
        ("NVIDIA GB300", "gb300"),
    ],
)
def test_chip_of_finds_the_chip_by_device_kind(device_kind, name):
    assert chip_of(device_kind) is CHIPS[name]


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_tpu_figures_agree_with_jax_within_an_eighth(chip):
    """JAX's figures are per core. The eighth is v5p's bandwidth: 2.46 TB/s in JAX, 2.765 in the documentation."""
    tpu_info = pytest.importorskip("jax._src.tpu_info")
    names = {"v4": "TPU_V4", "v5e": "TPU_V5E", "v5p": "TPU_V5P", "v6e": "TPU_V6E", "tpu7x": "TPU_7X"}
    if not hasattr(tpu_info, "ChipVersion") or not hasattr(tpu_info.ChipVersion, names[chip.name]):
        pytest.skip("this release of JAX has no such row")
    version = getattr(tpu_info.ChipVersion, names[chip.name])
    physical = version.num_physical_tensor_cores_per_chip
    cores = physical // chip.devices_per_chip
    info = tpu_info.get_tpu_info_for_chip(version, cores)
    assert {kind for kind in chip.device_kinds if tpu_info.chip_version_from_device_kind(kind) == version}
    assert cores * info.bf16_ops_per_second == pytest.approx(chip.peak_flops["bfloat16"], rel=0.003)
    assert cores * info.hbm_capacity_bytes == pytest.approx(chip.hbm_bytes, rel=0.002)
    assert cores * info.mem_bw_bytes_per_second == pytest.approx(chip.hbm_bandwidth, rel=0.125)
    if chip.name == "tpu7x":  # else JAX counts widened products as float8
        assert cores * info.fp8_ops_per_second == pytest.approx(chip.peak_flops["float8"], rel=0.004)


def test_chip_positional_fields_keep_the_order():
    """Users add a chip of their own by position too."""
    v5e = CHIPS["v5e"]
    figures = (v5e.name, v5e.device_kinds, v5e.hbm_bytes, v5e.usable_hbm_bytes, v5e.peak_flops, v5e.hbm_bandwidth)
    links = (v5e.clock_hz, v5e.link_bandwidth, v5e.torus_axes, v5e.host_bandwidth)
    assert Chip(*figures, *links, slices=v5e.slices) == v5e


def test_chip_of_returns_none_for_a_cpu_and_device_kinds_are_unique():
    assert chip_of(jax.devices()[0].device_kind) is None
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_tpu_tables_of_forecast_and_training_agree():
    assert [chip.name for chip in TPUS] == list(KNOWN_TO_TRAINING)
    for chip in TPUS:
        known = KNOWN_TO_TRAINING[chip.name]
        assert (chip.device_kinds, chip.torus_axes, chip.slices) == known[:3]


def test_new_tpu_needs_a_single_entry_in_each_table(monkeypatch):
    tpu = Tpu(("TPU v9",), 3, slices_up_to((8, 8, 16)), {"xla_tpu_new": ((2, 2, 1),)})
    monkeypatch.setitem(KNOWN_TO_TRAINING, "v9", tpu)
    figures = {"name": "v9", "device_kinds": tpu.device_kinds, "slices": tpu.slices}
    monkeypatch.setitem(CHIPS, "v9", dataclasses.replace(CHIPS["v5p"], **figures))
    assert parse_topology("v9:4x8x16").wraps == (True,) * 3 and chip_of("TPU v9") is CHIPS["v9"]
    assert compiler_options("TPU v9", shape=(2, 2, 1)) == {"xla_tpu_new": True}
    with pytest.raises(ValueError, match=r"there is no such slice of v9\..* up to 8x8x16"):
        parse_topology("v9:4x8x24")


# ----------------------------------------------------------------------------------------------------------- topologies


def test_parse_topology_reads_name_shape_and_chip():
    topology = parse_topology("v5p:4x4x8")
    assert (topology.name, topology.shape, topology.num_devices) == ("v5p:4x4x8", (4, 4, 8), 128)
    assert topology.chip is CHIPS["v5p"]


@pytest.mark.parametrize(
    "name, wraps",
    [
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v5e:4x4", (False, False)),
        ("v5p:4x4x8", (True, True, True)),
        ("v4:2x4x4", (False, False, False)),  # less than a cube: no optical switches
    ],
)
def test_parse_topology_marks_torus_dims_with_wrap_around_links(name, wraps):
    assert parse_topology(name).wraps == wraps


@pytest.mark.parametrize(
    "name, dims, wraps, platform",
    [
        ("v5e:8x16", (8, 16), (False, True), "tpu"),
        ("tpu7x:4x4x8", (4, 4, 8, 2), (True,) * 3, "tpu"),
        ("tpu7x:2x2x1", (2, 2, 1, 2), (False,) * 3, "tpu"),
        ("v4:2x2x1", (2, 2, 1), (False,) * 3, "tpu"),
        ("h100:3", (1, 3), (False,) * 2, "cuda"),
    ],
)
def test_dims_of_a_topology_end_with_the_devices_of_a_chip_if_it_has_several(name, dims, wraps, platform):
    topology = parse_topology(name)
    assert (topology.dims, topology.num_devices, topology.wraps) == (dims, math.prod(dims), wraps)
    assert topology.platform == platform
    if platform == "tpu":
        described = {"platform": "tpu", "topology_name": name}
        described |= {"chip_config_name": "megacore"} if name.startswith("v4") else {}
        assert topology.description() == described
    alone = parse_topology("v5e:1x1").description()
    assert alone == {"platform": "tpu", "topology_name": "v5e:1x1", "chips_per_host_bounds": (1, 1, 1)}


@pytest.mark.parametrize("name", ["h100:2x9", "h100:0x8", "h100:2x0", "h100:1x2x4", "gb200:2x73"])
def test_parse_topology_raises_for_more_gpus_than_nvlink_joins_and_for_none(name):
    domain = "NVLink domain" if name.startswith("gb") else "host"
    with pytest.raises(
        ValueError, match=rf"topology='{name}' is not {domain}s x GPUs of each, of which NVLink joins 1 to"
    ):
        parse_topology(name)


@pytest.mark.parametrize(
    "name, shape, told",
    [
        ("h100:32x8", (32, 8), "1x32x8"),
        ("h100:8", (1, 8), "1x1x8"),
        ("a100:2x4", (2, 4), "1x2x4"),
        ("gb200:4x72", (4, 72), "4x18x4"),  # hosts have 4 GPUs each, and NVLink joins 18 of them
        ("gb200:6", (1, 6), "1x3x2"),
        ("b300:2x8", (2, 8), "1x2x8"),
        ("gb300:2x72", (2, 72), "2x18x4"),
    ],
)
def test_parse_topology_reads_gpus_as_hosts_by_gpus_per_host(name, shape, told):
    topology = parse_topology(name)
    assert (topology.name, topology.shape, topology.num_devices) == (name, shape, math.prod(shape))
    assert not any(topology.wraps) and topology.platform == "cuda"
    described = topology.description()
    assert described["topology"] == told
    assert f'device_description_str: "{topology.chip.device_kinds[0]}"' in described["target_config"]


def test_target_config_of_gpus_agrees_with_vendor_figures_within_some_percent():
    gpus = [chip for chip in CHIPS.values() if not chip.torus_axes]
    for chip in gpus:
        told = dict(re.findall(r"(\w+): ([\d.]+)", target_config(chip)))
        assert float(told["memory_bandwidth"]) == pytest.approx(chip.hbm_bandwidth, rel=0.05), chip.name
        assert 1 <= float(told["device_memory_size"]) / chip.hbm_bytes < 1.08, chip.name
    assert len({target_config(chip) for chip in gpus}) == len(gpus)


LIBTPU_CHILD = """
import json, sys
from jax.experimental.topologies import get_topology_desc
for arguments in json.loads(sys.argv[1]):
    devices = get_topology_desc(**arguments).devices
    coords = [max(device.coords[i] for device in devices) + 1 for i in range(3)]
    print(json.dumps([len(devices), devices[0].device_kind, coords]))
"""


@pytest.mark.libtpu
def test_libtpu_accepts_topology_descriptions_and_agrees_on_chips_and_shapes():
    names = ["v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:16x16", "v6e:1x1", "v6e:8x8", "v4:2x2x1", "v4:4x4x4", "v4:16x16x16"]
    names += ["tpu7x:2x2x1", "tpu7x:4x4x8", "tpu7x:16x16x36"]
    names += ["v5p:2x2x1", "v5p:2x4x4", "v5p:4x4x8", "v5p:16x16x24"]
    topologies = [parse_topology(name) for name in names]
    command = [sys.executable, "-c", LIBTPU_CHILD, json.dumps([topology.description() for topology in topologies])]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | CHILD_ENVIRONMENT
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    described = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for topology, (count, kind, shape) in zip(topologies, described, strict=True):
        assert count == topology.num_devices, topology.name
        assert chip_of(kind) is topology.chip
        assert tuple(shape[: len(topology.shape)]) == topology.shape


# ------------------------------------------------------------------------------------------------------------- roofline


def on_torus(name, *dims_of_axes):
    """Links of a mesh whose axes lie along dims of the torus, or along parts of one: {axis: size} for each dim."""
    topology = parse_topology(name)
    sizes = {axis: size for dim in dims_of_axes for axis, size in dim.items()}
    places = np.unravel_index(np.arange(topology.num_devices), topology.dims)
    coords = np.stack(places[: len(topology.shape)], axis=-1)
    return Links(topology.chip, sizes, topology, coords.tolist())


def bounds(links, wire_bytes, **more):
    return step_bounds({"bfloat16": 1e12}, 1e9, wire_bytes, links, **more)


def test_step_bounds_match_compute_memory_and_wire_times_by_hand():
    times = bounds(on_torus("v5e:16x16", {"x": 16}, {"y": 16}), {("x",): 9e9})
    assert times.compute_s == pytest.approx(1e12 / 197e12)
    assert times.memory_s == pytest.approx(1e9 / 8.2e11)
    assert times.wire_s == pytest.approx(0.1)  # 9e9 bytes on one axis, 4.5e10 bytes/s each way
    assert (times.bound, times.seconds) == ("wire", times.wire_s)


def test_step_bounds_name_the_largest_time_as_the_bound():
    assert bounds(on_torus("v5e:16x16", {"x": 16}, {"y": 16}), {}).bound == "compute"
    links = on_torus("v5e:1x1", {"x": 1}, {})
    assert step_bounds({"bfloat16": 1e12}, 1e12, {}, links).bound == "memory"


@pytest.mark.parametrize(
    "chip, dtype, rate",
    [
        ("v5e", "float32", 197e12),
        ("h100", "float32", 494.5e12),
        ("h100", "float16", 989e12),
        ("v5e", "int8", 394e12),
        ("gb200", "int8", 5e15),
        ("v6e", "int8", 1836e12),
        ("a100", "int8", 624e12),
        ("a100", "uint8", 624e12),
        ("h100", "float8_e4m3fn", 1979e12),
        ("b200", "float8_e5m2", 4.5e15),
        ("gb300", "float8_e4m3fn", 5e15),
        # no units for it: widened to bfloat16
        ("a100", "float8_e4m3fn", 312e12),
        ("v6e", "float8_e5m2", 918e12),
        ("h100", "float8_e4m3fnuz", 989e12),
    ],
)
def test_step_bounds_use_the_peak_rate_of_each_dtype(chip, dtype, rate):
    links = Links(CHIPS[chip], {"x": 1}, parse_topology(f"{chip}:1x1") if chip.startswith("v") else None, [(0, 0, 0)])
    assert step_bounds({dtype: 1e12}, 0, {}, links).compute_s == pytest.approx(1e12 / rate)


# A device that gathers 40 GB over 128 chips of v5p, over 256 of v5e: on one axis of the torus, or over all of them.
@pytest.mark.parametrize(
    "name, dims, wire_bytes, seconds",
    [
        ("v5p:4x4x8", [{"x": 4}, {"y": 4}, {"z": 8}], {("x", "y", "z"): 40e9}, 0.074),
        ("v5p:4x4x8", [{"x": 4}, {"y": 4}, {"z": 8}], {("z",): 40e9}, 0.222),
        ("v5e:16x16", [{"x": 16}, {"y": 16}], {("x",): 20.05e9, ("y",): 20.05e9}, 0.223),
        ("v5e:16x16", [{"x": 16}, {"y": 16}], {("x",): 40.1e9, ("y",): 1e9}, 0.446),
        ("v5e:16x16", [{"x": 16}, {"y": 16}], {("x", "y"): 40.1e9}, 0.223),
        # no ring: one way only. Half of an axis, and an axis that does not close
        ("v5e:16x16", [{"dp": 2, "x": 8}, {"y": 16}], {("x",): 40.1e9}, 0.891),
        ("v5e:4x4", [{"x": 4}, {"y": 4}], {("x",): 40.1e9}, 0.891),
        # places 8 or 4 apart: as many groups share each link. With 2 or 4 of them the ring is closed
        ("v5e:16x16", [{"dp": 2, "x": 8}, {"y": 16}], {("dp",): 9e9}, 9e9 / (2 * 4.5e10 / 8)),
        ("v5e:16x16", [{"dp": 4, "x": 4}, {"y": 16}], {("dp",): 9e9}, 9e9 / (2 * 4.5e10 / 4)),
        # 64 devices over a part of one dim, one way, and the whole of the other, both ways
        ("v5e:16x16", [{"dp": 4, "x": 4}, {"y": 16}], {("x", "y"): 13.5e9}, 0.1),
        ("v5p:2x4x4", [{"x": 2}, {"y": 4}, {"z": 4}], {("z",): 9e9}, 0.1),  # less than a cube has no rings
        # two devices a chip: one ring through both, two groups that share a link, and the connection on the chip
        ("tpu7x:4x4x4", [{"x": 4}, {"y": 4}, {"z": 4}, {"c": 2}], {("z", "c"): 18e9}, 0.1),
        ("tpu7x:4x4x4", [{"x": 4}, {"y": 4}, {"z": 4}, {"c": 2}], {("z",): 9e9}, 0.1),
        ("tpu7x:4x4x4", [{"x": 4}, {"y": 4}, {"z": 4}, {"c": 2}], {("c",): 54e9}, 0.1),
    ],
)
def test_wire_time_on_a_torus_follows_rings_and_shared_links(name, dims, wire_bytes, seconds):
    assert bounds(on_torus(name, *dims), wire_bytes).wire_s == pytest.approx(seconds, rel=0.005)


def test_busiest_seconds_let_collectives_on_different_torus_dims_run_in_parallel():
    links = on_torus("v5e:16x16", {"x": 16}, {"y": 16})
    assert links.busiest_seconds({("x",): 9e9, ("y",): 9e9}) == pytest.approx(0.1)
    assert links.seconds(("x",), 9e9) + links.seconds(("y",), 9e9) == pytest.approx(0.2)


@pytest.mark.parametrize(
    "axis_sizes, axes, sent, seconds",
    [
        ({"fsdp": 8}, ("fsdp",), 35.3e9, 0.0784),  # within a node
        ({"fsdp": 256}, ("fsdp",), 40.1e9, 0.100),  # 8 adapters of a node at work for one gather
        ({"dp": 32, "fsdp": 8}, ("fsdp",), 23.3e9, 0.052),
        ({"dp": 32, "fsdp": 8}, ("dp",), 6.6e9, 0.132),  # each device has its own gather
    ],
)
def test_wire_time_on_gpus_follows_nvlink_and_network_adapters(axis_sizes, axes, sent, seconds):
    links = Links(CHIPS["h100"], axis_sizes)
    assert links.seconds(axes, sent) == pytest.approx(seconds, rel=0.01)
    assert bounds(links, {axes: sent}).wire_s == pytest.approx(seconds, rel=0.01)


def test_ridge_tokens_give_equal_compute_and_wire_time():
    """Twice as many tokens compute twice as long and send as much: at the ridge the two times meet."""
    links, sent = on_torus("v5e:16x16", {"x": 16}, {"y": 16}), {("x",): 9e9}
    ridge = bounds(links, sent, tokens_per_device=512).ridge_tokens
    at_ridge = step_bounds({"bfloat16": 1e12 * ridge / 512}, 0, sent, links)
    assert at_ridge.compute_s == pytest.approx(at_ridge.wire_s)
    assert bounds(links, sent).ridge_tokens is None
    assert not math.isclose(ridge, 512)


def test_ridge_tokens_of_a_fully_sharded_layer_match_the_textbook_formula():
    """6 bytes sent and 8 FLOP per token computed for each parameter: 0.75 x FLOP per byte, 820 tokens on v5e."""
    params, tokens = 1e9, 2048
    links = on_torus("v5e:16x16", {"x": 16}, {"y": 16})
    flops, sent = {"bfloat16": 8 * params * tokens}, {("x", "y"): 6 * params}
    times = step_bounds(flops, 0, sent, links, tokens_per_device=tokens)
    assert times.ridge_tokens == pytest.approx(0.75 * 1094, rel=0.001)


def test_step_bounds_raises_for_wire_bytes_on_an_axis_outside_the_mesh():
    with pytest.raises(ValueError, match=r"wire_bytes names the axis 'tp'; the mesh has \{'x': 16, 'y': 16\}"):
        bounds(on_torus("v5e:16x16", {"x": 16}, {"y": 16}), {("tp",): 1.0})

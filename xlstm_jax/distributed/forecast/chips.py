"""What makers publish about accelerators, and the least time that a step takes by these figures (its roofline).

All rates are per chip and second, in FLOP and bytes, 1e9 to the giga; memory sizes in bytes. Bandwidth of a link is
given *one way*: a ring uses its links in both directions at once and so moves twice as much per axis.

  compute   FLOP of matrix products / peak rate
  memory    bytes read and written in HBM / HBM bandwidth
  wire      bytes each device sends on the busiest axis of the torus / that axis's bandwidth

The largest of the three is the least time of a step in which everything overlaps. None of it is a measurement.

Sources. TPU: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter "How to Think About TPUs", tables of
specifications and of interconnect figures; cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e. GPU: NVIDIA's data
sheets of A100 (SXM4 80 GB), H100 (SXM5) and H200 (SXM), rates without sparsity; for networks the DGX data sheets.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One device as JAX sees it: a TPU chip with all its cores, or a GPU.

    Attributes:
      name: as in topologies, "v5e"; GPUs "h100".
      device_kinds: JAX's ``device_kind`` of it.
      hbm_bytes: memory as the maker states it.
      usable_hbm_bytes: of it, what a program may fill. TPU: the limit that libtpu's compiler names when it refuses a
        program that is too large. GPU: as stated, which leaves the driver some 5% of what is built in.
      peak_flops: FLOP/s of matrix products by dtype, dense; None where none is published. TPUs multiply float32 in
        passes of bfloat16, one of them by JAX's default, and then at the rate of that.
      hbm_bandwidth: bytes/s.
      clock_hz: of the matrix units; None for GPUs. Turns cycles that the compiler estimates into seconds.
      link_bandwidth: bytes/s one way: of one ICI link of a TPU; of all NVLinks of a GPU together.
      torus_axes: TPU: how many axes the torus has, with two links per chip each. GPU: 0.
      network_bandwidth: bytes/s one way and device between nodes; None for TPUs, whose slices are one torus.
      devices_per_node: GPUs joined by NVLink; None for TPUs.
    """

    name: str
    device_kinds: tuple[str, ...]
    hbm_bytes: int
    usable_hbm_bytes: int
    peak_flops: Mapping[str, float | None]
    hbm_bandwidth: float
    clock_hz: float | None
    link_bandwidth: float
    torus_axes: int
    network_bandwidth: float | None = None
    devices_per_node: int | None = None


def _peaks(bfloat16: float, int8: float, float32: float | None) -> dict[str, float | None]:
    return {"bfloat16": bfloat16, "int8": int8, "float32": float32}


# The clock follows from peak = matrix units x (128 x 128) x 2 FLOP x clock; v4 and v5p have 2 cores of 4 units each,
# v5e 1 of 4. For v6e (256 x 256) 4 units are taken: cloud.google.com names 2, but the cycles that the compiler
# estimates for a matrix product are fewer than 2 units could take.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", ("TPU v4",), 32 * GIB, int(30.75 * GIB), _peaks(275e12, 275e12, None), 1.2e12,
            clock_hz=1.05e9, link_bandwidth=4.5e10, torus_axes=3,
        ),
        Chip(
            "v5e", ("TPU v5 lite", "TPU v5e"), 16 * GIB, int(15.75 * GIB), _peaks(197e12, 394e12, None), 8.2e11,
            clock_hz=1.5e9, link_bandwidth=4.5e10, torus_axes=2,
        ),
        Chip(
            # 96 GiB are built in; the documentation lists the 95 that are left for users.
            "v5p", ("TPU v5", "TPU v5p"), 96 * GIB, int(95.74 * GIB), _peaks(459e12, 918e12, None), 2.765e12,
            clock_hz=1.75e9, link_bandwidth=9e10, torus_axes=3,
        ),
        Chip(
            "v6e", ("TPU v6 lite", "TPU v6e"), 32 * GIB, int(31.25 * GIB), _peaks(918e12, 1836e12, None), 1.64e12,
            clock_hz=1.75e9, link_bandwidth=9e10, torus_axes=2,
        ),
        Chip(
            "a100", ("NVIDIA A100-SXM4-80GB",), int(80e9), int(80e9), _peaks(312e12, 624e12, 19.5e12), 2.039e12,
            clock_hz=None, link_bandwidth=3e11, torus_axes=0, network_bandwidth=2.5e10, devices_per_node=8,
        ),
        Chip(
            "h100", ("NVIDIA H100 80GB HBM3",), int(80e9), int(80e9), _peaks(989e12, 1979e12, 67e12), 3.35e12,
            clock_hz=None, link_bandwidth=4.5e11, torus_axes=0, network_bandwidth=5e10, devices_per_node=8,
        ),
        Chip(
            "h200", ("NVIDIA H200",), int(141e9), int(141e9), _peaks(989e12, 1979e12, 67e12), 4.8e12,
            clock_hz=None, link_bandwidth=4.5e11, torus_axes=0, network_bandwidth=5e10, devices_per_node=8,
        ),
    )
}  # fmt: skip

# Slices that can be rented. Larger ones of v4 and v5p are made of cubes: multiples of 4, ascending, up to a pod.
FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBIC_SLICES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
LARGEST_SLICE = {"v4": (16, 16, 16), "v5p": (16, 16, 24)}
CUBE = 4
FLAT_RING = 16  # an axis of v5e or v6e is a ring where it is as long as the pod


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls ``device_kind``; None for one without figures, a CPU among them."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


# ----------------------------------------------------------------------------------------------------------- topologies


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips: ``name`` as "v5e:16x16", ``shape`` of its torus. JAX sees one device per chip."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Which axes are rings: a v5e or v6e axis of the whole pod's length, a v4 or v5p axis of a multiple of 4.

        The source is the scaling book. On an axis that is no ring, half the bandwidth is left for collectives.
        """
        if self.chip.torus_axes == 2:
            return tuple(size == FLAT_RING for size in self.shape)
        return tuple(size % CUBE == 0 for size in self.shape)

    def description(self) -> dict[str, Any]:
        """Arguments of ``jax.experimental.topologies.get_topology_desc(platform="tpu", ...)``."""
        arguments = {"topology_name": self.name}
        if self.chip.name == "v4":
            arguments["chip_config_name"] = "megacore"  # both cores are one device, as on machines that have the chips
        if self.num_devices == 1:
            arguments["chips_per_host_bounds"] = (1, 1, 1)  # less than a host
        return arguments


def parse_topology(name: str) -> Topology:
    """Reads "v5e:16x16": the chip, and how many of them along each axis of the torus.

    Raises:
      ValueError: an unknown chip, or a slice that there is not; lists those that there are.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    chip = CHIPS.get(match[1]) if match else None
    if chip is None or not chip.torus_axes:
        known = ", ".join(chip.name for chip in CHIPS.values() if chip.torus_axes)
        raise ValueError(
            f"topology={name!r} is not <chip>:<shape> with a chip among {known}. For 256 chips of v5e: 'v5e:16x16'; "
            f"for 128 of v5p: 'v5p:4x4x8'."
        )
    shape = tuple(int(size) for size in match[2].split("x"))
    if not _is_slice(chip, shape):
        raise ValueError(f"topology={name!r}: there is no such slice of {chip.name}. There are {_slices(chip)}.")
    return Topology(name, chip, shape)


def _is_slice(chip: Chip, shape: tuple[int, ...]) -> bool:
    if chip.torus_axes == 2:
        return shape in FLAT_SLICES
    largest = LARGEST_SLICE[chip.name]
    cubes = len(shape) == 3 and all(size and size % CUBE == 0 for size in shape) and list(shape) == sorted(shape)
    return shape in CUBIC_SLICES or (cubes and all(a <= b for a, b in zip(shape, largest, strict=True)))


def _slices(chip: Chip) -> str:
    flat = chip.torus_axes == 2
    listed = ", ".join("x".join(map(str, shape)) for shape in (FLAT_SLICES if flat else CUBIC_SLICES))
    if flat:
        return listed
    largest = "x".join(map(str, LARGEST_SLICE[chip.name]))
    return f"{listed}, and multiples of {CUBE} in ascending order up to {largest}, as 4x4x8"


# ------------------------------------------------------------------------------------------------------------- roofline


@dataclass(frozen=True)
class Roofline:
    """The three bounds of a step's time, in seconds, and what they come from, per device and step.

    ``ridge_tokens`` is the number of tokens per device at which computing takes as long as sending: the time of
    compute grows with the tokens, the traffic of weights does not. None where the tokens were not told.
    """

    compute_s: float
    memory_s: float
    wire_s: float
    flops: float
    hbm_bytes: float
    wire_bytes: float
    ridge_tokens: float | None = field(default=None)

    @property
    def seconds(self) -> float:
        """The largest of the three: the least time of a step in which everything overlaps."""
        return max(self.compute_s, self.memory_s, self.wire_s)

    @property
    def bound(self) -> str:
        """Which one that is: "compute", "memory" or "wire"."""
        times = {"compute": self.compute_s, "memory": self.memory_s, "wire": self.wire_s}
        return max(times, key=times.__getitem__)


def roofline(
    flops: float,
    hbm_bytes: float,
    wire_bytes: Mapping[tuple[str, ...], float],
    chip: Chip,
    axis_sizes: Mapping[str, int],
    *,
    topology: Topology | None = None,
    torus_dims: Mapping[str, Sequence[int]] | None = None,
    tokens_per_device: float | None = None,
) -> Roofline:
    """The three bounds by the chip's published figures.

    Args:
      flops: FLOP of matrix products per device and step, taken at the rate of bfloat16.
      hbm_bytes: bytes read and written in HBM per device and step.
      wire_bytes: bytes that each device sends per step, by the mesh axes of the collective: {("fsdp",): 8e9}.
      chip: the device.
      axis_sizes: the mesh, outermost axis first.
      topology: of TPUs.
      torus_dims: of TPUs: the dims of the torus along which each mesh axis runs.
      tokens_per_device: of this step.
    Raises:
      ValueError: bytes travel over an axis that the mesh has not, or between TPUs without topology or torus_dims.
    """
    compute_s = flops / chip.peak_flops["bfloat16"]
    if chip.torus_axes:
        wire_s = _torus_seconds(wire_bytes, axis_sizes, topology, torus_dims)
    else:
        wire_s = sum(_switched_seconds(axes, sent, chip, axis_sizes) for axes, sent in wire_bytes.items())
    ridge = None
    if tokens_per_device is not None and compute_s:
        ridge = tokens_per_device * wire_s / compute_s
    memory_s = hbm_bytes / chip.hbm_bandwidth
    return Roofline(compute_s, memory_s, wire_s, flops, hbm_bytes, sum(wire_bytes.values()), ridge)


def _torus_seconds(wire_bytes, axis_sizes, topology: Topology | None, torus_dims) -> float:
    """The time of the busiest axis of the torus: the others work beside it.

    A collective uses the links of all dims along which its mesh axes run, each in proportion to its bandwidth.
    """
    busy = {}
    for axes, sent in ((axes, sent) for axes, sent in wire_bytes.items() if sent):
        size = _group_size(axes, axis_sizes)
        if topology is None or torus_dims is None:
            raise ValueError(f"{sent:.3g} bytes travel over the mesh axes {axes}; between TPUs their time depends on "
                             "where the axes lie: pass topology and torus_dims.")  # fmt: skip
        dims = sorted({dim for axis in axes for dim in torus_dims[axis]})
        bandwidth = {dim: _axis_bandwidth(dim, dims, size, topology) for dim in dims}
        for dim in dims:
            busy[dim] = busy.get(dim, 0.0) + sent / sum(bandwidth.values())
    return max(busy.values(), default=0.0)


def _axis_bandwidth(dim: int, dims: Sequence[int], size: int, topology: Topology) -> float:
    """Bytes/s that a device sends along one dim of the torus: both ways on a ring that is closed, else one way."""
    whole = size == math.prod(topology.shape[d] for d in dims)
    return topology.chip.link_bandwidth * (2 if whole and topology.wraps[dim] else 1)


def _switched_seconds(axes: tuple[str, ...], sent: float, chip: Chip, axis_sizes: Mapping[str, int]) -> float:
    """The time over NVLink inside a node, and over the network between nodes.

    Between nodes, devices of one node that belong to the same collective share the work, each with its own adapter.
    """
    size = _group_size(axes, axis_sizes)
    numbers = np.arange(math.prod(axis_sizes.values())).reshape(*axis_sizes.values())
    group = numbers[tuple(slice(None) if axis in axes else 0 for axis in axis_sizes)]
    in_node = int((group < chip.devices_per_node).sum())
    if in_node == size:
        return sent / chip.link_bandwidth
    return sent / min(chip.link_bandwidth, in_node * chip.network_bandwidth)


def _group_size(axes: tuple[str, ...], axis_sizes: Mapping[str, int]) -> int:
    for axis in axes:
        if axis not in axis_sizes:
            raise ValueError(f"wire_bytes names the axis {axis!r}; the mesh has {dict(axis_sizes)}.")
    return math.prod(axis_sizes[axis] for axis in axes)

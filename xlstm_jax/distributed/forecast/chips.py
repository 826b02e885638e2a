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
from collections import defaultdict
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
      peak_flops: FLOP/s of matrix products by dtype, dense. float32 is at JAX's default precision: one pass of
        bfloat16 on TPUs, TF32 on GPUs.
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
    peak_flops: Mapping[str, float]
    hbm_bandwidth: float
    clock_hz: float | None
    link_bandwidth: float
    torus_axes: int
    network_bandwidth: float | None = None
    devices_per_node: int | None = None


def _peaks(bfloat16: float, int8: float, float32: float | None = None) -> dict[str, float]:
    return {"bfloat16": bfloat16, "int8": int8, "float32": float32 or bfloat16}


# The clock follows from peak = matrix units x (128 x 128) x 2 FLOP x clock; v4 and v5p have 2 cores of 4 units each,
# v5e 1 of 4. For v6e (256 x 256) 4 units are taken: cloud.google.com names 2, but the cycles that the compiler
# estimates for a matrix product are fewer than 2 units could take.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            "v4", ("TPU v4",), 32 * GIB, int(30.75 * GIB), _peaks(275e12, 275e12), 1.2e12,
            clock_hz=1.05e9, link_bandwidth=4.5e10, torus_axes=3,
        ),
        Chip(
            "v5e", ("TPU v5 lite", "TPU v5e"), 16 * GIB, int(15.75 * GIB), _peaks(197e12, 394e12), 8.2e11,
            clock_hz=1.5e9, link_bandwidth=4.5e10, torus_axes=2,
        ),
        Chip(
            # 96 GiB are built in; the documentation lists the 95 that are left for users.
            "v5p", ("TPU v5", "TPU v5p"), 96 * GIB, int(95.74 * GIB), _peaks(459e12, 918e12), 2.765e12,
            clock_hz=1.75e9, link_bandwidth=9e10, torus_axes=3,
        ),
        Chip(
            "v6e", ("TPU v6 lite", "TPU v6e"), 32 * GIB, int(31.25 * GIB), _peaks(918e12, 1836e12), 1.64e12,
            clock_hz=1.75e9, link_bandwidth=9e10, torus_axes=2,
        ),
        Chip(
            "a100", ("NVIDIA A100-SXM4-80GB",), int(80e9), int(80e9), _peaks(312e12, 624e12, 156e12), 2.039e12,
            clock_hz=None, link_bandwidth=3e11, torus_axes=0, network_bandwidth=2.5e10, devices_per_node=8,
        ),
        Chip(
            "h100", ("NVIDIA H100 80GB HBM3",), int(80e9), int(80e9), _peaks(989e12, 1979e12, 494.5e12), 3.35e12,
            clock_hz=None, link_bandwidth=4.5e11, torus_axes=0, network_bandwidth=5e10, devices_per_node=8,
        ),
        Chip(
            "h200", ("NVIDIA H200",), int(141e9), int(141e9), _peaks(989e12, 1979e12, 494.5e12), 4.8e12,
            clock_hz=None, link_bandwidth=4.5e11, torus_axes=0, network_bandwidth=5e10, devices_per_node=8,
        ),
    )
}  # fmt: skip

# Slices that can be rented. Larger ones of v4 and v5p are made of cubes: multiples of 4, ascending, up to a pod.
FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBIC_SLICES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
LARGEST_SLICE = {"v4": (16, 16, 16), "v5p": (16, 16, 24)}
CUBE = 4
FLAT_RING = 16  # a dim of v5e or v6e is a ring where it is as long as the pod


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
        """Which dims are rings: of v5e and v6e one of the whole pod's length; of v4 and v5p all, or none.

        The source is the scaling book: v4 and v5p close their rings by optical switches between whole cubes of 4x4x4,
        so smaller slices have none. On a dim that is no ring, half the bandwidth is left for collectives.
        """
        if self.chip.torus_axes == 2:
            return tuple(size == FLAT_RING for size in self.shape)
        return (all(size % CUBE == 0 for size in self.shape),) * len(self.shape)

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


# ---------------------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True)
class Links:
    """The links between the devices of a mesh, as collectives over its axes use them.

    Attributes:
      chip: the device.
      axis_sizes: the mesh, outermost axis first.
      topology: of TPUs; None for GPUs.
      coords: of TPUs: where on the torus each device of the mesh lies, in the mesh's order: [devices, 3].
    """

    chip: Chip
    axis_sizes: Mapping[str, int]
    topology: Topology | None = None
    coords: Sequence[Sequence[int]] = ()

    def seconds(self, axes: Sequence[str], sent: float) -> float:
        """The time that a collective over these axes takes alone, in which each device sends so many bytes."""
        if self.topology is None:
            return sent / self._switched_bandwidth(axes)
        bandwidth = sum(self._torus_bandwidths(axes).values())
        return sent / bandwidth if bandwidth else 0.0

    def busiest_seconds(self, wire_bytes: Mapping[tuple[str, ...], float]) -> float:
        """The least time for all of them, side by side as far as they use other links.

        A collective uses the dims of the torus along which its groups lie, each in proportion to its bandwidth; the
        busiest dim decides. Behind the one switch of a node, times add up.
        """
        if self.topology is None:
            return sum(self.seconds(axes, sent) for axes, sent in wire_bytes.items())
        busy: dict[int, float] = defaultdict(float)
        for axes, sent in wire_bytes.items():
            for dim in self._torus_bandwidths(axes):
                busy[dim] += self.seconds(axes, sent)
        return max(busy.values(), default=0.0)

    def _group(self, axes: Sequence[str]) -> np.ndarray:
        """The numbers of the devices of one group that a collective over these axes connects."""
        unknown = [axis for axis in axes if axis not in self.axis_sizes]
        if unknown:
            raise ValueError(f"wire_bytes names the axis {unknown[0]!r}; the mesh has {dict(self.axis_sizes)}.")
        numbers = np.arange(math.prod(self.axis_sizes.values())).reshape(*self.axis_sizes.values())
        return numbers[tuple(slice(None) if axis in axes else 0 for axis in self.axis_sizes)].ravel()

    def _torus_bandwidths(self, axes: Sequence[str]) -> dict[int, float]:
        """Bytes/s that a device sends along each dim of the torus on which a group has more than one place.

        Places that are s apart leave room for s groups, which share the links. Around a closed ring data goes both
        ways; on a line, back along it, so that one way is left.
        """
        places = np.asarray(self.coords)[self._group(axes)]
        found = {}
        for dim, (size, wraps) in enumerate(zip(self.topology.shape, self.topology.wraps, strict=True)):
            line = np.unique(places[:, dim])
            if len(line) > 1:
                stride = int(np.diff(line).min())
                closed = wraps and len(line) * stride == size
                found[dim] = self.chip.link_bandwidth * (2 if closed else 1) / stride
        return found

    def _switched_bandwidth(self, axes: Sequence[str]) -> float:
        """Bytes/s of a GPU: NVLink inside a node; between nodes its own adapter, and those of its group beside it."""
        group = self._group(axes)
        in_node = int((group < self.chip.devices_per_node).sum())
        if in_node == len(group):
            return self.chip.link_bandwidth
        return min(self.chip.link_bandwidth, in_node * self.chip.network_bandwidth)


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
    flops: Mapping[str, float],
    hbm_bytes: float,
    wire_bytes: Mapping[tuple[str, ...], float],
    chip: Chip,
    links: Links,
    *,
    tokens_per_device: float | None = None,
) -> Roofline:
    """The three bounds by the chip's published figures.

    Args:
      flops: FLOP of matrix products per device and step, by dtype: {"bfloat16": 1e12}.
      hbm_bytes: bytes read and written in HBM per device and step.
      wire_bytes: bytes that each device sends per step, by the mesh axes of the collective: {("fsdp",): 8e9}.
      chip: the device.
      links: between the devices of the mesh.
      tokens_per_device: of this step.
    Raises:
      ValueError: bytes travel over an axis that the mesh has not.
    """
    compute_s = sum(count / peak_rate(chip, dtype) for dtype, count in flops.items())
    wire_s = links.busiest_seconds({axes: sent for axes, sent in wire_bytes.items() if sent})
    ridge = None
    if tokens_per_device is not None and compute_s:
        ridge = tokens_per_device * wire_s / compute_s
    total, memory_s = sum(flops.values()), hbm_bytes / chip.hbm_bandwidth
    return Roofline(compute_s, memory_s, wire_s, total, hbm_bytes, sum(wire_bytes.values()), ridge)


def peak_rate(chip: Chip, dtype: str) -> float:
    """FLOP/s of matrix products in a dtype; narrow floats at the rate of int8, others unknown at that of float32."""
    if dtype == "float16":
        dtype = "bfloat16"
    if dtype.startswith("float8"):
        dtype = "int8"
    return chip.peak_flops.get(dtype, chip.peak_flops["float32"])

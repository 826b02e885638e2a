"""Table of accelerators: published figures of each chip, and the available slices.

Rates are per chip and second, in FLOP and bytes, with 1e9 for giga; memory sizes are in bytes. Link bandwidth is given
*one way*: a ring uses links in both directions at once and so moves twice as much per axis.

A new chip needs an entry in ``CHIPS``; a new GPU needs another in ``gpu_targets``, and a new TPU in
``xlstm_jax.accelerators.TPUS``, with the chip's slices and XLA options.

Sources. TPU: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter "How to Think About TPUs", tables of
specifications and of interconnect figures; cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e, tpu7x. A chip of TPU7x
is two devices, so the table has half of the figures of the page (2,307 TFLOP/s in bfloat16, 4,614 in float8, 7,380 GB/s
of HBM; 206e9 bytes by ``jax._src.tpu_info``, which a test compares with all rows). The page gives TPU7x the
interconnect bandwidth of v5p (1,200 GB/s per chip, both ways), so its links have v5p's figure. GPU: NVIDIA's data
sheets of A100 (SXM4 80 GB), H100 (SXM5), H200 (SXM), DGX B200, HGX B300, GB200 NVL72 and GB300 NVL72, the last four
divided by the number of GPUs, rates without sparsity; for networks the DGX data sheets, and for B300 and
GB300 one ConnectX-8 of 800 Gb/s for each GPU. B300 and GB300 have 288 GB of HBM3e installed.

Eight bits. TPU: "Peak compute per chip (Int8)" of the same pages; TPU7x has float8 units and no int8 units, the others
have int8 units and no float8 units. GPU: rows "INT8 Tensor Core" and "FP8 Tensor Core" of the same sheets, half of the
figure with sparsity; A100 has no FP8, and B300 and GB300 hardly any INT8.

Links to the host. GPU: PCIe x16, of generation 4 (A100) or 5 (also B300, whose hosts have no more), and NVLink-C2C of
GB200 and GB300, 900 GB/s both ways for two GPUs, by the same data sheets. TPU: the book has 16 GB/s each way for v4; no
figure is published for later TPUs, so the table uses v4's figure, for TPU7x half for each of the two devices.

Between the two devices of a chip of TPU7x: we found no figure in bytes. The table assumes six links of the torus, so
that this connection never bounds a collective that also crosses chips.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from xlstm_jax.accelerators import CUBE, TPUS, Shapes

GIB = 2**30


class Efficiency(NamedTuple):
    """Fractions of a chip's published rates that kernels reach: FLOP/s of matrix products, and HBM bytes/s."""

    products: float
    memory: float


@dataclass(frozen=True)
class Chip:
    """A device as JAX counts devices: a TPU chip with every core, half a chip of TPU7x, or a GPU.

    Attributes:
      name: name in topologies: "v5e", "h100".
      device_kinds: values of JAX's ``device_kind``.
      hbm_bytes: memory as published.
      usable_hbm_bytes: memory available to a program. TPU: the limit in libtpu's error for a program that is too
        large. GPU: as published; the driver uses some 5 % of the installed memory beyond this figure (B300 and GB300:
        the 270 and 279 GB of the HGX and NVL72 data sheets).
      peak_flops: FLOP/s of dense matrix products: "bfloat16", "int8", "float32" and, with float8 units, "float8".
        float32 is at JAX's default precision: one pass of bfloat16 on TPUs, TF32 on GPUs. See ``peak_rate``.
      hbm_bandwidth: bytes/s.
      clock_hz: clock of the matrix units, which converts estimated cycles to seconds; None for GPUs.
      link_bandwidth: bytes/s one way: a single ICI link of a TPU chip; the sum of a GPU's NVLinks.
      torus_axes: TPU: number of torus axes, with two links per chip each. GPU: 0.
      network_bandwidth: bytes/s one way and device between nodes; None for TPUs, since a slice is a single torus.
      host_bandwidth: bytes/s one way between host memory and device; both directions run at once.
      efficiency: fractions of ``peak_flops`` and ``hbm_bandwidth`` that kernels reach; None for TPUs, whose compiler
        estimates the time of each kernel.
      devices_per_node: GPUs joined by NVLink: in a host, for GB200 and GB300 in a rack; None for TPUs.
      slices: TPU: shapes of the slices for rent, the largest last.
      cube: TPU: side of the cubes that form larger slices; None without cubes.
      sparse_cores: TPU: whether the chip has SparseCores, which can run every kind of collective.
      devices_per_chip: devices of a TPU chip, which share the chip's links; 1 for GPUs.
      chip_bandwidth: bytes/s one way between the devices of a chip; None for a chip with a single device.

    >>> CHIPS["v5e"].hbm_bytes / 2**30, CHIPS["v5e"].peak_flops["bfloat16"]
    (16.0, 197000000000000.0)
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
    host_bandwidth: float
    network_bandwidth: float | None = None
    efficiency: Efficiency | None = None
    devices_per_node: int | None = None
    slices: Shapes = ()
    cube: int | None = None
    sparse_cores: bool = False
    devices_per_chip: int = 1
    chip_bandwidth: float | None = None

    @property
    def pod(self) -> tuple[int, ...]:
        """The shape of the largest slice of a TPU: the number of chips along each torus axis.

        Raises an ``IndexError`` for a GPU, which has no slices.
        """
        return self.slices[-1]

    @property
    def reached(self) -> "Chip":
        """The same chip with rates that kernels reach (``efficiency``) in place of published rates; TPUs: unchanged."""
        if self.efficiency is None:
            return self
        peaks = {dtype: self.efficiency.products * peak for dtype, peak in self.peak_flops.items()}
        bandwidth = self.efficiency.memory * self.hbm_bandwidth
        return dataclasses.replace(self, peak_flops=peaks, hbm_bandwidth=bandwidth, efficiency=None)


def _peaks(
    bfloat16: float, int8: float, *, float8: float | None = None, float32: float | None = None
) -> dict[str, float]:
    peaks = {"bfloat16": bfloat16, "int8": int8, "float32": float32 or bfloat16}
    return peaks if float8 is None else peaks | {"float8": float8}


HOPPER = _peaks(989e12, 1979e12, float8=1979e12, float32=494.5e12)

# Fractions that kernels of a training step reach. Products: fitted by benchmarks/published.py to two published runs of
# A100 and one of H100; no run of a later chip was found, so later chips have H100's fraction. Memory: a plain copy
# reaches some 0.9; 0.8 is used for every chip. docs/forecast.md compares these fractions with other published runs.
A100_REACHES, H100_REACHES = Efficiency(products=0.75, memory=0.8), Efficiency(products=0.55, memory=0.8)


def _tpu(
    name: str,
    hbm_bytes: int,
    usable_hbm_bytes: int,
    peak_flops: Mapping[str, float],
    hbm_bandwidth: float,
    **figures: Any,
) -> Chip:
    """Makes the ``Chip`` of a TPU, from published figures and from the entry ``TPUS[name]``.

    The entry gives device kinds, torus axes, slices, and devices per chip. ``figures`` are further fields of ``Chip``,
    such as ``clock_hz``.
    """
    tpu = TPUS[name]
    figures |= {"torus_axes": tpu.torus_axes, "slices": tpu.slices, "devices_per_chip": tpu.devices_per_chip}
    return Chip(name, tpu.device_kinds, hbm_bytes, usable_hbm_bytes, peak_flops, hbm_bandwidth, **figures)


# The clock follows from peak = matrix units x (128 x 128) x 2 FLOP x clock. v4 and v5p have 2 cores of 4 units each,
# v5e has 1 core of 4 units. v6e has units of 256 x 256; cloud.google.com names 2 of them, but the compiler's cycles for
# a matrix product are fewer than 2 units need, so the table assumes 4. By the same reasoning each device of TPU7x has 4
# units (2,604,600 cycles for 8192 x 8192 x 8192 in bfloat16; 2 units need 4,194,304).
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu(
            "v4", 32 * GIB, int(30.75 * GIB), _peaks(275e12, 275e12), 1.2e12,
            clock_hz=1.05e9, link_bandwidth=4.5e10, host_bandwidth=1.6e10, cube=CUBE,
        ),
        _tpu(
            "v5e", 16 * GIB, int(15.75 * GIB), _peaks(197e12, 394e12), 8.2e11,
            clock_hz=1.5e9, link_bandwidth=4.5e10, host_bandwidth=1.6e10,
        ),
        _tpu(
            # 96 GiB are installed; the documentation lists the 95 GiB available to users.
            "v5p", 96 * GIB, int(95.74 * GIB), _peaks(459e12, 918e12), 2.765e12,
            clock_hz=1.75e9, link_bandwidth=9e10, host_bandwidth=1.6e10, cube=CUBE, sparse_cores=True,
        ),
        _tpu(
            "v6e", 32 * GIB, int(31.25 * GIB), _peaks(918e12, 1836e12), 1.64e12,
            clock_hz=1.75e9, link_bandwidth=9e10, host_bandwidth=1.6e10, sparse_cores=True,
        ),
        _tpu(
            "tpu7x", 96 * GIB, int(94.74 * GIB), _peaks(1153.5e12, 1153.5e12, float8=2307e12), 3.69e12,
            clock_hz=2.2e9, link_bandwidth=9e10, host_bandwidth=8e9, cube=CUBE, sparse_cores=True,
            chip_bandwidth=6 * 9e10,
        ),
        Chip(
            "a100", ("NVIDIA A100-SXM4-80GB",), int(80e9), int(80e9), _peaks(312e12, 624e12, float32=156e12), 2.039e12,
            clock_hz=None, link_bandwidth=3e11, torus_axes=0, host_bandwidth=3.2e10,
            network_bandwidth=2.5e10, efficiency=A100_REACHES, devices_per_node=8,
        ),
        Chip(
            "h100", ("NVIDIA H100 80GB HBM3",), int(80e9), int(80e9), HOPPER, 3.35e12,
            clock_hz=None, link_bandwidth=4.5e11, torus_axes=0, host_bandwidth=6.4e10,
            network_bandwidth=5e10, efficiency=H100_REACHES, devices_per_node=8,
        ),
        Chip(
            "h200", ("NVIDIA H200",), int(141e9), int(141e9), HOPPER, 4.8e12,
            clock_hz=None, link_bandwidth=4.5e11, torus_axes=0, host_bandwidth=6.4e10,
            network_bandwidth=5e10, efficiency=H100_REACHES, devices_per_node=8,
        ),
        Chip(
            "b200", ("NVIDIA B200",), int(180e9), int(180e9), _peaks(2.25e15, 4.5e15, float8=4.5e15, float32=1.125e15),
            8e12, clock_hz=None, link_bandwidth=9e11, torus_axes=0, host_bandwidth=6.4e10,
            network_bandwidth=5e10, efficiency=H100_REACHES, devices_per_node=8,
        ),
        Chip(
            "gb200", ("NVIDIA GB200",), int(186e9), int(186e9), _peaks(2.5e15, 5e15, float8=5e15, float32=1.25e15),
            8e12, clock_hz=None, link_bandwidth=9e11, torus_axes=0, host_bandwidth=2.25e11,
            network_bandwidth=5e10, efficiency=H100_REACHES, devices_per_node=72,
        ),
        Chip(
            "b300", ("NVIDIA B300", "NVIDIA B300 SXM6 AC"), int(288e9), int(270e9),
            _peaks(2.25e15, 1.5e14, float8=4.5e15, float32=1.125e15), 7.7e12,
            clock_hz=None, link_bandwidth=9e11, torus_axes=0, host_bandwidth=6.4e10,
            network_bandwidth=1e11, efficiency=H100_REACHES, devices_per_node=8,
        ),
        Chip(
            "gb300", ("NVIDIA GB300",), int(288e9), int(279e9),
            _peaks(2.5e15, 1.65e14, float8=5e15, float32=1.25e15), 8e12,
            clock_hz=None, link_bandwidth=9e11, torus_axes=0, host_bandwidth=2.25e11,
            network_bandwidth=1e11, efficiency=H100_REACHES, devices_per_node=72,
        ),
    )
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip with JAX's ``device_kind``; None for a device without published figures, such as a CPU.

    >>> chip_of("TPU v6 lite").name, chip_of("cpu")
    ('v6e', None)
    """
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)


# Dtypes that share the units of another dtype. GPUs have equal published rates for both. Other kinds of float8 have no
# units on these chips.
_SHARED_UNITS = {"float16": "bfloat16", "float8_e4m3fn": "float8", "float8_e5m2": "float8"}
_SHARED_UNITS |= dict.fromkeys(("uint8", "int4", "uint4"), "int8")


def peak_rate(chip: Chip, dtype: str) -> float:
    """Returns the published FLOP/s of matrix products whose operands have a dtype, by JAX's name of the dtype.

    >>> [peak_rate(CHIPS[name], "float8_e4m3fn") / 1e12 for name in ("a100", "h100", "v5e")]
    [312.0, 1979.0, 197.0]

    Without units for a kind of float8 the compiler widens the operands, and the bfloat16 rate applies. A dtype without
    a rate has the float32 rate.
    """
    widened = "bfloat16" if dtype.startswith("float8") else "float32"
    return chip.peak_flops.get(_SHARED_UNITS.get(dtype, dtype), chip.peak_flops[widened])

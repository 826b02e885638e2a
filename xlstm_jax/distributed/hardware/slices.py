"""Slices of TPU chips: those that can be rented, by their names, as "v5e:16x16"."""

import math
import re
from dataclasses import dataclass
from typing import Any

from xlstm_jax.distributed.hardware.chips import CHIPS, Chip

# Slices that can be rented. Larger ones of v4 and v5p are made of cubes: multiples of 4, ascending, up to a pod.
FLAT_SLICES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
CUBIC_SLICES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
LARGEST_SLICE = {"v4": (16, 16, 16), "v5p": (16, 16, 24)}
CUBE = 4
FLAT_RING = 16  # a dim of v5e or v6e is a ring where it is as long as the pod


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

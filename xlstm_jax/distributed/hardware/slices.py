"""Slices of TPU chips: those that can be rented, by their names, as "v5e:16x16"."""

import math
import re
from dataclasses import dataclass
from typing import Any

from xlstm_jax.distributed.hardware.chips import CHIPS, Chip


@dataclass(frozen=True)
class Topology:
    """A slice of TPU chips: ``name`` as "v5e:16x16", ``shape`` of its torus. JAX sees one device per chip.

    >>> Topology("v5e:4x16", CHIPS["v5e"], (4, 16)).wraps
    (False, True)
    """

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
        if self.chip.cube is None:
            return tuple(size == max(self.chip.pod) for size in self.shape)
        return (_is_of_cubes(self.shape, self.chip.cube),) * len(self.shape)

    def description(self) -> dict[str, Any]:
        """Arguments of ``jax.experimental.topologies.get_topology_desc(platform="tpu", ...)``."""
        arguments: dict[str, Any] = {"topology_name": self.name}
        if self.chip.name == "v4":
            arguments["chip_config_name"] = "megacore"  # both cores are one device, as on machines that have the chips
        if self.num_devices == 1:
            arguments["chips_per_host_bounds"] = (1, 1, 1)  # less than a host
        return arguments


def parse_topology(name: str) -> Topology:
    """Reads "v5e:16x16": the chip, and how many of them along each axis of the torus.

    >>> parse_topology("v5p:4x4x8").num_devices
    128

    Raises:
      ValueError: an unknown chip, or a slice that does not exist; lists those that do.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    chip = CHIPS.get(match[1]) if match else None
    if match is None or chip is None or not chip.torus_axes:
        known = ", ".join(chip.name for chip in CHIPS.values() if chip.torus_axes)
        raise ValueError(
            f"topology={name!r} is not <chip>:<shape> with a chip among {known}. For 256 chips of v5e: 'v5e:16x16'; "
            f"for 128 of v5p: 'v5p:4x4x8'."
        )
    shape = tuple(int(size) for size in match[2].split("x"))
    if not _is_slice(chip, shape):
        raise ValueError(f"topology={name!r}: there is no such slice of {chip.name}. There are {_slices(chip)}.")
    return Topology(name, chip, shape)


def _is_of_cubes(shape: tuple[int, ...], cube: int) -> bool:
    return all(size and size % cube == 0 for size in shape)


def _is_slice(chip: Chip, shape: tuple[int, ...]) -> bool:
    if shape in chip.slices or chip.cube is None:
        return shape in chip.slices
    ascending = len(shape) == len(chip.pod) and list(shape) == sorted(shape)
    return ascending and _is_of_cubes(shape, chip.cube) and all(map(int.__le__, shape, chip.pod))


def _slices(chip: Chip) -> str:
    *shapes, pod = ("x".join(map(str, shape)) for shape in (*chip.slices, chip.pod))
    larger = f", and multiples of {chip.cube} in ascending order up to {pod}, as 4x4x8" if chip.cube else ""
    return ", ".join(shapes) + larger

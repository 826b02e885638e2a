"""Names of sets of devices: TPU slices for rent, as "v5e:16x16"; GPU hosts, as "h100:32x8"."""

import math
import re
from dataclasses import dataclass
from typing import Any

from xlstm_jax.forecast.hardware.chips import CHIPS, Chip
from xlstm_jax.forecast.hardware.gpu_targets import target_config

HOST = 8  # GPUs in a usual server
GPUS_OF_TRAY = 4  # GPUs in a host (tray) of GB200 and GB300; NVLink joins 18 trays


@dataclass(frozen=True)
class Topology:
    """Devices that need not be present: ``name`` as "v5e:16x16" or "h100:32x8".

    ``shape`` of TPUs is the torus of chips; JAX counts each chip as a device, and each chip of TPU7x as two. ``shape``
    of GPUs is (hosts, GPUs per host), or for GB200 and GB300 (racks, GPUs per rack): the number of NVLink domains, and
    the GPUs in each domain.

    >>> Topology("tpu7x:2x2x1", CHIPS["tpu7x"], (2, 2, 1)).dims
    (2, 2, 1, 2)
    >>> Topology("v5e:4x16", CHIPS["v5e"], (4, 16)).wraps
    (False, True)
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims of the devices: ``shape``, followed by the number of devices on a chip, if a chip has several."""
        return self.shape if self.chip.devices_per_chip == 1 else (*self.shape, self.chip.devices_per_chip)

    @property
    def num_devices(self) -> int:
        return math.prod(self.dims)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each dim of ``shape`` is a ring: a bool for each dim, in order.

        TPUs v5e and v6e: a dim of the pod's full length is a ring. Other TPUs: all dims are rings if each is a multiple
        of the side of a cube (4 chips), else none. The source is the scaling book: v4 and v5p close their rings by
        optical switches between full cubes of 4x4x4, so smaller slices have no rings; the same is assumed for tpu7x. A
        dim without a ring has half the bandwidth for collectives. Switches join GPUs, so GPUs have no rings.
        """
        if not self.chip.torus_axes:
            return (False,) * len(self.shape)
        # Without cubes only the pod closes rings, by cables; cubes are joined by optical switches.
        if self.chip.cube is None:
            return tuple(size == max(self.chip.pod) for size in self.shape)
        return (all(size and size % self.chip.cube == 0 for size in self.shape),) * len(self.shape)

    @property
    def platform(self) -> str:
        """JAX's name of the compiler's platform: "tpu" for TPUs, "cuda" for GPUs."""
        return "tpu" if self.chip.torus_axes else "cuda"

    def description(self) -> dict[str, Any]:
        """Returns the keyword arguments of ``jax.experimental.topologies.get_topology_desc`` for these devices."""
        arguments: dict[str, Any] = {"platform": self.platform}
        if self.platform == "cuda":
            # XLA's shape for GPUs: slices x hosts x GPUs per host. A slice of several hosts is an NVLink domain.
            domains, gpus = self.shape
            per_host = math.gcd(gpus, GPUS_OF_TRAY)
            of_racks = (domains, gpus // per_host, per_host)
            slices = (1, domains, gpus) if self.chip.devices_per_node == HOST else of_racks
            return arguments | {"topology": "x".join(map(str, slices)), "target_config": target_config(self.chip)}
        arguments["topology_name"] = self.name
        if self.chip.name == "v4":
            # Both cores form a single device, as JAX counts devices on machines with v4 chips.
            arguments["chip_config_name"] = "megacore"
        if math.prod(self.shape) == 1:
            # A slice of a single chip is smaller than the default host, which has several.
            arguments["chips_per_host_bounds"] = (1, 1, 1)
        return arguments


def parse_topology(name: str) -> Topology:
    """Parses the name of a topology, such as "v5e:16x16" and "h100:32x8".

    TPUs: the chip, and the number of chips along each torus axis. GPUs: the chip, hosts, and GPUs per host, or for a
    single host only the GPUs ("h100:8"). GB200 and GB300: racks, which are NVLink domains, and GPUs per rack, up to 72.

    >>> parse_topology("tpu7x:4x4x4").num_devices  # 64 chips of two devices
    128
    >>> parse_topology("v5p:4x4x8").num_devices, parse_topology("h100:32x8").num_devices
    (128, 256)

    Raises:
      ValueError: the chip is unknown, the slice does not exist (the error lists the slices), there is no host or no
        GPU, or there are more GPUs per host than NVLink joins.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", name)
    chip = CHIPS.get(match[1]) if match else None
    if match is None or chip is None:
        tpus = ", ".join(chip.name for chip in CHIPS.values() if chip.torus_axes)
        gpus = ", ".join(chip.name for chip in CHIPS.values() if not chip.torus_axes)
        raise ValueError(
            f"topology={name!r} is not <chip>:<shape> with a chip among {tpus} (TPUs), {gpus} (GPUs). For 256 chips of "
            f"v5e: 'v5e:16x16'; for 128 of v5p: 'v5p:4x4x8'; for 32 hosts of 8 H100: 'h100:32x8'."
        )
    shape = tuple(int(size) for size in match[2].split("x"))
    if chip.devices_per_node:
        return Topology(name, chip, _hosts(name, chip.devices_per_node, shape))
    if shape not in chip.slices:
        # There are too many slices of full cubes to list.
        small = [shape for shape in chip.slices if not chip.cube or shape[0] < chip.cube]
        *shapes, pod = ("x".join(map(str, shape)) for shape in (*small, chip.pod))
        larger = f", and multiples of {chip.cube} in ascending order up to {pod}, as 4x4x8" if chip.cube else ""
        raise ValueError(
            f"topology={name!r}: there is no such slice of {chip.name}. There are {', '.join(shapes)}{larger}."
        )
    return Topology(name, chip, shape)


def _hosts(name: str, per_host: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns (hosts, GPUs per host) of a GPU topology; for GB200 and GB300 (racks, GPUs per rack).

    Args:
      name: full name of the topology, for the error.
      per_host: GPUs that NVLink joins in a host or rack, the maximum.
      shape: the numbers in the name; a single number is the GPUs of one host.
    Raises:
      ValueError: there are more than two numbers, no host or no GPU, or more GPUs per host than ``per_host``.
    """
    chip = name.partition(":")[0]
    host = "NVLink domain" if per_host > HOST else "host"
    hosts, gpus, *more = (1, *shape) if len(shape) == 1 else shape
    if more or not hosts or not 0 < gpus <= per_host:
        raise ValueError(
            f"topology={name!r} is not {host}s x GPUs of each, of which NVLink joins 1 to {per_host} {chip}. For 4 "
            f"{host}s of {per_host}: '{chip}:4x{per_host}'."
        )
    return hosts, gpus

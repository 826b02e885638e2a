"""Links between the devices of a mesh, and times of collectives over the links.

TPUs   a torus: groups of devices along its dims, both ways around a closed ring
GPUs   two networks: NVLink within a host, and between hosts an adapter (NIC) for each GPU

A collective over n GPUs, g in each of h hosts, sends s bytes from each GPU around a ring: s = payload x (n-1)/n, twice
as much in an all-reduce. Across the border of a host go s bytes too, shared by the host's g adapters:

    seconds    max(s / NVLink, s / (g x NIC)) by published rates; on one host s / NVLink alone
    nic_bytes  s / g, and 0 on one host; a staged collective needs payload x (h-1)/h / g, the least possible
    choice     NCCL's algorithm and its time, latency included, by measured rates: ``nccl``
    latency_s  latency of a collective: assumed for a torus (``latency``), of ``choice`` for GPUs

"Host" means a set of GPUs joined by NVLink.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xlstm_jax.forecast.hardware import nccl
from xlstm_jax.forecast.hardware.chips import Chip
from xlstm_jax.forecast.hardware.latency import torus_latency_s
from xlstm_jax.forecast.hardware.topologies import Topology

NVLINK, NETWORK = "NVLink", "network"
CHIP = -1  # number of the connection between the devices of a chip, beside the numbers of the torus dims


class _Line(NamedTuple):
    """Chips of a group along one torus dim: their number, the distance of neighbours, whether the ring is closed."""

    chips: int
    stride: int
    closed: bool

    @property
    def hops(self) -> int:
        """Number of links on the way to the farthest chip of the line; around a closed ring, half of the ring."""
        return self.stride * (self.chips // 2 if self.closed else self.chips - 1)


@dataclass(frozen=True)
class Links:
    """Links between the devices of a mesh, as used by collectives over mesh axes.

    Attributes:
      chip: the device.
      axis_sizes: mesh axes and sizes, outermost axis first.
      topology: always given for TPUs; None for GPUs at hand, which are assumed to have the usual number per host.
      coords: TPUs: torus coordinates of each device's chip in mesh order, [devices, 3].

    >>> from xlstm_jax.forecast.hardware import CHIPS
    >>> nodes = Links(CHIPS["h100"], {"dp": 32, "fsdp": 8})
    >>> nodes.seconds(("fsdp",), 45e9), nodes.seconds(("dp",), 45e9)  # within a node; between nodes
    (0.1, 0.9)
    >>> nodes.networks(("fsdp",)), nodes.networks(("dp", "fsdp")), nodes.nic_bytes(("dp", "fsdp"), 8e9)
    (('NVLink',), ('NVLink', 'network'), 1000000000.0)
    """

    chip: Chip
    axis_sizes: Mapping[str, int]
    topology: Topology | None = None
    coords: Sequence[Sequence[int]] = ()

    def seconds(self, axes: Sequence[str], sent: float) -> float:
        """Returns the seconds of a collective over ``axes`` whose devices each send ``sent`` bytes; without latency.

        The collective has its links to itself, at published rates. 0 on a TPU if a group has a single device.
        """
        if not self.chip.torus_axes:
            return sent / self._switched_bandwidth(axes)
        bandwidth = sum(self._torus_bandwidths(axes).values())
        return sent / bandwidth if bandwidth else 0.0

    def busiest_seconds(self, wire_bytes: Mapping[tuple[str, ...], float]) -> float:
        """Returns the least seconds for several collectives, which run in parallel on different links.

        ``wire_bytes`` has the bytes that each device sends, by the mesh axes of the collective. The seconds of
        collectives on the same link add up; the result is the time of the busiest link, 0 without collectives. On TPUs
        a link is a torus dim, and a collective sends over the dims of its groups, in proportion to their bandwidth. On
        GPUs the links are NVLink and the network between hosts.
        """
        busy: dict[int | str, float] = defaultdict(float)
        for axes, sent in wire_bytes.items():
            for link in self._torus_bandwidths(axes) if self.chip.torus_axes else self.networks(axes):
                busy[link] += self.seconds(axes, sent)
        return max(busy.values(), default=0.0)

    def networks(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the networks that a collective over the mesh axes ``axes`` uses on GPUs.

        ("NVLink",) within a host; ("network",) if each GPU is on a different host; ("NVLink", "network") for several
        hosts with several GPUs each. () for TPUs, and for a single GPU.
        """
        if self.chip.torus_axes:
            return ()
        group = self._group(axes)
        return (NVLINK,) * (group.devices > group.hosts) + (NETWORK,) * (group.hosts > 1)

    def nic_bytes(self, axes: Sequence[str], sent: float) -> float:
        """Returns the bytes through each GPU's adapter to other hosts, if each GPU sends ``sent`` bytes around a ring.

        0 for a group on one host, and for TPUs.
        """
        return sent / self._group(axes).per_host if NETWORK in self.networks(axes) else 0.0

    def choice(self, axes: Sequence[str], kind: str, sent: float) -> nccl.Way | None:
        """Returns NCCL's choice for a GPU collective: algorithm and protocol, latency, and time of the bytes.

        None for a group of a single device, and for TPUs, whose collectives have one algorithm.

        Args:
          axes: mesh axes of the collective.
          kind: XLA's name of the collective, such as "all-gather".
          sent: bytes sent by each GPU.
        """
        if not self.networks(axes):
            return None
        group = self._group(axes)
        # Rates measured with NCCL's tests, not published rates.
        reached = self._switched_bandwidth(axes, nccl.NVLINK_FRACTION, nccl.network_fraction(kind, group.hosts))
        return nccl.choice(kind, group, sent, reached)

    def latency_s(self, axes: Sequence[str], kind: str, sent: float) -> float:
        """Returns the latency of a collective over ``axes`` in seconds, without the bytes' time; 0 for a single device.

        TPUs: an assumption (see ``hardware.latency``), independent of ``sent``. GPUs: the latency of the algorithm that
        NCCL chooses for ``sent`` bytes from each GPU. ``kind`` is XLA's name of the collective, such as "all-gather".
        """
        if not self.chip.torus_axes:
            chosen = self.choice(axes, kind, sent)
            return chosen.latency_s if chosen else 0.0
        coords = self._coords(axes)
        between_devices = len(coords) > len(np.unique(coords, axis=0))  # a hop between the devices of a chip
        hops = sum(line.hops for line in self._lines(axes).values()) + between_devices
        return torus_latency_s(self.chip.name, kind, hops)

    def _groups(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the devices of each group in a collective over mesh axes: an array [groups, devices of a group].

        A device is given by its position in the flattened mesh. Devices of a group differ only along ``axes``.

        Raises:
          ValueError: the mesh has no such axis.
        """
        unknown = [axis for axis in axes if axis not in self.axis_sizes]
        if unknown:
            raise ValueError(f"wire_bytes names the axis {unknown[0]!r}; the mesh has {dict(self.axis_sizes)}.")
        names, sizes = list(self.axis_sizes), tuple(self.axis_sizes.values())
        # The collective's axes last, in mesh order, so that each row of the reshaped numbers is a group.
        order = sorted(range(len(names)), key=lambda i: names[i] in axes)
        numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return numbers.reshape(-1, math.prod(self.axis_sizes[axis] for axis in dict.fromkeys(axes)))

    def _group(self, axes: Sequence[str]) -> nccl.Group:
        """Returns the size of a GPU collective's group: its numbers of GPUs and hosts, and the fewest GPUs on a host.

        The group is one of the groups of devices that exchange data in a collective over ``axes``. Groups differ if the
        GPUs of a host are no multiple of the group size: then the group over the most hosts counts.
        """
        assert self.chip.devices_per_node  # a GPU
        per_host = self.topology.shape[-1] if self.topology else self.chip.devices_per_node
        # A mesh fills hosts in order. In a sorted group, each rise of the host's number is a border between hosts.
        hosts = np.sort(self._groups(axes) // per_host, axis=1)
        borders = (np.diff(hosts, axis=1) > 0).sum(axis=1)
        _, devices = np.unique(hosts[borders.argmax()], return_counts=True)
        return nccl.Group(int(devices.sum()), len(devices), int(devices.min()))

    def _torus_bandwidths(self, axes: Sequence[str]) -> dict[int, float]:
        """Returns the bytes/s of a device along each torus dim in a collective over ``axes``, by index of the dim.

        Only dims on which the devices of a group differ are included; {} for a single device. If neighbours in a group
        are s chips apart, s groups share the links between them. Around a closed ring data goes both ways. On an open
        line data must return along the same line, so a single direction is left. The devices of a chip share its links:
        groups with one device of each chip have half of the bandwidth on TPU7x. A group within a chip uses the
        connection between its devices, with the key ``CHIP`` (-1).
        """
        devices, chips = len(self._coords(axes)), len(np.unique(self._coords(axes), axis=0))
        if chips == 1 < devices and self.chip.chip_bandwidth:
            return {CHIP: self.chip.chip_bandwidth}
        sharing = self.chip.devices_per_chip * chips / devices  # groups that use the links of a chip
        bandwidth = self.chip.link_bandwidth / sharing
        return {dim: bandwidth * (2 if line.closed else 1) / line.stride for dim, line in self._lines(axes).items()}

    def _coords(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the torus coordinates of the chips of a group's devices: an array [devices of a group, torus dims].

        The group is the first group of a collective over ``axes``; all groups have the same layout. A chip with two
        devices of the group appears twice. TPUs only.
        """
        # The first group represents all groups, which have the same layout on the torus.
        return np.asarray(self.coords)[self._groups(axes)[0]]

    def _lines(self, axes: Sequence[str]) -> dict[int, "_Line"]:
        """Returns how the chips of a group lie on the torus: a ``_Line`` for each dim, by index of the dim.

        A ``_Line`` has the number of chips along the dim, the distance of neighbours, and whether they form a closed
        ring. The group is the first group of a collective over ``axes``. Dims along which its chips do not differ are
        left out. Distances along a dim are assumed to be equal. TPUs only.
        """
        assert self.topology is not None  # a TPU
        chips, lines = np.unique(self._coords(axes), axis=0), {}
        for dim, (size, wraps) in enumerate(zip(self.topology.shape, self.topology.wraps, strict=True)):
            at = np.unique(chips[:, dim])
            if len(at) > 1:
                stride = int(np.diff(at).min())
                lines[dim] = _Line(len(at), stride, bool(wraps and len(at) * stride == size))
        return lines

    def _switched_bandwidth(self, axes: Sequence[str], of_nvlink: float = 1.0, of_network: float = 1.0) -> float:
        """Returns the bytes/s that a GPU sends in a ring over ``axes``: the rate of the slower of NVLink and network.

        On one host this is the rate of NVLink. Over several hosts it is the lower of two rates: NVLink, and the sum of
        the network adapters that the group has on a host. ``of_nvlink`` and ``of_network`` are the fractions of the
        published rates that count; 1.0: the published rates.
        """
        assert self.chip.network_bandwidth  # a GPU
        group, within = self._group(axes), of_nvlink * self.chip.link_bandwidth
        # A ring over hosts goes through NVLink and adapters in turn: the slower one bounds it.
        if group.hosts == 1:
            return within
        return min(within, of_network * group.per_host * self.chip.network_bandwidth)

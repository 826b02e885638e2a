"""The links between the devices of a mesh, and the time that collectives take over them.

TPUs   a torus: groups of devices along its dims, both ways around a closed ring
GPUs   two networks: NVLink within a host, and between hosts an adapter (NIC) for each GPU

A collective over n GPUs, g of them in each of h hosts, is taken to be a ring. Each GPU sends s bytes, s = payload x
(n-1)/n, twice that in an all-reduce. The border of a host is crossed by s bytes too, which its g adapters share:

    seconds           max(s / NVLink, s / (g x NIC)), of h = 1 the first, of g = 1 the second
    nic_bytes         s / g, of h = 1 none; the least that there can be, staged, is payload x (h-1)/h / g
    latency_seconds   14 us + 1.9 us for each hop over NVLink + 4.0 us for each hop over the network; n-1 hops, of which
                      h-1 go over the network, twice that in an all-reduce

The latencies are those by which NCCL itself chooses its algorithm: ``src/graph/tuning.cc`` of NVIDIA/nccl, tables
baseLatencies and hwLatencies, algorithm Ring, protocol LL128. A host is what NVLink joins.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xlstm_jax.distributed.hardware.chips import Chip
from xlstm_jax.distributed.hardware.slices import Topology

NVLINK, NETWORK = "NVLink", "network"
BASE_LATENCY_S, NVLINK_HOP_S, NETWORK_HOP_S = 14e-6, 1.9e-6, 4.0e-6
ROUNDS = {"all-reduce": 2}  # around the ring; of other kinds one
SENT_AT_ONCE = {"collective-permute", "all-to-all", "ragged-all-to-all"}  # from each device to others, in one hop


@dataclass(frozen=True)
class Ring:
    """The GPUs of a group: how many, on how many hosts, and how many at least on each of these."""

    devices: int
    hosts: int
    per_host: int

    @property
    def networks(self) -> tuple[str, ...]:
        """What a collective over them uses; nothing, where the group is one device."""
        within, across = self.devices > self.hosts, self.hosts > 1
        return (NVLINK,) * within + (NETWORK,) * across


@dataclass(frozen=True)
class Links:
    """The links between the devices of a mesh, as collectives over its axes use them.

    Attributes:
      chip: the device.
      axis_sizes: the mesh, outermost axis first.
      topology: of TPUs always; of GPUs None for those at hand, whose hosts have as many as the chip's usually do.
      coords: of TPUs: where on the torus each device of the mesh lies, in the mesh's order: [devices, 3].

    >>> from xlstm_jax.distributed.hardware import CHIPS
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
        """The time of a collective over these axes alone, in which each device sends so many bytes; no latency."""
        if not self.chip.torus_axes:
            return sent / self._switched_bandwidth(axes)
        bandwidth = sum(self._torus_bandwidths(axes).values())
        return sent / bandwidth if bandwidth else 0.0

    def busiest_seconds(self, wire_bytes: Mapping[tuple[str, ...], float]) -> float:
        """The least time for several collectives, which run side by side as far as they use other links.

        On TPUs a collective uses the dims of the torus along which its groups lie, each in proportion to its bandwidth;
        on GPUs NVLink, the network between hosts, or both. The busiest decides.
        """
        busy: dict[int | str, float] = defaultdict(float)
        for axes, sent in wire_bytes.items():
            for link in self._torus_bandwidths(axes) if self.chip.torus_axes else self.networks(axes):
                busy[link] += self.seconds(axes, sent)
        return max(busy.values(), default=0.0)

    def networks(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Which networks of GPUs a collective over these axes uses: NVLink, that between hosts, both; TPUs: none."""
        return () if self.chip.torus_axes else self._ring(axes).networks

    def nic_bytes(self, axes: Sequence[str], sent: float) -> float:
        """What the adapter of each GPU carries to other hosts, where each sends so many bytes; TPUs have none."""
        if self.chip.torus_axes:
            return 0.0
        ring = self._ring(axes)
        return sent / ring.per_host if NETWORK in ring.networks else 0.0

    def latency_seconds(self, axes: Sequence[str], kind: str) -> float:
        """What a collective of GPUs takes beside the time of its bytes; of TPUs it is not known and left out."""
        if self.chip.torus_axes or not (ring := self._ring(axes)).networks:
            return 0.0
        over_network = ring.hosts - 1
        over_nvlink = ring.devices - 1 - over_network
        if kind in SENT_AT_ONCE:
            over_network, over_nvlink = min(over_network, 1), min(over_nvlink, 1)
        hops_s = over_nvlink * NVLINK_HOP_S + over_network * NETWORK_HOP_S
        return BASE_LATENCY_S + ROUNDS.get(kind, 1) * hops_s

    def _groups(self, axes: Sequence[str]) -> np.ndarray:
        """The numbers of the devices of each group that a collective over these axes connects: [groups, devices]."""
        unknown = [axis for axis in axes if axis not in self.axis_sizes]
        if unknown:
            raise ValueError(f"wire_bytes names the axis {unknown[0]!r}; the mesh has {dict(self.axis_sizes)}.")
        names, sizes = list(self.axis_sizes), tuple(self.axis_sizes.values())
        order = sorted(range(len(names)), key=lambda i: names[i] in axes)
        numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        return numbers.reshape(-1, math.prod(self.axis_sizes[axis] for axis in dict.fromkeys(axes)))

    def _ring(self, axes: Sequence[str]) -> Ring:
        """The ring over the most hosts of all groups; they differ where a host holds no whole number of them."""
        assert self.chip.devices_per_node  # a GPU
        per_host = self.topology.shape[-1] if self.topology else self.chip.devices_per_node
        hosts = np.sort(self._groups(axes) // per_host, axis=1)
        borders = (np.diff(hosts, axis=1) > 0).sum(axis=1)
        _, devices = np.unique(hosts[borders.argmax()], return_counts=True)
        return Ring(int(devices.sum()), len(devices), int(devices.min()))

    def _torus_bandwidths(self, axes: Sequence[str]) -> dict[int, float]:
        """Bytes/s that a device sends along each dim of the torus on which the devices of a group differ.

        Where neighbours in a group are s chips apart, s groups share the links between them. Around a closed ring data
        goes both ways; on a line it must come back along it, which leaves one way.
        """
        assert self.topology is not None  # a TPU
        coords = np.asarray(self.coords)[self._groups(axes)[0]]
        found = {}
        for dim, (size, wraps) in enumerate(zip(self.topology.shape, self.topology.wraps, strict=True)):
            line = np.unique(coords[:, dim])
            if len(line) > 1:
                stride = int(np.diff(line).min())
                closed = wraps and len(line) * stride == size
                found[dim] = self.chip.link_bandwidth * (2 if closed else 1) / stride
        return found

    def _switched_bandwidth(self, axes: Sequence[str]) -> float:
        """Bytes/s of a GPU: NVLink inside a host; between hosts the adapters of those of its group in its host."""
        assert self.chip.network_bandwidth  # a GPU
        ring = self._ring(axes)
        if ring.hosts == 1:
            return self.chip.link_bandwidth
        return min(self.chip.link_bandwidth, ring.per_host * self.chip.network_bandwidth)

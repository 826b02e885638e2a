"""The links between the devices of a mesh, and the time that collectives take over them."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xlstm_jax.distributed.hardware.chips import Chip
from xlstm_jax.distributed.hardware.slices import Topology


@dataclass(frozen=True)
class Links:
    """The links between the devices of a mesh, as collectives over its axes use them.

    Attributes:
      chip: the device.
      axis_sizes: the mesh, outermost axis first.
      topology: of TPUs; None for GPUs.
      coords: of TPUs: where on the torus each device of the mesh lies, in the mesh's order: [devices, 3].

    >>> from xlstm_jax.distributed.hardware import CHIPS
    >>> nodes = Links(CHIPS["h100"], {"dp": 32, "fsdp": 8})
    >>> nodes.seconds(("fsdp",), 45e9), nodes.seconds(("dp",), 45e9)  # within a node; between nodes
    (0.1, 0.9)
    """

    chip: Chip
    axis_sizes: Mapping[str, int]
    topology: Topology | None = None
    coords: Sequence[Sequence[int]] = ()

    def seconds(self, axes: Sequence[str], sent: float) -> float:
        """The time that a collective over these axes takes alone, in which each device sends so many bytes."""
        if self.topology is None:
            return sent / self._switched_bandwidth(axes)
        bandwidth = sum(self._torus_bandwidths(self.topology, axes).values())
        return sent / bandwidth if bandwidth else 0.0

    def busiest_seconds(self, wire_bytes: Mapping[tuple[str, ...], float]) -> float:
        """The least time for several collectives, which run side by side as far as they use other links.

        A collective uses the dims of the torus along which its groups lie, each in proportion to its bandwidth; the
        busiest dim decides. Behind the one switch of a node, times add up.
        """
        if self.topology is None:
            return sum(self.seconds(axes, sent) for axes, sent in wire_bytes.items())
        busy: dict[int, float] = defaultdict(float)
        for axes, sent in wire_bytes.items():
            for dim in self._torus_bandwidths(self.topology, axes):
                busy[dim] += self.seconds(axes, sent)
        return max(busy.values(), default=0.0)

    def _group(self, axes: Sequence[str]) -> np.ndarray:
        """The numbers of the devices of one group that a collective over these axes connects."""
        unknown = [axis for axis in axes if axis not in self.axis_sizes]
        if unknown:
            raise ValueError(f"wire_bytes names the axis {unknown[0]!r}; the mesh has {dict(self.axis_sizes)}.")
        numbers = np.arange(math.prod(self.axis_sizes.values())).reshape(*self.axis_sizes.values())
        return numbers[tuple(slice(None) if axis in axes else 0 for axis in self.axis_sizes)].ravel()

    def _torus_bandwidths(self, topology: Topology, axes: Sequence[str]) -> dict[int, float]:
        """Bytes/s that a device sends along each dim of the torus on which the devices of a group differ.

        Where neighbours in a group are s chips apart, s groups share the links between them. Around a closed ring data
        goes both ways; on a line it must come back along it, which leaves one way.
        """
        coords = np.asarray(self.coords)[self._group(axes)]
        found = {}
        for dim, (size, wraps) in enumerate(zip(topology.shape, topology.wraps, strict=True)):
            line = np.unique(coords[:, dim])
            if len(line) > 1:
                stride = int(np.diff(line).min())
                closed = wraps and len(line) * stride == size
                found[dim] = self.chip.link_bandwidth * (2 if closed else 1) / stride
        return found

    def _switched_bandwidth(self, axes: Sequence[str]) -> float:
        """Bytes/s of a GPU: NVLink inside a node; between nodes its own adapter, and those of its group beside it."""
        assert self.chip.devices_per_node and self.chip.network_bandwidth  # a TPU has a topology
        group = self._group(axes)
        in_node = int((group < self.chip.devices_per_node).sum())
        if in_node == len(group):
            return self.chip.link_bandwidth
        return min(self.chip.link_bandwidth, in_node * self.chip.network_bandwidth)

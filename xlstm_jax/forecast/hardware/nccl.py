"""Time of GPU collectives: NCCL's choice among algorithms and protocols, by NCCL's performance model.

    seconds of (algorithm, protocol) = latency + bytes / bandwidth       the least over NCCL's candidates

Latency and bandwidth are a trade-off: LL has the least latency and at most a quarter of the rate, Simple has the most
latency and the full rate, LL128 is in between. Over n GPUs on h hosts, g = n / h per host, each algorithm and protocol
has latency a per hop over NVLink and b per hop over the network:

    Ring   base + hops x a or b; n-1 hops, h-1 of these across hosts; for an all-reduce 2(n-1), 2h across hosts
    Tree   base + 2 x ((g-1) x a + log2(h) x b); only for all-reduces; sends 2 x payload
    Sends  base + a within hosts of several GPUs + b if there are several hosts; permutes and all-to-alls, which NCCL
           implements as sends and receives between GPUs

Tables and factors come from ``src/graph/tuning.cc`` of NVIDIA/nccl (2.21: baseLat, hwLat, llMaxBws, the factors of
LL128 and of trees, treeCorrectionFactor), for hosts with Intel processors. Left out: NCCL's use of switches (NVLS,
SHARP: large all-reduces are up to a third faster), limits by channel, which do not bind on these GPUs, and algorithms
of later releases (PAT). For 256 A100 the model gives 65 us for an all-reduce of some bytes; 62 to 71 us were measured
on 32 hosts of 8 (NVIDIA/nccl#652).

``bus_bandwidth`` of a link is the rate measured with NCCL's tests, not the published rate.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

# Fractions of a link's published rate that NCCL's tests reach.
# NVLink: 360 of 450 GB/s on 8 H100 are "exactly what we'd expect" (NVIDIA/nccl-tests#326; #212 names the overhead of
# the protocol, 20 %). NCCL's tables (src/graph/topo.h) have the same fraction for other GPUs: 240 of 300 GB/s for A100,
# 722 of 900 for B200.
NVLINK_FRACTION = 0.8
# Network: 360, 345, 320, 300, 280 and 260 of 400 GB/s per host on 4, 8, 16, 32, 64 and 128 hosts of H100,
# reduce-scatters (NVIDIA/nccl#1229); on two hosts 46 to 48 of 50 for each adapter (NVIDIA/nccl-tests#290). The fraction
# drops by a twentieth each time the hosts double. Gathers over 256 H100 on 32 hosts: 200 of 400 (NVIDIA/nccl#1218).
LOST_BY_DOUBLING = 0.05
GATHER_FRACTION, GATHER_HOSTS = 0.5, 32

RING, TREE = "Ring", "Tree"
LL, LL128, SIMPLE = "LL", "LL128", "Simple"
SENT_AT_ONCE = {"collective-permute", "all-to-all", "ragged-all-to-all"}  # sent directly, in one or two hops
_US = 1e-6
_BASE = {  # seconds before the first byte is sent
    (TREE, LL): 6.8 * _US, (TREE, LL128): 14.0 * _US, (TREE, SIMPLE): 0.0,
    (RING, LL): 6.6 * _US, (RING, LL128): 14.0 * _US, (RING, SIMPLE): 8.4 * _US,
}  # fmt: skip
_HOP = {  # seconds of each hop, over NVLink and over the network
    (TREE, LL): (0.6 * _US, 5.0 * _US), (TREE, LL128): (1.25 * _US, 8.5 * _US), (TREE, SIMPLE): (28 * _US, 28 * _US),
    (RING, LL): (0.6 * _US, 2.7 * _US), (RING, LL128): (1.9 * _US, 4.0 * _US), (RING, SIMPLE): (3.4 * _US, 14 * _US),
}  # fmt: skip
_POST = {LL: 1.0 * _US, LL128: 1.0 * _US, SIMPLE: 3.0 * _US}  # minimum seconds per hop of a ring that crosses hosts
_LL_MOST = {1: 87.7e9, 2: 39.0e9}  # maximum bytes/s of LL by number of hosts
_LL_MOST_BEYOND = 20.4e9  # maximum bytes/s of LL on three or more hosts
# Latency factor of all-reduces by Simple rings across hosts, from this many bytes per GPU on.
_PLATEAU, _PLATEAU_BYTES = 1.4, 64 * 16
# Fraction of the rate by log2(payload / 64 bytes); arrays beyond the table reach the full rate (1).
_TREE_REACHES = {
    LL: "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1",
    LL128: "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1",
    SIMPLE: ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9",
}
_TREE_FACTORS = {protocol: [float(word) for word in text.split()] for protocol, text in _TREE_REACHES.items()}


@dataclass(frozen=True)
class Group:
    """The GPUs of a collective: number of GPUs, number of hosts, and the fewest GPUs on a host."""

    devices: int
    hosts: int
    per_host: int


def network_fraction(kind: str, hosts: int) -> float:
    """Returns the fraction of the network's published rate reached by collectives over ``hosts`` hosts.

    >>> network_fraction("reduce-scatter", 16), network_fraction("all-gather", 16), network_fraction("all-gather", 32)
    (0.8, 0.8, 0.5)

    The fraction is 1 for a single host and 0.05 less for each doubling, for any ``kind`` (XLA's name of the
    collective); but 0.5 for an all-gather over 32 hosts or more.
    """
    if kind == "all-gather" and hosts >= GATHER_HOSTS:
        return GATHER_FRACTION
    return 1.0 - LOST_BY_DOUBLING * math.log2(hosts)


class Way(NamedTuple):
    """An algorithm with its protocol, "Tree LL"; its latency in seconds, and the seconds to send the bytes."""

    name: str
    latency_s: float
    bytes_s: float

    @property
    def seconds(self) -> float:
        return self.latency_s + self.bytes_s


def choice(kind: str, group: Group, sent: float, bus_bandwidth: float) -> Way:
    """Returns the fastest of NCCL's algorithms and protocols for a collective, with latency and time of the bytes.

    >>> few = choice("all-reduce", Group(256, 32, 8), 8.0, 2e11)
    >>> many = choice("all-gather", Group(8, 1, 8), 3.6e9, 3.6e11)
    >>> few.name, f"{few.seconds * 1e6:.0f} us", many.name, f"{many.seconds * 1e3:.2f} ms"
    ('Tree LL', '65 us', 'Ring Simple', '10.03 ms')

    Args:
      kind: the kind of collective, as XLA names it.
      group: the connected GPUs, two or more.
      sent: bytes sent by each GPU around a ring; ``payload x (n-1)/n``, twice as much in an all-reduce.
      bus_bandwidth: bytes/s of each GPU, as reached by NCCL with large arrays.
    """
    reduces = kind == "all-reduce"
    # A ring sends (n-1)/n of the payload, in an all-reduce twice; a tree sends the full payload twice.
    payload = sent * group.devices / (group.devices - 1) / (2 if reduces else 1)
    ways = [_ring(kind, group, protocol, sent, payload, bus_bandwidth) for protocol in _POST]
    if reduces:
        ways += [_tree(group, protocol, payload, bus_bandwidth) for protocol in _POST]
    return min(ways, key=lambda way: way.seconds)


def _ring(kind: str, group: Group, protocol: str, sent: float, payload: float, bus_bandwidth: float) -> Way:
    """Returns the latency and the time of the bytes of NCCL's ring for a collective, by NCCL's performance model.

    The name of the result is "Ring" with the protocol. Permutes and all-to-alls, which send directly between GPUs,
    count as at most two hops: one within a host, if a host has several GPUs, and one between hosts, if there are
    several.

    Args:
      kind: the kind of collective, as XLA names it.
      group: the connected GPUs, two or more.
      protocol: "LL", "LL128" or "Simple".
      sent: bytes sent by each GPU.
      payload: bytes of the unsharded array.
      bus_bandwidth: bytes/s of each GPU, as reached by NCCL with large arrays.
    """
    over_nvlink, over_network = _HOP[RING, protocol]
    hops, crossing, reduces = group.devices - 1, group.hosts - 1, kind == "all-reduce"
    if reduces:
        # An all-reduce goes around twice: a reduce-scatter, then an all-gather.
        hops, crossing = 2 * hops, 2 * group.hosts if group.hosts > 1 else 0
    elif kind in SENT_AT_ONCE:
        crossing = min(crossing, 1)
        hops = crossing + (group.per_host > 1)
    if group.hosts > 1:
        over_nvlink = max(over_nvlink, _POST[protocol])
    latency_s = _BASE[RING, protocol] + max(hops - crossing, 0) * over_nvlink + crossing * over_network
    if protocol == SIMPLE and reduces and group.hosts > 1 and payload >= _PLATEAU_BYTES * group.devices:
        latency_s *= _PLATEAU
    bandwidth = bus_bandwidth
    if protocol == LL:
        # LL sends a flag with every 4 bytes of data, so at most half the rate is data; tuning.cc uses even less.
        parts = 4 if group.hosts > 1 or reduces else 3
        bandwidth = min(_LL_MOST.get(group.hosts, _LL_MOST_BEYOND), bandwidth / parts)
    elif protocol == LL128:
        # 120 of 128 bytes are data. tuning.cc reduces the rate further for hosts with a single GPU.
        bandwidth *= 0.7 if group.devices < 2 * group.hosts else 0.92
    return Way(f"{RING} {protocol}", latency_s, sent / bandwidth)


def _tree(group: Group, protocol: str, payload: float, bus_bandwidth: float) -> Way:
    """Returns the latency and the time of the bytes of NCCL's tree for an all-reduce, by NCCL's performance model.

    The name of the result is "Tree" with the protocol.

    Args:
      group: the connected GPUs, two or more.
      protocol: "LL", "LL128" or "Simple".
      payload: bytes of the unsharded array, which each GPU sends twice: up and down the tree.
      bus_bandwidth: bytes/s of each GPU, as reached by NCCL with large arrays.
    """
    over_nvlink, over_network = _HOP[TREE, protocol]
    # Data is sent up to the root and down again: a chain through the GPUs of a host, a binary tree over hosts.
    levels = int(math.log2(group.hosts))
    hops_s = (group.devices // group.hosts - 1) * over_nvlink + levels * over_network
    bandwidth = 0.92 * bus_bandwidth
    if protocol == LL:
        bandwidth = min(bandwidth / 3.8, _LL_MOST.get(group.hosts, _LL_MOST_BEYOND))
    elif protocol == LL128:
        bandwidth *= 7 / 9 if group.hosts == 1 else 120 / 128
    power = int(math.log2(max(payload / 64, 1.0)))
    factors = _TREE_FACTORS[protocol]
    bandwidth *= factors[power] if power < len(factors) else 1.0
    return Way(f"{TREE} {protocol}", _BASE[TREE, protocol] + 2 * hops_s, 2 * payload / bandwidth)

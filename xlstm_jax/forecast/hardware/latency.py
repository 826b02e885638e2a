"""Latency of collectives on a TPU's torus: an assumption, the same for every chip.

    seconds = start + hops x hop        an all-reduce makes all hops twice: it scatters, then gathers

Around a closed ring of n chips data is sent both ways, so the farthest chip is n / 2 hops away; along an open line
n - 1 hops. A collective over several torus dims makes the hops of each dim in sequence.

**No source.** Google publishes no latency of a collective. "How to Scale Your Model" (jax-ml.github.io/scaling-book,
chapter "Sharded Matrices and How to Multiply Them") has "about 1 us" for a hop; the 5 us from the start of an
operation to its first byte are assumed. Latencies of GPUs come from NCCL, see ``nccl``.

To compute stored results with other constants, change ``TPU_LATENCY`` and run ``python -m benchmarks.peers --redraw``.
"""

from typing import NamedTuple

from xlstm_jax.accelerators import TPUS


class Latency(NamedTuple):
    """Seconds from the start of a collective to its first byte, and seconds of each hop between neighbours."""

    start_s: float
    hop_s: float


ASSUMED = Latency(start_s=5e-6, hop_s=1e-6)
TPU_LATENCY: dict[str, Latency] = dict.fromkeys(TPUS, ASSUMED)


def torus_latency_s(chip: str, kind: str, hops: int) -> float:
    """Returns the latency in seconds of a collective on a TPU's torus: the time that does not depend on its bytes.

    >>> [f"{torus_latency_s('v5e', kind, 8) * 1e6:.0f} us" for kind in ("all-gather", "all-reduce")]
    ['13 us', '21 us']

    Args:
      chip: name of the chip, "v5e".
      kind: opcode, "all-gather". A permute goes to a neighbour and so makes one hop.
      hops: hops to the farthest chip; 0 for a single device, which sends nothing.
    """
    if not hops:
        return 0.0
    start_s, hop_s = TPU_LATENCY[chip]
    return start_s + hop_s * {"all-reduce": 2 * hops, "collective-permute": 1}.get(kind, hops)

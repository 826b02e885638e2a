"""Largest leaves worth packing: compares the latency saved by packing with the time of the additional copy.

A packed leaf of B bytes saves, in each pass, a separate collective on each axis:

    saved    sum over axes of (launch + hops x hop)
    cost     2 B / HBM bandwidth        the unsharded leaf is read and written once more

A closed ring of n devices sends both ways, so that the last shard takes n // 2 hops. The latency of TPU collectives is
not published. ``LAUNCH_S`` and ``HOP_S`` are assumptions, not measurements: pass measured times if you have any.
Latency may be hidden behind matrix products; the limit compares exposed times.
"""

from collections.abc import Mapping

from xlstm_jax.forecast.hardware.chips import Chip

LAUNCH_S, HOP_S = 5e-6, 1e-6  # assumptions for a collective on a TPU


def packing_limit(
    chip: Chip, axis_sizes: Mapping[str, int], *, launch_s: float = LAUNCH_S, hop_s: float = HOP_S
) -> int:
    """Returns the bytes of a leaf below which packing takes less time than separate collectives for the leaf.

    Packing copies small leaves into one array, which a single collective sends. The bytes are those of the unsharded
    leaf, in the dtype that is sent.

    >>> from xlstm_jax.forecast.hardware import CHIPS
    >>> packing_limit(CHIPS["v5e"], {"fsdp_x": 4, "fsdp_y": 4}), packing_limit(CHIPS["h100"], {"fsdp": 8})
    (5740000, 0)

    Args:
      chip: the device.
      axis_sizes: the axes over which leaves are gathered, with their sizes, each a closed ring of links.
      launch_s: seconds of a collective in addition to bytes and hops.
      hop_s: seconds from a device to its neighbour.
    Returns:
      Bytes. 0 for GPUs, where XLA already combines small collectives; 0 on a single device.
    """
    if not chip.torus_axes:
        return 0
    saved = sum(launch_s + size // 2 * hop_s for size in axis_sizes.values() if size > 1)
    return int(saved * chip.hbm_bandwidth / 2)

"""Largest leaves worth packing: compares the latency saved by packing with the time of the additional copy.

A packed leaf of B bytes saves, in each pass, a separate collective on each axis:

    saved    sum over axes of (start + hops x hop)
    cost     2 B / HBM bandwidth        the unsharded leaf is read and written once more

A closed ring of n devices sends both ways, so that the last shard takes n // 2 hops. Latencies are those of
``latency``: assumptions, not measurements; pass measured times if you have any. Latency may be hidden behind matrix
products; the limit compares exposed times.
"""

import math
from collections.abc import Mapping

from xlstm_jax.forecast.hardware.chips import Chip
from xlstm_jax.forecast.hardware.latency import TPU_LATENCY


def packing_limit(
    chip: Chip,
    axis_sizes: Mapping[str, int | tuple[int, ...]],
    *,
    launch_s: float | None = None,
    hop_s: float | None = None,
) -> int:
    """Returns the bytes of a leaf below which packing takes less time than separate collectives for the leaf.

    Packing copies small leaves into one array, which a single collective sends. The bytes are those of the unsharded
    leaf, in the dtype that is sent.

    >>> from xlstm_jax.forecast.hardware import CHIPS
    >>> packing_limit(CHIPS["v5e"], {"fsdp_x": 4, "fsdp_y": 4}), packing_limit(CHIPS["h100"], {"fsdp": 8})
    (5740000, 0)
    >>> packing_limit(CHIPS["v5e"], {"fsdp": (16, 16)})  # one axis over two dims of the torus: XLA combines
    0

    Args:
      chip: the device.
      axis_sizes: the axes over which leaves are gathered, each with its size if the axis is a closed ring of links, or
        with the sizes of the dims of the torus that the axis spans, as (16, 16).
      launch_s: seconds of a collective in addition to bytes and hops; None: as assumed in ``latency``.
      hop_s: seconds from a device to its neighbour; None: as assumed in ``latency``.
    Returns:
      Bytes. 0 where XLA itself combines small collectives: on GPUs, and for a single axis that spans several dims of a
      torus. 0 on a single device.
    """
    if not chip.torus_axes:
        return 0
    dims = [sizes if isinstance(sizes, tuple) else (sizes,) for sizes in axis_sizes.values()]
    spread = [sizes for sizes in dims if math.prod(sizes) > 1]
    if len(spread) == 1 and len(spread[0]) > 1:
        return 0
    assumed = TPU_LATENCY[chip.name]
    start = assumed.start_s if launch_s is None else launch_s
    hop = assumed.hop_s if hop_s is None else hop_s
    saved = sum(start + hop * sum(size // 2 for size in sizes) for sizes in spread)
    return int(saved * chip.hbm_bandwidth / 2)

"""Lower bound of a step's time by the figures that a chip's maker publishes.

  compute   FLOP of matrix products / peak rate
  memory    bytes read and written in HBM / HBM bandwidth
  wire      bytes each device sends on the busiest axis of the torus / that axis's bandwidth

The largest of the three bounds is the time of a step with perfect overlap. No bound is a measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from xlstm_jax.forecast.hardware.chips import peak_rate
from xlstm_jax.forecast.hardware.links import Links


@dataclass(frozen=True)
class Roofline:
    """The three bounds of a step's time in seconds, and the amounts behind them, per device and step.

    >>> bounds = Roofline(compute_s=0.08, memory_s=0.03, wire_s=0.05, flops=1.6e13, hbm_bytes=2.5e10, wire_bytes=4.5e9)
    >>> bounds.bound, bounds.seconds
    ('compute', 0.08)

    ``ridge_tokens`` is the number of tokens per device at which compute takes as long as communication: compute time
    grows with the tokens, weight traffic does not. None if the number of tokens is unknown.
    """

    compute_s: float
    memory_s: float
    wire_s: float
    flops: float
    hbm_bytes: float
    wire_bytes: float
    ridge_tokens: float | None = None

    @property
    def seconds(self) -> float:
        """The largest of the three bounds, in seconds."""
        return max(self.compute_s, self.memory_s, self.wire_s)

    @property
    def bound(self) -> str:
        """Name of the largest bound: "compute", "memory" or "wire"."""
        times = {"compute": self.compute_s, "memory": self.memory_s, "wire": self.wire_s}
        return max(times, key=times.__getitem__)


def step_bounds(
    flops: Mapping[str, float],
    hbm_bytes: float,
    wire_bytes: Mapping[tuple[str, ...], float],
    links: Links,
    *,
    tokens_per_device: float | None = None,
) -> Roofline:
    """Returns the three bounds of a step's time in seconds (compute, memory, wire), with the amounts behind them.

    Args:
      flops: FLOP of matrix products per device and step, by dtype: {"bfloat16": 1e12}.
      hbm_bytes: bytes read and written in HBM per device and step.
      wire_bytes: bytes that each device sends per step, by the mesh axes of the collective: {("fsdp",): 8e9}.
      links: links between the devices of the mesh, and their chip.
      tokens_per_device: tokens of a device in this step; None: unknown, and no ``ridge_tokens`` in the result.
    Raises:
      ValueError: ``wire_bytes`` names an axis that the mesh does not have.
    """
    chip = links.chip
    compute_s = sum(count / peak_rate(chip, dtype) for dtype, count in flops.items())
    # Each axis has separate links, which work in parallel: the busiest axis decides.
    wire_s = links.busiest_seconds({axes: sent for axes, sent in wire_bytes.items() if sent})
    # Compute time grows with the tokens and weight traffic does not, so the times are equal at this multiple.
    ridge = tokens_per_device * wire_s / compute_s if tokens_per_device is not None and compute_s else None
    total, memory_s = sum(flops.values()), hbm_bytes / chip.hbm_bandwidth
    return Roofline(compute_s, memory_s, wire_s, total, hbm_bytes, sum(wire_bytes.values()), ridge)

"""The least time that a step takes by the figures that a chip's maker publishes.

  compute   FLOP of matrix products / peak rate
  memory    bytes read and written in HBM / HBM bandwidth
  wire      bytes each device sends on the busiest axis of the torus / that axis's bandwidth

The largest of the three is the time of a step in which everything overlaps. None of it is a measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xlstm_jax.forecast.hardware.chips import peak_rate
from xlstm_jax.forecast.hardware.links import Links


class Range(NamedTuple):
    """A time in seconds: the least, by published rates alone, and the expected, by the rates that are reached.

    >>> Range(least=0.08, expected=0.13).expected
    0.13
    """

    least: float
    expected: float


@dataclass(frozen=True)
class Roofline:
    """The three bounds of a step's time, in seconds, and what they come from, per device and step.

    >>> bounds = Roofline(compute_s=0.08, memory_s=0.03, wire_s=0.05, flops=1.6e13, hbm_bytes=2.5e10, wire_bytes=4.5e9)
    >>> bounds.bound, bounds.seconds
    ('compute', 0.08)

    ``ridge_tokens`` is the number of tokens per device at which computing takes as long as sending: the time of
    compute grows with the tokens, the traffic of weights does not. None where the number of tokens is unknown.
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
        """The largest of the three."""
        return max(self.compute_s, self.memory_s, self.wire_s)

    @property
    def bound(self) -> str:
        """The name of the largest: "compute", "memory" or "wire"."""
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
    """The three bounds of a step.

    Args:
      flops: FLOP of matrix products per device and step, by dtype: {"bfloat16": 1e12}.
      hbm_bytes: bytes read and written in HBM per device and step.
      wire_bytes: bytes that each device sends per step, by the mesh axes of the collective: {("fsdp",): 8e9}.
      links: between the devices of the mesh, and their chip.
      tokens_per_device: of this step.
    Raises:
      ValueError: bytes travel over an axis that the mesh does not have.
    """
    chip = links.chip
    compute_s = sum(count / peak_rate(chip, dtype) for dtype, count in flops.items())
    # Axes have links of their own, which work side by side: the busiest decides.
    wire_s = links.busiest_seconds({axes: sent for axes, sent in wire_bytes.items() if sent})
    # Compute grows with the tokens and the traffic of weights does not, so the two times are equal at this multiple.
    ridge = tokens_per_device * wire_s / compute_s if tokens_per_device is not None and compute_s else None
    total, memory_s = sum(flops.values()), hbm_bytes / chip.hbm_bandwidth
    return Roofline(compute_s, memory_s, wire_s, total, hbm_bytes, sum(wire_bytes.values()), ridge)

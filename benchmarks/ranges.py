"""Ranges of the step times of stored forecasts, computed anew whenever they are read.

    stored forecast, topology --times_of--> Times: step and wait as (least, expected, most), number of collectives

A stored forecast (``benchmarks/results/forecasts``) has what the compiler said: FLOP, bytes, cycles, and collectives by
groups of alike ones. Assumptions stand in the library: ``forecast.hardware.latency`` (TPUs),
``forecast.hardware.nccl`` (GPUs) and ``forecast.cost.fills`` (zero-fills). So other constants need no compilation:
``python -m benchmarks.peers --redraw``.

A time equals ``Forecast.step_time`` of the same program, with one exception: on GPUs the hidden latency of a group,
which only ``most`` counts, is that of its mean size, as single sizes are not stored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlstm_jax.forecast.cost.fills import excess_s
from xlstm_jax.forecast.cost.time_range import Range
from xlstm_jax.forecast.hardware import Chip, Links, parse_topology


@dataclass(frozen=True)
class Times:
    """Times of a step in seconds, and the number of collectives that it executes.

    Attributes:
      step: as ``Forecast.step_time``.
      wait: as ``Forecast.wait_time``.
      collectives: executions per step.
      zero_fills_s: seconds of zero-fills that ``step.expected`` leaves out; None if the program was stored without.
    """

    step: Range
    wait: Range
    collectives: int
    zero_fills_s: float | None


def times_of(found: Mapping[str, Any], topology: str) -> Times:
    """Computes the times of a stored forecast.

    Args:
      found: result of ``forecasts.summary``.
      topology: as "v5e:16x16", "h100:32x8".
    """
    links = links_of(found["mesh"], topology)
    on_gpus, seconds = "gpu_seconds" in found, found["seconds"]
    exposed_s = seconds["exposed"]
    if on_gpus:
        least = found["gpu_seconds"]["exposed by bandwidth"]
        hidden = (hidden_latency_s(one, links) for one in found["collectives"])
        wait = Range(least, exposed_s, exposed_s + math.fsum(hidden))
    else:
        latencies = [(one["asynchronous"], latency_s(one, links)) for one in found["collectives"]]
        waited = math.fsum(latency for asynchronous, latency in latencies if not asynchronous)
        wait = Range(exposed_s, exposed_s + waited, exposed_s + math.fsum(latency for _, latency in latencies))
    zeros = zero_fills_s(found, links.chip)
    roofline = max(seconds["compute"], seconds["memory"], found["gpu_seconds"]["kernels"] if on_gpus else 0.0)
    # A stored step of a GPU is its kernels at reached rates plus its wait.
    busy = seconds["step"] - exposed_s if on_gpus else max(seconds["cycles"] or 0.0, roofline)
    compute = Range(roofline, max(busy - (zeros or 0.0), roofline), busy)
    executions = sum(one["executions"] for one in found["collectives"])
    return Times(compute.plus(wait).at_least(seconds["wire"]), wait, executions, zeros)


def links_of(mesh: Mapping[str, int], topology: str) -> Links:
    """Returns the links between the devices of a mesh, laid over the topology in the order of its chips."""
    place = parse_topology(topology)
    coords: Sequence[Sequence[int]] = [] if place.chip.devices_per_node else [*np.ndindex(place.shape)]
    return Links(place.chip, dict(mesh), place, coords)


def latency_s(group: Mapping[str, Any], links: Links) -> float:
    """Returns the summed latency of a group of collectives; on GPUs that of its mean size."""
    axes = tuple(links.axis_sizes) if group["axes"] is None else tuple(group["axes"])
    count = group["executions"]
    return count * links.latency_s(axes, group["kind"], group["wire_bytes"] / count) if axes and count else 0.0


def hidden_latency_s(group: Mapping[str, Any], links: Links) -> float:
    """GPUs: the latency of a group of collectives beyond the time that the schedule waits for them."""
    return max(0.0, latency_s(group, links) - group["waited_seconds"])


def zero_fills_s(found: Mapping[str, Any], chip: Chip) -> float | None:
    """Returns the seconds by which the compiler's cycles for zero-fills exceed HBM's rate; None if not stored.

    A program without an all-reduce that could stand for a gather has no such fill.
    """
    if chip.clock_hz is None or not stands_for_gathers(found["collectives"]):
        return 0.0
    if "zero_fills" not in found:
        return None
    return excess_s(found["zero_fills"]["seconds"], found["zero_fills"]["bytes"], chip.hbm_bandwidth)


MANY_BYTES = 2**22  # smaller sums are gradients of norms and biases, metrics


def stands_for_gathers(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a step has all-reduces in the forward pass, which may be gathers."""
    sums = [one["payload_bytes"] for one in groups if one["kind"] == "all-reduce" and one["direction"] != "backward"]
    return sum(sums) > MANY_BYTES


def as_dict(times: Times) -> dict[str, Any]:
    """Converts times to what JSON stores: ranges by the names of their ends."""
    return {
        "step_range": times.step._asdict(),
        "waited_range": times.wait._asdict(),
        "collectives": times.collectives,
        "zero_fill_seconds": times.zero_fills_s,
    }


def range_in(row: Mapping[str, Any], what: str = "step_range") -> Range:
    """Reads a range that ``as_dict`` has stored."""
    return Range(**row[what])

"""Tests of the ranges of stored forecasts: against numbers computed by hand, and against the forecast's own range."""

import copy
import json

import pytest

from benchmarks import forecasts, ranges
from xlstm_jax.forecast.cost.time_range import Range, TimeRatio
from xlstm_jax.forecast.hardware import latency
from xlstm_jax.forecast.hardware.chips import CHIPS


def collective(kind, axes, executions, *, asynchronous, direction="backward", payload=2**24):
    names = {"kind": kind, "axes": axes, "direction": direction, "asynchronous": asynchronous, "executions": executions}
    return names | {"payload_bytes": payload, "wire_bytes": float(payload)}


STORED = {
    "mesh": {"fsdp_x": 16, "fsdp_y": 16},
    "collectives": [
        collective("all-gather", ["fsdp_x"], 100, asynchronous=True),
        collective("reduce-scatter", ["fsdp_y"], 40, asynchronous=False),
        collective("all-reduce", ["fsdp_x", "fsdp_y"], 2, asynchronous=False),
    ],
    "seconds": {"compute": 0.03, "memory": 0.02, "wire": 0.01, "cycles": 0.05, "exposed": 0.004, "step": 0.054},
}


def test_times_of_a_tpu_program_add_assumed_latencies_as_computed_by_hand():
    """On a ring of 16 the farthest chip is 8 hops away; an all-reduce over both dims makes 2 x 16 hops."""
    times = ranges.times_of(STORED, "v5e:16x16")
    waited, hidden = 40 * 13e-6 + 2 * 37e-6, 100 * 13e-6
    assert times.wait == pytest.approx((0.004, 0.004 + waited, 0.004 + waited + hidden))
    assert times.step == pytest.approx((0.034, 0.054 + waited, 0.054 + waited + hidden))
    assert times.collectives == 142 and times.zero_fills_s == 0.0


def test_times_follow_the_table_of_latencies(monkeypatch):
    monkeypatch.setitem(latency.TPU_LATENCY, "v5e", latency.Latency(start_s=1e-5, hop_s=0.0))
    times = ranges.times_of(STORED, "v5e:16x16")
    assert times.step == pytest.approx((0.034, 0.054 + 42e-5, 0.054 + 142e-5))


def test_times_of_a_program_with_zero_fills_charge_them_at_the_memory_rate_in_the_expected_time_alone():
    stored = copy.deepcopy(STORED)
    stored["collectives"] += [collective("all-reduce", ["fsdp_x"], 1, asynchronous=True, direction="forward")]
    without_text = ranges.times_of(stored, "v5e:16x16")
    assert without_text.zero_fills_s is None
    bandwidth = CHIPS["v5e"].hbm_bandwidth
    stored["zero_fills"] = {"count": 1, "seconds": 0.006, "bytes": bandwidth * 0.001}
    times = ranges.times_of(stored, "v5e:16x16")
    assert times.zero_fills_s == pytest.approx(0.005)
    want = (without_text.step.least, without_text.step.expected - 0.005, without_text.step.most)
    assert times.step == pytest.approx(want)


def test_ratio_takes_each_set_of_assumptions_for_both_sides_alike():
    ours, jit = Range(1.0, 3.0, 6.0), Range(2.0, 3.0, 4.0)
    assert ours.over(jit) == TimeRatio(lowest=0.5, expected=1.0, highest=1.5)
    assert str(ours.over(jit)) == "1.00 (0.50 to 1.50)"
    assert ours.over(jit).highest < ours.most / jit.least  # guard: not the ends of different assumptions


def kept_programs():
    """Yields (model, topology, case) of stored programs of TPUs whose texts were read for zero-fills."""
    for path in sorted(forecasts.OUT.glob("*.json")):
        for case, found in json.loads(path.read_text()).items():
            if "zero_fills" in found:
                yield path.stem, case, found


def test_stored_zero_fills_are_slower_than_the_memory_and_smaller_than_the_sums_that_read_them():
    found = list(kept_programs())
    assert len(found) >= 8
    for name, case, one in found:
        fills = one["zero_fills"]
        sums = sum(each["payload_bytes"] for each in one["collectives"] if each["kind"] == "all-reduce")
        assert fills["bytes"] <= sums, (name, case)
        assert fills["count"] <= 1000 and fills["seconds"] < one["seconds"]["cycles"] / 5, (name, case)

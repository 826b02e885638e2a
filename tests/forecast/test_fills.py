"""Tests of the zero-fills of TPU programs, on short texts in the form that libtpu writes."""

import dataclasses

import pytest

from tests.forecast.test_forecast import collective, on_torus
from xlstm_jax.forecast.cost.fills import Fills, find_fills
from xlstm_jax.forecast.cost.schedule import with_waits
from xlstm_jax.forecast.hardware.chips import CHIPS
from xlstm_jax.forecast.hlo.program import parse

# The forms of libtpu for v5p and v6e: a fill in HBM, a fill that is updated inside of a fusion, a fill in VMEM that is
# copied, each sent by a SparseCore, whose update has the arrays. Then a gather of the compiler's own without a core.
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=4

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add.0 = bf16[] add(%a, %b)
}

%updated (p.0: bf16[64,128], p.1: bf16[16,128], p.2: s32[]) -> bf16[64,128] {
  %p.0 = bf16[64,128]{1,0} parameter(0)
  %p.1 = bf16[16,128]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %update.1 = bf16[64,128]{1,0} dynamic-update-slice(%p.0, %p.1, %p.2, %zero.1)
}

%made (q.0: bf16[16,128], q.1: s32[]) -> bf16[64,128] {
  %q.0 = bf16[16,128]{1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %zero.2 = s32[] constant(0)
  %zero.3 = bf16[] constant(0)
  %zeros.3 = bf16[64,128]{1,0} broadcast(%zero.3), dimensions={}
  ROOT %update.3 = bf16[64,128]{1,0} dynamic-update-slice(%zeros.3, %q.0, %q.1, %zero.2)
}

%core (r.0: bf16[64,128], r.1: bf16[64,128], r.2: bf16[64,128]) -> (bf16[64,128], bf16[64,128], bf16[64,128]) {
  %r.0 = bf16[64,128]{1,0} parameter(0)
  %r.1 = bf16[64,128]{1,0} parameter(1)
  %r.2 = bf16[64,128]{1,0} parameter(2)
  ROOT %all-reduce.1 = (bf16[64,128], bf16[64,128], bf16[64,128]) all-reduce(%r.0, %r.1, %r.2), to_apply=%sum
}

ENTRY %main (shard: bf16[16,128], at: s32[]) -> bf16[64,128] {
  %shard = bf16[16,128]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %zero.b = bf16[] constant(0)
  %one.b = bf16[] constant(1)
  %zeros.a = bf16[64,128]{1,0} broadcast(%zero.b), dimensions={}, backend_config={"estimated_cycles":"1000"}
  %own.a = bf16[64,128]{1,0} dynamic-update-slice(%zeros.a, %shard, %at, %zero)
  %zeros.b = bf16[64,128]{1,0} broadcast(%zero.b), dimensions={}, backend_config={"estimated_cycles":"2000"}
  %own.b = bf16[64,128]{1,0} fusion(%zeros.b, %shard, %at), kind=kLoop, calls=%updated
  %zeros.c = bf16[64,128]{1,0:S(1)} broadcast(%zero.b), dimensions={}, backend_config={"estimated_cycles":"4000"}
  %own.c = bf16[64,128]{1,0:S(1)} dynamic-update-slice(%zeros.c, %shard, %at, %zero)
  %copy-start.1 = (bf16[64,128]{1,0}, bf16[64,128]{1,0:S(1)}, u32[]) copy-start(%own.c)
  %copy-done.1 = bf16[64,128]{1,0} copy-done(%copy-start.1)
  %start = ((), (), (s32[1])) async-start(), async_execution_thread="sparsecore", calls=%core
  %going = ((bf16[64,128]), (bf16[64,128])) async-update(%start, %own.a, %own.b, %copy-done.1)
  %done = (bf16[64,128], bf16[64,128], bf16[64,128]) async-done(%going)
  %own.d = bf16[64,128]{1,0} fusion(%shard, %at), kind=kLoop, calls=%made, backend_config={"estimated_cycles":"8000"}
  %all-reduce.2 = bf16[64,128]{1,0} all-reduce(%own.d), replica_groups={{0,1,2,3}}, to_apply=%sum
  %ones = bf16[64,128]{1,0} broadcast(%one.b), dimensions={}, backend_config={"estimated_cycles":"16000"}
  %own.e = bf16[64,128]{1,0} dynamic-update-slice(%ones, %shard, %at, %zero)
  %all-reduce.3 = bf16[64,128]{1,0} all-reduce(%own.e), replica_groups={{0,1,2,3}}, to_apply=%sum
  %zeros.f = bf16[64,128]{1,0} broadcast(%zero.b), dimensions={}, backend_config={"estimated_cycles":"32000"}
  ROOT %own.f = bf16[64,128]{1,0} dynamic-update-slice(%zeros.f, %shard, %at, %zero)
}
"""
NBYTES = 64 * 128 * 2


def test_find_fills_counts_zeros_behind_all_reduces_and_no_other_arrays():
    """The fill of ones and the zeros that no collective reads, of 16000 and 32000 cycles, are no gathers."""
    assert find_fills(parse(PROGRAM)) == Fills(count=4, cycles=15_000, written=4 * NBYTES)


def test_find_fills_counts_an_array_once_that_two_collectives_read():
    twice = PROGRAM.replace("all-reduce(%own.e)", "all-reduce(%own.a)")
    assert find_fills(parse(twice)) == find_fills(parse(PROGRAM))


def test_find_fills_of_a_program_of_gathers_is_empty():
    gathers = PROGRAM.replace("all-reduce(%own", "all-gather(%own").replace("all-reduce(%r.0", "all-gather(%r.0")
    assert find_fills(parse(gathers)) == Fills(count=0, cycles=0, written=0)


def test_find_fills_leaves_out_zeros_that_go_to_another_collective():
    sent_on = PROGRAM.replace(
        "all-reduce(%own.d), replica_groups={{0,1,2,3}}, to_apply=%sum", "collective-permute(%own.d)"
    )
    assert find_fills(parse(sent_on)) == Fills(count=3, cycles=7000, written=3 * NBYTES)


IN_A_LOOP = """HloModule step, is_scheduled=true, num_partitions=4

%sum (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add.0 = bf16[] add(%a, %b)
}

%body (c: (s32[], bf16[16,128])) -> (s32[], bf16[16,128]) {
  %c = (s32[], bf16[16,128]) parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %shard = bf16[16,128]{1,0} get-tuple-element(%c), index=1
  %zero = s32[] constant(0)
  %zero.b = bf16[] constant(0)
  %zeros = bf16[64,128]{1,0} broadcast(%zero.b), dimensions={}, backend_config={"estimated_cycles":"1000"}
  %own = bf16[64,128]{1,0} dynamic-update-slice(%zeros, %shard, %at, %zero)
  %all = bf16[64,128]{1,0} all-reduce(%own), replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %t = (s32[], bf16[16,128]) tuple(%at, %shard)
}

%condition (c.1: (s32[], bf16[16,128])) -> pred[] {
  %c.1 = (s32[], bf16[16,128]) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (x: (s32[], bf16[16,128])) -> (s32[], bf16[16,128]) {
  %x = (s32[], bf16[16,128]) parameter(0)
  ROOT %w = (s32[], bf16[16,128]) while(%x), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_find_fills_counts_a_fill_in_a_loop_with_each_trip():
    assert find_fills(parse(IN_A_LOOP)) == Fills(count=6, cycles=6000, written=6 * NBYTES)


def test_fill_slower_than_the_memory_is_charged_at_its_rate_and_a_faster_one_as_it_is():
    fills = find_fills(parse(PROGRAM))
    v5p = CHIPS["v5p"]
    want = 15_000 / 1.75e9 - 4 * NBYTES / 2.765e12
    assert fills.excess_s(v5p.clock_hz, v5p.hbm_bandwidth) == pytest.approx(want) and want > 0
    assert dataclasses.replace(fills, cycles=10).excess_s(v5p.clock_hz, v5p.hbm_bandwidth) == 0.0


# ----------------------------------------------------------------------------------------------------------- latencies


@pytest.mark.parametrize(
    "axes, kind, hops",
    [
        (("x",), "all-gather", 8),  # both ways around a ring of 16
        (("x", "y"), "all-gather", 16),
        (("x", "y"), "all-reduce", 32),
        (("y",), "collective-permute", 1),
    ],
)
def test_latency_of_a_torus_is_5_us_and_1_us_for_each_hop(axes, kind, hops):
    links = on_torus("v5e:16x16", {"x": 16}, {"y": 16})
    assert links.latency_s(axes, kind, 1.0) == pytest.approx(5e-6 + 1e-6 * hops)


def test_latency_over_an_open_line_goes_to_its_end_and_of_one_device_is_0():
    links = on_torus("v5e:2x4", {"x": 2}, {"y": 4})  # v5e closes rings of 16 alone
    assert links.latency_s(("y",), "all-gather", 1.0) == pytest.approx(8e-6)
    assert on_torus("v5e:16x16", {"x": 1}, {"y": 256}).latency_s(("x",), "all-gather", 1.0) == 0.0


def test_collective_wait_exposes_latency_of_a_synchronous_one_in_the_expected_time():
    links = on_torus("v5e:16x16", {"x": 16}, {"y": 16})
    waited = with_waits(links, collective(seconds=0.002))
    assert waited.wait == pytest.approx((0.002, 0.002 + 13e-6, 0.002 + 13e-6))
    hidden = with_waits(links, collective(seconds=0.002, cycles=int(1.5e9), asynchronous=True))
    assert hidden.wait == pytest.approx((0.0, 0.0, 13e-6))

"""The time of a GPU's step by rooflines: of kernels, of collectives on two networks, and of what waits for what.

All numbers are worked out by hand from the chip below, whose figures are round: 1e12 FLOP/s; bytes/s of HBM 1e10, of
NVLink 1e9, of network 1e8 per GPU; hosts of 4.
"""

import dataclasses
from types import MappingProxyType, SimpleNamespace

import pytest

from xlstm_jax.forecast.cost.clock import Kernels, Transfer, waits
from xlstm_jax.forecast.cost.collective_traffic import find_collectives
from xlstm_jax.forecast.cost.products import product_flops
from xlstm_jax.forecast.cost.roofline import Roofline
from xlstm_jax.forecast.cost.schedule import timed
from xlstm_jax.forecast.cost.time_range import Range, TimeRatio, total
from xlstm_jax.forecast.forecasting import links_of
from xlstm_jax.forecast.hardware import CHIPS, Links, parse_topology
from xlstm_jax.forecast.hardware.chips import Efficiency
from xlstm_jax.forecast.hlo.program import parse

PEAKS = MappingProxyType({"bfloat16": 1e12, "int8": 2e12, "float8": 2e12, "float32": 5e11})
CHIP = dataclasses.replace(
    CHIPS["h100"],
    peak_flops=PEAKS,
    hbm_bandwidth=1e10,
    link_bandwidth=1e9,
    network_bandwidth=1e8,
    efficiency=None,
    devices_per_node=4,
)
SIZES = {"host": 2, "device": 4}


def program(entry, computations="", devices=8):
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={devices}\n"
    return parse(f"{header}{computations}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n")


# ------------------------------------------------------------------------------------------------------------ networks


@pytest.mark.parametrize(
    "axes, networks, seconds, nic_bytes",
    [
        # the border of a host is crossed by 4e8 bytes, on 4 adapters
        (("host", "device"), ("NVLink", "network"), 1.0, 1e8),
        (("device",), ("NVLink",), 0.4, 0.0),
        (("host",), ("network",), 4.0, 4e8),  # each GPU by its own adapter
    ],
    ids=["flat", "in a host", "across hosts"],
)
def test_links_assign_mesh_axes_to_nvlink_or_network_with_seconds_and_nic_bytes(axes, networks, seconds, nic_bytes):
    links = Links(CHIP, SIZES)
    assert links.networks(axes) == networks
    assert links.seconds(axes, 4e8) == pytest.approx(seconds)
    assert links.nic_bytes(axes, 4e8) == pytest.approx(nic_bytes)


def test_links_treat_axis_groups_across_hosts_as_the_slowest_group():
    links = Links(CHIP, {"dp": 8, "x": 3})  # of (0, 1, 2), (3, 4, 5) the second lies on two hosts, one device on one
    assert links.networks(("x",)) == ("NVLink", "network")
    assert links.seconds(("x",), 1e8) == pytest.approx(1.0)


def test_links_take_the_host_size_from_the_topology():
    two_each = parse_topology("h100:4x2")
    assert Links(two_each.chip, {"x": 4, "y": 2}, two_each).networks(("x", "y")) == ("NVLink", "network")
    assert Links(two_each.chip, {"x": 4, "y": 2}).networks(("x", "y")) == ("NVLink",)  # guard: 8 by default


def test_links_of_tpus_have_no_networks_and_no_nic_bytes():
    links = Links(CHIPS["v5e"], {"x": 1})
    assert (links.networks(("x",)), links.nic_bytes(("x",), 1e9)) == ((), 0.0)


def test_links_of_a_compiled_step_have_the_torus_of_the_coordinates_only_for_tpus_at_hand():
    def found(chip, topology=None, coords=((0, 0, 0), (1, 2, 0), (0, 3, 0))):
        compiled = SimpleNamespace(topology=topology, coords=coords, axis_sizes={"fsdp": 8})
        return links_of(compiled, CHIPS[chip])

    at_hand = found("v5e")
    assert (at_hand.topology.chip, at_hand.topology.shape) == (CHIPS["v5e"], (2, 4))  # a torus of two dims
    assert found("v5p").topology.shape == (2, 4, 1)
    assert (at_hand.axis_sizes, at_hand.coords) == ({"fsdp": 8}, ((0, 0, 0), (1, 2, 0), (0, 3, 0)))
    absent = parse_topology("v5e:4x4")
    assert found("v5e", absent).topology is absent
    assert found("h100", coords=()).topology is None


def test_busiest_seconds_let_nvlink_and_network_run_in_parallel():
    links = Links(CHIP, SIZES)
    staged = {("host",): 1e8, ("device",): 9e8}  # 1.0 s over the network, 0.9 s over NVLink
    assert links.busiest_seconds(staged) == pytest.approx(1.0)
    assert links.busiest_seconds(staged | {("host", "device"): 4e8}) == pytest.approx(2.0)  # on both for 1 s


# ------------------------------------------------------------------------------------------------------------- kernels

DOT = """
%gemm (a: bf16[1000,2000], b: bf16[2000,500]) -> bf16[1000,500] {
  %a = bf16[1000,2000]{1,0} parameter(0)
  %b = bf16[2000,500]{1,0} parameter(1)
  ROOT %dot.1 = bf16[1000,500]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
OPERANDS = """
  %a = bf16[1000,2000]{1,0} parameter(0)
  %b = bf16[2000,500]{1,0} parameter(1)
"""
GEMM = 2 * 1000 * 500 * 2000  # FLOP
GEMM_BYTES = 2 * (1000 * 2000 + 2000 * 500 + 1000 * 500)  # of the operands and the result in bfloat16
FUSED = "fusion(%a, %b), kind=kCustom, calls=%gemm"
CUBLAS = """custom-call(%a, %b), custom_call_target="TARGET", backend_config={"gemm_backend_config":{"alpha_real":1,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],\
"lhs_batch_dimensions":[]}}}"""


@pytest.mark.parametrize(
    "call",
    [
        "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        FUSED,
        CUBLAS.replace("TARGET", "__cublas$gemm"),
        CUBLAS.replace("TARGET", "__cublas$lt$matmul"),
    ],
    ids=["dot", "fusion", "cuBLAS", "cuBLASLt"],
)
def test_kernel_time_of_a_matrix_product_is_equal_for_dot_fusion_and_cublas(call):
    found = program(f"{OPERANDS}  ROOT %r = bf16[1000,500]{{1,0}} {call}\n", DOT)
    seconds = Kernels(found, CHIP).duration_of(found.entry, found.entry.root)
    assert seconds.total == seconds.products == pytest.approx(max(GEMM / 1e12, GEMM_BYTES / 1e10))
    assert GEMM / 1e12 > GEMM_BYTES / 1e10  # guard: it is the FLOP that count here


def test_product_flops_of_a_dot_multiply_all_contracted_dims():
    call = "dot(%a, %b), lhs_contracting_dims={1,2}, rhs_contracting_dims={0,1}"
    arrays = "  %a = f32[7,3,5] parameter(0)\n  %b = f32[3,5,2] parameter(1)\n"
    found = program(f"{arrays}  ROOT %r = f32[7,2] {call}\n")
    assert product_flops(found.entry, found.entry.root) == 2 * (7 * 2) * (3 * 5)


def test_kernel_time_of_a_matrix_product_follows_dtype_rate_or_hbm_bandwidth():
    call = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    entry = f"{OPERANDS}  ROOT %r = bf16[1000,500]{{1,0}} {call}\n"
    wide, narrow = program(entry.replace("bf16", "f32")), program(entry.replace("bf16", "f8e4m3fn"))
    slow = dataclasses.replace(CHIP, hbm_bandwidth=1e9)

    def seconds(found, chip):
        return Kernels(found, chip).duration_of(found.entry, found.entry.root).products

    assert seconds(wide, CHIP) == pytest.approx(GEMM / 5e11)
    assert seconds(narrow, CHIP) == pytest.approx(GEMM / 2e12)
    assert seconds(wide, slow) == pytest.approx(2 * GEMM_BYTES / 1e9)


@pytest.mark.parametrize(
    "target, arrays",
    [
        ("__cudnn$convForward", ("8,32,32,16", "64,3,3,16", "8,32,32,64")),
        ("__cudnn$convBackwardInput", ("8,32,32,64", "64,3,3,16", "8,32,32,16")),
        ("__cudnn$convBackwardFilter", ("8,32,32,16", "8,32,32,64", "64,3,3,16")),
    ],
)
def test_product_flops_of_cudnn_convolutions_are_equal_forward_and_backward(target, arrays):
    """3 x 3 taps of 16 features for each of 8 x 32 x 32 x 64 values; cuDNN's result is a tuple with its workspace."""
    left, right, out = arrays
    entry = f"""
  %a = f32[{left}]{{3,2,1,0}} parameter(0)
  %b = f32[{right}]{{3,2,1,0}} parameter(1)
  ROOT %c = (f32[{out}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels=b01f_o01i->b01f, custom_call_target="{target}"
"""
    found = program(entry)
    assert product_flops(found.entry, found.entry.root) == 2 * 8 * 32 * 32 * 64 * 3 * 3 * 16


@pytest.mark.parametrize(
    "left, right, out, how, flops",
    [
        ("8,16,32", "8,32,64", "8,16,64", "{size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf", 8 * 16 * 64 * 32),
        ("2,5,5,3", "3,3,3,7", "2,5,5,7", "{size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f", 2 * 7 * 3 * 13 * 13),
    ],
    ids=["batch of a TPU", "padded"],
)
def test_product_flops_of_convolutions_leave_out_taps_on_padding_and_dilation_holes(left, right, out, how, flops):
    """A dim of 5 with one value of padding on each side and windows of 3 has 13 taps on a value."""
    entry = f"""
  %a = f32[{left}] parameter(0)
  %b = f32[{right}] parameter(1)
  ROOT %c = f32[{out}] convolution(%a, %b), window={how}
"""
    found = program(entry)
    assert product_flops(found.entry, found.entry.root) == 2 * flops


def test_kernel_time_without_a_product_is_hbm_bytes_over_bandwidth():
    found = program("  %p = f32[1000,1000]{1,0} parameter(0)\n  ROOT %n = f32[1000,1000]{1,0} negate(%p)\n")
    seconds = Kernels(found, CHIP).duration_of(found.entry, found.entry.root)
    assert (seconds.total, seconds.products) == (pytest.approx(8e6 / 1e10), 0.0)
    slow = dataclasses.replace(CHIP, efficiency=Efficiency(products=0.5, memory=0.8)).reached
    assert Kernels(found, slow).duration_of(found.entry, found.entry.root).total == pytest.approx(8e6 / 0.8e10)


def test_collectives_take_no_kernel_time():
    """Kernels run beside a collective, or the schedule waits for it."""
    found = program("  %p = f32[1000] parameter(0)\n  ROOT %n = f32[8000] all-gather(%p), dimensions={0}\n")
    assert Kernels(found, CHIP).total == 0.0


LOOP = """
%body (c: (s32[], bf16[1000,2000], bf16[2000,500])) -> (s32[], bf16[1000,2000], bf16[2000,500]) {
  %c = (s32[], bf16[1000,2000], bf16[2000,500]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %a = bf16[1000,2000]{1,0} get-tuple-element(%c), index=1
  %b = bf16[2000,500]{1,0} get-tuple-element(%c), index=2
  %r = bf16[1000,500]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm
  ROOT %t = (s32[], bf16[1000,2000], bf16[2000,500]) tuple(%i, %a, %b)
}
%condition (c.1: (s32[], bf16[1000,2000], bf16[2000,500])) -> pred[] {
  %c.1 = (s32[], bf16[1000,2000], bf16[2000,500]) parameter(0)
  ROOT %always = pred[] constant(true)
}
"""


def test_kernel_time_of_a_loop_multiplies_by_the_trip_count():
    entry = f"""{OPERANDS}  %zero = s32[] constant(0)
  %t.0 = (s32[], bf16[1000,2000], bf16[2000,500]) tuple(%zero, %a, %b)
  ROOT %w = (s32[], bf16[1000,2000], bf16[2000,500]) while(%t.0), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
"""
    found = program(entry, DOT + LOOP)
    assert Kernels(found, CHIP).total == pytest.approx(5 * GEMM / 1e12)
    half = dataclasses.replace(CHIP, efficiency=Efficiency(products=0.5, memory=1.0))
    assert Kernels(found, half).total == pytest.approx(5 * GEMM / 1e12)  # by published rates
    assert Kernels(found, half.reached).total == pytest.approx(10 * GEMM / 1e12)


def branch(name, products):
    calls = "".join(
        f"  %r.{name}.{i} = bf16[1000,500]{{1,0}} fusion(%a.{name}, %b.{name}), kind=kCustom, calls=%gemm\n"
        for i in range(products)
    )
    return f"""%{name} (x: (bf16[1000,2000], bf16[2000,500])) -> bf16[1000,500] {{
  %x.{name} = (bf16[1000,2000], bf16[2000,500]) parameter(0)
  %a.{name} = bf16[1000,2000]{{1,0}} get-tuple-element(%x.{name}), index=0
  %b.{name} = bf16[2000,500]{{1,0}} get-tuple-element(%x.{name}), index=1
{calls}  ROOT %end.{name} = bf16[1000,500]{{1,0}} bitcast(%r.{name}.0)
}}
"""


def test_kernel_time_of_a_conditional_is_that_of_the_longest_branch():
    entry = f"""{OPERANDS}  %which = s32[] parameter(2)
  %t.0 = (bf16[1000,2000], bf16[2000,500]) tuple(%a, %b)
  ROOT %c = bf16[1000,500]{{1,0}} conditional(%which, %t.0, %t.0, %t.0), branch_computations={{%one, %three, %two}}
"""
    found = program(entry, DOT + branch("one", 1) + branch("three", 3) + branch("two", 2))
    assert Kernels(found, CHIP).total == pytest.approx(3 * GEMM / 1e12)


@pytest.mark.parametrize("call", ["async-start(%a, %b), calls=%called", "call-start(%a, %b), to_apply=%called"])
def test_kernel_time_includes_an_asynchronously_started_computation(call):
    called = """%called (a: bf16[1000,2000], b: bf16[2000,500]) -> bf16[1000,500] {
  %a.1 = bf16[1000,2000]{1,0} parameter(0)
  %b.1 = bf16[2000,500]{1,0} parameter(1)
  ROOT %r.1 = bf16[1000,500]{1,0} fusion(%a.1, %b.1), kind=kCustom, calls=%gemm
}
"""
    result = "((bf16[1000,2000], bf16[2000,500]), bf16[1000,500])"
    done = f"bf16[1000,500]{{1,0}} {call.split('-')[0]}-done(%start)"
    found = program(f"{OPERANDS}  %start = {result} {call}\n  ROOT %r = {done}\n", DOT + called)
    assert Kernels(found, CHIP).total == pytest.approx(GEMM / 1e12)


# ------------------------------------------------------------------------------------------------ what waits for what


def test_waits_are_the_transfer_time_left_after_overlapping_kernels():
    run = [0.0, 1.0, 0.0, 2.0]  # seconds of each instruction
    transfer = Transfer(0, 2, ("NVLink",), 1.5)
    assert waits(run, [transfer]) == pytest.approx([0.5])
    assert waits(run, [dataclasses.replace(transfer, seconds=0.75)]) == [0.0]
    assert waits(run, [dataclasses.replace(transfer, end=0)]) == pytest.approx([1.5])  # synchronous


def test_waits_queue_transfers_on_the_same_network_and_not_on_different_networks():
    run = [0.0, 0.0, 3.0, 0.0, 0.0]
    first, second = Transfer(0, 3, ("NVLink",), 2.0), Transfer(1, 4, ("NVLink",), 2.0)
    assert waits(run, [first, second]) == pytest.approx([0.0, 1.0])  # the second ends at 4
    assert waits(run, [first, dataclasses.replace(second, links=("network",))]) == [0.0, 0.0]
    assert waits(run, [first, dataclasses.replace(second, links=("NVLink", "network"))]) == pytest.approx([0.0, 1.0])


def test_waits_let_the_next_transfer_progress_during_an_earlier_wait():
    run = [0.0, 0.0, 1.0, 0.0, 0.0]
    first, second = Transfer(0, 3, ("NVLink",), 3.0), Transfer(1, 4, ("network",), 4.0)
    assert waits(run, [first, second]) == pytest.approx([2.0, 1.0])


START = """  %s = (f32[N]{0}, f32[4N]{0}) all-gather-start(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, \
dimensions={0}, use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":false}}
"""


def gathered(values, beside, chip=CHIP):
    """The gather of 4 shards in a host, with a kernel beside it."""
    entry = (
        f"{OPERANDS}  %p = f32[N]{{0}} parameter(2)\n{START}  {beside}\n  ROOT %d = f32[4N]{{0}} all-gather-done(%s)\n"
    )
    found = program(entry.replace("4N", str(4 * values)).replace("N", str(values)), DOT)
    kernels = (Kernels(found, each) for each in (chip, chip.reached))
    (collective,) = timed(*kernels, find_collectives(found, SIZES), Links(chip, SIZES))
    return collective


def test_all_gather_is_hidden_by_a_matrix_product_of_at_least_the_same_duration():
    product = f"%r = bf16[1000,500]{{1,0}} {FUSED}"
    short, long = gathered(100_000, product), gathered(1_000_000, product)  # 1.2 MB and 12 MB: 1.2 and 12 ms
    assert (short.timing.bandwidth_s, long.timing.bandwidth_s) == pytest.approx((1.2e-3, 12e-3))
    assert short.overlapped.product_seconds == long.overlapped.product_seconds == pytest.approx(2e-3)
    assert short.is_hidden and not long.is_hidden
    assert short.timing.waited_s == 0.0
    assert long.timing.waited_by_bandwidth_s == pytest.approx(10e-3)
    assert long.timing.choice == "Ring Simple"  # at 0.8 of the bandwidth
    assert long.timing.waited_s == pytest.approx(12e-3 / 0.8 + (8.4 + 3 * 3.4) * 1e-6 - 2e-3)
    assert (long.timing.networks, long.timing.nic_bytes) == (("NVLink",), 0.0)


def test_slower_matrix_products_hide_more_of_an_all_gather():
    half = dataclasses.replace(CHIP, efficiency=Efficiency(products=0.5, memory=1.0))
    found = gathered(1_000_000, f"%r = bf16[1000,500]{{1,0}} {FUSED}", half)
    assert found.overlapped.product_seconds == pytest.approx(4e-3)
    assert found.timing.waited_s == pytest.approx(12e-3 / 0.8 + (8.4 + 3 * 3.4) * 1e-6 - 4e-3)
    assert found.timing.waited_by_bandwidth_s == pytest.approx(10e-3)  # all by published rates


def test_non_product_kernels_shorten_the_wait_but_leave_an_all_gather_unhidden():
    other = gathered(100_000, "%r = bf16[1000,2000]{1,0} negate(%a)")  # 8 MB of HBM, 0.8 ms
    assert other.overlapped.seconds == pytest.approx(0.8e-3) and other.overlapped.product_seconds == 0.0
    assert other.timing.waited_by_bandwidth_s == pytest.approx(0.4e-3) and not other.is_hidden


# ------------------------------------------------------------------------------------------------------ ranges of times


def test_ranges_of_times_are_added_bounded_and_divided_time_by_time():
    times = Range(1.0, 2.0, 4.0)
    assert times.beyond(1.5) == (0.0, 0.5, 2.5) and times.at_least(1.5) == (1.5, 2.0, 4.0)
    assert times.over(Range(2.0, 1.0, 8.0)) == TimeRatio(lowest=0.5, expected=2.0, highest=2.0)
    assert total([(2, times), (3, Range(0.5, 3.0, 3.0))]) == (3.5, 13.0, 17.0)
    assert total([]) == (0.0, 0.0, 0.0)


def test_roofline_takes_the_largest_of_its_three_times():
    amounts = {"flops": 1.0, "hbm_bytes": 1.0, "wire_bytes": 1.0}
    for name in ("compute", "memory", "wire"):
        bounds = Roofline(**({"compute_s": 0.1, "memory_s": 0.1, "wire_s": 0.1} | {f"{name}_s": 0.3}), **amounts)
        assert (bounds.bound, bounds.seconds) == (name, 0.3)

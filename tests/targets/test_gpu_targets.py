"""The targets of a sharded step on NVIDIA GPUs: bytes, networks, overlap, memory; compiled for clusters, run on none.

    make test-targets     with KEPT=benchmarks/results/forecasts what is kept there is taken as it is

Compared is ``jit`` with the options of XLA with which it waits least (``benchmarks.xla_options`` has them all), where
nothing else is said. Times are those of rooflines and of NCCL's own latencies; no GPU has confirmed them. What does not
hold is marked so, with the figure, and strictly: the day it holds, the mark must go.
"""

import pytest

pytestmark = pytest.mark.cuda_plugin

H100 = "h100:32x8"
TOPOLOGIES = (H100, "h200:16x8", "b200:8x8")
OURS, AHEAD, JIT = "ours, best options", "ours, ahead", "jit, best options"
EVERY = [(size, topology) for size in ("1.3B", "7B") for topology in TOPOLOGIES]
of_every = pytest.mark.parametrize("size, topology", EVERY)


def unmet(figure):
    """A target that does not hold yet, and by how much."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=figure)


of_memory = pytest.mark.parametrize(
    "topology", [H100, pytest.param("h200:16x8", marks=unmet("1.03")), pytest.param("b200:8x8", marks=unmet("1.01"))]
)
of_hidden = pytest.mark.parametrize(
    "size, topology",
    [
        *(("1.3B", topology) for topology in TOPOLOGIES),
        pytest.param(
            "7B", H100, marks=unmet("1.23: of the larger model jit hides 64 %, and more than 100 % cannot be")
        ),
    ],
)


# -------------------------------------------------------------------------------------------------------------- traffic


@of_every
def test_sent_bytes_are_at_most_1_005_of_the_limit_and_of_jit(found, size, topology):
    _, sent = found(size, topology, OURS, JIT)
    assert sent[OURS]["ratios"]["sent over the limit"] <= 1.005
    assert sent[OURS]["wire_bytes"] <= 1.005 * sent[JIT]["wire_bytes"]


@of_every
def test_bytes_across_hosts_are_at_most_1_02_of_the_minimum(found, size, topology):
    _, sent = found(size, topology, OURS)
    assert sent[OURS]["nic_over_the_least"] <= 1.02


# -------------------------------------------------------------------------------------------------------------- overlap


@of_every
def test_exposed_seconds_are_at_most_half_of_jit(found, size, topology):
    _, sent = found(size, topology, OURS, JIT)
    assert sent[OURS]["exposed_seconds"] <= 0.5 * sent[JIT]["exposed_seconds"]


@of_every
def test_at_least_0_90_of_sent_bytes_overlap_a_matrix_product(found, size, topology):
    _, sent = found(size, topology, OURS)
    assert sent[OURS]["beside_share"] >= 0.90


@unmet("76 %: with the rest beside something shorter the schedule waits 5.3 ms of 37 that the links are busy")
def test_at_least_0_90_of_sent_bytes_are_hidden_by_products_of_equal_duration(found):
    _, sent = found("1.3B", H100, OURS)
    assert sent[OURS]["hidden_share"] >= 0.90


@of_hidden
def test_hidden_share_of_bytes_is_at_least_1_8_times_the_share_of_jit(found, size, topology):
    _, sent = found(size, topology, OURS, JIT)
    assert sent[OURS]["hidden_share"] >= 1.8 * sent[JIT]["hidden_share"]


@unmet("0.68: 5.3 ms over 7.8; it is latency that jit waits for")
def test_exposed_seconds_by_bandwidth_alone_are_at_most_half_of_jit(found):
    _, sent = found("1.3B", H100, OURS, JIT)
    assert sent[OURS]["exposed_by_bandwidth_seconds"] <= 0.5 * sent[JIT]["exposed_by_bandwidth_seconds"]


@pytest.mark.parametrize("topology, hidden", [(H100, 0.87), ("h100:8x8", 0.90), ("b200:8x8", 0.83)])
def test_layers_gathered_ahead_halve_the_exposed_seconds_of_jit_by_bandwidth_alone(found, topology, hidden):
    """A quarter as long with latency; of the bytes nearly all have products beside them that take as long."""
    _, sent = found("1.3B", topology, AHEAD, JIT)
    assert sent[AHEAD]["exposed_by_bandwidth_seconds"] <= 0.5 * sent[JIT]["exposed_by_bandwidth_seconds"]
    assert sent[AHEAD]["exposed_seconds"] <= 0.25 * sent[JIT]["exposed_seconds"]
    assert sent[AHEAD]["hidden_share"] >= hidden
    assert sent[AHEAD]["wire_bytes"] <= 1.005 * sent[JIT]["wire_bytes"]


# --------------------------------------------------------------------------------------------------------------- memory


@of_memory
def test_total_memory_with_compiler_options_is_at_most_the_memory_of_jit(found, topology):
    held, _ = found("1.3B", topology, OURS, JIT)
    assert held[OURS]["bytes"]["total"] <= 1.00 * held[JIT]["bytes"]["total"]


@unmet("1.16; of the chunked head 1.08")
def test_total_memory_without_compiler_options_is_at_most_the_memory_of_jit(found):
    held, _ = found("1.3B", H100, "ours", "jit")
    assert held["ours"]["bytes"]["total"] <= 1.00 * held["jit"]["bytes"]["total"]


# --------------------------------------------------------------------------------------------------------------- counts


@unmet("5 forward and 7 backward: XLA combines what crosses hosts, and leaves large gathers within them apart")
def test_at_most_three_collectives_in_each_layer_and_direction(found):
    _, sent = found("1.3B", H100, OURS)
    assert max(sent[OURS]["collectives_per_layer"].values()) <= 3

"""Tests of the formulas of the limits: a known table of configurations, sums by hand, and each term."""

import dataclasses
import math

import pytest

from benchmarks import limits
from benchmarks.limits import Counts


def transformer(dim, layers, vocab):
    """Returns the counts of a Transformer with 12 d^2 parameters per layer and one scale per norm."""
    small = (2 * layers + 1) * dim
    return Counts(12 * dim**2 * layers, dim * vocab, dim * vocab, small, layers, dim, vocab)


SMALLER, LARGER = transformer(2048, 24, 32_768), transformer(4096, 32, 50_176)
# model, devices, tokens per device: GB persistent, of temporaries, sent; gathered and scattered.
TABLE = [
    (SMALLER, 256, 2048, 0.064, 0.74, 7.76, (5.08, 2.67)),
    (SMALLER, 128, 2048, 0.127, 0.74, 7.72, None),
    (LARGER, 256, 2048, 0.324, 1.77, 40.1, (26.5, 13.7)),
    (LARGER, 128, 2048, 0.646, 1.77, 40.0, None),
    (LARGER, 8, 16_384, 10.3, 8.4, 35.3, None),
    (LARGER, 256, 16_384, 0.324, 8.4, 40.1, None),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].dim}-{row[1]}-{row[2]}")
def test_limits_match_the_table_of_reference_configurations(row):
    counts, devices, tokens, persistent, temporary, sent, parts = row
    wire = limits.wire_bytes(counts, devices)
    assert limits.persistent_bytes(counts, devices) / 1e9 == pytest.approx(persistent, rel=0.01)
    assert limits.temporary_bytes(counts, tokens) / 1e9 == pytest.approx(temporary, rel=0.01)
    assert wire.total / 1e9 == pytest.approx(sent, rel=0.002)
    assert parts is None or (wire.gather / 1e9, wire.scatter / 1e9) == pytest.approx(parts, rel=0.005)


def test_wire_bytes_match_the_formula_for_each_term():
    counts = Counts(blocks=1000, embedding=100, head=10, small=1, layers=2, dim=4, vocab_size=8)
    wire = limits.wire_bytes(counts, 4, gather_bytes=2, scatter_bytes=4)
    assert vars(wire) == {"gather": 0.75 * 2 * 2110, "scatter": 0.75 * 4 * 1110, "replicas": 0.0, "small": 0.75 * 8}
    assert limits.wire_bytes(counts, 4, reshard_after_forward=False).gather == 0.75 * 2 * 1110
    hybrid = limits.wire_bytes(counts, 4, replicas=2, reduce_bytes=4)
    assert hybrid.replicas == 2 * 0.5 * 4 * 1110 / 4 and hybrid.gather == wire.gather
    assert hybrid.small == 7 / 8 * 8


def test_persistent_bytes_split_optimizer_state_over_replicas_only_on_request():
    plain, split = (limits.persistent_bytes(SMALLER, 16, replicas=replicas) for replicas in (1, 16))
    of_small = 12 * SMALLER.small
    assert plain - of_small == pytest.approx(12 * SMALLER.sharded / 16)
    assert split - of_small == pytest.approx((4 / 16 + 8 / 256) * SMALLER.sharded)


def test_temporary_bytes_are_the_larger_of_head_and_block():
    head, block = SMALLER, dataclasses.replace(SMALLER, vocab_size=16, head=16 * 2048)
    kept = 2 * 24 * 2048 * 2048
    assert limits.temporary_bytes(head, 2048) == kept + 4 * head.head + 4 * 2048 * 32_768
    assert limits.temporary_bytes(block, 2048) == kept + 4 * 12 * 2048**2 + 8 * 2048 * 2048
    assert limits.kept_gathered_bytes(head) == 2 * head.blocks


def test_axis_bytes_of_staged_gathers_sum_to_the_bytes_of_a_flat_axis():
    sizes = {"x": 4, "y": 4, "z": 8}
    sent = limits.axis_bytes(1024, sizes)
    assert sent == {"x": 768, "y": 192, "z": 56}
    assert sum(sent.values()) == 1024 * limits.share(math.prod(sizes.values()))


def test_collective_counts_are_minimal_for_layers_and_axes():
    assert limits.collective_counts(24) == {"all-gather": 50, "reduce-scatter": 26, "all-reduce": 1}
    assert limits.collective_counts(24, axes=2) == {"all-gather": 100, "reduce-scatter": 52, "all-reduce": 1}

"""The formulas of the limits: the known table of configurations, sums by hand, and what each term stands for."""

import dataclasses
import math

import pytest

from benchmarks import limits
from benchmarks.limits import Counts

MS = 1e-3


def transformer(dim, layers, vocab):
    """A Transformer with 12 d^2 parameters in a layer and one scale for each of its norms."""
    small = (2 * layers + 1) * dim
    return Counts(12 * dim**2 * layers, dim * vocab, dim * vocab, small, layers, dim, vocab)


SMALLER, LARGER = transformer(2048, 24, 32_768), transformer(4096, 32, 50_176)
# model, chip, devices, tokens per device: GB persistent, of temporaries, gathered and scattered; ms of matrix products
# with and without recomputation, of HBM, of the links.
TABLE = [
    (SMALLER, "v5e", 256, 2048, 0.064, 0.74, 7.76, (5.08, 2.67), (121, 92), 24, 43),
    (SMALLER, "v6e", 256, 2048, 0.064, 0.74, 7.76, (5.08, 2.67), (26, 20), 12, 22),
    (SMALLER, "v5p", 128, 2048, 0.127, 0.74, 7.72, None, (52, 40), 7, 14),
    (LARGER, "v5e", 256, 2048, 0.324, 1.77, 40.1, (26.5, 13.7), (593, 448), 121, 223),
    (LARGER, "v5p", 128, 2048, 0.646, 1.77, 40.0, None, (255, 192), 35, 74),
    (LARGER, "h100", 8, 16_384, 10.3, 8.4, 35.3, None, (944, 713), 39, 78),
    (LARGER, "h100", 256, 16_384, 0.324, 8.4, 40.1, None, (944, 713), 33, 100),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[1]}-{row[0].dim}-{row[2]}")
def test_the_table_of_configurations(row):
    counts, chip, devices, tokens, persistent, temporary, sent, parts, compute, hbm, links = row
    network = limits.NETWORKS[chip]
    wire = limits.wire_bytes(counts, devices)
    assert limits.persistent_bytes(counts, devices) / 1e9 == pytest.approx(persistent, rel=0.01)
    assert limits.temporary_bytes(counts, tokens) / 1e9 == pytest.approx(temporary, rel=0.01)
    assert wire.total / 1e9 == pytest.approx(sent, rel=0.002)
    assert parts is None or (wire.gather / 1e9, wire.scatter / 1e9) == pytest.approx(parts, rel=0.005)
    again, once = (limits.step_bounds(counts, network, devices, tokens, 2048, remat=remat) for remat in (True, False))
    assert (again.compute / MS, once.compute / MS) == pytest.approx(compute, rel=0.02)
    assert again.memory / MS == pytest.approx(hbm, rel=0.05)
    assert max(again.links, again.network) / MS == pytest.approx(links, rel=0.03)
    assert again.bound == "compute" and again.seconds == again.compute


@pytest.mark.parametrize("chip, want", [("v5e", 1094), ("v5p", 850), ("v6e", 2550), ("h100", 2200)])
def test_ridge_tokens_are_three_quarters_of_flops_over_bandwidth(chip, want):
    """6 bytes for 8 FLOP of each parameter of a layer; 8 for 8 where gradients travel in float32."""
    found = limits.NETWORKS[chip].chip
    assert limits.ridge_tokens(found) == pytest.approx(0.75 * want, rel=0.01)
    assert limits.ridge_tokens(found, scatter_bytes=4) == pytest.approx(want, rel=0.01)


def test_sent_bytes_term_by_term():
    counts = Counts(blocks=1000, embedding=100, head=10, small=1, layers=2, dim=4, vocab_size=8)
    wire = limits.wire_bytes(counts, 4, gather_bytes=2, scatter_bytes=4)
    assert vars(wire) == {"gather": 0.75 * 2 * 2110, "scatter": 0.75 * 4 * 1110, "replicas": 0.0, "small": 0.75 * 8}
    assert limits.wire_bytes(counts, 4, reshard_after_forward=False).gather == 0.75 * 2 * 1110
    hybrid = limits.wire_bytes(counts, 4, replicas=2, reduce_bytes=4)
    assert hybrid.replicas == 2 * 0.5 * 4 * 1110 / 4 and hybrid.gather == wire.gather
    assert hybrid.small == 7 / 8 * 8


def test_state_of_a_copy_is_split_over_copies_only_where_that_is_asked_for():
    plain, split = (limits.persistent_bytes(SMALLER, 16, replicas=replicas) for replicas in (1, 16))
    of_small = 12 * SMALLER.small
    assert plain - of_small == pytest.approx(12 * SMALLER.sharded / 16)
    assert split - of_small == pytest.approx((4 / 16 + 8 / 256) * SMALLER.sharded)


def test_the_floor_is_that_of_the_larger_part():
    head, block = SMALLER, dataclasses.replace(SMALLER, vocab_size=16, head=16 * 2048)
    kept = 2 * 24 * 2048 * 2048
    assert limits.temporary_bytes(head, 2048) == kept + 4 * head.head + 4 * 2048 * 32_768
    assert limits.temporary_bytes(block, 2048) == kept + 4 * 12 * 2048**2 + 8 * 2048 * 2048
    assert limits.kept_gathered_bytes(head) == 2 * head.blocks


def test_stages_send_together_what_one_axis_sends():
    sizes = {"x": 4, "y": 4, "z": 8}
    sent = limits.axis_bytes(1024, sizes)
    assert sent == {"x": 768, "y": 192, "z": 56}
    assert sum(sent.values()) == 1024 * limits.share(math.prod(sizes.values()))


def test_the_fewest_collectives():
    assert limits.collective_counts(24) == {"all-gather": 50, "reduce-scatter": 26, "all-reduce": 1}
    assert limits.collective_counts(24, axes=2) == {"all-gather": 100, "reduce-scatter": 52, "all-reduce": 1}


def test_over_the_network_goes_a_part_of_what_a_domain_sends():
    network = limits.NETWORKS["h100"]
    one, flat, hybrid = (
        limits.step_bounds(LARGER, network, devices, 2048, 2048, replicas=copies)
        for devices, copies in ((8, 1), (64, 1), (64, 8))
    )
    assert one.network == 0.0
    gathered = 2 * (2 * LARGER.blocks + LARGER.embedding + LARGER.head) + 2 * LARGER.sharded + 8 * LARGER.small
    assert flat.network == pytest.approx(7 / 8 * gathered / 8 / 5e10)
    assert hybrid.network == pytest.approx(7 / 8 * (2 * 2 * LARGER.sharded + 8 * LARGER.small) / 8 / 5e10)
    assert hybrid.links == pytest.approx(one.links, rel=0.001)  # copies lie in different nodes


def test_copies_that_extend_over_domains_are_refused():
    with pytest.raises(ValueError, match=r"replicas=2 of 64 devices leaves copies of 32, .*8 devices.*multiple of 8"):
        limits.step_bounds(LARGER, limits.NETWORKS["h100"], 64, 2048, 2048, replicas=2)

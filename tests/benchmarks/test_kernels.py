"""Tests of the kernel page: numbers equal the benchmark's, and a small version of the benchmark runs."""

import json

import pytest

from benchmarks import kernels
from benchmarks.decoder import DecoderSize

SMALL = DecoderSize(256, 1, 2, 512, hidden=512, kv_heads=1)


def test_kernels_page_has_the_rows_of_stored_results():
    kept, page = json.loads((kernels.OUT / "kernels.json").read_text()), kernels.PAGE.read_text()
    rows = kernels.page_rows(kept)
    assert len(rows) == len(kernels.TOPOLOGIES) and all(row in page for row in rows)
    adds = json.loads((kernels.OUT / "tracing.json").read_text())["adds"]
    assert f"adds {adds['with types']:.1%} to the number of" in page and abs(adds["without types"]) < 0.001


@pytest.mark.slow
@pytest.mark.libtpu
def test_kernel_row_compiles_pallas_attention_in_a_scan_without_held_scores():
    row = kernels.row_of("v5e:2x4", kernels.KERNEL, size=SMALL, context=256)
    assert row["flops_in_pallas"] > 0 and row["scores_bytes"] == 0
    plain = kernels.row_of("v5e:2x4", kernels.XLA, size=SMALL, context=256)
    assert plain["scores_bytes"] == 2 * 256 * 256 * 4 and plain["flops_in_pallas"] == 0

"""XLA's own rematerialization: read from a compiled program, found by the lint, and kept away from by ``fit``.

The kept text is of a program of twelve products of [4,000,000, 1024] for one H100 (JAX 0.12.0.1), without metadata:
without copies its temporaries would take more than the GPU's memory, and XLA computes fourteen instructions again.
"""

import dataclasses
import gzip
import re
from pathlib import Path

import pytest

from tests.forecast.test_lint import cached, each, for_a_chip, plan_of
from xlstm_jax.forecast.cost.memory import Memory
from xlstm_jax.forecast.cost.rematerialization import limit_bytes, rematerialized
from xlstm_jax.forecast.hlo.program import parse
from xlstm_jax.forecast.training.fitting import Options, Search, Trial

TEXT = gzip.decompress((Path(__file__).parent / "kept" / "rematerialized_h100.txt.gz").read_bytes()).decode()
AVAILABLE = 80 * 10**9
IO = 10 * 10**9
LIMIT = IO + 0.95 * (0.8 * AVAILABLE - IO)  # of a GPU, by hand


def test_rematerialized_lists_each_copy_of_a_compiled_program_once():
    found = rematerialized(parse(TEXT))
    assert len(found) == 14 and set(found.values()) == {1}
    assert {"gemm_fusion_dot_general.9.remat2", "input_multiply_reduce_fusion.remat3"} <= set(found)
    assert rematerialized(parse(re.sub(r"\.remat(\d*)", r".again\1", TEXT))) == {}  # guard: the names are read


LOOP = """HloModule step, is_scheduled=true

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x.remat = f32[8] get-tuple-element(%c), index=1
  %sine.1.remat2 = f32[8] sine(%x.remat)
  ROOT %t = (s32[], f32[8]) tuple(%i, %sine.1.remat2)
}

%condition (c.1: (s32[], f32[8])) -> pred[] {
  %c.1 = (s32[], f32[8]) parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (x: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = (s32[], f32[8]) parameter(0)
  ROOT %w = (s32[], f32[8]) while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_rematerialized_counts_copies_in_a_loop_with_each_trip_and_leaves_out_names_of_values():
    assert rematerialized(parse(LOOP)) == {"sine.1.remat2": 6}


def test_limit_of_a_gpu_is_never_below_the_arguments_and_results():
    assert limit_bytes(100, 20, on_gpu=True) == 20 + 57  # 95 % of 80 - 20
    assert limit_bytes(100, 90, on_gpu=True) == 90  # more than the pool of 80
    assert limit_bytes(100, 90, on_gpu=False) == 100


def step_of(total_bytes, copies=(), platform="gpu"):
    """A forecast with a total of memory, of which 10 GB are arguments."""
    memory = Memory(IO, 0, 0, round(total_bytes) - IO, 0)
    figures = {"memory": memory, "code_bytes": 0, "available_bytes": AVAILABLE, "platform": platform}
    return dataclasses.replace(for_a_chip(cached()), **figures, rematerialized=dict.fromkeys(copies, 2))


@pytest.mark.parametrize("platform, limit", [("gpu", LIMIT), ("tpu", AVAILABLE)])
def test_near_memory_limit_fires_within_five_percent_of_the_limit_of_the_platform(platform, limit):
    assert step_of(IO, platform=platform).rematerialization_bytes == pytest.approx(limit)
    assert each("near-memory-limit", step_of(0.949 * limit, platform=platform), plan_of()) == []
    (finding,) = each("near-memory-limit", step_of(0.96 * limit, platform=platform), plan_of())
    assert "within 5% of the limit of memory" in finding.text and finding.bytes == pytest.approx(0.01 * limit, rel=0.01)
    assert each("near-memory-limit", step_of(0.96 * limit, platform="cpu"), plan_of()) == []


def test_near_memory_limit_names_instructions_that_the_compiler_runs_again():
    (finding,) = each("near-memory-limit", step_of(0.5 * LIMIT, ["fusion.1.remat", "fusion.2.remat2"]), plan_of())
    assert "computes 4 instructions again" in finding.text and "fusion.1.remat" in finding.text
    assert "fit keeps the margin" in finding.cure


def test_fit_ranks_a_slower_step_with_a_margin_before_a_step_near_the_limit():
    tight, wide = step_of(0.99 * LIMIT), step_of(0.5 * LIMIT)
    trials = [Trial(Options({"fsdp": 8}), tight, True), Trial(Options({"fsdp": 8}, num_minibatches=2), wide, True)]
    assert trials[0].tight and not trials[1].tight
    search = Search(lambda options: None, lambda call: None, AVAILABLE, trials=trials)
    assert search.best is trials[1]
    search.trials.pop()
    assert search.best is trials[0]  # guard: it fits, and is taken where nothing has a margin

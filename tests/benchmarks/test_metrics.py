"""Tests of the metrics benchmark: counts are as the library promises, and a run works with and without clu."""

import importlib.util
import io

import numpy as np
import pytest
from rich.console import Console

from benchmarks import metrics as benchmark
from benchmarks import metrics_variants as variants_of
from tests.cli.test_tables import WIDTHS, missing
from xlstm_jax.distributed import DeviceMeshManager

COUNT = 20
CLU_STEPS = {"clu, merge", "clu, gather and merge"}


@pytest.fixture(scope="module")
def result():
    return variants_of.measure(steps=2, rounds=3, metrics=COUNT, with_clu=False)


def test_metric_update_adds_no_collective_and_sync_adds_a_single_collective(result):
    assert result.steps["bare"].lowered == result.steps["bare"].compiled == 1  # guard: the count sees the gradient's
    assert result.added_collectives("update") == result.added_collectives("mixed: update") == (0, 0)
    for prefix in ("", "mixed: "):
        for label in ("sync", "log step"):
            cost = result.alone[prefix + label]
            assert (cost.lowered, cost.compiled) == (1, 1), prefix + label
        for label in ("update and sync", "update, sync and compute"):
            assert result.added_collectives(prefix + label) == (1, 1)


def test_pmean_of_each_value_lowers_to_a_collective_per_value(result):
    assert result.added_collectives("pmean of each value")[0] == COUNT
    assert result.alone[f"{COUNT} pmeans"].lowered == COUNT
    assert (result.alone["1 pmean"].lowered, result.alone["2 pmeans"].lowered) == (1, 2)


def test_sync_of_20_metrics_is_faster_than_20_pmeans(result):
    """A sync of 20 metrics is cheaper than 20 pmeans: a fifth on two idle cores, so any win passes."""
    assert result.alone["sync"].microseconds < result.alone[f"{COUNT} pmeans"].microseconds


def test_metrics_benchmark_measures_and_shows_every_step_and_reduction(result, tmp_path):
    for cost in (*result.steps.values(), *result.alone.values()):
        assert len(cost.rounds) == 3 and all(np.isfinite(cost.rounds)) and min(cost.rounds) > 0
    assert not CLU_STEPS & result.steps.keys()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(benchmark.step_table(result), benchmark.reduction_table(result), *benchmark.verdicts(result))
    shown = console.export_text()
    tables = benchmark.step_table(result), benchmark.reduction_table(result)
    assert not [wrong for table in tables for width in WIDTHS for wrong in missing(table, width)]
    for label, *_ in benchmark.step_rows(result):
        assert label in shown
    for label in result.alone:
        assert label in shown
    assert "update alone adds no collective: met" in shown
    benchmark.draw(tmp_path / "new" / "cost.png", result)
    assert (tmp_path / "new" / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("clu") is None, reason="clu is not installed")
def test_clu_gathers_every_array_of_the_metric_state():
    mesh = DeviceMeshManager.create_device_mesh({variants_of.AXIS: -1})
    variants = {label: v for label, v in variants_of.step_variants(mesh, 3, with_clu=True) if label in CLU_STEPS}
    assert variants.keys() == CLU_STEPS
    assert variants["clu, merge"].lowered == 1  # the gradient's
    assert variants["clu, gather and merge"].lowered == 1 + 2 * 3 + 1  # totals and counts, and clu's counter


@pytest.mark.parametrize(
    "text, count",
    [
        ('%0 = "stablehlo.all_reduce"(%a) <{}> ({ "stablehlo.return"(%s) }) : x\n "stablehlo.reduce_scatter"(%b)', 2),
        ("%ar = (f32[], f32[4]) all-reduce(%a, %b), metadata={op_name='jit(f)/all_gather'}", 1),
        ("%s = f32[] all-gather-start(%a)\n%d = f32[] all-gather-done(%s)", 1),
        ("%all-reduce.1 = f32[] get-tuple-element(%all-reduce), index=0", 0),
    ],
)
def test_count_collectives_counts_each_collective_of_a_text_once(text, count):
    assert variants_of.count_collectives(text) == count


def test_metrics_command_with_fewer_metrics_than_kinds_exits_with_2(capsys):
    assert benchmark.main(["--metrics", "3"]) == 2
    assert "--metrics 3: the mixed ones are of 10 kinds" in " ".join(capsys.readouterr().err.split())

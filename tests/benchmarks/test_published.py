"""Tests of the table of published runs: equal to the recorded figures, and each run is as in its source."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import published
from benchmarks.decoder import SIZES, DecoderSize
from benchmarks.published import (
    KEPT,
    LATER,
    RUNS,
    Run,
    flash_flops,
    forecast_of,
    in_place_of_flash,
    ratio,
    settings,
    table,
    waiting,
    workload,
)
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

PAGE = Path(__file__).parents[2] / "docs" / "forecast.md"
STORED = json.loads(KEPT.read_text())


def test_published_runs_page_has_the_table_of_stored_figures():
    assert list(STORED) == [name for name in RUNS if name in STORED] and len(STORED) >= 6
    page = PAGE.read_text()
    assert table(STORED) in page and settings(STORED) in page and waiting(STORED) in page


def test_every_run_is_either_forecast_or_listed_as_waiting_with_its_role_set_by_rule():
    listed = waiting(STORED)
    assert not [name for name in RUNS if (name in STORED) == (f"[{name}](" in listed)]
    assert [run.fixed for run in LATER.values()] == [place % 2 == 0 for place in range(len(LATER))]
    assert not [name for name in STORED if RUNS[name].cannot]
    (name,) = [name for name, run in LATER.items() if run.cannot][:1]
    with pytest.raises(ValueError, match="this run has no forecast: float8 products"):
        forecast_of(RUNS[name])


def test_every_stored_forecast_is_within_the_stated_ratio_of_the_published_time():
    ratios = {name: ratio(RUNS[name], found) for name, found in STORED.items()}
    outside = {name for name, r in ratios.items() if not 1 / published.CLOSE <= r <= published.CLOSE}
    assert outside == set(published.OUTSIDE) & set(STORED), "a run left the stated range, or came back into it"
    page = " ".join(PAGE.read_text().split())
    assert all(why in page for why in published.OUTSIDE.values())


def test_chip_efficiencies_are_checked_by_runs_not_used_for_calibration():
    chips = {run.chip.name for run in RUNS.values() if run.chip.efficiency}
    for chip in chips:
        roles = {RUNS[name].fixed for name in STORED if RUNS[name].chip.name == chip}
        assert roles >= {False} and (roles == {True, False} or chip == "h200"), chip


def test_least_forecast_time_is_below_measured_and_expected_time():
    for name, found in STORED.items():
        assert ratio(RUNS[name], found, "least") < 1.0 or name in published.OUTSIDE, name
        assert found["step_seconds"]["least"] <= found["step_seconds"]["expected"], name


@pytest.mark.parametrize(
    "size, billions",
    [
        (published.LLAMA2_7B, 6.74),
        (published.LLAMA2_13B, 13.0),
        (published.LLAMA3_70B, 70.6),
        (published.LLAMA_34B, 33.7),
        (published.LLAMA3_405B, 405.9),
        (SIZES["llama3.1_8B"], 8.03),
        (SIZES["llama3.2_1B"], 1.24),
    ],
    ids=["7B", "13B", "70B", "34B", "405B", "8B", "1B"],
)
def test_published_models_have_the_parameter_count_of_the_model_name(size, billions):
    run = Run(size=size, topology="h100:1x8", rows=1, context=128, seconds=1.0, source="", said="")
    tokens = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    params = jax.eval_shape(workload(run).model.init, jax.random.key(0), tokens)
    assert sum(leaf.size for _, leaf in leaves_with_path(params)) == pytest.approx(billions * 1e9, rel=0.01)


def test_flash_flops_count_half_of_the_pairs_of_each_product():
    """``flash_flops`` counts half of the pairs of each product: 10 of 16 pairs are used at 4 positions."""
    size = DecoderSize(16, 3, 2, 64, hidden=32, kv_heads=1)
    run = Run(size=size, topology="h100:1x8", rows=5, context=4, seconds=1.0, source="", said="", remat=None)
    one_product = 2 * 5 * 2 * 4 * 4 * 8 / 2  # 2 FLOP, rows, heads, pairs, features
    assert flash_flops(run) == pytest.approx(3 * 7 * one_product)  # 2 forward and 5 backward in each layer
    q, k = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 1, 8))
    assert in_place_of_flash(q, k, k).shape == q.shape


@pytest.mark.slow
@pytest.mark.cuda_plugin
def test_forecast_of_a_small_run_has_times_and_recompute_flops_of_the_formula():
    size = DecoderSize(512, 2, 4, 1024, hidden=1024, kv_heads=2)
    run = Run(
        size=size,
        topology="h100:1x4",
        rows=1,
        context=256,
        seconds=1.0,
        source="",
        said="",
        remat="every second product",
    )
    found = forecast_of(run)
    times, attention = found["step_seconds"], found["attention_seconds"]
    assert 0 < times["least"] < times["expected"]
    assert attention["least"] == pytest.approx(flash_flops(run) / 989e12)
    # The second, fourth and sixth of seven products are recomputed: of the keys, the output and "up".
    forward = 2 * 256 * 2 * 512 * (512 + 2 * 256 + 512 + 3 * 1024)
    again = 2 * 256 * 2 * 512 * (256 + 512 + 1024)
    head = 2 * 256 * 512 * 1024
    assert found["flops"]["forward"] == pytest.approx(forward + head)
    assert found["flops"]["recompute"] == pytest.approx(again)

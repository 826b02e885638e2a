"""Tests of the traffic benchmark in small: bytes of compiled steps equal the formulas exactly."""

import json

import pytest

from benchmarks import forecasts, limits, traffic
from benchmarks.cases import SIZES, counts
from tests.compiled_cases import NoProgress, compiled, kept_folder

SIZE, TOPOLOGY, CASES = "small", "v5e:4x4", ["flat", "ours"]
DEVICES = 16
COUNTS = counts(SIZES[SIZE])
pytestmark = [
    pytest.mark.libtpu,
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return kept_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def found(kept):
    return traffic.measured(SIZE, TOPOLOGY, compiled(kept, SIZE, TOPOLOGY, CASES))


def asked_for(case):
    """Returns the bytes of gathers and of scatters; an all-reduce counts as a scatter, with half of its bytes."""
    sent = traffic.by_kind(case)
    return sent["all-gather"], sent["reduce-scatter"] + sent["all-reduce"] / 2


@pytest.mark.parametrize("case, scatter_bytes", [("ours", 2), ("flat", 4)])
def test_sent_bytes_equal_two_gathers_of_blocks_and_a_single_gradient_scatter(found, case, scatter_bytes):
    wire = limits.wire_bytes(COUNTS, DEVICES, scatter_bytes=scatter_bytes)
    want = wire.gather, wire.scatter + wire.small / 2
    assert asked_for(found["cases"][case]) == pytest.approx(want, rel=1e-5)  # the loss and the norm are sent, too


def test_library_case_sends_at_most_0_55_of_the_bytes_of_the_flat_algorithm(found):
    """Staged scatters of large arrays stay scatters, in bfloat16: at most 0.55 of the flat algorithm's bytes."""
    ours, flat = found["cases"]["ours"], found["cases"]["flat"]
    assert ours["ratios"]["sent over flat"] <= 0.55 and ours["ratios"]["sent over the limit"] <= 1.15
    assert flat["ratios"]["sent over the limit"] > 2
    assert traffic.by_kind(flat)["reduce-scatter"] == 0 and flat["all_reduced_share"] > 0.6  # guard: the other's way


def test_both_torus_axes_carry_similar_wire_bytes(found):
    loads = found["cases"]["ours"]["wire_bytes_by_axis"]
    assert set(loads) == {"fsdp_x", "fsdp_y"}
    total = found["cases"]["ours"]["wire_bytes"]
    assert sum(loads.values()) == pytest.approx(total)
    in_one_order = limits.axis_bytes(total / limits.share(DEVICES), {"x": 4, "y": 4})["x"]
    assert max(loads.values()) <= 0.75 * in_one_order


def test_forecasts_compute_reuses_stored_rows_without_compiling(found, kept):
    del found
    path = forecasts.path_of(kept, SIZE, TOPOLOGY)
    before = path.read_text()
    marked = json.loads(before)
    marked["ours"]["compile_seconds"] = -1.0
    path.write_text(json.dumps(marked))
    forecasts.compute([SIZE], [TOPOLOGY], ["ours"], kept, NoProgress())
    assert forecasts.read(path)["ours"]["compile_seconds"] == -1.0
    path.write_text(before)


def test_traffic_command_prints_tables_and_writes_json_and_picture(found, kept, tmp_path, capsys):
    del found
    where = ["--topologies", TOPOLOGY, "--kept", str(kept), "--out", str(tmp_path), "--redraw"]
    assert traffic.main(["--sizes", SIZE, "--cases", *CASES, "--detail", "ours", *where]) == 0
    out = capsys.readouterr().out
    assert f"{SIZE} on {TOPOLOGY}: ours" in out and "of limit" in out and "reduce-scatt" in out
    told = json.loads((tmp_path / f"{SIZE}.json").read_text())[TOPOLOGY]
    assert list(told["cases"]) == CASES and told["limit_bytes"]["total"] > 0
    assert (tmp_path / f"{SIZE}.png").stat().st_size > 10_000


def test_forecasts_command_prints_the_overview_and_draws_a_picture(found, kept, tmp_path, capsys):
    del found
    where = ["--topologies", TOPOLOGY, "--kept", str(kept), "--out", str(tmp_path), "--redraw"]
    assert forecasts.main(["--sizes", SIZE, "--cases", *CASES, *where]) == 0
    assert "bound by" in capsys.readouterr().out and (tmp_path / f"{SIZE}.png").exists()

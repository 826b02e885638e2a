"""Tests of the memory benchmark in small: compiled bytes agree with formulas, and the command prints both."""

import json

import jax
import pytest

from benchmarks import limits, memory
from benchmarks.cases import SIZES, counts
from benchmarks.forecasts import phases
from tests.compiled_cases import compiled, kept_folder
from xlstm_jax.forecast.cost.memory import Memory, Moment

SIZE, TOPOLOGY, CASES = "small", "v5e:4x4", ["flat", "ours"]
DEVICES, TOKENS = 16, 2048


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = kept_folder(tmp_path_factory)
    compiled(folder, SIZE, TOPOLOGY, CASES)
    return folder


@pytest.mark.slow
@pytest.mark.libtpu
def test_memory_arguments_match_the_formula_and_total_is_below_the_flat_algorithm(kept):
    found = memory.measured(SIZE, TOPOLOGY, compiled(kept, SIZE, TOPOLOGY, CASES))
    ours, flat = (found["cases"][case] for case in ("ours", "flat"))
    share = limits.persistent_bytes(counts(SIZES[SIZE]), DEVICES)
    assert ours["bytes"]["arguments"] == pytest.approx(share, rel=0.03)  # padding and tokens add little
    assert share < ours["bytes"]["arguments"] < share * DEVICES / 4  # guard: not the unsharded model
    assert found["limit_bytes"]["temporaries"] == limits.temporary_bytes(counts(SIZES[SIZE]), TOKENS)
    assert ours["ratios"]["total over flat"] <= 0.90
    assert ours["bytes"]["temporaries"] <= 0.75 * flat["bytes"]["temporaries"]
    assert flat["ratios"]["total over flat"] == 1.0


@pytest.mark.slow
@pytest.mark.libtpu
def test_live_bytes_of_each_phase_are_at_most_the_allocated_temporaries(kept):
    for found in compiled(kept, SIZE, TOPOLOGY, CASES).values():
        live = found["live_temporary_bytes"]
        assert 0 < max(live.values()) <= found["bytes"]["temporaries"]
        assert live["optimizer"] <= live["backward"]


def test_phases_assign_peak_bytes_to_forward_backward_and_optimizer():
    def moment(point, live, direction):
        return Moment(point, live, "", direction)

    timeline = (
        moment(0, 1, "other"),
        moment(1, 5, "forward"),
        moment(2, 9, "recompute"),
        moment(3, 7, "other"),
        moment(4, 8, "backward"),
        moment(5, 6, "other"),
    )
    found = Memory(0, 0, 0, 9, 0, 2, 9, (), timeline)
    assert phases(found) == {"forward": 5, "backward": 9, "optimizer": 6}


@pytest.mark.slow
@pytest.mark.libtpu
def test_memory_command_prints_tables_and_writes_json_and_picture(kept, tmp_path, capsys):
    where = ["--topologies", TOPOLOGY, "--kept", str(kept), "--out", str(tmp_path), "--redraw"]
    assert memory.main(["--sizes", SIZE, "--cases", *CASES, *where]) == 0
    out = capsys.readouterr().out
    assert f"{SIZE} on {TOPOLOGY}" in out and "of flat" in out and "optimizer" in out
    told = json.loads((tmp_path / f"{SIZE}.json").read_text())["topologies"][TOPOLOGY]["cases"]
    assert list(told) == CASES and all("libtpu" in found["versions"] for found in told.values())
    assert (tmp_path / f"{SIZE}.png").stat().st_size > 10_000


def test_memory_measure_raises_for_devices_without_memory_statistics():
    kind = jax.devices()[0].device_kind
    with pytest.raises(ValueError, match=f"8 x {kind}, do not count their memory; this needs GPUs or TPUs"):
        memory.measure(SIZE, "ours")

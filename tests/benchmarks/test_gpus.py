"""Tests of GPU benchmarks in small: meshes of hosts, bytes across hosts, XLA options, and the measures of a card."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from benchmarks import forecasts, limits, memory, traffic, xla_options
from benchmarks.cases import CASES, ON_TPUS, SIZES, counts, mesh_axes
from benchmarks.options import complete
from tests.compiled_cases import compiled, kept_folder
from tests.forecast.test_forecast import workload
from tests.gpu import __main__ as on_card
from tests.gpu import measures
from xlstm_jax.accelerators import compiler_options
from xlstm_jax.forecast import parse_topology
from xlstm_jax.forecast.compiling.compile import compile_for_topology
from xlstm_jax.forecast.cost.collective_traffic import Collective

SIZE, TOPOLOGY, COMPARED = "small", "h100:2x4", ["jit", "ours"]
HOSTS, GPUS = 2, 4
COUNTS = counts(SIZES[SIZE])


# ----------------------------------------------------------------------------------------------------- pure functions


@pytest.mark.parametrize(
    "case, shape, axes",
    [
        ("ours", (32, 8), {"fsdp_host": 32, "fsdp_device": 8}),
        ("jit", (32, 8), {"fsdp": 256}),
        ("ours, HSDP", (32, 8), {"dp": 32, "fsdp_device": 8}),
        ("flat, HSDP", (32, 8), {"dp": 32, "fsdp": 8}),
        ("ours", (1, 8), {"fsdp": 8}),
    ],
)
def test_mesh_axes_follow_the_benchmark_case_on_gpu_hosts(case, shape, axes):
    assert mesh_axes(CASES[case], shape, gpus=True) == axes
    assert mesh_axes(CASES["ours"], shape) != {"fsdp_host": 32, "fsdp_device": 8}  # guard: a torus has other names


def test_complete_chooses_cases_by_topology_and_raises_for_tpus_mixed_with_gpus():
    parser = traffic.parser()
    tpus = complete(parser.parse_args([]), ON_TPUS, ["of GPUs"])
    assert (tpus.cases, tpus.suffix) == (list(ON_TPUS), "") and "jit, best options" not in tpus.cases
    gpus = complete(parser.parse_args(["--topologies", TOPOLOGY]), ON_TPUS, ["of GPUs"])
    assert (gpus.cases, gpus.suffix) == (["of GPUs"], "_gpus")
    with pytest.raises(ValueError, match="names TPUs and GPUs"):
        complete(parser.parse_args(["--topologies", TOPOLOGY, "v5e:4x4"]), ON_TPUS, [])


def test_crossing_bytes_are_the_share_of_a_gpu_in_the_bytes_between_hosts():
    gathered = 2 * (2 * COUNTS.blocks + COUNTS.embedding + COUNTS.head)
    sent = gathered + 2 * COUNTS.sharded + limits.SMALL_BYTES * COUNTS.small
    assert limits.crossing_bytes(COUNTS, HOSTS, GPUS) == pytest.approx(sent * (1 / 2) / GPUS)
    assert limits.crossing_bytes(COUNTS, 1, GPUS) == 0


def test_per_layer_counts_the_most_frequent_collectives_of_each_direction():
    fields = {field.name: None for field in dataclasses.fields(Collective)}
    ways = [("forward", 24), ("forward", 1), ("recompute", 23), ("backward", 24), ("backward", 2), ("other", 1)]
    found = [Collective(**fields | {"count": count, "direction": way}) for way, count in ways]
    assert forecasts.per_layer(found) == {"forward": 1, "backward": 2}
    assert forecasts.per_layer([]) == {"forward": 0, "backward": 0}


def test_drawn_keeps_cases_common_to_all_topologies_in_the_same_order():
    """The picture shows the cases of all topologies in one order, because the plots share the axis of cases."""
    first = {"ours": {"n": 3}, "flat": {"n": 2}, "jit": {"n": 1}, "late": {"n": 6}}
    second = {"alone": {"n": 7}, "jit": {"n": 5}, "ours": {"n": 4}, "flat": {"problem": "too large"}}
    shown = forecasts.drawn({"h100:32x8": first, "b200:8x8": second})
    assert {topology: list(cases.items()) for topology, cases in shown.items()} == {
        "h100:32x8": [("ours", {"n": 3}), ("jit", {"n": 1})],
        "b200:8x8": [("ours", {"n": 4}), ("jit", {"n": 5})],
    }
    assert forecasts.drawn({}) == {}


# ----------------------------------------------------------------------------------------------------------- compiled


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = kept_folder(tmp_path_factory)
    compiled(folder, SIZE, TOPOLOGY, COMPARED)
    return folder


@pytest.mark.slow
@pytest.mark.cuda_plugin
def test_library_case_on_gpus_sends_minimal_bytes_in_total_and_across_hosts(kept):
    found = traffic.measured(SIZE, TOPOLOGY, compiled(kept, SIZE, TOPOLOGY, COMPARED))["cases"]
    ours, jit = found["ours"], found["jit"]
    assert ours["ratios"]["sent over the limit"] <= 1.001  # the loss and the norm are sent, too
    assert ours["ratios"]["sent over jit"] <= 1.001
    assert ours["nic_over_the_least"] <= 1.02
    assert jit["nic_over_the_least"] > 1.5  # guard: a flat ring sends all bytes across hosts
    assert set(ours["wire_bytes_by_axis"]) == {"fsdp_host", "fsdp_device"}
    assert traffic.by_kind(ours)["reduce-scatter"] > 0 and ours["all_reduced_share"] < 0.01


@pytest.mark.slow
@pytest.mark.cuda_plugin
def test_traffic_and_memory_commands_for_gpus_print_tables_and_write_results(kept, tmp_path, capsys):
    where = ["--topologies", TOPOLOGY, "--kept", str(kept), "--out", str(tmp_path), "--redraw", "--sizes", SIZE]
    for module in (traffic, memory):
        assert module.main([*where, "--cases", *COMPARED]) == 0
        assert (tmp_path / f"{SIZE}_gpus.json").stat().st_size > 1000
    out = capsys.readouterr().out
    columns = ("of least", "per NIC", "hidden", "no latency", "optimizer")
    assert not [column for column in columns if column not in out]


def test_xla_options_table_shows_a_refused_option_as_a_problem():
    rows = {"new": {"program": "", "problem": "No such compile option"}}
    (table, problems) = xla_options.table(SIZE, TOPOLOGY, "ours", rows)
    assert (table.row_count, problems.row_count) == (1, 1)


def text_with(options):
    """Returns the compiled text of four scanned layers on two GPUs, without names."""
    step, args = workload(rows=64, width=512).build_step({"fsdp": 2})
    text = compile_for_topology(step, *args, topology="h100:1x2", compiler_options=options, cache=None).hlo
    return re.sub(r", metadata=\{[^}]*\}|HloModule.*", "", text)


@pytest.mark.slow
@pytest.mark.cuda_plugin
def test_every_gpu_compiler_option_is_accepted_and_changes_the_program():
    options = compiler_options(parse_topology("h100:1x2").chip.device_kinds[0], chosen_by="forecast")
    without = text_with({})
    idle = [name for name, value in options.items() if text_with({name: value}) == without]
    assert options and not idle


# ----------------------------------------------------------------------------------------------------------- on a GPU


def test_gpu_suite_without_a_card_prints_a_notice_and_exits_with_0(tmp_path):
    environment = os.environ | {"PATH": str(tmp_path)}  # where no driver is
    command = [sys.executable, "-X", "importtime", "-m", "tests.gpu"]
    run = subprocess.run(command, cwd=on_card.ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.strip() == on_card.NO_CARD
    assert " jax\n" not in run.stderr and " json\n" in run.stderr  # JAX would look for devices


@pytest.mark.slow
def test_gpu_measures_also_run_on_a_cpu_device():
    device = jax.devices()[0]
    text = measures.same_text(device)
    assert text["differing"] == 0 and text["instructions"] > 1000
    assert measures.options_accepted(device) == {} and measures.memories(device) == {}  # a CPU has no options
    times = measures.step_times(device, "tiny", rounds=2)["cases"]
    assert set(times) == {measures.PLAIN, measures.WRAPPED, "jit"}


@pytest.mark.slow
def test_dry_run_of_the_gpu_program_answers_every_question_on_simulated_devices(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--dry-run", "--minutes", "60", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=on_card.ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert found["dry_run"] and found["left_out"] == ["suite"]
    sets = found["option_sets"]["sets"]
    assert set(sets) == set(measures.OPTION_SETS) and len(sets) == 9
    for one in sets.values():
        assert one["seconds"] > 0 and one["ratio"] > 0 and one["collectives"] > 0 < one["temporary_bytes"]
    assert found["step_time"]["cases"]["ours"]["ratios"]["time over jit"]["median"] > 0
    assert found["attention"]["implementations"]["xla"]["seconds"] > 0
    assert "problem" in found["attention"]["implementations"]["cudnn"]  # a CPU has no cuDNN


def test_gpu_measures_that_begin_too_late_or_raise_do_not_hide_the_others(monkeypatch):
    def broken(*_):
        raise RuntimeError("no such card")

    kept = []
    for name in ("step_times", "attention", "same_text", "options_accepted"):
        monkeypatch.setattr(measures, name, lambda *_: {})
    monkeypatch.setattr(measures, "option_sets", broken)
    found = measures.everything(jax.devices(), measures.DRY, 1e6, lambda found: kept.append(len(found["seconds"])))
    assert kept == list(range(1, 8)) and found["left_out"] == []
    assert measures.failures(found) == ["option_sets: RuntimeError: no such card"]
    late = measures.everything(jax.devices(), measures.DRY, -1.0, kept.append)
    assert len(late["left_out"]) == 7 and not late["seconds"] and measures.failures(late) == []


def test_failures_lists_every_unmet_expectation_of_gpu_measures():
    good = {
        "suite": {"exit code": 0, "passed": 9},
        "same_text": {"instructions": 1500, "differing": 0},
        "step_time": {"cases": {"ours": {"ratios": {"time over replicated": {"median": 1.01}}}}},
        "memory": {"small": {"forecast_bytes": 105, "peak_bytes": 100}},
        "options": {"an option": "accepted"},
        "training": {"tokens_per_s": 1e5, "mfu": 0.4},
    }
    assert measures.failures(good) == [] and measures.failures({"left_out": list(good)}) == []
    bad = {
        "suite": {"exit code": 1, "failed": 1},
        "same_text": {"instructions": 1500, "differing": 3},
        "step_time": {"cases": {"ours": {"ratios": {"time over replicated": {"median": 1.2}}}}},
        "memory": {"small": {"forecast_bytes": 80, "peak_bytes": 100}, "1.3B": {"problem": "no memory"}},
        "options": {"an option": "no such option"},
        "training": {"exit code": 1, "problem": "killed"},
    }
    assert measures.failures(bad | {"dry_run": True}) == ["training: killed"]  # only what raised
    told = measures.failures(bad)
    assert len(told) == 7 and "memory of small: the forecast is off by -20%" in told
    assert json.dumps(bad)


@pytest.mark.parametrize(
    "last, found",
    [
        ("9 passed, 730 deselected in 3.1s", {"passed": 9}),
        ("1 failed, 2 passed, 3 skipped in 9s", {"failed": 1, "passed": 2, "skipped": 3}),
        ("", {}),
    ],
)
def test_counted_reads_outcome_numbers_from_pytest_output(last, found):
    assert on_card.counted(f"some test\n{last}\n") == found

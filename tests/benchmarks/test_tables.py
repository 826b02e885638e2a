"""Tests that tables of the benchmarks and of the fault suite show every cell in full; see cli/test_tables.py."""

import json

import pytest
from rich.console import Group

from benchmarks import (
    compile_time,
    forecast_accuracy,
    forecasts,
    fp8,
    memory,
    quantized,
    report,
    step_time,
    traffic,
    wire_dtypes,
    xla_options,
)
from tests.cli.test_tables import ROOT, WHY, WIDTHS, assert_shown_in_full, made_once, missing
from tests.faults import report as faults

RESULTS = ROOT / "benchmarks" / "results"


def kept(folder, name="1.3B"):
    return json.loads((RESULTS / folder / f"{name}.json").read_text())


def failing(cases):
    return cases | {"a case that fails": {"problem": WHY}}


def of_faults(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT_REPORT", str(tmp_path / "rows"))
    fault = "`kill -9` of one or all, 2 processes x 2 devices: in a step, in a save"
    faults.record(fault, 22, 7.4, "6 steps", "bit-equal")
    faults.record("the disk is full", 1, None, "12 steps, none saved since", "refused on both, with what differs")
    return faults.table(tmp_path / "rows")


def of_compile_time():
    shape = {"layers": 48, "loop": True, "chips": 512}
    traced = [shape | {"ratio": 1.234, "seconds": {compile_time.WRAPPED: 12.3456, compile_time.PLAIN: 10.1}}]
    compiled = {"compile_seconds": 219.4, "trace_seconds": 12.3, "program_bytes": 123456789}
    rows = [shape | compiled | {"case": "jit"}, shape | {"case": "ours, options", "problem": WHY}]
    return Group(compile_time.tracing_table("7B", traced), compile_time.compiling_table("7B", rows))


def of_memory(found):
    shapes = memory.table("1.3B", "v5e:16x16", found | {"cases": failing(found["cases"])})
    phases = memory.phases_table("1.3B", "v5e:16x16", found)
    counted = {"jit": {"devices": "H200", "peak_bytes": 2**37, "between_steps_bytes": 2**33}}
    return Group(shapes, phases, memory.devices_table("1.3B", failing(counted)))


def of_traffic(found):
    all_cases = traffic.table("1.3B", "v5e:16x16", found | {"cases": failing(found["cases"])})
    return Group(all_cases, traffic.detail_table("1.3B", "v5e:16x16", "ours", next(iter(found["cases"].values()))))


def of_gpus(found):
    tables = traffic.gpu_tables("1.3B", "h100:32x8", found | {"cases": failing(found["cases"])})
    options = failing(kept("options", "1.3B_h100_32x8_jax0.12.0.1")["ours"])
    swept = xla_options.table("1.3B", "h100:32x8", "ours", options)
    return Group(*tables, *swept)


def of_accuracy():
    same = forecast_accuracy.Comparison("Transformer, hybrid", "collectives: all-gather over fsdp", 123456, 123456)
    other = forecast_accuracy.Comparison("xLSTM, FSDP", "bytes at the peak", 12345678901, 12456789012, exact=False)
    return forecast_accuracy.table([same, other])


def of_training():
    split, whole = {"parameters": 123456, "optimizer": 2**20}, {"parameters": 987648, "optimizer": 2**23}
    layouts = {"fsdp over 8": split, "replicated": whole}
    return Group(report.memory_table(layouts), report.comparison_table(1.4, 3.2))


TABLES = {
    "memory": lambda: of_memory(kept("memory")["topologies"]["v5e:16x16"]),
    "traffic": lambda: of_traffic(kept("traffic")["v5e:16x16"]),
    "gpus": lambda: of_gpus(kept("traffic", "1.3B_gpus")["h100:32x8"]),
    "forecasts": lambda: forecasts.table("1.3B", "v5e:16x16", failing(kept("forecasts", "1.3B_v5e_16x16"))),
    "step_time": lambda: step_time.table("small", kept("step_time", "small")),
    "wire_dtypes": lambda: Group(*wire_dtypes.tables(kept("wire_dtypes", "wire_dtypes"))),
    "quantized": lambda: quantized.table(kept("wire_dtypes", "quantized")),
    "fp8": lambda: fp8.table(kept("wire_dtypes", "fp8")),
    "compile_time": of_compile_time,
    "forecast_accuracy": of_accuracy,
    "train_lm": of_training,
}


made = made_once(TABLES)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", TABLES)
def test_every_cell_of_every_table_is_shown_in_full(name, width):
    assert_shown_in_full(made(name), width)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_table_of_faults_is_shown_in_full(width, tmp_path, monkeypatch):
    assert not missing(of_faults(tmp_path, monkeypatch), width)

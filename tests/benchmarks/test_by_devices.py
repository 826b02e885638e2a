"""The benchmark of memory by devices: its command in small, the stored results, and its picture."""

import json

import pytest

from benchmarks import by_devices
from benchmarks.cases import SIZES


@pytest.mark.libtpu
def test_by_devices_command_writes_results_for_the_small_model(tmp_path):
    where = ["--size", "small", "--topologies", "v5e:2x2", "--out", str(tmp_path)]
    assert by_devices.main(where) == 0
    rows = json.loads((tmp_path / "small.json").read_text())
    assert list(rows) == ["v5e:2x2"] and list(rows["v5e:2x2"]) == list(by_devices.COMPARED)
    assert by_devices.gib(rows, "ours")[4] < by_devices.gib(rows, "replicated")[4]


def test_by_devices_redraw_draws_stored_results_with_decreasing_memory(tmp_path):
    stored = (by_devices.OUT / f"{by_devices.SIZE}.json").read_text()
    (tmp_path / f"{by_devices.SIZE}.json").write_text(stored)
    assert by_devices.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{by_devices.SIZE}.png").stat().st_size > 10_000
    rows = json.loads(stored)
    assert list(rows) == list(by_devices.TOPOLOGIES)
    ours, replicated = by_devices.gib(rows, "ours"), by_devices.gib(rows, "replicated")
    assert list(ours) == sorted(ours) and sorted(ours.values(), reverse=True) == list(ours.values())
    assert max(replicated.values()) - min(replicated.values()) < 0.1 and by_devices.SIZE in SIZES

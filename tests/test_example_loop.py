"""The loop on the first page and in docs/example_loop.py: it learns, and a run that was stopped goes on bit for bit."""

import json
import runpy
import sys
from pathlib import Path

LOOP = Path(__file__).parent.parent / "docs" / "example_loop.py"


def rows_of(folder, steps, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(LOOP), str(folder), str(steps)])
    runpy.run_path(str(LOOP), run_name="__main__")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_was_stopped_has_the_rows_of_one_that_was_not(tmp_path, monkeypatch):
    whole = rows_of(tmp_path / "whole", 30, monkeypatch)
    stopped = rows_of(tmp_path / "stopped", 14, monkeypatch)
    assert [row["step"] for row in whole] == [10, 20, 30] and stopped == whole[:1]
    assert rows_of(tmp_path / "stopped", 30, monkeypatch) == whole
    assert whole[0]["eval/accuracy"] < 0.6 < 0.8 < whole[-1]["eval/accuracy"]  # guard: it learns

"""The table of the fault suite: a row for each kind of fault, collected from all tests and shown at the end."""

import json
import os
from collections import Counter
from pathlib import Path

from rich.table import Table

from xlstm_jax.formatting import rich_table

COLUMNS = ("fault", "rounds", "detected after", "lost", "result")


def file() -> Path | None:
    """Where the rows of this run are collected, also from workers of pytest-xdist."""
    path = os.environ.get("FAULT_REPORT")
    return Path(path) if path else None


def record(fault: str, rounds: int, detected_s: float | None, lost: str, result: str) -> None:
    """Adds a row; ``detected_s`` is from the fault to the end of the last process, at most."""
    if path := file():
        after = "" if detected_s is None else f"{detected_s:.1f} s"
        with path.open("a") as out:
            out.write(json.dumps([fault, rounds, after, lost, result]) + "\n")


def table(path: Path) -> Table:
    rows = [[fault, str(rounds), *rest] for (fault, *rest), rounds in _together(path).items()]
    return rich_table("Faults, and what became of the job", COLUMNS, rows, right=2)


def _together(path: Path) -> Counter:
    """Rows that differ in nothing but their rounds are one."""
    counted = Counter()
    for line in path.read_text().splitlines():
        fault, rounds, *rest = json.loads(line)
        counted[fault, *rest] += rounds
    return counted

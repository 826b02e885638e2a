"""Shows the table of faults at the end."""

import os
import tempfile
from pathlib import Path

from rich.console import Console

from tests.faults import report


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        os.environ["FAULT_REPORT"] = os.path.join(tempfile.mkdtemp(), "faults.jsonl")


def pytest_terminal_summary(terminalreporter):
    path = Path(os.environ["FAULT_REPORT"])
    if path.exists() and path.stat().st_size:
        console = Console(width=110)
        with console.capture() as shown:
            console.print(report.table(path))
        terminalreporter.write_line(shown.get())

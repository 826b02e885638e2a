"""Benchmark cases that are compiled once per test run, by the first worker that needs them."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import forecasts


class NoProgress:
    """Progress bar stub that shows nothing."""

    def add_task(self, *args: Any, **options: Any) -> int:
        del args, options
        return 0

    update = advance = add_task


def kept_folder(tmp_path_factory: Any) -> Path:
    """Returns the folder of the cases compiled in this run, shared by the workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled_cases"
    folder.mkdir(exist_ok=True)
    return folder


def compiled(kept: Path, size: str, topology: str, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the stored result of each case; compiles cases without a stored result."""
    with _alone(kept):
        forecasts.compute([size], [topology], cases, kept, NoProgress())
    return forecasts.read(forecasts.path_of(kept, size, topology))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Locks the folder for one worker at a time, so that a case is compiled only once."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""Cases of the benchmarks, compiled once for all tests of a run, whichever worker needs them first."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import forecasts


class NoProgress:
    """Where progress would be shown."""

    def add_task(self, *args: Any, **options: Any) -> int:
        del args, options
        return 0

    update = advance = add_task


def kept_folder(tmp_path_factory: Any) -> Path:
    """Where compiled cases of this run are kept; all workers share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled_cases"
    folder.mkdir(exist_ok=True)
    return folder


def compiled(kept: Path, size: str, topology: str, cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is kept of each case, compiled now where it is not there yet."""
    with _alone(kept):
        forecasts.compute([size], [topology], cases, kept, NoProgress())
    return forecasts.read(forecasts.path_of(kept, size, topology))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One worker at a time: a second would compile the same once more."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

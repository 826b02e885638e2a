"""Records what each test executes: ``pytest --record FOLDER``.

A line of the library counts where a function executes it during the test, its fixtures included; what runs at import
does not count. Lines in processes that a test starts are not seen, and such tests are noted.

``sys.monitoring`` calls back once for each line and test, and for functions of the library alone: the first start of a
function in a test says whose it is, and only those of the library report lines. JAX forgets before each test what it
has traced, so that lines and seconds do not depend on the tests before.
"""

import json
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = str(ROOT / "xlstm_jax") + os.sep
NAME = "lines of the library that tests execute"
STAMP = "XLSTM_JAX_RECORDING"  # set by the process that starts pytest's workers: when the recording began
STARTS_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}


class Recorded(NamedTuple):
    """What a test took and executed: ``lines[file][function]`` are numbers of lines, files below xlstm_jax/."""

    case: str  # below tests/, as pytest names it; of a docstring its file below the root
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float  # of the processor: all threads, and processes that ended during the test
    has_processes: bool
    lines: Mapping[str, Mapping[str, set[int]]]


def recorded(folder: Path) -> list[Recorded]:
    """Returns what the files of a folder have, of each case the last; a line that was cut off does not count."""
    found: dict[str, Recorded] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            lines = {
                path: {function: set(_numbers(ranges)) for function, ranges in functions.items()}
                for path, functions in entry.pop("lines").items()
            }
            found[entry["case"]] = Recorded(**entry, lines=lines)
    return list(found.values())


def case_of(nodeid: str) -> str:
    """Returns the name by which a test stands in the data.

    >>> case_of("tests/plan/test_plan.py::test_name[case]")
    'plan/test_plan.py::test_name[case]'
    """
    return nodeid.removeprefix("tests/")


def function_of(qualname: str) -> str:
    """Returns the function that a function without a name stands in, or the function itself.

    >>> function_of("Metric.update.<locals>.<lambda>.<locals>.<genexpr>")
    'Metric.update'
    """
    parts = [part for part in qualname.split(".") if part != "<locals>"]
    while len(parts) > 1 and parts[-1].startswith("<"):
        parts.pop()
    return ".".join(parts)


class Recorder:
    """The plugin: a line of JSON for each test, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        if sys.version_info < (3, 12):
            raise pytest.UsageError("--record needs sys.monitoring, and so Python 3.12 or later.")
        os.environ.setdefault(STAMP, f"{time.time_ns():x}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / f"{os.environ[STAMP]}-{os.getpid()}.jsonl"
        self.codes: dict[int, CodeType] = {}  # by id, and kept, so that no id is used twice
        self.hits: set[tuple[int, int]] = set()
        self.has_processes = False
        self.outcomes: list[str] = []
        monitoring = sys.monitoring
        self.tool, events = monitoring.COVERAGE_ID, monitoring.events
        monitoring.use_tool_id(self.tool, NAME)
        monitoring.register_callback(self.tool, events.PY_START, self._start)
        monitoring.register_callback(self.tool, events.LINE, self._line)
        sys.addaudithook(self._audit)

    def _start(self, code: CodeType, offset: int) -> object:
        del offset
        # A module or the body of a class is not optimized: these run at import.
        if code.co_filename.startswith(LIBRARY) and code.co_flags & CO_OPTIMIZED and id(code) not in self.codes:
            self.codes[id(code)] = code
            sys.monitoring.set_local_events(self.tool, code, sys.monitoring.events.LINE)
        return sys.monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> object:
        self.hits.add((id(code), line))
        return sys.monitoring.DISABLE

    def _audit(self, event: str, args: object) -> None:
        del args
        if event in STARTS_PROCESS:
            self.has_processes = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out what earlier calls have recorded; all workers of this one see the same."""
        stamp = os.environ[STAMP]
        done = set()
        for file in self.folder.glob("*.jsonl"):
            if not file.name.startswith(f"{stamp}-"):
                done |= set(_done(file))
        config.hook.pytest_deselected(items=[item for item in items if case_of(item.nodeid) in done])
        items[:] = [item for item in items if case_of(item.nodeid) not in done]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import jax  # not by those who only read recordings

        # A function that an earlier test has traced would not be entered again, and its lines would not be this test's.
        jax.clear_caches()
        events = sys.monitoring.events
        self.hits.clear()
        self.outcomes.clear()
        self.has_processes = False
        sys.monitoring.set_events(self.tool, events.PY_START)
        sys.monitoring.restart_events()
        begun = _seconds()
        try:
            return (yield)
        finally:
            seconds = _seconds() - begun
            sys.monitoring.set_events(self.tool, events.NO_EVENTS)
            self._write(item.nodeid, seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.append(report.outcome)

    def _write(self, nodeid: str, seconds: float) -> None:
        lines: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for code, line in list(self.hits):  # a thread that a test left behind may add to them
            path = self.codes[code].co_filename.removeprefix(LIBRARY)
            lines[path][function_of(self.codes[code].co_qualname)].add(line)
        entry = {
            "case": case_of(nodeid),
            "outcome": next((outcome for outcome in self.outcomes if outcome != "passed"), "passed"),
            "seconds": round(seconds, 3),
            "has_processes": self.has_processes,
            "lines": {
                path: {function: _ranges(numbers) for function, numbers in sorted(functions.items())}
                for path, functions in sorted(lines.items())
            },
        }
        with open(self.file, "a") as file:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")


def _done(file: Path) -> Iterator[str]:
    """The cases of a file of an earlier call that need not run again."""
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["outcome"] != "failed":
            yield entry["case"]


def _seconds() -> float:
    """Processor seconds of all threads, and of the processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _ranges(numbers: set[int]) -> str:
    """Numbers as text: "3-5,9"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _numbers(ranges: str) -> Iterator[int]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)

"""Records the lines that each test executes: ``pytest --record FOLDER``.

A line of the library counts if a function executes the line during the test, fixtures included; code that runs at
import does not count. Lines in child processes are invisible, and tests with child processes are marked.

``sys.monitoring`` calls back once per line and test, and for functions of the library alone: the first start of a
function in a test decides whether the function belongs to the library, and only library functions report lines. Before
each test JAX's traces are cleared, so that lines and seconds do not depend on earlier tests.
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
STAMP = "XLSTM_JAX_RECORDING"  # set by the process that starts pytest's workers: start time of the recording
STARTS_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "os.exec"}


class Recorded(NamedTuple):
    """A test's time and executed lines: ``lines[file][function]`` are numbers of lines, files below xlstm_jax/."""

    case: str  # pytest's name below tests/; of a docstring the file below the root
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float  # processor time of all threads, and of processes that ended during the test
    has_processes: bool
    lines: Mapping[str, Mapping[str, set[int]]]


def recorded(folder: Path) -> list[Recorded]:
    """Returns the last recording of each case in a folder; truncated lines are ignored."""
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
    """Returns the name of a test in the data.

    >>> case_of("tests/plan/test_plan.py::test_name[case]")
    'plan/test_plan.py::test_name[case]'
    """
    return nodeid.removeprefix("tests/")


def function_of(qualname: str) -> str:
    """Returns the named function that contains an anonymous function, or the function itself.

    >>> function_of("Metric.update.<locals>.<lambda>.<locals>.<genexpr>")
    'Metric.update'
    """
    parts = [part for part in qualname.split(".") if part != "<locals>"]
    while len(parts) > 1 and parts[-1].startswith("<"):
        parts.pop()
    return ".".join(parts)


class Recorder:
    """Plugin that writes a line of JSON for each test, into a file per process."""

    def __init__(self, folder: Path) -> None:
        if sys.version_info < (3, 12):
            raise pytest.UsageError("--record needs sys.monitoring, and so Python 3.12 or later.")
        os.environ.setdefault(STAMP, f"{time.time_ns():x}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / f"{os.environ[STAMP]}-{os.getpid()}.jsonl"
        self.codes: dict[int, CodeType] = {}  # by id; keeping the code prevents reuse of an id
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
        # Code of modules and class bodies is not optimized: such code runs at import.
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
        """Deselects tests recorded by earlier calls; all workers of a call deselect the same tests."""
        stamp = os.environ[STAMP]
        done = set()
        for file in self.folder.glob("*.jsonl"):
            if not file.name.startswith(f"{stamp}-"):
                done |= set(_done(file))
        config.hook.pytest_deselected(items=[item for item in items if case_of(item.nodeid) in done])
        items[:] = [item for item in items if case_of(item.nodeid) not in done]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        import jax  # slow; readers of recordings do without

        # A function traced by an earlier test would not run again, and its lines would miss in this test.
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
        for code, line in list(self.hits):  # a leftover thread may add entries meanwhile
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
    """Yields the cases in a file of an earlier call that need not run again."""
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if entry["outcome"] != "failed":
            yield entry["case"]


def _seconds() -> float:
    """Returns the processor seconds of all threads, and of ended child processes."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _ranges(numbers: set[int]) -> str:
    """Returns numbers as text: "3-5,9"."""
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

"""Runs tests against mutated copies of the tree, several at a time.

This process imports JAX once, and starts no device. Each run is a fork, which imports the library from its copy and
calls pytest: a second or two, plus the tests.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.xla_flags import SHORT_COMPILATION

# Set before the import of JAX, as in conftest.py.
os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1", "XLA_FLAGS": SHORT_COMPILATION}

import flax.linen
import flax.nnx  # noqa: F401
import jax.numpy  # noqa: F401
import optax  # noqa: F401
import pytest

from tests.cover.data import path_of
from tests.mutants.catalogue import ROOT, Mutant
from tests.mutants.drawn import Drawn

# The library, the tests, and files that these import or read: a missing file fails tests without any mutation.
FOLDERS = ("xlstm_jax", "tests", "benchmarks", "docs", ".ci")
ENDINGS = (".py", ".md", ".toml", ".cfg", ".cff")
COPIED = [path for path in sorted(ROOT.iterdir()) if path.name in FOLDERS or path.suffix in ENDINGS]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "_build")
LIMIT_S = 600.0
POLL_S = 0.05


class Run(NamedTuple):
    """A run of tests, with or without a mutation.

    If ``cases`` are given, only these cases of the tests run, in the given order; missing cases are left out.
    """

    tests: tuple[str, ...]
    mutant: Mutant | Drawn | None = None
    cases: tuple[str, ...] = ()
    limit_s: float | None = None  # of processor time
    marked: str = ""  # pytest's -m; "" runs all tests


class Outcome(NamedTuple):
    """Outcome of a run: "passed", "failed", "hung", "broken" (tests cannot run), or "empty" (no tests)."""

    run: Run
    result: str
    test: str  # the first failed test
    seconds: float  # of processor time
    text: str


class _Child(NamedTuple):
    run: Run
    pid: int
    copy: Path
    log: Path
    begun: float

    @property
    def failed(self) -> Path:
        return self.log.with_suffix(".failed")


class _Cases:
    """Plugin that selects and orders the cases of a run."""

    def __init__(self, cases: Sequence[str]) -> None:
        self.place = {path_of(case): number for number, case in enumerate(cases)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items if item.nodeid in self.place}
        items[:] = sorted(found.values(), key=lambda item: self.place[item.nodeid])


class _FirstFailure:
    """Plugin that writes the name of the first failed test, or file: names can have spaces."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.file.exists():
            self.file.write_text(report.nodeid)


def outcomes(runs: Sequence[Run], jobs: int) -> Iterator[Outcome]:
    """Yields the outcome of each run as the run ends."""
    waiting = list(reversed(runs))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free = [_copy(Path(folder) / str(job)) for job in range(jobs)]
        children: list[_Child] = []
        try:
            while waiting or children:
                while waiting and free:
                    children.append(_started(waiting.pop(), free.pop()))
                time.sleep(POLL_S)
                for child in list(children):
                    if outcome := _ended(child):
                        children.remove(child)
                        free.append(child.copy)
                        yield outcome
        finally:
            for child in children:
                _kill(child.pid)


def _copy(to: Path) -> Path:
    to.mkdir()
    for source in COPIED:
        if source.is_dir():
            shutil.copytree(source, to / source.name, ignore=LEFT_OUT)
        else:
            shutil.copy2(source, to)
    return to


def _started(run: Run, copy: Path) -> _Child:
    if run.mutant:
        file = copy / run.mutant.path
        file.write_text(run.mutant.mutated((ROOT / run.mutant.path).read_text()))
    log = copy.with_suffix(".log")
    log.with_suffix(".failed").unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _run_tests(run, copy, log)
    return _Child(run, pid, copy, log, time.monotonic())


def _run_tests(run: Run, copy: Path, log: Path) -> None:
    """Runs in the child process, and never returns."""
    code = 99
    try:
        os.setsid()  # child processes end with the group
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "xlstm_jax", "conftest")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
        plugins: list[object] = [_FirstFailure(log.with_suffix(".failed"))]
        if run.cases:
            plugins.append(_Cases(run.cases))
        if run.limit_s:
            resource.setrlimit(resource.RLIMIT_CPU, (int(run.limit_s) + 1, resource.RLIM_INFINITY))
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", run.marked]
        code = int(pytest.main([*options, *map(path_of, run.tests)], plugins))
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended(child: _Child) -> Outcome | None:
    pid, status, used = os.wait4(child.pid, os.WNOHANG)
    if not pid and time.monotonic() - child.begun < LIMIT_S:
        return None
    if not pid:
        _kill(child.pid)
    if child.run.mutant:
        shutil.copy2(ROOT / child.run.mutant.path, child.copy / child.run.mutant.path)
    text = child.log.read_text(errors="replace")
    found = child.failed.read_text() if child.failed.exists() else ""
    ends = {0: "passed", 1: "failed", 5: "empty", -signal.SIGXCPU: "hung"}
    result = ends.get(os.waitstatus_to_exitcode(status), "broken") if pid else "hung"
    return Outcome(child.run, result, found.removeprefix("tests/"), used.ru_utime + used.ru_stime, text)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

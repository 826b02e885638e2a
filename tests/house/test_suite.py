"""Tests of the test suite: helpers have one import name, and only tests of the benchmarks need the benchmarks."""

import ast
import errno
import socket
from pathlib import Path

import pytest

from tests import quick
from tests.cover.data import path_of
from tests.deletion.__main__ import CORE
from tests.deletion.delete import LIBRARY, ROOT
from tests.deletion.features import FEATURES, NOT_YET
from tests.ports import reserved_port

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
HELPERS = {path.stem for path in TESTS.glob("*.py")}
OF_BENCHMARKS = ("benchmarks/*", "compiled_cases*", "faults/*", "gpu/*", "targets/*")


def imported(source):
    """Yields the top-level modules of all imports of a file; "." for a relative import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield "." if node.level else node.module.partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)


def name_of(path):
    return str(path.relative_to(TESTS))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_test_files_import_helpers_from_the_tests_package(path):
    """Tests import helpers as ``tests.support``; ``support`` would be a second module with separate caches."""
    assert not set(imported(path.read_text())) & (HELPERS | {"."}), "write: from tests.helper import name"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_library_tests_do_not_import_benchmarks(path):
    if not any(path.relative_to(TESTS).match(pattern) for pattern in OF_BENCHMARKS):
        assert "benchmarks" not in set(imported(path.read_text()))


def test_imported_detects_forbidden_helper_and_benchmark_imports():
    assert {"support", "damage"} <= HELPERS
    source = "from support import mesh_of\nfrom . import damage\ndef f():\n    import benchmarks.models"
    assert set(imported(source)) == {"support", ".", "benchmarks"}


def test_reserved_port_is_for_the_coordinator_alone():
    """Nobody listens at a reserved port, and only a socket with SO_REUSEPORT, as gRPC's, can bind to it."""
    address = "127.0.0.1", reserved_port()
    with socket.socket() as client:
        assert client.connect_ex(address) == errno.ECONNREFUSED
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(address)
    with socket.socket() as coordinator, socket.socket() as client:
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind(address)
        coordinator.listen()
        assert client.connect_ex(address) == 0


def test_is_chosen_selects_exact_cases_and_promises_are_quick_tests():
    """A chosen name (a file, a function or a case) selects exactly its cases, and every promise is a quick test."""
    tests = {"a/test_a.py", "b/test_b.py::test_b", "c/test_c.py::test_c[one]"}
    cases = ["a/test_a.py::test_x[1]", "b/test_b.py::test_b[1]", "c/test_c.py::test_c[one]"]
    assert not [case for case in cases if not quick.is_chosen(f"tests/{case}", tests)]
    others = ["b/test_b.py::test_other", "c/test_c.py::test_c[two]", "c/test_c.py::test_c"]
    assert not [case for case in others if quick.is_chosen(f"tests/{case}", tests)]
    assert set(quick.PROMISES) < quick.chosen()
    # The library's examples, too.
    assert not [name for name in quick.files() if not (TESTS.parent / path_of(name)).is_file()]


def test_files_and_tests_of_deletion_features_exist():
    files = {f"{LIBRARY}/{file}" for feature in FEATURES for file in feature.files}
    own = {test.partition("::")[0] for feature in FEATURES for test in feature.own}
    assert not [file for file in {*files, *own, *CORE} if not (ROOT / file).exists()]
    assert NOT_YET.keys() <= {feature.name for feature in FEATURES}

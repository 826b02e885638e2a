"""Tests of the measured selection of quick tests (`make test`): recordings, cover, data. See tests/cover."""

import os
import subprocess
import sys

import pytest

from tests import quick
from tests.cover import data
from tests.cover.choose import as_bits, cover
from tests.cover.record import STAMP, function_of, recorded
from tests.mutants.catalogue import all_mutants

ROOT = data.ROOT
TEST = """
import subprocess, sys

from xlstm_jax.distributed.device_mesh.meshes import filled_sizes


def test_sizes():
    assert filled_sizes({"dp": 2, "fsdp": -1}, 8) == (2, 4)


def test_of_a_process():
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_that_fails():
    assert not filled_sizes({"dp": 2}, 2)
"""


def test_every_case_of_the_cover_data_is_an_existing_test():
    """Cases of the data exist by file and function; ``pytest --quick`` also compares the parameters."""
    seconds, entering = data.matrix()
    cases = {*data.chosen(), *seconds, *(case for case, _ in data.read_seen().values())}
    lacking = sorted(case for case in cases if not data.is_there(case))
    assert not lacking, f"the cover data name missing tests: {lacking[:5]}. {data.REMAKE}"
    untimed = {place: sorted(set(some) - set(seconds)) for place, some in entering.items()}
    assert not {place: cases for place, cases in untimed.items() if cases}


def test_every_mutation_is_detected_by_a_quick_test():
    """Every mutation has a quick test: the measured case, or else the tests that the mutation names."""
    names = {mutant.name: mutant for mutant in all_mutants()}
    seen, tests = data.read_seen(), quick.chosen()
    stale = sorted(set(seen) - set(names))
    assert not stale, f"the cover data name missing mutations: {stale[:5]}. {data.REMAKE}"

    def is_quick(case):
        file_is_seen = case.endswith(".py") and any(test.startswith(f"{case}::") for test in tests)
        return quick.is_chosen(case, tests) or file_is_seen

    unseen = [name for name, (case, _) in seen.items() if not is_quick(case)]
    unseen += [name for name in set(names) - set(seen) if not set(names[name].tests) <= tests]
    assert not unseen, f"no quick test detects the mutations {unseen[:5]}. {data.REMAKE}"


def test_cover_data_round_trip_through_files(tmp_path, monkeypatch):
    case, other = (
        "plan/test_plan.py::test_name[two words-{'a': 1}]",
        "xlstm_jax/formatting.py::xlstm_jax.formatting.number",
    )
    monkeypatch.setattr(data, "MATRIX", tmp_path / "matrix.txt")
    monkeypatch.setattr(data, "CHOSEN", tmp_path / "chosen.txt")
    monkeypatch.setattr(data, "SHORT", tmp_path / "short.txt")
    data.SHORT.write_text("# by hand\n   0.01  plan/test_plan.py::test_short\n")
    data.write_matrix({case: 0.25, other: 1.5}, {("formatting.py", "number"): [other, case], ("a.py", "A.f"): [case]})
    data.write_chosen({case: 0.25, "plan/test_plan.py::test_short": 0.01})
    assert "test_short" not in data.CHOSEN.read_text()
    assert data.matrix.__wrapped__() == (
        {case: 0.25, other: 1.5},
        {("a.py", "A.f"): [case], ("formatting.py", "number"): [other, case]},
    )
    assert data.chosen.__wrapped__() == {case: 0.25, "plan/test_plan.py::test_short": 0.01}
    data.add_seen(tmp_path / "seen.txt", "plan: a size is off", case, 2.0)
    assert data.read_seen(tmp_path / "seen.txt") == {"plan: a size is off": (case, 2.0)}


def test_renamed_test_case_is_reported_as_missing(monkeypatch):
    monkeypatch.setattr(data, "chosen", lambda: {"a/test_a.py::test_x[1]": 1.0, "b/test_b.py::test_y": 1.0})
    assert quick.missing(["tests/a/test_a.py::test_x[1]", "tests/a/test_a.py::test_z"]) == []
    assert quick.missing(["tests/a/test_a.py::test_x[2]"]) == ["a/test_a.py::test_x[1]"]
    assert not data.is_there("house/test_cover.py::test_of_another_name[1]")
    assert data.is_there("house/test_cover.py::test_renamed_test_case_is_reported_as_missing[1]")


@pytest.mark.parametrize(
    "sets, seconds, taken, budget_s, want",
    [
        ({"a": "xyz", "b": "xy", "c": "z"}, {"a": 9, "b": 1, "c": 1}, [], 99, {"b", "c"}),
        ({"a": "xyz", "b": "xy", "c": "z"}, {"a": 1, "b": 1, "c": 1}, [], 99, {"a"}),
        # Chosen tests count, and are not added again.
        ({"a": "xyz", "b": "xy", "c": "z"}, {"a": 9, "b": 1, "c": 1}, ["b"], 99, {"c"}),
        # The test with the best rate is redundant after the second and the third.
        ({"a": "wxyz", "b": "wx12345", "c": "yz67890"}, {"a": 0.1, "b": 5, "c": 5}, [], 99, {"b", "c"}),
        ({"a": "xyz", "b": "x"}, {"a": 9, "b": 5}, [], 6, {"b"}),
    ],
)
def test_cover_chooses_a_complete_and_short_set_of_tests(sets, seconds, taken, budget_s, want):
    assert set(cover(as_bits(sets), seconds, taken, budget_s)) == want


def test_function_of_assigns_lambdas_and_generators_to_the_enclosing_function():
    assert function_of("Metric.update.<locals>.<lambda>.<locals>.<genexpr>") == "Metric.update"
    assert function_of("step.<locals>.inner") == "step.inner"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="recordings need sys.monitoring")
def test_recording_has_the_executed_lines_of_each_test(tmp_path):
    (tmp_path / "test_recorded.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--record", "runs"]
    # Without the stamp of a recording that runs this test: files of the same stamp are not read.
    environment = {name: value for name, value in os.environ.items() if name != STAMP} | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment, "timeout": 300}
    outputs = [subprocess.run(command, capture_output=True, text=True, **options) for _ in range(2)]
    assert "1 failed, 2 passed" in outputs[0].stdout, outputs
    assert "1 failed, 2 deselected" in outputs[1].stdout, outputs  # recorded tests are skipped, failed tests rerun
    found = {entry.case.rpartition("::")[2]: entry for entry in recorded(tmp_path / "runs")}
    assert {name: entry.outcome for name, entry in found.items()} == {
        "test_sizes": "passed",
        "test_of_a_process": "passed",
        "test_that_fails": "failed",
    }
    assert [entry.has_processes for entry in found.values()] == [False, True, False]
    file = "distributed/device_mesh/meshes.py"
    lines = found["test_sizes"].lines[file]["filled_sizes"]
    source = (ROOT / "xlstm_jax" / file).read_text().splitlines()
    executed = "\n".join(source[line - 1] for line in sorted(lines))
    assert "known = math.prod(" in executed and "return tuple(" in executed
    # Excluded: lines that raise, lines of other functions, and import lines.
    assert "nearest =" not in executed and "def " not in executed
    assert not found["test_of_a_process"].lines

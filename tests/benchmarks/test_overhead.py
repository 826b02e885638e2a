"""Tests of the benchmark of Python before a step: what is counted, and the table."""

import json

from benchmarks import overhead


def test_calls_of_counts_calls_of_python_functions():
    def inner():
        return 1

    def work():
        return [inner() for _ in range(5)], len("abc")  # C functions do not count

    assert overhead.calls_of(lambda: None) == 0
    assert overhead.calls_of(work) == overhead.calls_of(work)  # repeats
    assert overhead.calls_of(lambda: [inner() for _ in range(7)]) - overhead.calls_of(work) in (1, 2)


def test_compared_takes_medians_of_the_rounds_after_the_first():
    found = overhead.compared({"jit": [9.0, 1.0, 2.0, 4.0], "ours": [90.0, 2.0, 2.0, 12.0]}, {"jit": 10, "ours": 15})
    assert found["seconds"] == {"jit": 2.0, "ours": 2.0} and found["ratio"] == {"jit": 2.0}
    assert found["ratio of calls"] == {"jit": 1.5} and found["calls"]["ours"] == 15


def test_overhead_command_measures_dispatch_of_a_few_leaves_and_prints_the_table(tmp_path, capsys):
    arguments = ["--leaves", "4", "--rounds", "1", "--only", "dispatch", "--out", str(tmp_path)]
    assert overhead.main(arguments) == 0
    (row,) = json.loads((tmp_path / "leaves.json").read_text())["dispatch"]
    assert row["leaves"] == 4 and set(row["seconds"]) == {"jit", "jit, same work", "ours"}
    assert row["calls"]["ours"] > row["calls"]["jit"] > 0 and set(row["ratio"]) == {"jit", "jit, same work"}
    assert overhead.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("dispatch, at most 1.1") == 4

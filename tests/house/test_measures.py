"""Tests of ``python -m tests.measures``: no cyclic imports, no code of unused features in a training; right counts."""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.deletion.features import DISTRIBUTED, FEATURES
from tests.measures import _has, calls, climbs, code_lines, cycles_of_entries, lines_on_the_way, smallest
from xlstm_jax.distributed.data_parallel import averages

# Calls, functions and files that the smallest training enters; CPython before 3.12 counts comprehensions, too.
MOST_CALLS, MOST_FUNCTIONS, MOST_FILES = 2_400, 170, 20
MOST_LINES_ON_THE_WAY = 1_100


@dataclass
class Held:
    args: tuple


def test_folder_entries_of_the_library_have_no_import_cycles():
    assert not cycles_of_entries()


def test_smallest_training_enters_no_file_of_a_feature_that_it_does_not_use(monkeypatch):
    # A step compares its gradients with averages of earlier steps, if a test before has left some.
    monkeypatch.setattr(averages.AVERAGES, "known", [])
    entered = calls(smallest().training)
    files = {Path(code.co_filename) for code in entered}
    own = [(DISTRIBUTED / name).resolve() for feature in FEATURES for name in feature.files]
    features = {str(file.relative_to(DISTRIBUTED)) for file in files if any(file.is_relative_to(path) for path in own)}
    assert not features
    assert (DISTRIBUTED / "data_parallel" / "leaf.py") in files, "the training is counted"  # guard
    if sys.version_info >= (3, 12):
        assert len(entered) <= MOST_CALLS
        assert len(set(entered)) <= MOST_FUNCTIONS
        assert len(files) <= MOST_FILES


def test_files_that_lead_a_parameter_through_a_step_stay_short_together():
    assert 500 < lines_on_the_way() <= MOST_LINES_ON_THE_WAY


def test_cycles_of_entries_finds_import_cycles_at_any_depth(tmp_path):
    """Cycles between files, and between a file and a folder, are found; re-exports of an ``__init__`` do not count."""
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "__init__": "from package.a import a",
        "a": "import package.inner.c",
        "b": "from package.a import a",
        "inner.__init__": "from package.inner.c import c",
        "inner.c": "from package.inner.d import d\nfrom package.a import a",
        "inner.d": "from package.inner.c import c",
    }.items():
        (package / f"{name.replace('.', '/')}.py").write_text(text)
    assert cycles_of_entries(package) == [["package", "a.py", "inner"], ["package/inner", "c.py", "d.py"]]
    (package / "a.py").write_text("a = 1")
    assert cycles_of_entries(package) == [["package/inner", "c.py", "d.py"]]


def test_code_lines_leaves_out_blanks_comments_docstrings_and_imports():
    assert code_lines('"""A module."""\n\nimport os\n\n\ndef f():\n    """Does."""\n    # why\n    return os\n') == 2


def test_calls_lists_library_functions_and_filters_by_values():
    from xlstm_jax import formatting

    names = [code.co_name for code in calls(lambda: formatting.format_bytes(2048))]
    assert names[0] == "format_bytes"
    assert calls(lambda: formatting.format_bytes(2048), values=(names,)) == []


def test_calls_and_climbs_follow_values_into_tuples_and_objects():
    from xlstm_jax import formatting
    from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes

    given = {"fsdp": 8}
    assert calls(lambda: formatting.format_mesh(given), values=(given,))[0].co_name == "format_mesh"
    assert _has(Held(("other", given)), (given,)) and not _has(Held(({"fsdp": 8},)), (given,))
    assert climbs(lambda: [formatting.format_mesh(given), formatting.format_mesh(given)], given) == 0  # in one file
    assert climbs(lambda: [formatting.format_mesh(given), entry_axes(given), formatting.format_mesh(given)], given) == 1

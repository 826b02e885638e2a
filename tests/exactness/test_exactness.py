"""Training on a mesh is the training of one device: each feature in one column.

    pytest tests/exactness --cell "copies + frozen @ 2x4-vma"   these rows in this column, and no others

The other columns are in ``test_all_columns.py``, pairs of features in ``test_drawn_pairs.py``. See ``matrix.py`` for
the comparison, ``rows.py`` for the features.
"""

from dataclasses import replace

import jax
import pytest

from tests.exactness.case import Case, compare, of_one_device
from tests.exactness.matrix import Cell, cell, check, drawn, pairs
from tests.exactness.rows import ALWAYS, APART, BY_NAME, COLUMNS, FAULTS, REFUSED, ROWS, why_apart


def pytest_generate_tests(metafunc):
    if "what" in metafunc.fixturenames:
        given = [cell(text) for text in metafunc.config.getoption("cell")]
        cells = given or [*(Cell((row,), row.quick) for row in ROWS), *map(cell, ALWAYS)]
        metafunc.parametrize("what", {str(what): what for what in cells}.values(), ids=str)


def test_quick_cells_match_a_single_device(what):
    check(what)


# --------------------------------------------------------------------------------------------------------------- guards


def test_check_error_names_the_leaf_and_the_command_to_repeat():
    plain = BY_NAME["plain"]
    repeat = r"on plain @ 2x4-vma; to repeat: python -m pytest .* --cell \"plain @ 2x4-vma\""
    with pytest.raises(AssertionError, match=rf"^after step 1 the [a-z]+( of [a-z/]+)?: off by .*{repeat}"):
        check(Cell((replace(plain, tolerance=1e-12),), "2x4-vma"))
    with pytest.raises(AssertionError, match=rf"the feature 'plain' is not on.*{repeat}"):
        check(Cell((replace(plain, shows=lambda run: False),), "2x4-vma"))


def test_compare_fails_for_a_difference_in_each_part_of_a_step_result():
    want = of_one_device(Case())
    for part in ("loss", "norm", "gradients", "params", "moments", "collections", "average"):
        value = getattr(want[1], part)
        other = value * (1 + 1e-4) if part in ("loss", "norm") else jax.tree.map(lambda x: x * (1 + 1e-4), value)
        if part == "collections":
            value, other = {"mean": 1.0}, {"mean": 1.0001}
        first, second = ([want[0], replace(want[1], **{part: tree})] for tree in (value, other))
        compare(first, first)
        with pytest.raises(AssertionError, match=f"after step 2 the {part}.*: off by"):
            compare(second, first)


def test_guard_compare_fails_for_weighted_against_unweighted_training():
    weighted, unweighted = (of_one_device(Case(weighted=on)) for on in (True, False))
    with pytest.raises(AssertionError, match="after step 1 the loss: off by"):
        compare(weighted, unweighted, 0.01)


def test_drawn_pairs_depend_on_the_commit_only():
    first, again, other = ([str(pair) for pair in drawn(6, commit)] for commit in ("1a2b", "1a2b", "c3d4"))
    assert first == again != other and len(set(first)) == len(first) == 6
    assert [str(cell(name)) for name in first] == first


def test_exactness_matrix_covers_all_columns_and_most_pairs_of_rows():
    # `make test` tries each row in its quick column, and so each column with some row.
    assert {row.quick for row in ROWS} == set(COLUMNS)
    assert not {row.name: row.quick for row in ROWS if row.quick not in row.columns}
    together = {frozenset(row.name for row in pair.rows) for pair in pairs()}
    all_pairs = len(ROWS) * (len(ROWS) - 1) / 2
    assert len(together) > 0.7 * all_pairs, f"only {len(together)} of {all_pairs:.0f} pairs can be drawn"
    for some, others, reason in APART:
        assert not (some | others) - BY_NAME.keys(), "APART names rows that do not exist"
        assert reason, f"APART has no reason for {some} and {others}"
    for names, mode, words in REFUSED + FAULTS:
        entry = f"the entry ({names}, {mode!r}, {words!r}) of REFUSED or FAULTS"
        known = frozenset(names) in together if len(names) == 2 else names <= BY_NAME.keys()
        assert known, f"{entry}: these rows are neither a row nor a pair of the matrix"
        assert any(mode in column for column in COLUMNS), f"{entry}: no column of {COLUMNS} has this mode"
        assert words, f"{entry} has no words of the error"
    assert "both decide tx" in why_apart(BY_NAME["muon"], BY_NAME["clipping"])

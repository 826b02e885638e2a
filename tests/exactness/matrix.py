"""The matrix: one comparison for every row and column, and pairs of rows that hypothesis draws.

Which pairs are drawn depends on the commit, and on nothing else, so that all workers of a run draw the same.
"""

import itertools
import os
import re
from dataclasses import dataclass
from functools import cache

import pytest
from flax.errors import FlaxError
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.commit import commit_hash
from tests.exactness.case import Case, Moment, compare, compare_trees, of_one_device, trained
from tests.exactness.model import ROWS as BATCH_ROWS
from tests.exactness.rows import (
    BY_NAME,
    COLUMNS,
    FAULTS,
    REFUSED,
    ROUNDED_PAIRS,
    ROWS,
    SET_COLUMNS,
    VMA,
    Row,
    why_apart,
)
from tests.support import FLOAT32_ROUNDING

# A share of the batch, as often as it takes to have as many rows.
ONE_SHARE = tuple(row % 2 for row in range(BATCH_ROWS))


@dataclass(frozen=True)
class Cell:
    """Some rows at once, in a column: "copies + frozen @ 2x4-vma"."""

    rows: tuple[Row, ...]
    column: str

    def __str__(self) -> str:
        return f"{' + '.join(row.name for row in self.rows)} @ {self.column}"

    @property
    def case(self) -> Case:
        case = Case()
        for row in self.rows:
            case = case.but(**row.changes)
        return case

    @property
    def tolerance(self) -> float:
        """That of the row that rounds; of two that round, the sum."""
        wide = [row.tolerance for row in self.rows if row.tolerance != FLOAT32_ROUNDING]
        of_pair = ROUNDED_PAIRS.get(frozenset(row.name for row in self.rows), 0.0)
        return sum(wide) or of_pair or FLOAT32_ROUNDING

    @property
    def refused(self) -> str:
        """What the library says to such a cell, if it refuses it."""
        return self._words(REFUSED)

    @property
    def fault(self) -> str:
        """What is seen of a fault that is known."""
        return self._words(FAULTS)

    def _words(self, table: list[tuple[set[str], str, str]]) -> str:
        names = {row.name for row in self.rows}
        return next((words for pair, mode, words in table if pair <= names and mode in self.column), "")


def cell(text: str) -> Cell:
    """Returns the cell of its name.

    >>> str(cell("copies + frozen @ 2x4-vma"))
    'copies + frozen @ 2x4-vma'
    """
    names, _, column = text.partition(" @ ")
    unknown = [name for name in names.split(" + ") if name not in BY_NAME]
    if unknown or column not in COLUMNS + SET_COLUMNS:
        raise pytest.UsageError(f"{text!r}: write rows and a column, as 'copies + frozen @ 2x4-vma'; {unknown=}.")
    return Cell(tuple(BY_NAME[name] for name in names.split(" + ")), column)


def check(what: Cell) -> None:
    """Trains the cell on its mesh and on one device, and compares; the error's last line says how to repeat it."""
    try:
        if what.refused:
            with pytest.raises((ValueError, TypeError, FlaxError), match=what.refused):
                _trained(what)
        elif what.fault:
            with pytest.raises((ValueError, AssertionError), match=what.fault):
                _check(what)
        else:
            _check(what)
    except (Exception, pytest.fail.Exception) as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        repeat = f'python -m pytest -n 0 tests/exactness/test_exactness.py --cell "{what}"'
        raise AssertionError(f"{kind}{error}; on {what}; to repeat: {repeat}") from error


def _trained(what: Cell):
    mesh, mode, *kind = what.column.split("-")
    return trained(what.case, mesh, VMA[mode], *kind)


def _check(what: Cell) -> None:
    case, tolerance = what.case, what.tolerance
    run, want = _trained(what), of_one_device(case)
    for row in what.rows:
        assert row.shows(run), f"the feature {row.name!r} is not on: nothing of the training shows it"
    compare(run.moments, want, tolerance)
    assert_seen(case, want, tolerance)


def assert_seen(case: Case, want: list[Moment], tolerance: float) -> None:
    """The guard: the gradients of one device's share of the batch would be seen, and both steps train."""
    share = of_one_device(case, ONE_SHARE)
    with pytest.raises(AssertionError, match="off by"):
        compare_trees("the gradients", share[0].gradients, want[0].gradients, 2 * tolerance)
    with pytest.raises(AssertionError, match="off by"):
        compare_trees("the parameters", want[0].params, want[1].params, 10 * FLOAT32_ROUNDING)


# ---------------------------------------------------------------------------------------------------------------- pairs


@cache
def pairs() -> list[Cell]:
    """Returns all pairs in all of their columns."""
    found = []
    for first, second in itertools.combinations(ROWS, 2):
        if not why_apart(first, second):
            columns = [column for column in first.columns if column in second.columns]
            found += [Cell((first, second), column) for column in columns]
    return found


def seed_of_commit() -> str:
    """Returns the hash of the commit, or an empty text where there is none: in an unpacked archive, say."""
    if given_seed := os.environ.get("XLSTM_JAX_PAIRS_OF"):
        return given_seed
    return commit_hash()


def drawn(count: int, commit: str) -> list[Cell]:
    """Returns ``count`` pairs, drawn by the hash of a commit."""
    found: dict[str, Cell] = {}
    number = int(re.sub(r"[^0-9a-f]", "", commit)[:12] or "0", 16)

    # More than are asked for: the first is always the simplest, and some come twice.
    @seed(number)
    @settings(
        max_examples=2 * count + 2,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(pairs()))
    def draw(pair: Cell) -> None:
        found[str(pair)] = pair

    draw()
    return list(found.values())[1 : count + 1]

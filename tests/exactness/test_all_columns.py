"""Every feature of the matrix in all of its other columns."""

import pytest

from tests.exactness.matrix import Cell, check
from tests.exactness.rows import ROWS

OTHERS = [Cell((row,), column) for row in ROWS for column in row.columns if column != row.quick]


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS, ids=str)
def test_training_of_each_remaining_cell_matches_a_single_device(what):
    check(what)

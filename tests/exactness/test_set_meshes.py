"""Training under ``jax.set_mesh``, with explicit, ``Auto`` and mixed axes, is the training of one device.

Each feature is tried on one kind of mesh, which differs from row to row, and so each kind with some feature; NNX models
are tried with each feature that they can have. The slow tests are all other cells.
"""

import pytest

from tests.exactness.matrix import Cell, check
from tests.exactness.rows import BY_NAME, ROWS, SET_COLUMNS, why_apart

FIRST = [Cell((row,), row.set_columns[0]) for row in ROWS]
WITH_NNX = [row for row in ROWS if row.name != "nnx" and not why_apart(BY_NAME["nnx"], row)]
NNX_CELLS = [Cell((BY_NAME["nnx"], row), row.set_columns[1]) for row in WITH_NNX]
OTHERS = [Cell((row,), column) for row in ROWS for column in row.set_columns[1:]]


@pytest.mark.parametrize("what", FIRST, ids=str)
def test_training_under_a_set_mesh_matches_a_single_device(what):
    check(what)


@pytest.mark.parametrize("what", NNX_CELLS, ids=str)
def test_nnx_training_under_a_set_mesh_matches_a_single_device(what):
    check(what)


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS, ids=str)
def test_training_of_each_remaining_set_mesh_matches_a_single_device(what):
    check(what)


def test_set_mesh_cells_cover_all_columns_and_most_rows_with_nnx():
    tried = {what.column for what in FIRST}
    assert tried == set(SET_COLUMNS), f"no row is tried first in {sorted(set(SET_COLUMNS) - tried)}"
    assert len(WITH_NNX) > 15

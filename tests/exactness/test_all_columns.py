"""The matrix beyond ``make test``: every feature in all of its other columns, and further pairs."""

import pytest

from tests.exactness.matrix import Cell, check, drawn, seed_of_commit
from tests.exactness.rows import ROWS

OTHERS = [Cell((row,), column) for row in ROWS for column in row.columns if column != row.quick]


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        count = metafunc.config.getoption("pairs")
        metafunc.parametrize("pair", drawn(3 * count, seed_of_commit())[count:], ids=str)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("what", OTHERS, ids=str)
def test_training_is_that_of_one_device(what):
    check(what)


def test_pairs_train_as_one_device_does(pair):
    check(pair)

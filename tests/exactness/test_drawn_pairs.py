"""Pairs of features that the commit draws train as one device does: ``make test-pairs``.

    pytest tests/exactness/test_drawn_pairs.py -m slow --pairs 40    more pairs

Each commit draws others, so that pairs are tried which nobody had in mind. A pair that has never been drawn may fail by
its tolerance alone: CI prints what it has drawn and what came of it, and goes on.
"""

import pytest

from tests.exactness.matrix import check, drawn, seed_of_commit


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        metafunc.parametrize("pair", drawn(metafunc.config.getoption("pairs"), seed_of_commit()), ids=str)


@pytest.mark.slow
def test_training_of_a_drawn_pair_of_features_matches_a_single_device(pair):
    check(pair)

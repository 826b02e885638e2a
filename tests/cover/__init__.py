"""Measures which lines of the library each test executes, and chooses the tests of ``make test`` by these lines.

To renew the choice, with Python 3.12 or later, from a temporary folder and file:

    python -m pytest -n 2 -m "not slow" --record runs/cover      each test's processor seconds and lines: forty minutes
    python -m tests.mutants --draw 0 --record runs/seen.txt      which case sees each mutation: an hour
    python -m tests.cover runs/cover --mutants runs/seen.txt     chooses, and writes the data beside this file: seconds

The first two commands resume after an interruption, and skip results in their folder or file: delete these to measure
again. ``--record`` goes together with files, ``-k`` and ``--part K/N``, so parts can run one after the other.

    chosen.txt     the cases of ``make test``, with their processor seconds; tests/quick.py reads the file
    short.txt      short cases to add to the choice, written by hand
    mutants.txt    for each mutation of the catalogue a chosen case that detects the mutation
    matrix.txt     for each function of the library some cases that enter it; tests/mutants/drawn.py reads the file

After some new tests, and after functions have moved, add recordings, in minutes:

    python -m pytest -m "not slow" --record runs/new tests/plan/test_plan.py -k new_name
    python -m tests.cover runs/new --add

To make ``make test`` shorter, look for shorter tests of the mutations that long tests detect, in a quarter of an hour:

    python -m pytest -n 2 -m "not slow" --quick --durations=0 > runs/durations.txt
    python -m tests.cover.cheaper runs/durations.txt

A new mutation needs no measurement: without a measurement, all tests that the mutation names are quick. After renaming
a test, change the name in the three files, too: ``sed -i s/old_name/new_name/ tests/cover/*.txt``.
"""

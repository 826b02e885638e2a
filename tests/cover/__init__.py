"""Measures which lines of the library each test executes, and chooses the tests of ``make test`` by these lines.

To make the choice anew, with Python 3.12 or later, from a folder and a file that need not be kept:

    python -m pytest -n 2 -m "not slow" --record runs/cover      each test's processor seconds and lines: forty minutes
    python -m tests.mutants --draw 0 --record runs/seen.txt      which case sees each mutation: an hour
    python -m tests.cover runs/cover --mutants runs/seen.txt     chooses, and writes the data beside this file: seconds

Each of the first two goes on where it stopped if it is called again, and skips what its folder or file has: delete them
to measure anew. ``--record`` goes together with files, ``-k`` and ``--part K/N``, so parts can run one after the other.

    chosen.txt     the cases of ``make test``, with their processor seconds; tests/quick.py reads it
    mutants.txt    the case that sees each mutation of the catalogue; it is among the chosen
    matrix.txt     for each function of the library some cases that enter it; tests/mutants/drawn.py reads it

After some new tests, and after functions have moved, their recordings are added, in minutes:

    python -m pytest -m "not slow" --record runs/new tests/plan/test_plan.py -k new_name
    python -m tests.cover runs/new --add

A new mutation needs no measurement: until it has one, all the tests that it names are quick. After a test has got
another name, change the name in the three files, too: ``sed -i s/old_name/new_name/ tests/cover/*.txt``.
"""

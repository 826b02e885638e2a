"""Table of errors: each row makes a user's mistake, with the library's answer and its section of the documentation.

table.py                 a row, the sections of docs/troubleshooting.md, and the check of a row's call
reach.py                 maps an exception to its ``raise`` in the library, and lists ``raise`` statements without a row
meshes.py, metrics.py, ...  the rows, a file for each area of the library
reached.txt              the ``raise`` statements of each row, written by ``python -m tests.errors --write``
unreached.txt            each ``raise`` without a row, with the reason

    python -m tests.errors                 runs all rows, and prints how many of the library's raises they reach
    pytest tests/errors -k mesh-too-large  runs one row
"""

"""The table of errors: each row makes one mistake of a user, and says what the library answers and where that stands.

table.py                 a row, the sections of docs/troubleshooting.md, and what comes of a row's call
reach.py                 which ``raise`` of the library an exception came from, and those that no row reaches
meshes.py, metrics.py, ...  the rows, a file for each area of the library
reached.txt              which ``raise`` each row reaches, written by ``python -m tests.errors --write``
unreached.txt            each ``raise`` that no row reaches, with the reason

    python -m tests.errors                 runs all rows, and prints how many of the library's raises they reach
    pytest tests/errors -k mesh-too-large  runs one row
"""

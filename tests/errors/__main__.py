"""Runs all rows, and prints the number of reached raises: ``python -m tests.errors``; ``--write`` records them.

``--all`` also lists unreached places with a reason in unreached.txt.
"""

import argparse

import conftest  # noqa: F401  the settings of the suite, before JAX starts
from tests.errors import reach, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.errors", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write reached.txt")
    parser.add_argument("--all", action="store_true", help="list what has a reason in unreached.txt, too")
    options = parser.parse_args()
    errors = {row: table.raised(row) for row in table.rows()}
    wrong = [text for row, error in errors.items() if (text := table.complaint(row, error))]
    found = {row.name: reach.reached_by(error) for row, error in errors.items()}
    if options.write:
        reach.REACHED.write_text(reach.written(found))
    reached = {name for names in found.values() for name in names}
    print("reached    of  folder")
    for folder, some, every in reach.by_folder(reached):
        print(f"{some:7} {every:5}  {folder}")
    print(f"{len(reached):7} {len(reach.places()):5}  in all, by {len(errors)} rows")
    reasons = reach.reasons()
    for name, place in reach.places().items():
        if name not in reached and (options.all or name not in reasons):
            print(f"{place.where}: {name.partition(': ')[2]}{': ' + reasons[name] if name in reasons else ''}")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

"""Chooses the tests of ``make test`` from recordings, and writes the data in tests/cover: see tests/cover/__init__.py.

Without a folder of recordings the choice stays, and only cases that detect mutations are added.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import quick
from tests.cover import data
from tests.cover.choose import as_bits, cover
from tests.cover.record import Recorded, recorded
from tests.measures import PACKAGE
from tests.mutants.catalogue import all_mutants, functions_of

CASES_OF_A_FUNCTION = 24
ADDED_TO_A_FUNCTION = 8  # at most, with --add: cases that were recorded before stay
Entering = Mapping[tuple[str, str], Sequence[str]]  # cases that enter a function, by file and function


def main(args: argparse.Namespace) -> int:
    seen = _kept_seen(args.mutants)
    if not args.recordings:
        seconds = data.chosen()
        data.write_seen(seen)
        data.write_chosen(seconds | {case: spent for case, spent in seen.values() if case not in seconds})
        print(f"{len(seen)} mutations have the case that sees them; the rest of the choice is as it was")
        return 0

    found = [entry for folder in args.recordings for entry in recorded(folder)]
    if failed := [entry.case for entry in found if entry.outcome == "failed"]:
        print("These tests failed while they were recorded; run them, and record them again:", *failed, sep="\n  ")
        return 1
    found = [entry for entry in found if entry.outcome == "passed"]
    if not found:
        print(f"no test was recorded in {', '.join(map(str, args.recordings))}")
        return 1
    if args.add:
        before, entered = data.matrix()
        data.write_matrix(
            before | {entry.case: entry.seconds for entry in found},
            with_added(entered, entering(found, ADDED_TO_A_FUNCTION)),
        )
        print(f"written: {data.MATRIX}, with {len(found)} more cases; the choice is as it was")
        return 0
    chosen = _choose(found, seen, args.functions)
    data.write_seen(seen)
    data.write_chosen(chosen)
    data.write_matrix({entry.case: entry.seconds for entry in found}, entering(found))
    print(f"written: {data.CHOSEN}, {data.SEEN} and {data.MATRIX} ({data.MATRIX.stat().st_size / 1e6:.2f} MB)")
    return 0


def _kept_seen(file: Path | None) -> dict[str, tuple[str, float]]:
    """Returns the last measured case of each existing mutation."""
    seen = data.read_seen() | (data.read_seen(file) if file else {})
    names = {mutant.name for mutant in all_mutants()}
    return {name: case for name, case in seen.items() if name in names and data.is_there(case[0])}


def _choose(found: Sequence[Recorded], seen: Mapping[str, tuple[str, float]], functions_s: float) -> dict[str, float]:
    """Returns the chosen cases and their seconds; promises of tests/quick.py, and short cases, count as taken."""
    by_case = {entry.case: entry for entry in found}
    seconds = {entry.case: entry.seconds for entry in found}
    # If a file that fails to import detects a mutation, any case of the file does: take the shortest.
    needed = {}
    for case, spent in seen.values():
        cases = [other for other in by_case if other.startswith(f"{case}::")] if case.endswith(".py") else []
        best = min(cases, key=lambda other: seconds[other], default=case)
        needed[best] = seconds.get(best, spent)
    promised = {case for case in by_case if quick.is_chosen(case, {*quick.PROMISES, *data.short()})}
    alone = {entry.case: entry for entry in found if not entry.has_processes}  # child processes hide lines

    functions = as_bits(
        {case: {(path, name) for path, of in entry.lines.items() for name in of} for case, entry in by_case.items()}
    )
    lines = as_bits(
        {
            case: {(path, line) for path, of in entry.lines.items() for some in of.values() for line in some}
            for case, entry in by_case.items()
        }
    )

    def added(sets: Mapping[str, int], taken: Sequence[str], limit: float = float("inf")) -> list[str]:
        mine = {case: bits for case, bits in sets.items() if case in alone}
        before = {case: sets[case] for case in taken if case in sets}
        return [case for case in cover(mine | before, seconds, taken, limit) if case not in before]

    taken = [*needed, *promised]
    for_functions = added(functions, taken, functions_s)
    every_function, every_line = added(functions, taken), added(lines, taken)

    def share(sets: Mapping[str, int], cases: Sequence[str]) -> str:
        every = has = 0
        for case in alone:
            every |= sets[case]
        for case in cases:
            has |= sets.get(case, 0)
        return f"{(has & every).bit_count():6} of {every.bit_count():6}"

    def row(what: str, cases: Sequence[str], so_far: Sequence[str]) -> None:
        spent = sum(seconds.get(case, needed.get(case, 0.0)) for case in set(cases))
        print(f"{what:34}{len(set(cases)):6}{spent:9.0f}  {share(functions, so_far)}  {share(lines, so_far)}")

    print(f"{'':34}{'cases':>6}{'CPU s':>9}  {'functions so far':>16}  {'lines so far':>16}")
    row("see the mutations", list(needed), list(needed))
    row("hold promises, or are short", list(promised), taken)
    row(f"enter other functions, in {functions_s:g} s", for_functions, [*taken, *for_functions])
    row("would be added for every function", every_function, [*taken, *every_function])
    row("would be added for every line", every_line, [*taken, *every_line])
    row("all that were recorded", list(by_case), list(by_case))
    processes = Counter(entry.case.partition("/")[0] for entry in found if entry.has_processes)
    print("start processes, and are chosen for mutations alone:", dict(processes))
    return needed | {case: seconds[case] for case in for_functions}


def entering(found: Sequence[Recorded], most: int = CASES_OF_A_FUNCTION) -> dict[tuple[str, str], list[str]]:
    """Returns by file and function up to ``most`` cases to run a mutation of the function against, the shortest first.

    First cases that together execute all lines of the function, also several of one test: a row of a table may be the
    only one that reaches an error. Then one case of each other test, for variety: those that execute few further
    functions, and so are about the function.
    """
    of_function: defaultdict[tuple[str, str], list[Recorded]] = defaultdict(list)
    breadth = {entry.case: sum(map(len, entry.lines.values())) for entry in found}
    by_case = {entry.case: entry for entry in found}
    for entry in sorted(found, key=lambda entry: (entry.seconds, entry.case)):
        for path, functions in entry.lines.items():
            for function in functions:
                of_function[path, function].append(entry)
    kept = {}
    for (path, function), entries in of_function.items():
        sets = as_bits({entry.case: entry.lines[path][function] for entry in entries})
        first = cover(sets, {entry.case: entry.seconds for entry in entries})
        seen = {case.partition("[")[0] for case in first}
        of_tests: dict[str, str] = {}
        for entry in entries:
            of_tests.setdefault(entry.case.partition("[")[0], entry.case)
        others = [case for test, case in of_tests.items() if test not in seen]
        some = [*first, *sorted(others, key=lambda case: (breadth[case], case))][:most]
        kept[path, function] = sorted(some, key=lambda case: (by_case[case].seconds, case))
    return kept


def with_added(before: Entering, new: Entering) -> dict[tuple[str, str], list[str]]:
    """Returns the cases that enter each function: new cases first, then existing cases from before.

    A moved function keeps its cases, if exactly one file of the library has the function.
    """
    functions = {
        str(path.relative_to(PACKAGE)): {name for name, _, _ in functions_of(ast.parse(path.read_text()))}
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    kept: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (path, name), cases in [*new.items(), *before.items()]:
        if name not in functions.get(path, ()):
            others = [other for other, names in functions.items() if name in names]
            path = others[0] if len(others) == 1 else ""
        if path:
            some = kept[path, name]
            some += [case for case in cases if case not in some and data.is_there(case)]
    return {function: cases[:CASES_OF_A_FUNCTION] for function, cases in kept.items() if cases}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.cover", description=__doc__)
    parser.add_argument("recordings", nargs="*", type=Path, metavar="FOLDER", help="of pytest --record")
    parser.add_argument(
        "--add", action="store_true", help="add these recordings to the matrix: of tests that are new; choose nothing"
    )
    parser.add_argument("--mutants", type=Path, metavar="FILE", help="of python -m tests.mutants --record")
    parser.add_argument(
        "--functions",
        type=float,
        default=30.0,
        metavar="S",
        help="processor seconds for functions that no other enters",
    )
    sys.exit(main(parser.parse_args()))

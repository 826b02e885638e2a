"""``make test-mutants``: runs each mutation against its tests, and prints a table of undetected mutations.

First the mutations of the catalogue, which must be detected; then a drawn set (``tests/mutants/drawn.py``), whose rate
of survivors is printed separately.
"""

import argparse
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.cover import data
from tests.mutants import drawn
from tests.mutants.catalogue import all_mutants
from tests.mutants.run import Outcome, Run, outcomes

console = Console() if sys.stdout.isatty() else Console(width=160)


DRAWN = 40
LIMIT_S = 60.0  # recorded processor time, for a drawn mutation
SURVIVE = 0.1  # allowed share of survivors


def main(args: argparse.Namespace) -> int:
    code = _catalogue(args) if not args.drawn_only else 0
    count = args.draw if args.draw is not None else 0 if args.short or args.only or args.record else args.turn or DRAWN
    return _drawn(args, count) if count and not code else code


def _catalogue(args: argparse.Namespace) -> int:
    recorded = data.read_seen(args.record) if args.record else {}
    mutants = [
        m for m in all_mutants() if args.only in m.name and (m.is_short or not args.short) and m.name not in recorded
    ]
    if args.turn:
        mutants = random.Random(drawn.seed_of_commit()).sample(mutants, min(args.turn, len(mutants)))
    for mutant in mutants:
        mutant.check()
    begun = time.monotonic()
    marked = "not slow" if args.record else ""  # as in `make test`
    tests = {test for mutant in mutants for test in mutant.tests}
    # The suite has run the tests of the few.
    first = [] if args.short or args.turn else _shown("without a mutation", _by_file(tests), args.jobs)
    if red := [outcome for outcome in first if outcome.result != "passed"]:
        for outcome in red:
            console.print(outcome.text, markup=False)
        console.print("These tests must pass without a mutation.")
        return 2
    # For a measured mutation, the case known to fail is enough.
    seen = data.read_seen() if args.turn else {}
    cases = {name: (case,) for name, (case, _) in seen.items() if "::" in case and data.is_there(case)}
    runs = [
        Run((cases[m.name][0].partition("::")[0],), m, cases[m.name])
        if m.name in cases
        else Run(tuple(m.tests), m, marked=marked)
        for m in mutants
    ]
    found = _shown("mutations", runs, args.jobs, args.record)
    _print(found, args.times)
    alive = [o for o in found if o.result in ("passed", "broken", "empty")]
    unexpected = [o for o in alive if o.result != "passed" or not o.run.mutant.stays]
    minutes, used = (time.monotonic() - begun) / 60, sum(o.seconds for o in [*first, *found]) / 60
    console.print(
        f"{len(found)} mutations, {len(found) - len(alive)} seen, {len(alive)} not "
        f"({len(alive) / max(len(found), 1):.1%}), in {minutes:.1f} minutes of {args.jobs} jobs, "
        f"{used:.1f} minutes of processor time"
    )
    return 1 if unexpected else 0


def _drawn(args: argparse.Namespace, count: int) -> int:
    """Runs drawn mutations; returns 2 if a test that detects a mutation fails without the mutation."""
    seconds, entering = data.matrix()
    if not entering:
        console.print(f"{data.MATRIX} is not there, which says what tests enter a function: tests/cover/__init__.py")
        return 2
    seed = args.seed if args.seed is not None else drawn.seed_of_commit()
    mutants, functions = drawn.draw(count, seed, entering, args.only)
    console.print(
        f"{len(mutants)} mutations drawn with --seed {seed}, of {functions['entered']} functions; "
        f"no test enters {functions['not entered']} in its own process"
    )
    runs = []
    for mutant in mutants:
        cases: list[str] = []
        for case in entering[mutant.path.removeprefix("xlstm_jax/"), mutant.function]:  # the shortest is first
            if not cases or sum(seconds[other] for other in [*cases, case]) <= args.limit:
                cases.append(case)
        tests = dict.fromkeys(case.partition("::")[0] for case in cases if data.is_there(case))
        # An endless loop ends: starting and collecting take some seconds, compiling anew may take some more.
        runs.append(Run(tuple(tests), mutant, tuple(cases), 60 + 3 * sum(seconds[case] for case in cases)))
    found = _shown("drawn mutations", runs, args.jobs)
    judged = [outcome for outcome in found if outcome.result != "empty"]
    alive = sorted((o for o in judged if o.result == "passed"), key=lambda o: o.run.mutant.name)
    if args.times:
        _print(found, True)
    # An import error of a file detects the mutation if pytest can collect the file without the mutation.
    seen_by = {o.test for o in found if o.result == "failed"}
    again = [Run((file,), cases=tuple(some)) for file, some in _cases_by_file(seen_by).items()]
    without = _shown("what saw them, without a mutation", again, args.jobs)
    red = [o for o in without if o.result != ("passed" if any("::" in case for case in o.run.cases) else "empty")]
    for outcome in red:
        console.print(outcome.text, markup=False)
    for outcome in alive:
        mutant = outcome.run.mutant
        where = f"{mutant.path}:{mutant.line} ({mutant.kind}), not seen by {len(outcome.run.cases)} cases"
        console.print(f"\n{where}\n{mutant}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"\ndrawn: {len(judged)} mutations, {len(judged) - len(alive)} seen, {len(alive)} survive "
        f"({len(alive) / max(len(judged), 1):.1%}; at most {SURVIVE:.0%} should), "
        f"{sum(o.seconds for o in found) / 60:.1f} minutes of processor time"
    )
    if red:
        console.print("These tests must pass without a mutation.")
    return 2 if red else 0


def _cases_by_file(cases: set[str]) -> dict[str, list[str]]:
    of_file = defaultdict(list)
    for case in sorted(cases):
        of_file[case.partition("::")[0]].append(case)
    return of_file


def _by_file(tests: set[str]) -> list[Run]:
    return [Run(tuple(some)) for some in _cases_by_file(tests).values()]


def _shown(what: str, runs: Sequence[Run], jobs: int, record: Path | None = None) -> list[Outcome]:
    """Returns the outcomes, with a bar drawn without threads: a process with threads should not fork."""
    found = []
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task(what, total=len(runs))
        for outcome in outcomes(runs, jobs):
            found.append(outcome)
            if record and outcome.result == "failed":
                data.add_seen(record, outcome.run.mutant.name, outcome.test, outcome.seconds)
            progress.update(task, advance=1, refresh=True)
    return found


def _print(found: Sequence[Outcome], times: bool) -> None:
    table = Table("mutation", "outcome", "seen by, or why not", "CPU s")
    for outcome in sorted(found, key=lambda o: (o.result != "passed", o.run.mutant.name)):
        mutant = outcome.run.mutant
        if times or outcome.result in ("passed", "broken", "empty", "hung") or mutant.stays:
            why = outcome.test if outcome.result == "failed" else mutant.stays or ", ".join(outcome.run.tests)
            table.add_row(mutant.name, outcome.result, why, f"{outcome.seconds:.0f}")
    console.print(table if table.row_count else "all mutations were seen")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose file or words have this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run at a time")
    parser.add_argument("--short", action="store_true", help="the few that run in CI")
    parser.add_argument("--turn", type=int, metavar="N", help="N of them, by the commit, each against one case")
    parser.add_argument("--times", action="store_true", help="show all, with the test that saw it and its seconds")
    parser.add_argument(
        "--draw", type=int, metavar="N", help=f"how many are drawn: {DRAWN}, or none with --only, --short or --record"
    )
    parser.add_argument("--seed", type=int, help="draws the same again; without it the commit draws")
    parser.add_argument("--drawn-only", action="store_true", help="leave the catalogue out")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="processor seconds of the tests of one drawn")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="add to a file which case saw each, and skip what it has"
    )
    sys.exit(main(parser.parse_args()))

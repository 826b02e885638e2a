"""``make test-mutants``: every mutation against the tests that should see it, and a table of those that nobody saw."""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.cover import data
from tests.mutants.catalogue import Mutant, all_mutants
from tests.mutants.run import Outcome, Run, outcomes

console = Console() if sys.stdout.isatty() else Console(width=160)


def main(args: argparse.Namespace) -> int:
    recorded = data.read_seen(args.record) if args.record else {}
    mutants = [
        m for m in all_mutants() if args.only in m.name and (m.is_short or not args.short) and m.name not in recorded
    ]
    for mutant in mutants:
        mutant.check()
    begun = time.monotonic()
    tests = {test for mutant in mutants for test in mutant.tests}
    first = [] if args.short else _shown("without a mutation", _by_file(tests), args.jobs)  # the suite has run the few
    if red := [outcome for outcome in first if outcome.result != "passed"]:
        for outcome in red:
            console.print(outcome.text, markup=False)
        console.print("These tests must pass without a mutation.")
        return 2
    found = _shown("mutations", [Run(tuple(m.tests), m) for m in mutants], args.jobs, args.record)
    _print(found, args.times)
    alive = [o for o in found if o.result in ("passed", "broken")]
    unexpected = [o for o in alive if o.result == "broken" or not o.run.mutant.stays]
    minutes, used = (time.monotonic() - begun) / 60, sum(o.seconds for o in [*first, *found]) / 60
    console.print(
        f"{len(found)} mutations, {len(found) - len(alive)} seen, {len(alive)} not "
        f"({len(alive) / max(len(found), 1):.1%}), in {minutes:.1f} minutes of {args.jobs} jobs, "
        f"{used:.1f} minutes of processor time"
    )
    return 1 if unexpected else 0


def _by_file(tests: set[str]) -> list[Run]:
    of_file = defaultdict(list)
    for test in sorted(tests):
        of_file[test.partition("::")[0]].append(test)
    return [Run(tuple(some)) for some in of_file.values()]


def _shown(what: str, runs: Sequence[Run], jobs: int, record: Path | None = None) -> list[Outcome]:
    """The outcomes, with a bar that no thread draws: a process with threads should not fork."""
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
        mutant: Mutant = outcome.run.mutant
        if times or outcome.result in ("passed", "broken", "hung") or mutant.stays:
            why = outcome.test if outcome.result == "failed" else mutant.stays or ", ".join(mutant.tests)
            table.add_row(mutant.name, outcome.result, why, f"{outcome.seconds:.0f}")
    console.print(table if table.row_count else "all mutations were seen")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutations whose file or words have this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many run at a time")
    parser.add_argument("--short", action="store_true", help="the few that run in CI")
    parser.add_argument("--times", action="store_true", help="show all, with the test that saw it and its seconds")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="add to a file which case saw each, and skip what it has"
    )
    sys.exit(main(parser.parse_args()))

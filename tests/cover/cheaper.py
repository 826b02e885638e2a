"""Finds cheaper tests of ``make test``: drops long cases whose mutations shorter quick cases detect as well.

    python -m pytest -n 2 -m "not slow" --quick --durations=0 > runs/durations.txt
    python -m tests.cover.cheaper runs/durations.txt --seconds 1.5     a mutation takes some ten seconds

A mutation is detected by the case that was measured first, which may be long. For each chosen case of ``--seconds`` or
more, the mutations that only this case detects run against shorter quick cases that enter the changed function. If each
mutation is detected by another case, the long case is dropped from ``chosen.txt``, and ``mutants.txt`` names the other
cases. Cases of promises (``tests/quick.py``) are kept.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests import quick
from tests.cover import data
from tests.cover.record import recorded
from tests.mutants.catalogue import Mutant, all_mutants
from tests.mutants.run import Run, outcomes

CANDIDATES, LONGEST_S = 60, 25.0  # of the cases that run against a mutation, in all


def durations(text: str) -> dict[str, float]:
    """Returns the seconds of each case in the output of ``pytest --durations=0``: setup, call and teardown together.

    >>> durations("1.50s call     tests/a.py::test_b[c d]\\n0.25s setup    tests/a.py::test_b[c d]")
    {'a.py::test_b[c d]': 1.75}
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for spent, case in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(.*\S)$", text, re.MULTILINE):
        seconds[case.removeprefix("tests/")] += float(spent)
    return dict(seconds)


def candidates(
    mutant: Mutant, entering: Mapping[str, set[str]], seconds: Mapping[str, float], left_out: set[str]
) -> tuple[str, ...]:
    """Returns quick cases that enter the function of a mutation, the shortest first, without those in ``left_out``.

    ``entering`` has the cases by name of a function, ``seconds`` the time of each case (0 if a case is missing).
    """
    cases = sorted(entering.get(mutant.function, set()) - left_out, key=lambda case: (seconds.get(case, 0.0), case))
    kept, spent = [], 0.0
    for case in cases[:CANDIDATES]:
        spent += seconds.get(case, 0.0)
        if spent > LONGEST_S:
            break
        kept.append(case)
    return tuple(kept)


def main(args: argparse.Namespace) -> int:
    seconds = durations(args.durations.read_text())
    seen = data.read_seen(args.mutants) if args.mutants else data.read_seen()
    chosen, names = dict(data.chosen()), quick.chosen()
    by_name = {mutant.name: mutant for mutant in all_mutants()}
    detects: defaultdict[str, list[str]] = defaultdict(list)
    for name, (case, _) in seen.items():
        detects[case].append(name)
    promised = {case for case in detects if quick.is_chosen(case, set(quick.PROMISES))}
    long = {case for case in detects if seconds.get(case, 0.0) >= args.seconds} - promised
    entering: defaultdict[str, set[str]] = defaultdict(set)
    for (_, function), cases in data.matrix()[1].items():
        entering[function] |= {case for case in cases if quick.is_chosen(case, names)}
    for folder in args.recordings:
        for entry in recorded(folder):
            if entry.outcome == "passed" and quick.is_chosen(entry.case, names):
                for functions in entry.lines.values():
                    for function in functions:
                        entering[function].add(entry.case)
    runs = []
    for case in long:
        for name in detects[case]:
            others = candidates(by_name[name], entering, seconds, long)
            if others:
                runs.append(Run(tuple({other.partition("::")[0] for other in others}), by_name[name], others))
    found: dict[str, str] = {}  # the shorter case that detects a mutation
    for outcome in track(outcomes(runs, args.jobs), total=len(runs), description="mutations", console=Console()):
        if outcome.result == "failed" and "::" in outcome.test and outcome.run.mutant is not None:
            found[outcome.run.mutant.name] = outcome.test.removeprefix("tests/")
    saved = 0.0
    for case in sorted(long, key=lambda case: -seconds[case]):
        is_needless = all(name in found for name in detects[case])
        print(f"{seconds[case]:6.1f} s  {'dropped' if is_needless else 'kept   '}  {case}")
        if is_needless:
            saved += seconds[case]
            chosen.pop(case, None)
            for name in detects[case]:
                other = found[name]
                seen[name] = other, seconds.get(other, 0.0)
                chosen.setdefault(other, seconds.get(other, 0.0))
    data.write_seen(seen)
    data.write_chosen(chosen)
    print(f"{saved:.0f} seconds less, of {len(long)} long cases with {len(runs)} mutations")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser("tests.cover.cheaper", description=__doc__)
    parser.add_argument("durations", type=Path, help="output of pytest --quick --durations=0")
    parser.add_argument("--seconds", type=float, default=1.5, help="shortest case to replace (default: 1.5)")
    parser.add_argument("--mutants", type=Path, help="which case detects each mutation (default: mutants.txt)")
    parser.add_argument("--jobs", type=int, default=2, help="mutations at a time (default: 2)")
    parser.add_argument("--recordings", type=Path, nargs="*", default=[], help="folders of pytest --record")
    sys.exit(main(parser.parse_args()))

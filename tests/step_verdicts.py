"""Runs ``check_step`` on each step of the corpus, in every setting.

    python -m tests.step_verdicts [--only REGEX] [--rounds N] [--jobs 1]

A round runs each entry once, each round in a new setting; four rounds cover every dropout rate and, over the entries,
every mode and API. Writes ``tests/step_corpus/outcomes.json`` after each entry and prints a table by kind. The exit
code is 1 if a verdict is false, if no finding names the cause, or if a label disagrees with the result on one device.
``--only`` keeps the stored outcomes of entries that do not match.
"""

import os

from tests.xla_flags import SHORT_COMPILATION

# As the suite has it, before JAX starts.
os.environ.setdefault("XLA_FLAGS", SHORT_COMPILATION)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.step_corpus import ENTRIES, Entry, Setting
from xlstm_jax.distributed import check_step, simulate_cpu_devices

OUTCOMES = Path(__file__).parent / "step_corpus" / "outcomes.json"
COLUMNS = ("right", "wrong", "cannot tell", "FALSE", "unnamed", "unproved")
FAULTS = COLUMNS[3:]
Outcome = dict[str, Any]


def outcome_of(entry: Entry, setting: Setting) -> Outcome:
    """Runs an entry in one setting.

    Returns the verdict, whether the verdict is false, whether a finding names the cause and, without dropout, whether
    the label of the entry is proved on one device.
    """
    started = time.monotonic()
    case = entry.make(entry, setting)
    try:
        found = check_step(case.step, case.state, case.batch, case.rng, *case.rest, **case.kwargs)
        verdict, findings = found.verdict, found.findings
    except (ValueError, TypeError) as error:
        verdict = "refused" if entry.is_refused_by(error) else "crashed"
        findings = (f"{type(error).__name__}: {error}",)
    seconds = round(time.monotonic() - started, 1)
    proved = bool(setting.dropout) or entry.is_proved(setting.check_vma, setting.api)
    named = verdict != "wrong" or entry.verdict != "wrong" or any(map(entry.is_named_by, findings))
    first = re.sub(r"\s+", " ", findings[0])[:300] if findings else ""
    is_false = verdict not in entry.allowed(setting)
    kept = {"verdict": verdict, "false": is_false, "named": named, "proved": proved}
    return {**kept, "seconds": seconds, "finding": first}


def in_rounds(index: int) -> list[Setting]:
    """Orders the settings of an entry so that dropout rates alternate; neighbouring entries start differently."""
    by_dropout: dict[float, list[Setting]] = defaultdict(list)
    for setting in ENTRIES[index].settings():
        by_dropout[setting.dropout].append(setting)
    groups = _from(index, list(by_dropout.values()))
    groups = [_from(index + k, group) for k, group in enumerate(groups)]
    return [setting for row in zip_longest(*groups) for setting in row if setting is not None]


def _from(start: int, items: list[Any]) -> list[Any]:
    start %= len(items)
    return items[start:] + items[:start]


def outcomes_of(index: int, rounds: int | None) -> tuple[int, dict[str, Outcome]]:
    """Runs an entry in the first ``rounds`` settings, in a process that may not have devices yet."""
    simulate_cpu_devices(8)
    return index, {str(setting): outcome_of(ENTRIES[index], setting) for setting in in_rounds(index)[:rounds]}


def column(outcome: Outcome) -> str:
    """Returns the table column of an outcome; a mistake that the library rejects counts as wrong."""
    if not outcome["proved"]:
        return "unproved"
    if outcome["false"]:
        return "FALSE"
    if not outcome["named"]:
        return "unnamed"
    return "wrong" if outcome["verdict"] == "refused" else outcome["verdict"]


def counts_by_kind(outcomes: dict[str, dict[str, Outcome]]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for title, of_settings in outcomes.items():
        counts[title.partition(" / ")[0]].update(map(column, of_settings.values()))
    return counts


def table_of(outcomes: dict[str, dict[str, Outcome]]) -> Table:
    table = Table("kind", *COLUMNS, title="verdicts by kind of step")
    counts = counts_by_kind(outcomes)
    for kind, row in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        table.add_row(kind, *(str(row[name] or "") for name in COLUMNS))
    return table


def written(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """Formats outcomes as JSON with one line per setting."""
    blocks = []
    for title, of_settings in outcomes.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in of_settings.items())
        blocks.append(f"{json.dumps(title)}: {{\n{lines}\n}}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="entries whose title matches, as 'ready: sum / ...'"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="settings of each entry; by default all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args(arguments)

    outcomes = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    chosen = [i for i, entry in enumerate(ENTRIES) if re.search(given.only, entry.title)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=context) as pool:
        running = [pool.submit(outcomes_of, i, given.rounds) for i in chosen]
        for done in track(as_completed(running), f"{len(chosen)} entries", total=len(chosen)):
            index, found = done.result()
            outcomes[ENTRIES[index].title] = found
            in_order = {entry.title: outcomes[entry.title] for entry in ENTRIES if entry.title in outcomes}
            OUTCOMES.write_text(written(in_order))
    mine = {ENTRIES[i].title: outcomes[ENTRIES[i].title] for i in chosen}
    console = Console()
    console.print(table_of(mine))
    bad = [(t, s, o) for t, of in mine.items() for s, o in of.items() if column(o) in FAULTS]
    for title, setting, outcome in bad:
        said = f"{outcome['verdict']}: {outcome['finding'][:160]}"
        console.print(f"{column(outcome)}: {title} ({setting}): {said}", highlight=False, markup=False, soft_wrap=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

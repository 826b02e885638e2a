"""``make test-deletion``: deletes each feature from a copy, and prints the leftovers and whether the tests passed."""

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.commit import commit_hash
from tests.deletion.delete import LIBRARY, copy_tree, delete
from tests.deletion.features import FEATURES, NOT_YET, WITHOUT_ROW, Feature
from tests.measures import module_of

console = Console() if sys.stdout.isatty() else Console(width=160)

# Test files of which only the tests of ``make test`` run: exact trainings, and tests of the core.
CORE = (
    "tests/data_parallel/test_shard_and_gather.py",
    "tests/data_parallel/test_wires.py",
    "tests/data_parallel/test_padding.py",
    "tests/data_parallel/test_modules.py",
    "tests/training/test_lowered_text.py",
    "tests/training/test_accumulation.py",
    "tests/training/test_training.py",
    "tests/training/test_collections.py",
    "tests/optimizers/test_sharded_optimizer.py",
    "tests/checkpoint/test_record.py",
    "tests/plan/test_plan.py",
    "tests/metrics/test_accumulators.py",
)
# Tests of pages and of tables with rows of all features. A deletion by hand deletes the pages and rows of the feature.
OF_ALL = ("tests/house", "tests/errors", "tests/exactness")
IMPORT_ALL = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


class Deleted(NamedTuple):
    """Outcome of a deletion; ``fault`` is empty if all remaining tests pass."""

    feature: Feature
    lines: int
    knowing: int
    tests: str
    fault: str


def deleted(feature: Feature, tree: Path, with_tests: bool, every_test: bool = False) -> Deleted:
    """Deletes a feature from a copy of the tree at ``tree``, and runs the remaining tests.

    With ``every_test`` all tests of ``make test`` run, except the tests of pages and rows of tables (``OF_ALL``).
    """
    copy_tree(tree)
    lines, left = delete(feature, tree)
    files = sorted((tree / "xlstm_jax").rglob("*.py"))
    knowing = feature.known_in({file: file.read_text() for file in files})
    if left:
        return Deleted(feature, lines, knowing, "-", f"imported by {', '.join(left)}")
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
    modules = [module_of(file, tree) for file in files if file.stem != "__main__"]
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        return Deleted(feature, lines, knowing, "-", done.stderr.strip().splitlines()[-1])
    if not with_tests:
        return Deleted(feature, lines, knowing, "not run", "")
    core = [name for name in CORE if (tree / name).exists() and name not in feature.own]
    if every_test:
        core = [f"--ignore={name}" for name in (*OF_ALL, *feature.own) if "::" not in name] + ["tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", "--quick"]
    command += [f"--deselect={test}" for test in feature.own if "::" in test]
    done = subprocess.run([*command, *core], cwd=tree, env=environment, capture_output=True, text=True)
    out = done.stdout.strip().splitlines()
    failed = [line for line in out if line.startswith(("FAILED", "ERROR"))]
    fault = "; ".join(failed) or ("" if done.returncode == 0 else (out or [done.stderr])[-1])
    return Deleted(feature, lines, knowing, out[-1].partition(" in ")[0] if out else "-", fault)


def main(args: argparse.Namespace) -> int:
    features = [feature for feature in FEATURES if args.only in feature.name]
    features = [feature for feature in features if args.only or feature.name not in NOT_YET]
    if args.turn:
        features = random.Random(commit_hash()).sample(features, min(args.turn, len(features)))
    table = Table("feature", "files", "lines", "files that know it", "tests of the rest", "fault")
    faults = 0
    with tempfile.TemporaryDirectory(prefix="deletion-") as temporary, Progress(console=console) as progress:
        task = progress.add_task("features", total=len(features))
        for feature in features:
            tree = Path(args.keep or temporary) / re.sub(r"\W+", "_", feature.name)
            found = deleted(feature, tree, not args.imports, args.every_test)
            faults += bool(found.fault)
            row = (str(len(feature.files)), str(found.lines), str(found.knowing), found.tests, found.fault)
            table.add_row(feature.name, *row)
            progress.update(task, advance=1)
    console.print(table)
    for name, reason in NOT_YET.items():
        console.print(f"not deletable: {name}: {reason}")
    for name, reason in WITHOUT_ROW.items():
        console.print(f"without a row: {name}: {reason}")
    console.print(f"{len(features)} features deleted from {LIBRARY}, {len(features) - faults} with all tests passed")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.deletion", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="features whose name has this text")
    parser.add_argument("--turn", type=int, metavar="N", help="N features, by the commit")
    parser.add_argument("--imports", action="store_true", help="import what is left, and run no tests")
    parser.add_argument("--every-test", action="store_true", help="run all tests of make test that remain")
    parser.add_argument("--keep", metavar="FOLDER", help="leave the copies in this folder")
    sys.exit(main(parser.parse_args()))

"""Data files in this folder: chosen cases, short cases, the case that detects each mutation, cases by function.

Every entry is a line, sorted, so that a change of the choice is a short difference in git. Cases have pytest's names
below tests/; the example of a docstring has the name of its file below the root.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHOSEN, SEEN, MATRIX = HERE / "chosen.txt", HERE / "mutants.txt", HERE / "matrix.txt"
SHORT = HERE / "short.txt"  # written by hand
REMAKE = (
    "If a test has another name now, change the name in tests/cover/*.txt; otherwise measure and choose anew: "
    "`python -m tests.cover` (tests/cover/__init__.py has the three commands)."
)


@cache
def chosen() -> dict[str, float]:
    """Returns the chosen cases, short ones included, and their processor seconds."""
    return _seconds(CHOSEN) | short()


def short() -> dict[str, float]:
    """Returns the short cases that are always chosen, and their processor seconds."""
    return _seconds(SHORT)


def write_chosen(seconds: Mapping[str, float]) -> None:
    listed = short()
    _write(CHOSEN, (f"{spent:7.2f}  {case}" for case, spent in sorted(seconds.items()) if case not in listed))


def read_seen(file: Path = SEEN) -> dict[str, tuple[str, float]]:
    """Returns by the name of each mutation the case that detected the mutation, and the processor seconds."""
    entries = (line.split("\t") for line in _lines(file))
    return {name: (case, float(seconds)) for name, case, seconds in entries}


def write_seen(seen: Mapping[str, tuple[str, float]]) -> None:
    _write(SEEN, (f"{name}\t{case}\t{seconds:.1f}" for name, (case, seconds) in sorted(seen.items())))


def add_seen(file: Path, name: str, case: str, seconds: float) -> None:
    """Appends a mutation in the format of ``read_seen``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as opened:
        opened.write(f"{name}\t{case}\t{seconds:.1f}\n")


@cache
def matrix() -> tuple[dict[str, float], dict[tuple[str, str], list[str]]]:
    """Returns the seconds of cases, and by file and function the cases that enter the function.

    A case has a key at the start of its line; a function's line ends with the keys of its cases.
    """
    seconds, case_of, entering = {}, {}, {}
    for line in _lines(MATRIX):
        if "\t" in line:
            path, function, keys = line.split("\t")
            entering[path, function] = keys.split()
        else:
            key, spent, case = line.split(maxsplit=2)
            seconds[case], case_of[key] = float(spent), case
    return seconds, {function: [case_of[key] for key in keys] for function, keys in entering.items()}


def write_matrix(seconds: Mapping[str, float], entering: Mapping[tuple[str, str], Sequence[str]]) -> None:
    cases = sorted({case for some in entering.values() for case in some})
    key_of = {case: hashlib.sha256(case.encode()).hexdigest()[:6] for case in cases}
    assert len(set(key_of.values())) == len(cases), "two cases have the same key; use a longer hash for keys"
    functions = (
        f"{path}\t{function}\t{' '.join(key_of[case] for case in some)}"
        for (path, function), some in sorted(entering.items())
    )
    _write(MATRIX, [*(f"{key_of[case]} {seconds[case]:.2f} {case}" for case in cases), *functions])


def path_of(case: str) -> str:
    """Returns pytest's argument for a case or a file of the data.

    >>> path_of("plan/test_plan.py::test_name"), path_of("xlstm_jax/formatting.py::xlstm_jax.formatting.number")
    ('tests/plan/test_plan.py::test_name', 'xlstm_jax/formatting.py::xlstm_jax.formatting.number')
    """
    return case if case.startswith("xlstm_jax/") else f"tests/{case}"


def is_there(case: str) -> bool:
    """Returns whether the case's file exists and has the function; parameters are ignored."""
    file, _, function = path_of(case).partition("::")
    name = function.partition("[")[0].rpartition(".")[2].rpartition("::")[2]
    return (ROOT / file).is_file() and (file.startswith("xlstm_jax/") or f"def {name}" in (ROOT / file).read_text())


def _seconds(file: Path) -> dict[str, float]:
    return {case: float(seconds) for seconds, case in (line.split(maxsplit=1) for line in _lines(file))}


def _lines(file: Path) -> list[str]:
    if not file.exists():
        return []
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def _write(file: Path, lines: Iterable[str]) -> None:
    file.write_text("\n".join(["# written by python -m tests.cover; see tests/cover/__init__.py", *lines]) + "\n")

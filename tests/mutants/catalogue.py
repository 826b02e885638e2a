"""The mutations, read from the ``.txt`` files beside this one, one for each folder.

# wire/gather_array                          the file of the library, of the folder that the .txt file is called by
                                             (base.txt: files beside the folders)
a gradient is summed, not averaged           what breaks; with * in front it is one of the few that run in CI
- axis_size(axes), how                       a text that stands in the file exactly once; of several lines each has a -
+ 1, how                                     what stands in its place
? data_parallel/test_parity.py::test_name    a test in tests/ that should see it, as pytest names it; cheap first
= why no test does                           of a mutation that changes nothing which anybody could see
"""

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
JUDGED = HERE / "judged.txt"  # of mutations that were drawn: tests/mutants/drawn.py
ROOT = HERE.parents[1]
LIBRARY = "xlstm_jax/distributed"


@dataclass
class Mutant:
    """``before`` becomes ``after`` in the file at ``path``; ``stays`` is why no test sees it, if that is so."""

    path: str
    breaks: str
    is_short: bool
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    stays: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.removeprefix(f'{LIBRARY}/').removesuffix('.py')}: {self.breaks}"

    def mutated(self, source: str) -> str:
        """The source with the mutation; a ``ValueError`` where its text does not stand there once."""
        before, after = "\n".join(self.before), "\n".join(self.after)
        if (count := source.count(before)) != 1:
            raise ValueError(
                f"{self.path} has the text {before!r} {count} times, and a mutation needs it once ({self.breaks}). "
                "Change it in tests/mutants to what the file has now."
            )
        return source.replace(before, after)

    def check(self) -> None:
        """Raises a ``ValueError`` where it is no mutation, or names no test."""
        self.mutated((ROOT / self.path).read_text())
        if self.before == self.after or not self.tests:
            raise ValueError(f"{self.name}: it changes nothing, or names no test.")
        for test in self.tests:
            file, _, function = test.partition("::")
            if f"def {function.partition('[')[0]}" not in (ROOT / "tests" / file).read_text():
                raise ValueError(f"{self.name}: there is no test {test}.")


def all_mutants() -> list[Mutant]:
    files = sorted(file for file in HERE.glob("*.txt") if file != JUDGED)
    return [mutant for file in files for mutant in _read(file)]


def _read(file: Path) -> list[Mutant]:
    found: list[Mutant] = []
    path = ""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        sign, _, rest = line.partition(" ")
        if sign == "#":
            folder = file.stem if (ROOT / "xlstm_jax" / file.stem).is_dir() else f"distributed/{file.stem}"
            path = f"xlstm_jax/{rest}.py" if file.stem == "base" else f"xlstm_jax/{folder}/{rest}.py"
        elif sign == "-":
            found[-1].before.append(rest)
        elif sign == "+":
            found[-1].after.append(rest)
        elif sign == "?":
            found[-1].tests.append(rest)
        elif sign == "=":
            found[-1].stays = rest
        elif line:
            if not path:
                raise ValueError(f"{file}, line {number}: a mutation before the name of its file.")
            found.append(Mutant(path, rest if sign == "*" else line, sign == "*"))
    return found

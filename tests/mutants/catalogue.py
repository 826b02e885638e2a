"""The mutations, read from the ``.txt`` files in this folder, one file per folder of the library.

# wire/communication                         the file of the library, in the folder that names the .txt file
                                             (base.txt: files beside the folders)
a gradient is summed, not averaged           the mistake; a leading * marks the few mutations that run in CI
@ _backward                                  the changed function, method or class; absent for module-level lines
- axis_size(axes), how                       a text that occurs exactly once; each of several lines has a -
+ 1, how                                     the replacement
? data_parallel/test_parity.py::test_name    a test in tests/ that should detect it, pytest's name; cheap first
= why no test does                           for an equivalent mutation, without visible effect

A mutation follows its function: if the file no longer has the function with the text, the mutation changes the only
file of the library that has both. Without a function, the only file that has the text once.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
JUDGED = HERE / "judged.txt"  # judged drawn mutations: tests/mutants/drawn.py
ROOT = HERE.parents[1]
LIBRARY = "xlstm_jax/distributed"


@dataclass
class Mutant:
    """Replaces ``before`` by ``after`` in ``function`` at ``path``; ``stays`` explains why no test detects it.

    ``listed`` is the file that the catalogue names.
    """

    listed: str
    breaks: str
    is_short: bool
    function: str = ""
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    stays: str = ""

    @property
    def path(self) -> str:
        """The changed file: the listed file or, for a moved function, the file that has the function now."""
        if self._count(self.listed) == 1:
            return self.listed
        others = [path for path in _library() if self._count(path) == 1]
        return others[0] if len(others) == 1 else self.listed

    @property
    def name(self) -> str:
        return f"{self.listed.removeprefix(f'{LIBRARY}/').removesuffix('.py')}: {self.breaks}"

    def mutated(self, source: str) -> str:
        """Returns the source with the mutation; raises a ``ValueError`` unless the text occurs exactly once."""
        before, after = "\n".join(self.before), "\n".join(self.after)
        places = [(start, end) for start, end in _places(source, self.function) if before in source[start:end]]
        count = sum(source[start:end].count(before) for start, end in places)
        if count != 1:
            where = f"{self.function} of {self.path}" if self.function else self.path
            raise ValueError(
                f"{where} has the text {before!r} {count} times, and a mutation needs it once ({self.breaks}). "
                "Change it in tests/mutants to what the file has now."
            )
        ((start, end),) = places
        return source[:start] + source[start:end].replace(before, after) + source[end:]

    def _count(self, path: str) -> int:
        """Returns how often the function, in this file, contains the text."""
        before = "\n".join(self.before)
        if path not in _library() or before not in (source := _source(path)):
            return 0
        return sum(source[start:end].count(before) for start, end in _places(source, self.function))

    def check(self) -> None:
        """Raises a ``ValueError`` if the mutation changes nothing or names no test."""
        self.mutated((ROOT / self.path).read_text())
        if self.before == self.after or not self.tests:
            raise ValueError(f"{self.name}: it changes nothing, or names no test.")
        for test in self.tests:
            file, _, function = test.partition("::")
            if f"def {function.partition('[')[0]}" not in (ROOT / "tests" / file).read_text():
                raise ValueError(f"{self.name}: there is no test {test}.")


@cache
def _library() -> dict[str, None]:
    return dict.fromkeys(str(file.relative_to(ROOT)) for file in sorted((ROOT / "xlstm_jax").rglob("*.py")))


@cache
def _source(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def _places(source: str, function: str) -> list[tuple[int, int]]:
    """Returns start and end of each function with this qualified name; without a name, of the full source."""
    if not function:
        return [(0, len(source))]
    ends = [0]
    for line in source.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    return [(ends[first - 1], ends[last]) for name, first, last in _functions(source) if name == function]


@cache
def _functions(source: str) -> list[tuple[str, int, int]]:
    return list(functions_of(ast.parse(source)))


def functions_of(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, int, int]]:
    """Yields the qualified name and the first and last line, decorators included, of each function and class."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{node.name}".lstrip(".")
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield inner, first, node.end_lineno or first
        if not isinstance(node, ast.expr):  # which contains no function with a name
            yield from functions_of(node, inner)


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
        elif sign == "@":
            found[-1].function = rest
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

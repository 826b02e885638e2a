"""Maps exceptions to the ``raise`` statements and warnings of the library, and counts the places that rows reach.

A place is named by file, function and the first words of its text, because lines move. The traceback of an exception
contains the line: the place is the innermost library frame whose line is within a ``raise`` or a warning. Rows turn
warnings into exceptions, so that both are treated alike. Causes and contexts of an exception count as raised, too.
"""

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.errors.table import HERE, Row, raised, rows
from tests.raised import PACKAGE, Message, excused, messages

REACHED, UNREACHED = HERE / "reached.txt", HERE / "unreached.txt"
WORDS = 60  # characters of a text that name a place


class Place(NamedTuple):
    """A ``raise`` or warning, which may have several texts; all texts begin with ``text``, unique in the source."""

    name: str
    file: str
    first: int
    last: int
    messages: tuple[Message, ...]

    @property
    def where(self) -> str:
        return f"xlstm_jax/{self.file}:{self.first}"


@cache
def places() -> dict[str, Place]:
    """Returns each ``raise`` and warning with a text by name; a bare re-raise is excluded."""
    found: dict[tuple[str, int], list[Message]] = {}
    for said in messages():
        if not excused(said):
            found.setdefault((said.where.partition(":")[0], said.line), []).append(said)
    named: dict[str, Place] = {}
    for (file, line), said in found.items():
        name = f"{said[0].where}: {' '.join(said[0].text.split())[:WORDS].strip()}"
        count = sum(other.partition(" (again")[0] == name for other in named)
        name += f" (again {count})" if count else ""
        named[name] = Place(name, file, line, max(one.end for one in said), tuple(said))
    return named


@cache
def _by_file() -> dict[Path, list[Place]]:
    found: dict[Path, list[Place]] = {}
    for place in places().values():
        found.setdefault(PACKAGE / place.file, []).append(place)
    return found


def reached_by(error: BaseException | None) -> list[str]:
    """Returns the names of the places of an exception, its causes and contexts, outermost first."""
    names: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
        inner = (
            place.name
            for path, line in reversed(frames)
            for place in _by_file().get(path, [])
            if place.first <= line <= place.last
        )
        names += [name for name in [next(inner, "")] if name and name not in names]
        error = error.__cause__ or error.__context__
    return names


def measured(of: Iterable[Row] | None = None) -> dict[str, list[str]]:
    """Runs rows, by default every row; returns the names of the places that each row reaches."""
    return {row.name: reached_by(raised(row)) for row in (rows() if of is None else of)}


@cache
def kept() -> dict[str, list[str]]:
    """Returns the content of reached.txt: the names of places by row."""
    found: dict[str, list[str]] = {}
    row = ""
    for line in REACHED.read_text().splitlines():
        if line.startswith("  "):
            found[row].append(line.strip())
        elif line:
            row = line
            found[row] = []
    return found


def written(found: dict[str, list[str]]) -> str:
    """Returns the text of reached.txt."""
    return "".join("\n".join([row, *(f"  {name}" for name in names), ""]) for row, names in found.items())


@cache
def reasons() -> dict[str, str]:
    """Returns the content of unreached.txt: the reason by the name of the place."""
    found: dict[str, str] = {}
    reason = ""
    for line in UNREACHED.read_text().splitlines():
        if line.startswith("  "):
            if line.strip() in found:
                raise ValueError(f"unreached.txt has twice: {line.strip()}")
            found[line.strip()] = reason
        elif line:
            reason = line
    return found


def by_folder(reached: set[str]) -> Iterator[tuple[str, int, int]]:
    """Yields each folder of the library with the number of reached places, and of all places."""
    folders = {name: "/".join(place.file.split("/")[:-1][:2]) or "(top)" for name, place in places().items()}
    every, some = Counter(folders.values()), Counter(folders[name] for name in reached)
    for folder in sorted(every):
        yield folder, some[folder], every[folder]

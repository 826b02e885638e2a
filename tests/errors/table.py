"""Row of the table of errors, and the check of its call."""

import importlib
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from xlstm_jax.distributed.training import mistakes

HERE = Path(__file__).parent
AREAS = sorted(file.stem for file in HERE.glob("*.py") if "\nROWS = [\n" in file.read_text())


class Row(NamedTuple):
    """A mistake: ``call`` makes the mistake, the message begins with ``words`` and contains each text of ``says``.

    ``words`` is a row of ``page``, a section of docs/troubleshooting.md, with ``…`` for variable parts.
    """

    name: str
    call: Callable[[], Any]
    exception: type[BaseException]
    words: str
    page: str
    says: tuple[str, ...] = ()


class Section(NamedTuple):
    """A section of docs/troubleshooting.md, which makes its rows.

    >>> Section("Meshes and devices").page
    'troubleshooting.md#meshes-and-devices'
    """

    heading: str

    @property
    def page(self) -> str:
        return f"troubleshooting.md#{re.sub(r'[^a-z0-9]+', '-', self.heading.lower()).strip('-')}"

    def __call__(
        self, name: str, call: Callable[[], Any], exception: type[BaseException], words: str, *says: str
    ) -> Row:
        return Row(name, call, exception, words, self.page, says)


@cache
def rows() -> tuple[Row, ...]:
    """Returns the rows of all areas."""
    return tuple(row for area in AREAS for row in importlib.import_module(f"tests.errors.{area}").ROWS)


def begins(message: str, words: str) -> bool:
    """Returns whether a message begins with the words of a page.

    >>> begins("mesh_shape={'fsdp': 9} takes 9 devices, but there are 8.", "mesh_shape=… takes … devices")
    True
    """
    return bool(re.match(".*?".join(map(re.escape, words.split("…"))), " ".join(message.split()), re.DOTALL))


def raised(row: Row) -> BaseException | None:
    """Returns the exception that a row's call raises, or None; an expected warning is raised as an exception."""
    mistakes._warned.clear()  # warnings given once are given again
    with warnings.catch_warnings():
        if issubclass(row.exception, Warning):
            warnings.simplefilter("error", row.exception)
        try:
            row.call()
        except (Exception, KeyboardInterrupt) as error:
            return error
    return None


def complaint(row: Row, error: BaseException | None) -> str:
    """Returns the difference between an exception and its row, or ""."""
    if error is None:
        return f"{row.name}: nothing was raised, and the row expects a {row.exception.__name__}"
    came = f"; in place came {type(error).__name__}: {' '.join(str(error).split())}"
    if not isinstance(error, row.exception):
        return f"{row.name}: expected a {row.exception.__name__}{came}"
    if not begins(str(error), row.words):
        return f"{row.name}: expected a message that begins with {row.words!r}{came}"
    if missing := [text for text in row.says if " ".join(text.split()) not in " ".join(str(error).split())]:
        return f"{row.name}: the message lacks {missing}{came}"
    return ""

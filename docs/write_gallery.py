"""Writes docs/gallery/: a picture for each program, and the page that shows them.

    python docs/write_gallery.py            # runs all programs: some five minutes
    python docs/write_gallery.py gpt vit    # runs these
    python docs/write_gallery.py --page     # the page alone, of the docstrings

A program begins with a docstring: its name, a colon and a sentence, then what it shows of the library.
"""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

GALLERY = Path(__file__).parent / "gallery"
ORDER = "gpt vit diffusion clip experts lora dpo gan ppo graph mamba long_context".split()
COLUMNS = 2
HEAD = """\
# Gallery

*What can I train with it, and what does such a program look like?*

Each picture is drawn by a program of at most 100 lines, which trains a small model on eight simulated devices in less
than a minute. A click on a picture shows its program: `python docs/gallery/{first}.py` in a checkout runs it, and
writes the picture into the folder where you are. The programs make their data, or take it from Python.

"""


class Program(NamedTuple):
    """A program of the gallery, as its docstring tells of it."""

    file: str
    title: str
    sentence: str
    details: str


def programs() -> list[Program]:
    """All of them, in the order of the page."""
    found = []
    for file in ORDER:
        head, details = (ast.get_docstring(ast.parse((GALLERY / f"{file}.py").read_text())) or "").split("\n\n")
        title, sentence = " ".join(head.split()).split(": ", 1)
        found.append(Program(file, title, sentence[0].upper() + sentence[1:], " ".join(details.split())))
    return found


def page() -> str:
    """The page: a table of pictures, each a link to its program."""
    picture = "[![{0.sentence}]({0.file}.png)]({0.file}.py) **{0.title}.** {0.sentence}"
    cells = [picture.format(one) for one in programs()]
    rows = [cells[i : i + COLUMNS] for i in range(0, len(cells), COLUMNS)]
    head = [[""] * COLUMNS, ["---"] * COLUMNS]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])
    return f"{HEAD.format(first=ORDER[0])}{table}\n"


def pages() -> dict[str, str]:
    """Of the site a page for each program, and one for what they share; docs/implied_pages.py writes them."""
    shared = f"# What programs of the gallery share\n\n{_code('shared', 0)}"
    return {f"gallery_{one.file}": _page_of(one) for one in programs()} | {"gallery_shared": shared}


def _page_of(one: Program) -> str:
    picture = f"```{{image}} ../gallery/{one.file}.png\n:alt: {one.sentence}\n:class: both\n```"
    shared = "What comes from `shared` [draws pictures, counts steps and makes digits](gallery_shared.md)."
    docstring = ast.parse((GALLERY / f"{one.file}.py").read_text()).body[0].end_lineno or 0
    return f"# {one.title}\n\n{one.sentence} {one.details}\n\n{picture}\n\n{_code(one.file, docstring + 1)}\n{shared}\n"


def _code(file: str, above: int) -> str:
    """A file but for its first lines."""
    return f"```{{literalinclude}} ../gallery/{file}.py\n:language: python\n:lines: {above + 1}-\n```\n"


def main(arguments: list[str]) -> None:
    for name in ORDER if not arguments else [name for name in arguments if name != "--page"]:
        print(f"{name}: ", end="", flush=True)
        subprocess.run([sys.executable, f"{name}.py"], cwd=GALLERY, check=True)
    (GALLERY / "index.md").write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])

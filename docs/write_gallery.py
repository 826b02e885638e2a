"""Writes docs/gallery/: a picture for each program, and the page of all pictures.

    python docs/write_gallery.py            # runs all programs: some five minutes
    python docs/write_gallery.py gpt vit    # runs two programs
    python docs/write_gallery.py --page     # only the page, from the docstrings

A program begins with a docstring: title, colon and sentence; then a paragraph on the features of the library in use.
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

*Which models can I train, and how long is a program?*

Each program has at most 100 lines and trains a small model, sharded over eight simulated devices, in less than a
minute. Click a picture to see the program. In a checkout `python docs/gallery/{first}.py` runs the first program and
writes its picture into the current folder. The programs generate their data or take text from the Python
installation.

"""
NEXT = """
## Where to look next

* [A plain script, before and after](../tutorials/plain_script.md): the changes that shard a Flax script.
* [Any model, as it is](../any_model.md): models of other packages, unmodified.
* [A complete training loop](../tutorials/whole_loop.md): checkpoints, evaluation and resume around a step.
"""


class Program(NamedTuple):
    """A program of the gallery, parsed from its docstring."""

    file: str
    title: str
    sentence: str
    details: str


def programs() -> list[Program]:
    """Returns all programs, in the order of the page."""
    found = []
    for file in ORDER:
        head, details = (ast.get_docstring(ast.parse((GALLERY / f"{file}.py").read_text())) or "").split("\n\n")
        title, sentence = " ".join(head.split()).split(": ", 1)
        found.append(Program(file, title, sentence[0].upper() + sentence[1:], " ".join(details.split())))
    return found


def page() -> str:
    """Returns the page: a table of pictures, each linked to its program."""
    picture = "[![{0.sentence}]({0.file}.png)]({0.file}.py) **{0.title}.** {0.sentence}"
    cells = [picture.format(one) for one in programs()]
    rows = [cells[i : i + COLUMNS] for i in range(0, len(cells), COLUMNS)]
    head = [[""] * COLUMNS, ["---"] * COLUMNS]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])
    return f"{HEAD.format(first=ORDER[0])}{table}\n{NEXT}"


def pages() -> dict[str, str]:
    """Returns a page of the site for each program and a page for ``shared``; docs/implied_pages.py writes the pages."""
    shared = f"# Helpers of the gallery programs\n\n{_code('shared', 0)}"
    return {f"gallery_{one.file}": _page_of(one) for one in programs()} | {"gallery_shared": shared}


def _page_of(one: Program) -> str:
    picture = f"```{{image}} ../gallery/{one.file}.png\n:alt: {one.sentence}\n:class: both\n```"
    shared = "`shared` contains [helpers for figures, step counts and digits](gallery_shared.md)."
    docstring = ast.parse((GALLERY / f"{one.file}.py").read_text()).body[0].end_lineno or 0
    return f"# {one.title}\n\n{one.sentence} {one.details}\n\n{picture}\n\n{_code(one.file, docstring + 1)}\n{shared}\n"


def _code(file: str, above: int) -> str:
    """Returns an include of a file without its first lines."""
    return f"```{{literalinclude}} ../gallery/{file}.py\n:language: python\n:lines: {above + 1}-\n```\n"


def main(arguments: list[str]) -> None:
    for name in ORDER if not arguments else [name for name in arguments if name != "--page"]:
        print(f"{name}: ", end="", flush=True)
        subprocess.run([sys.executable, f"{name}.py"], cwd=GALLERY, check=True)
    (GALLERY / "index.md").write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])

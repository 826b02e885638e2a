"""Writes docs/notebooks/: tutorials as notebooks.

    python docs/write_notebooks.py

A tutorial with a link to ``../notebooks/NAME.ipynb`` has a notebook: the text and the Python blocks as cells, after a
cell that installs the library if missing (on Colab). Outputs are empty: the site shows outputs.
"""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
LINK = re.compile(r"\]\(\.\./notebooks/(\w+)\.ipynb\)")
LINKED = re.compile(r"\[([^\]]+)\]\((?!http)[^)]+\)")  # link to another page, absent beside a notebook
BLOCK = re.compile(r"^```python\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
INSTALL = """\
# On Colab: choose a runtime with a CPU, a GPU or a TPU, which have JAX, and upload the library's wheel beside this
# notebook (`pip wheel --no-deps .` makes it in a checkout). Where the library is installed, this cell does nothing.
import glob
import importlib.util

if importlib.util.find_spec("xlstm_jax") is None:
    (wheel,) = glob.glob("xlstm_jax-*.whl") or ["upload xlstm_jax-*.whl first"]
    %pip install -q {wheel} matplotlib
"""
# A notebook displays the last expression of a cell, as HTML.
PRINTED = re.compile(r"^print\((plan|state|check_step\(.*\))\)$\n*\Z", re.MULTILINE)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebooks() -> dict[Path, str]:
    """Returns the notebooks by file."""
    pages = sorted((DOCS / "tutorials").glob("*.md"))
    return {
        DOCS / "notebooks" / f"{page.stem}.ipynb": notebook(page.read_text())
        for page in pages
        if page.stem in LINK.findall(page.read_text())
    }


def notebook(text: str) -> str:
    """Returns the cells of a page: Markdown and code alternate."""
    title, _, rest = text.partition("\n\n")
    cells = [_cell("markdown", title), _cell("code", INSTALL)]
    for i, part in enumerate(BLOCK.split(rest)):
        if part.strip():
            cells.append(_cell("code", part) if i % 2 else _cell("markdown", LINKED.sub(r"\1", part)))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return json.dumps({"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(kind: str, source: str) -> dict[str, object]:
    if kind == "code":
        source = PRINTED.sub(r"\1", source)
    cell: dict[str, object] = {"cell_type": kind, "metadata": {}, "source": source.strip("\n")}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    for file, text in notebooks().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        print(file.relative_to(DOCS.parent))

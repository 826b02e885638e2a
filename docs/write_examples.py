"""Writes docs/examples/: the code of tutorials as programs.

    python docs/write_examples.py

A tutorial with a link to ``../examples/NAME.py`` has an example: its Python blocks in order, below their headings. The
site runs the page, so the page shows the program's output.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
LINK = re.compile(r"\]\(\.\./examples/(\w+)\.py\)")
HEADING_OR_BLOCK = re.compile(r"^(#+) ([^\n]*)$|^```python\n(.*?)^```$|^```.*?^```$", re.MULTILINE | re.DOTALL)
HEAD = '''"""{title}.

    python docs/examples/{name}.py

The code of docs/tutorials/{name}.md, written by docs/write_examples.py: change the page, and run that.
"""
'''


def examples() -> dict[Path, str]:
    """Returns the programs by file."""
    pages = sorted((DOCS / "tutorials").glob("*.md"))
    return {DOCS / "examples" / f"{page.stem}.py": program(page) for page in pages if page.stem in linked(page)}


def linked(page: Path) -> list[str]:
    """Returns the examples that a page links to."""
    return LINK.findall(page.read_text())


def program(page: Path) -> str:
    """Returns the Python blocks of a page below their headings."""
    parts, heading = [], ""
    for level, title, block in HEADING_OR_BLOCK.findall(page.read_text()):
        if level == "#":
            parts.append(HEAD.format(title=title, name=page.stem))
        elif level:
            heading = f"# ---- {title}\n"
        elif block:
            parts.append(heading + block)
            heading = ""
    head, *blocks = parts
    return head + "\n" + "\n\n".join(blocks)  # two empty lines in between, as around functions


if __name__ == "__main__":
    for file, text in examples().items():
        file.write_text(text)

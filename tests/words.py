"""Measures of English: how docstrings begin, and how many words of docstrings and pages point instead of naming.

``python -m tests.words`` prints the shares for the library, the benchmarks and the pages; ``-v`` also prints the first
line of each docstring that begins with a pronoun, and the share of each page. optax has 0.4 % and 3.5 %, haliax 3.3 %
and 5.6 % (first words; pointing words).
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRONOUNS = set("what those that which it one all none of as these who where".split())
POINTING = set("it its that those which what one ones all none own there they them these such other others".split())
WORD = re.compile(r"[A-Za-z']+")
NO_PROSE = re.compile(r"``[^`]*``|>>>.*")
NO_PROSE_OF_A_PAGE = re.compile(r"(?ms)^\s*```.*?^\s*```\s*$|<!--.*?-->|<[^>]+>|`[^`\n]*`|(?<=\])\([^)]*\)")


class Words(NamedTuple):
    """Counts of a text: words, words that point, and whether a pronoun is first."""

    words: int
    pointing: int
    begins_with_pronoun: bool


def words_of(text: str, no_prose: re.Pattern[str] = NO_PROSE) -> Words:
    """Counts the words of a docstring, or of a page with ``no_prose=NO_PROSE_OF_A_PAGE``."""
    found = [word.lower() for word in WORD.findall(no_prose.sub(" ", text))]
    return Words(len(found), sum(word in POINTING for word in found), found[:1] != [] and found[0] in PRONOUNS)


def docstrings(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yields (place, docstring, whether a module has the docstring) for each docstring below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            has_docstring = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
            if has_docstring and (text := ast.get_docstring(node)):
                yield f"{path}:{getattr(node, 'lineno', 1)}", text, isinstance(node, ast.Module)


def pages() -> list[Path]:
    """Returns the written pages: README, CONTRIBUTING, the benchmarks' README, and docs/."""
    written = [page for page in (ROOT / "docs").rglob("*.md") if not {"_build", "contents"} & set(page.parts)]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(written)]


def begins(folder: Path) -> tuple[float, list[str]]:
    """Returns the percentage of docstrings (but of modules) that begin with a pronoun, and their first lines."""
    counted = [(place, text) for place, text, of_module in docstrings(folder) if not of_module]
    bad = [f"{place}: {text.splitlines()[0]}" for place, text in counted if words_of(text).begins_with_pronoun]
    return 100 * len(bad) / len(counted), bad


def pointing(counts: list[Words]) -> float:
    """Returns the percentage of pointing words."""
    return 100 * sum(count.pointing for count in counts) / sum(count.words for count in counts)


def pointing_in_docstrings(folder: Path) -> float:
    """Returns the percentage of pointing words in the docstrings below a folder."""
    return pointing([words_of(text) for _, text, _ in docstrings(folder)])


def pointing_by_page() -> dict[Path, Words]:
    """Returns the counts of each page."""
    return {page: words_of(page.read_text(), NO_PROSE_OF_A_PAGE) for page in pages()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.words")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each place and each page")
    verbose = parser.parse_args().verbose
    for name in ("xlstm_jax", "benchmarks", "tests"):
        share, bad = begins(ROOT / name)
        print(f"{name}: {share:.1f} % of docstrings begin with a pronoun; ", end="")
        print(f"{pointing_in_docstrings(ROOT / name):.1f} % of their words point")
        if verbose:
            print(*bad, sep="\n")
    by_page = pointing_by_page()
    all_words = sum(count.words for count in by_page.values())
    print(f"pages: {pointing(list(by_page.values())):.1f} % of {all_words:,} words point")
    if verbose:
        for page, count in sorted(by_page.items(), key=lambda item: -item[1].pointing):
            print(f"{100 * count.pointing / max(1, count.words):5.1f} %  {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

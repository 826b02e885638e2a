"""Tests of the tutorials: the text beside a program agrees with the program."""

import difflib
from pathlib import Path

from tests.house.test_readme import figures_said
from tests.support import blocks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "plain_script.md"


def changes(lines):
    return [line for line in lines if line.startswith(("+", "-"))]


def test_tutorial_diff_equals_the_diff_of_both_scripts():
    before, after = (text for text in blocks_of(PAGE) if "class Classifier" in text)
    _, _, *wanted = difflib.unified_diff(before.splitlines(), after.splitlines())
    (shown,) = blocks_of(PAGE, "diff")
    assert changes(shown.splitlines()) == changes(wanted)
    assert len(changes(wanted)) < len(before.splitlines()), (
        "the diff is not small: the two scripts differ in most lines"
    )


def test_pages_state_the_numbers_of_removed_and_new_tutorial_lines():
    """The pages state the lines of the script, data and imports included, and the numbers of removed and new lines."""
    data, before, after = (text for text in blocks_of(PAGE) if "PATTERNS =" in text or "class Classifier" in text)
    before, after = (data + text for text in (before, after))
    _, _, *lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
    gone, new = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    for name in ("README.md", "docs/index.md", "docs/tutorials/plain_script.md"):
        said = figures_said(name, r"of (\d+) lines\b.*? (\d+) (?:lines )?go and (\d+) are new")
        assert [int(number) for number in said] == [len(before.splitlines()), gone, new], name

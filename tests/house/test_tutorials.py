"""What a tutorial shows beside its program is true of the program."""

import difflib
from pathlib import Path

from tests.support import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "plain_script.md"


def changes(lines):
    return [line for line in lines if line.startswith(("+", "-"))]


def test_the_difference_that_is_shown_is_that_of_the_two_scripts():
    before, after = (text for text in blocks_of(PAGE) if "class Classifier" in text)
    _, _, *wanted = difflib.unified_diff(before.splitlines(), after.splitlines())
    (shown,) = blocks_of(PAGE, "diff")
    assert changes(shown.splitlines()) == changes(wanted)
    assert len(changes(wanted)) < len(before.splitlines()), "no script of other lines: few of them change"

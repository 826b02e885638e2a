"""What a tutorial shows beside its program is true of the program."""

import difflib
import re
from pathlib import Path

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (TUTORIALS / page).read_text(), re.MULTILINE | re.DOTALL)


def changes(lines):
    return [line for line in lines if line.startswith(("+", "-"))]


def test_the_difference_that_is_shown_is_that_of_the_two_scripts():
    before, after = (text for text in blocks("plain_script.md", "python") if "class Classifier" in text)
    _, _, *wanted = difflib.unified_diff(before.splitlines(), after.splitlines())
    (shown,) = blocks("plain_script.md", "diff")
    assert changes(shown.splitlines()) == changes(wanted)
    assert len(changes(wanted)) < len(before.splitlines()), "no script of other lines: few of them change"

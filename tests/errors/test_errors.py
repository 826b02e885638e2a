"""Tests of the table of errors: each row raises its error, is on its page, and reaches the recorded ``raise``.

Each ``raise`` without a row has a reason in unreached.txt, and no other ``raise``: a new one needs a row or a reason.
"""

import re
from collections import Counter

import pytest

from tests.errors import reach
from tests.errors.table import Row, begins, complaint, raised, rows
from tests.raised import PAGE, heads, messages
from tests.raised import begins as is_of

ROWS = rows()
# Messages of the page without a row, although a row reaches their ``raise``: several texts, or a nested error.
WITHOUT_ROW = {
    "… was deleted: it was donated": "a batch that was deleted, with which JAX 0.10 ends the process",
    "JAX … has no gradient of this loss": "JAX 0.12 alone: data_parallel/test_foreign_modules.py",
    "… calls a Pallas kernel, whose result has no type": "a Pallas kernel: data_parallel/test_typed_kernel.py",
    "the update of … needs": "the same as '…: the update of … needs', where no caller is known",
    "a name stands in it twice": "within '… is damaged', of which the rows say it",
    "it would have": "within '… is damaged'",
    "a tensor has": "within '… is damaged', of which the rows say it",
    "the offsets of a tensor": "within '… is damaged', of which the rows say it",
    "… is no size": "within '… is damaged', of which the rows say it",
}


def sections() -> dict[str, set[str]]:
    """Returns the first words on the page by section; section names are written as in rows."""
    found = {}
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        found[f"{PAGE.name}#{name}"] = {" ".join(words.split()) for words in re.findall(r"\*\*`([^`]+)`\*\*", text)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_row_raises_the_documented_error(row):
    error = raised(row)
    wrong = complaint(row, error)
    if not wrong and reach.reached_by(error) != (kept := reach.kept().get(row.name)):
        wrong = (
            f"{row.name} reaches {reach.reached_by(error)}, and reached.txt has {kept}: "
            "`python -m tests.errors --write` writes it anew"
        )
    if wrong:
        pytest.fail(wrong, pytrace=False)


def test_each_row_is_documented_in_the_named_section_of_troubleshooting():
    of_page = sections()
    lost = [
        f"{row.name}: {row.words!r} is not in {row.page}" for row in ROWS if row.words not in of_page.get(row.page, ())
    ]
    assert not lost, "\n".join(["rows whose words are not in their section of docs/troubleshooting.md:", *lost])


def test_each_message_in_troubleshooting_has_a_row_or_is_in_without_row():
    without = reach.reasons()
    unreached = [said for name in without if name in reach.places() for said in reach.places()[name].messages]
    with_row = {row.words for row in ROWS}
    lost = {head for head in heads() if head not in with_row and not any(is_of(said.text, head) for said in unreached)}
    bare = sorted(lost - WITHOUT_ROW.keys())
    assert not bare, "\n".join(["docs/troubleshooting.md has messages without a row in tests/errors:", *bare])
    needless = sorted(WITHOUT_ROW.keys() - lost)
    assert not needless, "\n".join(
        ["WITHOUT_ROW lists messages that have a row or are missing on the page:", *needless]
    )


def test_each_raise_in_the_library_is_reached_by_a_row_or_has_a_reason():
    """Each ``raise`` has a row or a reason, so that a lost row needs a reason."""
    reached = {name for names in reach.kept().values() for name in names}
    reasons, there = reach.reasons(), reach.places()
    bare = [f"{place.where}: {name}" for name, place in there.items() if name not in reached and name not in reasons]
    assert not bare, "\n".join(["no row of tests/errors reaches, and unreached.txt has no reason for:", *bare])
    both = sorted(reasons.keys() & reached)
    assert not both, "\n".join(["rows reach raises that unreached.txt lists as unreached:", *both])
    gone = sorted((reasons.keys() | reached) - there.keys())
    assert not gone, "\n".join(["reached.txt or unreached.txt lists raises that the library does not have:", *gone])
    assert not [name for name, reason in reasons.items() if not reason], "unreached.txt has no reason for these"


def test_reached_txt_lists_exactly_the_existing_rows():
    names = Counter(row.name for row in ROWS)
    assert not [name for name, count in names.items() if count > 1], "two rows have the same name"
    assert reach.kept().keys() == names.keys(), "`python -m tests.errors --write` writes reached.txt anew"


def test_guard_rows_reach_most_raises_of_the_library():
    """Guard: rows and places exist, and places are found by line."""
    assert len({name for names in reach.kept().values() for name in names}) > 450
    assert len(reach.places()) > 550


def row_of(call, exception=ValueError, words="a … b", *says):
    return Row("mine", call, exception, words, "troubleshooting.md#mine", says)


def fail(error):
    raise error


@pytest.mark.parametrize(
    "row, says",
    [
        (row_of(lambda: None), "nothing was raised"),
        (row_of(lambda: fail(TypeError("a 1 b"))), "in place came TypeError: a 1 b"),
        (row_of(lambda: fail(ValueError("b"))), "begins with 'a … b'; in place came ValueError: b"),
        (
            row_of(lambda: fail(ValueError("a 1 b 2")), ValueError, "a … b", "3"),
            "lacks ['3']; in place came ValueError: a 1 b 2",
        ),
        (row_of(lambda: fail(ValueError("a 1 b 2")), ValueError, "a … b", "2"), ""),
    ],
    ids=["nothing", "type", "words", "pieces", "right"],
)
def test_complaint_names_the_actual_error_for_a_wrong_row(row, says):
    """Guard: a wrong row fails, and the text names the actual error."""
    found = complaint(row, raised(row))
    assert says in found and bool(found) == bool(says)


def test_begins_matches_only_at_the_start_of_a_message():
    assert begins("mesh_shape=8\n has no", "mesh_shape=… has no") and not begins(
        "the mesh_shape=8 has no", "mesh_shape=…"
    )
    assert all(messages())

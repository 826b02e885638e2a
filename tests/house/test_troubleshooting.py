"""Tests of the page of troubleshooting: each error and warning of the library has an entry with its first words."""

import html
import re
import sys

from tests.raised import EXCUSED, PAGE, begins, excused, heads, is_read, messages


def test_troubleshooting_page_has_a_row_for_every_library_message():
    missing = [
        f"{said.where}:{said.line}: {said.text[:90]}"
        for said in messages()
        if not excused(said) and not any(begins(said.text, head) for head in heads())
    ]
    assert not missing, "\n".join(["docs/troubleshooting.md has no row for", *missing])


def test_troubleshooting_page_has_no_row_for_a_removed_message():
    texts = [said.text for said in messages()]
    assert not [head for head in heads() if not any(begins(text, head) for text in texts)]


def test_excused_places_are_exactly_the_places_of_unreadable_messages():
    assert set(EXCUSED) == {said.where for said in messages() if not is_read(said.text)}


def test_troubleshooting_checks_find_enough_messages_and_unique_rows():
    """Guard: the source has more than 350 messages, and the page more than 250 different entries."""
    assert sum(is_read(said.text) for said in messages()) > 350
    assert len(heads()) == len(set(heads())) > 250


sys.path.insert(0, str(PAGE.parent))

from implied_pages import letters, messages_by_letter  # noqa: E402  # docs/ is no package


def test_messages_by_letter_lists_every_message_with_a_link():
    text = messages_by_letter(PAGE.read_text())
    listed = dict(re.findall(r'<li><a href="#(message-\d+)"><code>(.*?)</code>', text))
    assert len(listed) > 150
    assert not [name for name in listed if f'* <a id="{name}"></a>' not in text]
    assert {html.escape(head) for head in heads()} == {
        text for text in re.findall(r"<code>(.*?)</code></a></li>", text) if html.unescape(text) in heads()
    }
    page, rest = text.split('<div class="letters', 1)
    assert "\n## " not in page and "\n## " in rest  # between the opening and the first section


def test_letters_ignores_small_words_and_signs_for_the_first_letter():
    found = letters([("the mesh has", "#1"), ("… is boxed", "#2"), ("'…' of shape", "#3"), ("the", "#4"), ("is", "#5")])
    assert re.findall("<summary>(.)</summary>", found) == ["B", "I", "M", "S", "T"]

"""Each error and warning of the library is on the page of troubleshooting by its first words, and no other is."""

import html
import re
import sys
from functools import cache
from pathlib import Path

from tests.raised import is_read, messages

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROW = re.compile(r"\*\*`([^`]+)`\*\*")

# Where the source alone does not say the text, by ``file:function``, and why the page needs none.
EXCUSED = {
    "cli/command_line.py:_report": "goes on as it came: SIGTERM",
    "cli/command_line.py:end": "SIGTERM as an exception, which has no text",
    "distributed/checkpoint/errors.py:read": "caught by its caller, which says what was read",
    "distributed/checkpoint/writer.py:_opened": "goes on as it came: an error of the system",
    "distributed/checkpoint/orbax_backend.py:patient": "goes on as it came: orbax's own",
    "distributed/data_parallel/leaf.py:as_sharded": "an interface; subclasses have it",
    "distributed/data_parallel/leaf.py:replace": "an interface; subclasses have it",
    "distributed/data_parallel/leaf.py:replace_boxed": "an interface; subclasses have it",
    "distributed/data_parallel/modules/linen_module.py:from_shards": "an interface; modules have it",
    "distributed/data_parallel/modules/linen_module.py:inside_unit": "goes on as it came: Flax's own",
    "forecast/compiling/child.py:make_mesh": "goes on as it came: the compiler's own",
    "forecast/compiling/compile.py:_export": "goes on as it came: JAX's own",
    "forecast/compiling/report_cache.py:_unusable": "becomes a part of one warning, or of ``problem``",
    "forecast/compiling/report_cache.py:_write_whole": "goes on as it came: an error of the system",
    "forecast/training/workload.py:explaining_init": "goes on as it came: the user's code's own",
    "forecast/training/linting/lint.py:raise_if": "its text is the findings, which docs/lint.md has by rule",
    "distributed/plan/planning.py:_planned_init": "goes on as it came: the model's own",
    "distributed/processes/store.py:read": "goes on as it came: the coordination service's own",
    "distributed/processes/together.py:interruptions_go_on": "goes on as it came: Ctrl-C, or the error of the work",
    "distributed/processes/together.py:fail_together": "goes on as it came: the texts of all processes, joined",
    "distributed/resilience/loop_guard.py:__exit__": "goes on as it came: the loop's own",
    "distributed/training/arguments.py:__getattr__": "the protocol of attributes",
    "distributed/training/arguments.py:_explained": "goes on as it came: JAX's own",
    "distributed/training/step_check/recording.py:__getattr__": "the protocol of attributes",
    "distributed/training/mistakes.py:_warn": "its callers have the text",
    "distributed/training/nan_inputs.py:naming_nans": "goes on as it came: JAX's own",
    "distributed/training/gradients.py:explained": "goes on as it came: the loss function's own",
    "distributed/training/state.py:update": "goes on as it came: the optimizer's own",
}


@cache
def heads():
    """The first words of messages that the page has."""
    return [" ".join(row.split()) for row in ROW.findall(PAGE.read_text())]


def begins(text, head):
    """Whether a row is of this message; one of few letters is so only of a message that says no more."""
    text = " ".join(text.split())
    return text.startswith(head) if sum(map(str.isalpha, head)) > 3 else text.rstrip(".") == head


def excused(said):
    return said.where in EXCUSED and not is_read(said.text)


def test_every_message_is_on_the_page_by_its_first_words():
    missing = [
        f"{said.where}:{said.line}: {said.text[:90]}"
        for said in messages()
        if not excused(said) and not any(begins(said.text, head) for head in heads())
    ]
    assert not missing, "\n".join(["docs/troubleshooting.md has no row for", *missing])


def test_no_row_is_of_a_message_that_is_gone():
    texts = [said.text for said in messages()]
    assert not [head for head in heads() if not any(begins(text, head) for text in texts)]


def test_no_excuse_is_left_over():
    assert set(EXCUSED) == {said.where for said in messages() if not is_read(said.text)}


def test_what_is_compared_is_there():
    """Guard: the source was found and read, and rows say something."""
    assert sum(is_read(said.text) for said in messages()) > 350
    assert len(heads()) == len(set(heads())) > 250


sys.path.insert(0, str(PAGE.parent))

from implied_pages import letters, messages_by_letter  # noqa: E402  # docs/ is no package


def test_the_site_lists_every_message_by_its_first_letter_with_a_link():
    text = messages_by_letter(PAGE.read_text())
    listed = dict(re.findall(r'<li><a href="#(message-\d+)"><code>(.*?)</code>', text))
    assert len(listed) > 150
    assert all(f'* <a id="{name}"></a>' in text for name in listed)
    assert {html.escape(head) for head in heads()} == {
        text for text in re.findall(r"<code>(.*?)</code></a></li>", text) if html.unescape(text) in heads()
    }
    page, rest = text.split('<div class="letters', 1)
    assert "\n## " not in page and "\n## " in rest  # between the opening and the first section


def test_small_words_and_signs_do_not_count_for_the_letter():
    found = letters([("the mesh has", "#1"), ("… is boxed", "#2"), ("'…' of shape", "#3"), ("the", "#4"), ("is", "#5")])
    assert re.findall("<summary>(.)</summary>", found) == ["B", "I", "M", "S", "T"]

"""Docstrings begin with a verb or a noun, and docstrings and pages name instead of pointing: the bounds."""

from tests import words


def test_no_docstring_of_the_library_begins_with_a_pronoun():
    _, bad = words.begins(words.ROOT / "xlstm_jax")
    assert not bad, "\n".join(["begin with a verb or a noun:", *bad])


def test_pointing_words_are_at_most_4_5_percent_of_docstrings_and_pages():
    """At most 4.5 % of the words; optax has 3.5 %."""
    assert words.pointing_in_docstrings(words.ROOT / "xlstm_jax") <= 4.5
    assert words.pointing(list(words.pointing_by_page().values())) <= 4.5


def test_words_of_counts_prose_words_without_code():
    """The guard: a pronoun in prose counts, in code it does not."""
    assert words.words_of("What it is, in ``that`` way.\n>>> those(what)") == (5, 2, True)
    page = "Returns it.\n\n```python\nthat = those\n```\n\nSee [a page](its.md#one) and `other`.\n"
    assert words.words_of(page, words.NO_PROSE_OF_A_PAGE) == (6, 1, False)
    assert words.words_of("") == (0, 0, False)

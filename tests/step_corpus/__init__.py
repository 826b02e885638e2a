"""Corpus of training steps in the style of users, right and wrong, with the expected verdict of ``check_step``."""

from tests.step_corpus import own, ready, sequences, split
from tests.step_corpus.entries import Case, Entry, Setting, error_of

ENTRIES: tuple[Entry, ...] = (
    *ready.ENTRIES,
    *own.ENTRIES,
    *own.UPDATED,
    *split.ENTRIES,
    *sequences.ENTRIES,
)

__all__ = ["ENTRIES", "Case", "Entry", "Setting", "error_of"]

"""Tests of ``check_step``'s verdicts on the corpus: all recorded outcomes, and a sample that runs here."""

import json
from dataclasses import replace

import pytest

from tests.step_corpus import ENTRIES, Setting
from tests.step_verdicts import FAULTS, OUTCOMES, column, in_rounds, outcome_of

ROUNDS = 4
KEPT = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def sample():
    """Returns every eighth entry, each in a different setting."""
    for number, entry in enumerate(ENTRIES[3::8]):
        settings = entry.settings()
        yield pytest.param(entry, settings[(5 * number + 1) % len(settings)], id=entry.title)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("entry, setting", list(sample()))
def test_check_step_verdict_on_a_corpus_entry_is_correct_and_names_the_cause(entry, setting):
    outcome = outcome_of(entry, setting)
    assert column(outcome) not in FAULTS, (str(setting), outcome)


def test_guard_is_proved_fails_for_corpus_entries_with_a_wrong_label():
    wrong = next(entry for entry in ENTRIES if entry.verdict == "wrong")
    right = next(entry for entry in ENTRIES if entry.verdict == "right")
    for entry in (wrong, right):
        other = {"right": "wrong", "wrong": "right"}[entry.verdict]
        assert entry.is_proved(True, "linen")
        assert not replace(entry, verdict=other).is_proved(True, "linen")


@pytest.mark.parametrize("index", range(len(ENTRIES)), ids=lambda index: ENTRIES[index].title)
def test_recorded_outcomes_cover_each_corpus_entry_without_false_verdicts(index):
    kept = KEPT.get(ENTRIES[index].title, {})
    assert list(kept)[:ROUNDS] == [str(setting) for setting in in_rounds(index)[:ROUNDS]]
    faults = {setting: outcome for setting, outcome in kept.items() if column(outcome) in FAULTS}
    assert not faults, faults


def test_recorded_outcomes_cover_all_dropout_rates_vma_modes_and_apis():
    kept = [setting for i, entry in enumerate(ENTRIES) for setting in in_rounds(i)[: len(KEPT[entry.title])]]
    rates, modes, apis = (set(values) for values in zip(*(setting[:3] for setting in kept), strict=True))
    assert (rates, modes, apis) == ({0.0, 0.1, 0.5, 0.8}, {True, False}, {"linen", "nnx"})


def test_corpus_of_step_verdicts_has_the_documented_size():
    verdicts = [entry.verdict for entry in ENTRIES]
    assert verdicts.count("wrong") >= 40 and verdicts.count("right") >= 30
    assert len({entry.title for entry in ENTRIES}) == len(ENTRIES) and KEPT.keys() == {e.title for e in ENTRIES}
    assert any(Setting(0.8, False, "nnx") in entry.settings() for entry in ENTRIES)

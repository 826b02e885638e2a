"""Tests of the table of docs/howto/out_of_memory.md: equal to the recorded figures, and the steps can be built."""

import json
from pathlib import Path

from benchmarks import out_of_memory as oom

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "out_of_memory.md"
KEPT = json.loads((oom.OUT / "v5e_2x4.json").read_text())


def test_the_page_has_the_table_of_the_figures_that_are_kept():
    assert list(KEPT) == list(oom.MEASURES)
    assert oom.table(KEPT) in PAGE.read_text()


def test_all_measures_together_fit_and_no_other_row_does():
    assert [one["fits"] for one in KEPT.values()] == [False] * (len(KEPT) - 1) + [True]


def test_the_last_measure_has_all_changes_of_those_before_it():
    changes = oom.changes_up_to(list(oom.MEASURES)[-1])
    assert changes.pop("num_minibatches") == 1
    made = oom.workload(8, ("fsdp",), **changes)
    assert made.offload.optimizer_state and made.model.remat is True
    assert made.batch.shape == (8 * oom.SEQUENCES, oom.CONTEXT + 1)

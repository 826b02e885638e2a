"""Tests of the table of docs/howto/out_of_memory.md: equal to the recorded figures, and the steps can be built."""

import json
from pathlib import Path

from benchmarks import out_of_memory as oom

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "out_of_memory.md"
KEPT = json.loads((oom.OUT / "v5e_2x4.json").read_text())


def test_out_of_memory_page_has_the_table_of_stored_figures():
    assert list(KEPT) == list(oom.MEASURES)
    assert oom.table(KEPT) in PAGE.read_text()


def test_only_the_last_row_with_all_memory_measures_fits():
    assert [one["fits"] for one in KEPT.values()] == [False] * (len(KEPT) - 1) + [True]


def test_changes_up_to_the_last_measure_include_all_earlier_changes():
    changes = oom.changes_up_to(list(oom.MEASURES)[-1])
    assert changes.pop("num_minibatches") == 1
    made = oom.workload(8, ("fsdp",), **changes)
    assert made.offload.optimizer_state and made.model.remat is True
    assert made.batch.shape == (8 * oom.SEQUENCES, oom.CONTEXT + 1)

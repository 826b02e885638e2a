"""Tests of two Hugging Face models, unedited and sharded from outside; ``make test-models`` runs all models."""

import json

import pytest

from tests.third_party import table


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "check_vma"), [("GPT-2", True), ("T5, remat", False)])
def test_unedited_hugging_face_model_trains_as_on_a_single_device(name, check_vma):
    pytest.importorskip("transformers", reason="needs the extra 'models'")
    from tests.third_party.test_models import (
        test_third_party_model_with_shard_modules_matches_a_single_device as compare,
    )

    compare(name, check_vma)


def test_third_party_table_on_the_page_equals_stored_outcomes():
    assert table.on_page(table.PAGE.read_text()) == table.table(json.loads(table.KEPT.read_text()))

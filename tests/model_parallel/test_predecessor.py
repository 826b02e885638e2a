"""Tests that a renamed tensor-parallel program of the predecessor has the losses of the page."""

from pathlib import Path

import pytest

from tests.support import blocks_of

PAGE = Path(__file__).parents[2] / "docs" / "coming_from" / "predecessor_tp.md"
STEP = 'make_train_step(loss_fn, mesh, "data")'


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_migrated_predecessor_program_has_the_losses_of_the_original(check_vma):
    program = "\n".join(blocks_of(PAGE))
    assert program.count(STEP) == 1
    names: dict = {"__name__": "page"}
    exec(compile(program.replace(STEP, f"{STEP[:-1]}, check_vma={check_vma})"), PAGE.name, "exec"), names)
    assert len(names["old"]) == len(names["new"]) == 5

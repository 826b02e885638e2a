"""Checkpoints damaged at random: the right data of some step, with a word about it, or an error; never wrong data."""

from collections import Counter

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from tests import damage
from tests.damage import NEWEST, OLDER
from tests.faults.report import record
from tests.support import bits

TRIALS = {
    damage.flip_data: 40,
    damage.overwrite: 10,
    damage.flip_anything: 10,
    damage.flip_record: 10,
    damage.truncate: 15,
    damage.delete_file: 15,
    damage.delete_folder: 6,
    damage.stray: 6,
    damage.empty_step: 1,
    damage.swap_steps: 1,
    damage.copy_older: 1,
    damage.link_older: 1,
    damage.exchange_steps: 1,
    damage.renamed_lower: 1,
    damage.linked_nowhere: 1,
    damage.loop_of_links: 1,
    damage.loop_within: 4,
    damage.wrong_record: 40,
    damage.flip_both: 4,
}


@pytest.fixture(scope="module")
def sound():
    return {step: damage.state_of(step) for step in (OLDER, NEWEST)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return damage.written(tmp_path_factory.mktemp("sound") / "checkpoints")


def copy_of(folder, tmp_path, trial):
    copy = tmp_path / str(trial)
    damage.shutil.copytree(folder, copy)
    return copy


def test_damage_suite_has_at_least_100_trials():
    assert sum(TRIALS.values()) >= 100


@pytest.mark.parametrize("hurt", TRIALS, ids=lambda hurt: hurt.__name__)
def test_damaged_checkpoint_restores_sound_data_of_a_step_or_raises(hurt, folder, sound, tmp_path):
    found = Counter()
    for trial in range(TRIALS[hurt]):
        copy = copy_of(folder, tmp_path, trial)
        hurt(copy, np.random.default_rng(trial))
        found[damage.outcome(copy, sound)] += 1
        damage.shutil.rmtree(copy)
    told = ", ".join(f"step {k}: {n}" if k != "refused" else f"refused: {n}" for k, n in found.items())
    record(hurt.__name__.replace("_", " "), TRIALS[hurt], None, f"newest is step {NEWEST}", told)
    only = {damage.stray: NEWEST, damage.empty_step: OLDER, damage.swap_steps: OLDER, damage.flip_both: "refused"}
    only |= {damage.copy_older: NEWEST, damage.link_older: NEWEST, damage.exchange_steps: "refused"}
    only |= dict.fromkeys([damage.renamed_lower, damage.linked_nowhere, damage.loop_of_links], OLDER)
    only |= dict.fromkeys([damage.loop_within, damage.wrong_record], OLDER)
    if hurt in only:
        assert set(found) == {only[hurt]}
    if hurt in (damage.flip_data, damage.overwrite, damage.flip_record):
        assert found[OLDER] > TRIALS[hurt] / 2 and not found["refused"]


def test_orbax_without_checksums_restores_wrong_data_after_bit_flips(folder, sound, tmp_path):
    """The guard: what orbax reads by itself."""
    wrong = 0
    for trial in range(10):
        copy = copy_of(folder, tmp_path, trial)
        damage.flip_data(copy, np.random.default_rng(trial))
        want = bits(sound[NEWEST])
        args = ocp.args.PyTreeRestore(restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), want))
        try:
            got = ocp.PyTreeCheckpointHandler().restore(epath.Path(copy / str(NEWEST) / "state"), args=args)
        except Exception:
            continue
        wrong += not damage.same(got, want)
    assert wrong > 0

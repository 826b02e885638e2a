"""Damage to checkpoints on disk, as caused by disks, crashes and users; and the outcome of a restore."""

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import differing_leaves, mesh_of
from xlstm_jax.distributed.checkpoint import record
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer, CheckpointError

NEWEST, OLDER = 20, 10


def state_of(step):
    """Returns a small state with one leaf of each kind and values that depend on the step."""
    rng = np.random.default_rng(step)
    mesh = mesh_of(2, 4)

    def put(shape, spec, dtype=np.float32):
        return jax.device_put(rng.normal(size=shape).astype(dtype), NamedSharding(mesh, spec))

    return {
        "split": put((512, 96), P("fsdp", "dp")),
        "narrow": put((16, 8), P("fsdp"), jnp.bfloat16),
        "whole": put((5, 3), P()),
        "host": rng.integers(0, 2**40, size=7),
        "position": step,
        "rng": jax.random.fold_in(jax.random.key(1), step),
    }


def same(a, b):
    """Returns whether all leaves have the same dtypes, shapes and bits; to assert it, use ``assert_same_bits``."""
    return not differing_leaves(a, b)


def written(folder, content=state_of):
    """Saves two steps in a folder and returns the folder."""
    with Checkpointer(folder, 10) as checkpointer:
        for step in (OLDER, NEWEST):
            checkpointer.save(step, content(step))
    return folder


def files_of(folder, step, data_only=False):
    found = sorted(path for path in (folder / str(step)).rglob("*") if path.is_file() and path.stat().st_size)
    return [path for path in found if path.parent.name == "d"] if data_only else found


def any_data_file(folder, step, rng):
    """Draws a data file in proportion to its size, so that damage mostly affects values instead of their index."""
    files = files_of(folder, step, data_only=True)
    sizes = np.array([path.stat().st_size for path in files])
    return files[rng.choice(len(files), p=sizes / sizes.sum())]


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def flip_data(folder, rng, step=NEWEST):
    flip(any_data_file(folder, step, rng), rng)


def flip_anything(folder, rng):
    flip(rng.choice(files_of(folder, NEWEST)), rng)


def flip_record(folder, rng):
    flip(folder / str(NEWEST) / "leaves" / "metadata", rng)


def overwrite(folder, rng):
    path = any_data_file(folder, NEWEST, rng)
    content = bytearray(path.read_bytes())
    begin = int(rng.integers(len(content)))
    content[begin : begin + 64] = rng.bytes(len(content[begin : begin + 64]))
    path.write_bytes(content)


def truncate(folder, rng):
    path = rng.choice(files_of(folder, NEWEST))
    path.write_bytes(path.read_bytes()[: rng.integers(path.stat().st_size)])


def delete_file(folder, rng):
    rng.choice(files_of(folder, NEWEST)).unlink()


def delete_folder(folder, rng):
    shutil.rmtree(rng.choice(sorted(path for path in (folder / str(NEWEST)).rglob("*") if path.is_dir())))


def empty_step(folder, rng):
    del rng
    shutil.rmtree(folder / str(NEWEST))
    (folder / str(NEWEST)).mkdir()


def stray(folder, rng):
    name = rng.choice(["99", "notes", "30.orbax-checkpoint-tmp", "old_50", "007"])
    (folder / name).mkdir()
    if rng.integers(2):
        (folder / name / "readme").write_text("left here")
    (folder / "98").write_text("a file that is called like a step")


def flip_both(folder, rng):
    for step in (OLDER, NEWEST):
        for path in files_of(folder, step, data_only=True):
            flip(path, rng)


def swap_steps(folder, rng):
    """Replaces the data of the newest step by the data of the older step, and keeps the record."""
    del rng
    shutil.rmtree(folder / str(NEWEST) / "state")
    shutil.copytree(folder / str(OLDER) / "state", folder / str(NEWEST) / "state")


def copy_older(folder, rng):
    """Copies the older step to a folder with the highest number."""
    del rng
    shutil.copytree(folder / str(OLDER), folder / str(NEWEST + 10))


def link_older(folder, rng):
    del rng
    (folder / str(NEWEST + 10)).symlink_to(str(OLDER))


def renamed_lower(folder, rng):
    """Renames the folder of the newest step to a lower number."""
    del rng
    (folder / str(NEWEST)).rename(folder / "5")


def linked_nowhere(folder, rng):
    """Replaces the newest step by a broken link, as if it had been moved to a disk that is not mounted."""
    del rng
    (folder / str(NEWEST)).rename(folder / "elsewhere")
    (folder / str(NEWEST)).symlink_to("nowhere")


def loop_of_links(folder, rng):
    linked_nowhere(folder, rng)
    (folder / "nowhere").symlink_to(str(NEWEST))


def loop_within(folder, rng):
    """Replaces the data or the record of the newest step by a link to itself."""
    within = folder / str(NEWEST) / ["state", "leaves"][rng.integers(2)]
    shutil.rmtree(within)
    within.symlink_to(within.name)


WRONG_ENTRIES = (
    None,
    {},
    {"shape": "many"},
    {"shape": [-1]},
    {"shape": [2.0]},
    {"shape": [[1]]},
    {"dtype": "float33"},
    {"dtype": 3},
    {"dtype": "key<fry>"},
    {"impl": "fry"},
    {"dtype": "key<fry>", "impl": "unheard of"},
    {"checksum": [1]},
    {"checksum": 1},
    {"more": 1},
)


def wrong_record(folder, rng):
    """Writes an invalid record with correct digests, as a release with a different format would."""
    path = folder / str(NEWEST) / "leaves" / "metadata"
    leaves = json.loads(path.read_text())["leaves"]
    change = WRONG_ENTRIES[rng.integers(len(WRONG_ENTRIES))]
    leaves["host"] = leaves["host"] | change if change else change
    wrong = [{}, [], [leaves["whole"]], "text", 3, leaves, leaves, leaves][rng.integers(8)]
    path.write_text(json.dumps(record.to_json(wrong, NEWEST)))


def exchange_steps(folder, rng):
    """Exchanges the folder names of the two steps."""
    del rng
    (folder / str(OLDER)).rename(folder / "between")
    (folder / str(NEWEST)).rename(folder / str(OLDER))
    (folder / "between").rename(folder / str(NEWEST))


def outcome(folder, sound):
    """Restores and returns the step of the restored values, or "refused"; asserts correct values and a warning."""
    with Checkpointer(folder, 10) as checkpointer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = checkpointer.restore(sound[NEWEST])
        except CheckpointError as error:
            assert "is damaged: " in str(error) and str(folder) in str(error), f"names no damage in {folder}: {error}"
            return "refused"
    step = next((step for step, state in sound.items() if same(got, state)), None)
    assert step is not None, "a restore returned wrong values without an error"
    warned = [str(w.message) for w in caught if "is damaged and was passed over" in str(w.message)]
    named = f"step {NEWEST} in {folder} is damaged", f"was saved as step {NEWEST}"
    assert step == NEWEST or any(name in text for text in warned for name in named), warned
    return step

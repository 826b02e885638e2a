"""Tests of another storage library as one class: a backend of NumPy files passes the tests of orbax's backend."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import mesh_of
from xlstm_jax.distributed import Checkpointer
from xlstm_jax.distributed.checkpoint.backend import Backend
from xlstm_jax.distributed.checkpoint.orbax_backend import OrbaxBackend
from xlstm_jax.distributed.checkpoint.steps import clear


class NumpyBackend:
    """Backend for a single process and a local folder, without background work."""

    record_file = "record.json"

    def __init__(self, directory, max_to_keep, timeout_s):
        self.directory, self.max_to_keep = directory, max_to_keep

    def open(self):
        for folder in self.directory.glob("*.unfinished"):
            shutil.rmtree(folder)

    def check_dtypes(self, arrays):
        for path, array in arrays.items():
            if array.dtype.kind not in "biufc":
                raise TypeError(f"'{path}' has the dtype {array.dtype}, which cannot be stored; cast it.")

    def save(self, step, arrays, record):
        folder = self.directory / f"{step}.unfinished"
        folder.mkdir()
        self.arrays, self.unfinished, self.record = jax.tree.map(np.array, arrays), folder, record

    def is_saving(self):
        return False

    def wait(self):
        np.savez(self.unfinished / "arrays.npz", **self.arrays)
        (self.unfinished / "record.json").write_text(json.dumps(self.record()))
        self.unfinished.rename(self.unfinished.with_suffix(""))
        for step in self.steps()[: -self.max_to_keep]:
            shutil.rmtree(self.directory / str(step))

    def close(self):
        pass

    def latest_step(self):
        return max(self.steps(), default=None)

    def steps(self):
        return sorted(int(folder.name) for folder in self.directory.iterdir() if folder.name.isdecimal())

    def read_record(self, step):
        return json.loads((self.directory / str(step) / "record.json").read_text())

    def read_arrays(self, step, wanted):
        with np.load(self.directory / str(step) / "arrays.npz") as stored:
            placed = {path: stored[path] for path in wanted}
        return {
            path: array if wanted[path].sharding is None else jax.device_put(array, wanted[path].sharding)
            for path, array in placed.items()
        }


def some_state(mesh):
    split = jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.NamedSharding(mesh, jax.P("fsdp")))
    return {"params": {"w": split, "none": jnp.zeros((0, 3))}, "step": 3, "key": jax.random.key(1)}


@pytest.mark.parametrize("make", [OrbaxBackend, NumpyBackend])
def test_backend_restores_a_state_on_another_mesh_and_removes_old_steps(make, tmp_path):
    backend: Backend = make(tmp_path, 2, 60)
    assert {name for name in dir(Backend) if name[0] != "_"} <= {name for name in dir(backend) if name[0] != "_"}
    state, target = some_state(mesh_of(1, 8)), some_state(mesh_of(4, 2))
    with Checkpointer(tmp_path, max_to_keep=2, backend=make) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, state)
            checkpointer.wait()
        assert checkpointer.latest_step() == 3
        restored = checkpointer.restore(target | {"step": 0})
    assert restored["params"]["w"].sharding == target["params"]["w"].sharding and restored["step"] == 3
    assert np.array_equal(restored["params"]["w"], state["params"]["w"]) and restored["params"]["none"].shape == (0, 3)
    assert np.array_equal(*map(jax.random.key_data, (restored["key"], state["key"])))
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"2", "3"}


@pytest.mark.parametrize("make, damaged", [(OrbaxBackend, "leaves/metadata"), (NumpyBackend, "arrays.npz")])
def test_restore_warns_of_a_damaged_step_and_save_moves_the_step_aside(make, damaged, tmp_path):
    state = some_state(mesh_of(1, 8))
    with Checkpointer(tmp_path, backend=make) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
            checkpointer.wait()
        (tmp_path / "2" / damaged).write_text("no such thing")
        with pytest.warns(UserWarning, match=r"step 2 in .* is damaged and was passed over"):
            checkpointer.restore(state)
        assert checkpointer.save(2, state)
    assert {folder.name for folder in tmp_path.iterdir() if folder.is_dir()} == {"1", "2", "2.damaged"}


def test_repeatedly_damaged_step_gets_numbered_folder_names(tmp_path):
    for _ in range(3):
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "half").touch()
        clear(tmp_path, NumpyBackend(tmp_path, 2, 60), {2})
    assert {folder.name for folder in tmp_path.iterdir()} == {"2.damaged", "2.damaged-2", "2.damaged-3"}

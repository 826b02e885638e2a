"""Formats on disk stay: what version 0.1 wrote is read, and the same state is written in the same way today.

``kept/checkpoint-0.1`` holds a folder that a ``Checkpointer`` of version 0.1 wrote (zipped), and a safetensors file;
``kept/forecast-0.1.json`` the forecast of a step with a loop of unknown length.
"""

import json
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.damage import same
from tests.support import mesh_of
from xlstm_jax.distributed import Checkpointer, export_safetensors, import_safetensors
from xlstm_jax.distributed.forecast import Forecast

KEPT = Path(__file__).parents[1] / "kept" / "checkpoint-0.1"
STEP = 5


@pytest.fixture(scope="module")
def state():
    """What was saved: one leaf of each kind."""
    mesh = mesh_of(2, 4)

    def put(values, dtype, spec):
        return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, spec))

    return {
        "params": {
            "kernel": put(np.arange(32.0).reshape(8, 4) / 8, "float32", P("fsdp", "dp")),
            "narrow": put(np.arange(8), "bfloat16", P("fsdp")),
        },
        "flags": put(np.arange(8) % 3 == 0, "bool", P()),
        "keys": jax.device_put(jax.random.split(jax.random.key(4), 4), NamedSharding(mesh, P("fsdp"))),
        "empty": np.zeros((0, 3), np.float32),
        "host": np.int64(2**40) * np.arange(3),
        "unplaced": jnp.arange(3, dtype=jnp.int8),
        "position": 7,
        "fraction": 0.1,
        "shuffled": True,
    }


@pytest.fixture
def kept(tmp_path):
    with zipfile.ZipFile(KEPT / "checkpoint.zip") as packed:
        packed.extractall(tmp_path / "kept")
    return tmp_path / "kept"


def zeros_like(state):
    """Other values in the same shapes, dtypes and shardings."""

    def zero(leaf):
        if not isinstance(leaf, jax.Array | np.ndarray):
            return type(leaf)(0)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return leaf[::-1] if is_key else (leaf * 0).astype(leaf.dtype)

    return jax.tree.map(zero, state)


def test_a_checkpoint_of_version_0_1_is_restored(kept, state):
    target = zeros_like(state)
    assert not same(target, state)  # guard
    with Checkpointer(kept) as checkpointer:
        restored = checkpointer.restore(target)
    assert same(restored, state)
    assert [leaf.sharding for leaf in jax.tree.leaves(restored["params"])] == [
        leaf.sharding for leaf in jax.tree.leaves(state["params"])
    ]


def test_under_another_number_it_is_restored_too_since_it_does_not_hold_its_own(kept, state):
    (kept / str(STEP)).rename(kept / "9")
    with Checkpointer(kept) as checkpointer:
        assert same(checkpointer.restore(zeros_like(state)), state)


def test_the_record_and_the_folders_are_those_of_version_0_1(kept, state, tmp_path):
    with Checkpointer(tmp_path / "new") as checkpointer:
        checkpointer.save(STEP, state)
    record = Path(str(STEP)) / "leaves" / "metadata"
    old, new = (kept / record).read_text(), (tmp_path / "new" / record).read_text()
    assert new.startswith(old.removesuffix("}"))  # which version 0.1 reads: it passes over what follows
    assert json.loads(new).keys() - json.loads(old).keys() == {"step", "step_digest"}

    def folders(root):
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()}

    assert folders(tmp_path / "new") == folders(kept) > {"5", "5/leaves", "5/state"}


def test_a_safetensors_file_has_the_bytes_of_version_0_1(state, tmp_path):
    params = {name: state[name] for name in ("params", "flags", "empty", "host", "unplaced")}
    export_safetensors(params, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (KEPT / "model.safetensors").read_bytes()
    assert same(import_safetensors(KEPT, {name: zeros_like(state)[name] for name in params}), params)


def test_a_kept_forecast_is_read_with_all_that_it_says():
    text = (KEPT.parent / "forecast-0.1.json").read_text()
    found, data = Forecast.from_json(text), json.loads(text)
    assert found.unknown_loops == ("jit(step)/shard_map/jvp()/while",)
    assert [c.kind for c in found.collectives] == [c["kind"] for c in data["collectives"]] != []
    assert found.memory.argument_bytes == data["memory"]["argument_bytes"] > 0
    not_in_0_1 = {"expected_kernel_seconds", "host", "kernel_seconds", "packed", "pallas_seconds", "shared_flops"}
    not_in_0_1 |= {"step_time"}
    assert json.loads(found.to_json()).keys() - data.keys() == not_in_0_1
    assert json.loads(found.to_json()).keys() > data.keys() and found.kernel_seconds is None
    assert found.wire_bytes == sum(found.wire_bytes_by("kind", "direction").values()) > 0

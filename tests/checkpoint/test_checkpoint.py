"""Tests of checkpoints: restored values have the target's types, shardings and boxes; damage is found."""

import json
import shutil
import signal
import sys
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from tests import damage
from tests.checkpoint.test_writer import spawn
from tests.damage import NEWEST, OLDER
from tests.data_parallel.test_initialisation import largest_buffer
from tests.ports import reserved_port
from tests.support import (
    AXES,
    Model,
    assert_same_bits,
    bits,
    data,
    differing_leaves,
    fsdp,
    in_case,
    mean_loss,
    mesh_of,
)
from xlstm_jax.distributed import create_train_state, make_train_step, unbox
from xlstm_jax.distributed import metrics as m
from xlstm_jax.distributed.checkpoint import checksums, orbax_backend, record
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer, CheckpointError
from xlstm_jax.distributed.checkpoint.checksums import checksum_each, checksum_program
from xlstm_jax.distributed.checkpoint.errors import read_on_all_processes
from xlstm_jax.distributed.data_parallel.leaf import is_box
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.training.state import abstract_train_state

MODEL = Model(fsdp())
TX = optax.adamw(1e-2)
X = jnp.ones((16, 8))
BATCH = data()
METRIC = m.Compose({"loss": m.WeightedMean(), "largest": m.Max()})


def sharded_state(mesh, model=None):
    return create_train_state(model or MODEL, TX, mesh, jax.random.key(0), X, batch_axes=AXES)


@pytest.fixture(scope="module")
def on_eight():
    """Returns a state on a 2 x 4 mesh, for tests that donate nothing."""
    return sharded_state(mesh_of(2, 4))


def everything(mesh, train):
    """Returns a training state and the further state of a run, with a leaf of each kind."""
    seen = METRIC.as_local(METRIC.state_of({}), AXES, mesh)
    return {
        "train": train,
        "metrics": m.Synced(jax.tree.map(lambda x: x[0], seen.vectors), seen.layout),
        "data": {"position": 7, "fraction": 0.1, "shuffled": True},
        "rng": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(4), 8), NamedSharding(mesh, P("fsdp"))),
        "numpy": {"int64": np.int64(2**40) * np.arange(3), "scalar": np.float32(2), "complex": np.ones(2, complex)},
        "narrow": [
            jax.device_put(np.linspace(-2, 2, 16).astype(jnp.dtype(dtype)), NamedSharding(mesh, P("fsdp")))
            for dtype in ("bfloat16", "float16", "float8_e4m3fn", "int8", "int4", "bool", "complex64")
        ],
        "empty": [np.zeros((0, 3)), jax.device_put(jnp.zeros((0, 8)), NamedSharding(mesh, P(None, "fsdp")))],
        "unplaced": jnp.arange(3.0),
        ".": {"": np.arange(2), ".": float("nan")} | {"..": 1},
    }


def assert_same(got, want):
    """Asserts equal structure, types, shardings and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(leaves_with_path(unbox(got)), jax.tree.leaves(want), strict=True):
        assert type(a) is type(b), path
        if isinstance(a, jax.Array):
            assert (a.sharding, a.committed, a.dtype) == (b.sharding, b.committed, b.dtype), path
    assert_same_bits(got, want)


def with_other_values(leaf):
    """Returns a leaf of the same type, dtype, shape and sharding: 1 where ``leaf`` is 0, and else 0."""
    if not isinstance(leaf, jax.Array):
        flipped = np.asarray(leaf) == 0
        return flipped.astype(leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf)(flipped)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        other = jax.random.wrap_key_data(with_other_values(jax.random.key_data(leaf)))
    else:
        other = (np.asarray(leaf) == 0).astype(leaf.dtype)  # NumPy: each operation of JAX would be compiled
    return jax.device_put(other, leaf.sharding) if leaf.committed else jnp.asarray(other)


@pytest.mark.parametrize("dp, fsdp_size", [(2, 4), (1, 1)])
def test_restore_preserves_value_type_and_sharding_of_each_kind_of_leaf(dp, fsdp_size, tmp_path):
    """A state with every kind of leaf is restored bit by bit, into a target with other values, or an abstract key."""
    mesh = mesh_of(dp, fsdp_size)
    state = everything(mesh, sharded_state(mesh, fsdp(nn.Dense)(16)))
    target = jax.tree.map(with_other_values, state)
    filled = [leaf for leaf in jax.tree.leaves(state) if np.size(leaf)]
    assert len(differing_leaves(target, state)) == len(filled)  # guard: a restore that returns the target is found
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.save(5, state)
        checkpointer.wait()
        assert checkpointer.latest_step() == 5
        assert_same(checkpointer.restore(target), state)
        keys = jax.ShapeDtypeStruct(state["keys"].shape, state["keys"].dtype, sharding=state["keys"].sharding)
        assert_same_bits(checkpointer.restore(target | {"keys": keys})["keys"], state["keys"])


@pytest.mark.parametrize("limit", [orbax_backend.SLICED_BYTES, 0], ids=["default", "guard, each shard is sliced"])
def test_save_compiles_no_slice_of_a_small_shard_that_several_devices_hold(limit, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(orbax_backend, "SLICED_BYTES", limit)
    orbax_backend._throttled_writers.cache_clear()
    bias = jax.device_put(np.arange(24, dtype=np.float32), NamedSharding(mesh_of(2, 4), P()))  # 8 devices divide it
    with Checkpointer(tmp_path) as checkpointer, jax.log_compiles():
        checkpointer.save(1, {"bias": bias})
        checkpointer.wait()
        assert_same_bits(checkpointer.restore({"bias": bias})["bias"], bias)
    orbax_backend._throttled_writers.cache_clear()
    slices = [
        record
        for record in caplog.records
        if "Finished XLA compilation" in record.message and "slice" in record.message
    ]
    assert bool(slices) == (limit == 0)


NUMBERS = [
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn", "float8_e3m4",
    "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
NOT_STORED = ["uint2", "uint4", "float8_e4m3"]  # TensorStore lacks these dtypes
KEYS = ["threefry2x32", "rbg", "unsafe_rbg"]


def test_read_structs_takes_the_target_sharding_for_each_dtype_and_none_for_numbers():
    """Processes read shards of arrays of each dtype; a Python number of the same dtype has no sharding."""
    sharding = NamedSharding(mesh_of(2, 4), P(AXES))
    arrays = {name: jax.ShapeDtypeStruct((8, 3), name, sharding=sharding) for name in NUMBERS}
    likes = record.bare_leaves(arrays | {"number": True})
    structs = record.read_structs(record.record_without_sums(likes), likes)
    assert {path: struct.sharding for path, struct in structs.items()} == dict.fromkeys(arrays, sharding) | {
        "number": None
    }


def test_restore_reads_each_dtype_by_shard_and_save_raises_for_unsupported_dtypes(tmp_path):
    """Split and replicated arrays of every dtype, 64-bit dtypes included, are read shard by shard."""
    mesh = mesh_of(2, 4)
    values = np.random.default_rng(0).integers(0, 2, (8, 3))

    def placed(array):
        return [jax.device_put(array, NamedSharding(mesh, spec)) for spec in (P(AXES), P())]

    with jax.enable_x64(True), Checkpointer(tmp_path, async_timeout_s=600) as checkpointer:
        state = {name: placed(jnp.asarray(values, name)) for name in NUMBERS}
        state |= {name: placed(jax.random.split(jax.random.key(0, impl=name), 8)) for name in KEYS}
        assert not [name for name in NUMBERS if str(state[name][0].dtype) != name]  # guard
        for name in NOT_STORED:
            with pytest.raises(TypeError, match=f"'x/0' has the dtype {name}, which cannot be stored; cast it"):
                checkpointer.save(1, {"x": placed(jnp.asarray(values, name))})
        checkpointer.save(1, state)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        assert_same(checkpointer.restore(abstract), state)
    likes = record.bare_leaves(abstract)
    structs = record.read_structs(record.record_without_sums(record.bare_leaves(state)), likes)
    assert not [path for path, like in likes.items() if structs[path].sharding != like.sharding]


def test_abstract_train_state_matches_create_train_state_without_allocation(on_eight):
    model, mesh, want = MODEL, mesh_of(2, 4), on_eight
    rng, x = jax.eval_shape(lambda: (jax.random.key(0), X))
    got = abstract_train_state(model, TX, mesh, rng, x, batch_axes=AXES)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, b), a in zip(leaves_with_path(unbox(want)), jax.tree.leaves(got), strict=True):
        assert isinstance(a, jax.ShapeDtypeStruct), path
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding), path
    huge = nn.Dense(2**24)  # whose kernel has 2 TiB
    abstract = abstract_train_state(
        fsdp(type(huge))(2**24), TX, mesh, rng, jax.ShapeDtypeStruct((8, 2**15), jnp.float32), batch_axes=AXES
    )
    assert abstract.params["kernel"].value.sharding.shard_shape((2**15, 2**24)) == (2**15, 2**22)


def test_restored_run_continues_bit_equal_to_the_uninterrupted_run(on_eight, tmp_path):
    """A run restored on another mesh continues as if uninterrupted; the saved states were donated."""
    model, key = MODEL, jax.random.key(1)
    step = make_train_step(mean_loss, mesh_of(2, 4), AXES)
    state, states = jax.tree.map(jnp.copy, on_eight), {}
    with Checkpointer(tmp_path, 2, max_to_keep=None) as checkpointer:
        for i in range(1, 7):
            state, metrics = step(state, BATCH, key)
            assert checkpointer.save(i, state) == (i % 2 == 0)
            states[i] = bits(unbox(state.params))
    target = abstract_train_state(model, TX, mesh_of(2, 4), key, X, batch_axes=AXES)
    with Checkpointer(tmp_path, 2) as checkpointer:
        for i in (2, 4, 6):
            assert_same_bits(unbox(checkpointer.restore(target, i).params), states[i])
        resumed = checkpointer.restore(target, 4)
    for _ in range(2):
        resumed, last = step(resumed, BATCH, key)
    assert_same_bits(unbox(resumed), unbox(state))
    assert float(last["loss"]) == float(metrics["loss"])


def test_sharded_checkpoint_restores_into_the_plain_model_and_back(on_eight, tmp_path):
    sharded = on_eight
    plain = TrainState.create(apply_fn=Model().apply, params=Model().init(jax.random.key(9), X)["params"], tx=TX)
    with Checkpointer(tmp_path / "sharded") as one, Checkpointer(tmp_path / "plain") as two:
        one.save(1, sharded)
        got = one.restore(plain)
        assert type(got.step) is int  # as Flax begins
        assert not [path for path, leaf in leaves_with_path(got) if is_box(leaf)]
        assert got.apply_fn == plain.apply_fn
        assert_same_bits(got.params, unbox(sharded.params))
        two.save(1, got)
        back = two.restore(sharded)
        assert_same(back, sharded)
    assert not damage.same(plain.params, got.params)  # guard
    got = jax.jit(lambda params: Model().apply({"params": params}, X))(got.params)  # nothing is tied to a device


def test_restore_params_ignores_the_optimizer_and_fits_other_meshes_and_tree_paths(on_eight, tmp_path):
    """Parameters restore into the plain model and onto another mesh, for any optimizer and place in the tree."""
    model, key = Model(fsdp()), jax.random.key(9)
    adamw = on_eight
    sgd = create_train_state(model, optax.sgd(1.0), mesh_of(2, 4), key, X, batch_axes=AXES)
    sharded = abstract_train_state(model, optax.identity(), mesh_of(1, 2), key, X, batch_axes=AXES).params
    plain = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), unbox(adamw.params))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"train": adamw, "position": 1, "rng": jax.random.key(3)})
        checkpointer.save(2, sgd)
        checkpointer.save(3, unbox(adamw.params))
    with Checkpointer(tmp_path) as checkpointer:
        for like in (sharded, plain):
            for step, want in {1: adamw, 2: sgd, 3: adamw}.items():
                got = checkpointer.restore_params(like, step)
                assert jax.tree.structure(got) == jax.tree.structure(like)
                assert_same_bits(unbox(got), unbox(want.params))
                assert [x.sharding for x in jax.tree.leaves(got)] == [x.sharding for x in jax.tree.leaves(like)]
        moments = checkpointer.restore_params(plain, 1, path="train/opt_state/0/mu")
        assert_same_bits(moments, plain)  # both are zeros
        with pytest.raises(ValueError, match=r"holds step 3 already"):  # a state made of them cannot save there
            checkpointer.save(3, got)
    assert not damage.same(sgd.params, adamw.params)  # guard


@pytest.mark.parametrize(
    "like, path, message",
    [
        (
            {"w": jnp.ones(3)},
            None,
            r"step 20 in .* has more than one part called 'params': 'a/params/', 'b/params/'. Say .*",
        ),
        ({"w": jnp.ones(4)}, "a/params", r"'a/params/w' was saved as float32\[3\], and .* float32\[4\]"),
        ({"v": jnp.ones(3)}, "a/params", r"it has no 'a/params/v'; and it has 'a/params/w'"),
        ({"w": jnp.ones(3)}, "c", r"has no part 'c'; it has 'a', 'b', 'a/opt', 'a/params', 'b/params'"),
        ({"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, "a/params", r"'w' of shape \(3,\) has no sharding"),
    ],
    ids=["two parts", "shape", "name", "no part", "no sharding"],
)
def test_restore_params_raises_for_mismatched_absent_or_ambiguous_parameters(like, path, message, tmp_path):
    w = {"w": jnp.ones(3)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(20, {"a": {"params": w, "opt": w}, "b": {"params": w}})
        with pytest.raises(ValueError, match=message):
            checkpointer.restore_params(like, path=path)
        assert checkpointer.restore_params(w, path="b/params")["w"].shape == (3,)
        assert checkpointer.restore_params(checkpointer.restore_params({"opt": w, "params": w}, path="a"), path="a")


def test_restore_params_verifies_checksums_and_falls_back_to_an_older_step(tmp_path):
    folder = damage.written(
        tmp_path / "checkpoints", lambda step: {"params": damage.state_of(step), "other": np.ones(3)}
    )
    damage.swap_steps(folder, None)
    with Checkpointer(folder) as checkpointer, pytest.warns(match=r"step 20 .*'params/host', .*is damaged|is damaged"):
        got = checkpointer.restore_params(damage.state_of(NEWEST))
    assert_same_bits(got, damage.state_of(OLDER))


def test_synced_metric_state_restores_on_another_mesh_and_local_state_raises(tmp_path):
    def fed(mesh):
        update = jax.jit(
            jax.shard_map(
                lambda s, v: METRIC.update(s, loss=(v, v > 1), largest=v),
                mesh=mesh,
                in_specs=P(AXES),
                out_specs=P(AXES),
            )
        )
        return update(METRIC.empty(AXES, mesh), jnp.arange(16.0))

    local = fed(mesh_of(2, 4))
    sync = jax.shard_map(METRIC.sync, mesh=mesh_of(2, 4), in_specs=P(AXES), out_specs=P())
    with Checkpointer(tmp_path / "synced") as checkpointer:
        checkpointer.save(1, jax.jit(sync)(local))
        synced = checkpointer.restore(METRIC.state_of({}))
    again = METRIC.as_local(synced, AXES, mesh_of(1, 2))
    values, _ = m.make_log_step(METRIC, mesh_of(1, 2), AXES)(again)
    assert float(values["loss"]) == np.arange(2, 16).mean() and float(values["largest"]) == 15
    with Checkpointer(tmp_path / "local") as checkpointer:
        checkpointer.save(1, local)
        with pytest.raises(ValueError, match=r"was saved as float32\[8, \d+\], .* has float32\[2, \d+\].*metric.sync"):
            checkpointer.restore(METRIC.empty(AXES, mesh_of(1, 2)))


def test_checksums_are_computed_from_shards():
    """The checksum program of each device has no array larger than a shard."""
    x = jax.device_put(jnp.ones((256, 64)), NamedSharding(mesh_of(1, 8), P("fsdp")))
    program = checksum_program(x).lower(x).compile().as_text()
    assert largest_buffer(program) <= x.size // 8 and "all-gather" not in program
    assert checksum_each({"x": x}) == checksum_each({"x": np.ones((256, 64), np.float32)})
    assert checksum_each({"x": x}) != checksum_each({"x": np.ones((64, 256), np.float32)[:, ::-1] * 2})


@pytest.mark.parametrize("on_device", [False, True], ids=["views", "on the device"])
def test_save_writes_the_values_at_the_call_despite_later_donation(on_device, tmp_path, monkeypatch):
    """A save writes the state of the call, although buffers are overwritten before checksums are read."""
    if on_device:  # emulates an accelerator: programs started before the donation
        monkeypatch.setattr(checksums, "is_in_host_memory", lambda _: False)
    late = []
    monkeypatch.setattr(checksums.SavedSums, "begin", lambda self: late.append(self._begun))
    split = NamedSharding(mesh_of(2, 4), P("fsdp", "dp"))
    make = jax.jit(lambda: {f"w{i}": jnp.full((512, 256), i, jnp.float32) for i in range(6)}, out_shardings=split)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    train, host = make(), np.arange(2**20)
    want = bits({"train": train, "host": host.copy()})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"train": train, "host": host})
        for _ in range(5):
            train = overwrite(train)
        host[:] = -1
        assert float(jax.block_until_ready(train)["w5"][0, 0]) == -1
        late[0].set()
        checkpointer.wait()
        assert_same_bits(checkpointer.restore({"train": train, "host": host}), want)


@pytest.mark.parametrize(
    "spec, dtype",
    [
        (P("fsdp", "dp"), jnp.float32),
        (P("fsdp", "dp"), jnp.bool_),
        (P(None, ("dp", "fsdp")), jnp.bfloat16),
        (P("dp"), jnp.complex64),
        (P(), jnp.int8),
    ],
    ids=str,
)
def test_checksums_of_shards_sum_to_the_checksum_of_the_unsharded_array(spec, dtype):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 3)) * 100).astype(dtype)
    array = jax.device_put(values, NamedSharding(mesh_of(2, 4), spec))
    sums = checksums.SavedSums(
        {"w": array, "scalar": jax.device_put(jnp.int32(7), array.sharding.mesh.devices[0, 0])},
        timeout_s=1,
        place="here",
    )
    sums.begin()
    assert sums.result() == checksum_each({"w": array, "scalar": np.int32(7)})


# ------------------------------------------------------------------------------------------- targets that do not fit


def test_python_nan_and_infinity_restore_as_narrow_floats_and_1e300_raises(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"best": float("nan"), "worst": float("-inf"), "large": 1e300})
        likes = {"best": jnp.float32(0), "worst": jnp.bfloat16(0)}
        with pytest.raises(ValueError, match=r"'large' was saved as the Python number 1e\+300, which is not a float32"):
            checkpointer.restore(likes | {"large": jnp.float32(0)})
        got = checkpointer.restore(likes | {"large": 0.0})
    assert np.isnan(got["best"]) and got["worst"] == -np.inf and got["large"] == 1e300


def test_save_skips_existing_steps_and_raises_for_negative_or_conflicting_steps(tmp_path):
    with Checkpointer(tmp_path, 10) as checkpointer:
        with pytest.raises(ValueError, match=r"step=-10 is negative"):
            checkpointer.save(-10, {"a": 1})
        with pytest.raises(CheckpointError, match=r"holds no checkpoint"):
            checkpointer.restore({"a": 1})
        assert not checkpointer.save(5, {"a": 1})
        assert checkpointer.save(5, {"a": 1}, force=True)
        assert not checkpointer.save(5, {"a": 1}, force=True)  # saved already
        assert checkpointer.save(np.int32(10), {"a": 2})
    with Checkpointer(tmp_path, 10, max_to_keep=2) as checkpointer:
        with pytest.raises(ValueError, match=r"step 10 cannot be saved to .*, which holds step 10 already"):
            checkpointer.save(10, {"a": 3})
        with pytest.raises(CheckpointError, match=r"has no step 7; it holds \[5, 10\]"):
            checkpointer.restore({"a": 0}, 7)
        assert checkpointer.restore({"a": 0}, 5) == {"a": 1} and checkpointer.restore({"a": 0}) == {"a": 2}
        assert not checkpointer.save(10, {"a": 2})  # restored from step 10
        checkpointer.save(20, {"a": 4})
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [10, 20]


@pytest.mark.parametrize(
    "directory, message",
    [
        ("", r"directory of the checkpoints is ''; name a folder"),
        ("file:///x", r"'file:///x' has the scheme 'file://', which orbax does not know. It takes gs://"),
        ("foo://x", r"has the scheme 'foo://'"),
        ("note", r"the directory .*note is a file, and can hold no checkpoints"),
        ("note/run/checkpoints", r"note/run/checkpoints lies beneath .*note, which is a file"),
    ],
)
def test_checkpointer_raises_for_an_unusable_directory(directory, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note").write_text("no folder")
    with pytest.raises(ValueError, match=message):
        Checkpointer(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


# ------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def sound():
    return {step: damage.state_of(step) for step in (OLDER, NEWEST)}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return damage.written(tmp_path_factory.mktemp("intact") / "checkpoints")


@pytest.fixture
def folder(intact, tmp_path):
    """Returns a folder with two steps, to be damaged."""
    return shutil.copytree(intact, tmp_path / "checkpoints")


@pytest.mark.parametrize(
    "hurt, want",
    [
        (damage.flip_data, OLDER),
        (damage.flip_record, OLDER),
        (damage.overwrite, OLDER),
        (damage.swap_steps, OLDER),
        (damage.copy_older, NEWEST),
        (damage.link_older, NEWEST),
        (damage.empty_step, OLDER),
        (damage.truncate, None),
        (damage.delete_file, None),
        (damage.stray, NEWEST),
        (damage.renamed_lower, OLDER),
        (damage.linked_nowhere, OLDER),
        (damage.loop_of_links, OLDER),
        (damage.loop_within, OLDER),
        (damage.flip_both, "refused"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_restore_from_a_damaged_directory_returns_an_older_step_or_raises(hurt, want, sound, folder):
    """A sample of the damage of tests/faults/test_damage.py leads to an older step or an error."""
    hurt(folder, np.random.default_rng(0))
    got = damage.outcome(folder, sound)
    assert want is None or got == want


def test_restore_raises_for_a_step_folder_renamed_to_another_number(sound, folder):
    damage.exchange_steps(folder, None)
    with Checkpointer(folder) as checkpointer:
        with pytest.raises(
            CheckpointError, match=r"20 is damaged: .* saved as step 10, and its .*; step 10 is damaged: "
        ):
            checkpointer.restore(sound[NEWEST])
        with pytest.raises(
            CheckpointError, match=r"step 20 is damaged: .* saved as step 10, and its folder was renamed"
        ):
            checkpointer.restore(sound[NEWEST], 20)
        damage.exchange_steps(folder, None)
        assert_same_bits(checkpointer.restore(sound[NEWEST]), sound[NEWEST])


@pytest.mark.parametrize("hurt", [damage.renamed_lower, damage.linked_nowhere, damage.empty_step])
def test_latest_step_and_restore_report_a_lost_step(hurt, tmp_path):
    """Every method reports a lost step, ``latest_step`` too; the next save moves the lost step away."""
    folder = damage.written(tmp_path / "run", lambda step: {"n": step})
    hurt(folder, None)
    problem = {"renamed_lower": "step 5 is damaged: it was saved as step 20", "linked_nowhere": "step 20 .* no folder"}
    with Checkpointer(folder, 5) as checkpointer:
        with pytest.warns(match=problem.get(hurt.__name__, "step 20 is damaged: its folder is empty")):
            assert checkpointer.latest_step() == OLDER
        with pytest.raises(CheckpointError, match=r"(no sound checkpoint in|has no step 20;) .*is damaged: i"):
            checkpointer.restore({"n": 0}, NEWEST)
        with pytest.warns(match="is damaged and was passed over"):
            assert checkpointer.restore({"n": 0}) == {"n": OLDER}
        checkpointer.save(15, {"n": 15})
    with Checkpointer(folder, 5) as checkpointer:
        assert checkpointer.latest_step() == 15 and checkpointer.restore({"n": 0}) == {"n": 15}
    shutil.rmtree(folder / str(OLDER))
    shutil.rmtree(folder / "15")
    (folder / "25").symlink_to("nowhere")
    with Checkpointer(folder) as checkpointer:
        for ask in (checkpointer.latest_step, lambda: checkpointer.restore({"n": 0})):
            with (
                in_case(ask=ask),
                pytest.raises(CheckpointError, match=r"step 25 is damaged: it is a link that leads to no folder"),
            ):
                ask()


@pytest.mark.parametrize("entry", [damage.WRONG_ENTRIES, [], {}, 3], ids=lambda entry: type(entry).__name__)
def test_from_json_raises_for_a_record_without_valid_array_entries(entry):
    good = {"shape": [3], "dtype": "int64", "checksum": [1, 2]}
    assert record.from_json(record.to_json({"w": good}, 1), 1) == {"w": good}  # guard
    wrong = [{"w": good | change if change else change} for change in entry] if isinstance(entry, tuple) else [entry]
    for leaves in wrong:
        with (
            in_case(leaves=leaves),
            pytest.raises(ValueError, match=r"record has its digest, and (does not describe an array|holds no leaves)"),
        ):
            record.from_json(record.to_json(leaves, 1), 1)


def test_checkpointer_raises_for_a_dangling_link_as_directory(tmp_path):
    """A dangling link as directory raises; treated as empty, the run would start anew."""
    (tmp_path / "run").symlink_to(tmp_path / "not mounted")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("run", "run/checkpoints", "loop"):
        with in_case(name=name), pytest.raises(ValueError, match=r"link to .*, which leads nowhere. Mount"):
            Checkpointer(tmp_path / name)


def test_restore_names_leaves_of_a_damaged_step_and_the_next_save_moves_the_step_aside(sound, folder):
    damage.swap_steps(folder, None)
    (folder / "30").mkdir()
    with Checkpointer(folder, 5) as checkpointer:
        with pytest.warns(match=r"is damaged") as warned:
            state = checkpointer.restore(sound[NEWEST])
        assert {str(w.message).split(" in ")[0] for w in warned} == {"step 20", "step 30"}
        assert "'host', 'narrow', 'position' and 3 more: what was read does not have the checksum" in str(
            [str(w.message) for w in warned]
        )
        with pytest.raises(CheckpointError, match=r"step 20 is damaged: .*checksum.*Nothing was restored"):
            checkpointer.restore(state, NEWEST)
        assert (folder / "20").exists()  # reading moves nothing
        assert checkpointer.save(15, state)  # before the damaged step
    assert {path.name for path in folder.iterdir() if path.is_dir()} >= {"10", "15", "20.damaged"}
    assert not (folder / "20").exists() and not (folder / "30").exists()
    with Checkpointer(folder, 5) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(checkpointer.restore(state), state)
        assert checkpointer.latest_step() == 15


def interrupted_at(call, work):
    """Calls ``work`` and sends SIGINT at Python function call number ``call``; returns the number of calls."""
    entered = 0

    def on_event(frame, event, arg):
        nonlocal entered
        del arg
        entered += event == "call"
        # Python discards an exception raised in a callback of a weak reference.
        if event == "call" and entered >= call and "weak" not in frame.f_code.co_filename:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore's unfinished reads
def test_keyboard_interrupt_during_restore_is_not_treated_as_damage(sound, folder):
    """Ctrl-C at thirty moments of a restore is no damage, whatever a library makes of it; no step is moved aside."""
    names = {path.name for path in folder.iterdir()}
    with Checkpointer(folder) as checkpointer:
        restore = partial(checkpointer.restore, sound[NEWEST])
        restore()
        calls = interrupted_at(10**9, restore)
        assert calls > 2000
        ended = 0
        for call in range(1, calls, calls // 30):
            try:
                interrupted_at(call, restore)
                ended += 1  # a later restore may enter fewer functions, and end before
            except KeyboardInterrupt:
                pass
        assert ended <= 10
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_bits(restore(), sound[NEWEST])
        assert checkpointer.save(30, sound[NEWEST])
    assert {path.name for path in folder.iterdir()} >= {*names, "30"}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_read_together_reraises_an_interruption_wrapped_in_other_errors(kind):
    def chained(cause):
        try:
            try:
                raise kind("now")
            except kind as error:
                raise ValueError("x") from error if cause else None
        except ValueError as error:
            raise RuntimeError("y") from (error if cause else None)

    def grouped(_):
        raise ExceptionGroup(
            "several", [ValueError("x"), ValueError(f"Cache keys should be comparable.\n{kind.__name__}: now")]
        )

    for work in (chained, grouped):
        for cause in (True, False):
            with in_case(work=work, cause=cause), pytest.raises(kind):
                read_on_all_processes(partial(work, cause), "step 1", "read step 1", 10)


def test_restore_warns_of_damage_inside_an_except_block_for_an_interruption(sound, folder):
    """Damage is recognised in an ``except`` block, where each error has the interruption as its context."""
    damage.flip_record(folder, np.random.default_rng(0))
    with Checkpointer(folder) as checkpointer:
        try:
            raise SystemExit
        except SystemExit:
            with pytest.warns(match="step 20 in .* is damaged and was passed over"):
                assert_same_bits(checkpointer.restore(sound[NEWEST]), sound[OLDER])


# ------------------------------------------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    port = reserved_port()
    running = [spawn("two", folder, rank, port) for rank in range(2)]
    try:
        done = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(error[-3000:] for _, error in done)
    return folder, [json.loads(output.splitlines()[-1]) for output, _ in done]


def test_two_processes_save_and_restore(two_processes):
    for out in two_processes[1]:
        assert out["none yet"] is None and out["restored"] and out["saved again"]
        assert out["newest"] == 2 and out["sound again"]
        assert out["by a link"]  # process 1 sees the directory under another path


def test_both_processes_fall_back_to_an_older_step_if_only_process_1_reads_damage(two_processes):
    for out in two_processes[1]:
        assert out["fell back"] and out["parameters fell back"]
        (warned,) = out["warned"]
        assert "process 1: " in warned and "process 0: " not in warned and 'Error reading "split/' in warned
        assert "step 2 is damaged: process 1: " in out["explicit"]


def test_two_processes_export_a_single_safetensors_model(two_processes):
    folder, printed = two_processes
    for out in printed:
        assert out["imported"] and "model.safetensors exists" in out["exported twice"]
    want = np.random.default_rng(0).normal(size=(4, 5000)).astype(np.float32)
    got = load_file(folder.parent / "exported" / "model.safetensors")
    assert np.array_equal(got["split"], want) and np.array_equal(got["whole"], want[0, :3])


def test_save_raises_for_a_host_value_different_between_processes(two_processes):
    for out in two_processes[1]:
        assert out["differs"].startswith("'position': processes 0 and 1 have different values")


def test_single_process_restores_a_checkpoint_of_two_processes(two_processes):
    folder, _ = two_processes
    values = np.random.default_rng(2).normal(size=(4, 5000)).astype(np.float32)
    like = jax.ShapeDtypeStruct((4, 5000), jnp.float32, sharding=NamedSharding(mesh_of(1, 8), P(None, "fsdp")))
    target = {"split": like, "whole": np.zeros(3, np.float32), "position": 0, "rng": jax.random.key(0)}
    with Checkpointer(folder) as checkpointer:
        got = checkpointer.restore(target | {"host": np.zeros(3, int)})
    assert np.array_equal(got["split"], values) and got["position"] == 2

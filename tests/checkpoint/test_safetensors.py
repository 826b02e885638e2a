"""Tests of safetensors files: equal to the safetensors library, and restored onto any mesh."""

import json
import os
import threading
import tracemalloc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from tests.damage import same
from tests.support import AXES, Model, assert_same_bits, fsdp, in_case, mesh_of
from xlstm_jax.distributed import export_safetensors, import_safetensors, init_sharded, unbox
from xlstm_jax.distributed.checkpoint import record, safetensors_io
from xlstm_jax.distributed.checkpoint.tensor_names import StoredPart
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_box
from xlstm_jax.distributed.data_parallel.store import Store
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path

X = jnp.ones((16, 8))
DTYPES = [
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64",
]  # fmt: skip


def params_on(mesh, min_weight_size=32):
    model = Model(fsdp(min_weight_size=min_weight_size))
    return init_sharded(model, mesh, jax.random.key(0), X, batch_axes=AXES)["params"]


def abstract(params):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


@pytest.fixture(scope="module")
def on_eight():
    return params_on(mesh_of(2, 4))


@pytest.mark.parametrize("split", [False, True], ids=["one file", "several files"])
def test_safetensors_library_reads_exported_files(split, on_eight, tmp_path):
    params = on_eight
    want = {path: np.asarray(leaf) for path, leaf in leaves_with_path(unbox(params))}
    export_safetensors(params, tmp_path / "out", **({"max_file_bytes": 3000} if split else {}))
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    if not split:
        assert files == ["model.safetensors"]
        got = load_file(tmp_path / "out" / "model.safetensors")
    else:
        count = len(files) - 1
        assert count > 2
        assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] + [
            "model.safetensors.index.json"
        ]
        index = json.loads((tmp_path / "out" / files[-1]).read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())
        loaded = {file: load_file(tmp_path / "out" / file) for file in files[:-1]}
        assert index["weight_map"] == {name: file for file, tensors in loaded.items() for name in tensors}
        # A file has at most 3000 bytes, or a single tensor.
        sizes = {file: sum(x.nbytes for x in tensors.values()) for file, tensors in loaded.items()}
        assert not {file: size for file, size in sizes.items() if size > 3000 and len(loaded[file]) > 1}
        got = {name: x for tensors in loaded.values() for name, x in tensors.items()}
    assert "blocks/Dense_0/kernel" in want and got.keys() == want.keys()
    assert_same_bits(dict(got), dict(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_export_and_import_round_trip_each_dtype_bit_for_bit(dtype, tmp_path):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2, (8, 3)) if dtype == "bool" else 4 ** rng.integers(0, 3, (8, 3))
    want = {
        "a": values.astype(dtype),
        "scalar": np.asarray(values[0, 0].astype(dtype)),
        "none": np.zeros((0, 2), dtype),
    }
    export_safetensors(want, tmp_path / "x.safetensors")
    library = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert {name: bytes(t["data"]) for name, t in library.items()} == {name: x.tobytes() for name, x in want.items()}
    save_file(want, tmp_path / "y.safetensors")
    theirs = dict(safetensors.deserialize((tmp_path / "y.safetensors").read_bytes()))
    assert {name: t["dtype"] for name, t in library.items()} == {name: t["dtype"] for name, t in theirs.items()}
    for name in "xy":  # ours and theirs
        assert_same_bits(import_safetensors(tmp_path / f"{name}.safetensors", want), want)


def test_import_places_an_exported_model_on_another_mesh_or_in_the_plain_model(on_eight, tmp_path):
    params = on_eight
    export_safetensors(params, tmp_path, max_file_bytes=4000)
    target = params_on(mesh_of(1, 2), min_weight_size=8)
    got = import_safetensors(tmp_path, abstract(target))
    assert_same_bits(unbox(got), unbox(params))
    assert jax.tree.structure(got) == jax.tree.structure(target)
    assert [leaf.sharding for leaf in jax.tree.leaves(got)] == [leaf.sharding for leaf in jax.tree.leaves(target)]
    assert any(is_box(leaf) for _, leaf in leaves_with_path(got))
    plain = Model().init(jax.random.key(1), X)["params"]
    got = import_safetensors(tmp_path, plain)
    assert_same_bits(got, unbox(params))
    assert not same(got, plain)  # guard: `plain` has other values
    jax.jit(lambda params, x: Model().apply({"params": params}, x))(got, X)


def test_export_holds_a_single_leaf_in_host_memory_at_a_time(tmp_path):
    """An export holds one leaf in memory, by NumPy's allocations. (Arrays on several devices, so that NumPy copies.)"""
    split = NamedSharding(mesh_of(1, 8), P("fsdp"))
    params = {f"w{i}": jax.device_put(np.full((512, 512), i, np.float32), split) for i in range(8)}
    leaf = 512 * 512 * 4
    tracemalloc.start()
    export_safetensors(params, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    whole = [np.array(x) for x in params.values()]
    guard = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * leaf and guard > 8 * leaf and len(whole) == 8


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P()], ids=str)
def test_import_reads_only_the_shard_of_each_device(spec, tmp_path, monkeypatch):
    values, read = np.arange(64 * 32, dtype=np.float32).reshape(64, 32), []

    class Watched:
        """Tensor of a file that records the sizes of reads."""

        shape = values.shape

        def __getitem__(self, index):
            read.append(values[index].size)
            return values[index]

    monkeypatch.setattr(safetensors_io.StoredTensor, "values", lambda tensor: Watched())
    export_safetensors({"w": values}, tmp_path)
    sharding = NamedSharding(mesh_of(1, 8), spec)
    target = {"w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}
    assert_same_bits(import_safetensors(tmp_path, target), {"w": values})
    assert set(read) == {values.size // (8 if "fsdp" in spec else 1)}


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_import_reads_only_the_shard_of_each_device_of_a_padded_leaf(dtype, layers, tmp_path, monkeypatch):
    """[37, 6] in [40, 6] and [6, 9] in [6, 16]: the last devices have some rows, one of them no column at all."""
    rng, mesh, reads = np.random.default_rng(0), mesh_of(1, 8), []
    shapes = {"rows": ((37, 6), (40, 6), P("fsdp")), "columns": ((6, 9), (6, 16), P(None, "fsdp"))}
    values = {name: (100 * rng.normal(size=(3, *shape))).astype(dtype) for name, (shape, _, _) in shapes.items()}
    names = {"(.+)": r"\1.{layer}"} if layers else None
    if not layers:
        values = {name: x[0] for name, x in values.items()}
    export_safetensors(values, tmp_path, names=names)
    target, want = {}, {}
    for name, (shape, stored, spec) in shapes.items():
        lead = (3,) if layers else ()
        spec = P(*[None] * len(lead), *spec)
        like = jax.ShapeDtypeStruct((*lead, *stored), dtype, sharding=NamedSharding(mesh, spec))
        sizes = tuple(true if true != padded else None for true, padded in zip(shape, stored, strict=True))
        box_names = (*spec, *[None] * (len(lead + stored) - len(spec)))
        target[name] = Sharded(like, box_names, store=ZeroPadding((*[None] * len(lead), *sizes)))
        zeros = [(0, 0)] * len(lead) + [(0, padded - true) for true, padded in zip(shape, stored, strict=True)]
        want[name] = np.pad(values[name].astype(np.float64), zeros)
    read = StoredPart.read
    monkeypatch.setattr(StoredPart, "read", lambda part, index: reads.append(read(part, index)) or reads[-1])
    # To write on the devices would replicate the leaf there.
    monkeypatch.setattr(record, "stored_value", None)
    got = import_safetensors(tmp_path, target, names=names)
    assert max(x.size for x in reads) == 5 * 6 and min(x.size for x in reads) == 0
    assert sum(x.size for x in reads) == sum(x.size for x in values.values())
    for name, like in target.items():
        assert got[name].store == like.store and got[name].value.sharding == like.value.sharding
        assert np.array_equal(np.asarray(got[name].value).astype(np.float64), want[name])
    # From one device, and as a target of arrays that exist.
    again = import_safetensors(tmp_path, got, names=names)
    assert_same_bits(unbox(again), values)


def test_import_of_a_leaf_in_another_store_writes_on_the_devices(tmp_path):
    """A store that does not write parts."""
    values = np.arange(3 * 8, dtype=np.float32).reshape(3, 8)

    @dataclass(frozen=True)
    class Turned(Store):
        def order(self, ndim):
            return 1, 0

        def shape(self, stored, counts):
            return super().shape(stored, counts)[::-1]

        def read(self, stored, is_split):
            return stored.T

        def write(self, value, shape):
            return value.T

    export_safetensors({"w": values}, tmp_path)
    like = jax.ShapeDtypeStruct((8, 3), np.float32, sharding=NamedSharding(mesh_of(1, 8), P("fsdp")))
    got = import_safetensors(tmp_path, {"w": Sharded(like, ("fsdp", None), store=Turned())})
    assert np.array_equal(got["w"].value, values.T)


@pytest.mark.parametrize("spec", [P("fsdp"), P()], ids=str)
def test_import_respects_enable_x64_and_default_device_of_the_caller(spec, tmp_path):
    """``enable_x64`` and ``default_device`` of the caller's thread apply, although other threads read the file."""
    values = np.arange(1, 17) / 3
    export_safetensors({"w": values, "v": values}, tmp_path)
    with jax.enable_x64(True), jax.default_device(jax.devices()[3]):
        placed = jax.device_put(values, NamedSharding(mesh_of(1, 8), spec))
        got = import_safetensors(tmp_path, {"w": placed, "v": jnp.zeros(16)})
        assert_same_bits(got, {"w": values, "v": values})
        assert got["w"].dtype == got["v"].dtype == np.float64
        assert got["w"].sharding == placed.sharding and got["v"].devices() == {jax.devices()[3]}


def test_import_raises_for_truncated_or_corrupted_files(tmp_path):
    params = {"w": np.ones((30, 4), np.float32), "b": np.zeros(2, np.float32)}
    export_safetensors(params, tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for cut in [*range(0, len(content), 37), len(content) - 1]:
        file.write_bytes(content[:cut])
        with in_case(cut=cut), pytest.raises(ValueError, match=r"model.safetensors is damaged"):
            import_safetensors(tmp_path, params)
    both = (header()[:-1] + "," + header()[1:].replace("w", "b")).encode()  # two tensors at the same place
    file.write_bytes(len(both).to_bytes(8, "little") + both + bytes(8))
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: '.' begins at byte \d+, and should at"):
        import_safetensors(tmp_path, {"w": np.ones(1, np.float32), "b": np.ones(1, np.float32)})
    for byte in range(100):  # in the header; values have no checksum in this format
        file.write_bytes(content[:byte] + bytes([content[byte] ^ 0x11]) + content[byte + 1 :])
        try:
            got = import_safetensors(tmp_path, params)
        except ValueError:
            continue
        assert_same_bits(got, params)


def test_import_raises_for_an_index_inconsistent_with_the_files_or_a_missing_file(tmp_path):
    params = {name: np.full(100, i, np.float32) for i, name in enumerate("abc")}
    export_safetensors(params, tmp_path, max_file_bytes=400)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    changes = [("b", "d"), ("00002-of", "00001-of"), ('"weight_map"', '"weights"'), ("model-", "../model-")]
    exchanged = text.replace("00001-of", "*").replace("00002-of", "00001-of").replace("*", "00002-of")
    for changed in [exchanged, *(text.replace(*change) for change in changes)]:
        index.write_text(changed)
        with (
            in_case(changed=changed),
            pytest.raises(ValueError, match=r"index.json (does not fit its files|is not the index)"),
        ):
            import_safetensors(tmp_path, params)
    index.write_text(text)
    assert_same_bits(import_safetensors(tmp_path, params), params)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003"):
        import_safetensors(tmp_path, params)


def test_values_of_split_files_start_at_multiples_of_eight_bytes(tmp_path):
    """Values begin at multiples of eight for names of every length, thanks to padding after the header."""
    for length in range(1, 9):
        params = {name * length: np.full(100, i, np.float32) for i, name in enumerate("ab")}
        folder = tmp_path / str(length)
        export_safetensors(params, folder, max_file_bytes=400)
        files = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert sorted(folder.iterdir()) == [*files, folder / "model.safetensors.index.json"]
        headers = [int.from_bytes(file.read_bytes()[:8], "little") for file in files]
        assert [header % 8 for header in headers] == [0, 0]
        assert [file.stat().st_size - header for file, header in zip(files, headers, strict=True)] == [408, 408]
        assert_same_bits(import_safetensors(folder, params), params)


def test_tensors_of_wide_dtypes_come_first_and_start_at_multiples_of_their_item_size(tmp_path):
    """Readers that map a file into memory need aligned tensors; one of 3 bytes before others would shift them all."""
    params = {"a": np.ones(3, np.int8), "b": np.ones(3, np.float16), "c": np.ones(1), "d": np.ones(1, np.float32)}
    export_safetensors(params, tmp_path)
    tensors = safetensors_io.stored_tensors(tmp_path)
    assert sorted(tensors, key=lambda name: tensors[name].offset) == ["c", "d", "b", "a"]
    assert all(tensor.offset % tensor.dtype.itemsize == 0 for tensor in tensors.values())


def test_model_without_values_is_a_file_of_a_header_alone(tmp_path):
    params = {"w": np.zeros((0, 3), np.float32)}
    export_safetensors(params, tmp_path)
    assert_same_bits(import_safetensors(tmp_path, params), params)


def test_sizes_dims_and_headers_are_read_up_to_their_limits(tmp_path, monkeypatch):
    def read(shape, end):
        return safetensors_io._tensor(tmp_path, 100, {"dtype": "F16", "shape": shape, "data_offsets": [6, 6 + end]})

    assert read([1] * 64, 2)[1:3] == (106, (1,) * 64)
    assert read([2**63 - 1, 0], 0).shape == (2**63 - 1, 0)
    for shape, match in (([1] * 65, "65 dims"), ([2**63, 0], f"{2**63} is no size"), ([1], "do not fit")):
        with pytest.raises(ValueError, match=match):
            read(shape, 0)
    export_safetensors({"w": np.ones(300, np.float32)}, tmp_path)
    file = tmp_path / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert safetensors_io.read_header(file).metadata == {"format": "pt"}
    for limit in (length, length - 1):
        monkeypatch.setattr(safetensors_io, "MAX_JSON_BYTES", limit)
        if limit == length:
            assert set(safetensors_io.read_header(file).tensors) == {"w"}
            continue
        with pytest.raises(ValueError, match=f"it would have {length} bytes, which are more than the file's, or "):
            safetensors_io.read_header(file)


def test_failed_sync_while_leaves_are_written_raises_and_leaves_no_file(tmp_path, monkeypatch):
    """Linux reports a failed write by one fsync alone: the one at the end of the file may succeed."""
    fsync, failures = os.fsync, [OSError(5, "no such sector")]

    def fails_once(descriptor):
        if failures:
            raise failures.pop()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_once)
    with pytest.raises(OSError, match="no such sector"):
        export_safetensors({"w": np.ones(3)}, tmp_path)
    assert not failures and not list(tmp_path.iterdir())


def test_export_syncs_each_file_before_the_rename(tmp_path, monkeypatch):
    """A file is synced before the rename; otherwise, after a crash, the name may exist without the bytes."""
    synced, renamed, fsync, replace = {}, [], os.fsync, os.replace

    def counted_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced[status.st_ino] = status.st_size

    def noted_replace(old, new):
        status = os.stat(old)
        renamed.append((os.path.basename(new), synced.get(status.st_ino) == status.st_size))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", counted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    export_safetensors({name: np.full(1000, 1.0) for name in "ab"}, tmp_path, max_file_bytes=8000)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert renamed == [(name, True) for name in names], (
        "a file was renamed before fsync, or files were renamed in another order"
    )


def test_import_raises_for_a_tensor_in_two_files_of_an_index(tmp_path):
    """A tensor in two files of an index raises; the choice between the files once depended on PYTHONHASHSEED."""
    save_file({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(2, np.float32), "c": np.ones(2, np.float32)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    params = {name: np.zeros(2, np.float32) for name in "abc"}
    for owner in ("one", "two"):
        index.write_text(json.dumps({"weight_map": {
            name: f"{file}.safetensors" for name, file in (("a", "one"), ("b", owner), ("c", "two"))
        }}))  # fmt: skip
        with (
            in_case(owner=owner),
            pytest.raises(ValueError, match=r"tensor 'b' lies in one.safetensors and in two.safetensors, perhaps"),
        ):
            import_safetensors(tmp_path, params)


@pytest.mark.parametrize("spec", [None, P("fsdp")], ids=str)
def test_import_raises_for_bool_bytes_other_than_0_and_1(spec, tmp_path):
    content = np.arange(16, dtype=np.uint8).reshape(8, 2) % 2
    like = np.zeros((8, 2), bool)
    like = like if spec is None else jax.device_put(like, NamedSharding(mesh_of(1, 8), spec))
    for byte in (1, 2, 128, 255):
        content[5, 1] = byte
        text = b'{"b":{"dtype":"BOOL","shape":[8,2],"data_offsets":[0,16]}}'
        (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content.tobytes())
        if byte == 1:
            assert_same_bits(import_safetensors(tmp_path, {"b": like}), {"b": content.astype(bool)})
            continue
        with pytest.raises(ValueError, match=rf"safetensors is damaged: 'b' is BOOL and has the byte {byte}, and"):
            import_safetensors(tmp_path, {"b": like})


def test_import_raises_for_a_tensor_with_an_empty_name_unless_ignored(tmp_path):
    save_file({"": np.ones(2), "w": np.ones(2), "v(": np.ones(2)}, tmp_path / "model.safetensors")
    params = {"w": np.zeros(2)}
    with pytest.raises(ValueError, match=r"it has '', 'v\(', which the parameters have not"):
        import_safetensors(tmp_path, params)
    with pytest.raises(ValueError, match=r"it has '', which the parameters have not"):
        import_safetensors(tmp_path, params, ignore=r"v\(")
    (tmp_path / "model.safetensors").unlink()
    save_file({"": np.ones(2), "w": np.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"it has '', which the parameters have not"):
        import_safetensors(tmp_path, params)
    save_file({"": np.ones(2), "w": np.ones(2), "v(": np.ones(2)}, tmp_path / "model.safetensors")
    assert_same_bits(import_safetensors(tmp_path, params, ignore=r"v\(|"), {"w": np.ones(2)})


EIGHT = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.parametrize("narrow", [*EIGHT, "float16", "bfloat16", "float32"])
def test_import_casts_floats_without_loss_and_raises_for_lossy_dtypes(narrow, tmp_path):
    """A float is read into every dtype that represents all values, as NumPy casts; other dtypes raise."""
    count = 8 if narrow in EIGHT else 16
    bits = np.arange(2**count, dtype=f"uint{count}")
    stored = (bits.astype(np.float32) if narrow == "float32" else bits.view(jnp.dtype(narrow))).reshape(-1, 4)
    export_safetensors({"w": stored}, tmp_path)
    holds = {"float16": EIGHT[:2] + EIGHT[3:], "bfloat16": EIGHT, "float32": [*EIGHT, "float16", "bfloat16"]}
    for wide in (*EIGHT, "float16", "bfloat16", "float32", "float64"):
        like = {"w": np.zeros(stored.shape, jnp.dtype(wide))}
        if wide in (narrow, "float64") or narrow in holds.get(wide, ()):
            with np.errstate(invalid="ignore"):  # of a signaling NaN
                want = stored.astype(jnp.dtype(wide))
            assert_same_bits(import_safetensors(tmp_path, like), {"w": want})
            continue
        with pytest.raises(ValueError, match=rf"'w' is {narrow}\[.*\] in the file, and {wide}"):
            import_safetensors(tmp_path, like)


def test_export_raises_for_existing_files_and_leaves_no_partial_files(tmp_path, monkeypatch):
    params = {"w": np.ones(3, np.float32)}
    with pytest.raises(
        FileNotFoundError, match=r"there is no .*model.safetensors, and no model.safetensors.index.json"
    ):
        import_safetensors(tmp_path, params)
    export_safetensors(params, tmp_path)
    with pytest.raises(FileExistsError, match=r"model.safetensors exists"):
        export_safetensors({"w": np.zeros(3)}, tmp_path)
    assert_same_bits(import_safetensors(tmp_path, params), params)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file"):
        export_safetensors(params, tmp_path / "file" / "deeper")
    with monkeypatch.context() as full, pytest.raises(OSError, match=r"no room"):
        full.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        export_safetensors(params, tmp_path / "other.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model.safetensors"]


def header(**entries):
    """Returns the header of a safetensors file with a float32 of 4 bytes; arguments replace fields of the entry."""
    entry = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0,4]"} | entries
    return '{"w":{' + ",".join(f'"{key}":{value}' for key, value in entry.items()) + "}}"


HOSTILE = {
    "sound": (header(), None),
    "nested": ('{"w":' + "[" * 200_000, "RecursionError"),
    "a float as size": (header(shape="[1.0]"), r"1\.0 is no size"),
    "text as size": (header(shape='"1"'), "'1' is no size"),
    "text as offsets": (header(data_offsets='"04"'), "'0' is no size"),
    "an end of another shape": (header(data_offsets="[0,8]"), "offsets of a tensor do not fit its shape"),
    "text as end": (header(data_offsets='[0,"4"]'), "'4' is no size"),
    "infinite": (header(shape="[1e999]"), "inf is no size"),
    "huge": (header(shape="[" + "9" * 4000 + "]"), "9999"),
    "too many digits": (header(shape="[" + "9" * 5000 + "]"), "header cannot be read"),
    "negative": (header(shape="[-1]"), "-1 is no size"),
    "bool": (header(shape="[true]"), "True is no size"),
    "a million dims": (header(shape="[" + "1," * 1_000_000 + "1]"), "has 1000001 dims"),
    "no dtype": (header(dtype="[]"), "TypeError"),
    "a field twice": (header()[:-2] + ',"dtype":"F32"}}', "stands in it twice"),
    "a tensor twice": (header()[:-1] + "," + header()[1:], "stands in it twice"),
    "no object": ("[]", "TypeError"),
    "UTF-16": (header().encode("utf-16"), "UnicodeDecodeError"),
}


@pytest.mark.parametrize("text, message", HOSTILE.values(), ids=HOSTILE)
def test_import_raises_for_malformed_headers_and_accepts_a_sound_header(text, message, tmp_path):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
    params = {"w": np.ones(1, np.float32)}
    if not message:
        assert_same_bits(import_safetensors(tmp_path, params), {"w": np.zeros(1, np.float32)})
        return
    with pytest.raises(ValueError, match=rf"model.safetensors is damaged, .*{message}"):
        import_safetensors(tmp_path, params)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_import_raises_for_a_named_pipe_without_blocking(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is no regular file"):
        import_safetensors(tmp_path, {"w": np.ones(1)})


def test_import_raises_for_an_index_pointing_to_a_directory(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": ".."}}')
    with pytest.raises(ValueError, match=r"\.\. is no regular file"):
        import_safetensors(tmp_path, {"w": np.ones(1)})


def test_export_raises_for_reserved_or_non_unicode_leaf_names(tmp_path):
    with pytest.raises(ValueError, match="name of the metadata"):
        export_safetensors({"__metadata__": np.ones(2), "w": np.ones(2)}, tmp_path)
    with pytest.raises(ValueError, match=r"the leaf 'a/\\ud83d' has a name that is not Unicode"):
        export_safetensors({"a": {"\ud83d": np.ones(2)}}, tmp_path)
    assert not list(tmp_path.iterdir())
    params = {name: np.ones(2) for name in (".", "metadata", "\U0001f600", 'a"b\\')}
    export_safetensors(params, tmp_path)  # guard: other names are accepted, by the library too
    assert load_file(tmp_path / "model.safetensors").keys() == params.keys()
    assert_same_bits(import_safetensors(tmp_path, params), params)


def test_export_does_not_write_through_a_symlink_at_the_temporary_path(tmp_path):
    (tmp_path / "precious").write_text("mine")
    safetensors_io.hidden_file(tmp_path / "model.safetensors").symlink_to(tmp_path / "precious")
    export_safetensors({"w": np.ones(2)}, tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
    assert load_file(tmp_path / "model.safetensors").keys() == {"w"}


def test_leaves_are_read_ahead_by_several_threads_and_arrive_in_order():
    """No read ends before each of four threads has begun one."""
    assert safetensors_io.READERS == 4
    together = threading.Barrier(safetensors_io.READERS)

    def read(leaf):
        together.wait(timeout=5)
        return leaf.upper()

    assert list(safetensors_io._ahead(read, "abcdefgh")) == list("ABCDEFGH")

"""Tests of the record of a checkpoint: checksums equal NumPy's, and every difference from a record is found."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import in_case, mesh_of
from xlstm_jax.distributed import TrainState
from xlstm_jax.distributed.checkpoint.checksums import _parts, _sums_of_part, checksum, checksum_each
from xlstm_jax.distributed.checkpoint.record import (
    ALIGNMENT,
    _aligned_copy,
    as_like,
    bare_leaves,
    check_sound,
    fits,
    from_json,
    is_local,
    part_of,
    reads_full_array,
    record_without_sums,
    to_json,
    with_sums,
)


def record_of(leaves, arrays):
    return with_sums(record_without_sums(leaves), checksum_each(arrays))


FACTORS = ((16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), (16, 0x21F0AAAD, 15, 0x735A2D97, 15))


def checksum_of_numpy(words, positions=None):
    """Returns checksums of uint32 words: each mixed with its position, scrambled twice, summed modulo 2^32."""
    sums = []
    positions = np.arange(words.size, dtype=np.uint32) if positions is None else positions
    for first, factor, second, other, last in FACTORS:
        found = (words.ravel() + positions * np.uint32(0x9E3779B9)) ^ np.uint32(factor)
        found = (found ^ (found >> first)) * np.uint32(factor)
        found = (found ^ (found >> second)) * np.uint32(other)
        sums.append(int(np.sum(found ^ (found >> last), dtype=np.uint32)))
    return sums


def words_of(array):
    """Returns the bits of the values as 32-bit words, one word per value of at most 32 bits."""
    array = np.ascontiguousarray(array)
    if array.dtype.itemsize >= 4:
        return array.view(np.uint32)
    return array.view(f"uint{8 * array.dtype.itemsize}").astype(np.uint32)


VALUES = np.linspace(-2, 2, 24).reshape(2, 3, 4)
ARRAYS = {
    "float32": VALUES.astype(np.float32),
    "bfloat16": np.asarray(jnp.asarray(VALUES, jnp.bfloat16)),
    "int8": (30 * VALUES).astype(np.int8),
    "bool": VALUES > 0,
    "complex64": (VALUES + 1j * VALUES**2).astype(np.complex64),
    "float64": VALUES * (1 + 1e-12),
    "nothing but 0": np.zeros(3, np.float32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_checksums_of_device_and_host_arrays_equal_numpy(name):
    """Checksums of device arrays and of host arrays equal NumPy's."""
    array = ARRAYS[name]
    want = checksum_of_numpy(words_of(array))
    assert checksum_each({"x": array})["x"] == want
    if array.dtype.itemsize <= 4 or name == "complex64":
        assert np.asarray(checksum(jnp.asarray(array))).tolist() == want
    assert checksum_each({"x": array.ravel()[::-1].copy()})["x"] != want or not array.any()


@pytest.mark.parametrize("words_of_an_entry", [1, 2])
def test_checksum_of_a_part_of_a_large_array_has_positions_in_the_array_modulo_2_32(words_of_an_entry):
    values = np.arange(6 * words_of_an_entry, dtype=np.uint32).reshape(2, 3, *[2] * (words_of_an_entry - 1))
    origin, strides = (70_000, 90_001), (100_000, 1)
    entries = [(origin[0] + i) * strides[0] + (origin[1] + j) * strides[1] for i in range(2) for j in range(3)]
    positions = [entry * words_of_an_entry + word for entry in entries for word in range(words_of_an_entry)]
    assert min(positions) > 2**32  # guard
    want = checksum_of_numpy(values, np.array([position % 2**32 for position in positions], np.uint32))
    got = _sums_of_part(values, np.uint32(origin), np.uint32(strides))
    assert (got.tolist(), got.dtype) == (want, np.uint32)


def test_checksums_are_traced_under_strict_promotion_of_dtypes():
    for dtype in (np.float32, jnp.bfloat16, np.int8, np.bool_, np.complex64):
        with in_case(dtype=dtype), jax.numpy_dtype_promotion("strict"):
            got = jax.eval_shape(checksum, jax.ShapeDtypeStruct((2, 3), dtype))
            assert (got.shape, got.dtype) == ((2,), np.uint32)


def test_parts_to_sum_are_first_replicas_with_entries_at_their_place_modulo_2_32():
    def shard(start, replica_id=0, size=3):
        index, data = (slice(start, None), slice(None)), np.zeros((size, 1), np.uint8)
        return SimpleNamespace(data=data, index=index, replica_id=replica_id, device=jax.devices()[0])

    shards = [shard(None), shard(2**32 + 70_000), shard(7, replica_id=1), shard(9, size=0)]
    parts = _parts("w", SimpleNamespace(shape=(2**33, 2**17 + 1), addressable_shards=shards))
    assert [part.origin.tolist() for part in parts] == [[0, 0], [70_000, 0]]
    assert [(part.path, part.is_view, part.held.shape) for part in parts] == [("w", True, (3, 1))] * 2
    assert {tuple(part.strides.tolist()) for part in parts} == {(2**17 + 1, 1)}
    assert {array.dtype for part in parts for array in (part.origin, part.strides)} == {np.dtype(np.uint32)}


def test_check_sound_raises_for_a_difference_in_shape_dtype_or_a_single_bit():
    arrays = {"w": np.arange(6, dtype=np.int32), "b": np.zeros(2, np.float32)}
    record = record_of(arrays, arrays)
    check_sound(record, arrays)
    flipped = arrays["w"].copy()
    flipped[3] ^= 1 << 30
    for other in (arrays["w"].reshape(2, 3), arrays["w"].view(np.uint32), arrays["w"].view(np.float32), flipped):
        assert checksum_each({"w": other}) == checksum_each({"w": arrays["w"]}) or other is flipped  # guard
        with (
            in_case(other=other),
            pytest.raises(ValueError, match="'w': what was read does not have the checksum or dtype"),
        ):
            check_sound(record, arrays | {"w": other})


def test_check_sound_raises_for_replicas_with_different_values():
    mesh = mesh_of(2, 4)
    spread = NamedSharding(mesh, P())
    equal = [jax.device_put(np.arange(6.0, dtype=np.float32), device) for device in mesh.devices.flat]
    unlike = [*equal[:-1], equal[-1] + 1]
    whole, differing = (jax.make_array_from_single_device_arrays((6,), spread, copies) for copies in (equal, unlike))
    record = record_of({"w": whole}, {"w": whole})
    check_sound(record, {"w": whole})
    with pytest.raises(ValueError, match="'w': what was read does not have the checksum"):
        check_sound(record, {"w": differing})


def test_from_json_raises_for_a_modified_record_or_another_step_number():
    content = to_json(record_of({"n": 3}, {"n": np.int64(3)}), step=7)
    assert from_json(content, 7)["n"]["dtype"] == "int"
    leaf = {"n": content["leaves"]["n"] | {"dtype": "bool"}}
    for changed, message in (
        ({"leaves": leaf}, "the record of leaves does not have its digest"),
        ({"step": 8}, "the record's number of the step does not have its digest"),
        ({"step_digest": "0"}, "the record's number of the step does not have its digest"),
    ):
        with pytest.raises(ValueError, match=message):
            from_json(content | changed, 8 if "step" in changed else 7)
    with pytest.raises(ValueError, match="it was saved as step 7, and its folder was renamed, copied or linked to 8"):
        from_json(content, 8)
    without = {name: content[name] for name in ("leaves", "digest")}
    with pytest.raises(ValueError, match="the record's number of the step does not have its digest"):
        from_json(without, 7)


def test_record_format_checksums_and_digests_stay_unchanged():
    """The format of the record is stable; a change makes existing checkpoints unreadable."""
    content = to_json(
        record_of({"n": 3, "w": np.zeros(2, np.float32)}, {"n": np.int64(3), "w": np.zeros(2, np.float32)}), 7
    )
    assert content["leaves"] == {
        "n": {"shape": [], "dtype": "int", "checksum": [2041075329, 995484015]},
        "w": {"shape": [2], "dtype": "float32", "checksum": [2799738205, 608690698]},
    }
    assert (content["step"], content["digest"][:16], content["step_digest"][:16]) == (
        7,
        "d1ce74ae767ef6fe",
        "ab12adf3766d024c",
    )


def test_record_names_the_optimizer_at_the_first_leaf_of_its_state():
    state = TrainState.create(apply_fn=None, params={"w": np.zeros(2, np.float32)}, tx=optax.sgd(0.1, momentum=0.9))
    paths = ("params/w", "opt_state/1/x", "opt_state/0/trace/w")
    record = record_without_sums({path: np.zeros(2) for path in paths}, state)
    named = {path: entry["optimizer"].partition(" of ")[0] for path, entry in record.items() if "optimizer" in entry}
    assert named == {"opt_state/0/trace/w": "chain(trace, scale)"}, named


def test_random_keys_of_different_implementations_have_different_record_dtypes():
    keys = {kind: jax.random.key(0, impl=kind) for kind in ("threefry2x32", "rbg")}
    data = {kind: jax.random.key_data(key) for kind, key in keys.items()}
    assert record_of(keys, data)["rbg"]["dtype"] != record_of(keys, data)["threefry2x32"]["dtype"]


# --------------------------------------------------------------------------------------------------- entries and leaves


@pytest.mark.parametrize(
    "number, fits_64_bits", [(2**63 - 1, True), (-(2**63), True), (2**63, False), (-(2**63) - 1, False)]
)
def test_whole_numbers_of_a_state_are_those_of_64_bits(number, fits_64_bits):
    if fits_64_bits:
        assert bare_leaves({"n": number}) == {"n": number}
    else:
        with pytest.raises(ValueError, match=f"'n' is the integer {number}, which has more than the 64 bits"):
            bare_leaves({"n": number})


def test_local_leaves_are_those_of_which_every_process_has_a_full_copy():
    assert is_local(3) and is_local(np.ones(2)) and is_local(jnp.ones(2))  # uncommitted
    assert not is_local(jax.device_put(jnp.ones(2), jax.devices()[1]))
    assert not is_local(jax.device_put(jnp.ones(8), NamedSharding(mesh_of(1, 8), P("fsdp"))))
    assert is_local(jax.ShapeDtypeStruct((2,), jnp.float32))


@pytest.mark.parametrize(
    "saved, like, want",
    [
        ("int", "int32", True),
        ("int64", "int", True),
        ("float", "bfloat16", True),
        ("bool", "bool", True),
        ("int", "float32", False),
        ("float", "int32", False),
        ("bool", "int32", False),
        ("float32", "float16", False),  # neither is a Python number
    ],
)
def test_python_numbers_fit_arrays_of_their_kind_and_arrays_those_of_their_dtype(saved, like, want):
    assert fits({"shape": [], "dtype": saved}, {"shape": [], "dtype": like}) is want
    assert not fits({"shape": [], "dtype": saved}, {"shape": [1], "dtype": like})


def test_leaves_without_entries_and_python_numbers_are_read_in_full():
    split = jax.device_put(jnp.ones(8), NamedSharding(mesh_of(1, 8), P("fsdp")))
    entries = ([8], "float32"), ([8, 0], "float32"), ([], "int"), ([], "float32"), ([2], "bool"), ([], "bool")
    read = [reads_full_array({"shape": shape, "dtype": dtype}, split) for shape, dtype in entries]
    assert read == [False, True, True, False, False, True]
    assert reads_full_array({"shape": [8], "dtype": "float32"}, np.ones(8))


def test_record_of_an_array_without_entries_is_an_entry():
    empty = {"x": np.zeros((0, 3), np.float32)}
    content = to_json(record_of(empty, empty), 1)
    assert from_json(content, 1)["x"] == {"shape": [0, 3], "dtype": "float32", "checksum": [0, 0]}


def test_python_number_is_read_into_a_narrower_dtype_only_if_it_has_the_value():
    entry, like = {"shape": [], "dtype": "float"}, np.zeros((), np.float32)
    assert as_like(np.float64(0.5), entry, like, "x") == np.float32(0.5)
    assert np.isnan(as_like(np.float64("nan"), entry, like, "x"))
    with pytest.raises(ValueError, match=r"'x' was saved as the Python number 0\.1, which is not a float32"):
        as_like(np.float64(0.1), entry, like, "x")


def test_python_number_is_read_in_the_type_but_not_the_value_of_the_target():
    for saved, like in ((3, 7), (True, False), (0.5, 2.0)):
        got = as_like(np.asarray(saved), {"shape": (), "dtype": "", "checksum": 0}, like, "x")
        assert got == saved and type(got) is type(like)


def test_parameters_are_found_by_their_leaves_among_several_parts_of_that_name():
    record = {path: {} for path in ("model/params/w", "model/params/b", "teacher/params/w", "step")}
    assert part_of(record, "step 1", names={"w", "b"}, path=None) == "model/params/"
    assert part_of(record, "step 1", names={"w"}, path=None) == "teacher/params/"
    assert part_of(record, "step 1", names={"w"}, path="model/params") == "model/params/"
    with pytest.raises(ValueError, match="more than one part called 'params'"):
        part_of(record, "step 1", names={"other"}, path=None)


@pytest.mark.parametrize("size", [1, 3, 17, 1000])
def test_copies_for_devices_are_at_addresses_that_jax_takes_over(size):
    values = np.arange(size + 1, dtype=np.int16)[1:]
    copies = [_aligned_copy(values) for _ in range(5)]
    assert {copy.ctypes.data % ALIGNMENT for copy in copies} == {0}
    values[:] = 0
    assert all(copy.tolist() == list(range(1, size + 1)) for copy in copies)

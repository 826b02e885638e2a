"""Deltas of real optimizer steps: their bytes, what a reader makes of them, and what damage does."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from tests.damage import same
from tests.support import assert_same_bits, data, in_case, mean_loss
from xlstm_jax.distributed.checkpoint import (
    VersionNeededError,
    apply_publication,
    export_safetensors,
    latest_version,
    publish,
)
from xlstm_jax.distributed.checkpoint.publication import delta, files, follow

OF_A_FILE = 2500  # bytes of an index and of the header of a file with this model's tensors are at most these


class Wide(nn.Module):
    """Few of the entries are biases: they begin at zero, and so change in every step."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.gelu(nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))))


def trained(steps, learning_rate):
    """Returns the weights in bfloat16 after each step of Adam, of a float32 copy; and before the first one."""
    model = Wide()
    batch = data()
    master = jax.jit(model.init)(jax.random.key(0), batch["x"])["params"]
    tx = optax.adam(learning_rate)
    state = tx.init(master)

    @jax.jit
    def step(master, state):
        grads = jax.grad(mean_loss)(master, model.apply, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(master, updates), state

    versions = [master]
    for _ in range(steps):
        master, state = step(master, state)
        versions.append(master)
    return [jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), version) for version in versions]


@pytest.fixture(scope="module")
def versions():
    """Few entries change, as in reinforcement learning: the update is small beside the step between two bfloat16.

    In the last step one tensor does not change at all.
    """
    versions = trained(4, 2e-6)
    versions[4]["Dense_2"]["bias"] = versions[3]["Dense_2"]["bias"].copy()
    return versions


def flat(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}


def changed_bytes(before, after):
    pairs = [(flat(before)[name].view(np.uint8), x.view(np.uint8)) for name, x in flat(after).items()]
    return sum(int((old != new).sum()) for old, new in pairs), sum(new.size for _, new in pairs)


@pytest.fixture
def published(versions, tmp_path):
    """A folder with a full version 1, and the deltas 2, 3, 4 and 5."""
    assert publish(versions[0], tmp_path) == 1
    for version, params in enumerate(versions[1:], start=2):
        assert publish(params, tmp_path, since=version - 1) == version
    return tmp_path


def test_reader_follows_versions_and_delta_size_matches_the_changed_entries(versions, published):
    start, arrays = apply_publication({}, published)
    assert start == 5
    assert_same_bits(arrays, flat(versions[4]))
    for number in range(1, 5):
        changed, size = changed_bytes(versions[number - 1], versions[number])
        assert 0.01 < changed / size < 0.05  # guard: as the brief of a delta has it
        entries = sum(int((flat(versions[number - 1])[n] != x).sum()) for n, x in flat(versions[number]).items())
        written = [path for path in published.iterdir() if f"model-{number + 1:08}" in path.name]
        assert len(written) == 2
        # Of an entry its 2 bytes and a gap of 1; the tensors of a file, and an index, have names and digests.
        assert sum(path.stat().st_size for path in written) <= 3.1 * entries + OF_A_FILE
        assert_same_bits(apply_publication(flat(versions[number]), published).arrays, flat(versions[4]))
    assert latest_version(published) == 5


def test_apply_publication_keeps_input_arrays_and_shares_unchanged_tensors(versions, published):
    mine = {name: np.asfortranarray(array) for name, array in flat(versions[3]).items()}
    before = {name: array.copy() for name, array in mine.items()}
    version, got = apply_publication(mine, published)
    assert version == 5
    assert_same_bits(got, flat(versions[4]))
    assert_same_bits(mine, before)
    shared = [name for name in mine if same(mine[name], got[name])]
    assert shared and all(got[name] is mine[name] for name in shared)
    again = apply_publication(got, published)
    assert again.version == 5 and all(again.arrays[name] is got[name] for name in got)


def test_arrays_of_no_version_are_refused_and_the_needed_version_is_named(versions, published):
    other = flat(versions[2])
    other["Dense_0/bias"] = other["Dense_0/bias"] + 1
    for arrays in (other, {"w": np.ones(2)}, {name: x.astype(np.float32) for name, x in flat(versions[2]).items()}):
        with (
            in_case(arrays=arrays),
            pytest.raises(
                VersionNeededError, match=r"version 5 in .* applies to version 4, .*: 1, 2, 3 or 4\."
            ) as error,
        ):
            apply_publication(arrays, published)
        assert error.value.needed == 4
    # A delta that leaves a version out: arrays of that version are refused, too.
    publish(versions[0], published, since=2)
    with pytest.raises(VersionNeededError, match=r"version 6 in .* applies to version 2, .*: 1 or 2\."):
        apply_publication(flat(versions[3]), published)
    assert_same_bits(apply_publication(flat(versions[1]), published).arrays, flat(versions[0]))
    # A full version needs none.
    assert publish(versions[2], published) == 7
    assert_same_bits(apply_publication(flat(versions[0]), published).arrays, flat(versions[2]))


@pytest.fixture
def small(tmp_path):
    """Returns four versions of a tensor, and a folder with version 1 and the deltas 2 and 3."""
    versions = [np.arange(200, dtype=np.float32) for _ in range(4)]
    for number, version in enumerate(versions):
        version[number] = -1
    for number, version in enumerate(versions[:3]):
        publish({"w": version}, tmp_path, **({"since": number} if number else {}))
    return versions, tmp_path


def test_delta_applies_only_to_arrays_of_the_versions_of_its_chain(small):
    versions, folder = small
    for arrays in ({}, *({"w": version} for version in versions[:3])):
        version, got = apply_publication(arrays, folder)
        assert version == 3 and np.array_equal(got["w"], versions[2])
    with pytest.raises(VersionNeededError, match=r"version 3 in .* applies to version 2, .*: 1 or 2\."):
        apply_publication({"w": versions[3]}, folder)


def test_reader_whose_version_goes_while_it_reads_begins_again_with_the_newest(small, monkeypatch):
    (*_, newest), folder = small
    read, read_versions = follow.read_files, []

    def meanwhile(directory, index):
        read_versions.append(index.version)
        if len(read_versions) == 1:
            publish({"w": newest}, directory)
            publish({"w": newest + 1}, directory)
        return read(directory, index)

    monkeypatch.setattr(follow, "read_files", meanwhile)
    version, got = apply_publication({}, folder)
    assert version == read_versions[-1] == 5 and np.array_equal(got["w"], newest + 1)


def test_publish_raises_for_since_outside_the_published_versions(versions, published):
    with pytest.raises(ValueError, match=r"since=9 cannot be built on: .* has the versions 1, 2, 3, 4 and 5\."):
        publish(versions[0], published, since=9)
    assert publish(versions[0], published) == 6
    with pytest.raises(ValueError, match=r"since=5 cannot be built on: .* has the versions 6\."):
        publish(versions[0], published, since=5)
    with pytest.raises(ValueError, match=r"since=1 cannot be built on: .* has no version\."):
        publish(versions[0], published / "new", since=1)


def test_damage_anywhere_is_refused_or_harmless(versions, published):
    """Every file of the newest two versions and of the full one: cut, and a byte changed, at many places."""
    rng = np.random.default_rng(0)
    want, mine = flat(versions[4]), flat(versions[3])
    refused = 0
    for path in sorted(published.iterdir()):
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little") if path.suffix != ".json" else len(content)
        places = {0, 7, 8, header - 1, header, len(content) - 1, *rng.integers(0, len(content), 12).tolist()}
        for place in sorted(place for place in places if place < len(content)):
            flipped = bytearray(content)
            flipped[place] ^= 1 << int(rng.integers(8))
            for damaged in (bytes(flipped), content[:place], content + b"x"):
                path.write_bytes(damaged)
                for arrays in (mine, {}):
                    try:
                        version, got = apply_publication(arrays, published)
                    except ValueError:
                        refused += 1
                    else:
                        # Space in an index, or a value that a later version replaces.
                        assert "00000005-" not in path.name, path
                        assert version == 5
                        assert_same_bits(got, want)
        path.write_bytes(content)
        path.rename(path.with_name("gone"))
        if path.name == "model-00000005.delta.json":  # the version is not there then
            assert apply_publication({}, published).version == 4
        else:
            with (
                in_case(path=path),
                pytest.raises(FileNotFoundError, match=r"No such file|is missing, on which version 5|no version is"),
            ):
                apply_publication({}, published)
        path.with_name("gone").rename(path)
    assert refused > 300
    assert_same_bits(apply_publication(mine, published).arrays, want)


def test_versions_that_a_crash_left_without_an_index_are_not_read(versions, published, tmp_path):
    shutil.copytree(published, tmp_path / "copy", dirs_exist_ok=False, ignore=lambda *_: ["copy"])
    copy = tmp_path / "copy"
    (copy / "model-00000005.delta.json").unlink()
    assert latest_version(copy) == 4
    assert_same_bits(apply_publication({}, copy).arrays, flat(versions[3]))
    assert publish(versions[4], copy, since=3) == 5
    assert_same_bits(apply_publication(flat(versions[2]), copy).arrays, flat(versions[4]))


def test_a_version_that_goes_while_it_is_read_is_not_mixed_with_the_next(versions, published, monkeypatch):
    """The trainer publishes two full versions between the reader's index and the reader's files."""
    read, calls = follow.read_files, []

    def meanwhile(directory, index):
        calls.append(index.version)
        if len(calls) == 1:
            publish(versions[0], directory)
            publish(versions[1], directory)
        return read(directory, index)

    monkeypatch.setattr(follow, "read_files", meanwhile)
    version, arrays = apply_publication({}, published)
    assert (version, calls) == (7, [5, 7])
    assert_same_bits(arrays, flat(versions[1]))


def test_delta_publications_add_remove_and_reshape_tensors(tmp_path):
    first = {"a": np.arange(6.0), "b": np.ones(3, np.float32), "c": np.array(2, np.int8)}
    second = {"a": np.arange(6.0).reshape(2, 3), "c": np.array(3, np.int8), "d": np.array([True, False])}
    third = second | {"d": np.array([True, True]), "e": np.zeros((0, 2), np.float32)}
    publish(first, tmp_path)
    publish(second, tmp_path, since=1)
    assert publish(third, tmp_path, since=2) == 3
    for start in ({}, first, second, third):
        assert_same_bits(apply_publication(start, tmp_path).arrays, third)


def test_apply_publication_raises_for_an_export_or_an_absent_folder(tmp_path):
    export_safetensors({"a": np.ones(10), "b": np.ones(10)}, tmp_path, max_file_bytes=80)
    with pytest.raises(ValueError, match=r"index.json is damaged, or no index that `publish` wrote"):
        apply_publication({}, tmp_path)
    with pytest.raises(FileNotFoundError, match="no version is published in"):
        apply_publication({}, tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int8", "bool", "complex64", "float64"])
@pytest.mark.parametrize("share", [0, 1e-4, 0.02, 0.3, 1])
def test_a_delta_gives_the_same_bits_and_is_never_larger_than_the_tensor(share, dtype):
    rng = np.random.default_rng(3)
    before = rng.integers(0, 2, 300_000).astype(jnp.dtype(dtype)).reshape(3, 100_000)
    bits = np.array(before).reshape(-1).view(f"uint{8 * before.dtype.itemsize}")
    bits[rng.random(bits.size) < share] ^= 1
    after = bits.view(before.dtype).reshape(before.shape)
    found = delta.encoded("w", before, after)
    got = delta.applied("w", found, before)
    assert got.dtype == after.dtype and got.shape == after.shape and got.tobytes() == after.tobytes()
    size, entries = sum(x.nbytes for x in found.values()), int((before != after).sum())
    assert size <= min(after.nbytes, entries * (2 + before.dtype.itemsize) * 1.05 + 10)
    assert (size == 0) == (share == 0)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 511, 512, 65535, 65536, 200_000])
def test_delta_encodes_gaps_of_every_length_between_changes(gap):
    for others in ([], list(range(0, 60, 3))):  # so that 8, 16 and 32 bits are chosen
        before = np.zeros(gap + 61, np.int16)
        after = before.copy()
        after[[60 + gap, *others]] = -1
        found = delta.encoded("w", before, after)
        assert np.array_equal(delta.applied("w", found, before), after)


def test_delta_applies_to_a_copy_of_an_array_in_any_order_of_memory():
    before = np.arange(600, dtype=np.float32).reshape(20, 30)
    after = before.copy()
    after[1, 2] = -1
    found, in_fortran = delta.encoded("w", before, after), np.asfortranarray(before)
    got = delta.applied("w", found, in_fortran)
    np.testing.assert_array_equal(got, after)
    np.testing.assert_array_equal(in_fortran, before)  # unchanged


def test_zero_of_either_sign_and_nan_are_compared_by_bits():
    before, after = np.array([0.0, np.nan, 1.0] * 20), np.array([0.0, np.nan, 1.0] * 20)
    assert delta.encoded("w", before, after) == {}
    after[0] = -0.0
    assert np.signbit(delta.applied("w", delta.encoded("w", before, after), before)[0])


def test_an_index_may_not_lead_out_of_the_folder(published):
    index = published / "model-00000005.delta.json"
    content = json.loads(index.read_text())
    for change in ({"files": {"../x": "0"}}, {"since": 5}, {"since": 6}):
        changed = {"metadata": content["metadata"] | change}
        changed["metadata"]["sha256"] = files._sha256_of_index(changed)
        index.write_text(json.dumps(changed))
        with in_case(change=change), pytest.raises(ValueError, match=r"delta.json is damaged, or no index"):
            apply_publication({}, published)

"""Publications that every process writes, read by the safetensors library; and writers that are killed."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.damage import same
from tests.ports import reserved_port
from tests.support import assert_same_bits, in_case, mesh_of
from xlstm_jax.distributed import export_safetensors, import_safetensors
from xlstm_jax.distributed.checkpoint import Stored, apply_publication, publish
from xlstm_jax.distributed.checkpoint.publication import files, writers
from xlstm_jax.distributed.checkpoint.publication import publish as publishing
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.store import Store

ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


def started(mode, folder, count, argument=0):
    port = str(reserved_port())
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.publish_process", mode, folder, str(rank), str(count), port, str(argument)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def results(mode, folder, count, argument=0):
    processes = started(mode, folder, count, argument)
    done = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(err[-3000:] for _, err in done)
    return [json.loads(output.splitlines()[-1]) for output, _ in done]


def followed(folder):
    """Reads a publication as other libraries do: by the index, with the library's reader."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    found = {}
    for file in set(weight_map.values()):
        for name, tensor in safetensors.deserialize((folder / file).read_bytes()):
            assert weight_map[name] == file
            found[name] = (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
    assert found.keys() == weight_map.keys()
    return found


def as_written(tensors):
    codes = {"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
    return {name: (codes[str(x.dtype)], list(x.shape), x.tobytes()) for name, x in tensors.items()}


@pytest.fixture(scope="module")
def wanted():
    """What the processes publish, by version; asked of a process, because the module reads its arguments."""
    code = (
        "import sys, pickle; sys.argv += ['', '.', '0', '1', '0']; from tests import publish_process as p; "
        "sys.stdout.buffer.write(pickle.dumps([p.tensors_of(1), p.tensors_of(2)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=120)
    first, second = pickle.loads(done.stdout)
    assert not same(first, second)  # guard
    return {1: as_written(first), 2: as_written(second)}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_process_writes_its_part_and_receives_no_other(count, tmp_path, wanted):
    processes = results("versions", tmp_path, count)
    assert [process["versions"] for process in processes] == [[1, 2, 3]] * count
    assert followed(tmp_path) == wanted[2]
    deltas = [path.name for path in tmp_path.iterdir() if path.suffix == ".delta"]
    assert sorted(deltas) == [f"model-00000003-{rank:05}-00000.delta" for rank in range(count)]
    assert as_written(apply_publication({}, tmp_path).arrays) == wanted[1]
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    received = [sorted(set(process["received"])) for process in processes]
    written = [sorted(n for n, f in weight_map.items() if f.split("-")[2] == f"{rank:05}") for rank in range(count)]
    assert received == written
    twice = [sorted(2 * names) for names in received]  # each name in two of the versions
    assert [sorted(process["received"]) for process in processes] == twice
    loads = [sum(len(wanted[2][name][2]) for name in names) for names in written]
    largest = max(len(data) for _, _, data in wanted[2].values())
    assert sum(loads) == sum(len(data) for _, _, data in wanted[2].values())
    assert max(loads) - min(loads) <= largest
    for process in processes:
        assert process["collectives"] == (["all-to-all"] if count > 1 else [])
        assert bool(process["sent"]) == (count > 1)


@pytest.mark.parametrize("at", [0, 3])
def test_after_a_kill_between_files_the_version_before_is_read_and_the_next_run_goes_on(at, tmp_path, wanted):
    processes = started("killed", tmp_path, 2, at)
    try:
        assert processes[1].wait(timeout=120) == -9
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert len([path for path in tmp_path.iterdir() if "-00000002-00001-" in path.name]) == at  # guard
    assert followed(tmp_path) == wanted[1]
    assert results("versions", tmp_path, 2)[0]["versions"] == [2, 3, 4]
    assert followed(tmp_path) == wanted[2]


def test_a_file_that_cannot_be_written_is_an_error_in_every_process_and_the_version_before_stays(tmp_path, wanted):
    for process in results("refused", tmp_path, 2):
        assert process["versions"] == [1, 2] and process["version before"]
        (error,) = process["errors"]
        assert "process 1: " in error and "00000002-00001-00000.safetensors cannot be written: " in error, error
    assert followed(tmp_path) == wanted[2]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_kills_within_writes_of_several_processes_never_leave_a_torn_version_to_read(count, tmp_path):
    """SIGKILL at drawn bytes and moments; every job that follows reads the version before, and publishes."""
    command = [sys.executable, "-m", "tests.torn_process", tmp_path / "published", *map(str, (count, 0, 3, 12))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    hits = [kill for kill in found["kills"] if kill["within a write"]]
    assert len(hits) >= 3, found  # guard: kills were in the midst of writes
    assert all(kill["read"] == kill["version"] - 1 for kill in hits), found
    assert all(-9 in kill["codes"] for kill in found["kills"]), found
    codes, published, number = found["last"]
    assert codes == [0] * count and number % 1000 == published > max(kill["read"] for kill in found["kills"])
    assert found["reader"] == 0, done.stderr[-3000:]  # a reader that has followed all of this
    assert found["left"] == []


def killed_at(monkeypatch, module, name, number):
    """Raises in place of call ``number`` of ``module.name``: the files are then those that a kill leaves."""
    calls, real = [], getattr(module, name)

    def replaced(*arguments):
        calls.append(arguments)
        if len(calls) > number:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, name, replaced)
    return calls


@pytest.mark.parametrize("operation", ["replace", "fsync"])
def test_interrupted_publication_leaves_the_previous_version_readable(operation, tmp_path, monkeypatch):
    first, second = [{name: np.full(10, i + len(name), np.float32) for name in ("a", "bb", "ccc")} for i in range(2)]
    publish(first, tmp_path, max_file_bytes=40)
    for number in range(20):
        with monkeypatch.context() as patched:
            killed_at(patched, files.os, operation, number)
            try:
                publish(second, tmp_path, max_file_bytes=40)
            except KeyboardInterrupt:
                # The last fsync is that of the folder, after the index has its name.
                want = second if (operation, number) == ("fsync", 5) else first
                assert_same_bits(import_safetensors(tmp_path, first), want)
                continue
        break
    assert number == {"replace": 4, "fsync": 6}[operation]
    assert_same_bits(import_safetensors(tmp_path, first), second)


@pytest.mark.parametrize("delta", [False, True], ids=["full", "delta"])
def test_a_publication_that_ends_at_any_byte_is_not_read(delta, tmp_path):
    """The folder after each byte of each file, in the order of the writes: a kill leaves no other one.

    The library safetensors writes a file of full size, with zeros where nothing was written yet, in a hidden folder.
    """
    first, second = [{name: np.full(4, i + len(name), np.float32) for name in ("a", "bb")} for i in range(2)]
    publish(first, tmp_path / "before", max_file_bytes=16)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    steps, names = [], {path.name for path in (tmp_path / "before").iterdir()}
    fsync, replace = os.fsync, os.replace

    def noted(old, new):
        steps.append((Path(new).name, Path(old).read_bytes()))
        replace(old, new)

    os.replace = noted
    try:
        publish(second, tmp_path / "after", max_file_bytes=16, **({"since": 1} if delta else {}))
    finally:
        os.replace = replace
    assert os.fsync is fsync and len(steps) == (2 if delta else 3) and steps[-1][0].endswith(".json")
    folder, read = tmp_path / "before", 0
    for name, content in steps:
        hidden = folder / f".{name}.tmp"
        if not name.endswith(".json"):
            hidden.mkdir()
            hidden /= name
        for size in range(len(content) + 1):
            zeros = b"" if name.endswith(".json") else bytes(len(content) - size)
            hidden.write_bytes(content[:size] + zeros)
            got = apply_publication({}, folder)
            assert got.version == 1 and same(got.arrays, first), (name, size)
            read += 1
            if size % 50 == 0:
                assert_same_bits(import_safetensors(folder, first), first)
        replace(hidden, folder / name)
        is_published = name == steps[-1][0]
        got = apply_publication({}, folder)
        assert (got.version, same(got.arrays, second)) == ((2, True) if is_published else (1, False)), name
    assert read > 500 and names < {path.name for path in folder.iterdir()}


def test_files_are_on_disk_before_the_index_has_its_name(tmp_path, monkeypatch):
    events, synced, fsync, replace = [], {}, os.fsync, os.replace

    def noted_fsync(opened):
        path = os.readlink(f"/proc/self/fd/{opened}")
        events.append(path)
        if os.path.isfile(path):
            synced[os.path.basename(path).removeprefix(".").removesuffix(".tmp")] = Path(path).read_bytes()
        fsync(opened)

    def noted_replace(old, new):
        events.append(f"-> {new}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    publish({"a": np.ones(10), "b": np.ones(10)}, tmp_path, max_file_bytes=80)
    names = [event.replace(f"{tmp_path}", "").replace("model-00000001-00000-0000", "") for event in events]
    assert names == [
        *["/.0.safetensors.tmp/0.safetensors", "-> /0.safetensors"],
        *["/.1.safetensors.tmp/1.safetensors", "-> /1.safetensors"],
        *[f"/.{INDEX}.tmp", "", f"-> /{INDEX}", ""],
    ]
    # What was in each file when it was synchronised is all that the file has now.
    assert synced == {path.name: path.read_bytes() for path in tmp_path.iterdir()} and len(synced) == 3


def test_publish_keeps_the_previous_version_and_removes_older_versions(tmp_path):
    like = {"w": np.zeros(3)}
    for version in range(1, 5):
        of_a_killed_writer = tmp_path / f".model-{version:08}-00007-00000.safetensors.tmp"
        of_a_killed_writer.mkdir()
        (of_a_killed_writer / ".tmpX3k2").write_bytes(b"of a killed writer")
        assert publish({"w": np.full(3, float(version))}, tmp_path) == version
        assert import_safetensors(tmp_path, like)["w"][0] == version
        there = {int(path.name.strip(".").split("-")[1]) for path in tmp_path.glob("*model-*")}
        assert there == {max(1, version - 1), version}


@pytest.mark.parametrize("default", [True, False])
def test_files_are_a_share_of_what_a_process_writes(default, tmp_path, monkeypatch):
    """So that the memory of a host falls with the number of processes."""
    monkeypatch.setattr(publishing, "MIN_SHARE_BYTES", 300)
    sizes = []
    for leaves in (8, 16, 32, 64):
        params = {f"w{i:02}": np.zeros(100, np.uint8) for i in range(leaves)}
        publish(params, tmp_path, **({} if default else {"max_file_bytes": 500}))
        weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
        sizes.append(max(Counter(weight_map.values()).values()))
    assert sizes == ([3, 3, 4, 8] if default else [5, 5, 5, 5])


def test_the_largest_tensors_are_assigned_first():
    """The largest tensor first, each to the process with the fewest bytes, for sizes from bytes to megabytes.

    Therefore, without the last tensor, the load of no process exceeds the final load of any other.
    """
    rng = np.random.default_rng(0)
    sizes = {f"w{i}": int(size) for i, size in enumerate(rng.pareto(1, 500) * 1000)}
    for count in (1, 3, 8):
        found = writers.assigned(sizes, count)
        assert len(found) == count
        assert sorted(name for names in found for name in names) == sorted(sizes), f"each once, for {count} processes"
        loads = [sum(sizes[name] for name in names) for names in found]
        assert max(loads) <= max(sum(sizes.values()) / count * 4 / 3, max(sizes.values()))
        for process, names in enumerate(found):
            assert sorted(names, key=lambda name: -sizes[name]) == names, f"process {process} of {count}"
            before_the_last = loads[process] - sizes[names[-1]]
            assert before_the_last <= min(loads), f"process {process} of {count} was given more, loads {loads}"


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P()], ids=str)
def test_single_process_publishes_arrays_sharded_over_devices(spec, tmp_path):
    values = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    params = {"w": jax.device_put(values, NamedSharding(mesh_of(2, 4), spec))}
    publish(params, tmp_path)
    assert_same_bits(import_safetensors(tmp_path, params), {"w": values})


def transposed_in_layers(values):
    """A leaf of a store of another library, which keeps the layers last: [e, d, layer] of values [layer, d, e]."""

    @dataclass(frozen=True)
    class LayersLast(Store):
        def order(self, ndim):
            return 2, 1, 0

        def shape(self, stored, counts):
            return super().shape(stored, counts)[::-1]

        def read(self, stored, is_split):
            return stored.T

    place = NamedSharding(mesh_of(2, 4), P("fsdp"))
    return Sharded(jax.device_put(values.T, place), ("fsdp", None, None), store=LayersLast())


@pytest.mark.parametrize("write", [publish, export_safetensors])
def test_leaves_in_other_stores_are_written_as_their_values(write, tmp_path):
    values = np.arange(3 * 5 * 8, dtype=np.float32).reshape(3, 5, 8)
    names = {"layers": Stored("layer.{layer}", "d e -> e d"), "whole": "whole"}
    params = {"layers": transposed_in_layers(values), "whole": transposed_in_layers(values)}
    write(params, tmp_path, names=names)
    want = {"whole": values} | {f"layer.{i}": x.T for i, x in enumerate(values)}
    like = {name: np.zeros_like(x) for name, x in want.items()}
    assert_same_bits(import_safetensors(tmp_path, like), want)


def test_published_files_can_be_read_by_whom_the_umask_allows(tmp_path):
    before = os.umask(0o027)
    try:
        publish({"w": np.ones(2)}, tmp_path)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o640"}


def test_publish_raises_for_a_folder_with_a_single_file_model(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(FileExistsError, match=r"model\.safetensors exists, and readers would take it"):
        publish({"w": np.ones(2)}, tmp_path)


def test_a_damaged_index_is_refused(tmp_path):
    publish({"w": np.ones(2)}, tmp_path)
    index = tmp_path / INDEX
    content = index.read_text()
    for changed in (content.replace('"version": 1', '"version": 7'), content[:-3], "{}", "[]"):
        index.write_text(changed)
        with (
            in_case(changed=changed),
            pytest.raises(ValueError, match=r"index.json is damaged, or no index that `publish` wrote"),
        ):
            publish({"w": np.ones(2)}, tmp_path)
    index.write_text(content)
    assert publish({"w": np.ones(2)}, tmp_path) == 2

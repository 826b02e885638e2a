"""Checkpoints on the hosts' own disks: what is copied where, and what comes back after a disk was lost."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.damage import same
from tests.support import mesh_of
from xlstm_jax.distributed import Checkpointer, CheckpointError
from xlstm_jax.distributed.checkpoint import NearCheckpointer
from xlstm_jax.distributed.checkpoint.checksums import checksum_each
from xlstm_jax.distributed.checkpoint.folders import FILES, Receiver, new_folder, send, steps_of
from xlstm_jax.distributed.checkpoint.near import Held, Peer, buddies, layouts_name, transfers, whole_steps
from xlstm_jax.distributed.checkpoint.record import check_sound

ROOT = Path(__file__).parents[2]
RESTART_S = 60


def state_of(step, mesh=None):
    values = np.random.default_rng(step).normal(size=(16, 24)).astype(np.float32)

    def put(values, spec):
        return jax.device_put(values, NamedSharding(mesh or mesh_of(2, 4), spec))

    split, narrow = put(values, P("fsdp", "dp")), put(values.astype(jnp.bfloat16), P(None, "fsdp"))
    whole, none = put(values[0], P()), put(np.zeros((0, 8)), P())
    return {"w": split, "n": narrow, "b": whole, "e": none, "step": step, "rng": jax.random.key(step), "np": values[:2]}


def opened(folder, near_every=2, far_every=10):
    return NearCheckpointer(folder / "disk", Checkpointer(folder / "far", far_every), near_every)


def saved(folder, last):
    with opened(folder) as checkpointer:
        return [step for step in range(1, last + 1) if checkpointer.save(step, state_of(step))]


def files_of(folder, step):
    return [*folder.rglob(f"disk/**/{step}/shards.zip")]


def test_the_newest_step_near_or_far_comes_back(tmp_path):
    assert saved(tmp_path, 14) == [2, 4, 6, 8, 10, 12, 14]
    assert [bool(files_of(tmp_path, step)) for step in (8, 10, 12, 14)] == [False, False, True, True]
    with opened(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 14
        found = checkpointer.restore(state_of(0))
        assert same(found, state_of(14)) and not same(found, state_of(12))
        assert same(checkpointer.restore(state_of(0), 10), state_of(10))
        assert [checkpointer.save(step, state_of(step)) for step in (10, 11)] == [False, False]
        assert files_of(tmp_path, 14)  # who only looks at a step removes nothing
        assert checkpointer.save(12, state_of(12)) and not files_of(tmp_path, 14)  # the run goes on from step 10
        assert checkpointer.save(20, state_of(20))
        checkpointer.wait()
    with opened(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 20 and same(checkpointer.restore(state_of(0)), state_of(20))
        with pytest.raises(CheckpointError, match="has no step 13; it holds"):
            checkpointer.restore(state_of(0), 13)


@pytest.mark.parametrize("damaged, want", [([14], 12), ([12, 14], 10)], ids=str)
def test_a_damaged_near_step_is_passed_over(damaged, want, tmp_path):
    saved(tmp_path, 14)
    for step in damaged:
        (file,) = files_of(tmp_path, step)
        content = bytearray(file.read_bytes())
        at = content.index(np.asarray(state_of(step)["b"]).tobytes())
        content[at] ^= 1
        file.write_bytes(content)
    with opened(tmp_path) as checkpointer:
        with pytest.warns(UserWarning) as caught:
            assert same(checkpointer.restore(state_of(0)), state_of(want))
        for step, warned in zip(reversed(damaged), caught, strict=True):
            said = rf"a step was passed over, and step {want} restored: step {step}: .*CRC"
            assert re.match(said, str(warned.message))
        assert checkpointer.save(14, state_of(14))


def test_on_another_mesh_the_far_step_counts(tmp_path):
    saved(tmp_path, 14)
    target = state_of(0, mesh_of(4, 2))
    warns = partial(pytest.warns, match="near step 14 was saved .* on another mesh, and is passed over; step 10 is")
    with opened(tmp_path) as checkpointer, warns(UserWarning):
        found = checkpointer.restore(target)
    assert same(found, state_of(10)) and found["w"].sharding == target["w"].sharding
    with opened(tmp_path) as checkpointer:  # started as it was, as the warning says
        assert same(checkpointer.restore(state_of(0)), state_of(14))
    with opened(tmp_path) as checkpointer, warns(UserWarning):
        checkpointer.restore(target)
        assert files_of(tmp_path, 14) and checkpointer.save(11, found, force=True) and not files_of(tmp_path, 14)


def test_what_a_missing_host_would_make_whole_stays(tmp_path):
    saved(tmp_path, 14)
    (layouts,) = {file.parents[2] for file in files_of(tmp_path, 14)}
    of_two = layouts.with_name(layouts.name.replace("-1", "-2"))  # as if another process had held half of it
    layouts.rename(of_two)
    with opened(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match=r"near step 14 is not whole.* 1 of its 2 parts .* processes that are not"):
            assert checkpointer.latest_step() == 10
        with pytest.warns(UserWarning, match="near step 14 is not whole.*start the job again with it"):
            assert same(checkpointer.restore(state_of(0)), state_of(10))
        of_two.rename(layouts)  # the host is back
        assert same(checkpointer.restore(state_of(0)), state_of(14))
        layouts.rename(of_two)
        with pytest.warns(UserWarning, match="near step 14 is not whole"):
            checkpointer.restore(state_of(0))
        assert checkpointer.save(12, state_of(12))
        checkpointer.wait()
        assert [step for step in (10, 12, 14) if files_of(tmp_path, step)] == [12]


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    saved(tmp_path, 8)
    with opened(tmp_path) as checkpointer, pytest.raises(ValueError, match=r"holds near step 8 of .* nothing was rest"):
        checkpointer.save(2, state_of(2))
    with NearCheckpointer(tmp_path / "disk", Checkpointer(tmp_path / "other"), 2) as checkpointer:
        assert checkpointer.latest_step() is None  # another run on the same disk


def test_a_save_holds_the_shards_and_nothing_else(tmp_path):
    """NumPy and Python report what they allocate; the shards themselves lie in JAX's memory."""
    split = NamedSharding(mesh_of(1, 8), P("fsdp"))
    state = {f"w{i}": jax.device_put(np.full((512, 512), i, np.float32), split) for i in range(8)}
    with opened(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        checkpointer.wait()
        tracemalloc.start()
        checkpointer.save(4, state)
        checkpointer.wait()
        peak = tracemalloc.get_traced_memory()[1]
        copies = [np.array(leaf) for leaf in state.values()]
        guard = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = sum(leaf.nbytes for leaf in copies)
    assert peak < 0.2 * size < guard


def test_copies_that_differ_are_damage():
    mesh = mesh_of(2, 4)
    spread = NamedSharding(mesh, P())
    equal = [jax.device_put(np.arange(6.0, dtype=np.float32), device) for device in mesh.devices.flat]
    unlike = [*equal[:-1], equal[-1] + 1]
    whole, differing = (jax.make_array_from_single_device_arrays((6,), spread, copies) for copies in (equal, unlike))
    entry = {"shape": [6], "dtype": "float32", "checksum": checksum_each({"w": whole})["w"]}
    check_sound({"w": entry}, {"w": whole})
    with pytest.raises(ValueError, match="'w': what was read does not have the checksum"):
        check_sound({"w": entry}, {"w": differing})


# ------------------------------------------------------------------------------------------------------ what goes where


def peers_of(layouts, slices, hosts=None, held=None):
    hosts = hosts or [f"host{i}" for i in range(len(layouts))]
    held = held or [[] for _ in layouts]
    rows = zip(layouts, slices, hosts, held, strict=True)
    return [Peer(layout, host, [None, part, host], [], own) for layout, part, host, own in rows]


@pytest.mark.parametrize(
    "layouts, slices, hosts, want",
    [
        ("abcd", [0, 0, 1, 1], None, [2, 3, 0, 1]),
        ("abcd", [0, 1, 0, 1], None, [1, 0, 3, 2]),
        ("abab", [0, 0, 1, 1], None, [None] * 4),  # the other slice holds the same shards
        ("aabb", [0, 0, 1, 1], None, [2, 3, 0, 1]),  # the same slice does
        ("abcd", [0, 0, 0, 1], None, [3, 3, 3, 2]),
        ("abcd", [None] * 4, "xxyy", [2, 3, 0, 1]),  # no slices: other hosts
        ("abc", [0] * 3, "xxx", [1, 2, 0]),  # one host
        ("a", [0], "x", [None]),
        ("aa", [0, 1], None, [None, None]),
    ],
    ids=str,
)
def test_copies_go_where_they_outlive_the_shards(layouts, slices, hosts, want):
    peers = peers_of(layouts, slices, hosts)
    assert buddies(peers) == want


def test_a_step_is_whole_if_its_shards_lie_anywhere():
    name = layouts_name("abcd")

    def peers(*disks):
        held = [[Held("0", name, layout, step) for layout, step in disk] for disk in disks]
        return peers_of("abcd", [0, 0, 1, 1], held=held)

    sound = [[("a", 2), ("c", 2)], [("b", 2), ("d", 2)], [("c", 2), ("a", 2)], [("d", 2), ("b", 2)]]
    assert whole_steps(peers(*sound)) == {name: {2}} and transfers(peers(*sound), 2) == []
    lost = peers(sound[0], [], *sound[2:])
    assert whole_steps(lost) == {name: {2}}
    assert transfers(lost, 2) == [(Held("0", name, "b", 2), 3, 1)]
    assert whole_steps(peers(sound[0], [], sound[2], [])) == {}  # both disks with b and d
    assert whole_steps(peers_of("ab", [0, 1], held=[[Held("0", "x-3", "a", 1)], []])) == {}


def test_whose_shards_are_missing_is_said(tmp_path):
    held = [[Held("0", layouts_name("abcd"), layout, 2)] for layout in "ab"]
    with opened(tmp_path) as checkpointer:
        checkpointer._peers = peers_of("abcd", [0, 0, 1, 1], held=[*held, [], []])
        with pytest.warns(UserWarning, match="step 2 is not whole.* 2 of its 4 .* shards of 'process 2', 'process 3'"):
            checkpointer._warn_of_parts(1)
        checkpointer._warn_of_parts(2)


@pytest.fixture
def receiver(tmp_path):
    made = Receiver(tmp_path / "there", 2, 5.0)
    yield made
    made.close()


def test_a_folder_travels_whole_and_old_ones_go(receiver, tmp_path):
    for step in (1, 2, 3):
        (folder := tmp_path / "here" / str(step)).mkdir(parents=True)
        for name in FILES:
            (folder / name).write_bytes(bytes([step]) * 3_000_000)
        send(folder, receiver.address, f"0/x-1/y/{step}", 5.0)
    there = tmp_path / "there/0/x-1/y"
    assert steps_of(there) == [2, 3] and (there / "3" / FILES[1]).read_bytes() == bytes([3]) * 3_000_000


@pytest.mark.parametrize(
    "to, key, error", [("../x/y/1", None, "is no folder"), ("0/x-1/y/1", "k", "closed the|pipe|reset")]
)
def test_strangers_and_other_places_are_refused(to, key, error, receiver, tmp_path):
    (folder := tmp_path / "1").mkdir()
    for name in FILES:
        (folder / name).write_text("x")
    with pytest.raises(OSError, match=error):
        send(folder, [*receiver.address[:2], key or receiver.address[2]], to, 5.0)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_half_a_folder_is_no_step(receiver, tmp_path):
    host, port, key = receiver.address
    with socket.create_connection((host, port), 5.0) as connection:
        header = {"key": key, "to": "0/x-1/y/1", "sizes": [3, 3]}
        connection.sendall(json.dumps(header).encode() + b"\nabcd")
        connection.shutdown(socket.SHUT_WR)
        assert b"shards.zip ended 2 bytes early" in connection.makefile("rb").read()
    assert [*(tmp_path / "there/0/x-1/y").iterdir()] == []  # nothing stays on a disk that may be full


def test_a_folder_is_on_disk_with_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    with new_folder(tmp_path / "1") as folder:
        (folder / "file").write_text("x")
    assert synced == [path.stat().st_ino for path in (tmp_path / "1/file", tmp_path / "1", tmp_path)]


def test_the_far_directory_is_unlocked_whatever_a_socket_says(tmp_path, monkeypatch):
    def not_connected(*_):
        raise OSError(errno.ENOTCONN, "as macOS says of a socket that listens")

    checkpointer = opened(tmp_path)
    assert checkpointer.latest_step() is None and checkpointer.save(10, {"step": 10})
    monkeypatch.setattr(socket.socket, "shutdown", not_connected)
    checkpointer.close()
    with Checkpointer(tmp_path / "far") as other:
        assert other.save(20, {"step": 20})


# ------------------------------------------------------------------------------------------------------- real processes


def start(mode, folder, rank, port):
    command = [sys.executable, "-m", "tests.near_process", mode, str(folder), str(rank), str(port)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def four(mode, folder):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [start(mode, folder, rank, port) for rank in range(4)]


@pytest.mark.slow
def test_four_processes_restart_without_one_of_their_disks(tmp_path):
    running = four("first", tmp_path)
    try:
        said = [any(line == "saved\n" for line in process.stdout) for process in running]
    finally:
        for process in running:
            process.kill()
        errors = [process.communicate()[1][-3000:] for process in running]
    assert all(said), "\n".join(errors)
    layouts = {kind: [{f.parts[-3] for f in (tmp_path / f"disk{i}" / kind).rglob("shards.zip")} for i in range(4)]
               for kind in ("fsdp", "hsdp")}  # fmt: skip
    assert [len(of_disk) for of_disk in layouts["fsdp"]] == [2] * 4  # its own, and its buddy's
    assert layouts["fsdp"][1] == layouts["fsdp"][3]
    assert [len(of_disk) for of_disk in layouts["hsdp"]] == [1] * 4  # the other slice holds them anyway
    shutil.rmtree(tmp_path / "disk1")
    for old, new in (("disk2", "disk"), ("disk3", "disk2"), ("disk", "disk3")):  # processes 2 and 3 change hosts
        (tmp_path / old).rename(tmp_path / new)
    running = four("again", tmp_path)
    done = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, "\n".join(err[-3000:] for _, err in done)
    for out in (json.loads(out.splitlines()[-1]) for out, _ in done):
        assert out["sums"]
        for kind in ("fsdp", "hsdp"):
            assert out[kind]["newest"] == 14 and out[kind]["equal"] == {"10": False, "12": False, "14": True}
            assert out[kind]["saved"] == [False, True] and out[kind]["after"]
            assert out[kind]["seconds"] < RESTART_S
        print({kind: out[kind]["seconds"] for kind in ("fsdp", "hsdp")})


@pytest.mark.slow
def test_a_save_holds_a_fifth_beside_the_shards():
    """On a CPU a save has views of the shards; on an accelerator it has copies, once more their size."""
    done = subprocess.run([sys.executable, "-m", "tests.near_process", "memory", "1024"], cwd=ROOT, capture_output=True)
    held = json.loads(done.stdout)
    print(held)
    assert 0 <= held["near"] < 0.2 and 0 < held["far"] < 0.2

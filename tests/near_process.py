"""One of four processes with near checkpoints: ``python -m tests.near_process MODE FOLDER RANK PORT``.

first    saves, says so, and stays until it is killed
again    restores what it finds, checks it, saves on
memory   one process alone: what a save holds beside the shards, as a multiple of them: far, near
"""

import json
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

BEGUN = time.perf_counter()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from xlstm_jax.distributed import (  # noqa: E402
    Checkpointer,
    DeviceMeshManager,
    initialize_distributed,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.checkpoint import NearCheckpointer  # noqa: E402
from xlstm_jax.distributed.checkpoint.checksums import SavedSums, checksum_each  # noqa: E402

MESHES = {"fsdp": {"dp": 1, "fsdp": 4}, "hsdp": {"dp": 2, "fsdp": 2}}


def state_of(step, mesh):
    values = np.random.default_rng(step).normal(size=(64, 500)).astype(np.float32)

    def put(values, spec):
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

    split, whole = put(values, P("fsdp")), put(values[0, :3], P())
    return {"split": split, "whole": whole, "position": step, "rng": jax.random.key(step), "host": np.arange(3) + step}


def same(a, b):
    """Whether the shards that this process holds are equal."""

    def parts(x):
        x = jax.random.key_data(x) if hasattr(x, "dtype") and str(x.dtype).startswith("key") else x
        return [np.asarray(s.data) for s in x.addressable_shards] if isinstance(x, jax.Array) else [np.asarray(x)]

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(p, q) for x, y in pairs for p, q in zip(parts(x), parts(y), strict=True))


def near(folder, rank, kind):
    far = Checkpointer(folder / f"far-{kind}", save_interval_steps=10, peer_timeout_s=60)
    # Two slices of two processes.
    return NearCheckpointer(folder / f"disk{rank}" / kind, far, 2, fails_with=f"slice {rank // 2}")


def first(folder, rank):
    for kind, sizes in MESHES.items():
        mesh, checkpointer = DeviceMeshManager.create_device_mesh(sizes), near(folder, rank, kind)
        for step in range(1, 15):
            checkpointer.save(step, state_of(step, mesh))
        checkpointer.wait()
    print("saved", flush=True)
    time.sleep(120)


def sums_in_any_order(rank):
    """Checksums of two saves that go on at once, to two places: the processes finish them in different orders."""
    mesh = DeviceMeshManager.create_device_mesh(MESHES["fsdp"])
    arrays = [{"w": state_of(step, mesh)["split"]} for step in (1, 2)]
    # The first as of a save whose record process 0 alone writes: the others do not wait for its sums.
    saves = [SavedSums(arrays[i], 60, place, all_write=bool(i)) for i, place in enumerate(("far", "near"))]
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for i in (0, 1) if rank % 2 else (1, 0):
            saves[i].begin()
            found[i] = pool.submit(saves[i].result)
            time.sleep(0.5)
        same = [found[i].result() == checksum_each(array) for i, array in enumerate(arrays)]
        return same == [rank == 0, True]


def again(folder, rank):
    out = {"sums": sums_in_any_order(rank)}
    for kind, sizes in MESHES.items():
        mesh = DeviceMeshManager.create_device_mesh(sizes)
        with near(folder, rank, kind) as checkpointer:
            newest = checkpointer.latest_step()
            found = checkpointer.restore(state_of(0, mesh))
            seconds = time.perf_counter() - BEGUN
            equal = {step: same(found, state_of(step, mesh)) for step in (10, 12, 14)}
            saved = checkpointer.save(14, found), checkpointer.save(16, state_of(16, mesh))
            checkpointer.wait()
            after = same(checkpointer.restore(state_of(0, mesh)), state_of(16, mesh))
        out[kind] = {"newest": newest, "equal": equal, "saved": saved, "after": after, "seconds": seconds}
    print(json.dumps(out), flush=True)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(work):
    """By how many bytes the resident memory grows while ``work`` is done."""
    before, done = resident(), threading.Event()
    peak = [before]

    def watch():
        while not done.wait(0.002):
            peak.append(resident())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(peak) - before


def save(checkpointer, step, state):
    checkpointer.save(step, state)
    checkpointer.wait()


def memory(mebibytes):
    simulate_cpu_devices(4)
    sharding = NamedSharding(DeviceMeshManager.create_device_mesh({"fsdp": 4}), P("fsdp"))
    leaf = jax.jit(lambda key: jax.random.normal(key, (8192, 1024)), out_shardings=sharding)  # 32 MiB
    whole, held = {f"w{i}": leaf(jax.random.key(i)) for i in range(mebibytes // 32)}, {}
    jax.block_until_ready(whole)
    for state in ({"w0": whole["w0"]}, whole):  # the first loads code
        with tempfile.TemporaryDirectory() as name:
            far = Checkpointer(Path(name, "far"), save_interval_steps=2)
            with NearCheckpointer(Path(name, "near"), far, 1) as checkpointer:
                for kind, step in (("near", 1), ("far", 2)):
                    grown = growth(partial(save, checkpointer, step, state))
                    held[kind] = grown / sum(leaf.nbytes for leaf in state.values())
    print(json.dumps(held), flush=True)


if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    if mode == "memory":
        memory(int(folder))
    else:
        simulate_cpu_devices(1)
        initialize_distributed(f"127.0.0.1:{rest[1]}", 4, int(rest[0]))
        {"first": first, "again": again}[mode](Path(folder), int(rest[0]))

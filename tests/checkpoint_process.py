"""Processes with checkpoints: ``python -m tests.checkpoint_process MODE FOLDER [RANK PORT]``; prints the results.

two     one of two processes with two devices each: saves, gets damage on one process, restores
writer  saves, prints "saved" and the process id of a forked child, and stays until it is killed; so does the child
ends    ends during a save, without closing the checkpointer
fails   as ends, and the save fails
hangs   as ends, and the rename of the save never returns
"""

import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import DeviceMeshManager, export_safetensors, import_safetensors, simulate_cpu_devices
from xlstm_jax.distributed.checkpoint.checkpointer import Checkpointer, CheckpointError

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])


def state_of(step, mesh):
    values = np.random.default_rng(step).normal(size=(4, 5000)).astype(np.float32)

    def put(values, spec):
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

    split, whole = put(values, P("fsdp")), put(values[0, :3], P())
    return {"split": split, "whole": whole, "position": step, "rng": jax.random.key(step), "host": np.arange(3) + step}


def same(a, b):
    """Whether the local shards of two trees are equal."""

    def parts(x):
        x = jax.random.key_data(x) if hasattr(x, "dtype") and str(x.dtype).startswith("key") else x
        return [np.asarray(s.data) for s in x.addressable_shards] if isinstance(x, jax.Array) else [np.asarray(x)]

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(p, q) for x, y in pairs for p, q in zip(parts(x), parts(y), strict=True))


def damage_what_only_process_1_reads(step):
    """Truncates the files written by process 1; process 0 can still read its rows."""
    for path in (FOLDER / str(step) / "state" / "ocdbt.process_1" / "d").iterdir():
        if path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:100])


def two():
    rank, port = int(sys.argv[3]), sys.argv[4]
    simulate_cpu_devices(2)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank, initialization_timeout=60)
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 4})
    out = {}
    with Checkpointer(FOLDER, async_timeout_s=30) as checkpointer:
        out["none yet"] = checkpointer.latest_step()
        for step in (1, 2):
            checkpointer.save(step, state_of(step, mesh))
        checkpointer.wait()
        target = state_of(0, mesh)
        out["restored"] = same(checkpointer.restore(target), state_of(2, mesh))
        try:
            checkpointer.save(3, {"position": 10 * rank, "w": target["split"]})
        except ValueError as error:
            out["differs"] = str(error)
        if rank == 0:
            damage_what_only_process_1_reads(2)
        jax.experimental.multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out["fell back"] = same(checkpointer.restore(target), state_of(1, mesh))
            caught_by_restore = len(caught)
            out["parameters fell back"] = same(checkpointer.restore_params(target, path=""), state_of(1, mesh))
        warned = [str(w.message) for w in caught[caught_by_restore:]]
        assert any("is damaged" in text for text in warned), f"restore_params warned of no damage, but of {warned}"
        del caught[caught_by_restore:]
        out["warned"] = [str(w.message) for w in caught if "is damaged" in str(w.message)]
        try:
            checkpointer.restore(target, 2)
        except CheckpointError as error:
            out["explicit"] = str(error)
        out["saved again"] = checkpointer.save(2, state_of(2, mesh))
    with Checkpointer(FOLDER) as checkpointer:
        out["newest"] = checkpointer.latest_step()
        out["sound again"] = same(checkpointer.restore(target), state_of(2, mesh))
    other = FOLDER.parent / "other"
    if rank == 0:
        other.mkdir()
        (FOLDER.parent / "link").symlink_to("other")
    jax.experimental.multihost_utils.sync_global_devices("linked")
    with Checkpointer(FOLDER.parent / "link" if rank else other, async_timeout_s=30) as checkpointer:
        checkpointer.save(1, state_of(1, mesh))
        out["by a link"] = same(checkpointer.restore(target), state_of(1, mesh))
    params = {name: target[name] for name in ("split", "whole")}
    export_safetensors(params, FOLDER.parent / "exported")
    out["imported"] = same(import_safetensors(FOLDER.parent / "exported", params), params)
    try:
        export_safetensors(params, FOLDER.parent / "exported")
    except FileExistsError as error:
        out["exported twice"] = str(error)
    print(json.dumps(out), flush=True)


def writer():
    simulate_cpu_devices(1)
    checkpointer = Checkpointer(FOLDER)
    checkpointer.save(1, {"w": np.arange(3)})
    checkpointer.wait()
    child = os.fork()
    if child == 0:
        os.closerange(1, 3)  # so that the parent's end is visible
        time.sleep(120)
        os._exit(0)
    print("saved", child, flush=True)
    time.sleep(120)


def ends():
    simulate_cpu_devices(1)
    checkpointer = Checkpointer(FOLDER, async_timeout_s=1 if MODE == "hangs" else 20)
    checkpointer.save(1, {"w": np.arange(3)})
    checkpointer.wait()
    if MODE == "fails":  # no file may be larger than 10 kB, as if the disk were full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    if MODE == "hangs":
        os.rename = lambda *_, **__: time.sleep(600)
    rename, at_the_end = os.rename, threading.Event()
    if MODE == "ends":  # the commit of the step takes a second from the end of the program
        os.rename = lambda *args, **options: (at_the_end.wait(60), time.sleep(1), rename(*args, **options))[2]
    assert checkpointer.save(2, {"w": np.arange(200_000)}), "save skipped step 2"
    print("saving at the end:", checkpointer._backend.is_saving(), flush=True)
    at_the_end.set()


if __name__ == "__main__":
    {"two": two, "writer": writer, "ends": ends, "fails": ends, "hangs": ends}[MODE]()

"""Script of a process that fails or ends: ``python -m tests.leaving_process MODE RANK COUNT PORT FOLDER LAUNCHED``.

The failing process is process 0 if MODE ends in "first", else the last process. Lines on stdout contain the time of
each event, and the seconds since LAUNCHED, the time at which the process was started.
"""

import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    LoopGuard,
    assert_same_everywhere,
    initialize_distributed,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.processes.exit import _KEY, WAIT_MS
from xlstm_jax.private_names import job

MODE, RANK, COUNT, PORT, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
LAUNCHED = float(sys.argv[6])
WRONG = 0 if MODE.endswith("first") else COUNT - 1


def say(*words):
    print(*words, flush=True)


def say_when(word):
    say(word, now := time.time(), now - LAUNCHED)


def mean_of_all(mesh):
    total = jax.jit(lambda: jnp.arange(8.0).sum(), out_shardings=NamedSharding(mesh, P()))
    return float(total())


def steps(mesh):
    with LoopGuard(step_timeout_s=60) as guard:
        for step in range(1, 20):
            guard.step_done(step, {"loss": mean_of_all(mesh)})
            say("STEP", step)
            time.sleep(0.1)


def save_that_hangs():
    """Saves twice, the second time with a limit of two seconds, in which every rename of process 0 hangs."""
    split = NamedSharding(DeviceMeshManager.create_device_mesh({"data": -1}), P("data"))
    state = {"w": jax.jit(lambda: jnp.arange(8.0), out_shardings=split)()}
    with Checkpointer(FOLDER) as checkpointer:
        checkpointer.save(1, state)
    checkpointer = Checkpointer(FOLDER, async_timeout_s=2)
    if RANK == 0:
        os.rename = lambda *_, **__: time.sleep(600)
    checkpointer.save(2, state)
    say_when("SAVED")
    checkpointer.wait()


simulate_cpu_devices(1)
initialize_distributed(f"127.0.0.1:{PORT}", COUNT, RANK)
assert_same_everywhere({"mode": MODE})
assert jax.device_count() == COUNT, (
    f"{jax.device_count()} devices instead of {COUNT}"
)  # JAX waits for all processes before starting devices
say_when("JOINED")
if MODE.startswith("timeout"):
    if RANK == WRONG:
        time.sleep(600)
    Checkpointer(FOLDER, peer_timeout_s=1).latest_step()
elif MODE.startswith("exception"):
    if RANK == WRONG:
        raise OSError("the data are gone")
    if "both" in MODE:
        # The listening thread of this process receives the reason of the other process now, too.
        job.client.blocking_key_value_get(f"{_KEY}/{RANK}", WAIT_MS)
        time.sleep(0.1)
        raise OSError("my data are gone, too")
    time.sleep(600)
elif MODE.startswith("guard"):
    with LoopGuard(step_timeout_s=60):
        if RANK == WRONG:
            raise OSError("the data are gone")
        time.sleep(600)
elif MODE == "interrupt":
    time.sleep(600)
elif MODE == "save":
    save_that_hangs()
elif MODE == "pause":
    steps(DeviceMeshManager.create_device_mesh({"data": -1}))
elif MODE == "shutdown":
    jax.distributed.shutdown()
if MODE != "shutdown":
    np.testing.assert_equal(jax.process_count(), COUNT)

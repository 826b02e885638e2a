"""Process of a run with two devices each: ``python -m tests.resilience_process MODE RANK PROCESSES PORT``.

Trains a small model, writes a line to stdout for each step, and fails according to MODE. FAULT lines contain the time.
"""

import ctypes
import os
import sys
import time
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import (
    DeviceMeshManager,
    LoopGuard,
    check_replicas,
    make_train_step,
    simulate_cpu_devices,
    skip_nonfinite,
)

MODE, RANK, PROCESSES, PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
STEPS, FAULT_STEP, STEP_TIMEOUT_S = 2000, 5, 3.0
LAST = RANK == PROCESSES - 1


def say(*words):
    print(*words, flush=True)


def go_wrong(step):
    """Causes the fault of MODE in the last process, after the fifth step."""
    if not LAST or step != FAULT_STEP:
        return
    say("FAULT", time.time())
    if MODE in ("stuck", "stuck, full pipe"):
        time.sleep(600)
    elif MODE in ("stuck in C", "stuck in C, full pipe"):
        ctypes.PyDLL(None).sleep(600)  # holds the lock of the interpreter
    elif MODE == "exception":
        raise OSError("the data are gone")
    elif MODE == "sys.exit":
        sys.exit(7)


def fill_stderr():
    """Replaces stderr by a full pipe without a reader."""
    _, writer = os.pipe()
    os.dup2(writer, 2)
    os.set_blocking(2, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                os.write(2, b"x" * size)
    os.set_blocking(2, True)


def place(values, spec):
    return jax.make_array_from_callback(values.shape, NamedSharding(MESH, spec), lambda index: values[index])


def loss_fn(params, apply_fn, batch, rng):
    del apply_fn, rng
    return jnp.mean((batch @ params["w"]) ** 2)


def train(guard):
    """Trains with bad batches in the third step and, for MODE "nonfinite", from the sixth step on."""
    tx = skip_nonfinite(optax.sgd(0.01))
    params = {"w": place(np.ones(3, np.float32), P())}
    # With the shardings that a step returns: the second step must not compile anew, for which it has no time.
    init = jax.jit(tx.init, out_shardings=NamedSharding(MESH, P()))
    state = TrainState(step=place(np.int32(0), P()), apply_fn=None, params=params, tx=tx, opt_state=init(params))
    step_fn, key = (
        make_train_step(loss_fn, MESH, "data", allow_replicated=True),
        place(np.asarray(jax.random.PRNGKey(0)), P()),
    )
    for step in range(1, STEPS + 1):
        batch = np.ones((8, 3), np.float32)
        if step == 3 or (MODE == "nonfinite" and step > 5):
            batch[-1] = np.nan
        state, metrics = step_fn(state, place(batch, P("data")), key)
        guard.step_done(step, metrics)
        if MODE == "paused" and step == FAULT_STEP:
            with guard.paused():
                time.sleep(STEP_TIMEOUT_S + 1.3)
            say("PAUSED")
            return step, state
        go_wrong(step)
        if guard.should_stop(step):
            say("SAVES", step, int(state.step))
            return step, state
        say("STEP", step)
        time.sleep(0.02)
    raise AssertionError("the fault did not occur")


def replicas():
    """Checks a leaf whose replica on the last device differs; each process prints the error."""
    last = jax.devices()[-1]

    def copy(device, bad):
        return jax.device_put(np.arange(6, dtype=np.float32) + (device == last and bad), device)

    def leaf(bad):
        copies = [copy(device, bad) for device in jax.local_devices()]
        return jax.make_array_from_single_device_arrays((6,), NamedSharding(MESH, P()), copies)

    check_replicas({"good": leaf(False), "split": place(np.arange(8), P("data"))})
    try:
        check_replicas({"good": leaf(False), "layer": {"bias": leaf(True)}})
    except RuntimeError as error:
        say("ERROR", error)


if PROCESSES > 1 or MODE == "distributed":
    simulate_cpu_devices(2)
    jax.distributed.initialize(
        f"127.0.0.1:{PORT}",
        PROCESSES,
        RANK,
        coordinator_bind_address=f"127.0.0.1:{PORT}",
        cluster_detection_method="deactivate",
        initialization_timeout=60,
    )
else:
    simulate_cpu_devices(2)
MESH = DeviceMeshManager.create_device_mesh({"data": -1})

if MODE == "replicas":
    replicas()
elif MODE == "unguarded":
    say("STEP 1")
    time.sleep(60)
else:
    if MODE.endswith("full pipe"):
        fill_stderr()
    has_short_steps = MODE.startswith(("stuck", "paused"))
    with LoopGuard(step_timeout_s=STEP_TIMEOUT_S if has_short_steps else 60, max_skipped_in_a_row=2) as guard:
        stopped, state = train(guard)
    say("STOPPED", stopped, int(state.step), float(state.params["w"][0]), os.getpid())

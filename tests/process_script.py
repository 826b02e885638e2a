"""Script of one of several processes: ``python -m tests.process_script PART RANK COUNT PORT LAUNCHED``.

Prints a JSON object at the end: for every step, by name, the result or error and the duration; and under "start_s" the
seconds that the process took from LAUNCHED, the time at which it was started, until its first line.
"""

import functools
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import (
    Checkpointer,
    DeviceMeshManager,
    assert_same_everywhere,
    create_train_state,
    initialize_distributed,
    make_train_step,
    shard_batch,
    shard_module_params,
    simulate_cpu_devices,
)
from xlstm_jax.distributed.checkpoint.orbax_backend import OrbaxBackend
from xlstm_jax.distributed.device_mesh import batches
from xlstm_jax.distributed.training.checks import calls
from xlstm_jax.private_names import job

PART, RANK, COUNT, PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ADDRESS = f"127.0.0.1:{PORT}"
OUT = {"start_s": time.time() - float(sys.argv[5])}


def step(name, fn, *args, **kwargs):
    begun = time.perf_counter()
    try:
        result = fn(*args, **kwargs)
    except (ValueError, TypeError, TimeoutError, RuntimeError) as error:
        result = f"{type(error).__name__}: {error}"
    OUT[name] = {"result": result, "seconds": time.perf_counter() - begun}
    return result


def let_others_come(name):
    """Lets ``come_after`` of the same name return in the other processes."""
    job.client.key_value_set(f"tests/{name}", "done")


def come_after(name):
    """Waits until another process has called ``let_others_come``."""
    job.client.blocking_key_value_get(f"tests/{name}", 240_000)


def without_1(name, fn):
    """Runs a step in which process 1 takes part only after process 0 has waited in vain."""
    if RANK == 1:
        come_after(name)
    step(name, fn)
    if RANK == 0:
        let_others_come(name)


def whole(mesh, x):
    """Returns the unsharded global array and the local shards."""
    copy = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(x)
    return {
        "all": np.asarray(copy.addressable_data(0)).tolist(),
        "here": [np.asarray(shard.data).tolist() for shard in x.addressable_shards],
    }


def listening_addresses():
    """Returns the hexadecimal local addresses, IPv4 and IPv6, on which a process listens at PORT."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return [line[1] for line in lines if line[1].endswith(f":{int(PORT):04X}") and line[3] == "0A"]


def own_code(text):
    """Imports a module with the source ``text``."""
    path = Path(tempfile.mkdtemp()) / "model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agreement():
    """Runs the agreement checks before a device is started."""
    config = {"model": {"width": 64, "act": jnp.tanh}, "lr": 1e-3, "data": np.arange(1000)}
    step("same", assert_same_everywhere, config)
    step("seed", assert_same_everywhere, {**config, "seed": 17 + (RANK == COUNT - 2)}, "seed and configuration")
    step("array", assert_same_everywhere, {**config, "data": np.arange(1000) + (np.arange(1000) == 900) * RANK})
    step("absent", assert_same_everywhere, config | ({"dropout": 0.1} if RANK else {}))
    step("code", assert_same_everywhere, {"code": own_code(f"SCALE = {1 + RANK}")})
    with jax.default_prng_impl("rbg" if RANK else "threefry2x32"):
        step("jax.config", assert_same_everywhere, config)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math" * RANK
    with mock.patch.dict(os.environ, {"XLA_FLAGS": flags}):
        step("XLA_FLAGS", assert_same_everywhere, config)
    step("order", assert_same_everywhere, 1, "plan" if RANK else "seed")
    for _ in range(20):
        step("same again", assert_same_everywhere, config)


def two_meshes_in_turn(mesh, batch):
    """Counts the comparisons in two rounds that alternate between a new mesh and ``mesh``, which has seen the batch."""
    other, OUT["comparisons"] = DeviceMeshManager.create_data_parallel_mesh(), {}
    for i, name in enumerate(["first round", "second round"]):
        with mock.patch.object(batches, "compare", wraps=batches.compare) as compare:
            step(f"other mesh {i}", lambda: whole(other, shard_batch(batch, other, "data")["x"])["all"])
            step(f"first mesh {i}", lambda: whole(mesh, shard_batch(batch, mesh, ("dp", "fsdp"))["x"])["all"])
        OUT["comparisons"][name] = compare.call_count


def batches_of_two():
    rows = np.arange(8.0).reshape(4, 2) + 100 * RANK
    dp = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2})
    OUT["devices"] = [[d.process_index for d in row] for row in dp.devices]
    OUT["info"] = DeviceMeshManager.get_mesh_info(dp)
    OUT["info of one axis"] = DeviceMeshManager.get_mesh_info(DeviceMeshManager.create_data_parallel_mesh())
    step("too few", DeviceMeshManager.create_data_parallel_mesh, 2)

    both = ("dp", "fsdp")
    batch = shard_batch({"x": rows, "n": np.int32(7)}, dp, both)
    OUT["rows"] = whole(dp, batch["x"])
    OUT["scalar"] = int(batch["n"])
    shard_batch({"x": rows, "n": 7}, dp, both)  # a Python number has another type, which is compared once
    with mock.patch.object(batches, "compare", wraps=batches.compare) as compare:
        OUT["again"] = [bool(shard_batch({"x": rows, "n": 7}, dp, both)) for _ in range(3)]
    OUT["comparisons of the same shape"] = compare.call_count
    two_meshes_in_turn(dp, {"x": rows, "n": 7})
    padded, weight = shard_batch({"x": rows[:3]}, dp, both, pad=True)
    OUT["padded"], OUT["weight"] = whole(dp, padded["x"])["all"], whole(dp, weight)["all"]
    padded, weight = shard_batch({"x": rows[: 3 * RANK]}, dp, both, pad=4)
    OUT["uneven"], OUT["uneven weight"] = whole(dp, padded["x"])["all"], whole(dp, weight)["all"]
    step("does not divide", shard_batch, {"x": rows[:3]}, dp, both)
    step("different rows", shard_batch, {"x": [rows[:2], rows.repeat(2, 0)][RANK]}, dp, both)
    step("different dtype", shard_batch, {"x": rows.astype([np.float32, np.int32][RANK])}, dp, both)
    step("different scalar", shard_batch, {"x": rows, "n": RANK}, dp, both)
    # The batch is split over "fsdp", which stays within a process: both processes pass the same rows.
    OUT["shared"] = whole(dp, shard_batch({"x": rows - 100 * RANK}, dp, "fsdp")["x"])
    step("shared, but different", shard_batch, {"x": rows[:2]}, dp, "fsdp")
    # Both processes pass full rows: first the tokens of a row are on both, then each process has different rows.
    for name, shape in {"tokens of both": {"cp": 2, "dp": 2}, "tokens of one": {"dp": 2, "cp": 2}}.items():
        mesh = DeviceMeshManager.create_device_mesh(shape)
        whole_rows = np.arange(8).reshape(2, 4) + 100 * RANK * (name == "tokens of one")
        OUT[name] = whole(mesh, shard_batch({"x": whole_rows}, mesh, batch_spec=P("dp", "cp"))["x"])
    if RANK == 0:  # a new shape here alone; process 1 goes on
        step("new shape here alone", shard_batch, {"x": rows[:2]}, dp, both, timeout_s=1)


def two():
    simulate_cpu_devices(2)
    step("join", initialize_distributed, ADDRESS, COUNT, RANK)
    step("join again", initialize_distributed, ADDRESS, COUNT, RANK)
    step("join without arguments", initialize_distributed)
    step("join as another", initialize_distributed, ADDRESS, COUNT, 1 - RANK)
    OUT["listening"] = listening_addresses()
    agreement()
    without_1("late", lambda: assert_same_everywhere({}, "plan", timeout_s=0.5))
    batches_of_two()


def four():
    simulate_cpu_devices(3)
    initialize_distributed(ADDRESS, COUNT, RANK)
    step("seed", assert_same_everywhere, {"seed": 17 + (RANK == 2)})
    step("two differ", assert_same_everywhere, {"seed": 17 + (RANK == 2), "lr": 0.1 * (1 + (RANK == 3))})
    for shape in ({"dp": 2, "fsdp": 6}, {"dp": 3, "fsdp": 4}):
        mesh = DeviceMeshManager.create_device_mesh(shape)
        OUT[str(shape)] = [[d.process_index for d in row] for row in mesh.devices]
    mesh = DeviceMeshManager.create_hsdp_mesh(2, 6)
    rows = np.arange(2.0)[:, None] + 10 * (RANK // 2)  # processes 0 and 1 have the same rows, 2 and 3 as well
    OUT["rows"] = whole(mesh, shard_batch({"x": rows}, mesh, "dp")["x"])
    step("shared, but different", lambda: bool(shard_batch({"x": rows.repeat(2, 1) + (RANK == 3)}, mesh, "dp")))


def restores():
    """Runs restores in which process 1 of two processes makes a mistake or does not take part."""
    simulate_cpu_devices(1)
    initialize_distributed(ADDRESS, COUNT, RANK)
    mesh = DeviceMeshManager.create_device_mesh({"fsdp": 2})
    split = jax.jit(lambda: jnp.arange(4.0), out_shardings=NamedSharding(mesh, P("fsdp")))()
    like = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=split.sharding), "n": 0}
    folder = tempfile.gettempdir() + f"/restores-{PORT}"
    with Checkpointer(folder) as checkpointer:
        for number in (1, 2):
            checkpointer.save(number, {"w": split, "n": number})
        checkpointer.wait()
        step("fits", lambda: checkpointer.restore(like)["n"])
        step("extra leaf", checkpointer.restore, like | ({"b": np.zeros(1)} if RANK else {}))
        step("no leaf", checkpointer.restore, {} if RANK else like)
        step("text", checkpointer.restore, like | {"n": "many" if RANK else 0})
        step("other step", checkpointer.restore, like, 1 + RANK)
        step("other method", checkpointer.latest_step if RANK else lambda: checkpointer.restore(like))
    with Checkpointer(folder, peer_timeout_s=2) as checkpointer:
        # Process 1 is alive, and stuck until process 0 has waited in vain.
        without_1("latest_step without it", checkpointer.latest_step)
        stuck = mock.patch.object(OrbaxBackend, "read_arrays", lambda *_: come_after("restore"))
        with stuck if RANK else nullcontext():
            step("restore without it", checkpointer.restore, like)
        if RANK == 0:
            let_others_come("restore")
        multihost_utils.sync_global_devices("both are here again")
        step("fits again", lambda: checkpointer.restore(like)["n"])
        without_1("save without it", lambda: checkpointer.save(3, {"w": split, "n": 3}))
    if RANK == 0:
        shutil.rmtree(folder)


class Net(nn.Module):
    axis: str

    @nn.compact
    def __call__(self, x):
        return shard_module_params(nn.Dense, self.axis, min_weight_size=2)(1)(x)[:, 0]


def mean_loss(params, apply_fn, batch, rng):
    return jnp.mean((apply_fn({"params": params}, batch["x"])) ** 2) * batch.get("scale", 1.0)


def first_batches(mesh, axis, cases):
    """Runs the first batch of a new train step for each case; records the error or warnings."""
    make = functools.partial(
        create_train_state, Net(axis), optax.sgd(0.1), mesh, batch_axes=axis, allow_replicated=True
    )
    step("seeds", lambda: bool(make(jax.random.key(RANK), jnp.ones((12, 3)))))
    for name, batch in cases.items():
        state = make(jax.random.key(0), jnp.ones((12, 3)))
        train_step = make_train_step(mean_loss, mesh, axis, allow_replicated=True)

        def run(state=state, batch=batch, train_step=train_step):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state, _ = train_step(state, batch, jax.random.key(1))
                with mock.patch.object(calls, "compare_batches") as again:
                    train_step(state, batch, jax.random.key(1))
            return [str(w.message) for w in caught if "equal rows" in str(w.message)] + ["again"] * again.call_count

        step(name, run)


def batches_in_training():
    simulate_cpu_devices(1)
    initialize_distributed(ADDRESS, COUNT, RANK)
    (batches_of_four if COUNT == 4 else batches_of_own_rows)()


def batches_of_own_rows():
    mesh, rows = DeviceMeshManager.create_device_mesh({"fsdp": 2}), np.arange(18.0, dtype=np.float32).reshape(6, 3)

    def put(rows):
        return {"x": jax.make_array_from_process_local_data(NamedSharding(mesh, P("fsdp")), rows, (12, 3))}

    both = np.concatenate([rows, rows + 100])
    cases = {"own rows": put(rows + 100 * RANK), "equal rows": put(rows), "ones": put(np.ones_like(rows))}
    cases |= {
        "scalar": put(rows + RANK) | {"scale": np.float32(RANK)},
        "raw": {"x": both},
        "raw, other values": {"x": both + RANK},
    }
    cases |= {
        "raw, other shape": {"x": both[: 12 - 2 * RANK]},
        "raw, other dtype": {"x": both.astype([float, int][RANK])},
    }
    first_batches(mesh, "fsdp", cases)


def batches_of_four():
    """Runs cases in which processes 0 and 1 hold the same rows, and processes 2 and 3 as well."""
    mesh, rows = DeviceMeshManager.create_device_mesh({"dp": 2, "tp": 2}), np.arange(18.0).reshape(6, 3)

    def put(rows):
        return {"x": jax.make_array_from_process_local_data(NamedSharding(mesh, P("dp")), np.float32(rows), (12, 3))}

    cases = {"own rows": put(rows + RANK // 2), "equal rows": put(rows), "unlike copies": put(rows + RANK)}
    first_batches(mesh, "dp", cases)


def slurm():
    """Joins from the environment of srun, without arguments."""
    simulate_cpu_devices(1)
    initialize_distributed()
    OUT["joined"] = [jax.process_index(), jax.process_count(), jax.device_count()]
    OUT["listening"] = listening_addresses()


def join():
    simulate_cpu_devices(1)
    step("join", initialize_distributed, ADDRESS, COUNT, RANK, initialization_timeout_s=3)


if __name__ == "__main__":
    try:
        {"two": two, "four": four, "slurm": slurm, "join": join, "restores": restores, "train": batches_in_training}[
            PART
        ]()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without waiting for the others
    print(json.dumps(OUT))

"""Script of one of two processes with two devices each: ``python -m tests.metric_process ID PORT``.

Prints the computed metrics.
"""

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import DeviceMeshManager, simulate_cpu_devices
from xlstm_jax.distributed import metrics as m

RANK, PORT = int(sys.argv[1]), sys.argv[2]
simulate_cpu_devices(2)
jax.distributed.initialize(f"127.0.0.1:{PORT}", num_processes=2, process_id=RANK)

VALUES = np.arange(1, 13, dtype=np.float32) ** 2  # 3 for each device
WEIGHTS = np.array([1, 2, 0, 0, 0, 0, 1, 1, 3, 0, 0, 5], np.float32)  # the second device has nothing


def functions(mesh, values, weights):
    out = {}
    for check_vma in (True, False):

        def local(v, w):
            metrics = {"loss": v.sum(), "peak": v.max()}
            mean = m.reduce_mean_collective({"loss": (v * w).sum() / w.sum()}, weight=w.sum())
            return m.reduce_custom_collective(metrics, {"loss": "sum", "peak": "max"}), mean, m.all_gather(metrics)

        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("batch"), out_specs=P(), check_vma=check_vma))
        custom, mean, gathered = run(values, weights)
        lists = m.collect_from_devices(gathered)
        out[f"shard_map {check_vma}"] = [custom["loss"], custom["peak"], mean["loss"], *lists["loss"]]
    reduced = jax.jit(m.reduce_custom, out_shardings=NamedSharding(mesh, P()))({"mean": values})
    out["jit"] = [reduced["mean"]]
    mine = slice(6 * RANK, 6 * RANK + 6)

    @partial(jax.pmap, axis_name="batch")
    def pmapped(v, w):
        return m.DistributedMetrics().reduce_mean({"mean": (v * w).sum() / w.sum()}, weight=w.sum())["mean"]

    means = pmapped(VALUES[mine].reshape(2, 3), WEIGHTS[mine].reshape(2, 3))
    out["pmap"] = [shard.data[0] for shard in means.addressable_shards]
    return out


def states(mesh, values, weights):
    metric = m.Compose({"mean": m.WeightedMean(), "n": m.Sum(jnp.int32), "max": m.Max()})
    split = P("batch")

    def step(local, v, w):
        return metric.update(local, mean=(v, w), n=(w > 0), max=(v, w))

    update = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split), donate_argnums=0)
    local = update(update(metric.empty("batch", mesh), values, weights), values, weights)
    got, _ = m.make_log_step(metric, mesh, "batch")(local)
    stateful = m.StatefulMetric(metric, mesh)
    stateful.update(mean=(values, weights), n=(weights > 0), max=(values, weights))
    for _ in range(RANK + 1):  # local updates, in a different number per process
        stateful.update(mean=VALUES[:2], n=1, max=-1.0)
    stateful.sync()
    own = stateful.compute()
    return {"state": [got[k] for k in ("mean", "n", "max")], "stateful": [own[k] for k in ("mean", "n", "max")]}


def accumulators(mesh, values):
    total, largest = m.MetricAccumulator(jnp.float32(100)), m.MetricAccumulator(-jnp.inf, "max")
    for i in range(3 + 4 * RANK):  # uneven: an update of one process does not wait for the other
        total.update(1 + RANK)
        largest.update(-5 - i - RANK)
    total.update(jax.jit(lambda v: v.sum(), out_shardings=NamedSharding(mesh, P()))(values))  # the same everywhere
    saved = total.state_dict()
    total.reset()
    total.load_state_dict(saved)
    total.sync()
    largest.sync()
    count = m.MetricAccumulator(jnp.zeros((2,), jnp.int32))
    per_device = jax.jit(
        lambda v: v.reshape(4, 3)[:, :2].astype(jnp.int32), out_shardings=NamedSharding(mesh, P("batch"))
    )
    count.update(per_device(values))
    count.sync()
    return {"accumulators": [total.value, largest.value, *count.value.addressable_data(0)]}


def main():
    mesh = DeviceMeshManager.create_device_mesh({"batch": 4})
    place = NamedSharding(mesh, P("batch"))
    values, weights = (jax.make_array_from_callback((12,), place, lambda i, x=x: x[i]) for x in (VALUES, WEIGHTS))
    out = functions(mesh, values, weights) | states(mesh, values, weights) | accumulators(mesh, values)
    print(json.dumps({name: [float(x) for x in numbers] for name, numbers in out.items()}))


if __name__ == "__main__":
    main()

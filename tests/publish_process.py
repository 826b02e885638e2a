"""A process that publishes weights: ``python -m tests.publish_process MODE FOLDER RANK COUNT PORT [ARGUMENT]``.

versions  publishes two versions of leaves of every kind and a delta, and prints what was received here
refused   publishes a version; then a second one, of which process 1 cannot write a file; then a third one
killed    publishes a version; then a second one, while process 1 is killed at its write number ARGUMENT
"""

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import DeviceMeshManager, initialize_distributed, simulate_cpu_devices
from xlstm_jax.distributed.checkpoint import Stored, apply_publication, publish
from xlstm_jax.distributed.checkpoint.publication import publish as publishing
from xlstm_jax.distributed.checkpoint.publication import writers
from xlstm_jax.distributed.data_parallel.extensions.padding import ZeroPadding
from xlstm_jax.distributed.data_parallel.leaf import Sharded

MODE, FOLDER, RANK, COUNT, PORT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
ARGUMENT = int(sys.argv[6]) if len(sys.argv) > 6 else 0

NAMES = {
    r"blocks/(\w+)": Stored(r"model.layers.{layer}.\1.weight", "i o -> o i"),
    r"odd_blocks/(\w+)": r"odd_layers.{layer}.\1",
    r"(.+)": r"\1",
}
# By path: shape, dtype, and the axes of each dim; None for a NumPy array, "own" for one on a device of the process.
LEAVES = {
    "rows": ((64, 6), "float32", P(("dp", "fsdp"))),
    "columns": ((6, 64), "bfloat16", P(None, ("dp", "fsdp"))),
    "both": ((8, 16), "float16", P("dp", "fsdp")),
    "copied": ((16, 3), "float32", P("fsdp")),
    "replicated": ((5,), "int32", P()),
    "scalar": ((), "float32", P()),
    "empty": ((0, 4), "float32", P()),
    "numpy": ((7,), "float64", None),
    "own": ((7,), "float32", "own"),
    "blocks/up": ((3, 8, 32), "bfloat16", P(None, None, ("dp", "fsdp"))),
    "blocks/down": ((8, 16, 3), "float32", P(("dp", "fsdp"))),
    "odd": ((37, 3), "float32", P(("dp", "fsdp"))),
    "blocks/odd": ((3, 13, 5), "bfloat16", P(None, ("dp", "fsdp"))),
    "odd_blocks/odd": ((3, 5, 2), "float32", P(("dp", "fsdp"))),
}
STORED = {"odd": (40, 3), "blocks/odd": (3, 16, 5), "odd_blocks/odd": (4, 5, 2)}  # with zeros at the ends of dims


def values_of(seed):
    """The leaves as NumPy arrays, by path."""
    rng = np.random.default_rng(seed)
    return {
        path: np.asarray(100 * rng.normal(size=shape)).astype(jnp.dtype(dtype))
        for path, (shape, dtype, _) in LEAVES.items()
    }


def tensors_of(seed):
    """The tensors that a reader must find."""
    tensors = values_of(seed)
    for name in ("up", "down", "odd"):
        for layer, values in enumerate(tensors.pop(f"blocks/{name}")):
            tensors[f"model.layers.{layer}.{name}.weight"] = values.T
    for layer, values in enumerate(tensors.pop("odd_blocks/odd")):
        tensors[f"odd_layers.{layer}.odd"] = values
    return tensors


def padded(values, spec, stored, mesh):
    sizes = tuple(size if size != of_stored else None for size, of_stored in zip(values.shape, stored, strict=True))
    values = np.pad(values, [(0, of_stored - size) for size, of_stored in zip(values.shape, stored, strict=True)])
    names = (*spec, *[None] * (values.ndim - len(spec)))
    return Sharded(put(values, spec, mesh), names, store=ZeroPadding(sizes))


def put(values, spec, mesh):
    if spec is None:
        return values
    if spec == "own":
        return jax.device_put(values, jax.local_devices()[0])
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def params_of(seed, mesh):
    tree = {}
    for path, values in values_of(seed).items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        spec = LEAVES[path][2]
        place[name] = padded(values, spec, STORED[path], mesh) if path in STORED else put(values, spec, mesh)
    return tree


def versions(mesh):
    received, sent, received_in_rounds, all_to_all = [], [], publishing.received_in_rounds, writers._all_to_all

    def noted(sources):
        for name, array in received_in_rounds(sources):
            received.append(name)
            yield name, array

    def noted_all_to_all(parts, longest):
        sent.append(longest)
        return all_to_all(parts, longest)

    publishing.received_in_rounds, writers._all_to_all = noted, noted_all_to_all
    numbers = [publish(params_of(seed, mesh), FOLDER, names=NAMES, max_file_bytes=500) for seed in (1, 2)]
    received_full = list(received)
    numbers.append(publish(params_of(1, mesh), FOLDER, names=NAMES, since=numbers[-1]))
    of_processes = writers._mesh_of_processes()
    by_sender = NamedSharding(of_processes, P(None, "process", "device"))
    rows = jax.ShapeDtypeStruct((COUNT, COUNT, 4 // COUNT, 8), np.uint8, sharding=by_sender)
    text = writers._to_writers(of_processes).lower(rows).compile().as_text()
    collectives = re.findall(r"\b(all-\w+-?\w*|collective-\w+)\(", text)
    return {"versions": numbers, "received": received_full, "sent": sent, "collectives": collectives}


def killed(mesh):
    publish(params_of(1, mesh), FOLDER, names=NAMES, max_file_bytes=500)
    write, count = publishing.write_tensors, 0

    def killed_at(*arguments):
        nonlocal count
        if RANK == 1 and count == ARGUMENT:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return write(*arguments)

    publishing.write_tensors = killed_at
    print("first", flush=True)
    publish(params_of(2, mesh), FOLDER, names=NAMES, max_file_bytes=500)


def refused(mesh):
    versions, errors = [publish(params_of(1, mesh), FOLDER, names=NAMES, max_file_bytes=500)], []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if RANK == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        publish(params_of(2, mesh), FOLDER, names=NAMES)
    except OSError as error:
        errors.append(f"{error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    read, wanted = apply_publication({}, FOLDER).arrays, tensors_of(1)
    is_before = read.keys() == wanted.keys() and all(read[name].tobytes() == x.tobytes() for name, x in wanted.items())
    versions.append(publish(params_of(2, mesh), FOLDER, names=NAMES, max_file_bytes=500))
    return {"versions": versions, "errors": errors, "version before": is_before}


def main():
    simulate_cpu_devices(4 // COUNT)
    if COUNT > 1:
        initialize_distributed(f"127.0.0.1:{PORT}", COUNT, RANK)
    mesh = DeviceMeshManager.create_device_mesh({"dp": 2, "fsdp": 2})
    print(json.dumps({"versions": versions, "refused": refused, "killed": killed}[MODE](mesh)), flush=True)


if __name__ == "__main__":
    main()

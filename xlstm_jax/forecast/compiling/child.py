"""The child process that compiles an exported step for a topology of TPUs or GPUs; ``compile`` runs this file.

The file imports no other part of the library, so the process starts in a second. Only the child loads the compiler
(libtpu or the CUDA plugin), so the user's process keeps its backend, environment and memory. Both exchange files in a
folder:

  request.json   topology, mesh, options       result.json   coordinates, memory, error, seconds, versions
  step.bin       StableHLO                     dump/         XLA's texts: the scheduled program, buffers, live ranges
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MEMORY = ("argument", "output", "alias", "temp", "generated_code")
# A program that does not fit is compiled all the same, so that the report can list what fills the memory.
OF_PLATFORM: dict[str, dict[str, Any]] = {"tpu": {"xla_tpu_no_crash_on_oom": True}, "cuda": {}}


def make_mesh(axes: dict[str, int], axis_types: Sequence[str], devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of these axes over ``devices``, in the device order that ``jax.make_mesh`` chooses in a run.

    Where JAX finds no order for a torus, the devices are placed in the order of their coordinates, if they fill a box
    whose dims are the axis sizes (sizes of 1 left out).

    Args:
      axes: sizes by axis name, outermost first; the product is the number of devices.
      axis_types: names of ``jax.sharding.AxisType``, one for each axis.
      devices: devices of the topology.
    Raises:
      NotImplementedError: of JAX, if the devices fill no such box either.
    """
    types = tuple(AxisType[name] for name in axis_types)
    try:
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)
    except NotImplementedError:  # for (2, 2, 4) on 2 x 2 x 4 JAX puts the 4 on 2 x 2 chips and has no 2 left
        if (box := _box(devices)) is None or [n for n in axes.values() if n > 1] != [n for n in box if n > 1]:
            raise
    ordered = np.array(sorted(devices, key=_place), dtype=object)
    return Mesh(ordered.reshape(tuple(axes.values())), tuple(axes), axis_types=types)


def _box(devices: Sequence[Any]) -> tuple[int, ...] | None:
    """Returns the dims of the box of torus coordinates that TPU devices fill; None if the box has gaps.

    A coordinate is (position of the chip along each torus dim, number of the device on the chip). The box begins at 0
    along each dim and ends at the largest coordinate: 8 chips of two devices may fill (2, 2, 2, 2).
    """
    box = tuple(1 + max(column) for column in zip(*map(_place, devices), strict=True))
    return box if math.prod(box) == len(devices) else None


def _place(device: Any) -> tuple[int, ...]:
    return (*device.coords, device.core_on_chip)


def compile_step(folder: Path, request: dict[str, Any], mesh: Mesh) -> dict[str, int | None]:
    """Compiles the exported step ``step.bin`` of a folder for the devices of a mesh, and returns memory sizes in bytes.

    Keys of the result: argument, output, alias, temp, generated_code, and total_allocation, which is None in older
    releases of jaxlib. XLA's texts are written to the subfolder ``dump``.

    Args:
      folder: folder with ``step.bin``, the serialized export of the step.
      request: content of ``request.json``: topology, compiler options, indices of donated arguments, host memory kind.
      mesh: mesh of the step.
    """
    step = export.deserialize(bytearray((folder / "step.bin").read_bytes()))
    # A step without shardings runs on one device: the device of the mesh, not the CPU of this process.
    alone = NamedSharding(mesh, PartitionSpec()) if mesh.size == 1 else None
    args = []
    for aval, sharding in zip(step.in_avals, step.in_shardings_jax(mesh), strict=True):
        where: Any = sharding or alone
        if where is not None and aval.memory_space == jax.memory.Space.Host:
            # The abstract mesh keeps the memory kind; absent GPUs list no memories, and JAX would drop the kind.
            where = NamedSharding(where.mesh.abstract_mesh, where.spec, memory_kind=request["host_memory"])
        args.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where))
    # An export keeps no donation, so the function around it donates.
    jitted = jax.jit(step.call, donate_argnums=request["donated"], out_shardings=step.out_shardings_jax(mesh))
    options = {"xla_dump_to": str(folder / "dump")} | OF_PLATFORM[request["topology"]["platform"]] | request["options"]
    stats = jitted.lower(*args).compile(compiler_options=options).memory_analysis()
    sizes = {name: getattr(stats, f"{name}_size_in_bytes") for name in MEMORY}
    return sizes | {"total_allocation": getattr(stats, "total_allocation_bytes", None)}  # newer releases only


def main(folder: Path) -> None:
    """Compiles the step of ``folder`` by its file ``request.json``, and writes the outcome to its file ``result.json``.

    The outcome has the versions of packages, device kind, coordinates of the devices (TPUs), memory sizes, seconds, and
    the text of an error, if any. No error of the compilation is raised: the parent process raises it.
    """
    request = json.loads((folder / "request.json").read_text())
    versions = {name: version(name) for name in request["packages"]}
    result: dict[str, Any] = {"versions": versions, "memory": None, "error": None}
    start = time.monotonic()
    try:
        devices: Sequence[Any] = topologies.get_topology_desc(**request["topology"]).devices
        mesh = make_mesh(request["axes"], request["axis_types"], devices)
        result["device_kind"] = devices[0].device_kind
        result["coords"] = [list(getattr(device, "coords", ())) for device in mesh.devices.flat]  # TPUs only
        result["memory"] = compile_step(folder, request, mesh)
    except Exception as error:  # the parent raises any error
        result["error"] = f"{type(error).__name__}: {error}"
    result["seconds"] = time.monotonic() - start
    (folder / "result.json").write_text(json.dumps(result))


def end_with_parent() -> None:
    """Waits until the parent process ends for any reason, and then ends this process; runs in a thread.

    The parent keeps the stdin of this process open and writes nothing, so a read returns when the parent ends.
    """
    os.read(0, 1)  # not sys.stdin: a daemon thread may not hold the lock of sys.stdin when Python exits
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]))

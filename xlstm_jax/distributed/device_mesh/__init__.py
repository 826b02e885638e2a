"""The device mesh: named axes over the devices at hand, and batches laid out over them.

The last axis lies over the devices that are closest to each other, the first axes cross the slow links:

  two hosts of four    create_device_mesh({"dp": 2, "fsdp": 4})    dp crosses the hosts, fsdp stays within
                       create_device_mesh({"fsdp": 8})             fsdp crosses, between its halves

Meshes made here have axes of type ``Auto``. (``jax.make_mesh`` makes explicit ones by default, with which arrays carry
their sharding in their type; ``shard_map`` then refuses a batch that was not placed beforehand.)

In a run of several processes each process makes the same mesh, and ``shard_batch`` puts the rows that each of them has
read together into one global array.
"""

from xlstm_jax.distributed.device_mesh.batches import abstract_batch, shard_batch
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, check_no_explicit_mesh, mesh_axes
from xlstm_jax.distributed.device_mesh.data_parallel_methods import DataParallel
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.device_mesh.zigzag import from_zigzag, to_zigzag
from xlstm_jax.distributed.processes.devices import (  # where older code has them
    available_devices,
    simulate_cpu_devices,
)

__all__ = [
    "DataParallel",
    "DeviceMeshManager",
    "abstract_batch",
    "auto_mesh",
    "available_devices",
    "check_no_explicit_mesh",
    "from_zigzag",
    "mesh_axes",
    "shard_batch",
    "simulate_cpu_devices",
    "to_zigzag",
]

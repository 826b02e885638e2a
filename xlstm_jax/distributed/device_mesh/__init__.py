"""Device meshes: named axes over the available devices, and batches placed on them.

The last axis connects the devices that are closest to each other; the first axes cross the slow links:

  two hosts of four    create_device_mesh({"dp": 2, "fsdp": 4})    dp crosses the hosts, fsdp stays within
                       create_device_mesh({"fsdp": 8})             fsdp crosses the hosts, between its two halves

Meshes made here have axes of type ``Auto``. ``jax.make_mesh`` makes explicit axes by default: then types of arrays
contain shardings. Every function accepts both kinds of axes, also under ``jax.set_mesh``; see
``xlstm_jax.explicit_axes``.

In a run of several processes each process makes the same mesh, and ``shard_batch`` combines the rows of each process
into a global array.
"""

from typing import TYPE_CHECKING

from xlstm_jax.deferred import names_when_used
from xlstm_jax.distributed.device_mesh.batch_layout import auto_mesh, mesh_axes
from xlstm_jax.distributed.device_mesh.batches import abstract_batch, shard_batch
from xlstm_jax.distributed.device_mesh.meshes import DeviceMeshManager
from xlstm_jax.distributed.device_mesh.zigzag import from_zigzag, to_zigzag
from xlstm_jax.distributed.processes.devices import (  # where older code has them
    available_devices,
    simulate_cpu_devices,
)

if TYPE_CHECKING:
    from xlstm_jax.distributed.device_mesh.data_parallel_methods import DataParallel
else:
    __getattr__ = names_when_used(__name__, {"DataParallel": "xlstm_jax.distributed.device_mesh.data_parallel_methods"})

create_fsdp_mesh = DeviceMeshManager.create_fsdp_mesh  # a short name, because most trainings need only this mesh

__all__ = [
    "DataParallel",
    "DeviceMeshManager",
    "abstract_batch",
    "auto_mesh",
    "available_devices",
    "create_fsdp_mesh",
    "from_zigzag",
    "mesh_axes",
    "shard_batch",
    "simulate_cpu_devices",
    "to_zigzag",
]

"""Bitwise comparison of the replicas of each shard.

JAX does not check replicas. If the sharding of a leaf declares equal values on several devices and the values differ,
each device continues with its local values, a read on the host returns the values of the first device, and training
drifts. Here devices compute checksums, and processes compare the checksums:

  each device       local shards of leaves -> checksums [leaves, 2]; one program, no collective
  each process      exchanges the checksums of its devices with the other processes: some bytes per leaf
  for each leaf     devices with the same shard, according to the sharding of the leaf, must have equal checksums
"""

from collections import defaultdict
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checksums import checksum
from xlstm_jax.distributed.data_parallel.trees import check_alive, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key
from xlstm_jax.distributed.processes.collective_errors import allgather_text
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.distributed.resilience.disagreement import DisagreementError, named_devices
from xlstm_jax.explicit_axes import outside_set_mesh

_DEVICE = "device"


class ReplicaError(DisagreementError):
    """Error: replicas of a leaf differ between devices; ``devices`` are the devices outside of the largest equal group.

    >>> options = {"in_specs": (), "out_specs": PartitionSpec(), "check_vma": False}
    >>> unequal = jax.shard_map(lambda: jax.lax.axis_index("dp"), mesh=mesh, **options)()
    >>> try:
    ...     check_replicas({"w": unequal})
    ... except ReplicaError as error:
    ...     str(error)[:64]
    '1 of 1 leaves are declared equal on several devices and are not:'
    """


class _Copied(NamedTuple):
    """Leaf with replicated shards; ``holders`` has one list of devices for each shard on several devices."""

    path: str
    value: jax.Array
    holders: list[list[Device]]


@outside_set_mesh
def check_replicas(tree: PyTree) -> None:
    """Raises a ``ReplicaError`` if replicas of a shard differ in any bit. (0.0 and -0.0 differ; equal NaN bits agree.)

    A replicated leaf has a replica on every device; a sharded leaf has replicas along the axes that do not split it.
    Every process must call this function with the same tree; either every process raises, or no process raises.

    Args:
      tree: arrays, boxed or not, such as a ``TrainState``; leaves that are not a ``jax.Array`` are skipped.
    Raises:
      ReplicaError: names the leaves, and groups the devices of each leaf by equal values.
      TimeoutError: a process did not call this function within ``PEER_TIMEOUT_S``, 600 s; names the process.

    >>> check_replicas({"w": jax.device_put(np.ones(3), NamedSharding(mesh, PartitionSpec()))})
    """
    check_alive(tree, "check_replicas")
    copied = [copy for path, leaf in sharded_leaves(tree) for copy in _copied(path, leaf.value)]
    if not copied:
        return
    sums = _on_all_processes(_local_table([leaf.value for leaf in copied]))
    wrong = [(leaf, alike) for index, leaf in enumerate(copied) if (alike := _groups(leaf, sums, index))]
    if wrong:
        raise _error(wrong, len(copied))


def check_local_replicas(path: str, value: Any) -> None:
    """Raises a ``ReplicaError`` if the devices of this process hold different bits of a replicated array.

    Reads the local shards and runs no program, so a single process may call this function. Entries that are NaN on
    every device agree, whatever their bits. Does nothing for a value that is not a ``jax.Array``, is split over
    devices, or is donated. ``path`` names the array in the error.

    >>> check_local_replicas("loss", jax.device_put(1.0, NamedSharding(mesh, PartitionSpec())))
    """
    if not isinstance(value, jax.Array) or value.is_deleted() or not value.sharding.is_fully_replicated:
        return
    groups = defaultdict(list)
    for shard in value.addressable_shards:
        held = np.asarray(shard.data)
        nan = held != held
        groups[np.where(nan, 0, held).tobytes() + nan.tobytes()].append(shard.device)
    if len(groups) > 1:
        raise _error([(_Copied(path, value, []), sorted(groups.values(), key=len, reverse=True))], 1)


def _error(wrong: list[tuple[_Copied, list[list[Device]]]], count: int) -> ReplicaError:
    """Returns the error for leaves whose replicas differ.

    Args:
      wrong: each such leaf, with groups of devices that hold equal values, the largest group first. ``devices`` of the
        error are the devices of the further groups.
      count: number of leaves that were compared.
    """
    return ReplicaError(
        f"{len(wrong)} of {count} leaves are declared equal on several devices and are not",
        [device for _, (_, *others) in wrong for devices in others for device in devices],
        {leaf.path: _disagreement(leaf, alike) for leaf, alike in wrong},
        "Look for a seed or batch that differs by process, for a loss, gradients or statistics that were not averaged "
        "under check_vma=False, and for a faulty device; restore an earlier checkpoint.",
    )


def _copied(path: str, value: Any) -> list[_Copied]:
    """Returns ``[leaf]`` if several devices hold the same shard of the array ``value``; else [].

    The leaf is a ``_Copied``: the path, the array, and for each shard on several devices the list of these devices.
    Devices of other processes count, too. The result is also [] for an empty array and for a value that is no
    ``jax.Array``.
    """
    if not isinstance(value, jax.Array) or value.size == 0:
        return []
    # By the sharding instead of the addressable shards: replicas may be on devices of other processes.
    holders = defaultdict(list)
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        holders[tuple(dim.indices(size) for dim, size in zip(index, value.shape, strict=True))].append(device)
    several = [devices for devices in holders.values() if len(devices) > 1]
    return [_Copied(path, value, several)] if several else []


def _local_table(values: list[jax.Array]) -> np.ndarray:
    """Returns checksums of the arrays in ``values`` on each local device: uint32 [local device, array, 2].

    Each checksum, two words, is of the bits of a device's shard; no values are exchanged. Rows are in the order of
    ``jax.local_devices()``, with rows of 0 at the end up to the largest number of local devices in any process. The
    checksum of an array that a device does not hold is 0.
    """
    # One program per set of devices: the arrays of a program must be on the same devices.
    groups = defaultdict(list)
    for index, value in enumerate(values):
        groups[tuple(sorted(value.sharding.device_set, key=attrgetter("id")))].append(index)
    local = jax.local_devices()
    # The number of rows is equal in every process, as the gather of the tables requires.
    most = max(len(jax.local_devices(process_index=process)) for process in range(jax.process_count()))
    table = np.zeros((most, len(values), 2), np.uint32)
    for devices, indices in groups.items():
        if set(devices) & set(local):
            mesh = Mesh(np.array(devices), (_DEVICE,), axis_types=(AxisType.Auto,))
            for shard in _checksums(mesh, [_side_by_side(values[index], mesh) for index in indices]).addressable_shards:
                table[local.index(shard.device), indices] = shard.data[0]
    return table


def _side_by_side(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Combines the shards of ``value`` into a global array on ``mesh``, split over its devices along dim 0.

    ``mesh`` has a single axis. The shard of each device stays in place, and is the device's shard of the result:
    replicas [2, 3] on 8 devices become [16, 3]. Scalars become [devices], PRNG keys become key data.
    """
    # Declared as split: the compiler may assume that the replicas of a replicated array are equal, which this module
    # must check.
    buffers = [shard.data for shard in value.addressable_shards]
    if is_prng_key(value):
        buffers = [jax.random.key_data(buffer) for buffer in buffers]
    buffers = [buffer if buffer.ndim else buffer[None] for buffer in buffers]
    shape = (mesh.size * buffers[0].shape[0], *buffers[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec(_DEVICE)), buffers)


@partial(jax.jit, static_argnums=0)
def _checksums(mesh: Mesh, values: list[jax.Array]) -> jax.Array:
    """Returns checksums of each device's shards of ``values``: uint32 [device, array, 2], split along dim 0.

    ``values`` are global arrays on ``mesh``, split along dim 0, so that the shards are replicas (see
    ``_side_by_side``). The program has no collectives.
    """

    def on_device(values: list[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(value) for value in values])[None]

    split = PartitionSpec(_DEVICE)
    return jax.shard_map(on_device, mesh=mesh, in_specs=(split,), out_specs=split)(values)


def _on_all_processes(table: np.ndarray) -> dict[Device, np.ndarray]:
    """Gathers the tables of every process; returns the row of each device of the job, uint32 [leaf, 2], by device.

    ``table`` has the checksums of the local devices from ``_local_table``, uint32 [local device, leaf, 2]: a checksum
    is two words. Every process must call this function; raises a ``TimeoutError`` if a process does not.
    """
    # An exchange with a time limit, because the next line would wait forever for a missing process.
    allgather_text("", "check_replicas")
    tables = multihost_utils.process_allgather(table) if jax.process_count() > 1 else table[None]
    return {
        device: row
        for process, rows in enumerate(tables)
        for device, row in zip(jax.local_devices(process_index=process), rows, strict=False)  # rows are padded
    }


def _groups(leaf: _Copied, sums: dict[Device, np.ndarray], index: int) -> list[list[Device]]:
    """Returns groups of devices with equal replicas, largest group first, for the first shard whose replicas differ.

    Returns [] if the replicas of every shard are equal.

    Args:
      leaf: the leaf, with the devices that hold each shard.
      sums: checksums [leaf, 2] of the devices, by device.
      index: position of the leaf in ``sums``.
    """
    for devices in leaf.holders:
        groups = defaultdict(list)
        for device in devices:
            groups[tuple(sums[device][index])].append(device)
        if len(groups) > 1:
            return sorted(groups.values(), key=len, reverse=True)
    return []


def _disagreement(leaf: _Copied, alike: list[list[Device]]) -> str:
    differing_devices = " and another on device ".join(map(named_devices, alike[:3]))
    rest = f" ({len(alike)} different values in all)" if len(alike) > 3 else ""
    return (
        f"'{leaf.path}', {leaf.value.dtype}{list(leaf.value.shape)}, is one thing on device {differing_devices}{rest}"
    )

"""Whether the copies of what is declared replicated are copies: equal in every bit.

JAX takes a program's word for it. A sharding that says "replicated" over arrays that differ is believed: each device
goes on with its own, a read on the host returns the first, and training drifts. Here every device computes checksums of
what it holds, nothing else leaves it, and the host compares:

  on each device     leaves it holds copies of -> a table [leaves, 2] of checksums, one program, no collective
  on each process    its devices' tables, exchanged with those of the other processes: some bytes for each leaf
  for each leaf      devices that hold the same slice, by the leaf's sharding, must have the same checksum
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.checkpoint.checksums import checksum
from xlstm_jax.distributed.data_parallel.boxes import leaf_value, leaves_with_path
from xlstm_jax.distributed.data_parallel.communication import is_prng_key

NAMED_AT_MOST = 5
_DEVICE = "device"


class ReplicaError(RuntimeError):
    """Devices that should hold the same values do not."""


class _Copied(NamedTuple):
    """A leaf of which several devices hold the same slice: ``holders`` are these, a list for each slice."""

    path: str
    value: jax.Array
    holders: list[list[jax.Device]]


def check_replicas(tree: PyTree) -> None:
    """Compares all copies that devices hold of the same values, in every bit (0.0 is not -0.0, a NaN is itself).

    Replicated leaves, and slices of which several devices hold the same, as over "dp" of a dp x fsdp mesh. What is held
    once is not looked at. Every process calls it, with the same tree; all of them raise, or none.

    Args:
      tree: arrays, in boxes or not, as a ``TrainState``; leaves that are no ``jax.Array`` are passed over.
    Raises:
      ReplicaError: names the leaves, and which devices of which processes agree with each other.
    """
    copied = [leaf for path, leaf in leaves_with_path(tree) for leaf in _copied(path, leaf_value(leaf))]
    if not copied:
        return
    sums = _on_all_processes(_local_table([leaf.value for leaf in copied]))
    wrong = [text for index, leaf in enumerate(copied) for text in _disagreement(leaf, sums, index)]
    if wrong:
        listed = "; ".join(wrong[:NAMED_AT_MOST]) + ("; ..." if len(wrong) > NAMED_AT_MOST else "")
        raise ReplicaError(
            f"{len(wrong)} of {len(copied)} leaves are declared equal on several devices and are not: {listed}. Usual "
            "causes: a seed or batch that differs by process; a value that every device computed for itself (gradients "
            "or batch statistics nobody averaged) but out_specs declare equal, under check_vma=False; a faulty device. "
            "Restore a checkpoint from before."
        )


def _copied(path: str, value: Any) -> list[_Copied]:
    """The leaf, if several devices hold the same of it."""
    if not isinstance(value, jax.Array) or value.size == 0:
        return []
    holders = {}
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        slices = tuple(part.indices(size) for part, size in zip(index, value.shape, strict=True))
        holders.setdefault(slices, []).append(device)
    several = [devices for devices in holders.values() if len(devices) > 1]
    return [_Copied(path, value, several)] if several else []


def _local_table(values: list[jax.Array]) -> np.ndarray:
    """The checksums of what this process's devices hold: uint32 [local device, leaf, 2], 0 where one holds nothing."""
    groups = {}
    for index, value in enumerate(values):
        devices = tuple(sorted(value.sharding.device_set, key=lambda device: device.id))
        groups.setdefault(devices, []).append(index)
    local = jax.local_devices()
    most = max(len(jax.local_devices(process_index=process)) for process in range(jax.process_count()))
    table = np.zeros((most, len(values), 2), np.uint32)
    for devices, indices in groups.items():
        if set(devices) & set(local):
            for shard in _checksums(devices, [values[index] for index in indices]).addressable_shards:
                table[local.index(shard.device), indices] = shard.data[0]
    return table


def _checksums(devices: tuple[jax.Device, ...], values: list[jax.Array]) -> jax.Array:
    """What each of the devices holds, as uint32 [device, leaf, 2]: one program, which communicates nothing."""
    mesh = Mesh(np.array(devices), (_DEVICE,), axis_types=(AxisType.Auto,))
    return _checksums_on(mesh, [_side_by_side(value, mesh) for value in values])


def _side_by_side(value: jax.Array, mesh: Mesh) -> jax.Array:
    """The same buffers as parts of one array, whatever they are to each other by the leaf's own sharding."""
    pieces = [shard.data for shard in value.addressable_shards]
    if is_prng_key(value):
        pieces = [jax.random.key_data(piece) for piece in pieces]
    pieces = [piece if piece.ndim else piece[None] for piece in pieces]
    shape = (mesh.size * pieces[0].shape[0], *pieces[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec(_DEVICE)), pieces)


@partial(jax.jit, static_argnums=0)
def _checksums_on(mesh: Mesh, values: list[jax.Array]) -> jax.Array:
    def on_device(values):
        return jnp.stack([checksum(value) for value in values])[None]

    split = PartitionSpec(_DEVICE)
    return jax.shard_map(on_device, mesh=mesh, in_specs=(split,), out_specs=split)(values)


def _on_all_processes(table: np.ndarray) -> dict[jax.Device, np.ndarray]:
    """Each device's row of the table, those of other processes included."""
    tables = multihost_utils.process_allgather(table) if jax.process_count() > 1 else table[None]
    return {
        device: rows[place]
        for process, rows in enumerate(tables)
        for place, device in enumerate(jax.local_devices(process_index=process))
    }


def _disagreement(leaf: _Copied, sums: dict[jax.Device, np.ndarray], index: int) -> list[str]:
    """For the first slice whose copies differ, a text that says who holds what."""
    for devices in leaf.holders:
        groups = {}
        for device in devices:
            groups.setdefault(tuple(sums[device][index]), []).append(device)
        if len(groups) > 1:
            return [f"'{leaf.path}', {leaf.value.dtype}{list(leaf.value.shape)}, is {_who(list(groups.values()))}"]
    return []


def _who(groups: list[list[jax.Device]]) -> str:
    """One thing on most devices, another on the rest: ``one thing on devices 0, 1, 2 and another on device 3``."""

    def names(devices):
        return ", ".join(f"{device.id} of process {device.process_index}" for device in devices)

    groups = sorted(groups, key=len, reverse=True)
    return "one thing on device " + " and another on device ".join(names(group) for group in groups)

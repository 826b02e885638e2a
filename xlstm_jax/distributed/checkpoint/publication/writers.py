"""Sends each tensor to the process that writes the tensor, and to no other process.

  tensors    a b c d e        shards on the devices of every process
  writers    0: a e   1: b c d                                            by bytes, see ``assigned``
  round 1    process 0 receives the parts of a, process 1 the parts of b  one all-to-all over the processes
  round 2    process 0 receives the parts of e, process 1 the parts of c
  round 3    process 1 receives the parts of d

In a round each process copies the bytes of its shards into one row per writer. The rows are padded to the longest row
and split over the devices of the process, so that every device and link carries an equal share. An all-to-all (the
resharding of a global array from the dim of senders to the dim of writers) then sends each row to its writer. A shard
that the writer already has is not sent; so replicated tensors cause no traffic.

Besides received tensors, a host holds the rows to send in a round (at most the size of a tensor) until the rows are on
the devices, and then the rows received (at most the size of a tensor).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.distributed.checkpoint.safetensors_io import to_host
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.explicit_axes import outside_set_mesh

Index: TypeAlias = tuple[slice, ...]


def assigned(nbytes: Mapping[str, int], processes: int) -> list[list[str]]:
    """Assigns tensors to processes: the largest tensor first, each to the process with the fewest bytes.

    Args:
      nbytes: bytes of each tensor, by name.
      processes: number of processes.
    Returns:
      The names of the tensors of each process.

    >>> assigned({"a": 1, "b": 4, "c": 2, "d": 2}, 2)
    [['b', 'a'], ['c', 'd']]
    """
    loads = [0] * processes
    assignment: list[list[str]] = [[] for _ in range(processes)]
    for name in sorted(nbytes, key=lambda name: (-nbytes[name], name)):
        process = loads.index(min(loads))
        loads[process] += nbytes[name]
        assignment[process].append(name)
    return assignment


class Source(NamedTuple):
    """Values to send: a leaf, or a layer of a stacked leaf."""

    leaf: Any
    layer: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        shape = np.shape(self.leaf)
        return shape if self.layer is None else shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.leaf.dtype)


class _Piece(NamedTuple):
    """Part of a source, on the device that sends the part or on a device of the writer."""

    place: Index  # in the source
    device: Device


@outside_set_mesh  # shards are arrays on a single device, and the all-to-all runs on a mesh of processes
def received(sources: Sequence[Source | None]) -> np.ndarray | None:
    """Returns the unsharded values of this process's source, by an all-to-all; None if this process has no source.

    A source is a leaf, or a layer of a leaf. Every process must call this function, with the same sources.

    Args:
      sources: for each process, in order of the process index, the source that the process receives, or None.
    """
    me, processes = jax.process_index(), range(jax.process_count())
    pieces = [_pieces(source, writer) for writer, source in enumerate(sources)]

    def sent(sender: int, writer: int) -> list[_Piece]:
        return [piece for piece in pieces[writer] if piece.device.process_index == sender != writer]

    lengths = [[_nbytes(sources[writer], sent(sender, writer)) for writer in processes] for sender in processes]
    rows: list[np.ndarray] = []
    if longest := max(map(max, lengths)):
        rows = _all_to_all([_as_bytes(source, sent(me, writer)) for writer, source in enumerate(sources)], longest)

    mine = sources[me]
    if mine is None:
        return None
    if not isinstance(mine.leaf, jax.Array):
        return np.asarray(mine.leaf if mine.layer is None else mine.leaf[mine.layer], mine.dtype)
    tensor = np.empty(mine.shape, mine.dtype)
    for sender in processes:
        start, arrived = 0, sent(sender, me)
        # One row at a time, because the rows of all senders together are as large as the tensor.
        row = np.concatenate([part[sender] for part in rows]) if arrived else None
        for piece in arrived:
            assert row is not None
            end = start + _nbytes(mine, [piece])
            tensor[piece.place] = row[start:end].view(mine.dtype).reshape(tensor[piece.place].shape)
            start = end
    for piece in pieces[me]:
        if piece.device.process_index == me:
            tensor[piece.place] = _values(mine, piece)
    return tensor


def _pieces(source: Source | None, writer: int) -> list[_Piece]:
    """Returns pieces that together cover a source (a leaf, or a layer of a leaf) once.

    A piece is a place in the source, and the device that sends the values. If several devices hold the values, a device
    of the process ``writer``, which receives the source, is preferred. Pieces and their order are equal in every
    process, except for a fully addressable array: only the process ``writer`` has pieces of such an array. Returns []
    for no source, and for a leaf that is no ``jax.Array``.
    """
    if source is None or not isinstance(source.leaf, jax.Array):
        return []
    # Every process has a full copy of a fully addressable array on its devices, and does not see the devices of copies
    # in other processes.
    local = source.leaf.is_fully_addressable
    if local and writer != jax.process_index():
        return []
    shape = source.leaf.shape
    holders: dict[tuple[tuple[int, int], ...], list[Device]] = {}
    devices: Mapping[Device, Index] = source.leaf.sharding.devices_indices_map(shape)
    for device, index in sorted(devices.items(), key=lambda item: item[0].id):
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True))
        if source.layer is not None:
            if not bounds[0][0] <= source.layer < bounds[0][1]:
                continue
            bounds = bounds[1:]
        holders.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, copies in holders.items():
        near = [device for device in copies if local or device.process_index == writer]
        # Different writers receive from different copies, so that the devices with copies share the work.
        device = near[0] if near else copies[writer % len(copies)]
        pieces.append(_Piece(tuple(slice(*bound) for bound in bounds), device))
    return pieces


def _nbytes(source: Source | None, pieces: Sequence[_Piece]) -> int:
    sizes = [math.prod(dim.stop - dim.start for dim in piece.place) for piece in pieces]
    return sum(sizes) * source.dtype.itemsize if source is not None else 0


def _values(source: Source, piece: _Piece) -> np.ndarray:
    shard = next(shard for shard in source.leaf.addressable_shards if shard.device == piece.device)
    if source.layer is None:
        return to_host(shard.data)
    return to_host(shard.data[source.layer - (shard.index[0].start or 0)])


def _as_bytes(source: Source | None, pieces: Sequence[_Piece]) -> Iterator[np.ndarray]:
    """Yields the bytes of each piece of the source, uint8 [bytes]; copies one piece at a time to the host.

    The pieces must be on devices of this process.
    """
    for piece in pieces:
        assert source is not None
        yield np.ascontiguousarray(_values(source, piece)).reshape(-1).view(np.uint8)


def _all_to_all(parts: Sequence[Iterable[np.ndarray]], longest: int) -> list[np.ndarray]:
    """Sends ``parts[w]``, uint8 arrays of at most ``longest`` bytes in total, to process w, for every process w.

    Every process must call this function, with the same ``longest``. Returns an array of received bytes, uint8 [sender,
    bytes], for each device of this process. Concatenating these arrays along dim 1 results in a row for each sender:
    the bytes that the sender has sent, in order, padded with zeros.
    """
    mesh = _mesh_of_processes()
    processes, devices = mesh.devices.shape
    length = -(-longest // devices)
    rows = np.zeros((processes, devices * length), np.uint8)
    for row, some in zip(rows, parts, strict=True):
        start = 0
        for part in some:
            row[start : start + part.size] = part
            start += part.size
    rows = rows.reshape(processes, 1, devices, length)
    here = mesh.devices[jax.process_index()]
    on_devices = [jax.device_put(rows[:, :, i : i + 1], device) for i, device in enumerate(here)]
    by_sender = NamedSharding(mesh, PartitionSpec(None, "process", "device"))
    sent = jax.make_array_from_single_device_arrays((processes, processes, devices, length), by_sender, on_devices)
    # The host's copy is freed before the rows of other processes arrive.
    jax.block_until_ready(sent)
    del rows, on_devices
    got = _to_writers(mesh)(sent)
    shards = {shard.device: shard.data for shard in got.addressable_shards}
    return [to_host(shards[device])[0, :, 0] for device in here]


@lru_cache(maxsize=1)
def _mesh_of_processes() -> Mesh:
    """Returns a mesh [process, device] with all processes and an equal number of devices from each.

    The number is the smallest number of devices of a process; the devices of a process with the lowest ids are taken.
    """
    devices: list[list[Device]] = [[] for _ in range(jax.process_count())]
    for device in sorted(jax.devices(), key=lambda device: device.id):
        devices[device.process_index].append(device)
    count = min(map(len, devices))
    return Mesh(np.array([some[:count] for some in devices]), ("process", "device"))


@lru_cache(maxsize=1)
def _to_writers(mesh: Mesh) -> Any:
    def to_writers(rows: jax.Array) -> jax.Array:
        return rows

    return jax.jit(to_writers, out_shardings=NamedSharding(mesh, PartitionSpec("process", None, "device")))


def received_in_rounds(sources: Sequence[Sequence[tuple[str, Source]]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, unsharded values) of each source that this process receives, in order.

    A source is a leaf, or a layer of a leaf. In round i each process receives its source i. Every process must exhaust
    the iterator.

    Args:
      sources: for each process, in order of the process index, the names and sources that the process receives.
    """
    me = jax.process_index()
    for i in range(max(map(len, sources))):
        in_round = [some[i][1] if i < len(some) else None for some in sources]
        array = received(in_round)
        if array is not None:
            yield sources[me][i][0], array

"""The device mesh: named axes over the devices at hand, and batches laid out over them.

The last axis lies over the devices that are closest to each other, the first axes cross the slow links:

  two hosts of four    create_device_mesh({"dp": 2, "fsdp": 4})    dp crosses the hosts, fsdp stays within
                       create_device_mesh({"fsdp": 8})             fsdp crosses, between its halves

Meshes made here have axes of type ``Auto``. (``jax.make_mesh`` makes explicit ones by default, with which arrays carry
their sharding in their type; ``shard_map`` then refuses a batch that was not placed beforehand.)

In a run of several processes each process makes the same mesh, and ``shard_batch`` puts the rows that each of them has
read together into one global array.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.agreement import assert_same_everywhere, compare, entries_of
from xlstm_jax.distributed.mesh_shapes import filled_sizes
from xlstm_jax.distributed.partitioning import as_axis_names, leaves_with_path, map_leaves_with_path
from xlstm_jax.distributed.processes import available_devices, initialize_distributed, simulate_cpu_devices
from xlstm_jax.distributed.torus_mesh import auto, fsdp_layout, mesh_by_topology

__all__ = [
    "DeviceMeshManager",
    "abstract_batch",
    "auto_mesh",
    "available_devices",
    "check_no_explicit_mesh",
    "mesh_axes",
    "shard_batch",
    "simulate_cpu_devices",
]

NUMBERS = frozenset("biufcV")  # kinds of dtype; bfloat16 and the like are V, PRNG keys have none
BATCH_TIMEOUT_S = 300.0  # Processes may open their data for minutes before the first batch.

# -------------------------------------------------------------------------------------------------------------- batches


def shard_batch(
    batch: PyTree, mesh: Mesh, batch_axes: AxisNames, *, pad: bool | int = False, timeout_s: float = BATCH_TIMEOUT_S
) -> PyTree:
    """The global batch from the rows that each process hands in; call it in all processes, in the same order.

    The rows of a process go to its own devices, in their order; nothing travels. Processes whose devices hold the same
    part of the batch (the batch axes do not tell them apart, as with an axis of model parallelism over hosts) must hand
    in the same rows. Scalars are replicated and must be the same everywhere.

    In a run of several processes the first batch, and each that differs in shape or dtype from the last, is compared:
    all processes wait for each other, some milliseconds if they are on time. Other batches cost no communication.

    Args:
      batch: arrays [rows, ...], the same number of rows in every leaf and every process, and scalars.
      mesh: the mesh.
      batch_axes: the axes that the batch is split over, outermost first.
      pad: True appends rows of zeros until this process's devices divide the rows; a number appends them up to that
        many rows, which allows processes to hand in different numbers of rows, down to none (the end of an epoch).
      timeout_s: how long to wait for processes that do not bring a new batch too.
    Returns:
      The batch of global arrays [all rows, ...], split over ``batch_axes``. With ``pad``, ``(batch, weight)``, where
      ``weight``, float32 [all rows], is 1 for a row that was handed in and 0 for one that was appended.
    Raises:
      ValueError: devices do not divide the rows, or leaves differ in them, on this process; or processes differ in
        shapes, dtypes, or rows that they share, and all of them raise.
      TimeoutError: this process brings a new shape, others do not.
      TypeError: a leaf is a global array already, or has a dtype that devices do not have.
    """
    axes = mesh_axes(mesh, batch_axes, "batch_axes")
    place, blocks = NamedSharding(mesh, PartitionSpec(axes)), _blocks_of_processes(mesh, axes)
    here = len(blocks.get(jax.process_index(), ()))
    if not here:
        raise ValueError(f"process {jax.process_index()} has no device in the mesh {dict(mesh.shape)}.")
    rows = _common_rows(batch)
    padded = _padded_rows(rows, here, pad, axes)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def to_global(path, leaf):
        if np.ndim(leaf) == 0:
            return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec()), np.asarray(leaf), ())
        shape = (padded // here * parts, *np.shape(leaf)[1:])
        return jax.make_array_from_process_local_data(place, _with_rows(leaf, padded), shape)

    if len(blocks) > 1:
        _agree_on_batch(batch, padded, mesh, axes, timeout_s)
    sharded = map_leaves_with_path(to_global, batch)
    return sharded if pad is False else (sharded, to_global("", (np.arange(padded) < rows).astype(np.float32)))


def abstract_batch(batch: PyTree, mesh: Mesh | AbstractMesh, batch_axes: AxisNames) -> PyTree:
    """What ``shard_batch`` would return, without values: a batch to plan, forecast or compile a step with.

    Args:
      batch: arrays or ``ShapeDtypeStruct`` with global shapes [b, ...], and scalars.
      mesh: a mesh, which need not have devices.
      batch_axes: the axes that the batch is split over, outermost first.
    Returns:
      ``ShapeDtypeStruct`` with shardings.
    Raises:
      ValueError: the axes do not divide a leaf's rows; names the leaf and both numbers.
    """
    axes, mesh = mesh_axes(mesh, batch_axes, "batch_axes"), auto_mesh(mesh)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def place(path, leaf):
        shape, rows = np.shape(leaf), np.shape(leaf)[:1]
        if rows and rows[0] % parts:
            raise ValueError(
                f"batch['{path}'] of shape {shape} has {rows[0]} rows, which the {parts} devices over {axes} do not "
                f"divide. Take {-(-rows[0] // parts) * parts} rows."
            )
        spec = PartitionSpec(axes) if rows else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, _dtype(leaf), sharding=NamedSharding(mesh, spec))

    return map_leaves_with_path(place, batch)


@lru_cache
def _blocks_of_processes(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, frozenset[int]]:
    """Which of the equal parts of the batch each process's devices hold.

    Raises:
      ValueError: processes hold different numbers of parts, or share some and not others.
    """
    parts, blocks = math.prod(mesh.shape[axis] for axis in axes), {}
    for device, (part,) in NamedSharding(mesh, PartitionSpec(axes)).devices_indices_map((parts,)).items():
        blocks[device.process_index] = blocks.get(device.process_index, frozenset()) | {part.start or 0}
    kinds = set(blocks.values())
    if len({len(kind) for kind in kinds}) > 1 or sum(map(len, kinds)) > parts:
        held = {process: sorted(block) for process, block in blocks.items()}
        raise ValueError(
            f"of the {parts} parts of a batch over {axes}, processes hold {held}: there is no number of rows for each "
            "process that fits. Make the mesh with create_device_mesh without devices, which keeps parts together."
        )
    return blocks


def _common_rows(batch: PyTree) -> int:
    """The leading dim of all leaves that have one."""
    shapes = {}
    for path, leaf in leaves_with_path(batch):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise TypeError(f"batch['{path}'] is split over processes already; hand in the rows of this process.")
        if getattr(_dtype(leaf), "kind", None) not in NUMBERS:
            raise TypeError(f"batch['{path}'] has the dtype {_dtype(leaf)}, not of numbers; leave it out or encode it.")
        shapes |= {path: np.shape(leaf)} if np.ndim(leaf) else {}
    if not shapes:
        raise ValueError("the batch has no leaf with rows; hand in arrays [rows, ...].")
    first, shape = next(iter(shapes.items()))
    for path, other in shapes.items():
        if other[0] != shape[0]:
            raise ValueError(
                f"batch['{path}'] of shape {other} has {other[0]} rows, but batch['{first}'] of shape {shape} has "
                f"{shape[0]}. All leaves have the rows of the same examples; what has no rows is a scalar."
            )
    return shape[0]


def _padded_rows(rows: int, here: int, pad: bool | int, axes: tuple[str, ...]) -> int:
    """How many rows this process's devices get, ``here`` being the parts that they hold."""
    where = f"process {jax.process_index()}, whose devices hold {here} part(s) of the batch over {axes}"
    if pad is not True and pad is not False:
        if pad < max(rows, 1) or pad % here:
            raise ValueError(f"pad={pad} rows for {rows} rows on {where}: at least as many, and a multiple of {here}.")
        return int(pad)
    up = max(-(-rows // here), 1) * here
    if pad is False and up != rows:
        down = f"{rows // here * here} or " if rows > here else ""
        raise ValueError(
            f"{here} does not divide the {rows} rows of the batch on {where}. Hand in {down}{up} rows, or pass "
            "pad=True, which appends rows of weight 0."
        )
    return up


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _with_rows(leaf: Any, rows: int) -> Any:
    missing = rows - len(leaf)
    return np.pad(np.asarray(leaf), [(0, missing)] + [(0, 0)] * (np.ndim(leaf) - 1)) if missing else leaf


class _Batches:
    """What this process has handed in: how many batches, and the shapes of the last."""

    count = 0
    last: Any = None


def _agree_on_batch(batch: PyTree, rows: int, mesh: Mesh, axes: tuple[str, ...], timeout_s: float) -> None:
    """Compares shapes between processes where they changed; and the values of those that hold the same rows.

    Raises:
      ValueError: they differ.
    """
    if not jax.distributed.is_initialized():
        raise RuntimeError("the mesh spans processes that have not joined; call initialize_distributed at the start.")
    leaves = leaves_with_path(batch)
    shapes = {path: f"{_dtype(leaf)} {['rows', *np.shape(leaf)[1:]] if np.ndim(leaf) else []}" for path, leaf in leaves}
    _Batches.count += 1
    if _Batches.last == (mesh, axes, rows, shapes):
        return
    _Batches.last = None  # where this raises, the next one is compared again
    scalars = {path: text for path, leaf in leaves if np.ndim(leaf) == 0 for text in entries_of(leaf).values()}
    entries = {
        "rows for each process": str(rows),
        **shapes,
        **scalars,
        "mesh": f"{dict(mesh.shape)}, split over {axes}",
    }
    blocks, me = _blocks_of_processes(mesh, axes), jax.process_index()
    what = "batch of a new shape"
    compare({**entries, "number of the batch": str(_Batches.count)}, what, me, sorted(blocks), timeout_s)
    sharing = sorted(process for process, block in blocks.items() if block == blocks[me])
    if len(sharing) > 1:
        what = f"batch of processes that hold the same rows ({axes} do not tell them apart)"
        compare(entries_of(batch), what, me, sharing, timeout_s)
    _Batches.last = (mesh, axes, rows, shapes)


# --------------------------------------------------------------------------------------------------------------- meshes


class DeviceMeshManager:
    """Makes device meshes, and what a run of several processes needs around them. All methods are static.

    In a run of several processes each process calls them with the same arguments.
    """

    initialize_distributed = staticmethod(initialize_distributed)
    simulate_cpu_devices = staticmethod(simulate_cpu_devices)
    shard_batch = staticmethod(shard_batch)
    assert_same_everywhere = staticmethod(assert_same_everywhere)

    @staticmethod
    def create_device_mesh(
        mesh_shape: Mapping[str, int] | Sequence[tuple[str, int]], devices: Sequence[jax.Device] | None = None
    ) -> Mesh:
        """A mesh with the given axes, the last one over the devices that are closest to each other.

        Args:
          mesh_shape: axis names with their sizes, as ``{"dp": 2, "fsdp": 4}`` or ``[("dp", 2), ("fsdp", 4)]``. One size
            may be -1: what the others leave.
          devices: laid out in this order; by default all devices, in the order that suits the machine's topology: with
            several slices (or processes, where these are the units that slow links connect) the first axes cross them.
        Returns:
          A ``Mesh`` with axes of type ``Auto``.
        Raises:
          ValueError: the sizes do not multiply to the number of devices; says both, and the nearest shapes that do.
        """
        if isinstance(mesh_shape, int):
            raise ValueError(f"mesh_shape={mesh_shape} has no axis names; write {{'fsdp': {mesh_shape}}}, say.")
        pairs = list(mesh_shape.items() if isinstance(mesh_shape, Mapping) else mesh_shape)
        names = as_axis_names(tuple(name for name, _ in pairs))
        sizes = filled_sizes(dict(pairs), jax.device_count() if devices is None else len(devices))
        if devices is None:
            return mesh_by_topology(sizes, names, jax.devices())
        return Mesh(np.asarray(devices).reshape(sizes), names, axis_types=auto(names))

    @staticmethod
    def create_data_parallel_mesh(num_devices: int | None = None) -> Mesh:
        """A mesh with the one axis "data" over all devices, or the first ``num_devices``."""
        return _mesh_of_first("data", num_devices)

    @staticmethod
    def create_model_parallel_mesh(num_devices: int) -> Mesh:
        """A mesh with the one axis "model" over the first ``num_devices`` devices."""
        return _mesh_of_first("model", num_devices)

    @staticmethod
    def create_hybrid_mesh(data_parallel_size: int, model_parallel_size: int) -> Mesh:
        """A mesh with the axes "data" and "model" over all devices, "model" on the fast links. One size may be -1."""
        return DeviceMeshManager.create_device_mesh({"data": data_parallel_size, "model": model_parallel_size})

    @staticmethod
    def create_hsdp_mesh(replicas: int, shards: int) -> Mesh:
        """A mesh with the axes "dp" and "fsdp" over all devices, for hybrid sharding: ``replicas`` copies of the
        parameters, each split over ``shards`` devices, which the fast links connect. One size may be -1."""
        return DeviceMeshManager.create_device_mesh({"dp": replicas, "fsdp": shards})

    @staticmethod
    def create_fsdp_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
        """A mesh for sharding over all devices, with an axis along each kind of link: pass ``mesh.axis_names`` on.

        Collectives then run axis by axis, each between neighbours. Over one axis of many TPU chips XLA turns a
        reduce-scatter into a full-size all-reduce, which over several it does not.

            one device, one host       fsdp                          TPU, one slice     fsdp_x, fsdp_y, fsdp_z
            several hosts, processes   fsdp_host, fsdp_device        several slices     fsdp_slice, fsdp_x, ...

        Axes of size 1 are left out, and one that is left is called "fsdp". The slowest links come first.

        Args:
          devices: in any order; by default all.
        Returns:
          A ``Mesh`` with axes of type ``Auto``; neighbours along an axis of a torus are neighbours on the torus.
        Raises:
          ValueError: the devices fill no box of a TPU's torus, or hosts hold different numbers of them.
        """
        array, names = fsdp_layout(jax.devices() if devices is None else devices)
        return Mesh(array, names, axis_types=auto(names))

    @staticmethod
    def create_abstract_mesh(mesh_shape: Mapping[str, int]) -> AbstractMesh:
        """A mesh without devices, to plan and forecast for machines that are not there.

        Args:
          mesh_shape: axes and sizes, outermost first, as {"dp": 4, "fsdp": 64}.
        Raises:
          ValueError: a size is not a positive integer, or there is no axis.
        """
        if not mesh_shape or any(not isinstance(size, int | np.integer) or size < 1 for size in mesh_shape.values()):
            raise ValueError(f"mesh_shape={dict(mesh_shape)}: name axes with positive sizes, as {{'fsdp': 8}}.")
        return AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape), axis_types=auto(tuple(mesh_shape)))

    @staticmethod
    def get_mesh_info(mesh: Mesh) -> dict[str, Any]:
        """What there is to know about a mesh, for a log or a file.

        Returns:
          ``total_devices``; ``axes``, a dict of sizes; ``processes``, how many have devices in it; ``platform``;
          ``device_kind``; and ``axes_across_processes``, those axes along which collectives leave a process.
        """
        processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
        crossing = [(processes != processes.take([0], axis=dim)).any() for dim in range(processes.ndim)]
        return {
            "total_devices": mesh.size,
            "axes": dict(mesh.shape),
            "processes": len(np.unique(processes)),
            "platform": mesh.devices.flat[0].platform,
            "device_kind": mesh.devices.flat[0].device_kind,
            "axes_across_processes": [name for name, cross in zip(mesh.axis_names, crossing, strict=True) if cross],
        }


def _mesh_of_first(name: str, num_devices: int | None) -> Mesh:
    count = jax.device_count()
    if num_devices is None or num_devices == count:
        return DeviceMeshManager.create_device_mesh({name: count})
    if not 1 <= num_devices <= count:
        raise ValueError(
            f"num_devices={num_devices} for the axis {name!r}: there are {count} devices, 1 to {count} fit."
        )
    devices = jax.devices()[:num_devices]
    left_out = set(range(jax.process_count())) - {device.process_index for device in devices}
    if left_out:
        raise ValueError(
            f"num_devices={num_devices} of {count} leaves process {min(left_out)} without a device in the mesh, where "
            f"it could take no part in the run. Use all {count}, or start fewer processes."
        )
    return DeviceMeshManager.create_device_mesh({name: num_devices}, devices)


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with all its axes of type ``Auto``."""
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto(mesh.axis_names))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=auto(mesh.axis_names))


def check_no_explicit_mesh() -> None:
    """Raises a ``ValueError`` under a ``jax.set_mesh`` of explicit axes, whose types no array on an Auto mesh has."""
    mesh = jax.sharding.get_abstract_mesh()
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit:
        raise ValueError(
            f"jax.set_mesh has set a mesh with the explicit axes {tuple(explicit)}; parameters live on meshes with "
            "Auto axes. Leave jax.set_mesh out, or set one of DeviceMeshManager.create_device_mesh (jax.make_mesh "
            "makes explicit axes unless it is given axis_types)."
        )


def mesh_axes(mesh: Mesh, axis_names: str | Sequence[str], argument: str) -> tuple[str, ...]:
    """``axis_names`` as a tuple, checked to be axes of the mesh.

    Raises:
      ValueError: names the argument, the axis that is missing, and those that there are.
    """
    axes = as_axis_names(axis_names)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"{argument}={axis_names!r}: the mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)}. "
            "Pass those that the batch is split over."
        )
    return axes

"""``DeviceMeshManager``: makes and describes device meshes."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.device_mesh.batch_layout import auto_types, check_mesh, with_usual_names
from xlstm_jax.distributed.device_mesh.batches import shard_batch
from xlstm_jax.distributed.device_mesh.topology import fsdp_layout, mesh_by_topology
from xlstm_jax.distributed.processes.devices import Device, simulate_cpu_devices
from xlstm_jax.distributed.processes.initialize import initialize_distributed
from xlstm_jax.distributed.processes.same_everywhere import assert_same_everywhere

SHAPES_SHOWN = 3
SHAPES_TRIED = 100_000  # limit of the search for the nearest shapes


class DeviceMeshManager:
    """Constructors of device meshes, and related functions for runs of several processes. All methods are static.

    In a run of several processes, call each method in every process with the same arguments.

    >>> mesh = DeviceMeshManager.create_device_mesh({"dp": -1, "fsdp": 4})
    >>> DeviceMeshManager.get_mesh_info(mesh)["axes"]
    {'dp': 2, 'fsdp': 4}
    """

    initialize_distributed = staticmethod(initialize_distributed)
    simulate_cpu_devices = staticmethod(simulate_cpu_devices)
    shard_batch = staticmethod(shard_batch)
    assert_same_everywhere = staticmethod(assert_same_everywhere)

    @staticmethod
    def create_device_mesh(
        mesh_shape: Mapping[str, int] | Sequence[tuple[str, int]], devices: Sequence[Device] | None = None
    ) -> Mesh:
        """Makes a mesh with the given axes, of type ``Auto``. Devices along the last axis are closest to each other.

        Args:
          mesh_shape: axis names with their sizes, as ``{"dp": 2, "fsdp": 4}`` or ``[("dp", 2), ("fsdp", 4)]``. A single
            size may be -1: the number of devices divided by the product of the other sizes. If the sizes need fewer
            devices than are available, the first devices are used.
          devices: the devices in mesh order; None for ``jax.devices()``. With None, if the mesh needs every device, the
            devices are ordered by topology: the first axes cross TPU slices or, on other platforms, processes, between
            which links are slow. If the mesh needs fewer devices, the order of ``jax.devices()`` is kept.
        Raises:
          ValueError: the sizes need more devices than are available, or the product of the sizes beside a -1 does not
            divide the number of devices; names both numbers, and the nearest shapes that fit. Or (with ``devices``
            None) the first devices leave a process of the job without a device; or ``mesh_shape`` has no names, or
            ``devices`` is empty or repeats a device.
          TypeError: ``devices`` contains something other than devices.
        """
        pairs = _named_sizes(mesh_shape)
        names = as_axis_names(tuple(name for name, _ in pairs))
        array = _array_of(jax.devices() if devices is None else devices)
        sizes = filled_sizes(dict(pairs), array.size)
        count = math.prod(sizes)
        # Topology determines the order only if every device is used; a list of devices is the caller's order.
        if devices is None and count == array.size:
            return mesh_by_topology(sizes, names, jax.devices())
        left_out = set(range(jax.process_count())) - {device.process_index for device in array[:count]}
        # An explicit list may omit processes on purpose.
        if devices is None and left_out:
            raise ValueError(
                f"the first {count} of {array.size} devices leave process {min(left_out)} without a device in the "
                f"mesh, where it could take no part in the run. Use all {array.size}, or start fewer processes."
            )
        return Mesh(array[:count].reshape(sizes), names, axis_types=auto_types(names))

    @staticmethod
    def create_data_parallel_mesh(num_devices: int | None = None) -> Mesh:
        """Makes a mesh with the single axis "data" over the first ``num_devices`` devices; None: over every device."""
        return _mesh_of_first("data", num_devices)

    @staticmethod
    def create_model_parallel_mesh(num_devices: int) -> Mesh:
        """Makes a mesh with the single axis "model" over the first ``num_devices`` devices."""
        return _mesh_of_first("model", num_devices)

    @staticmethod
    def create_hybrid_mesh(data_parallel_size: int, model_parallel_size: int) -> Mesh:
        """Makes a mesh with axes "data" and "model"; "model" is on the fast links.

        One of the two sizes may be -1, as for ``create_device_mesh``.
        """
        return DeviceMeshManager.create_device_mesh({"data": data_parallel_size, "model": model_parallel_size})

    @staticmethod
    def create_hsdp_mesh(replicas: int, shards: int) -> Mesh:
        """Makes a mesh with axes "dp" and "fsdp" for hybrid sharding: ``replicas`` copies of the parameters.

        Each copy is split over ``shards`` devices, which the fast links connect. One of the two numbers may be -1, as
        for ``create_device_mesh``.
        """
        return DeviceMeshManager.create_device_mesh({"dp": replicas, "fsdp": shards})

    @staticmethod
    def create_fsdp_mesh(devices: Sequence[Device] | None = None) -> Mesh:
        """Makes a mesh for sharding over every device, with an axis along each kind of link.

        >>> create_fsdp_mesh().shape  # on 8 simulated devices of one host
        OrderedDict({'fsdp': 8})

        ``shard_modules``, ``create_train_state`` and ``make_train_step`` use these axes by default.
        ``shard_module_params`` takes them as ``mesh.axis_names``.

        Collectives are then staged, each stage between neighbours. (Over a single axis of many TPU chips XLA turns a
        reduce-scatter into a full-size all-reduce.)

            one device, one host       fsdp                          TPU, one slice     fsdp_x, fsdp_y, fsdp_z
            several hosts, processes   fsdp_host, fsdp_device        several slices     fsdp_slice, fsdp_x, ...

        Axes of size 1 are omitted, and a single remaining axis is called "fsdp". The slowest links come first.

        Args:
          devices: in any order; default: every device.
        Raises:
          ValueError: the devices do not fill a box of a TPU's torus, or hosts hold different numbers of devices; or
            ``devices`` is empty or repeats a device.
        """
        array, names = fsdp_layout(list(_array_of(jax.devices() if devices is None else devices)))
        return Mesh(array, names, axis_types=auto_types(names))

    @staticmethod
    def create_abstract_mesh(mesh_shape: Mapping[str, int]) -> AbstractMesh:
        """Makes a mesh without devices, as {"dp": 4, "fsdp": 64}, to plan and forecast for absent machines.

        Raises:
          ValueError: ``mesh_shape`` has no axes, no names, or a size that is not a positive integer (-1 included).
        """
        shape = dict(_named_sizes(mesh_shape))
        if not shape or any(not is_size(size) for size in shape.values()):
            raise ValueError(f"mesh_shape={shape}: name axes with positive sizes, as {{'fsdp': 8}}.")
        return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=auto_types(tuple(shape)))

    @staticmethod
    def get_mesh_info(mesh: Mesh) -> dict[str, Any]:
        """Returns the properties of a mesh, for a log or a file.

        Returns:
          ``total_devices``; ``axes``, a dict of sizes; ``processes``, the number of processes with devices in the mesh;
          ``platform``; ``device_kind``; and ``axes_across_processes``, the axes whose collectives cross processes.
        """
        check_mesh(mesh, devices=True)
        # An axis crosses processes if the process index changes along it.
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
    if num_devices is not None and not (is_size(num_devices) and num_devices <= count):
        raise ValueError(
            f"num_devices={num_devices!r} for the axis {name!r}: there are {count} devices, 1 to {count} fit."
        )
    return DeviceMeshManager.create_device_mesh({name: count if num_devices is None else num_devices})


def _named_sizes(mesh_shape: Any) -> list[tuple[str, int]]:
    """Returns a user's ``mesh_shape``, a mapping or a sequence of pairs, as a list of (axis name, size), in order.

    Raises a ``ValueError`` for sizes without names, such as (2, 4).
    """
    pairs = list(mesh_shape.items()) if isinstance(mesh_shape, Mapping) else mesh_shape
    if isinstance(pairs, Sequence) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        return [(name, size) for name, size in pairs]
    example = with_usual_names(pairs) or {"dp": 2, "fsdp": 4}
    raise ValueError(f"mesh_shape={mesh_shape!r} has no axis names; write {example}, say.")


def _array_of(devices: Any) -> np.ndarray:
    """Returns a user's ``devices`` (one device, a sequence or an array) as an array of one dim, in order.

    Raises a ``TypeError`` for an entry that is no device, and a ``ValueError`` if ``devices`` is empty or repeats a
    device.
    """
    # Check attributes instead of the class: a device of a topology need not be a `jax.Device`.
    array = np.asarray(devices, object).ravel()
    if wrong := [device for device in array if not (hasattr(device, "id") and hasattr(device, "process_index"))]:
        raise TypeError(f"devices holds {wrong[0]!r}, a {type(wrong[0]).__name__}; pass devices, as jax.devices()[:4].")
    if not array.size or len(set(array)) < array.size:
        raise ValueError(
            f"devices: {array.size}, of which {len(set(array))} differ. Name at least one, each once, as "
            "jax.devices()[:4]; or leave devices out, for all."
        )
    return array


def is_size(size: Any) -> bool:
    """Returns whether ``size`` is a positive integer and not a bool."""
    return isinstance(size, int | np.integer) and not isinstance(size, bool) and int(size) >= 1


def filled_sizes(shape: dict[str, int], count: int) -> tuple[int, ...]:
    """Returns the axis sizes of a mesh on ``count`` devices, in the order of ``shape``, with a size -1 replaced.

    The size -1 becomes ``count`` divided by the product of the other sizes. Without -1 devices may be left over.

    Raises:
      ValueError: a size is not a positive integer (-1 may occur once), there are too few devices, or the other sizes
        do not divide ``count``; the last two errors name the nearest shapes that fit.
    """
    wild = [name for name, size in shape.items() if size == -1]
    if len(wild) > 1 or not all(is_size(size) or size == -1 for size in shape.values()):
        raise ValueError(f"mesh_shape={shape}: a size is a positive integer, and at most one of them -1.")
    known = math.prod(size for size in shape.values() if size != -1)
    if known > count or (wild and count % known):
        nearest = ", ".join(str(dict(zip(shape, sizes, strict=True))) for sizes in _nearest(shape.values(), count))
        raise ValueError(
            f"mesh_shape={shape} takes {known} devices{' or a multiple' if wild else ''}, but there are {count}. "
            f"Nearest shapes that fit: {nearest}; or try it on simulate_cpu_devices({known})."
        )
    return tuple(int(count // known if size == -1 else size) for size in shape.values())


def _nearest(sizes: Collection[int], count: int) -> list[tuple[int, ...]]:
    """Returns up to 3 shapes of exactly ``count`` devices that are closest to ``sizes``, the closest first.

    A shape is a tuple of as many axis sizes as ``sizes``. The distance counts factors: 4 is as far from 8 as 16 is. A
    size of -1 matches any size.
    """

    def distance(shape: tuple[int, ...]) -> float:
        # Distances are factors: 4 is as far from 8 as 16 is.
        return sum(abs(math.log(new / old)) for new, old in zip(shape, sizes, strict=True) if old != -1)

    # Try every size but the last, which follows from the others. The search is limited, since it only serves an error
    # text.
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    firsts = itertools.islice(itertools.product(divisors, repeat=len(sizes) - 1), SHAPES_TRIED)
    shapes = ((*first, count // math.prod(first)) for first in firsts if count % math.prod(first) == 0)
    return sorted(shapes, key=distance)[:SHAPES_SHOWN]

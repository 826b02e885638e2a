"""Meshes whose axes lie along the links between devices.

    TPU, one slice           a torus of chips    an axis along each axis of the torus: neighbours on it are neighbours
    TPU, several slices      tori, a network     the slices first
    GPUs on several hosts    switches, a network the hosts first, then the devices of a host
    CPUs, several processes  likewise, each process in the place of a host

``mesh_by_topology`` lays axes of given sizes over devices, ``fsdp_layout`` finds the axes too. The first axes cross the
slowest links.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from xlstm_jax.distributed.data_parallel.shard_choice import HOST_AXIS, SLICE_AXIS
from xlstm_jax.distributed.device_mesh.sizes import crossing_sizes

FSDP_AXIS = "fsdp"  # the name of a single axis
TORUS = (SLICE_AXIS, "fsdp_x", "fsdp_y", "fsdp_z", "fsdp_core")
HOSTS = (HOST_AXIS, "fsdp_device")
OWN_ORDER = "or lay one axis over them in an order of your own, as create_device_mesh({'fsdp': -1}, devices)."

Place = tuple[int, ...]


def auto(names: Sequence[str]) -> tuple[AxisType, ...]:
    """``AxisType.Auto`` for each axis."""
    return (AxisType.Auto,) * len(names)


def mesh_by_topology(sizes: tuple[int, ...], names: tuple[str, ...], devices: Sequence[Any]) -> Mesh:
    """The mesh over devices in the order that suits the links between them.

    Raises:
      ValueError: slices, or processes, have different numbers of devices.
    """
    units, by_process = _units(devices)
    if len(units) == 1:
        return jax.make_mesh(sizes, names, axis_types=auto(names), devices=devices)
    if len(set(units.values())) > 1:
        raise ValueError(
            f"{'processes' if by_process else 'slices'} have different numbers of devices: {dict(units)}. Pass the "
            "devices in the order that you want, as devices=jax.devices()."
        )
    outer = crossing_sizes(sizes, len(units))
    inner = tuple(size // part for size, part in zip(sizes, outer, strict=True))
    ordered = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )
    return Mesh(ordered, names, axis_types=auto(names))


def _units(devices: Sequence[Any]) -> tuple[Counter, bool]:
    """Units that slow links connect, with the number of devices in each; and whether they are processes.

    JAX numbers the slices of a TPU job and, on other platforms, the hosts (or groups of them behind one fast switch).
    On one host, or where it knows of none, it is the processes; but a slice of a TPU is one torus across its hosts.
    """
    slices = Counter(_slice(device) for device in devices)
    if len(slices) > 1 or devices[0].platform == "tpu":
        return slices, False
    return Counter(device.process_index for device in devices), True


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


# -------------------------------------------------------------------------------------------------- one axis per link


def fsdp_layout(devices: Sequence[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The devices as an array with a dim for each kind of link, slowest first, and the names of these dims.

    Dims of size 1 are left out. One that is left is called "fsdp", several "fsdp_x" and so on.

    Args:
      devices: the coordinates of TPUs say where each belongs; of others the order within a host is kept.
    Raises:
      ValueError: no device, or one twice; they fill no box of the torus, or some hosts hold more than others.
    """
    if not len(devices) or len(set(devices)) < len(devices):
        raise ValueError(f"devices: {len(devices)}, of which {len(set(devices))} differ. Name at least one, each once.")
    on_torus = devices[0].platform == "tpu"
    places = _torus_places(devices) if on_torus else _host_places(devices)
    sizes = [1 + max(column) for column in zip(*places, strict=True)]
    if math.prod(sizes) != len(places):
        raise ValueError(_torus_message(devices, places, sizes) if on_torus else _host_message(devices))
    array = np.empty(sizes, object)
    for place, device in places.items():
        array[place] = device
    names = [name for name, size in zip(TORUS if on_torus else HOSTS, sizes, strict=True) if size > 1]
    return array.reshape([size for size in sizes if size > 1] or [1]), tuple(names if len(names) > 1 else [FSDP_AXIS])


def _torus_places(devices: Sequence[Any]) -> dict[Place, Any]:
    """Devices by slice, coordinates from the corner of what is used of the slice, and core of the chip."""
    corners = _corners(devices)
    slices = sorted(corners)

    def place(device):
        coords = (at - start for at, start in zip(device.coords, corners[_slice(device)], strict=True))
        return (slices.index(_slice(device)), *coords, device.core_on_chip)

    return {place(device): device for device in devices}


def _corners(devices: Sequence[Any]) -> dict[int, Place]:
    """The smallest coordinates of each slice."""
    coords = defaultdict(list)
    for device in devices:
        coords[_slice(device)].append(device.coords)
    return {number: tuple(map(min, zip(*found, strict=True))) for number, found in coords.items()}


def _torus_message(devices: Sequence[Any], places: Mapping[Place, Any], sizes: Sequence[int]) -> str:
    missing = next(place for place in np.ndindex(*sizes) if place not in places)
    corners = _corners(devices)
    number = sorted(corners)[missing[0]]
    coords = tuple(start + step for start, step in zip(corners[number], missing[1:4], strict=True))
    box = " x ".join(str(size) for size in sizes if size > 1)
    return (
        f"devices: {len(devices)} do not fill the box of {box} = {math.prod(sizes)} places that they span: there is "
        f"none at coords {coords} of slice {number}. Pass all devices of a slice, as jax.devices(), or of a box of "
        f"its torus, {OWN_ORDER}"
    )


def _host_places(devices: Sequence[Any]) -> dict[Place, Any]:
    """Devices by host and number within the host."""
    by_process = _units(devices)[1]
    hosts = defaultdict(list)
    for device in devices:
        hosts[device.process_index if by_process else _slice(device)].append(device)
    return {(i, j): device for i, host in enumerate(sorted(hosts)) for j, device in enumerate(hosts[host])}


def _host_message(devices: Sequence[Any]) -> str:
    return (
        f"devices: hosts hold different numbers of them, {dict(_units(devices)[0])}. Pass as many of each, {OWN_ORDER}"
    )

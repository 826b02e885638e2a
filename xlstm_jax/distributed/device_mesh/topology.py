"""Meshes whose axes follow the links between devices.

    TPU, one slice           a torus of chips      one mesh axis along each axis of the torus
    TPU, several slices      tori, a network       one axis over the slices first
    GPUs on several hosts    switches, a network   one axis over the hosts, then one over the devices of a host
    CPUs, several processes  likewise, each process counting as a host

``mesh_by_topology`` orders devices for axes of given sizes; ``fsdp_layout`` also chooses the axes. The first axes cross
the slowest links.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from xlstm_jax.distributed.device_mesh.batch_layout import auto_types
from xlstm_jax.distributed.processes.devices import Device
from xlstm_jax.program_names import HOST_AXIS, SLICE_AXIS

FSDP_AXIS = "fsdp"  # the name of a single axis
TORUS = (SLICE_AXIS, "fsdp_x", "fsdp_y", "fsdp_z", "fsdp_core")
HOSTS = (HOST_AXIS, "fsdp_device")

Coordinates = tuple[int, ...]  # of a device in the array of devices, before dims of size 1 are dropped


def mesh_by_topology(sizes: tuple[int, ...], names: tuple[str, ...], devices: Sequence[Device]) -> Mesh:
    """Returns a mesh of all ``devices``, ordered so that the first axes cross the slow links between hosts or slices.

    ``sizes`` and ``names`` are the axis sizes, whose product is the number of devices, and the axis names.

    Raises:
      ValueError: slices (or, on platforms other than TPU, processes) have different numbers of devices.
    """
    units, by_process = _hosts_or_slices(devices)
    if len(units) == 1:
        return jax.make_mesh(sizes, names, axis_types=auto_types(names), devices=devices)
    if len(set(units.values())) > 1:
        raise ValueError(
            f"{'processes' if by_process else 'slices'} have different numbers of devices: {dict(units)}. Pass the "
            "devices in the order that you want, as devices=jax.devices()."
        )
    # JAX orders the devices across units and within units separately: split each axis size into these two factors.
    outer = crossing_sizes(sizes, len(units))
    inner = tuple(size // part for size, part in zip(sizes, outer, strict=True))
    ordered = mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )
    return Mesh(ordered, names, axis_types=auto_types(names))


def crossing_sizes(sizes: Sequence[int], units: int) -> tuple[int, ...]:
    """Returns, for each axis, the number of units (hosts or slices) that the axis crosses: a factor of its size.

    The product of the result is ``units``, the number of units; first axes get the largest possible factors. The sizes
    (4, 4) of a mesh over 8 hosts give (4, 2).
    """
    outer = []
    for size in sizes:
        outer.append(math.gcd(size, units))
        units //= outer[-1]
    assert units == 1  # the units divide the product of the sizes, so each prime of the units divides a size
    return tuple(outer)


def _hosts_or_slices(devices: Sequence[Device]) -> tuple[Counter[int], bool]:
    """Returns (counts, by_process): the number of devices of each group with fast links, and what the groups are.

    With ``by_process`` False the groups are JAX's slices: slices of a TPU or, on other platforms, hosts or groups of
    hosts behind a fast switch. ``counts`` is by slice index. With ``by_process`` True the groups are processes, and
    ``counts`` is by process index: on a platform other than TPU if all devices have the same slice index, or none.
    """
    # A TPU slice is one torus across its hosts, so its processes are not units.
    slices = Counter(_slice(device) for device in devices)
    if len(slices) > 1 or devices[0].platform == "tpu":
        return slices, False
    return Counter(device.process_index for device in devices), True


def _slice(device: Device) -> int:
    # Not every platform has this attribute.
    return getattr(device, "slice_index", None) or 0


# -------------------------------------------------------------------------------------------------- one axis per link


def fsdp_layout(devices: Sequence[Device]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns (array, names): the devices with a dim per kind of link, the slowest first, and an axis name per dim.

    Dims of size 1 are dropped. A single remaining dim is named "fsdp"; several are named by their links, such as
    ("fsdp_slice", "fsdp_x", "fsdp_y") on TPUs and ("fsdp_host", "fsdp_device") on other platforms. On a TPU the order
    of ``devices`` does not matter; on other platforms it is kept within a host. Raises a ``ValueError`` if the devices
    do not fill a box of a TPU's torus, or if hosts have different numbers of devices.
    """
    on_torus = devices[0].platform == "tpu"
    located = _on_torus(devices) if on_torus else _on_hosts(devices)
    sizes = [1 + max(column) for column in zip(*located, strict=True)]
    # Coordinates are unique, so if there are as many places as devices, no place is empty.
    if math.prod(sizes) != len(located):
        hosts = f"hosts hold different numbers of them, {dict(_hosts_or_slices(devices)[0])}. Pass as many of each"
        gap = _gap(devices, located, sizes) if on_torus else hosts
        raise ValueError(
            f"devices: {gap}, or lay one axis over them in an order of your own, as "
            "create_device_mesh({'fsdp': -1}, devices)."
        )
    array = np.empty(sizes, object)
    for coordinates, device in located.items():
        array[coordinates] = device
    # Drop axes of size 1: they split nothing, but would appear in every collective.
    names = [name for name, size in zip(TORUS if on_torus else HOSTS, sizes, strict=True) if size > 1]
    return array.reshape([size for size in sizes if size > 1] or [1]), tuple(names if len(names) > 1 else [FSDP_AXIS])


def _on_torus(devices: Sequence[Device]) -> dict[Coordinates, Device]:
    """Returns TPU devices by position, a flat tuple: (slice, coordinates of the chip in the slice, core of the chip).

    Slices are numbered 0, 1, ... in the order of JAX's slice indices. Coordinates begin at 0 in the used part of a
    slice.
    """
    corners = _corners(devices)
    located = {}
    for device in devices:
        # Relative to the corner, because the job may have a box in the middle of a larger torus.
        coords = (at - start for at, start in zip(device.coords, corners[_slice(device)], strict=True))
        located[(sorted(corners).index(_slice(device)), *coords, device.core_on_chip)] = device
    return located


def _corners(devices: Sequence[Device]) -> dict[int, Coordinates]:
    """Returns a dict from JAX's slice index to the smallest coordinate along each dim among the slice's ``devices``.

    For example {0: (0, 4, 0)}: the corner of the box of the torus that the devices span.
    """
    coords = defaultdict(list)
    for device in devices:
        coords[_slice(device)].append(device.coords)
    return {number: tuple(map(min, zip(*points, strict=True))) for number, points in coords.items()}


def _gap(devices: Sequence[Device], located: Mapping[Coordinates, Device], sizes: Sequence[int]) -> str:
    """Returns an error text for TPU devices that do not fill a box of a torus; names the first place without a device.

    ``located`` has the devices by position, (slice number, coordinates in the slice, core of the chip), and ``sizes``
    are the sizes of the box in each of these dims.
    """
    missing = next(index for index in np.ndindex(*sizes) if index not in located)
    corners = _corners(devices)
    number = sorted(corners)[missing[0]]
    coords = tuple(start + step for start, step in zip(corners[number], missing[1:4], strict=True))
    box = " x ".join(str(size) for size in sizes if size > 1)
    return (
        f"{len(devices)} do not fill the box of {box} = {math.prod(sizes)} places that they span: there is none at "
        f"coords {coords} of slice {number}. Pass all devices of a slice, as jax.devices(), or of a box of its torus"
    )


def _on_hosts(devices: Sequence[Device]) -> dict[Coordinates, Device]:
    """Returns devices by position, (host, number of the device within the host) -> device; both numbers begin at 0.

    Hosts are in the order of their indices (JAX's slice index or, without slices, the process index); the devices of a
    host keep their order in ``devices``.
    """
    by_process = _hosts_or_slices(devices)[1]
    # A host numbered by JAX as a slice may have several processes.
    hosts = defaultdict(list)
    for device in devices:
        hosts[device.process_index if by_process else _slice(device)].append(device)
    return {(i, j): device for i, host in enumerate(sorted(hosts)) for j, device in enumerate(hosts[host])}

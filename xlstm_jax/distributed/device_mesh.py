"""The device mesh: named axes over the devices at hand, or over simulated ones.

Meshes made here have axes of type ``Auto``. (``jax.make_mesh`` makes explicit ones by default, with which arrays carry
their sharding in their type; ``shard_map`` then refuses a batch that was not placed beforehand.)
"""

import math
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from xlstm_jax.distributed.partitioning import as_axis_names

THREADS_PER_DEVICE = 4  # of XLA's CPU client, in simulation; as many programs can be in flight


class DeviceMeshManager:
    """Makes device meshes. All methods are static."""

    @staticmethod
    def create_device_mesh(
        mesh_shape: Mapping[str, int] | Sequence[tuple[str, int]], devices: Sequence[jax.Device] | None = None
    ) -> Mesh:
        """A mesh with the given axes, the last one over the devices that are closest to each other.

        Args:
          mesh_shape: axis names with their sizes, as ``{"dp": 2, "fsdp": 4}`` or ``[("dp", 2), ("fsdp", 4)]``. One size
            may be -1: what the others leave.
          devices: laid out in this order; by default all devices, in the order that suits the machine's topology.
        Returns:
          A ``Mesh`` with axes of type ``Auto``.
        Raises:
          ValueError: the sizes do not multiply to the number of devices; says both, and which size would fit.
        """
        if isinstance(mesh_shape, int):
            raise ValueError(f"mesh_shape={mesh_shape} has no axis names; write {{'fsdp': {mesh_shape}}}, say.")
        shape = dict(mesh_shape)
        count = jax.device_count() if devices is None else len(devices)
        names, sizes = as_axis_names(tuple(shape)), _fill_in(shape, count)
        types = (AxisType.Auto,) * len(names)
        if devices is None:
            return jax.make_mesh(sizes, names, axis_types=types)
        return Mesh(np.asarray(devices).reshape(sizes), names, axis_types=types)


def _fill_in(shape: dict[str, int], count: int) -> tuple[int, ...]:
    """The sizes with -1 replaced, checked against the number of devices."""
    wild = [name for name, size in shape.items() if size == -1]
    bad = {
        name: size
        for name, size in shape.items()
        if name not in wild and (not isinstance(size, int | np.integer) or size < 1)
    }
    if bad or len(wild) > 1:
        raise ValueError(f"mesh_shape={shape}: a size is a positive integer, and at most one of them -1.")
    known = math.prod(size for size in shape.values() if size != -1)
    if count % known or (not wild and known != count):
        last = list(shape)[-1]
        others = math.prod(size for name, size in shape.items() if name != last and size != -1)
        fit = f"With {last!r} = {count // others} it would fit" if count % others == 0 else f"Divisors of {count} fit"
        if not wild and known < count:
            fit += f"; or pass devices=jax.devices()[:{known}]"
        raise ValueError(
            f"mesh_shape={shape} takes {known} devices{' or a multiple' if wild else ''}, but there are {count}. "
            f"{fit}; or try it on simulate_cpu_devices({known})."
        )
    return tuple(count // known if size == -1 else size for size in shape.values())


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same mesh with all its axes of type ``Auto``."""
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


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


def simulate_cpu_devices(num_devices: int = 8) -> None:
    """Makes JAX run on ``num_devices`` devices simulated on the CPU. Call it before anything asks JAX for a device.

    In a run of several processes this is the number of each; call it before ``jax.distributed.initialize``.

    Raises:
      RuntimeError: JAX has already started its backend, with another number of devices or on another platform.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        _set_cpu_devices(num_devices)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.local_device_count() == num_devices:
            return
        raise RuntimeError(
            f"simulate_cpu_devices({num_devices}) came too late: JAX already runs on {jax.local_device_count()} "
            f"{jax.default_backend()} device(s). Call it before the first use of jax.devices() or of an array."
        ) from error


def available_devices(simulated: int = 8) -> list[jax.Device]:
    """The accelerators; where there are none, ``simulated`` CPU devices, or those with which JAX runs already.

    For programs that take what there is; ``simulate_cpu_devices`` is for those that want CPUs in any case. Only JAX can
    say whether there is an accelerator, and asking starts the backend, so the number of CPU devices is set first.
    """
    try:
        _set_cpu_devices(simulated)
    except RuntimeError:
        pass  # It runs already.
    return jax.devices()


def _set_cpu_devices(count: int) -> None:
    """Sets the number of CPU devices, and gives XLA's CPU client threads enough to run several programs on each.

    A collective holds a thread per device until all have come. The client has as many threads as devices (or cores, if
    there are more), so programs that are in flight together, each waiting with some of its devices for threads that the
    others hold, wait for ever; seen on JAX 0.10 in two of five runs of 400 steps that were not waited for. The client
    takes the number of its threads from NPROC, where that is set.
    """
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(THREADS_PER_DEVICE * count))

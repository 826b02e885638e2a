"""What every function that is given a mesh asks of it."""

from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.device_mesh.topology import auto


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

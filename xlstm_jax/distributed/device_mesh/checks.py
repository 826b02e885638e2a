"""What functions ask of a mesh that they are given: axes of type ``Auto``, and the axes that they are told to use."""

from collections.abc import Sequence
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.axes import as_axis_names

AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)


def auto_types(names: Sequence[str]) -> tuple[AxisType, ...]:
    """``AxisType.Auto`` for each axis."""
    return (AxisType.Auto,) * len(names)


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """The same mesh with all its axes of type ``Auto``.

    >>> explicit = jax.make_mesh((2, 4), ("dp", "fsdp"))
    >>> explicit == mesh, auto_mesh(explicit) == mesh  # which is Auto
    (False, True)
    """
    return mesh.update(axis_types=auto_types(mesh.axis_names))  # pyright: ignore[reportReturnType] (it has no types)


def check_no_explicit_mesh() -> None:
    """Raises a ``ValueError`` under a ``jax.set_mesh`` of explicit axes, whose types no array on an Auto mesh has.

    >>> check_no_explicit_mesh()  # nothing is set here
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit:
        raise ValueError(
            f"jax.set_mesh has set a mesh with the explicit axes {tuple(explicit)}; parameters live on meshes with "
            "Auto axes. Leave jax.set_mesh out, or set one of DeviceMeshManager.create_device_mesh (jax.make_mesh "
            "makes explicit axes unless it is given axis_types)."
        )


def mesh_axes(mesh: Mesh | AbstractMesh, axis_names: AxisNames, argument: str) -> tuple[str, ...]:
    """``axis_names`` as a tuple, checked to be axes of the mesh; ``argument`` is what an error calls them.

    >>> mesh_axes(mesh, "fsdp", "batch_axes")
    ('fsdp',)
    """
    axes = as_axis_names(axis_names)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"{argument}={axis_names!r}: the mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)}. "
            "Pass those that the batch is split over."
        )
    return axes

"""Checks type and axes of a mesh argument, and converts its axes to type ``Auto``."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.explicit_axes import with_auto_axes
from xlstm_jax.formatting import shortened

SHOWN_CHARS = 100  # length of the wrong argument in an error
USUAL_AXES = {1: ("fsdp",), 2: ("dp", "fsdp")}

AnyMesh = TypeVar("AnyMesh", bound=Mesh | AbstractMesh)


def auto_types(names: Sequence[str]) -> tuple[AxisType, ...]:
    """Returns ``AxisType.Auto`` for each axis."""
    return (AxisType.Auto,) * len(names)


def auto_mesh(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with each axis of type ``Auto``.

    >>> explicit = jax.make_mesh((2, 4), ("dp", "fsdp"))
    >>> explicit == mesh, auto_mesh(explicit) == mesh  # which is Auto
    (False, True)

    Raises:
      TypeError: ``mesh`` is not a mesh; names its type, and the call that makes a mesh.
    """
    check_mesh(mesh)
    return with_auto_axes(mesh)


def check_mesh(mesh: object, *, devices: bool = False) -> None:
    """Raises a ``TypeError`` unless ``mesh`` is a mesh, and has devices if ``devices``; shows how to make a mesh.

    >>> check_mesh(mesh)
    """
    if isinstance(mesh, Mesh) or (isinstance(mesh, AbstractMesh) and not devices):
        return
    # Typical mistakes are sizes, devices, shardings, and the function that makes a mesh: the error shows the argument.
    rule = "a mesh is a jax.sharding.Mesh: devices in an array whose dims have names"
    if isinstance(mesh, AbstractMesh):
        kind = "an AbstractMesh, which has no devices"
    else:
        kind = "None" if mesh is None else f"a {getattr(mesh, '__name__', type(mesh).__name__)}"
    shown = "" if mesh is None else f"={shortened(str(mesh), SHOWN_CHARS)}"
    raise TypeError(f"mesh{shown} is {kind}; {rule}. {_how_to_make(mesh)}")


def _how_to_make(mesh: object) -> str:
    """Returns the call for the mesh that the caller probably meant."""
    if isinstance(mesh, jax.sharding.NamedSharding):
        return "Pass the mesh of this sharding, as sharding.mesh."
    shape, rest = "{'fsdp': -1}", ""
    if isinstance(mesh, AbstractMesh | Mapping):
        shape = str(dict(mesh.shape if isinstance(mesh, AbstractMesh) else mesh))
    elif isinstance(mesh, np.ndarray | Sequence) and np.size(mesh) and isinstance(np.ravel(mesh)[0], jax.Device):
        shape, rest = f"{{'fsdp': {np.size(mesh)}}}", ", devices"
    elif (named := with_usual_names(mesh)) is not None:
        shape = str(named)
    return f"Make one by DeviceMeshManager.create_device_mesh({shape}{rest})."


def with_usual_names(sizes: Any) -> dict[str, int] | None:
    """Returns axis names with sizes for bare sizes, (2, 4) -> {"dp": 2, "fsdp": 4}; None if ``sizes`` are not sizes."""
    values: list[Any] = list(sizes) if isinstance(sizes, list | tuple) else [sizes]
    # Compare types: isinstance(True, int) is True.
    if not values or not all(type(size) is int for size in values):
        return None
    return dict(zip(USUAL_AXES.get(len(values), [f"axis_{i}" for i in range(len(values))]), values, strict=True))


def mesh_axes(mesh: Mesh | AbstractMesh, axis_names: AxisNames, argument: str) -> tuple[str, ...]:
    """Returns ``axis_names`` as a tuple, checked to be axes of the mesh; ``argument`` names the argument in errors.

    >>> mesh_axes(mesh, "fsdp", "batch_axes")
    ('fsdp',)

    Raises:
      TypeError: ``mesh`` is not a mesh.
      ValueError: the mesh lacks an axis.
    """
    check_mesh(mesh)
    axes = as_axis_names(axis_names)
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        raise ValueError(
            f"{argument}={axis_names!r}: the mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)}. "
            "Pass those that the batch is split over."
        )
    return axes

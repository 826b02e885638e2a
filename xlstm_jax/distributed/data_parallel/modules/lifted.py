"""Reads what Flax has left in closures of the transformations that made a method of a Linen module."""

import inspect
from typing import Any

from flax import linen as nn
from flax.core import lift


def closure_of_lifted(method: Any) -> dict[str, Any]:
    """Returns the variables of the transformation that made a method, around which there may be wrappers."""
    found: dict[str, Any] = {}
    while inspect.isfunction(method) and "transform" not in found:
        cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
        found, method = {name: cell.cell_contents for name, cell in cells}, getattr(method, "__wrapped__", None)
    return found


def is_unchanged(module: nn.Module, method: str, cls: type[nn.Module]) -> bool:
    """Returns whether a method is that of ``cls``, as nobody has changed it.

    A class of the user's may do something else, and so may a transformation of the model (nn.map_variables, say).
    """
    found = inspect.getattr_static(type(module), method)
    is_of_class = inspect.unwrap(found) is inspect.unwrap(getattr(cls, method))
    return is_of_class and "transform" not in closure_of_lifted(found)


def scans_over_params(cls: type[nn.Module]) -> bool:
    """Returns whether ``nn.scan`` has made this class, with a layer dim for "params"."""
    found = closure_of_lifted(vars(cls).get("__call__"))
    axes = found.get("trafo_kwargs", {}).get("variable_axes", {}) if found.get("transform") is lift.scan else {}
    return axes.get("params") is not None


def recomputes(cls: type[nn.Module]) -> bool:
    """Returns whether ``nn.remat`` has made this class, or the one that it wraps."""
    return closure_of_lifted(inspect.getattr_static(cls, "__call__", None)).get("transform") is lift.checkpoint

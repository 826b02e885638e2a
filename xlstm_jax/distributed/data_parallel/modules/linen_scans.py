"""Scans over layers of Linen modules: which classes they are, and whether a unit gathers all their layers at once."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen as nn
from flax.core import lift

from xlstm_jax.distributed.data_parallel.modules.unit import Stacks, noted_stacks


@contextmanager
def noting_scans() -> Iterator[None]:
    """While a unit runs: notes each ``nn.scan`` within it whose layers are no units (see ``noting_stacks``).

    Scans of functions are not seen: nothing here can tell what their layers are.
    """
    stacks = noted_stacks()
    if stacks is None:
        yield
        return
    stacks.units += 1
    with nn.intercept_methods(_Watch(stacks).look):
        yield


class _Watch:
    """Sees the modules that run within a unit."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._scan: tuple[type[nn.Module], int] | None = None  # that was entered last, and how many units before

    def look(self, method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        cls, units = type(context.module), self._stacks.units
        if scans_over_params(cls):
            self._scan = cls, units
        elif self._scan and context.method_name == "__call__" and cls in self._scan[0].__mro__:
            if self._scan[1] == units:  # no unit was entered since, so the layer is no unit
                self._stacks.layers[context.module.name or cls.__name__] = cls.__name__
            self._scan = None
        return method(*args, **kwargs)


def unnoted(path: str) -> None:
    """The module at ``path`` is a layer, and was sharded from outside: it gathers one layer at a time."""
    if stacks := noted_stacks():
        stacks.layers.pop(path.rpartition("/")[-1], None)


def scans_over_params(cls: type[nn.Module]) -> bool:
    """Whether ``nn.scan`` has made this class, with a layer dim for "params"; Flax leaves that in a closure only."""
    found = _closure_of_lifted(vars(cls).get("__call__"))
    axes = found.get("trafo_kwargs", {}).get("variable_axes", {}) if found.get("transform") is lift.scan else {}
    return axes.get("params") is not None


def recomputes(cls: type[nn.Module]) -> bool:
    """Whether ``nn.remat`` has made this class, or the one that it wraps."""
    return _closure_of_lifted(inspect.getattr_static(cls, "__call__", None)).get("transform") is lift.checkpoint


def _closure_of_lifted(method: Any) -> dict[str, Any]:
    """What Flax has left of the transformation that made a method, around which there may be wrappers."""
    found: dict[str, Any] = {}
    while inspect.isfunction(method) and "transform" not in found:
        found, method = dict(inspect.getclosurevars(method).nonlocals), getattr(method, "__wrapped__", None)
    return found

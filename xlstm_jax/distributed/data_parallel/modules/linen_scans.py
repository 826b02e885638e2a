"""Scans over layers within a wrapped module, which make it gather the parameters of all layers at once."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from flax import linen as nn
from flax.core import lift


class GatheredScans:
    """Finds ``nn.scan`` over layers of parameters within a wrapped module, which gathers those of all layers at once.

    ``layers`` are the names of what is scanned, and its class. A wrapped module within the scan gathers one layer at a
    time, and is not among them; nor are scans of functions, whose layers nothing here can tell.
    """

    def __init__(self) -> None:
        self.layers: dict[str, str] = {}
        self._depth = self._entered = 0
        self._scan: tuple[type[nn.Module], int] | None = None  # that was entered last, and how many wrapped ones before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Looks at all models that are initialised or applied meanwhile."""
        token = _scans.set(self)
        try:
            with nn.intercept_methods(self._look):
                yield
        finally:
            _scans.reset(token)

    @contextlib.contextmanager
    def inside_wrapper(self) -> Iterator[None]:
        """While a wrapped module runs."""
        self._entered += 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _look(self, method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        cls = type(context.module)
        if self._depth and scans_over_params(cls):
            self._scan = cls, self._entered
        elif self._scan and context.method_name == "__call__" and cls in self._scan[0].__mro__:
            if self._scan[1] == self._entered:
                self.layers[context.module.name or cls.__name__] = cls.__name__
            self._scan = None
        return method(*args, **kwargs)


_scans: ContextVar[GatheredScans | None] = ContextVar("_scans", default=None)


def inside_wrapper() -> contextlib.AbstractContextManager[None]:
    """While a wrapped module runs: tells those who watch, if any."""
    scans = _scans.get()
    return scans.inside_wrapper() if scans else contextlib.nullcontext()


def unwatched(path: str) -> None:
    """Tells those who watch that the module at ``path`` was sharded from outside: it gathers one layer at a time."""
    if scans := _scans.get():
        scans.layers.pop(path.rpartition("/")[-1], None)


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

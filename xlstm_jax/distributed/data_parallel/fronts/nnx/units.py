"""Units: the modules of a model that are gathered as one, by a subclass of their class that does so in every method.

A module that matches gets another class of the same name and nothing else: it gathers the variables below it, but for
those of units within, when a public method is entered, and drops them when it returns. ``nnx.split`` keeps classes, so
whatever splits and merges a model (``nnx.jit``, ``nnx.remat``, ``nnx.scan``) has units inside as well.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from xlstm_jax.distributed.data_parallel import boxes, collectives
from xlstm_jax.distributed.data_parallel.fronts.entering import running
from xlstm_jax.distributed.data_parallel.fronts.nnx.variables import Gathered, contents, is_split, path_of
from xlstm_jax.distributed.data_parallel.fronts.remat import remat_policy
from xlstm_jax.distributed.data_parallel.shard import ShardRule

Method = Callable[..., Any]
Where = type[nnx.Module] | tuple[type[nnx.Module], ...] | Callable[[str, nnx.Module], bool]


class Unit(NamedTuple):
    """What ``shard_nnx_modules`` was asked for: over which axes, by what rule, and when weights are dropped."""

    axes: tuple[str, ...]
    rule: ShardRule
    reshard_after_forward: bool


def matches(where: Where, path: str, module: nnx.Module) -> bool:
    """Whether a module is among those that ``where`` names: by class, or by path and module."""
    if isinstance(where, type | tuple):
        return isinstance(module, where)
    return bool(where(path, module))


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """All modules by path, the model itself at ``""``; lists and dicts of modules are none."""
    containers = (nnx.List, nnx.Dict)
    found = ((path_of(path), node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
    return {path: node for path, node in sorted(found, key=lambda item: item[0]) if not isinstance(node, containers)}


def make_unit(module: nnx.Module, unit: Unit) -> None:
    """Turns a module into a unit."""
    object.__setattr__(module, "__class__", _unit_type(type(module), unit))


def unit_of(module: Any) -> Unit | None:
    """The unit that a module is, if it is one."""
    return getattr(type(module), "_sharded_unit", None)


def own_contents(module: nnx.Module) -> dict[str, Any]:
    """The variables that a unit gathers, by path from it: those below it, but for those of units within."""
    found = list(nnx.iter_graph(module))
    within = tuple(f"{path_of(path)}/" for path, node in found if path and unit_of(node))
    own = contents(found)
    return {path: leaf for path, leaf in own.items() if not path.startswith(within)} if within else own


@functools.cache
def _unit_type(cls: type[nnx.Module], unit: Unit) -> Any:
    """A subclass that gathers in every public method. Like classes give one type: layers can still be stacked."""
    methods = {name: _gathering(cls, name) for name in _public_methods(cls)}
    return _subclass(cls, methods | {"_sharded_unit": unit})


def _subclass(cls: type[Any], fields: dict[str, Any]) -> Any:
    """A subclass of a module's class that differs in ``fields`` alone."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), same | fields, pytree=getattr(cls, "_pytree__is_pytree", True))


def _public_methods(cls: type[nnx.Module]) -> Iterator[str]:
    """The methods through which others use a module: ``__call__`` and public ones, but for NNX's own."""
    for name, method in inspect.getmembers_static(cls):
        public = name == "__call__" or not (name.startswith("_") or hasattr(nnx.Module, name))
        if public and hasattr(type(method), "__get__") and callable(method) and not isinstance(method, type):
            yield name


def _gathering(cls: type[nnx.Module], name: str) -> Method:
    plain: Any = inspect.getattr_static(cls, name)

    @functools.wraps(plain)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _running.get():
            return plain.__get__(self, cls)(*args, **kwargs)
        own, unit = own_contents(self), unit_of(self)
        if (seen := _seen.get()) is not None:
            seen.look_at(own)

        def run(module: nnx.Module, own: dict[str, Any], args: Any, kwargs: Any) -> Any:
            with _as_running(module), Gathered(own):
                return plain.__get__(module, cls)(*args, **kwargs)

        if unit is None or not any(map(is_split, own.values())):
            return run(self, {}, args, kwargs)
        with jax.named_scope(f"{cls.__name__}.sharded"):
            drops = unit.reshard_after_forward and running(unit.axes) == "manual"
            if drops and collectives.axis_size(unit.axes) > 1:
                return _dropping_gathered(run, self, args, kwargs)
            return run(self, own, args, kwargs)

    return method


_running: ContextVar[frozenset[int]] = ContextVar("_running", default=frozenset())


@contextlib.contextmanager
def _as_running(module: nnx.Module) -> Iterator[None]:
    """Meanwhile the module has gathered what it needs, and its other methods need not look."""
    token = _running.set(_running.get() | {id(module)})
    try:
        yield
    finally:
        _running.reset(token)


def _dropping_gathered(run: Method, module: nnx.Module, args: Any, kwargs: Any) -> Any:
    """Runs a method; what it gathers is gathered again for the backward pass."""
    values, put_back = _split_values((args, kwargs))
    rebuild: list[Callable[[Any], Any]] = []

    def rerun(module: nnx.Module, values: dict[int, Any]) -> dict[int, Any]:
        args, kwargs = put_back(values)
        results, put_results_back = _split_values(run(module, own_contents(module), args, kwargs))
        rebuild.append(put_results_back)
        return results

    results = nnx.remat(rerun, policy=remat_policy("everything"))(module, values)
    return rebuild[-1](results)


def _split_values(tree: Any) -> tuple[dict[int, Any], Callable[[dict[int, Any]], Any]]:
    """The arrays and NNX's objects of a tree by position, and a function that puts others there; the rest stays."""
    found, treedef = boxes.flatten_with_path(tree, nnx.Pytree)
    leaves = [leaf for _, leaf in found]
    moving = (jax.Array, np.ndarray, nnx.Pytree, nnx.Variable)
    values = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, moving)}
    rest = [None if i in values else leaf for i, leaf in enumerate(leaves)]
    return values, lambda new: jax.tree.unflatten(treedef, [new.get(i, leaf) for i, leaf in enumerate(rest)])


# -------------------------------------------------------------------------------------------------- carries that vary

_varying: ContextVar[frozenset[str]] = ContextVar("_varying", default=frozenset())


@contextlib.contextmanager
def carries_vary_over(axes: Collection[str]) -> Iterator[None]:
    """Meanwhile, the first carries of recurrent cells are typed as varying over the axes, as those that follow are."""
    token = _varying.set(frozenset(axes))
    try:
        yield
    finally:
        _varying.reset(token)


def let_carries_vary(module: nnx.Module) -> None:
    """Gives the recurrent cells of a model, which make zeros for a carry, a class that knows of varying axes."""
    for cell in modules_of(module).values():
        if isinstance(cell, nnx.RNNCellBase):
            object.__setattr__(cell, "__class__", _varying_cell_type(type(cell)))


@functools.cache
def _varying_cell_type(cls: type[nnx.RNNCellBase]) -> Any:
    @functools.wraps(cls.initialize_carry)
    def initialize_carry(self: nnx.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        return collectives.to_varying(cls.initialize_carry(self, *args, **kwargs), _varying.get())

    return _subclass(cls, {"initialize_carry": initialize_carry})


# --------------------------------------------------------------------------------------------------- what a layer is

LEAF_PATH = "leaf_path"  # in the metadata of a variable, while what units see is looked at


class SeenShapes:
    """The shapes that units see of their variables: those of one layer, where the model scans over layers."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> "SeenShapes":
        self._token = _seen.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _seen.reset(self._token)

    def look_at(self, variables: dict[str, Any]) -> None:
        """Notes the shapes of a unit's variables by their path in the model."""
        for leaf in variables.values():
            if isinstance(leaf, nnx.Variable) and (path := leaf.get_metadata(LEAF_PATH, None)):
                self.shapes[path] = np.shape(leaf.get_raw_value())


_seen: ContextVar[SeenShapes | None] = ContextVar("_seen", default=None)

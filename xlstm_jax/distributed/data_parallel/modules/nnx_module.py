"""NNX modules as units, by a subclass of their class that gathers in every public method.

A chosen module gets another class of the same name, and is not changed otherwise. When a public method is entered, it
gathers the variables below it, except those of units within; when the method returns, it drops them. ``nnx.split``
keeps classes, so a model that ``nnx.jit``, ``nnx.remat`` or ``nnx.scan`` splits and merges still has its units.
"""

import functools
import inspect
from typing import Any

import numpy as np
from flax import nnx

from xlstm_jax.distributed.data_parallel.modules.nnx_variables import Gathered, is_split, is_variable, path_of
from xlstm_jax.distributed.data_parallel.modules.unit import Method, ModuleSystem, dropping, entered, public_methods
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives

NOTE_SHAPE = "note_shape"  # in the metadata of a variable: a function that a unit calls with the shape that it sees


def _is_method(attribute: Any) -> bool:
    """Whether an attribute of a class is a method, be it transformed, by ``nnx.jit`` say."""
    return hasattr(type(attribute), "__get__") and callable(attribute) and not isinstance(attribute, type)


NNX = ModuleSystem(nnx.Module, nnx.remat, _is_method, (nnx.Pytree, nnx.Variable))


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """All modules by path, the model itself at ``""``; lists and dicts of modules are none."""
    containers = (nnx.List, nnx.Dict)
    found = ((path_of(path), node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
    return {path: node for path, node in sorted(found, key=lambda item: item[0]) if not isinstance(node, containers)}


def make_unit(module: nnx.Module, policy: ShardPolicy) -> None:
    """Turns a module into a unit."""
    object.__setattr__(module, "__class__", _unit_type(type(module), policy))


def own_variables(module: nnx.Module) -> dict[str, Any]:
    """The variables that a unit gathers, by path from it: those below it, but for those of units within."""
    nodes = list(nnx.iter_graph(module))
    within = [path for path, node in nodes if path and hasattr(type(node), "_shard_policy")]
    own = ((path, leaf) for path, leaf in nodes if is_variable(leaf))
    return {path_of(path): leaf for path, leaf in own if not any(path[: len(unit)] == unit for unit in within)}


def _split_variables(module: nnx.Module) -> dict[str, Any]:
    return {path: leaf for path, leaf in own_variables(module).items() if is_split(leaf)}


@functools.cache
def _unit_type(cls: type[nnx.Module], policy: ShardPolicy) -> Any:
    """A subclass that gathers in every public method. Like classes give one type: layers can still be stacked."""
    methods = {name: _gathering(cls, name, policy) for name in public_methods(cls, NNX)}
    return _subclass(cls, methods | {"_shard_policy": policy})


def _subclass(cls: type[Any], fields: dict[str, Any]) -> Any:
    """A subclass of a module's class that differs in ``fields`` alone."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), same | fields, pytree=getattr(cls, "_pytree__is_pytree", True))


def _gathering(cls: type[nnx.Module], name: str, policy: ShardPolicy) -> Method:
    plain: Any = inspect.getattr_static(cls, name)

    def whole(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with Gathered(_split_variables(module)):
            return plain.__get__(module, cls)(*args, **kwargs)

    @functools.wraps(plain)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        _note_shapes(self)
        if not _split_variables(self):  # none was ever split, or another method of the module has gathered them
            return plain.__get__(self, cls)(*args, **kwargs)
        return entered(NNX, cls.__name__, dropping(whole, NNX, policy), self, args, kwargs)

    return method


def _note_shapes(module: nnx.Module) -> None:
    """Of the variables whose shapes somebody asks for: those of one layer, where the model scans over layers."""
    for leaf in own_variables(module).values():
        if note := leaf.get_metadata(NOTE_SHAPE, None):
            note(np.shape(leaf.get_raw_value()))


def let_carries_vary(model: nnx.Module, axes: frozenset[str]) -> None:
    """Makes the first carries of recurrent cells vary over axes (see ``carry_axes``), by a class that casts them."""
    for cell in modules_of(model).values() if axes else ():
        if isinstance(cell, nnx.RNNCellBase):
            object.__setattr__(cell, "__class__", _varying_cell_type(type(cell), axes))


@functools.cache
def _varying_cell_type(cls: type[nnx.RNNCellBase], axes: frozenset[str]) -> Any:
    @functools.wraps(cls.initialize_carry)
    def initialize_carry(self: nnx.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        return collectives.to_varying(cls.initialize_carry(self, *args, **kwargs), axes)

    return _subclass(cls, {"initialize_carry": initialize_carry})

"""Units: the modules of a model that are gathered as one, by a subclass of their class that does so in every method.

A module that matches gets another class of the same name and nothing else: it gathers the variables below it, but for
those of units within, when a public method is entered, and drops them when it returns. ``nnx.split`` keeps classes, so
whatever splits and merges a model (``nnx.jit``, ``nnx.remat``, ``nnx.scan``) has units inside as well.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from flax import nnx

from xlstm_jax.distributed.data_parallel.fronts.entering import Unit, running
from xlstm_jax.distributed.data_parallel.fronts.nnx.variables import Gathered, is_split, is_variable, path_of
from xlstm_jax.distributed.data_parallel.fronts.remat import named_input, remat_policy, split_arrays
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.tracing import set_context
from xlstm_jax.wording import kind_of

Method = Callable[..., Any]

OBJECTS = (nnx.Pytree, nnx.Variable)  # what is passed on as it is, though JAX might take it apart


def predicate(where: Any) -> Callable[[str, nnx.Module], Any]:
    """``where`` as a function of path and module.

    Raises:
      TypeError: it is no class of modules, no tuple of such and no function.
    """
    classes = where if isinstance(where, tuple) else (where,)
    if classes and all(isinstance(cls, type) and issubclass(cls, nnx.Module) for cls in classes):
        return lambda path, module: isinstance(module, classes)
    if callable(where) and not isinstance(where, type | nnx.Module):
        return where
    raise TypeError(
        f"where is {kind_of(where)}; of an NNX model, pass a class of modules (nnx.Linear) or a tuple of them, or a "
        "predicate of (path, module), as lambda path, module: path.startswith('blocks/')."
    )


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


def own_variables(module: nnx.Module) -> dict[str, Any]:
    """The variables that a unit gathers, by path from it: those below it, but for those of units within."""
    found = list(nnx.iter_graph(module))
    within = [path for path, node in found if path and unit_of(node)]
    own = ((path, leaf) for path, leaf in found if is_variable(leaf))
    return {path_of(path): leaf for path, leaf in own if not any(path[: len(unit)] == unit for unit in within)}


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
        own, unit = own_variables(self), unit_of(self)
        if (seen := SEEN.get()) is not None:
            seen |= {leaf.get_metadata(LEAF_PATH, ""): np.shape(leaf.get_raw_value()) for leaf in own.values()}
        split = {path: leaf for path, leaf in own.items() if is_split(leaf)}

        def run(module: nnx.Module, split: dict[str, Any], args: Any, kwargs: Any) -> Any:
            with set_context(_running, _running.get() | {id(module)}), Gathered(split):
                return plain.__get__(module, cls)(*args, **kwargs)

        if unit is None or not split:
            return run(self, {}, args, kwargs)
        args, kwargs = named_input(args, kwargs, *OBJECTS)
        with jax.named_scope(f"{cls.__name__}.sharded"):
            drops = unit.reshard_after_forward and running(unit.axes) == "manual"
            if drops and collectives.axis_size(unit.axes) > 1:
                return _dropping_gathered(run, self, args, kwargs)
            return run(self, split, args, kwargs)

    return method


# The modules that have gathered what they need, so that their other methods need not look.
_running: ContextVar[frozenset[int]] = ContextVar("_running", default=frozenset())


def _dropping_gathered(run: Method, module: nnx.Module, args: Any, kwargs: Any) -> Any:
    """Runs a method; what it gathers is gathered again for the backward pass."""
    values, put_back = split_arrays((args, kwargs), *OBJECTS)
    rebuild: list[Callable[[Any], Any]] = []

    def rerun(module: nnx.Module, values: dict[int, Any]) -> dict[int, Any]:
        args, kwargs = put_back(values)
        split = {path: leaf for path, leaf in own_variables(module).items() if is_split(leaf)}
        results, put_results_back = split_arrays(run(module, split, args, kwargs), *OBJECTS)
        rebuild.append(put_results_back)
        return results

    results = nnx.remat(rerun, policy=remat_policy("everything"))(module, values)
    return rebuild[-1](results)


# -------------------------------------------------------------------------------------------------- carries that vary

# The axes over which the first carries of recurrent cells are typed as varying, as those that follow are.
VARYING: ContextVar[frozenset[str]] = ContextVar("VARYING", default=frozenset())


def let_carries_vary(module: nnx.Module) -> None:
    """Gives the recurrent cells of a model, which make zeros for a carry, a class that knows of varying axes."""
    for cell in modules_of(module).values():
        if isinstance(cell, nnx.RNNCellBase):
            object.__setattr__(cell, "__class__", _varying_cell_type(type(cell)))


@functools.cache
def _varying_cell_type(cls: type[nnx.RNNCellBase]) -> Any:
    @functools.wraps(cls.initialize_carry)
    def initialize_carry(self: nnx.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        return collectives.to_varying(cls.initialize_carry(self, *args, **kwargs), VARYING.get())

    return _subclass(cls, {"initialize_carry": initialize_carry})


# --------------------------------------------------------------------------------------------------- what a layer is

LEAF_PATH = "leaf_path"  # in the metadata of a variable, while what units see is looked at

# Then, by that path, the shapes that units see of their variables: of one layer, where the model scans over layers.
SEEN: ContextVar[dict[str, tuple[int, ...]] | None] = ContextVar("SEEN", default=None)

"""Sharding of a Linen model's submodules from outside: the model runs under an interceptor of its modules' methods.

The sharded model has a subclass whose public methods run under the interceptor of a ``LinenRun``. Linen calls the
interceptor for each method of each module inside.
  init    when a method of a chosen module returns, its parameters are split, and boxed in place
  apply   when a chosen module is entered, its method runs as a function of the module, lifted by ``with_gathers``: the
          parameters are gathered before, and dropped after
Linen runs a module's ``setup`` before the interceptors. A parameter that ``setup`` reads is gathered by the box. The
method then runs on a copy of the module, which runs ``setup`` again, so XLA removes the first gather.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flax import linen as nn
from flax.linen.transforms import get_module_scopes

from xlstm_jax.distributed.data_parallel.extension import MODULES, arguments_from, initialising
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_gathered_here
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    LINEN,
    RECORDED_STACKS,
    MapOfLeaves,
    active_interceptors_of,
    class_and_fields,
    inside_unit,
    methods_to_lift,
    run_in_unit,
    with_gathers,
)
from xlstm_jax.distributed.data_parallel.modules.unit import Method, Predicate, is_public
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.formatting import path_pattern
from xlstm_jax.introspection import inside_map_variables

SHOWN = 12  # modules that an error lists


@dataclass(frozen=True)
class Selection:
    """Choice of units: modules for which ``predicate`` is true; without a predicate, modules larger than ``size``.

    Units are chosen while the model is initialised, each unit when it is left. The boxes of the unit's parameters then
    name the gathering module; without a predicate, ``apply`` reads the units in these boxes.
    """

    predicate: Predicate | None = None
    size: int = 0

    def __repr__(self) -> str:
        return f"larger_than({self.size})"


@dataclass(frozen=True)
class Sharding:
    """Arguments of one ``shard_modules`` call: the selection, ``where`` as given, other options, and kind of run."""

    selection: Selection
    where: Any
    policy: ShardPolicy
    run: type["LinenRun"]


def sharded_model(model: Any, sharding: Sharding) -> Any:
    """Returns ``model`` with its class replaced by a subclass that shards the modules chosen by ``sharding``.

    ``sharding`` has the arguments of a ``shard_modules`` call. An instance gives an instance with equal fields, a class
    the subclass, and a ``functools.partial`` of a class a ``partial`` of the subclass with the same arguments.

    Raises:
      TypeError: ``model`` is an instance that its parent module has named already.
    """
    if isinstance(model, functools.partial):
        return functools.partial(sharded_model(model.func, sharding), *model.args, **model.keywords)
    if isinstance(model, nn.Module):
        cls, fields = class_and_fields(model, "shard_modules({}, where, axis_name)")
        return _subclass(cls, sharding)(**fields)
    return _subclass(model, sharding)


def _subclass(cls: type[nn.Module], sharding: Sharding) -> Any:
    """Returns a subclass of ``cls`` whose public methods split and gather the parameters of chosen modules inside.

    ``sharding`` has the arguments of a ``shard_modules`` call, which choose the modules. The names of the class and of
    the parameters stay.
    """
    methods = {name: _intercepted(getattr(cls, name), sharding) for name in methods_to_lift(cls)}
    methods["__init__"] = vars(cls)["__init__"]  # a decorator may have replaced it
    new = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name, method in methods.items():  # not in the class body: Linen would wrap the methods again
        setattr(new, name, method)
    return new


def _intercepted(plain: Method, sharding: Sharding) -> Method:
    """Returns a method of a sharded model that runs ``plain``, the method of the user's class, with gathers inside.

    The method calls ``plain`` under the interceptor of a new ``LinenRun``, which splits and gathers the parameters of
    the modules that ``sharding`` chooses. If the model is unbound, or if the same model already runs such a method,
    ``plain`` is called without a new interceptor.
    """

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A method that calls another one of the same model starts no new run.
        runs = [(run.sharding, run.root) for run in active_interceptors_of(LinenRun)]
        if self.scope is None or (sharding, self.path) in runs:
            return plain(self, *args, **kwargs)
        with nn.intercept_methods(sharding.run(sharding, self.path).intercept):
            return plain(self, *args, **kwargs)

    return method


# The objects of interceptors, such as a ``LinenRun``, for which the running modules are no part of their model.
RUNS_AROUND: ContextVar[Sequence[Any]] = ContextVar("RUNS_AROUND", default=())


def apart_from_model() -> AbstractContextManager[None]:
    """Returns a context for modules that a sharded model's method runs although they are no part of the model.

    Modules that run in the context are not sharded: the model's ``LinenRun`` neither splits nor gathers their
    parameters.
    """
    return set_context(RUNS_AROUND, active_interceptors_of(object))


@dataclass(eq=False)
class LinenRun:
    """State of a running method of a sharded model: modules entered and chosen. Paths are relative to the model."""

    sharding: Sharding
    root: tuple[str, ...]
    _open_modules: list[tuple[str, type[nn.Module]]] = field(default_factory=list)
    # During initialisation: the modules that have run, and, for each parameter of a unit, the path of the unit.
    _seen: dict[str, type[nn.Module]] = field(default_factory=dict)
    _unit_of: dict[str, str] = field(default_factory=dict)
    _has_units: bool = False  # a unit may have no parameters

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Returns the result of ``method``; splits or gathers the parameters of the module if the module is a unit.

        This is an interceptor for ``nn.intercept_methods``, called for every method of a module. In ``init`` the
        parameters of a unit are split after its method; in ``apply`` the parameters are gathered before, and dropped
        after. Private methods, unbound modules and modules outside of the model run unchanged.
        """
        module, name, policy = context.module, context.method_name, self.sharding.policy
        if module.scope is None or not is_public(name, LINEN):
            return method(*args, **kwargs)
        # Linen inspects the setup of modules made by nn.scan before they are called.
        if not hasattr(type(module), name) or module.path[: len(self.root)] != self.root or self in RUNS_AROUND.get():
            return method(*args, **kwargs)
        path, cls = "/".join(module.path[len(self.root) :]), type(module)
        if isinstance(module, MODULES["changed_arguments"]):
            args, kwargs = arguments_from(None, module, name, args, kwargs)
        # A module of another class at the same path shares the module's scope (``share_scope``).
        at_path = [entered_cls for entered_path, entered_cls in self._open_modules if entered_path == path]
        if [other for other in at_path if issubclass(cls, other) or issubclass(other, cls)]:
            return method(*args, **kwargs)
        self._open_modules.append((path, cls))
        try:
            if module.is_initializing():
                with initialising(module, name) if isinstance(module, MODULES["initialising"]) else nullcontext():
                    return self._initialise(path, module, functools.partial(method, *args, **kwargs))
            # The predicate first: without it the parameters of all modules inside are read.
            predicate = self.sharding.selection.predicate
            if predicate and not predicate(path, module):
                return method(*args, **kwargs)
            # For each split parameter, without those of units inside: whether its box names this module as its unit.
            # ``unit_depth`` counts the names of the leaf's path below its unit.
            model_split = [
                leaf.unit_depth == 1 + name.count("/")
                for _, name, leaf in parameters(module)
                if any(map(policy.has_axis, leaf.axes)) and is_gathered_here(f"params/{name}", leaf)
            ]
            # Without a predicate the boxes choose the units.
            if not model_split or not (predicate or any(model_split)):
                return method(*args, **kwargs)
            if stacks := RECORDED_STACKS.get():
                stacks.layers.pop(path.rpartition("/")[-1], None)  # a layer that is a unit is gathered by itself
            user_method = context.orig_method.func  # type: ignore[attr-defined]  # a partial of the method and its module

            # Operation names contain the method's name; a forecast reads modules from them.
            def sharded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return user_method(module, *args, **kwargs)

            # Lifted as a function in each call, so that the module keeps the user's class.
            # ``None``: ``sharded`` is a function of a module, not a class with methods.
            method_with_gather = with_gathers(sharded, None, policy)
            return run_in_unit(
                module, name, method_with_gather, policy, args, kwargs, lambda module, name, result: result
            )
        finally:
            self._open_modules.pop()

    def _initialise(self, path: str, module: nn.Module, method: Callable[[], Any]) -> Any:
        """Returns the result of ``method``, a method of ``module`` in ``init``; splits a chosen module's parameters.

        ``method`` takes no arguments and is called first. Then the ``Selection`` decides whether the module is a unit,
        by predicate or by the number of values. Parameters of units inside stay with these units.

        Raises:
          ValueError: ``module`` is the model, and no module was chosen; or a predicate has chosen a module inside an
            ``nn.map_variables`` of the model.
        """
        selection, policy = self.sharding.selection, self.sharding.policy
        predicate = selection.predicate
        with inside_unit(module, policy.axes) if predicate and predicate(path, module) else nullcontext():
            result = method()
        self._seen[path] = type(module)
        is_chosen = predicate is None or bool(predicate(path, module))
        # The parameters of the module and its submodules, by path in the model, as "h_0/mlp/kernel".
        leaves = {
            "/".join((*place[len(self.root) :], name)): leaf
            for place, name, leaf in (parameters(module) if is_chosen else ())
        }
        if predicate is None:
            # Inside nn.scan: the sizes of one layer.
            own = [leaf for name, leaf in leaves.items() if self._unit_of.get(name, path) == path]
            # A cell would gather at every step of its loop; the RNN around it gathers once.
            is_chosen = sum([math.prod(leaf.true_shape) for leaf in own]) > selection.size
            is_chosen = is_chosen and not isinstance(module, nn.RNNCellBase)
        if is_chosen and not (inside_map_variables(MapOfLeaves) and self._is_left_out(path)):
            # Units inside were left earlier, and keep their parameters.
            self._has_units, self._unit_of = True, dict.fromkeys(leaves, path) | self._unit_of
            if stacks := RECORDED_STACKS.get():
                stacks.layers.pop(path.rpartition("/")[-1], None)
            # The module holds unsharded parameters: a lifted function without effect splits them when it returns.
            with_gathers(do_nothing, None, policy)(module)
        if len(self._open_modules) == 1 and not path and not self._has_units:
            self._refuse(module)
        return result

    def _is_left_out(self, path: str) -> bool:
        """Returns True or raises, for the module at ``path``, which is inside an ``nn.map_variables`` of the model.

        Such a module cannot be a unit: the map would compute from shards. True if units are chosen by size
        (``larger_than``), which passes over the module: a module around the map may be chosen, and gathers before the
        map runs.

        Raises:
          ValueError: units are chosen by a class or a predicate, which has chosen the module.
        """
        if not self.sharding.selection.predicate:
            return True
        outer = path.rpartition("/")[0]
        raise ValueError(
            f"shard_modules: '{path}' runs within an nn.map_variables of the model (nn.WeightNorm and nn.SpectralNorm "
            "contain one), which would compute from shards. Choose the module around the map: "
            f"where=lambda path, module: path == {outer!r}, or larger_than(size)."
        )

    def _refuse(self, model: nn.Module) -> NoReturn:
        """Raises a ``ValueError`` that ``where`` of ``shard_modules`` has chosen no module; lists the modules."""
        outer_first = sorted(self._seen.items(), key=lambda item: item[0].count("/"))
        patterns = {path_pattern(f"{path}/")[:-1]: cls.__name__ for path, cls in outer_first if path}
        described = [f"{path!r} ({name})" for path, name in patterns.items()]
        more = f" and {len(described) - SHOWN} more" if len(described) > SHOWN else ""
        raise ValueError(
            f"shard_modules: where={self.sharding.where!r} chooses none of the modules of {type(model).__name__}: "
            f"'' (the model itself), {', '.join(described[:SHOWN])}{more}. Pass a class or a predicate of one of these."
        )


def do_nothing(module: nn.Module) -> None:
    """Does nothing. ``with_gathers(do_nothing, ...)``, called on a module in ``init``, splits its parameters."""


def parameters(module: nn.Module) -> list[tuple[tuple[str, ...], str, Sharded]]:
    """Returns (module path, name, leaf) for each parameter of a module, its submodules and modules in its fields.

    The module path is a tuple of names from the model on. The name is relative to this path, as "mlp/kernel". Each leaf
    is a ``Sharded``: a bare value is put into a box.
    """
    scopes = get_module_scopes(module)[0]
    params = [(scope.path, sharded_leaves(scope.variables().get("params", {}))) for scope in scopes]
    return [(place, name, leaf) for place, leaves in params for name, leaf in leaves]

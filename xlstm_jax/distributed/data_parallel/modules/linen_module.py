"""Units of Linen, and the modules that ``shard_modules`` chooses in a model from outside.

When a public method of a unit is entered, ``gather_here`` gathers the module's variables. When ``init`` returns,
``shard_here`` splits the variables. For a plan (under a ``planning_mesh``) ``init`` puts every leaf into a box with the
decisions on the leaf. ``linen_class`` makes units of classes and functions, by ``shard_module_params``.

The model of ``shard_modules`` has a subclass whose public methods run under the interceptor of a ``LinenRun``. Linen
calls the interceptor for each method of each module inside.
  init    when a method of a chosen module returns, its parameters are split, and boxed in place
  apply   when a chosen module is entered, its method runs as a function of the module, lifted by ``with_gathers``: the
          parameters are gathered before, and dropped after
Linen runs a module's ``setup`` before the interceptors. A parameter that ``setup`` reads is gathered by the box. The
method then runs on a copy of the module, which runs ``setup`` again, so XLA removes the first gather.
"""

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
from flax import linen as nn
from flax.core import lift
from flax.errors import ScopeParamShapeError
from flax.linen.transforms import get_module_scopes, lift_transform

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extension import (
    COLLECTIONS,
    EXTENSIONS,
    MODULES,
    Extension,
    arguments_from,
    computed_from_shards,
    initialising,
)
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_gathered_here
from xlstm_jax.distributed.data_parallel.modules import unit
from xlstm_jax.distributed.data_parallel.modules.dropping import dropping
from xlstm_jax.distributed.data_parallel.modules.linen_errors import (
    inside_map_error,
    no_unit_error,
)
from xlstm_jax.distributed.data_parallel.modules.stacks import RECORDED_STACKS
from xlstm_jax.distributed.data_parallel.modules.unit import (
    Method,
    ModuleSystem,
    Predicate,
    gather_here,
    is_public,
    running,
    shard_here,
)
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.introspection import inside_map_variables, scans_over_params
from xlstm_jax.private_names import linen_interceptors

Watcher = TypeVar("Watcher")

LINEN = ModuleSystem(nn.Module, lift.checkpoint)  # methods are lifted to functions of scopes


class MapOfLeaves(functools.partial[PyTree]):
    """Class of the library's functions for ``nn.map_variables``, by which they differ from maps of the user's model."""


def with_gathers(target: Any, methods: list[str] | None, policy: ShardPolicy) -> Any:
    """Returns a subclass of ``target`` whose ``methods`` gather parameters, run, and drop the gathered parameters.

    In ``init`` the parameters that a method has made are split when the method returns. With ``methods=None``,
    ``target`` is a function of a module, ``f(module, ...)``, and the result is a function with the same arguments that
    gathers the module's parameters, calls ``target``, and drops the gathered parameters.
    """
    gather, shard = MapOfLeaves(_gathered, policy), functools.partial(shard_here, policy)
    new = nn.map_variables(target, ["params", *COLLECTIONS], gather, shard, mutable=True, methods=methods)
    if methods is not None:
        # Linen makes an __init__ for each class, without decorators around the target's __init__.
        new.__init__ = target.__init__
    # The checkpoint of ``dropping`` encloses the gather, which then runs again in the backward pass.
    return lift_transform(dropping, new, LINEN, policy, methods=methods) if policy.reshard_after_forward else new


def _gathered(policy: ShardPolicy, variables: PyTree) -> PyTree:
    """Returns the variables of the running unit as its module reads them: split leaves gathered, without boxes.

    ``policy`` has the options of the unit (a module that gathers its parameters to run). The path of the unit, for
    errors, and its extensions are read from the innermost active ``RunningUnit``, if there is one.
    """
    units = active_interceptors_of(RunningUnit)
    if not units:
        return gather_here(policy, variables)
    return gather_here(policy, variables, units[0].path, units[0].extensions)


def methods_to_lift(cls: type[nn.Module]) -> list[str]:
    """Returns the names of the methods of a Linen class that gather parameters if the class is wrapped; sorted.

    These are ``__call__`` and the public methods, without methods of ``nn.Module`` itself, methods under ``nn.nowrap``,
    and fields that hold a function.
    """
    fields = {field.name for field in dataclasses.fields(cls)}  # a field's default may be a function, as nn.relu
    names = [name for name in unit.public_methods(cls, LINEN) if name not in fields]
    return [name for name in names if not getattr(inspect.getattr_static(cls, name), "nowrap", False)]


def run_in_unit(
    module: nn.Module, name: str, gathering: Method, policy: ShardPolicy, args: Any, kwargs: Any, returned: Method
) -> Any:
    """Returns the result of the method ``name`` of a unit (a wrapped module), computed from shards if possible.

    Inside ``shard_map``, and not in ``init``, an extension such as a row lookup may compute the result from shards,
    without a gather. Otherwise ``gathering`` gathers the parameters and runs the method.

    Args:
      module: the unit, bound to its variables.
      name: name of the method.
      gathering: ``gathering(module, *args, **kwargs)`` gathers, runs the method, and returns its result.
      policy: the options of the unit.
      args, kwargs: arguments of the method, without the module.
      returned: ``returned(module, name, result)`` converts a result that was computed from shards.
    """

    def from_shards(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not module.is_initializing() and running(policy.axes) == "manual":
            result = computed_from_shards(module, name, policy, args, kwargs)
            if result is not None:
                return returned(module, name, result)
        return gathering(module, *args, **kwargs)

    with inside_unit(module, policy.axes):
        run = from_shards if isinstance(module, MODULES["computes"]) else gathering
        return unit.entered(LINEN, module.name or type(module).__name__, run, module, args, kwargs)


def class_and_fields(module: nn.Module, call: str) -> tuple[type[nn.Module], dict[str, Any]]:
    """Returns the class of a module instance, and the fields by name from which a subclass makes an equal instance.

    The fields include ``name`` and ``parent``. ``call`` is the user's call for the error, with "{}" in place of the
    module, as "shard_module_params({}, axis_name)".

    Raises:
      TypeError: a parent module has already named and registered the instance.
    """
    cls = type(module)
    if isinstance(module.parent, nn.Module) and module.name is not None:
        raise TypeError(
            f"{call.partition('(')[0]} got the instance {cls.__name__}(name={module.name!r}), which "
            f"{type(module.parent).__name__} has named and registered already. Wrap the class, then make the instance: "
            f"{call.format(cls.__name__)}(...)."
        )
    return cls, {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.init}


# -------------------------------------------------------------------------------------------------------- running units


def active_interceptors_of(kind: type[Watcher]) -> list[Watcher]:
    """Returns the objects of class ``kind`` of which a bound method is an active interceptor of Linen; innermost first.

    Active interceptors are the functions that the surrounding ``nn.intercept_methods`` contexts have received. They are
    read from Linen's stack, because users' functions run between the code that sets an interceptor and the code that
    looks for the interceptor. Interceptors that are plain functions are left out.
    """
    return [watcher for method in linen_interceptors if isinstance(watcher := getattr(method, "__self__", None), kind)]


# Of the context that Linen passes to an interceptor: the function of the called method, which takes the module first.
# The method is of the module's class or of a parent.
_called = operator.attrgetter("orig_method.func")


@dataclasses.dataclass(frozen=True, eq=False)
class RunningUnit:
    """Record of a unit whose method runs.

    Attributes:
      path: the path of the unit in the model, for leaf names in errors.
      extensions: the extensions of the unit.
      collections: the collections of the unit, beside "params", that extensions read.
    """

    path: tuple[str, ...]
    extensions: list[Extension]
    collections: list[str]

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Returns the result of ``method``, called with arguments that the unit's extensions may have changed.

        This is an interceptor for ``nn.intercept_methods``: Linen calls it for methods of the unit and of modules
        inside. A scan over layers (``nn.scan``) inside the unit is added to ``RECORDED_STACKS``, if the layer is not a
        unit itself: then this unit gathers the weights of all layers at once.
        """
        module, name = context.module, context.method_name
        if self.collections or isinstance(module, MODULES["changed_arguments"]):
            args, kwargs = arguments_from(self.extensions, module, name, _called(context), args, kwargs)
        stacks, cls = RECORDED_STACKS.get(), type(module)
        if stacks is None or name == "setup":
            return method(*args, **kwargs)
        # Flax runs a function of the scan before the scan. The layer is the next module of its class that is called; if
        # it is a unit, ``inside_unit`` has deleted the scan before.
        if scans_over_params(cls):
            stacks.scan = cls
        elif stacks.scan and name == "__call__" and cls in stacks.scan.__mro__:
            stacks.layers[module.name or cls.__name__] = cls.__name__
            stacks.scan = None
        return method(*args, **kwargs)


@contextmanager
def inside_unit(module: nn.Module, axes: tuple[str, ...]) -> Iterator[None]:
    """Enters a context in which ``module`` is the running unit, which ``active_interceptors_of(RunningUnit)`` finds.

    The unit's extensions may change the arguments of methods that run in the context. If the module reads a full array
    where its parameter is a shard over ``axes``, Linen raises a shape error; the context replaces this error by
    ``closed_over_error``, which names the leaf and the cure.
    """
    scope: Any = module.scope
    present = [name for name in COLLECTIONS if not scope.is_collection_empty(name)]
    # An extension that reads collections has an instance only in a unit with one of them.
    extensions = [cls() for cls in EXTENSIONS if not cls.collections or not set(cls.collections).isdisjoint(present)]
    if stacks := RECORDED_STACKS.get():
        stacks.scan = None
    try:
        with nn.intercept_methods(RunningUnit(module.path, extensions, present).intercept):
            yield
    except ScopeParamShapeError as error:
        params = module.variables.get("params", {}) if running(axes) == "manual" else {}
        for path, leaf in sharded_leaves(params):
            # Linen's text contains the shape of the parameter, and not its name.
            if unit.split_over(leaf, axes) and f"generate shape {np.shape(leaf.value)}," in str(error):
                raise unit.closed_over_error("/".join((*module.path, path)), leaf, axes) from None
        raise


# --------------------------------------------------------------------------------- modules of a model, from outside


@dataclasses.dataclass(frozen=True)
class Selection:
    """Choice of units: modules for which ``predicate`` is true; without a predicate, modules larger than ``size``.

    Units are chosen while the model is initialised, each unit when it is left. The boxes of the unit's parameters then
    name the gathering module; without a predicate, ``apply`` reads the units in these boxes.
    """

    predicate: Predicate | None = None
    size: int = 0

    def __repr__(self) -> str:
        return f"larger_than({self.size})"


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(eq=False)
class LinenRun:
    """State of a running method of a sharded model: modules entered and chosen. Paths are relative to the model."""

    sharding: Sharding
    root: tuple[str, ...]
    _open_modules: list[tuple[str, type[nn.Module]]] = dataclasses.field(default_factory=list)
    # During initialisation: the modules that have run, and, for each parameter of a unit, the path of the unit.
    _seen: dict[str, type[nn.Module]] = dataclasses.field(default_factory=dict)
    _unit_of: dict[str, str] = dataclasses.field(default_factory=dict)
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
            args, kwargs = arguments_from(None, module, name, _called(context), args, kwargs)
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
            user_method = _called(context)

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
        if is_chosen and inside_map_variables(MapOfLeaves):
            # The map of the model would compute from shards. A module around it may be chosen by size instead.
            if predicate:
                raise inside_map_error(path)
            is_chosen = False
        if is_chosen:
            # Units inside were left earlier, and keep their parameters.
            self._has_units, self._unit_of = True, dict.fromkeys(leaves, path) | self._unit_of
            if stacks := RECORDED_STACKS.get():
                stacks.layers.pop(path.rpartition("/")[-1], None)
            # The module holds unsharded parameters: a lifted function without effect splits them when it returns.
            with_gathers(do_nothing, None, policy)(module)
        if len(self._open_modules) == 1 and not path and not self._has_units:
            raise no_unit_error(self.sharding.where, type(module), self._seen)
        return result


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

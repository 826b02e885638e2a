"""``shard_modules``: submodules of a model are sharded from outside, without an edit of its source.

The model that comes back is of a class that differs in one thing: its public methods run under an interceptor, which
Linen calls at each method of each module within.
  init    when a module that was chosen is left, its parameters are split and boxed where they lie
  apply   when a module is entered of which the boxes say that it gathers them, its method runs as a function of the
          module under ``shard_module_params``: gathered before, dropped after
Linen runs a module's ``setup`` before its interceptors. What that reads is gathered by the box itself, and since the
method then runs on a copy of the module, with a ``setup`` of its own, XLA removes the first gather.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
from flax import linen as nn
from flax.linen.transforms import get_module_scopes
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.fronts.entering import ShardsItself, Unit, gather_here
from xlstm_jax.distributed.data_parallel.fronts.linen.carries import with_varying_carry
from xlstm_jax.distributed.data_parallel.fronts.linen.policies import Choice, Seen, SeenModule, as_choice
from xlstm_jax.distributed.data_parallel.fronts.linen.refusals import named_in_errors, refused_in_map
from xlstm_jax.distributed.data_parallel.fronts.linen.scans import inside_wrapper, scans_over_params, unwatched
from xlstm_jax.distributed.data_parallel.fronts.linen.wrapping import (
    Method,
    is_nnx,
    is_public,
    public_methods,
    shard_module_params,
    taken_apart,
)
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.shard import is_gathered_here, names_below
from xlstm_jax.distributed.data_parallel.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, UNEVEN
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.communication import Replicas
from xlstm_jax.distributed.data_parallel.wire.tracing import inside_map_variables
from xlstm_jax.wording import kind_of, path_pattern

Model = TypeVar("Model", bound=nn.Module | Callable[..., Any] | ShardsItself)

SHOWN = 12  # modules that an error lists


def shard_modules(
    model: Model,
    where: Any,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    reshard_after_forward: bool = False,
    replicas: Replicas | None = None,
    uneven: str = UNEVEN[0],
    trainable: bool = True,
) -> Model:
    """Shards submodules of a model from outside, as if ``shard_module_params`` were around them in its source.

    >>> mlp = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(16)])
    >>> model = shard_modules(mlp, nn.Dense, "fsdp", min_weight_size=64)
    >>> params = init_sharded(model, mesh, jax.random.key(0), jnp.ones((8, 32)), batch_axes=("dp", "fsdp"))["params"]
    >>> params["layers_0"]["kernel"].names, params["layers_2"]["kernel"].names
    ((None, 'fsdp'), ('fsdp', None))

    The model has the class name, fields, parameter names, shapes and initial values that it had, and is used as before:
    by ``init`` and ``apply``, within another module, under ``nn.scan`` or ``nn.remat``. ``nn.remat``, ``nn.scan`` and
    ``nn.jit`` around a submodule that is sharded stay around it.

    Of modules within each other that are both chosen, the inner gathers its own parameters, and the outer the rest. A
    parameter that is read elsewhere, past the module that gathers it (a tied head), is gathered for each such read.

    Args:
      model: a Linen module, its class, or a ``functools.partial`` of one; or an NNX model, as ``nnx_model`` makes it.
      where: which submodules; the model itself, at path "", is one of them.
        - a module class or a tuple of classes, subclasses included;
        - a predicate of a path, as "encoder/layer/0", and the module there;
        - ``larger_than(size)``, or ``repeated_blocks()``, of a Linen model.
      axis_name: and all that follow it: see ``shard_module_params``.
    Raises:
      ValueError: (in ``init``; at once, of an NNX model) nothing was chosen; lists the modules that there are.
      TypeError: ``model`` is no Linen module, or an instance that its parent has already named; ``where`` is none of
        these; or as ``shard_module_params`` raises.
    """
    options: dict[str, Any] = {
        "axis_name": axis_name,
        "min_weight_size": min_weight_size,
        "gather_dtype": gather_dtype,
        "grad_scatter_dtype": grad_scatter_dtype,
        "reshard_after_forward": reshard_after_forward,
        "replicas": replicas,
        "uneven": uneven,
        "trainable": trainable,
    }
    unit = Unit.of(**options)  # refuses options here and not in the first call
    if isinstance(model, ShardsItself) and not isinstance(model, type):
        return model.with_units(where, unit)
    _check_model(model)
    lift = functools.partial(shard_module_params, **options)
    return _sharded(model, _Sharding(as_choice(where), where, unit.axes, lift))


@dataclass(frozen=True)
class _Sharding:
    """The arguments of one ``shard_modules``; ``lift`` is ``shard_module_params`` with its options."""

    choice: Choice
    where: Any
    axes: tuple[str, ...]
    lift: Callable[[Method], Method]


def _nothing(module: nn.Module) -> None:
    """Lifted and run in an initialisation, it splits the parameters of a module that is there."""


def _sharded(model: Any, sharding: _Sharding) -> Any:
    if isinstance(model, functools.partial):
        return functools.partial(_sharded(model.func, sharding), *model.args, **model.keywords)
    if isinstance(model, nn.Module):
        cls, fields = taken_apart(model, "shard_modules({}, where, axis_name)")
        return _subclass(cls, sharding)(**fields)
    return _subclass(model, sharding)


def _check_model(model: Any) -> None:
    made = model.func if isinstance(model, functools.partial) else model
    if not (isinstance(made, nn.Module) or (isinstance(made, type) and issubclass(made, nn.Module))):
        raise TypeError(f"shard_modules takes a Linen module or its class, not {kind_of(made)}.{_cure(made)}")


def _cure(model: Any) -> str:
    if is_nnx(model if isinstance(model, type) else type(model)):
        return " For flax.nnx: shard_modules(nnx_model(lambda rngs: MyModule(..., rngs=rngs)), where, axis_name)."
    held = [name for name, value in getattr(model, "__dict__", {}).items() if isinstance(value, nn.Module)]
    return f" Its {held[0].lstrip('_')!r} is one: pass that." if held else ""


def _subclass(cls: type[nn.Module], sharding: _Sharding) -> Any:
    """The class, with public methods that run under the interceptor. It keeps its name, as names of parameters do."""
    methods = {name: _intercepted(getattr(cls, name), sharding) for name in public_methods(cls)}
    methods["__init__"] = vars(cls)["__init__"]  # which a decorator may have replaced
    new = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name, method in methods.items():  # not in the body of the class, where Linen would make new methods of them
        setattr(new, name, method)
    return new


_running: ContextVar[tuple["_Run", ...]] = ContextVar("_running", default=())


def _intercepted(plain: Method, sharding: _Sharding) -> Method:
    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runs = _running.get()
        if self.scope is None or any(run.sharding is sharding and run.root == self.path for run in runs):
            return plain(self, *args, **kwargs)
        run = _Run(sharding, self.path)
        token = _running.set((*runs, run))
        try:
            with nn.intercept_methods(run.intercept):
                return plain(self, *args, **kwargs)
        finally:
            _running.reset(token)

    return method


class _Run:
    """One call of a method of a sharded model."""

    def __init__(self, sharding: _Sharding, root: tuple[str, ...]) -> None:
        self.sharding, self.root, self.seen = sharding, root, Seen()
        self._entered: list[tuple[str, type[nn.Module]]] = []
        self._scan: type[nn.Module] | None = None  # that was looked at last

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """For ``nn.intercept_methods``: enters a module by its outermost public method."""
        module, name = context.module, context.method_name
        if module.scope is None or not is_public(name):
            return method(*args, **kwargs)
        if not hasattr(type(module), name):  # Linen looks at the setup of what nn.scan has made, before it is called
            self._scan = type(module) if scans_over_params(type(module)) else self._scan
            return method(*args, **kwargs)
        if module.path[: len(self.root)] != self.root:
            return method(*args, **kwargs)
        path = "/".join(module.path[len(self.root) :])
        if self._scan and type(module) in self._scan.__mro__:
            self.seen.scanned.add(path)
            self._scan = None
        kwargs = with_varying_carry(module, name, args, kwargs)
        if self._is_inside(path, type(module)):
            return method(*args, **kwargs)
        with self._inside(path, type(module)):
            if module.is_initializing():
                return self._initialise(path, module, functools.partial(method, *args, **kwargs))
            if not self._gathers(path, module):
                return method(*args, **kwargs)
            in_profiles = jax.named_scope(f"{module.name or type(module).__name__}.sharded")
            with in_profiles, named_in_errors(module, self.sharding.axes), inside_wrapper():
                return self._lifted(context)(module, *args, **kwargs)

    def _lifted(self, context: nn.module.InterceptorContext) -> Method:
        """The method as a function of a module whose parameters are gathered."""
        plain = context.orig_method.func  # type: ignore[attr-defined]  # a partial of the method and its module

        def sharded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return plain(module, *args, **kwargs)

        return self.sharding.lift(sharded)

    def _gathers(self, path: str, module: nn.Module) -> bool:
        """Whether a module has split parameters to gather, and was chosen."""
        leaves = [found for place in _places(module) for found in leaves_with_path({"params": _params(place)})]
        own = [
            leaf_of(leaf).unit_depth == names_below(name)
            for name, leaf in leaves
            if set(leaf_of(leaf).axes) & set(self.sharding.axes) and is_gathered_here(name, leaf)
        ]
        return bool(own) and self.sharding.choice.gathers(path, module, any(own))

    def _initialise(self, path: str, module: nn.Module, method: Callable[[], Any]) -> Any:
        """Runs a method of a module, and splits the parameters of those that were chosen when it is left."""
        choice = self.sharding.choice
        with inside_wrapper() if choice.gathers(path, module, False) else nullcontext():
            result = method()
        self.seen.modules[path] = self._seen(module)
        units = choice.units(self.seen, path, module)
        if path in units and inside_map_variables(gather_here):
            units = refused_in_map(path, choice.is_policy)
        for unit in units:
            self.seen.choose(unit)
            self._split(unit, path, module)
        if len(self._entered) == 1 and not path and not self.seen.units:
            self._refuse(module)
        return result

    def _seen(self, module: nn.Module) -> SeenModule:
        places = {"/".join(scope.path[len(self.root) :]): _params(scope) for scope in _places(module)}
        found = [(place, leaf) for place, params in places.items() for leaf in leaves_with_path(params)]
        shapes = {f"{place}/{name}".lstrip("/"): leaf_of(leaf).true_shape for place, (name, leaf) in found}
        return SeenModule(type(module), tuple(places), shapes)

    def _split(self, unit: str, path: str, module: nn.Module) -> None:
        """Splits the parameters of the unit, which is the module at ``path``, or lies below it."""
        unwatched(unit)
        split = self.sharding.lift(_nothing)
        if unit == path:
            split(module)
        for place in self.seen.modules[unit].places if unit != path else ():
            scope: Any = module.scope
            for name in place.removeprefix(path).strip("/").split("/"):
                scope = scope.push(name, reuse=True)
            split(_Place(parent=scope))

    def _refuse(self, model: nn.Module) -> NoReturn:
        outer_first = sorted(self.seen.modules.items(), key=lambda item: item[0].count("/"))
        patterns = {path_pattern(f"{path}/")[:-1]: seen.cls.__name__ for path, seen in outer_first if path}
        there = [f"{path!r} ({name})" for path, name in patterns.items()]
        more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
        raise ValueError(
            f"shard_modules: where={self.sharding.where!r} chooses none of the modules of {type(model).__name__}: "
            f"'' (the model itself), {', '.join(there[:SHOWN])}{more}. Pass a class or a predicate of one of these."
        )

    def _is_inside(self, path: str, cls: type[nn.Module]) -> bool:
        """Whether the module at ``path`` was entered; one of another class there shares its scope (``share_scope``)."""
        return any(path == at and (issubclass(cls, of) or issubclass(of, cls)) for at, of in self._entered)

    @contextmanager
    def _inside(self, path: str, cls: type[nn.Module]) -> Iterator[None]:
        self._entered.append((path, cls))
        try:
            yield
        finally:
            self._entered.pop()


class _Place(nn.Module):
    """A module at some path of the model, to reach the parameters there."""


def _places(module: nn.Module) -> list[Any]:
    """The scopes of a module's variables: its own, and those of the modules that it was given."""
    return get_module_scopes(module)[0]


def _params(scope: Any) -> PyTree:
    return scope.variables().get("params", {})

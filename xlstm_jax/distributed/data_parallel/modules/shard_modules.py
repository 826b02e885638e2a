"""``shard_modules``: submodules of a model are sharded from outside, without an edit of its source.

The new model has a class that differs in one thing: its public methods run under an interceptor, which Linen calls at
each method of each module within.
  init    when a chosen module is left, its parameters are split, and boxed where they lie
  apply   when a chosen module is entered, its method runs as a function of the module that ``lifted`` has lifted: the
          parameters are gathered before, and dropped after
Linen runs a module's ``setup`` before its interceptors. A parameter that ``setup`` reads is gathered by its box. The
method then runs on a copy of the module, with a ``setup`` of its own, so XLA removes the first gather.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from flax import linen as nn
from flax.linen.transforms import get_module_scopes
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    LINEN,
    enter,
    is_nnx,
    lifted,
    methods_to_lift,
    taken_apart,
    with_varying_carry,
)
from xlstm_jax.distributed.data_parallel.modules.linen_scans import noting_scans, scans_over_params, unnoted
from xlstm_jax.distributed.data_parallel.modules.selection import Seen, SeenModule, Selection, as_selection
from xlstm_jax.distributed.data_parallel.modules.unit import Method, ShardsItself, gather_here, is_public
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.shard import is_gathered_here, names_below
from xlstm_jax.distributed.data_parallel.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, UNEVEN
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.communication import Replicas
from xlstm_jax.distributed.data_parallel.wire.tracing import inside_map_variables, set_context
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
    policy = ShardPolicy(
        axis_name,
        min_weight_size,
        gather_dtype,
        grad_scatter_dtype,
        reshard_after_forward=reshard_after_forward,
        replicas=replicas,
        uneven=uneven,
        trainable=trainable,
    )
    if isinstance(model, ShardsItself) and not isinstance(model, type):
        return model.with_units(where, policy)
    _check_model(model)
    return _sharded(model, _Sharding(as_selection(where), where, policy))


@dataclass(frozen=True)
class _Sharding:
    """The arguments of one ``shard_modules``."""

    selection: Selection
    where: Any
    policy: ShardPolicy


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
    methods = {name: _intercepted(getattr(cls, name), sharding) for name in methods_to_lift(cls)}
    methods["__init__"] = vars(cls)["__init__"]  # which a decorator may have replaced
    new = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name, method in methods.items():  # not in the body of the class, where Linen would make new methods of them
        setattr(new, name, method)
    return new


# The sharded models that are being called. A method that calls another one of the same model starts no new run.
_running: ContextVar[tuple["_Run", ...]] = ContextVar("_running", default=())


def _intercepted(plain: Method, sharding: _Sharding) -> Method:
    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runs = _running.get()
        if self.scope is None or any(run.sharding is sharding and run.root == self.path for run in runs):
            return plain(self, *args, **kwargs)
        run = _Run(sharding, self.path)
        with set_context(_running, (*runs, run)), nn.intercept_methods(run.intercept):
            return plain(self, *args, **kwargs)

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
        if module.scope is None or not is_public(name, LINEN):
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
            return enter(module, self._lifted(context), self.sharding.policy, args, kwargs)

    def _lifted(self, context: nn.module.InterceptorContext) -> Method:
        """The method as a function of a module whose parameters are gathered."""
        plain = context.orig_method.func  # type: ignore[attr-defined]  # a partial of the method and its module

        def sharded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return plain(module, *args, **kwargs)

        return lifted(sharded, None, self.sharding.policy)

    def _gathers(self, path: str, module: nn.Module) -> bool:
        """Whether a module has split parameters to gather, and was chosen."""
        leaves = [found for place in _places(module) for found in leaves_with_path({"params": _params(place)})]
        own = [
            leaf_of(leaf).unit_depth == names_below(name)
            for name, leaf in leaves
            if set(leaf_of(leaf).axes) & set(self.sharding.policy.axes) and is_gathered_here(name, leaf)
        ]
        return bool(own) and self.sharding.selection.gathers(path, module, any(own))

    def _initialise(self, path: str, module: nn.Module, method: Callable[[], Any]) -> Any:
        """Runs a method of a module, and splits the parameters of those that were chosen when it is left."""
        selection = self.sharding.selection
        with noting_scans() if selection.gathers(path, module, False) else nullcontext():
            result = method()
        self.seen.modules[path] = self._seen(module)
        units = selection.units(self.seen, path, module)
        if path in units and inside_map_variables(gather_here):
            units = _refused_in_map(path, selection)
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
        unnoted(unit)
        split = lifted(_nothing, None, self.sharding.policy)
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


def _refused_in_map(path: str, selection: Selection) -> list[str]:
    """No unit at ``path``, within an ``nn.map_variables`` of the model: that would map shards, weight norm by hand say.

    ``larger_than`` leaves its parameters to the module around it, which gathers them before.

    Raises:
      ValueError: the module was chosen by its class, or by a predicate.
    """
    if not selection.names_modules:
        return []
    outer = path.rpartition("/")[0]
    raise ValueError(
        f"shard_modules: '{path}' runs within an nn.map_variables of the model (nn.WeightNorm and nn.SpectralNorm are "
        "made of it), which would compute from shards what it is to compute from whole parameters. Choose the module "
        f"around it, which gathers before: where=lambda path, module: path == {outer!r}, or larger_than(size)."
    )


class _Place(nn.Module):
    """A module at some path of the model, to reach the parameters there."""


def _places(module: nn.Module) -> list[Any]:
    """The scopes of a module's variables: its own, and those of the modules that it was given."""
    return get_module_scopes(module)[0]


def _params(scope: Any) -> PyTree:
    return scope.variables().get("params", {})

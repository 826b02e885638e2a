"""``shard_modules``: shards submodules of a model from outside, without changes to the model's source.

The returned model has a subclass whose public methods run under an interceptor. Linen calls the interceptor for each
method of each module inside.
  init    when a chosen module is left, its parameters are split, and boxed in place
  apply   when a chosen module is entered, its method runs as a function of the module, lifted by ``lifted``: the
          parameters are gathered before, and dropped after
Linen runs a module's ``setup`` before the interceptors. A parameter that ``setup`` reads is gathered by the box. The
method then runs on a copy of the module, which runs ``setup`` again, so XLA removes the first gather.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from flax import linen as nn
from flax.linen.transforms import get_module_scopes
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.extension import called, initialising, passing_collections
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_gathered_here
from xlstm_jax.distributed.data_parallel.modules.default_units import DEFAULT_UNITS, DEFAULT_UNITS_MIN_WEIGHT_SIZE
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    LINEN,
    MapOfLeaves,
    RunningUnit,
    class_and_fields,
    enter,
    gathers_one_layer,
    inside_unit,
    is_nnx,
    lifted,
    methods_to_lift,
    watching,
)
from xlstm_jax.distributed.data_parallel.modules.unit import (
    Method,
    Predicate,
    SeenModule,
    ShardsItself,
    UnitRule,
    as_predicate,
    is_public,
    is_within,
    note_units,
    shard_here,
)
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE, DEFAULT_UNEVEN, ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import map_leaves_with_path, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.formatting import kind_of, path_pattern
from xlstm_jax.introspection import inside_map_variables, is_batched
from xlstm_jax.program_names import INTER_HOST_AXES

Model = TypeVar("Model", bound=nn.Module | Callable[..., Any] | ShardsItself)

SHOWN = 12  # modules that an error lists


def shard_modules(
    model: Model,
    where: Any = DEFAULT_UNITS,
    axis_name: AxisNames | None = None,
    min_weight_size: int | None = None,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    reshard_after_forward: bool = False,
    replicas: Copies | None = None,
    uneven: str = DEFAULT_UNEVEN,
    trainable: bool = True,
    inter_host_axes: AxisNames | tuple[()] = INTER_HOST_AXES,
) -> Model:
    """Shards submodules of a model from outside, like ``shard_module_params`` around the submodules in the source.

    >>> mlp = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(16)])
    >>> model = shard_modules(mlp, nn.Dense, "fsdp", min_weight_size=64)
    >>> params = init_sharded(model, mesh, jax.random.key(0), jnp.ones((8, 32)), batch_axes=("dp", "fsdp"))["params"]
    >>> params["layers_0"]["kernel"].names, params["layers_2"]["kernel"].names
    ((None, 'fsdp'), ('fsdp', None))

    The returned model keeps class name, fields, parameter names, shapes and initial values, and is used in the same
    way: by ``init`` and ``apply``, within another module, under ``nn.scan`` or ``nn.remat``. An ``nn.remat``,
    ``nn.scan`` or ``nn.jit`` around a sharded submodule stays around the submodule.

    If a chosen module contains another chosen module, the inner module gathers its parameters, and the outer module the
    rest. A parameter read outside of its gathering module (a tied head) is gathered for each read.

    Args:
      model: a Linen module, its class, or a ``functools.partial`` of a class; or an NNX model, made by ``nnx_model``.
      where: selects submodules; the model itself, at path "", is included. By default a rule selects the blocks of
        loops, the layers of scans, embeddings, and other modules that own parameters; ``plan_sharding`` lists the
        modules with the reasons (docs/howto/five_lines.md).
        - a module class or a tuple of classes, subclasses included;
        - a predicate of a path, as "encoder/layer/0", and the module at this path;
        - ``larger_than(size)``, for a Linen model;
        - a filter of NNX on modules, for an NNX model: ``nnx.All(nnx.Linear, nnx.PathContains("mlp"))``.
      axis_name: see ``shard_module_params``, also for the following arguments. None: the axes of the mesh that
        ``create_fsdp_mesh`` makes: ``fsdp``, or each axis with a name that begins with ``fsdp_``.
      min_weight_size: None: 2**18, or 2**14 without ``where``.
    Raises:
      ValueError: (in ``init``; immediately for an NNX model) no module was chosen; lists the modules of the model.
      TypeError: ``model`` is not a Linen module, or an instance that has already been named by its parent; ``where``
        has another form; or as ``shard_module_params`` raises.
    """
    if min_weight_size is None:
        min_weight_size = DEFAULT_UNITS_MIN_WEIGHT_SIZE if where is DEFAULT_UNITS else DEFAULT_MIN_WEIGHT_SIZE
    policy = ShardPolicy(
        axis_name,
        min_weight_size,
        gather_dtype,
        grad_scatter_dtype,
        reshard_after_forward=reshard_after_forward,
        replicas=replicas,
        uneven=uneven,
        trainable=trainable,
        inter_host_axes=inter_host_axes,
    )
    if isinstance(model, ShardsItself) and not isinstance(model, type):
        return model.with_units(where, policy)
    _check_model(model)
    if isinstance(where, UnitRule):
        return _sharded(model, _Sharding(Selection(rule=where), where, policy))
    selection = where if isinstance(where, Selection) else Selection(as_predicate(where, LINEN))
    return _sharded(model, _Sharding(selection, where, policy))


@dataclass(frozen=True)
class Selection:
    """Choice of units: by ``rule``; modules for which ``predicate`` is true; or else modules larger than ``size``.

    Units are chosen while the model is initialised, each unit when it is left; a rule chooses when the model is left,
    since it reads all modules. The boxes of the unit's parameters then name the gathering module; a choice by size or
    by rule reads these boxes in ``apply``.
    """

    predicate: Predicate | None = None
    size: int = 0
    rule: UnitRule | None = None

    def __repr__(self) -> str:
        return f"larger_than({self.size})"

    def takes(self, path: str, module: nn.Module, by_size: bool) -> bool:
        """Returns whether the module at ``path`` is a unit; ``by_size`` is the result if there is no predicate."""
        return bool(self.predicate(path, module)) if self.predicate else by_size


def larger_than(size: int) -> Selection:
    """Selects, for ``shard_modules``, modules whose parameters have more than ``size`` values.

    The parameters of chosen submodules do not count. So the innermost modules that are large enough are chosen, and a
    module around them gathers the rest if the rest is large enough, too. The cell of an ``nn.RNN`` is never chosen,
    since it would gather at every step of the loop; the RNN may be chosen.

    >>> model = shard_modules(nn.Sequential([nn.Dense(64), nn.Dense(4)]), larger_than(1000), "fsdp", min_weight_size=0)
    >>> plan = plan_sharding(model, {"fsdp": 4}, jnp.ones((8, 32)))
    >>> [(row.path, row.parts, row.gathered_with) for row in plan.rows if row.path.endswith("kernel")]
    [('layers_0/kernel', 4, 'layers_0'), ('layers_1/kernel', 1, None)]

    Args:
      size: a number of values, as 2**20.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"size={size!r} is no number of values; pass an int, as 2**20.")
    return Selection(size=size)


@dataclass(frozen=True)
class _Sharding:
    """Arguments of one ``shard_modules`` call: the selection, ``where`` as given for errors, and other options."""

    selection: Selection
    where: Any
    policy: ShardPolicy


def _sharded(model: Any, sharding: _Sharding) -> Any:
    """Returns the model, its class or its ``partial``, with a subclass that shards chosen modules."""
    if isinstance(model, functools.partial):
        return functools.partial(_sharded(model.func, sharding), *model.args, **model.keywords)
    if isinstance(model, nn.Module):
        cls, fields = class_and_fields(model, "shard_modules({}, where, axis_name)")
        return _subclass(cls, sharding)(**fields)
    return _subclass(model, sharding)


def _check_model(model: object) -> None:
    """Raises a ``TypeError`` unless ``model`` is a Linen module, its class, or a ``partial`` of the class."""
    made = model.func if isinstance(model, functools.partial) else model
    cls = made if isinstance(made, type) else type(made)
    if issubclass(cls, nn.Module):
        return
    held = [name for name, value in getattr(made, "__dict__", {}).items() if isinstance(value, nn.Module)]
    cure = f" Its {held[0].lstrip('_')!r} is one: pass that." if held else ""
    if is_nnx(cls):
        cure = " For flax.nnx: shard_modules(nnx_model(lambda rngs: MyModule(..., rngs=rngs)), where, axis_name)."
    raise TypeError(f"shard_modules takes a Linen module or its class, not {kind_of(made)}.{cure}")


def _subclass(cls: type[nn.Module], sharding: _Sharding) -> Any:
    """Returns a subclass whose public methods shard the chosen modules inside. Class and parameter names stay."""
    methods = {name: _intercepted(getattr(cls, name), sharding) for name in methods_to_lift(cls)}
    methods["__init__"] = vars(cls)["__init__"]  # a decorator may have replaced it
    new = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name, method in methods.items():  # not in the class body: Linen would wrap the methods again
        setattr(new, name, method)
    return new


def _intercepted(plain: Method, sharding: _Sharding) -> Method:
    """Returns a method of a sharded model that runs ``plain`` under the interceptor of a new ``_Run``."""

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A method that calls another one of the same model starts no new run.
        if self.scope is None or any(run.sharding is sharding and run.root == self.path for run in watching(_Run)):
            return plain(self, *args, **kwargs)
        with nn.intercept_methods(_Run(sharding, self.path).intercept):
            return plain(self, *args, **kwargs)

    return method


def apart_from_model() -> AbstractContextManager[None]:
    """Returns a context in which a sharded model's method can run a module that is no part of the model, unsharded."""
    return nn.intercept_methods(_ApartMarker().intercept)


class _ApartMarker:
    """Marker on Linen's stack of interceptors: a ``_Run`` below the marker ignores modules that run above."""

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Interceptor for ``nn.intercept_methods`` that only calls the method: its place on the stack is the marker."""
        return method(*args, **kwargs)


@dataclass(eq=False)
class _Run:
    """State of a running method of a sharded model: modules entered and chosen. Paths are relative to the model."""

    sharding: _Sharding
    root: tuple[str, ...]
    _entered: list[tuple[str, type[nn.Module]]] = field(default_factory=list)
    # During initialisation: the modules that have run, and, for each parameter of a unit, the path of the unit.
    _seen: dict[str, type[nn.Module]] = field(default_factory=dict)
    _unit_of: dict[str, str] = field(default_factory=dict)
    _has_units: bool = False  # a unit may have no parameters
    # During initialisation by a rule: the modules that own parameters; the size of each parameter in the outermost
    # module that has been left, with the path of the module; the modules that nn.scan runs for each layer.
    _owners: set[str] = field(default_factory=set)
    _sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    _layers: set[str] = field(default_factory=set)

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Interceptor for ``nn.intercept_methods``: splits or gathers the parameters of a chosen module."""
        module, name, policy = context.module, context.method_name, self.sharding.policy
        watchers = watching(object)
        is_apart = _ApartMarker in map(type, watchers[: watchers.index(self)])  # the module is not part of the model
        if is_apart or module.scope is None or not is_public(name, LINEN):
            return method(*args, **kwargs)
        # Linen inspects the setup of modules made by nn.scan before they are called.
        if not hasattr(type(module), name) or module.path[: len(self.root)] != self.root:
            return method(*args, **kwargs)
        path, cls = "/".join(module.path[len(self.root) :]), type(module)
        kwargs = called(module, name, args, kwargs)
        # A module of another class at the same path shares the module's scope (``share_scope``).
        if any(path == at and (issubclass(cls, of) or issubclass(of, cls)) for at, of in self._entered):
            return method(*args, **kwargs)
        self._entered.append((path, cls))
        try:
            if module.is_initializing():
                initialise = self._initialise_by_rule if self.sharding.selection.rule else self._initialise
                with initialising(module, name):
                    return initialise(path, module, functools.partial(method, *args, **kwargs))
            if not self._gathers(path, module):
                return method(*args, **kwargs)
            gathers_one_layer(path)
            plain = context.orig_method.func  # type: ignore[attr-defined]  # a partial of the method and its module

            # Operation names contain the method's name; a forecast reads modules from them.
            def sharded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return plain(module, *args, **kwargs)

            # Lifted as a function in each call, so that the module keeps the user's class.
            gathering = lifted(sharded, None, policy)
            return enter(module, name, gathering, policy, args, kwargs, lambda module, name, result: result)
        finally:
            self._entered.pop()

    def _gathers(self, path: str, module: nn.Module) -> bool:
        """Returns whether the module at ``path`` was chosen as a unit and has split parameters of its own to gather."""
        selection = self.sharding.selection
        if not selection.takes(path, module, True):  # before the parameters of all modules within are read
            return False
        # True if the box names this module: ``unit_depth`` counts the names of the leaf's path below its unit.
        own = [
            leaf.unit_depth == 1 + name.count("/")
            for _, name, leaf in _parameters(module)
            if any(map(self.sharding.policy.has_axis, leaf.axes)) and is_gathered_here(f"params/{name}", leaf)
        ]
        return bool(own) and selection.takes(path, module, any(own))

    def _initialise(self, path: str, module: nn.Module, method: Callable[[], Any]) -> Any:
        """Runs a method of a module in ``init``; then splits the module's parameters if the module is chosen."""
        selection, policy = self.sharding.selection, self.sharding.policy
        with inside_unit(module, policy.axes) if selection.takes(path, module, False) else nullcontext():
            result = method()
        self._seen[path] = type(module)
        # Inside nn.scan: the sizes of one layer.
        sizes = {
            "/".join((*place[len(self.root) :], name)): math.prod(leaf.true_shape)
            for place, name, leaf in _parameters(module)
        }
        own_size = sum(size for leaf, size in sizes.items() if self._unit_of.get(leaf, path) == path)
        # A cell would gather at every step of its loop; the RNN around it gathers once.
        by_size = own_size > selection.size and not isinstance(module, nn.RNNCellBase)
        if selection.takes(path, module, by_size) and not (
            inside_map_variables(MapOfLeaves) and self._is_left_out(path)
        ):
            # Units inside were left earlier, and keep their parameters.
            self._has_units, self._unit_of = True, dict.fromkeys(sizes, path) | self._unit_of
            gathers_one_layer(path)
            # The module holds unsharded parameters: a lifted function without effect splits them when it returns.
            lifted(_nothing, None, policy)(module)
        if len(self._entered) == 1 and not path and not self._has_units:
            self._refuse(module)
        return result

    def _initialise_by_rule(self, path: str, module: nn.Module, method: Callable[[], Any]) -> Any:
        """Runs a method of a module, and splits the parameters of the module, as the unit for now.

        How a parameter is split follows from its shape in the module that owns it. Its unit is chosen from all modules
        of the model, when the model is left.
        """
        result = method()
        # A cell would gather at every step of its loop: the module around the loop owns the cell's parameters.
        if any(issubclass(cls, nn.RNNCellBase) for _, cls in self._entered):
            return result
        watchers = watching(object)
        is_in_unit = any(isinstance(watcher, RunningUnit) for watcher in watchers[: watchers.index(self)])
        params = {"/".join((*place[len(self.root) :], name)): (name, leaf) for place, name, leaf in _parameters(module)}
        # Under nn.vmap a leaf is one entry of the parameter, and in an nn.map_variables of the model (nn.WeightNorm) it
        # is not the parameter: a module around these owns the leaf.
        is_foreign = is_in_unit or inside_map_variables(MapOfLeaves)
        if is_foreign or any(is_batched(leaf.value) for _, leaf in params.values()):
            return result

        self._seen[path] = type(module)
        for full, (_, leaf) in params.items():
            size, inner = self._sizes.get(full, (math.prod(leaf.true_shape), path))
            # A parameter that has grown since a module within was left has got a layer dim.
            if size != math.prod(leaf.true_shape):
                self._layers.add(inner)
            self._sizes[full] = math.prod(leaf.true_shape), path
        # A leaf that had a unit before belongs to a module that the model itself has wrapped. nn.scan runs a layer
        # twice, first for its shapes: in the second run the leaves of the layer are new again.
        new = {
            name
            for full, (name, leaf) in params.items()
            if self._unit_of.get(full, path) == path and not leaf.unit_depth
        }
        if new:
            self._owners.add(path)
            self._unit_of |= {full: path for full, (name, _) in params.items() if name in new}
            _map_params(module, functools.partial(_split, self.sharding.policy, new))
        if len(self._entered) == 1 and not path:
            self._choose_units(module)
        return result

    def _choose_units(self, model: nn.Module) -> None:
        """Chooses the units by the rule, and enters them in the boxes of the parameters."""
        rule = self.sharding.selection.rule
        assert rule is not None
        modules = {
            path: SeenModule(cls, path in self._owners, issubclass(cls, nn.Embed), is_layer=path in self._layers)
            for path, cls in sorted(self._seen.items())
        }
        chosen = rule.choose(modules)
        depths = {}
        for full, owner in self._unit_of.items():
            unit = max((unit for unit in chosen if is_within(owner, unit)), key=len, default=owner)
            # A loop owns the parameters of a cell that was made outside of the loop: they are not below its path.
            if is_within(full, unit):
                depths[full] = len(full.split("/")) - len(unit.split("/") if unit else [])
        _map_params(model, functools.partial(_with_units, depths))
        at = "/".join(self.root)
        note_units({f"{at}/{path}".strip("/"): reason for path, reason in chosen.items()})

    def _is_left_out(self, path: str) -> bool:
        """Returns True if a module inside the model's ``nn.map_variables`` must not be chosen: with ``larger_than``.

        The map would compute from shards. A module around the map may be chosen, and gathers before the map runs.

        Raises:
          ValueError: the module was chosen by class or by predicate.
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
        """Raises the error that ``where`` has chosen no module; lists the modules of the model."""
        outer_first = sorted(self._seen.items(), key=lambda item: item[0].count("/"))
        patterns = {path_pattern(f"{path}/")[:-1]: cls.__name__ for path, cls in outer_first if path}
        there = [f"{path!r} ({name})" for path, name in patterns.items()]
        more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
        raise ValueError(
            f"shard_modules: where={self.sharding.where!r} chooses none of the modules of {type(model).__name__}: "
            f"'' (the model itself), {', '.join(there[:SHOWN])}{more}. Pass a class or a predicate of one of these."
        )


def _nothing(module: nn.Module) -> None:
    """Does nothing. ``lifted(_nothing, ...)``, called on a module in ``init``, splits the module's parameters."""


def _map_params(module: nn.Module, change: Callable[[PyTree], PyTree]) -> None:
    """Replaces the variables of a module during initialisation."""
    kept = MapOfLeaves(lambda variables: variables)
    nn.map_variables(_nothing, ["params", *passing_collections()], kept, change, mutable=True)(module)


def _split(policy: ShardPolicy, new: Collection[str], variables: PyTree) -> PyTree:
    """Returns the variables with the parameters named in ``new`` split; others were split in a module within."""

    def split_if_new(path: str, split: Any, leaf: Any) -> Any:
        return split if path.removeprefix("params/") in new else leaf

    return map_leaves_with_path(split_if_new, shard_here(policy, variables), variables)


def _with_units(depths: Mapping[str, int], variables: PyTree) -> PyTree:
    """Returns the variables of a model with the unit of each parameter in its box, as ``unit_depth``."""

    def with_depth(path: str, leaf: Any) -> Any:
        depth = depths.get(path.removeprefix("params/"))
        return leaf if depth is None or not isinstance(leaf, Sharded) else leaf.replace(unit_depth=depth)

    return map_leaves_with_path(with_depth, variables)


def _parameters(module: nn.Module) -> list[tuple[tuple[str, ...], str, Sharded]]:
    """Returns (module path, name, leaf) for each parameter of a module and of modules passed to the module."""
    scopes = get_module_scopes(module)[0]
    params = [(scope.path, sharded_leaves(scope.variables().get("params", {}))) for scope in scopes]
    return [(place, name, leaf) for place, leaves in params for name, leaf in leaves]

"""``shard_module_params``: a Linen module, or a function of one, as a unit.

The variables of a wrapped module pass ``gather_here`` where a public method is entered, and ``shard_here`` where
``init`` leaves it. For a plan, under a ``planning_mesh``, init puts every leaf into a box that says what was decided.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
from flax import linen as nn
from flax.core import lift
from flax.errors import ScopeParamShapeError
from flax.linen.transforms import lift_transform
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.extension import (
    Extension,
    computed_from_shards,
    computes,
    extensions_of,
    initialising,
    kwargs_from,
    passing_collections,
)
from xlstm_jax.distributed.data_parallel.modules import unit
from xlstm_jax.distributed.data_parallel.modules.unit import Method, ModuleSystem, gather_here, running, shard_here
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE, DEFAULT_UNEVEN, ShardPolicy
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.foreign import scans_over_params
from xlstm_jax.private_names import linen_callers, linen_interceptors
from xlstm_jax.program_names import INTER_HOST_AXES
from xlstm_jax.wording import kind_of

Target = TypeVar("Target", bound=nn.Module | Callable[..., Any])
Watcher = TypeVar("Watcher")

LINEN = ModuleSystem(nn.Module, lift.checkpoint)  # methods are lifted to functions of scopes


def shard_module_params(
    target: Target,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    reshard_after_forward: bool = False,
    replicas: Copies | None = None,
    uneven: str = DEFAULT_UNEVEN,
    trainable: bool = True,
    inter_host_axes: AxisNames | tuple[()] = INTER_HOST_AXES,
) -> Target:
    """Makes a module keep its parameters sharded: gathered just before it runs, split just after it is initialised.

    Inside ``shard_map`` the parameters are gathered over ``axis_name`` when a public method of the module is entered,
    and its gradients are reduce-scattered as means. Outside, the module is the plain one (see ``unit``).
    Parameter names, shapes and initial values are those of the plain module: the wrapped class keeps its name.

    >>> model = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(32)
    >>> variables = init_sharded(model, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes=("dp", "fsdp"))
    >>> variables["params"]["kernel"].names, variables["params"]["bias"].shape  # 32 values are fewer than 64: whole
    ((None, 'fsdp'), (32,))

    What is gathered together is in memory together: wrap blocks, not the whole model, and put transformations outside,
    ``nn.scan(nn.remat(shard_module_params(Block, "fsdp")), ...)``. A wrapped scan would gather all layers at once.

    Args:
      target: a Linen module class (or ``functools.partial`` of one), a module instance, a function whose first argument
        is a module, or one that makes a module and returns it, ``make(config) -> nn.Module``. An instance gives an
        instance with the same fields and name; a function that makes modules then makes wrapped ones.
      axis_name: an axis or a tuple of axes, one for each dim of the torus. A tuple is gathered and scattered in stages,
        in an order that rotates from leaf to leaf.
      min_weight_size: leaves with fewer values stay whole on every device.
      gather_dtype: dtype of the all-gather and of the parameters that the module sees; None: as stored. With
        float8_e4m3fn the kernel of an fp8 product of Flax travels as the product rounds it: see docs/fp8.md.
      grad_scatter_dtype: dtype of the reduce-scatter of gradients; None: float32, or as stored where that is wider.
      reshard_after_forward: gather the parameters again for the backward pass, and keep all else that is costly to
        compute (``remat_policy``). False: JAX keeps gathered weights, unless an ``nn.remat`` around the module says
        otherwise, as one that keeps nothing does; leave it False within those.
      replicas: hybrid sharding: further axes along which the shards are copied; see ``Replicas``.
      uneven: "replicate": a leaf none of whose dims ``axis_name`` divides stays whole; "pad": it is stored with zeros
        up to the next multiple, which the module, the optimizer and checkpoints do not see.
      trainable: False freezes all parameters of the module, those of modules within included: they are split and
        gathered as they would be, and have no gradient and no optimizer state. See docs/frozen.md.
      inter_host_axes: which of the axes cross hosts or slices, over slow links, by default those that
        ``create_fsdp_mesh`` makes: they are gathered first, when the least is sent, and the other axes take turns.
    Raises:
      ValueError: (when it runs) some mesh axes are bound, but not ``axis_name``; lists those that are. A parameter is
        no shard, or ``nn.WeightNorm`` or ``nn.SpectralNorm`` stands around the module.
      TypeError: the target is none of these (modules of ``flax.nnx``: see ``nnx_model``), or an instance
        that its parent has already named; or a dtype is none.
    """
    cls: Any = target if isinstance(target, type) else type(target)
    if not issubclass(cls, nn.Module) and (not callable(target) or isinstance(target, type) or is_nnx(cls)):
        what, cure = kind_of(target), "Pass (nn.Dense, 'fsdp'), say"
        if is_nnx(cls):
            what, cure = f"{what} of flax.nnx", "Pass nnx_model(lambda rngs: MyModule(..., rngs=rngs)) to shard_modules"
        raise TypeError(
            f"shard_module_params takes a Linen module, its class or a function of one, not {what}. {cure}."
        )
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
    if isinstance(target, nn.Module):
        cls, fields = taken_apart(target, "shard_module_params({}, axis_name)")
        return as_unit(cls, policy)(**fields)
    return as_unit(target, policy)


def is_nnx(cls: type[Any]) -> bool:
    """Whether a class is one of flax.nnx, or a subclass of such."""
    return any(base.__module__.startswith("flax.nnx") for base in cls.__mro__)


def as_unit(target: Any, policy: ShardPolicy) -> Any:
    """The target with every public method lifted: it gathers "params" before and splits them after initialisation."""
    if isinstance(target, functools.partial):
        return functools.partial(as_unit(target.func, policy), *target.args, **target.keywords)
    if not isinstance(target, type):
        return _lifted_function(target, policy)
    new = lifted(target, methods_to_lift(target), policy)
    for name in methods_to_lift(target):
        setattr(new, name, _only_when_bound(getattr(target, name), getattr(new, name), policy))
    # Linen names submodules after their class, so another name would rename the parameters of the whole model.
    for name in ("__name__", "__qualname__", "__module__", "__init__"):
        setattr(new, name, getattr(target, name))
    return new


class MapOfLeaves(functools.partial[PyTree]):
    """For ``nn.map_variables``: a function that takes each leaf as it is stored, also where it is a shard."""


def lifted(target: Any, methods: list[str] | None, policy: ShardPolicy) -> Any:
    """A class with these methods lifted, or a function of a module (``methods=None``)."""
    gather, shard = MapOfLeaves(_gathered, policy), functools.partial(shard_here, policy)
    new = nn.map_variables(target, ["params", *passing_collections()], gather, shard, mutable=True, methods=methods)
    if methods is not None:
        # Linen makes an __init__ for each class, without what a decorator has put around that of the target.
        new.__init__ = target.__init__
    # Dropping stands around the gather, which then runs again with all else that is computed again.
    return lift_transform(unit.dropping, new, LINEN, policy, methods=methods) if policy.reshard_after_forward else new


def _gathered(policy: ShardPolicy, variables: PyTree) -> PyTree:
    """What a module sees of its variables; errors name their leaves by their paths in the model."""
    units = watching(RunningUnit)
    if not units:
        return gather_here(policy, variables)
    return gather_here(policy, variables, units[0].path, units[0].extensions)


def _lifted_function(target: Method, policy: ShardPolicy) -> Method:
    """A function of a module, lifted; or one that makes a module, of which it then makes a wrapped one.

    What it is shows at the call: Linen lifts functions whose first argument is a module.
    """
    of_module = lifted(target, None, policy)
    wrapped_class: Callable[[Any], Any] = functools.cache(functools.partial(as_unit, policy=policy))

    @functools.wraps(target)
    def function(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            inputs, kwargs = unit.named_input(LINEN, args[1:], kwargs)
            with inside_unit(args[0], policy.axes):
                return of_module(args[0], *inputs, **kwargs)
        made = target(*args, **kwargs)
        if not isinstance(made, nn.Module):
            first = kind_of(args[0]) if args else "no argument by position"
            name = getattr(target, "__name__", type(target).__name__)
            raise TypeError(
                f"{name}, which shard_module_params has wrapped, was called with {first} and returned "
                f"{kind_of(made)}. It takes functions of a module, f(module, ...), and those that make a module and "
                "return it, unbound: make(config) -> nn.Module."
            )
        # In place: within a compact method its parent has named and registered this very object already.
        object.__setattr__(made, "__class__", wrapped_class(type(made)))
        return made

    return function


def methods_to_lift(cls: type[nn.Module]) -> list[str]:
    """The methods by which a Linen module is entered, but for those that ``nn.nowrap`` keeps as they are."""
    fields = {field.name for field in dataclasses.fields(cls)}  # a field's default may be a function, as nn.relu
    names = [name for name in unit.public_methods(cls, LINEN) if name not in fields]
    return [name for name in names if not getattr(inspect.getattr_static(cls, name), "nowrap", False)]


def _only_when_bound(plain: Method, gathering: Method, policy: ShardPolicy) -> Method:
    """A method that is lifted where the module has parameters to gather, and left as it is on an unbound module."""

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # An unbound module has no parameters, and Linen lifts methods of bound ones alone.
        if self.scope is None:
            return plain(self, *args, **kwargs)
        if running(policy.axes) != "plain":
            check_not_inside_reader(self)
        with initialising(self, plain.__name__):
            return enter(self, plain.__name__, gathering, policy, args, kwargs, _returned)

    return method


def enter(
    module: nn.Module, name: str, gathering: Method, policy: ShardPolicy, args: Any, kwargs: Any, returned: Method
) -> Any:
    """Runs the method of this name, lifted as ``gathering``, or what an extension computes in its place from shards.

    The result of an extension is then what ``returned`` makes of it, given the module and the name, too.
    """

    def from_shards(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not module.is_initializing() and running(policy.axes) == "manual":
            found = computed_from_shards(module, name, policy, args, kwargs)
            if found is not None:
                return returned(module, name, found)
        return gathering(module, *args, **kwargs)

    with inside_unit(module, policy.axes):
        run = from_shards if computes(module, name) else gathering
        return unit.entered(LINEN, module.name or type(module).__name__, run, module, args, kwargs)


def taken_apart(module: nn.Module, call: str) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of an instance, and the fields by which a wrapped class makes the same instance.

    ``call`` is what was called, with braces for the module.
    """
    cls = type(module)
    if isinstance(module.parent, nn.Module) and module.name is not None:
        raise TypeError(
            f"{call.partition('(')[0]} got the instance {cls.__name__}(name={module.name!r}), which "
            f"{type(module.parent).__name__} has named and registered already. Wrap the class, then make the instance: "
            f"{call.format(cls.__name__)}(...)."
        )
    return cls, {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.init}


# ------------------------------------------------------------------------------------------------------- what runs


def watching(kind: type[Watcher]) -> list[Watcher]:
    """The objects of a class whose methods see all modules that run, by ``nn.intercept_methods``; innermost first.

    Users' functions stand between those who watch and those who ask. Linen keeps what watches on a stack of its own.
    """
    methods = linen_interceptors()
    return [watcher for method in methods if isinstance(watcher := getattr(method, "__self__", None), kind)]


def seeing_calls(seen: Callable[[Any], None]) -> AbstractContextManager[None]:
    """A context in which ``seen(module)`` is called when any module's ``__call__`` has returned."""

    def intercept(method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        result = method(*args, **kwargs)
        if context.method_name == "__call__":
            seen(context.module)
        return result

    return nn.intercept_methods(intercept)


@dataclasses.dataclass(frozen=True)
class RunningUnit:
    """A unit while one of its methods runs, or while it is initialised. Errors name its leaves below its path."""

    path: tuple[str, ...]
    extensions: list[Extension] = dataclasses.field(compare=False)

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """For ``nn.intercept_methods``: extensions see each method of the unit, and of modules within."""
        return method(*args, **kwargs_from(self.extensions, context.module, context.method_name, args, kwargs))


@contextmanager
def inside_unit(module: nn.Module, axes: tuple[str, ...]) -> Iterator[None]:
    """While a unit runs. Linen's error about a shape then says so where a value is whole that should be a shard."""
    for stacks in watching(Stacks):
        stacks.units_entered += 1
    try:
        with nn.intercept_methods(RunningUnit(module.path, extensions_of(module.variables)).intercept):
            yield
    except ScopeParamShapeError as error:
        params = module.variables.get("params", {}) if running(axes) == "manual" else {}
        for path, leaf in sharded_leaves(params):
            # Linen's text has the shape of the parameter, and not its name.
            if unit.split_over(leaf, axes) and f"generate shape {np.shape(leaf.value)}," in str(error):
                raise unit.closed_over("/".join((*module.path, path)), leaf, axes) from None
        raise


def _returned(module: nn.Module, method: str, result: Any) -> Any:
    """``result`` as that of a method of Linen's, which those see who capture intermediates."""

    def returns(module: nn.Module) -> Any:
        return result

    returns.__name__ = method
    return nn.module.wrap_method_once(returns)(module)


# ------------------------------------------------------------------------------------------------------ what is refused

READERS = (nn.WeightNorm, nn.SpectralNorm)  # layers of Flax that compute from the parameters of another


def check_not_inside_reader(module: nn.Module) -> None:
    """Raises where a layer that reads parameters stands around a wrapped module: it would take norms of shards.

    Boxes would get into the names of its own parameters, too. Flax keeps the modules that are being called to itself.
    """
    for caller in linen_callers():
        if isinstance(caller, READERS):
            kind, layer = type(caller).__name__, type(module).__name__
            raise ValueError(
                f"'{'/'.join(module.path)}' is wrapped by shard_module_params, and nn.{kind} stands around it: that "
                "would take norms of shards, and name its own parameters after their boxes. Wrap a module that has "
                f"both inside, and call nn.{kind}(nn.{layer}(...)) of the plain class there."
            )


# ------------------------------------------------------------------------------------------------- scans over layers


@dataclasses.dataclass(eq=False)
class Stacks:
    """Stacks of layers within a unit, which gathers the weights of all layers at once, where it could be a layer's.

    ``layers`` has the name of each stack, as ``nn.scan`` makes it, and the class of a layer. Scans of functions are
    not seen: nothing here can tell what their layers are.
    """

    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    units_entered: int = 0
    _scan: tuple[type[nn.Module], int] | None = None  # that was entered last, and how many units before

    def look(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """For ``nn.intercept_methods``: sees the modules that run within a unit."""
        cls, units = type(context.module), self.units_entered
        if watching(RunningUnit) and scans_over_params(cls):
            # The layer of this scan will be the next module of its class that is called.
            self._scan = cls, units
        elif self._scan and context.method_name == "__call__" and cls in self._scan[0].__mro__:
            if self._scan[1] == units:  # no unit was entered since, so the layer is no unit
                self.layers[context.module.name or cls.__name__] = cls.__name__
            self._scan = None
        return method(*args, **kwargs)


@contextmanager
def noting_stacks() -> Iterator[Stacks]:
    """Fills with the stacks of layers that units gather at once, in the models that run inside the context."""
    stacks = Stacks()
    with nn.intercept_methods(stacks.look):
        yield stacks


def gathers_one_layer(path: str) -> None:
    """The module at ``path`` is a layer, and was sharded from outside: it gathers one layer at a time."""
    for stacks in watching(Stacks):
        stacks.layers.pop(path.rpartition("/")[-1], None)

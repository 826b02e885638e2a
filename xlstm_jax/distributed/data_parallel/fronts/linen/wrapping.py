"""``shard_module_params``: lifts the life of a parameter, as the folder's ``__init__`` tells it, onto Linen modules.

The variables of a wrapped module pass ``gather_here`` where a public method is entered, and ``shard_here`` where
``init`` leaves it. For a plan, under a ``planning_mesh``, init puts every leaf into a box that says what was decided.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import lift_transform
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.fronts.entering import Unit, gather_here, running, shard_here
from xlstm_jax.distributed.data_parallel.fronts.linen.carries import vary_carries
from xlstm_jax.distributed.data_parallel.fronts.linen.refusals import check_not_inside_reader, named_in_errors
from xlstm_jax.distributed.data_parallel.fronts.linen.scans import inside_wrapper
from xlstm_jax.distributed.data_parallel.fronts.remat import named_input, remat_policy, split_arrays
from xlstm_jax.distributed.data_parallel.shard import ShardRule
from xlstm_jax.distributed.data_parallel.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, UNEVEN
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Replicas
from xlstm_jax.wording import kind_of

Target = TypeVar("Target", bound=nn.Module | Callable[..., Any])
Method = Callable[..., Any]

_LINENS_OWN = {"setup", *vars(nn.Module)}


def shard_module_params(
    target: Target,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    reshard_after_forward: bool = False,
    replicas: Replicas | None = None,
    uneven: str = UNEVEN[0],
    trainable: bool = True,
) -> Target:
    """Makes a module keep its parameters sharded: gathered just before it runs, split just after it is initialised.

    Inside ``shard_map`` the parameters are gathered over ``axis_name`` when a public method of the module is entered,
    and its gradients are reduce-scattered as means. Outside, the module is the plain one (see ``entering``).
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
      gather_dtype: dtype of the all-gather and of the parameters that the module sees; None: as stored.
      grad_scatter_dtype: dtype of the reduce-scatter of gradients; None: float32, or as stored where that is wider.
      reshard_after_forward: gather the parameters again for the backward pass, and keep all else that is costly to
        compute (``remat_policy``). False: JAX keeps gathered weights, unless an ``nn.remat`` around the module says
        otherwise, as one that keeps nothing does; leave it False within those.
      replicas: hybrid sharding: further axes along which the shards are copied; see ``Replicas``.
      uneven: "replicate": a leaf none of whose dims ``axis_name`` divides stays whole; "pad": it is stored with zeros
        up to the next multiple, which the module, the optimizer and checkpoints do not see.
      trainable: False freezes all parameters of the module, those of modules within included: they are split and
        gathered as they would be, and have no gradient and no optimizer state. See docs/frozen.md.
    Raises:
      ValueError: (when it runs) some mesh axes are bound, but not ``axis_name``; lists those that are. A parameter is
        no shard, or ``nn.WeightNorm`` or ``nn.SpectralNorm`` stands around the module.
      TypeError: the target is none of these (modules of ``flax.nnx``: see ``nnx_model``), or an instance
        that its parent has already named; or a dtype is none.
    """
    _check_target(target)
    unit = Unit.of(
        axis_name,
        min_weight_size,
        gather_dtype,
        grad_scatter_dtype,
        reshard_after_forward=reshard_after_forward,
        replicas=replicas,
        uneven=uneven,
        trainable=trainable,
    )
    if isinstance(target, nn.Module):
        cls, fields = taken_apart(target, "shard_module_params({}, axis_name)")
        return _lift(cls, *unit)(**fields)
    return _lift(target, *unit)


def _check_target(target: Any) -> None:
    cls = target if isinstance(target, type) else type(target)
    if issubclass(cls, nn.Module) or (callable(target) and not isinstance(target, type) and not is_nnx(cls)):
        return
    what = f"{kind_of(target)} of flax.nnx" if is_nnx(cls) else kind_of(target)
    cure = (
        "Pass nnx_model(lambda rngs: MyModule(..., rngs=rngs)) to shard_modules"
        if is_nnx(cls)
        else "Pass (nn.Dense, 'fsdp'), say"
    )
    raise TypeError(f"shard_module_params takes a Linen module, its class or a function of one, not {what}. {cure}.")


def is_nnx(cls: type[Any]) -> bool:
    """Whether a class is one of flax.nnx, or a subclass of such."""
    return any(base.__module__.startswith("flax.nnx") for base in cls.__mro__)


def _lift(target: Any, axes: tuple[str, ...], rule: ShardRule, reshard_after_forward: bool) -> Any:
    """The target with every public method lifted: it gathers "params" before and splits them after initialisation."""
    if isinstance(target, functools.partial):
        lifted = _lift(target.func, axes, rule, reshard_after_forward)
        return functools.partial(lifted, *target.args, **target.keywords)
    if not isinstance(target, type):
        return _lift_function(target, axes, rule, reshard_after_forward)
    lifted = _lift_methods(target, public_methods(target), axes, rule, reshard_after_forward)
    for name in public_methods(target):
        setattr(lifted, name, _only_when_bound(getattr(target, name), getattr(lifted, name), axes))
    # Linen names submodules after their class, so another name would rename the parameters of the whole model.
    for name in ("__name__", "__qualname__", "__module__", "__init__"):
        setattr(lifted, name, getattr(target, name))
    return lifted


def _lift_methods(
    target: Any, methods: list[str] | None, axes: tuple[str, ...], rule: ShardRule, reshard_after_forward: bool
) -> Any:
    gather, shard = functools.partial(gather_here, axes, rule), functools.partial(shard_here, axes, rule)
    lifted = nn.map_variables(target, "params", gather, shard, mutable=True, methods=methods)
    if methods is not None:
        # Linen makes an __init__ for each class, without what a decorator has put around that of the target.
        lifted.__init__ = target.__init__
    return lift_transform(_dropping_gathered, lifted, axes, methods=methods) if reshard_after_forward else lifted


def _lift_function(target: Method, axes: tuple[str, ...], rule: ShardRule, reshard_after_forward: bool) -> Method:
    """A function of a module, lifted; or one that makes a module, of which it then makes a wrapped one.

    What it is shows at the call: Linen lifts functions whose first argument is a module.
    """
    lifted = _lift_methods(target, None, axes, rule, reshard_after_forward)
    lift_class = functools.partial(_lift, axes=axes, rule=rule, reshard_after_forward=reshard_after_forward)
    wrapped_class: Callable[[Any], Any] = functools.cache(lift_class)

    @functools.wraps(target)
    def function(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], nn.Module):
            inputs, kwargs = named_input(args[1:], kwargs)
            return lifted(args[0], *inputs, **kwargs)
        made = target(*args, **kwargs)
        if not isinstance(made, nn.Module):
            first = kind_of(args[0]) if args else "no argument by position"
            raise TypeError(
                f"{_named(target)}, which shard_module_params has wrapped, was called with {first} and returned "
                f"{kind_of(made)}. It takes functions of a module, f(module, ...), and those that make a module and "
                "return it, unbound: make(config) -> nn.Module."
            )
        # In place: within a compact method its parent has named and registered this very object already.
        object.__setattr__(made, "__class__", wrapped_class(type(made)))
        return made

    return function


def _named(function: Method) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _dropping_gathered(method: Method, axes: tuple[str, ...]) -> Method:
    """A lifted transformation: what ``method`` gathers over ``axes`` is gathered again for the backward pass."""

    def dropping(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        if running(axes) != "manual" or collectives.axis_size(axes) == 1:
            return method(scopes, *args, **kwargs)
        arrays, put_back = split_arrays((args, kwargs))
        rebuild_results: list[Callable[[dict[int, Any]], PyTree]] = []

        def run(scopes: Any, arrays: dict[int, Any]) -> dict[int, Any]:
            args, kwargs = put_back(arrays)
            results, rebuild = split_arrays(method(scopes, *args, **kwargs))
            rebuild_results.append(rebuild)
            return results

        results = lift.checkpoint(run, policy=remat_policy("everything"))(scopes, arrays)
        return rebuild_results[-1](results)

    return dropping


def public_methods(cls: type[nn.Module]) -> list[str]:
    """The methods through which others use a module: public, its own, and not kept unlifted by ``nn.nowrap``."""
    fields = {field.name for field in dataclasses.fields(cls)}  # a field's default may be a function, as nn.relu
    functions = inspect.getmembers_static(cls, inspect.isfunction)
    lifted = [name for name, fn in functions if is_public(name) and not getattr(fn, "nowrap", False)]
    return [name for name in lifted if name not in fields]


def is_public(method: str) -> bool:
    """Whether a method of this name is for others to call, and not for the module itself or for Linen."""
    return method == "__call__" or not (method.startswith("_") or method in _LINENS_OWN)


def _only_when_bound(plain: Method, lifted: Method, axes: tuple[str, ...]) -> Method:
    """A method that is lifted where the module has parameters to gather, and left as it is on an unbound module."""

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:
            return plain(self, *args, **kwargs)
        if running(axes) != "plain":
            check_not_inside_reader(self)
        # The gather runs outside of the module's own scope: named here, it is found in profiles and forecasts.
        name = jax.named_scope(f"{self.name or type(self).__name__}.sharded")
        with name, named_in_errors(self, axes), inside_wrapper(), nn.intercept_methods(vary_carries):
            args, kwargs = named_input(args, kwargs)
            return lifted(self, *args, **kwargs)

    return method


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

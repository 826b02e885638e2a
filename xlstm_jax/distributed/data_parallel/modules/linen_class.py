"""Wrapped Linen modules: ``shard_module_params`` wraps a class, an instance, or a function of modules.

The wrapped class is a subclass of the same name. Its public methods gather the parameters of the module, run, and drop
the gathered parameters, as a unit of ``linen_module`` does (``with_gathers``, ``run_in_unit``).
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from flax import linen as nn
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.extension import MODULES, initialising
from xlstm_jax.distributed.data_parallel.modules import unit
from xlstm_jax.distributed.data_parallel.modules.linen_errors import check_not_inside_reader
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    LINEN,
    class_and_fields,
    inside_unit,
    methods_to_lift,
    run_in_unit,
    with_gathers,
)
from xlstm_jax.distributed.data_parallel.modules.other_systems import other_system
from xlstm_jax.distributed.data_parallel.modules.unit import Method, running
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE, DEFAULT_UNEVEN, ShardPolicy
from xlstm_jax.distributed.data_parallel.wire.communication import Option
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.formatting import kind_of
from xlstm_jax.program_names import INTER_HOST_AXES

Target = TypeVar("Target", bound=nn.Module | Callable[..., Any])


def shard_module_params(
    target: Target,
    axis_name: AxisNames,
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE,
    gather_dtype: DTypeLike | None = None,
    grad_scatter_dtype: DTypeLike | None = None,
    *,
    reshard_after_forward: bool | AxisNames = False,
    replicas: Copies | None = None,
    uneven: str = DEFAULT_UNEVEN,
    trainable: bool = True,
    inter_host_axes: AxisNames | tuple[()] = INTER_HOST_AXES,
    packing: Option | None = None,
    options: Sequence[Option] = (),
) -> Target:
    """Keeps a module's parameters sharded: gathered just before the module runs, split after initialisation.

    Inside ``shard_map`` the parameters are gathered over ``axis_name`` when a public method of the module is entered,
    and the gradients are reduce-scattered as means. Outside, the module is the plain module (see ``unit``).
    Parameter names, shapes and initial values equal the plain module's: the wrapped class keeps its name.

    >>> model = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(32)
    >>> variables = init_sharded(model, mesh, jax.random.key(0), jnp.ones((8, 16)), batch_axes=("dp", "fsdp"))
    >>> variables["params"]["kernel"].names, variables["params"]["bias"].shape  # the bias has fewer than 64 values
    ((None, 'fsdp'), (32,))

    Parameters that are gathered together are in memory together: wrap blocks, not the entire model, and put
    transformations outside, ``nn.scan(nn.remat(shard_module_params(Block, "fsdp")), ...)``. A wrapped scan would gather
    the weights of all layers at once.

    Args:
      target: a Linen module class (or ``functools.partial`` of a class), a module instance, a function whose first
        argument is a module, or a function that makes and returns a module, ``make(config) -> nn.Module``. An
        instance gives an instance with the same fields and name; a function that makes modules then makes wrapped
        modules.
      axis_name: an axis or a tuple of axes, one for each dim of the torus. A tuple is gathered and scattered in stages,
        in an order that rotates from leaf to leaf.
      min_weight_size: leaves with fewer values stay replicated.
      gather_dtype: dtype of the all-gather and of the parameters inside the module; ``None``: the stored dtype.
        With float8_e4m3fn the kernel of an fp8 product of Flax is sent as the product rounds it: see docs/fp8.md.
      grad_scatter_dtype: dtype of the reduce-scatter of gradients; ``None``: float32, or the stored dtype if wider.
      reshard_after_forward: gather the parameters again for the backward pass, and keep everything else that is costly
        to compute (``remat_policy``). False: JAX keeps gathered weights, unless an ``nn.remat`` around the module drops
        them (an ``nn.remat`` that keeps nothing does); leave the option False inside such an ``nn.remat``. Axes: gather
        again over these axes alone. Over the remaining axes, which cross hosts (``inter_host_axes``), weights stay
        gathered from the forward pass on. Nothing is then sent between hosts a second time; in exchange each device
        keeps 1/n of every weight, for n devices along the given axes.
      replicas: hybrid sharding: further axes along which the shards are copied; see ``Replicas``.
      uneven: "replicate": a leaf stays replicated if ``axis_name`` divides no dim. "pad": the leaf is stored with
        zeros up to the next multiple; the module, the optimizer and checkpoints do not see the zeros.
      trainable: False freezes all parameters of the module, including modules inside: the parameters are split and
        gathered as usual, and have no gradient and no optimizer state. See docs/frozen.md.
      inter_host_axes: axes of ``axis_name`` across hosts or slices (slow links); by default ``fsdp_slice`` and
        ``fsdp_host``, the names that ``create_fsdp_mesh`` gives such axes. These axes are gathered first, when the
        fewest bytes are sent; the order of the other axes rotates.
      packing: leaves of the module that share collectives: ``PackSmall(below=...)`` sends the leaves with fewer bytes
        together, with one collective for each axis. None: each leaf is sent alone.
      options: further options of communication, such as ``AllReduceGradients()``.
    Raises:
      ValueError: an option has an invalid value, or names axes that do not fit ``axis_name``. When the module runs:
        some mesh axes are bound, but not ``axis_name`` (lists the bound axes); a parameter is not a shard; or the
        module is inside ``nn.WeightNorm`` or ``nn.SpectralNorm``.
      TypeError: the target is not of a kind listed above (for modules of ``flax.nnx`` see ``nnx_model``), or an
        instance that has already been named by its parent; or an option has another type, or a dtype is not a dtype.
    """
    cls: Any = target if isinstance(target, type) else type(target)
    if not issubclass(cls, nn.Module) and (not callable(target) or isinstance(target, type) or other_system(cls)):
        noun, cure = kind_of(target), "Pass (nn.Dense, 'fsdp'), say"
        if system := other_system(cls):
            noun, cure = f"{noun} of {system.package}", f"Pass {system.passed_as} to shard_modules"
        raise TypeError(
            f"shard_module_params takes a Linen module, its class or a function of one, not {noun}. {cure}."
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
        packing=packing,
        options=options,
    )
    if isinstance(target, nn.Module):
        cls, fields = class_and_fields(target, "shard_module_params({}, axis_name)")
        return as_unit(cls, policy)(**fields)
    return as_unit(target, policy)


def as_unit(target: Any, policy: ShardPolicy) -> Any:
    """Returns ``target`` wrapped as a unit, so that "params" are gathered before its public methods run.

    In ``init``, "params" are split after the method. ``policy`` has the options of ``shard_module_params``. By
    ``target``:
    - a Linen class: a subclass of the same name.
    - a ``functools.partial`` of a class: a ``partial`` of the subclass.
    - a function of a module: a function that gathers the module's parameters, then runs ``target``.
    - a function that makes a module: a function that makes a wrapped module (see ``_lifted_function``).
    """
    if isinstance(target, functools.partial):
        return functools.partial(as_unit(target.func, policy), *target.args, **target.keywords)
    if not isinstance(target, type):
        return _lifted_function(target, policy)
    new = with_gathers(target, methods_to_lift(target), policy)
    for name in methods_to_lift(target):
        setattr(new, name, _only_when_bound(getattr(target, name), getattr(new, name), policy))
    # Linen names submodules by class name, so another name would rename the parameters of the entire model.
    for name in ("__name__", "__qualname__", "__module__", "__init__"):
        setattr(new, name, getattr(target, name))
    return new


def _lifted_function(target: Method, policy: ShardPolicy) -> Method:
    """Returns a function that calls ``target``, a function of a module or a function that makes a module, with gathers.

    Each call decides by the first positional argument. If it is a module, the parameters of the module are gathered,
    then ``target`` runs. Otherwise ``target`` must make and return a module; the class of this module is replaced, in
    place, by the wrapped class of ``as_unit``.

    Raises:
      TypeError: (when called) the first argument is not a module, and ``target`` has not returned a module.
    """
    of_module = with_gathers(target, None, policy)
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
                f"{kind_of(made)}. Wrap a function of a module, f(module, ...), or a function that returns an unbound "
                "module, make(config) -> nn.Module."
            )
        # In place: in a compact method the parent has already named and registered this object.
        object.__setattr__(made, "__class__", wrapped_class(type(made)))
        return made

    return function


def _only_when_bound(plain: Method, gathering: Method, policy: ShardPolicy) -> Method:
    """Returns a method that runs ``gathering`` if the module is bound (has variables), else ``plain``.

    Args:
      plain: the method of the user's class.
      gathering: the same method, which gathers the parameters first.
      policy: the options of the unit.
    Raises:
      ValueError: (when called, on shards or under ``jax.set_mesh``) the module is inside ``nn.WeightNorm`` or
        ``nn.SpectralNorm``.
    """

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Linen lifts methods of bound modules only.
        if self.scope is None:
            return plain(self, *args, **kwargs)
        if running(policy.axes) != "plain":
            check_not_inside_reader(self)
        name = plain.__name__
        with initialising(self, name) if isinstance(self, MODULES["initialising"]) else nullcontext():
            return run_in_unit(self, name, gathering, policy, args, kwargs, _returned)

    return method


def _returned(module: nn.Module, method: str, result: Any) -> Any:
    """Returns ``result`` unchanged, through a call of a Linen method with the name ``method`` on ``module``.

    Linen sees the call, so ``capture_intermediates`` records ``result`` as the output of this method.
    """

    def returns(module: nn.Module) -> Any:
        return result

    returns.__name__ = method
    return nn.module.wrap_method_once(returns)(module)

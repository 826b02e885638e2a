"""``shard_modules``: shards submodules of a model from outside, without changes to the model's source.

How a Linen model runs then is in ``linen_module``; for NNX, ``nnx_model`` turns the modules into units by itself.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import linen as nn
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.modules.default_units import (
    DEFAULT_UNITS,
    DEFAULT_UNITS_MIN_WEIGHT_SIZE,
    UnitRule,
)
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    LINEN,
    LinenRun,
    Selection,
    Sharding,
    sharded_model,
)
from xlstm_jax.distributed.data_parallel.modules.linen_units_by_rule import LinenRunByRule
from xlstm_jax.distributed.data_parallel.modules.other_systems import ShardsItself, other_system
from xlstm_jax.distributed.data_parallel.modules.unit import as_predicate
from xlstm_jax.distributed.data_parallel.policy import DEFAULT_MIN_WEIGHT_SIZE, DEFAULT_UNEVEN, ShardPolicy
from xlstm_jax.distributed.data_parallel.wire.communication import Option
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.formatting import kind_of
from xlstm_jax.program_names import INTER_HOST_AXES

Model = TypeVar("Model", bound=nn.Module | Callable[..., Any] | ShardsItself)


def shard_modules(
    model: Model,
    where: Any = DEFAULT_UNITS,
    axis_name: AxisNames | None = None,
    min_weight_size: int | None = None,
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
    rest. A parameter read outside of its gathering module (a tied head) is gathered by the read. In a loss of
    ``make_train_step`` or ``value_and_grad`` all reads of a parameter share one gather.

    Args:
      model: a Linen module, its class, or a ``functools.partial`` of a class; or an NNX model, made by ``nnx_model``.
      where: selects submodules; the model itself, at path "", is included. By default a rule selects the blocks of
        loops, the layers of scans, embeddings, and other modules that own parameters; ``plan_sharding`` lists the
        modules with the reasons (docs/howto/five_lines.md).
        - a module class or a tuple of classes, subclasses included;
        - a function ``(path, module) -> bool``, with paths as "encoder/layer/0";
        - ``larger_than(size)``, for a Linen model;
        - a filter of NNX on modules, for an NNX model: ``nnx.All(nnx.Linear, nnx.PathContains("mlp"))``.
      axis_name: an axis or a tuple of axes over which parameters are split. None: the FSDP axes of the mesh on which
        the model runs, by the names of ``create_fsdp_mesh``: ``fsdp``, or each axis with a name that begins with
        ``fsdp_``.
      min_weight_size: leaves with fewer values stay replicated. None: 2**18, or 2**14 without ``where``.
      gather_dtype, ..., options: see ``shard_module_params``.
    Raises:
      ValueError: (in ``init``; immediately for an NNX model) no module was chosen; lists the modules of the model. Or a
        module of an NNX model was already chosen by an earlier call; or as ``shard_module_params``.
      TypeError: ``model`` is not a Linen module, or an instance that has already been named by its parent; ``where``
        has another form; or as ``shard_module_params``.
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
        packing=packing,
        options=options,
    )
    if isinstance(model, ShardsItself) and not isinstance(model, type):
        return model.with_units(where, policy)
    _check_model(model)
    if isinstance(where, UnitRule):
        return sharded_model(model, Sharding(Selection(), where, policy, LinenRunByRule))
    selection = where if isinstance(where, Selection) else Selection(as_predicate(where, LINEN))
    return sharded_model(model, Sharding(selection, where, policy, LinenRun))


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
    Raises:
      ValueError: ``size`` is not an int of 0 or more.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"size={size!r} is no number of values; pass an int, as 2**20.")
    return Selection(size=size)


def _check_model(model: object) -> None:
    """Raises a ``TypeError`` unless ``model`` is a Linen module, its class, or a ``partial`` of the class."""
    made = model.func if isinstance(model, functools.partial) else model
    cls = made if isinstance(made, type) else type(made)
    if issubclass(cls, nn.Module):
        return
    module_fields = [name for name, value in getattr(made, "__dict__", {}).items() if isinstance(value, nn.Module)]
    cure = f" Its {module_fields[0].lstrip('_')!r} is one: pass that." if module_fields else ""
    if system := other_system(cls):
        cure = f" For {system.package}: shard_modules({system.passed_as}, where, axis_name)."
    raise TypeError(f"shard_modules takes a Linen module or its class, not {kind_of(made)}.{cure}")

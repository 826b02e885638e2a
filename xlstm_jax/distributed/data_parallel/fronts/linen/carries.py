"""The carry of ``nn.RNN`` under ``check_vma=True``: zeros that vary over the axes that the inputs vary over.

A cell makes its first carry from shapes alone. By its type that is equal on all devices, the carry after a step is not,
and a scan wants one type for both. An interceptor makes the carry, and casts it, where nobody has passed one.
"""

from typing import Any

import jax
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire import collectives


def with_varying_carry(module: nn.Module, method: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a method, with an ``initial_carry`` that varies where the method is that of an RNN."""
    if not isinstance(module, nn.RNN) or method != "__call__" or kwargs.get("initial_carry") is not None:
        return kwargs
    axes = _axes_of((args, kwargs, module.variables))
    if not any(map(collectives.is_tracked, axes)):
        return kwargs
    return kwargs | {"initial_carry": collectives.to_varying(_initial_carry(module, *args, **kwargs), axes)}


def vary_carries(method: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """For ``nn.intercept_methods``."""
    return method(*args, **with_varying_carry(context.module, context.method_name, args, kwargs))


def _axes_of(tree: PyTree) -> list[str]:
    """The axes over which values vary by type, and those over which leaves are split, so that they will."""
    leaves = [leaf for _, leaf in leaves_with_path(tree)]
    arrays = [leaf_of(leaf).value for leaf in leaves if isinstance(leaf_of(leaf).value, jax.Array)]
    split = {axis for leaf in leaves for axis in leaf_of(leaf).axes if collectives.is_bound(axis)}
    return sorted(split.union(*map(collectives.varying_axes, arrays)))


def _initial_carry(
    rnn: nn.RNN, inputs: jax.Array, *, init_key: Any = None, time_major: bool | None = None, **_: Any
) -> PyTree:
    """What ``nn.RNN`` begins with: its cell's carry for inputs without their time dim."""
    time_major = rnn.time_major if time_major is None else time_major
    time_dim = 0 if time_major else inputs.ndim - (rnn.cell.num_feature_axes + 1)
    key = jax.random.key(0) if init_key is None else init_key
    return rnn.cell.initialize_carry(key, inputs.shape[:time_dim] + inputs.shape[time_dim + 1 :])

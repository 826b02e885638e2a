"""Makes the carry of an ``nn.RNN`` in a unit vary over devices from the first step on, for ``check_vma=True``.

A cell makes the first carry from shapes alone, so the carry's type is equal on each device. The carry after a step
varies, and a scan requires the same type for both: the first carry is cast.
"""

from typing import Any

import jax
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extension import Extension, register
from xlstm_jax.distributed.data_parallel.trees import carry_axes
from xlstm_jax.distributed.data_parallel.wire import collectives


@register
class RecurrentCarries(Extension):
    """Casts the first carry of each ``nn.RNN`` in a unit to a type that varies over devices."""

    modules = (nn.RNN,)

    def changed_arguments(
        self, module: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) of a method of an ``nn.RNN``, with ``initial_carry`` added for ``__call__``.

        The added carry is the RNN's own first carry, cast to a type that varies over the mesh axes of inputs and
        parameters. Unchanged for other methods, if the caller passes ``initial_carry``, without ``check_vma=True``, and
        if the arguments are not those of an ``nn.RNN``, which a subclass may override.
        """
        has_inputs = len(args) + ("inputs" in kwargs) == 1
        if method != "__call__" or not has_inputs or kwargs.get("initial_carry") is not None:
            return args, kwargs
        axes = carry_axes((args, kwargs, module.variables))
        # Without types a scan compares only shapes and dtypes.
        if not any(map(collectives.is_tracked, axes)):
            return args, kwargs
        return args, kwargs | {"initial_carry": collectives.to_varying(_initial_carry(module, *args, **kwargs), axes)}


def _initial_carry(
    rnn: nn.RNN, inputs: jax.Array, *, init_key: Any = None, time_major: bool | None = None, **_: Any
) -> PyTree:
    """Returns the first carry that ``nn.RNN`` would use for ``inputs``: its cell's carry for a single time step.

    ``init_key``: key for the carry; ``None``: key 0. ``time_major``: dim 0 of ``inputs`` is time; ``None``: as the RNN
    says.
    """
    time_major = rnn.time_major if time_major is None else time_major
    time_dim = 0 if time_major else inputs.ndim - (rnn.cell.num_feature_axes + 1)
    key = jax.random.key(0) if init_key is None else init_key
    return rnn.cell.initialize_carry(key, inputs.shape[:time_dim] + inputs.shape[time_dim + 1 :])

"""Carries of an ``nn.RNN`` within a unit vary over devices from the first step on, as ``check_vma=True`` wants it.

A cell makes its first carry from shapes alone, so its type is equal on all devices. The carry after a step is not, and
a scan wants one type for both: the first carry is therefore cast.
"""

from typing import Any

import jax
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.extension import Extension
from xlstm_jax.distributed.data_parallel.modules.unit import carry_axes
from xlstm_jax.distributed.data_parallel.wire import collectives


class RecurrentCarries(Extension):
    """The first carry of each ``nn.RNN`` of a unit."""

    modules = (nn.RNN,)

    def called(self, module: Any, method: str, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of an RNN's method, with an ``initial_carry`` that varies."""
        if method != "__call__" or kwargs.get("initial_carry") is not None:
            return kwargs
        axes = carry_axes((args, kwargs, module.variables))
        # Without types a scan compares shapes and dtypes, and any carry will do.
        if not any(map(collectives.is_tracked, axes)):
            return kwargs
        return kwargs | {"initial_carry": collectives.to_varying(_initial_carry(module, *args, **kwargs), axes)}


def _initial_carry(
    rnn: nn.RNN, inputs: jax.Array, *, init_key: Any = None, time_major: bool | None = None, **_: Any
) -> PyTree:
    """Returns what ``nn.RNN`` begins with: its cell's carry for inputs without their time dim."""
    time_major = rnn.time_major if time_major is None else time_major
    time_dim = 0 if time_major else inputs.ndim - (rnn.cell.num_feature_axes + 1)
    key = jax.random.key(0) if init_key is None else init_key
    return rnn.cell.initialize_carry(key, inputs.shape[:time_dim] + inputs.shape[time_dim + 1 :])

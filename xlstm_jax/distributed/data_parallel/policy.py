"""``ShardPolicy``: what a user asks for where modules or parameters are split. It is made once, and handed on whole."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.shard_choice import DEFAULT_MIN_WEIGHT_SIZE, UNEVEN
from xlstm_jax.distributed.data_parallel.wire.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.wire.communication import Communication, Replicas


@dataclass(frozen=True)
class ShardPolicy:
    """Over which axes leaves are split, which leaves, how they travel, and when gathered weights are dropped.

    ``shard_module_params`` documents each option, and raises what this does. Dtypes are kept by name and axes in a
    tuple, so that equal policies compare as equal.
    """

    axis_name: AxisNames
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE
    gather_dtype: DTypeLike | None = None
    grad_scatter_dtype: DTypeLike | None = None
    _: KW_ONLY
    reshard_after_forward: bool = False
    replicas: Replicas | None = None
    uneven: str = UNEVEN[0]
    trainable: bool = True

    def __post_init__(self) -> None:
        axes, size = as_axis_names(self.axis_name), self.min_weight_size
        if not isinstance(self.reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward={self.reshard_after_forward!r} is not True or False.")
        if not isinstance(self.trainable, bool):
            raise TypeError(
                f"trainable={self.trainable!r} is not True or False. A predicate of a parameter's path goes to "
                "create_train_state(..., trainable=...)."
            )
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(f"min_weight_size={size!r} is not a number of values; pass an int, as 2**18.")
        if size < 0:
            raise ValueError(f"min_weight_size={size} is negative; 0 splits every leaf that can be split.")
        if self.uneven not in UNEVEN:
            raise ValueError(f"uneven={self.uneven!r} is none of {UNEVEN}.")
        if not isinstance(self.replicas, Replicas | None):
            raise TypeError(
                f"replicas={self.replicas!r}: pass Replicas({self.replicas!r}), with the axes of the copies."
            )
        travels = Communication.of(self.gather_dtype, self.grad_scatter_dtype, self.replicas)
        if both := set(axes) & set(travels.copied_axes):
            raise ValueError(
                f"{min(both)!r} is in axis_name={axes} and in {self.replicas}; an axis splits or copies, not both."
            )
        kept = {"axis_name": axes, "min_weight_size": int(size)} | vars(travels)
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> tuple[str, ...]:
        """``axis_name`` as a tuple."""
        return as_axis_names(self.axis_name)

    @property
    def communication(self) -> Communication:
        """How the shards travel."""
        return Communication.of(self.gather_dtype, self.grad_scatter_dtype, self.replicas)

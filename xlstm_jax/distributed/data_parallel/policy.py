"""``ShardPolicy``: the options of a wrapper as one object. ``choose_shard_dim``: the choice of the dim to split.

A ``ShardPolicy`` is made once, from the user's arguments, and passed on unchanged. ``choose_shard_dim`` uses only
shapes, so that sharding and plans decide alike.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from xlstm_jax.common_types import AxisNames
from xlstm_jax.distributed.data_parallel.reasons import (
    AlreadySplit,
    Indivisible,
    Largest,
    NoValues,
    Reason,
    Scalar,
    Taken,
    TooSmall,
)
from xlstm_jax.distributed.data_parallel.store import UNEVEN
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, as_axis_names, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import Communication, Option
from xlstm_jax.distributed.data_parallel.wire.copies import Copies
from xlstm_jax.program_names import FSDP_AXIS, INTER_HOST_AXES

DEFAULT_MIN_WEIGHT_SIZE = 2**18
DEFAULT_UNEVEN = "replicate"


@dataclass(frozen=True)
class ShardPolicy:
    """Options of a wrapper: axes, which leaves are split, dtypes of communication, when gathered weights are dropped.

    ``shard_module_params`` documents each option, and the errors. Dtypes are stored by name and axes as tuples, so that
    equal policies compare as equal. ``axis_name=None`` means the FSDP axes of the mesh on which the wrapper runs, with
    the names of ``create_fsdp_mesh``: ``fsdp``, or each axis with a name that begins with ``fsdp_``.
    """

    axis_name: AxisNames | None
    min_weight_size: int = DEFAULT_MIN_WEIGHT_SIZE
    gather_dtype: DTypeLike | None = None
    grad_scatter_dtype: DTypeLike | None = None
    _: KW_ONLY
    reshard_after_forward: bool | AxisNames = False
    replicas: Copies | None = None
    uneven: str = DEFAULT_UNEVEN
    trainable: bool = True
    inter_host_axes: AxisNames | tuple[()] = INTER_HOST_AXES
    packing: Option | None = None
    options: Sequence[Option] = ()
    communication: Communication = field(init=False, repr=False)

    def __post_init__(self) -> None:
        axis_name = None if self.axis_name is None else as_axis_names(self.axis_name)
        object.__setattr__(self, "axis_name", axis_name)
        axes, size = self.axes, self.min_weight_size
        dropped = self.reshard_after_forward
        if not isinstance(dropped, bool):
            if not isinstance(dropped, str | tuple | list) or not dropped:
                raise TypeError(f"reshard_after_forward={dropped!r} is not True, False, or axes of axis_name.")
            dropped = as_axis_names(dropped)
        if not isinstance(self.trainable, bool):
            raise TypeError(
                f"trainable={self.trainable!r} is not True or False. A predicate of a parameter's path goes to "
                "create_train_state(..., trainable=...)."
            )
        # True is an int in Python, and would be a threshold of 1.
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(f"min_weight_size={size!r} is not a number of values; pass an int, as 2**18.")
        if size < 0:
            raise ValueError(f"min_weight_size={size} is negative; 0 splits every leaf that can be split.")
        if self.uneven not in UNEVEN:
            raise ValueError(f"uneven={self.uneven!r} is none of {tuple(UNEVEN)}.")
        if not isinstance(self.replicas, Copies | None):
            raise TypeError(
                f"replicas={self.replicas!r}: pass Replicas({self.replicas!r}), with the axes of the copies."
            )
        inter_host_axes = as_axis_names(self.inter_host_axes) if self.inter_host_axes else ()
        # The default is always allowed: most meshes do not have its axes.
        if inter_host_axes != INTER_HOST_AXES and (others := sorted(set(inter_host_axes) - set(axes))):
            raise ValueError(
                f"inter_host_axes={inter_host_axes} has {others[0]!r}, which is none of axis_name={axes}; name the "
                "axes of axis_name that cross hosts."
            )
        if not isinstance(self.packing, Option | None):
            raise TypeError(f"packing={self.packing!r}: pass PackSmall(below=2**20), with a number of bytes, or None.")
        if not isinstance(self.options, tuple | list) or not all(isinstance(each, Option) for each in self.options):
            raise TypeError(f"options={self.options!r}: pass a tuple of options, as (AllReduceGradients(),).")
        given = tuple(self.options)
        options = given if self.packing is None else (self.packing, *given)
        travels = Communication.of(self.gather_dtype, self.grad_scatter_dtype, self.replicas, inter_host_axes, options)
        if both := set(axes) & set(travels.copied_axes):
            raise ValueError(
                f"{min(both)!r} is in axis_name={axes} and in {self.replicas}; an axis splits or copies, not both."
            )
        # Normalised values replace the user's values, so that equal policies compare as equal: jit and vjp rules cache
        # by policy.
        fields = {"min_weight_size": int(size), "communication": travels, "reshard_after_forward": dropped}
        fields |= {"options": given}
        fields |= {name: value for name, value in vars(travels).items() if name not in ("options", "of_layers")}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if axis_name is not None:
            self.kept_axes  # noqa: B018  # raises

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the wrapper: ``axis_name`` as a tuple, else the FSDP axes of the mesh around, else ``fsdp``."""
        if isinstance(self.axis_name, tuple):  # as ``__post_init__`` has stored it
            return self.axis_name
        return tuple(filter(_is_fsdp_axis, jax.sharding.get_abstract_mesh().axis_names)) or (FSDP_AXIS,)

    @property
    def kept_axes(self) -> frozenset[str]:
        """Axes over which weights stay gathered from the forward pass to the backward pass.

        These are the axes of the wrapper that ``reshard_after_forward`` does not name. Empty if the option is True or
        False.

        Raises:
          ValueError: ``reshard_after_forward`` names other axes than those of the wrapper, or the remaining axes are
            not gathered first, so that nothing could stay gathered over these axes alone.
        """
        if isinstance(dropped := self.reshard_after_forward, bool):
            return frozenset()
        if others := sorted(set(dropped) - set(self.axes)):
            raise ValueError(
                f"reshard_after_forward={dropped} has {others[0]!r}, which is none of axis_name={self.axes}; name axes "
                "of axis_name, or pass True."
            )
        kept = frozenset(self.axes).difference(dropped)
        if late := sorted(kept.difference(self.inter_host_axes)):
            raise ValueError(
                f"reshard_after_forward={dropped} keeps weights gathered over {late[0]!r}, which is none of "
                f"inter_host_axes={self.inter_host_axes}, the axes that are gathered first. Name {late[0]!r} in "
                "inter_host_axes, or in reshard_after_forward."
            )
        return kept

    def has_axis(self, axis: str) -> bool:
        """Returns whether the wrapper splits leaves over the mesh axis ``axis``; needs no mesh.

        With ``axis_name=None`` True for ``fsdp`` and for each name that begins with ``fsdp_``.
        """
        return axis in self.axes if self.axis_name is not None else _is_fsdp_axis(axis)


def _is_fsdp_axis(axis: str) -> bool:
    return axis == FSDP_AXIS or axis.startswith(f"{FSDP_AXIS}_")


class ShardChoice(NamedTuple):
    """Result of ``choose_shard_dim``: the dim to split, ``None`` if the leaf stays replicated, and the reason."""

    dim: int | None
    reason: Reason


def choose_shard_dim(
    shape: tuple[int, ...],
    names: tuple[AxisEntry, ...],
    axis_sizes: dict[str, int],
    min_weight_size: int,
    uneven: str = DEFAULT_UNEVEN,
) -> ShardChoice:
    """Chooses the dim of a leaf to split over the axes: the largest unsplit dim divisible by the number of devices.

    Of equally large dims the last is chosen, which is the output dim of a Linen kernel. A leaf that one of the axes
    splits already is not split again. The result has the dim, ``None`` for a leaf that is not split, and the reason.

    Args:
      shape: the leaf's shape; local inside ``shard_map``.
      names: the entry of each dim, ``(None,) * len(shape)`` for a leaf without a box.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      min_weight_size: leaves with fewer values stay replicated; a leaf of exactly this size is split.
      uneven: choice if the axes divide no dim: "replicate" does not split the leaf; "pad" chooses the largest dim,
        which is then stored with zeros up to the next multiple.
    """
    present_axes = [axis for entry in names for axis in entry_axes(entry) if axis in axis_sizes]
    size, parts = math.prod(shape), math.prod(axis_sizes.values())
    if present_axes:
        return ShardChoice(None, AlreadySplit(", ".join(map(repr, present_axes))))
    if size == 0:
        return ShardChoice(None, NoValues(shape))
    if size < min_weight_size:
        return ShardChoice(None, TooSmall(size, min_weight_size))
    # A dim with a name is already split, by the model or by a wrapper over other axes.
    free = [dim for dim, entry in enumerate(names) if entry is None]
    fitting = [dim for dim in free if shape[dim] % parts == 0]
    if fitting:
        size, dim = max([(shape[dim], dim) for dim in fitting])
        return ShardChoice(dim, Largest(dim, size, parts))
    if not free:
        return ShardChoice(None, Taken(shape, names) if shape else Scalar())
    dim = max(free, key=lambda dim: (shape[dim], dim))
    mode = UNEVEN[uneven]
    reason = mode.reason(dim, shape[dim], parts) if mode else None
    return ShardChoice(dim, reason) if reason else ShardChoice(None, Indivisible(parts, shape))


def next_multiple(size: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is ``size`` or more: next_multiple(37, 8) is 40."""
    return -(-size // multiple) * multiple

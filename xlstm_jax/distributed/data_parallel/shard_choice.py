"""Which dim of a leaf is split, and why, from shapes alone. Sharding and the plan ask here."""

import math
from typing import NamedTuple

from xlstm_jax.distributed.data_parallel.reasons import (
    AlreadySplit,
    Indivisible,
    Largest,
    NoValues,
    Padded,
    Reason,
    Scalar,
    Taken,
    TooSmall,
)
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, entry_axes

DEFAULT_MIN_WEIGHT_SIZE = 2**18

# The names that ``DeviceMeshManager.create_fsdp_mesh`` gives to axes that cross slices or hosts, over slow links. They
# are gathered first, when what is sent is smallest, and the other axes rotate without them.
SLICE_AXIS, HOST_AXIS = "fsdp_slice", "fsdp_host"
INTER_HOST_AXES = (SLICE_AXIS, HOST_AXIS)

UNEVEN = ("replicate", "pad")


class ShardChoice(NamedTuple):
    """What ``choose_shard_dim`` decided. ``dim`` is None where the leaf stays whole; ``reason`` says why."""

    dim: int | None
    reason: Reason


def choose_shard_dim(
    shape: tuple[int, ...],
    names: tuple[AxisEntry, ...],
    axis_sizes: dict[str, int],
    min_weight_size: int,
    uneven: str = "replicate",
) -> ShardChoice:
    """Decides which dim of a leaf is split over the axes: the largest that they divide and that is still whole.

    Of equal dims it is the last, which is the output dim of a Linen kernel.

    Args:
      shape: the leaf's shape as this device sees it.
      names: its entry for each dim, ``(None,) * len(shape)`` for a leaf without a box.
      axis_sizes: the axes to split over, outermost first, with their sizes.
      min_weight_size: leaves with fewer values stay whole; one of exactly this size is split.
      uneven: where the axes divide no dim: "replicate" leaves the leaf whole, "pad" takes the largest dim, which is
        then stored with zeros up to the next multiple.
    """
    held = [axis for entry in names for axis in entry_axes(entry) if axis in axis_sizes]
    size, parts = math.prod(shape), math.prod(axis_sizes.values())
    if held:
        return ShardChoice(None, AlreadySplit(", ".join(map(repr, held))))
    if size == 0:
        return ShardChoice(None, NoValues(shape))
    if size < min_weight_size:
        return ShardChoice(None, TooSmall(size, min_weight_size))
    free = [dim for dim, entry in enumerate(names) if entry is None]
    fitting = [dim for dim in free if shape[dim] % parts == 0]
    if fitting:
        dim = max(fitting, key=lambda dim: (shape[dim], dim))
        return ShardChoice(dim, Largest(dim, shape[dim], parts))
    if not free:
        return ShardChoice(None, Taken(shape, names) if shape else Scalar())
    if uneven == "pad":
        dim = max(free, key=lambda dim: (shape[dim], dim))
        return ShardChoice(dim, Padded(dim, shape[dim], padded_size(shape[dim], parts), parts))
    return ShardChoice(None, Indivisible(parts, shape))


def padded_size(size: int, multiple: int) -> int:
    """``size``, rounded up to a multiple."""
    return -(-size // multiple) * multiple

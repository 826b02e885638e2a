"""Gathers of a unit's leaves that share collectives, as the option ``packing`` chooses (``wire/packing``).

  packed_gathers   for ``gather_here``: gathers of the leaves of a unit; leaves not in the result are sent alone
  packed_in_tree   for ``gather_params``: the same for each unit of a model
  parcels_of       for ``prefetched_scan``, which packs the shards of each layer in its loop

``is_packed`` decides from the bytes of a leaf, for the order of axes.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded, is_gathered, shard_to_gather
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import Communication
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype
from xlstm_jax.distributed.data_parallel.wire.formats import sent_bytes, sent_itemsize
from xlstm_jax.distributed.data_parallel.wire.gather_array import PrimalType, gather_packed
from xlstm_jax.distributed.data_parallel.wire.packing import Parcel, ShardToSend, packed_unit

Gathered = tuple[Any, tuple[AxisEntry, ...]]  # the unsharded array, and the axes that still split each dim


def packed_gathers(
    leaves: Mapping[str, tuple[str, Sharded]], axes: tuple[str, ...], communication: Communication
) -> dict[str, Callable[[], Gathered]]:
    """Returns, for the leaves of a unit that are sent together, functions that return the gathered array.

    The first call for a leaf of a parcel gathers the parcel.

    Args:
      leaves: path in the model and leaf, by name.
      axes: the axes of the unit.
      communication: the options of the unit; options that are ``None`` are read from the boxes.
    """
    shards: dict[str, ShardToSend] = {}
    options_of = {name: communication.filled_from(leaf.communication) for name, (_, leaf) in leaves.items()}
    for name, (path, leaf) in leaves.items():
        options = options_of[name]
        dim = _gathered_dim(leaf, axes)
        # A leaf that the loss has gathered before is not sent again.
        if dim is not None and not is_gathered(leaf, axes, options):
            options.dtypes(leaf.value, path)  # raises here, with the leaf's path
            split_axes = entry_axes(leaf.names[dim])
            shards[name] = shard_to_send(PrimalType.of(leaf.value), dim, split_axes, options, leaf.trainable)

    def gathers_of(parcel: Parcel) -> dict[str, Callable[[], Gathered]]:
        paths = {name: leaves[name][0] for name in parcel.members}
        first = parcel.members[0]

        @functools.cache
        def gathered() -> dict[str, Any]:
            values = [shard_to_gather(leaves[name][1], axes, path) for name, path in paths.items()]
            split_axes = collectives.spread_axes(entry_axes(leaves[first][1].names[shards[first].dim]))
            path = ", ".join(paths.values())
            whole = gather_packed(parcel.pack(values), parcel.wire, split_axes, options_of[first], path)
            return dict(zip(parcel.members, parcel.unpack(whole), strict=True))

        def gathered_leaf(name: str) -> Gathered:
            left = list(leaves[name][1].names)
            left[shards[name].dim] = None
            return gathered()[name], tuple(left)

        return {name: functools.partial(gathered_leaf, name) for name in parcel.members}

    parcels = parcels_of({name: (shard, options_of[name]) for name, shard in shards.items()})
    gathers_by_parcel = [gathers_of(parcel) for parcel in parcels]
    return {name: gather for gathers in gathers_by_parcel for name, gather in gathers.items()}


def packed_in_tree(
    params: PyTree, axes: tuple[str, ...], communication: Communication
) -> dict[str, Callable[[], Gathered]]:
    """Returns ``packed_gathers`` by path for the boxed parameters of an entire model, unit by unit."""
    units: dict[str, dict[str, tuple[str, Sharded]]] = defaultdict(dict)
    for path, leaf in sharded_leaves(params):
        if (unit := packed_unit(path, leaf)) is not None:
            units[unit][path] = path, leaf
    gathers_by_unit = [packed_gathers(leaves, axes, communication) for leaves in units.values()]
    return {path: gather for gathers in gathers_by_unit for path, gather in gathers.items()}


def parcels_of(leaves: Mapping[Any, tuple[ShardToSend, Communication]]) -> list[Parcel]:
    """Returns the parcels of split leaves, given by key with their options; leaves of no parcel are sent alone."""
    packings = dict.fromkeys(
        communication.packing for _, communication in leaves.values() if communication.packing is not None
    )
    return [
        parcel
        for packing in packings
        for parcel in packing.group_into_parcels(
            {i: shard for i, (shard, communication) in leaves.items() if communication.packing == packing}
        )
    ]


def shard_to_send(
    shard: PrimalType, dim: int, axes: tuple[str, ...], communication: Communication, trains: bool
) -> ShardToSend:
    """Returns the description of a shard that is gathered along ``dim`` over ``axes``."""
    spread = collectives.spread_axes(axes)
    full = sent_bytes(shard.shape, dim, communication.sent_as(shard)) * collectives.axis_size(spread)
    # Equal kinds have equal dtypes, sums, copies and types, and all of their leaves or none take a gradient.
    kind = (spread, shard.dtype, communication, trains, shard.varying, shard.batched)
    return ShardToSend(shard.shape, shard.dtype, dim, communication.wire(shard, dim, axes), full, kind)


def is_packed(value: Any, communication: Communication) -> bool:
    """Returns whether the leaf with the global or abstract array ``value`` is packed where a unit gathers it."""
    if communication.packing is None or not jnp.issubdtype(value_dtype(value), jnp.floating):
        return False
    return communication.packing.packs_leaf_of(math.prod(value.shape) * sent_itemsize(communication.sent_as(value)))


def _gathered_dim(leaf: Sharded, axes: tuple[str, ...]) -> int | None:
    """Returns the dim along which a leaf is gathered over all its axes; ``None`` if the leaf cannot be packed."""
    if not jnp.issubdtype(value_dtype(leaf.value), jnp.floating):
        return None
    dims = [dim for dim, entry in enumerate(leaf.names) if not set(entry_axes(entry)).isdisjoint(axes)]
    split_axes = entry_axes(leaf.names[dims[0]]) if len(dims) == 1 else ()
    return dims[0] if collectives.spread_axes(split_axes) and set(split_axes) <= set(axes) else None

"""Packing: gathers several leaves of a unit together, in one collective for each axis.

Without a packing each leaf has its own collectives. A packing puts shards into parcels:

  packed     [1, s] = Parcel.pack(shards)              on each device
  arrived    [n, s], gathered along dim 0              by the gather of a single array, in the format ``Parcel.wire``
  used       the unsharded arrays = Parcel.unpack(arrived)
  gradient   [n, s], scattered along dim 0, by the backward rule of the same gather

``pack`` and ``unpack`` move values and nothing else, and are differentiated by JAX. ``PackedGathers`` gathers the
parcels; a packing is a subclass of ``Packing`` in a separate file, as ``extensions/packed`` is. Users pass an instance
as ``packing=``.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from xlstm_jax.common_types import DType, PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded, earlier_gather, shard_to_gather
from xlstm_jax.distributed.data_parallel.shared_collectives import (
    SHARING,
    Gathered,
    Parcel,
    SharesCollectives,
    SplitShard,
)
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import axes_entry, entry_axes, value_dtype
from xlstm_jax.distributed.data_parallel.wire.communication import Communication, Option, PrimalType, gather_dims
from xlstm_jax.distributed.data_parallel.wire.formats import sent_bytes, sent_itemsize
from xlstm_jax.distributed.data_parallel.wire.wire import Wire

PACKED = "packed:"  # mark of a leaf that shares the axis order of its unit's parcel; followed by the leaf's depth


class ShardToSend(NamedTuple):
    """Shard of a leaf that is gathered along one dim.

    Attributes:
      shape: shape of the shard, [..., d / n, ...].
      dtype: dtype in which the shard is stored.
      dim: the dim d.
      wire: format in which the shard would be sent alone.
      full_bytes: bytes that all n shards of the leaf have in this format.
      kind: shards with unequal kinds cannot share a collective: axes, dtypes, further options.
    """

    shape: tuple[int, ...]
    dtype: DType
    dim: int
    wire: Wire
    full_bytes: float
    kind: Hashable


@dataclass(frozen=True)
class Packing(Option, ABC):
    """Base class: choice of the shards of a unit that are sent together."""

    @abstractmethod
    def packs_leaf_of(self, full_bytes: float) -> bool:
        """Returns whether the packing sends a leaf of this size together with other leaves. Abstract.

        ``full_bytes`` are the bytes of the leaf's shards on all devices, in the format in which they are sent.
        """

    @abstractmethod
    def group_into_parcels(self, shards: Mapping[Any, ShardToSend]) -> Sequence[Parcel]:
        """Returns the parcels (two or more shards that are sent together) among ``shards``, given by key. Abstract.

        ``members`` of a parcel are keys. A shard in no parcel is sent alone.
        """


def packing_of(communication: Communication) -> Packing | None:
    """Returns the ``Packing`` among the communication options of a leaf or unit; ``None`` without a packing."""
    return next((option for option in communication.options if isinstance(option, Packing)), None)


class PackedGathers(SharesCollectives):
    """Gathers the leaves of a unit in parcels; the unit's option ``packing`` chooses the leaves of each parcel."""

    def sent_together(self, leaves: Mapping[str, Sharded], communication: Communication) -> Mapping[str, str]:
        return {path: packed_mark(path) for path, leaf in leaves.items() if is_packed(leaf.value, communication)}

    def sent_with(self, path: str, leaf: Sharded) -> str | None:
        return packed_unit(path, leaf)

    def gathers(
        self, leaves: Mapping[str, tuple[str, Sharded]], axes: tuple[str, ...], communication: Communication
    ) -> Mapping[str, Callable[[], Gathered]]:
        return packed_gathers(leaves, axes, communication)

    def gathers_in_tree(
        self, params: PyTree, axes: tuple[str, ...], communication: Communication
    ) -> Mapping[str, Callable[[], Gathered]]:
        return packed_in_tree(params, axes, communication)

    def parcels(self, shards: Mapping[Any, SplitShard]) -> Sequence[Parcel]:
        return parcels_of({key: (shard_to_send(*split), split.communication) for key, split in shards.items()})


SHARING.append(PackedGathers())


def packed_gathers(
    leaves: Mapping[str, tuple[str, Sharded]], axes: tuple[str, ...], communication: Communication
) -> dict[str, Callable[[], Gathered]]:
    """Returns, by name, functions that return a gathered leaf, for the leaves of a unit that are sent in parcels.

    A parcel is a group of leaves that are gathered together. A function takes no arguments, and returns the unsharded
    array and the axes that still split each dim. The first call for a leaf of a parcel gathers the parcel, later calls
    use the result. Missing are leaves that are sent alone, and leaves that the running loss has gathered already.

    Args:
      leaves: (path in the model, leaf) by name; the paths are for errors.
      axes: the axes of the unit.
      communication: the options of the unit; options that are ``None`` are read from the boxes.
    """
    shards: dict[str, ShardToSend] = {}
    options_of = {name: communication.filled_from(leaf.communication) for name, (_, leaf) in leaves.items()}
    for name, (path, leaf) in leaves.items():
        options = options_of[name]
        dim = _gathered_dim(leaf, axes)
        # A leaf that the loss has gathered before is not sent again.
        if dim is not None and earlier_gather(leaf, axes, options)[1] is None:
            options.dtypes(leaf.value, path)  # raises here, with the leaf's path
            held = entry_axes(leaf.names[dim])
            shards[name] = shard_to_send(PrimalType.of(leaf.value), dim, held, options, leaf.trainable)

    def gathers_of(parcel: Parcel) -> dict[str, Callable[[], Gathered]]:
        paths = {name: leaves[name][0] for name in parcel.members}
        first = parcel.members[0]

        @functools.cache
        def gathered() -> dict[str, Any]:
            values = [shard_to_gather(leaves[name][1], axes, path) for name, path in paths.items()]
            held = collectives.spread_axes(entry_axes(leaves[first][1].names[shards[first].dim]))
            path = ", ".join(paths.values())
            # A packed array is a shard of [n, s], split along dim 0.
            names = (axes_entry(held), None)
            whole, _ = gather_dims(parcel.pack(values), names, held, options_of[first], path, parcel.wire)
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
    """Returns, by path in the model, functions that return a gathered leaf, for leaves that are sent in parcels.

    A parcel is a group of leaves of one unit (wrapped module) that are gathered together; the mark in the box of a leaf
    says which unit. A function takes no arguments, and returns the pair (unsharded array, the axes that still split
    each dim). The first call for a leaf of a parcel gathers the parcel. Leaves that are gathered alone are missing.

    Args:
      params: the boxed parameters of an entire model.
      axes: the axes to gather over.
      communication: options of the gathers; options that are ``None`` are read from the boxes.
    """
    units: dict[str, dict[str, tuple[str, Sharded]]] = defaultdict(dict)
    for path, leaf in sharded_leaves(params):
        if (unit := packed_unit(path, leaf)) is not None:
            units[unit][path] = path, leaf
    gathers_by_unit = [packed_gathers(leaves, axes, communication) for leaves in units.values()]
    return {path: gather for gathers in gathers_by_unit for path, gather in gathers.items()}


def parcels_of(leaves: Mapping[Any, tuple[ShardToSend, Communication]]) -> list[Parcel]:
    """Returns the parcels in which split leaves are sent; a leaf in no parcel is sent alone.

    ``leaves`` has (shard, communication options) by key. The packing in the options chooses the parcels; leaves with
    different packings, or without a packing, do not share a parcel.
    """
    packings = dict.fromkeys(
        packing for _, communication in leaves.values() if (packing := packing_of(communication)) is not None
    )
    return [
        parcel
        for packing in packings
        for parcel in packing.group_into_parcels(
            {i: shard for i, (shard, communication) in leaves.items() if packing_of(communication) == packing}
        )
    ]


def shard_to_send(
    shard: PrimalType, dim: int, axes: tuple[str, ...], communication: Communication, trains: bool
) -> ShardToSend:
    """Returns the description of a shard that is gathered along ``dim`` over ``axes``, for a ``Packing``.

    Args:
      shard: type of the shard on this device.
      dim: the dim that is split.
      axes: mesh axes that split the dim.
      communication: the options of the leaf, after ``filled_from`` has read missing options from the leaf's box.
      trains: False for a frozen leaf.
    """
    spread = collectives.spread_axes(axes)
    full = sent_bytes(shard.shape, dim, communication.sent_as(shard)) * collectives.axis_size(spread)
    # Equal kinds have equal dtypes, sums, copies and types, and all of their leaves or none take a gradient.
    kind = (spread, shard.dtype, communication, trains, shard.varying, shard.batched)
    return ShardToSend(shard.shape, shard.dtype, dim, communication.wire(shard, dim, axes), full, kind)


def is_packed(value: Any, communication: Communication) -> bool:
    """Returns whether the packing in ``communication`` sends the leaf with array ``value`` together with others.

    ``value`` is a global or abstract array. False without a packing, and for leaves that are not floats.
    """
    packing = packing_of(communication)
    if packing is None or not jnp.issubdtype(value_dtype(value), jnp.floating):
        return False
    return packing.packs_leaf_of(math.prod(value.shape) * sent_itemsize(communication.sent_as(value)))


def _gathered_dim(leaf: Sharded, axes: tuple[str, ...]) -> int | None:
    """Returns the dim along which a packing may gather a leaf over ``axes``; ``None`` if the leaf cannot be packed.

    Packed leaves are floats of which exactly one dim is split over ``axes``, over no further axes, on two or more
    devices.
    """
    if not jnp.issubdtype(value_dtype(leaf.value), jnp.floating):
        return None
    dims = [dim for dim, entry in enumerate(leaf.names) if not set(entry_axes(entry)).isdisjoint(axes)]
    held = entry_axes(leaf.names[dims[0]]) if len(dims) == 1 else ()
    return dims[0] if collectives.spread_axes(held) and set(held) <= set(axes) else None


def packed_mark(path: str) -> str:
    """Returns the mark for the box of a packed leaf, which holds the leaf's depth: "packed:2" for "params/mlp/kernel".

    ``path`` is the path in the variables of the leaf's unit; its first name is a collection, which does not count.
    """
    return f"{PACKED}{path.count('/')}"


def packed_unit(path: str, leaf: Any) -> str | None:
    """Returns the path of the unit that packs a leaf, by the mark in the leaf's box; ``None`` without a mark.

    ``path`` is the path of the leaf in the model: with the mark "packed:2", "h_0/mlp/kernel" gives "h_0".
    """
    mark = next((mark for mark in leaf.marks if mark.startswith(PACKED)), None)
    return "/".join(path.split("/")[: -int(mark.removeprefix(PACKED))]) if mark else None

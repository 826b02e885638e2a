"""Protocol ``Packing``: which shards of a unit are sent together, in one collective for each axis.

Without a packing each leaf has its own collectives. A packing puts shards into parcels:

  packed     [1, s] = Parcel.pack(shards)              on each device
  arrived    [n, s], gathered along dim 0              by the gather of a single array, in the format ``Parcel.wire``
  used       the unsharded arrays = Parcel.unpack(arrived)
  gradient   [n, s], scattered along dim 0, by the backward rule of the same gather

``pack`` and ``unpack`` move values and nothing else, and are differentiated by JAX. A packing is a subclass of
``Packing`` in a separate file, as ``extensions/packed`` is; users pass an instance as ``packing=``.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from xlstm_jax.common_types import DType
from xlstm_jax.distributed.data_parallel.wire.wires import Wire

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


class Parcel(Protocol):
    """Shards that are sent together."""

    @property
    def members(self) -> tuple[Any, ...]:
        """Keys of the shards, in the order of the arguments of ``pack``."""
        ...

    @property
    def wire(self) -> Wire:
        """Format in which a packed array is sent along dim 0."""
        ...

    def pack(self, shards: Sequence[jax.Array]) -> jax.Array:
        """Returns the shards, in the order of ``members``, as one array [1, s]."""
        ...

    def unpack(self, rows: jax.Array) -> list[jax.Array]:
        """Returns the arrays of an array [r, s], r packed arrays in device order: along dim d each has r d / n."""
        ...


@dataclass(frozen=True)
class Packing(ABC):
    """Base class: choice of the shards of a unit that are sent together."""

    @abstractmethod
    def packs_leaf_of(self, full_bytes: float) -> bool:
        """Returns whether a leaf is packed whose shards have ``full_bytes`` bytes in all, in the sent format."""

    @abstractmethod
    def group_into_parcels(self, shards: Mapping[Any, ShardToSend]) -> Sequence[Parcel]:
        """Returns the parcels, of two or more shards each; the shards of no parcel are sent alone."""


def packed_mark(path: str) -> str:
    """Returns the mark of a packed leaf at ``path`` in the variables of its unit, whose first name is a collection."""
    return f"{PACKED}{path.count('/')}"


def packed_unit(path: str, leaf: Any) -> str | None:
    """Returns the path of the unit that packs a leaf; ``None`` without a mark. ``path`` is the leaf's in the model."""
    mark = next((mark for mark in leaf.marks if mark.startswith(PACKED)), None)
    return "/".join(path.split("/")[: -int(mark.removeprefix(PACKED))]) if mark else None

"""The protocol by which a feature lets several leaves share collectives: ``SharesCollectives``.

Without a feature each leaf has its own gather and reduce-scatter. A feature (``extensions/packing``) appends an
instance of a subclass to ``SHARING``:

  split   sent_together    marks the leaves that will share collectives, and so the order of axes
          sent_with        returns the unit with whose leaves a marked leaf shares collectives
  gather  gathers          returns gathers of several leaves of a unit at once
          gathers_in_tree  returns the same for each unit of a model
          parcels          returns the shards of a layer that are sent together, for gathers ahead

The core calls the functions of the same names below. Users choose a feature by an option of ``Communication``; without
options, no feature is asked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry
from xlstm_jax.distributed.data_parallel.wire.communication import Communication, PrimalType
from xlstm_jax.distributed.data_parallel.wire.wire import Wire

Gathered = tuple[Any, tuple[AxisEntry, ...]]  # the unsharded array, and the axes that still split each dim


class SplitShard(NamedTuple):
    """Shard of a leaf that is gathered along ``dim`` over ``axes``; ``trains`` is False for a frozen leaf."""

    shard: PrimalType
    dim: int
    axes: tuple[str, ...]
    communication: Communication
    trains: bool


class Parcel(Protocol):
    """Shards that are sent together."""

    @property
    def members(self) -> tuple[Any, ...]:
        """Keys of the shards in the parcel, in the order in which ``pack`` takes the shards."""
        ...

    @property
    def wire(self) -> Wire:
        """Format in which the result of ``pack`` is sent. The gather concatenates the sent arrays along dim 0."""
        ...

    def pack(self, shards: Sequence[jax.Array]) -> jax.Array:
        """Returns ``shards``, in the order of ``members``, as one array [1, s] with the s values of all shards."""
        ...

    def unpack(self, rows: jax.Array) -> list[jax.Array]:
        """Returns the gathered arrays of the parcel's leaves from ``rows`` [r, s], in the order of ``members``.

        Row i of ``rows`` is the result of ``pack`` on device i of r devices, with the s values of all its shards. The
        array of a member is its r shards, concatenated along the dim in which the leaf is split: for s = 10, shards
        [4, 2] (split along dim 1) and [2] (dim 0) become arrays [4, 2 r] and [2 r].
        """
        ...


class SharesCollectives:
    """Base class of features that let leaves share collectives. The default methods do nothing."""

    def sent_together(self, leaves: Mapping[str, Sharded], communication: Communication) -> Mapping[str, str]:
        """Returns a mark (a text), by path, for each leaf that is gathered together with others; by default ``{}``.

        The library stores the mark in the leaf's box, where ``sent_with`` finds the mark.

        Args:
          leaves: the leaves of a unit that will be split, by path in the unit's variables.
          communication: the communication options of the unit.
        """
        return {}

    def sent_with(self, path: str, leaf: Sharded) -> str | None:
        """Returns the path of the unit with whose leaves ``leaf`` is sent, by the mark in its box; by default ``None``.

        ``None``: the box has no mark of this feature. ``path`` is the path of the leaf in the model.
        """
        return None

    def gathers(
        self, leaves: Mapping[str, tuple[str, Sharded]], axes: tuple[str, ...], communication: Communication
    ) -> Mapping[str, Callable[[], "Gathered"]]:
        """Returns, by name, functions that gather a leaf of a unit together with other leaves; by default ``{}``.

        Each function takes no arguments, and returns the pair (unsharded array of its leaf, the axes that still split
        each dim). Leaves that are missing in the result are gathered alone.

        Args:
          leaves: (path in the model, leaf) by name; the names are chosen by the caller.
          axes: the axes of the unit.
          communication: the options of the unit; options that are ``None`` are read from the boxes.
        """
        return {}

    def gathers_in_tree(
        self, params: PyTree, axes: tuple[str, ...], communication: Communication
    ) -> Mapping[str, Callable[[], "Gathered"]]:
        """Returns functions that gather a leaf together with other leaves, by path in the model; by default ``{}``.

        Each function takes no arguments, and returns the pair (unsharded array of its leaf, the axes that still split
        each dim). Leaves that are missing in the result are gathered alone. The library calls this hook for an entire
        model, and ``gathers`` for the leaves of a unit.

        Args:
          params: the boxed parameters of an entire model.
          axes: the axes to gather over.
          communication: options of the gathers; options that are ``None`` are read from the boxes.
        """
        return {}

    def parcels(self, shards: Mapping[Any, "SplitShard"]) -> Sequence["Parcel"]:
        """Returns parcels (groups of shards that are sent together) of the shards of one layer; by default ``()``.

        ``shards`` are given by key; ``members`` of a parcel are keys. A shard in no parcel is sent alone.
        """
        return ()


SHARING: list[SharesCollectives] = []  # the registered features


def sent_together(leaves: Mapping[str, Sharded], communication: Communication) -> dict[str, str]:
    """Returns a mark (a text), by path, for each leaf that the registered features gather together with others.

    Leaves that are gathered alone are missing: {} without such extensions. The caller stores the marks in the leaves'
    boxes, where ``sent_with`` finds the marks.

    Args:
      leaves: the leaves of a unit that will be split, by path in the unit's variables.
      communication: the communication options of the unit.
    """
    return {path: mark for feature in SHARING for path, mark in feature.sent_together(leaves, communication).items()}


def sent_with(path: str, leaf: Sharded) -> str | None:
    """Returns the path of the unit with whose leaves ``leaf`` is sent in one collective; ``None``: sent alone.

    The registered features read the path from the marks in the leaf's box. ``path`` is the path of the leaf in the
    model.
    """
    features = SHARING if leaf.marks else ()
    return next((unit for feature in features if (unit := feature.sent_with(path, leaf)) is not None), None)


def gathers(
    leaves: Mapping[str, tuple[str, Sharded]], axes: tuple[str, ...], communication: Communication
) -> dict[str, Callable[[], Gathered]]:
    """Returns, by name, functions without arguments that gather a leaf of a unit together with other leaves.

    Each function returns the pair (unsharded array of its leaf, the axes that still split each dim). Leaves that are
    gathered alone are missing in the result.

    Args:
      leaves: (path in the model, leaf) by name; the names are chosen by the caller.
      axes: the axes of the unit.
      communication: the options of the unit; options that are ``None`` are read from the boxes.
    """
    together: dict[str, Callable[[], Gathered]] = {}
    for feature in SHARING:
        together |= feature.gathers(leaves, axes, communication)
    return together


def gathers_in_tree(
    params: PyTree, axes: tuple[str, ...], communication: Communication
) -> dict[str, Callable[[], Gathered]]:
    """Returns, by path in the model, functions without arguments that gather a leaf together with other leaves.

    Each function returns the pair (unsharded array of its leaf, the axes that still split each dim). Leaves that are
    gathered alone are missing in the result.

    Args:
      params: the boxed parameters of an entire model.
      axes: the axes to gather over.
      communication: options of the gathers; options that are ``None`` are read from the boxes.
    """
    together: dict[str, Callable[[], Gathered]] = {}
    for feature in SHARING:
        together |= feature.gathers_in_tree(params, axes, communication)
    return together


def parcels(shards: Mapping[Any, SplitShard]) -> list[Parcel]:
    """Returns the parcels (groups of shards that are sent together) that features make of ``shards``, given by key.

    ``members`` of a parcel are keys. A shard in no parcel is sent alone. Only shards whose communication options have
    an option of a feature, as a packing, are offered to the features.
    """
    shards = {key: split for key, split in shards.items() if split.communication.options}
    return [parcel for feature in (SHARING if shards else ()) for parcel in feature.parcels(shards)]

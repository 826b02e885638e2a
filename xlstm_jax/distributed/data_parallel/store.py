"""How a device keeps a leaf: the ``Store`` of its box.

A box (``leaf.Sharded``) holds an array as it is stored. What the array has to do with the value that a module reads,
the store alone says:

  shape(stored, counts)   shape of the value, of ``counts`` stored parts along each dim
  order(ndim)             which stored dim holds each dim of the value
  read(stored, is_split)  the value, of what is stored
  write(value, shape)     what is stored, of a value

``Store`` itself keeps values as they are. Another way is a subclass in a file of its own, as
``extensions/padding.py``: a frozen dataclass, since a box compares by its store. Wrappers choose a store by the option
``uneven``, of which ``UNEVEN`` has the modes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.reasons import Reason
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry

Shape = tuple[int, ...]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Store:
    """Keeps a value as it is."""

    # Fields of boxes that were pickled before boxes had a store, each with a function of the field that returns one.
    OF_OLD_FIELDS: ClassVar[dict[str, Any]] = {}

    def shape(self, stored: Shape, counts: Sequence[int]) -> Shape:
        """Returns the shape of the value, of ``counts`` arrays of the shape ``stored`` along each dim."""
        return tuple(size * count for size, count in zip(stored, counts, strict=True))

    def read(self, stored: jax.Array, is_split: Sequence[bool]) -> jax.Array:
        """Returns the value; along a dim that ``is_split``, ``stored`` is one part of several and stays as it is."""
        return stored

    def write(self, value: jax.Array, shape: Shape) -> jax.Array:
        """Returns what is stored, of the given shape."""
        return value

    def order(self, ndim: int) -> tuple[int, ...]:
        """Returns for each of ``ndim`` dims of the value the stored dim that holds it."""
        return tuple(range(ndim))

    def of_value(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        """Returns what stands for each dim of the value, of what stands for each stored dim: names, say."""
        return tuple(entries[dim] for dim in self.order(len(entries)))

    def after_read(self) -> "Store":
        """Returns the store of what ``read`` has made where some dims are split: these are still to be read."""
        return self

    def with_dim(self, index: int) -> "Store":
        """Returns the store of a leaf that has one more dim, of layers, at ``index``."""
        return self

    def without_dim(self, index: int) -> "Store":
        """Returns the store of a leaf without its dim ``index``."""
        return self

    def of_last_dims(self, ndim: int) -> "Store":
        """Returns the store of one layer, which has the last ``ndim`` dims."""
        return self


AS_IT_IS = Store()


def with_zeros_behind(value: jax.Array, shape: Shape) -> jax.Array:
    """Returns the value in an array of the given shape, with zeros behind it along each dim: a way to write."""
    return jnp.pad(value, [(0, size - true) for size, true in zip(shape, value.shape, strict=True)])


class Kept(NamedTuple):
    """A leaf that is about to be split: the array, the axes of each of its dims, the dim to split, and its store."""

    value: Any  # an array, or a ``ShapeDtypeStruct``
    names: tuple[AxisEntry, ...]
    dim: int
    store: Store


class Uneven(Protocol):
    """A mode of the option ``uneven``: how leaves that are split are stored, and what is done where no axes divide."""

    def reason(self, dim: int, size: int, parts: int) -> Reason | None:
        """Returns why a leaf is split along its largest dim, ``dim``, though ``parts`` do not divide it; else None."""
        ...

    def stored(self, leaf: Kept, parts: int) -> Kept:
        """Returns the leaf as it is stored in ``parts`` parts."""
        ...


# By the names that users pass. With "replicate" such a leaf is not split.
UNEVEN: dict[str, Uneven | None] = {"replicate": None}

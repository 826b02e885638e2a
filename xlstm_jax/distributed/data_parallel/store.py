"""How a device keeps a leaf: the ``Store`` of its box.

A box (``leaf.Sharded``) holds an array as it is stored. What the array has to do with the value that a module reads,
the store alone says:

  shape(stored, counts)   shape of the value, of ``counts`` stored parts along each dim
  read(stored, is_split)  the value, of what is stored
  write(value, shape)     what is stored, of a value

``Store`` itself keeps values as they are. Another way is a subclass in a file of its own, as
``extensions/padding.py``: a frozen dataclass, since a box compares by its store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from xlstm_jax.distributed.data_parallel.reasons import Reason

Shape = tuple[int, ...]


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


class Uneven(Protocol):
    """A mode of the option ``uneven``: how a leaf is split if the axes divide none of its dims."""

    def reason(self, dim: int, size: int, parts: int) -> Reason:
        """Returns why the leaf is split along its largest dim, ``dim``."""
        ...

    def stored(self, value: Any, dim: int, parts: int, before: Store) -> tuple[Any, Store]:
        """Returns the array to split along ``dim``, and its store; ``before`` is the store that the leaf has."""
        ...


# By the names that users pass. With "replicate" such a leaf is not split.
UNEVEN: dict[str, Uneven | None] = {"replicate": None}

"""``Store``: the format in which a device stores a leaf, such as with padding; a field of the leaf's box.

A box (``leaf.Sharded``) holds an array in its stored form. The store alone defines how the stored array and the value
that a module reads are related:

  shape(stored, counts)   shape of the value of which ``counts[i]`` stored arrays lie along dim i
  order(ndim)             stored dim of each dim of the value
  read(stored, is_split)  converts a stored array to the value
  write(value, shape)     converts a value to a stored array
  written_part(...)       part of a stored array, made on the host, to read a single shard from a file; optional

``Store`` itself stores values unchanged. Another form is a subclass in a separate file, as ``extensions/padding`` is:
a frozen dataclass, since boxes with equal stores must compare equal. Wrappers choose a store by the option ``uneven``;
``UNEVEN`` lists the modes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.distributed.data_parallel.reasons import Reason
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry

Shape = tuple[int, ...]
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Store:
    """Format in which values are stored unchanged, and base class of other formats."""

    # Fields of boxes pickled before boxes had a store. Each maps to a function from the field's value to a store.
    OF_OLD_FIELDS: ClassVar[dict[str, Any]] = {}
    writes_parts: ClassVar[bool] = False

    def shape(self, stored: Shape, counts: Sequence[int]) -> Shape:
        """Returns the shape of a value whose stored array consists of ``counts[i]`` parts along each dim i.

        ``stored`` is the shape of a part: (16, 8) and ``counts`` (1, 4) give (16, 32). A subclass with padding returns
        the shape without padding.
        """
        return tuple(size * count for size, count in zip(stored, counts, strict=True))

    def read(self, stored: jax.Array, is_split: Sequence[bool]) -> jax.Array:
        """Converts a stored array to the value that a module reads, and returns the value: here ``stored`` itself.

        A store with padding cuts the padding off. A dim i that is still split, with ``is_split[i]`` true, stays as
        stored.
        """
        return stored

    def write(self, value: jax.Array, shape: Shape) -> jax.Array:
        """Converts ``value`` to a stored array of shape ``shape``, and returns the array: here ``value`` itself.

        A store with padding adds the padding.
        """
        return value

    def written_part(self, value: Any, shape: Shape, part: tuple[slice, ...]) -> np.ndarray:
        """Returns ``write(value, shape)[part]``, from the entries of ``value`` that lie in the part; on the host.

        Called if ``writes_parts`` is True. Otherwise the full value is copied to the devices, which run ``write``.

        Args:
          value: has the shape of a value and the indexing of an array, such as a tensor in a file.
          shape: of the stored array.
          part: of the stored array, as a slice for each dim.
        """
        return np.asarray(value[part])

    def order(self, ndim: int) -> tuple[int, ...]:
        """Returns, for each dim of a value with ``ndim`` dims, the index of the stored dim: here 0 to ndim - 1."""
        return tuple(range(ndim))

    def of_value(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        """Returns ``entries`` in the order of the value's dims; an entry (axis names, say) belongs to each stored dim.

        A subclass that permutes dims (``order``) permutes the entries; here the order stays.
        """
        return tuple(entries[dim] for dim in self.order(len(entries)))

    def after_read(self) -> "Store":
        """Returns the storage format of the array that ``read`` returns, if dims that are still split stay as stored.

        Here ``self``.
        """
        return self

    def with_dim(self, index: int) -> "Store":
        """Returns the storage format of the leaf after an additional (layer) dim at ``index``: here ``self``.

        A subclass with a size for each dim inserts an entry for the new dim.
        """
        return self

    def without_dim(self, index: int) -> "Store":
        """Returns the storage format of the leaf without its dim ``index``, a layer dim: here ``self``.

        A subclass with a size for each dim removes the entry of the dim.
        """
        return self

    def of_last_dims(self, ndim: int) -> "Store":
        """Returns the storage format of the last ``ndim`` dims of the leaf, one layer of stacked layers: here ``self``.

        A subclass with a size for each dim drops the entries of leading dims.
        """
        return self


UNCHANGED_STORE = Store()


def with_zeros_behind(value: jax.Array, shape: Shape) -> jax.Array:
    """Returns ``value`` padded with zeros at the end of each dim to ``shape``; a ``write`` for stores with padding."""
    return jnp.pad(value, [(0, size - true) for size, true in zip(shape, value.shape, strict=True)])


class LeafToSplit(NamedTuple):
    """Leaf before it is split: the array, the axes of each dim, the dim to split, and the store."""

    value: Any  # an array, or a ``ShapeDtypeStruct``
    names: tuple[AxisEntry, ...]
    dim: int
    store: Store


class Uneven(Protocol):
    """Protocol of a mode of the option ``uneven``: which dims are split, and in which format split leaves are stored.

    ``reason`` is called for dims that the axes do not divide, ``prepare_for_split`` for every leaf that is split. So a
    mode may also choose another format for leaves that need no padding.
    """

    def reason(self, dim: int, size: int, parts: int) -> Reason | None:
        """Returns the reason to split ``dim`` of size ``size`` in ``parts``, though ``parts`` does not divide ``size``.

        ``None``: this mode does not split such a leaf, and the leaf stays replicated.
        """
        ...

    def prepare_for_split(self, leaf: LeafToSplit, parts: int) -> LeafToSplit:
        """Returns ``leaf`` in its storage format, in which ``parts`` divides the dim to split, ``leaf.dim``.

        A mode with padding returns a new ``LeafToSplit``, with the padded array and the format (store) that records the
        size without padding.
        """
        ...


# By the names that users pass. "replicate": a leaf that the axes do not divide is not split.
UNEVEN: dict[str, Uneven | None] = {"replicate": None}

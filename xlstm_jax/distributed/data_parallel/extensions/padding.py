"""Padding: a leaf without a divisible dim is stored with zeros at the end of its largest dim (``uneven="pad"``).

W[37, 16] over 8 devices is stored as [40, 16]: each device keeps five rows, the last device two rows of W and three of
zeros. The gathered array is cut to [37, 16] before a module reads the value, so the gradient of the zeros is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from xlstm_jax.distributed.data_parallel.policy import next_multiple
from xlstm_jax.distributed.data_parallel.reasons import Reason
from xlstm_jax.distributed.data_parallel.store import (
    UNCHANGED_STORE,
    UNEVEN,
    LeafToSplit,
    Shape,
    Store,
    with_zeros_behind,
)
from xlstm_jax.explicit_axes import on_auto_axes

Sizes = tuple[int | None, ...]


@dataclass(frozen=True)
class ZeroPadding(Store):
    """Stores a value with zeros appended. ``sizes``: the value's size in each padded dim, ``None`` for other dims."""

    sizes: Sizes
    writes_parts: ClassVar[bool] = True

    @classmethod
    def of(cls, sizes: Sizes) -> Store:
        """Returns a ``ZeroPadding`` (a format in which a leaf is stored with zeros at the end of dims) for ``sizes``.

        ``sizes`` has, for each dim of the leaf, the size without padding, or ``None`` for a dim that is not padded. If
        no dim is padded, ``UNCHANGED_STORE`` (values are stored as they are) is returned.
        """
        return cls(tuple(sizes)) if any(sizes) else UNCHANGED_STORE

    def shape(self, stored: Shape, counts: Sequence[int]) -> Shape:
        sizes = zip(super().shape(stored, counts), self.sizes, strict=True)
        return tuple(stored if size is None else size for stored, size in sizes)

    def read(self, stored: jax.Array, is_split: Sequence[bool]) -> jax.Array:
        cut = tuple(slice(None if split else size) for size, split in zip(self.sizes, is_split, strict=True))
        # Under explicit axes the value is replicated: JAX has no sharding for a dim that the axes do not divide.
        return on_auto_axes(lambda stored: stored[cut], like=lambda stored: PartitionSpec())(stored)

    def write(self, value: jax.Array, shape: Shape) -> jax.Array:
        return with_zeros_behind(value, shape)

    def written_part(self, value: Any, shape: Shape, part: tuple[slice, ...]) -> np.ndarray:
        bounds = [dim.indices(size)[:2] for dim, size in zip(part, shape, strict=True)]
        held = zip(bounds, value.shape, strict=True)
        entries = np.asarray(value[tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in held)])
        written = np.zeros([stop - start for start, stop in bounds], entries.dtype)
        written[tuple(map(slice, entries.shape))] = entries
        return written

    def with_dim(self, index: int) -> Store:
        return ZeroPadding.of((*self.sizes[:index], None, *self.sizes[index:]))

    def without_dim(self, index: int) -> Store:
        return ZeroPadding.of(self.sizes[:index] + self.sizes[index + 1 :])

    def of_last_dims(self, ndim: int) -> Store:
        return ZeroPadding.of(self.sizes[max(0, len(self.sizes) - ndim) :])


class Padded(Reason, text="dim {dim} of size {size} is the largest, padded to {padded} for {parts} shards"):
    """No dim is divisible: the largest is split, and stored with padding."""

    dim: int
    size: int
    padded: int
    parts: int


class Pad:
    """Mode ``uneven="pad"`` of the wrappers: a leaf without a divisible dim is padded along its largest dim."""

    def reason(self, dim: int, size: int, parts: int) -> Reason:
        return Padded(dim, size, next_multiple(size, parts), parts)

    def prepare_for_split(self, leaf: LeafToSplit, parts: int) -> LeafToSplit:
        """Returns ``leaf`` padded with zeros at the end of the dim to split, ``leaf.dim``, to a multiple of ``parts``.

        The new store records the size without padding. A leaf whose dim ``parts`` divides is returned unchanged. The
        value of a plan is a ``ShapeDtypeStruct``, of which only the shape is padded.
        """
        value, dim = leaf.value, leaf.dim
        size = value.shape[dim]
        if size % parts == 0:
            return leaf
        sizes = list(leaf.store.sizes) if isinstance(leaf.store, ZeroPadding) else [None] * value.ndim
        sizes[dim] = size
        store = ZeroPadding(tuple(sizes))
        shape = (*value.shape[:dim], next_multiple(size, parts), *value.shape[dim + 1 :])
        # A plan pads types, and has no values.
        if isinstance(value, jax.ShapeDtypeStruct):
            return leaf._replace(value=jax.eval_shape(partial(store.write, shape=shape), value), store=store)
        return leaf._replace(value=store.write(value, shape), store=store)


UNEVEN["pad"] = Pad()
Store.OF_OLD_FIELDS["true_sizes"] = ZeroPadding.of

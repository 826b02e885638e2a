"""``PackSmall``: sends the small leaves of a unit together, in one collective for each axis.

Leaf i is split along its dim of size d_i over n devices, and its shard has s_i values:

  pack      W_i[.., d_i / n, ..]  -- dim d_i to the front -->  [1, s_i], concatenated to [1, s], s = sum of s_i
  gather    [1, s]                -- along dim 0          -->  [n, s]
  unpack    columns of leaf i, [n, s_i]  -->  [d_i, ...]  -- dim 0 back to its place -->  W_i[.., d_i, ..]

Row j of the packed array is what device j has sent, so that columns of leaf i are its shards in device order. The
gradient takes the same way back: packed to [n, s], reduce-scattered along dim 0, unpacked from [1, s]. Each value is
divided and added in the order in which a scatter of the leaf alone divides and adds, so that results are equal to the
bit where a backend adds the terms of devices in an order that does not depend on shapes.

A leaf that is sent alone adds the latency of a collective on each axis; packing adds a copy of the unsharded leaf, read
and written. ``xlstm_jax.forecast.hardware.packing_limit`` compares both times.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.distributed.data_parallel.extensions.packing import Packing, ShardToSend
from xlstm_jax.distributed.data_parallel.shared_collectives import Parcel
from xlstm_jax.distributed.data_parallel.wire.wire import Unchanged, Wire

# Full bytes of a leaf, as sent. 3 MiB are copied (read and written) in 7.7 us on v5e, at 819 GB/s: less than 2 stages
# of 5 us each, the latency that ``packing_limit`` assumes without hops.
DEFAULT_BELOW = 3 * 2**20


@dataclass(frozen=True)
class PackSmall(Packing):
    """Packing of the leaves of a unit that have fewer than ``below`` bytes, in an array for each dtype and set of axes.

    >>> PackSmall(below=2**20)
    PackSmall(below=1048576)

    Attributes:
      below: bytes of an unsharded leaf in the format in which it is sent. ``forecast.hardware.packing_limit`` returns
        the bytes for a chip and a mesh.
    Raises:
      TypeError: ``below`` is not an int.
      ValueError: ``below`` is not positive.
    """

    below: int = DEFAULT_BELOW

    def __post_init__(self) -> None:
        if not isinstance(self.below, int) or isinstance(self.below, bool):
            raise TypeError(f"PackSmall(below={self.below!r}) is not a number of bytes; pass an int, as 2**20.")
        if self.below <= 0:
            raise ValueError(f"PackSmall(below={self.below}) packs no leaf; pass 1 or more, or packing=None.")

    def packs_leaf_of(self, full_bytes: float) -> bool:
        return full_bytes < self.below

    def group_into_parcels(self, shards: Mapping[Any, ShardToSend]) -> Sequence[Parcel]:
        groups: dict[Hashable, dict[Any, ShardToSend]] = defaultdict(dict)
        for key, shard in shards.items():
            if self.packs_leaf_of(shard.full_bytes):
                groups[shard.kind][key] = shard
        return [_parcel(group) for group in groups.values() if len(group) > 1]


@dataclass(frozen=True)
class Columns:
    """Places of arrays among the columns of a packed array: shapes of single shards, and their split dims."""

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, arrays: Sequence[tuple[tuple[int, ...], int]]) -> "Columns":
        """Returns the ``Columns`` (layout of a packed array) of arrays that are packed in the order of ``arrays``.

        ``arrays`` has, for each array, (shape of a single shard, the dim that is split).
        """
        shapes, dims = zip(*arrays, strict=True)
        return cls(tuple(shapes), tuple(dims))

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Packs arrays into a matrix [r, s]: row i has the values of shard i of each array, in the order of ``shapes``.

        Each array consists of r equal shards, concatenated along its split dim; s is the number of values in a shard of
        each array together. For r = 3, arrays [4, 6] (shards [4, 2], split along dim 1) and [6] (shards [2]) become
        [3, 10].
        """
        rows = arrays[0].shape[self.dims[0]] // self.shapes[0][self.dims[0]]
        moved = (jnp.moveaxis(array, dim, 0) for array, dim in zip(arrays, self.dims, strict=True))
        return jnp.concatenate([array.reshape(rows, -1) for array in moved], axis=1)

    def split(self, packed: jax.Array) -> list[jax.Array]:
        """Returns the arrays in ``packed``, a matrix [r, s], as a list in the order of ``shapes``; undoes ``join``.

        Row i of ``packed`` has the s values of shard i of each array. The r shards of an array are concatenated along
        its split dim: [3, 10] gives [4, 6] for shards [4, 2], split along dim 1, and [6] for shards [2].
        """
        # The transpose of lax.split is one concatenate; slices would be padded and added.
        parts = lax.split(packed, [math.prod(shape) for shape in self.shapes], axis=1)
        return [
            jnp.moveaxis(part.reshape(-1, *shape[:dim], *shape[dim + 1 :]), 0, dim)
            for part, shape, dim in zip(parts, self.shapes, self.dims, strict=True)
        ]


@dataclass(frozen=True)
class SmallLeaves:
    """Parcel of shards of one kind: see ``Parcel``."""

    members: tuple[Any, ...]
    columns: Columns
    wire: Wire

    def pack(self, shards: Sequence[jax.Array]) -> jax.Array:
        return self.columns.join(shards)

    def unpack(self, rows: jax.Array) -> list[jax.Array]:
        return self.columns.split(rows)


@jax.tree_util.register_static
@dataclass(frozen=True)
class PackedWire:
    """Wire of a packed array: each leaf keeps its own format, and what the formats send is packed again."""

    shards: Columns
    sent: Columns
    wires: tuple[Wire, ...]

    rounds_again: ClassVar[bool] = False  # a packed array is gathered over all axes that split its leaves

    def send(self, shard: jax.Array) -> jax.Array:
        parts = self.shards.split(shard)
        return self.sent.join([wire.send(part) for wire, part in zip(self.wires, parts, strict=True)])

    def along(self, dim: int) -> int:
        return dim

    def receive(self, arrived: jax.Array) -> jax.Array:
        parts = self.sent.split(arrived)
        return self.shards.join([wire.receive(part) for wire, part in zip(self.wires, parts, strict=True)])


def _parcel(group: Mapping[Any, ShardToSend]) -> SmallLeaves:
    """Returns the parcel that sends the shards in ``group``, by key, together; ``members`` are the keys, in order.

    ``group`` has two or more shards that agree in dtype, axes and options (``ShardToSend.kind``). If a shard is sent in
    a packed format (blocks of 8 bits, say), the parcel converts each shard separately, and sends the results together.
    """
    shards = list(group.values())
    columns, wire = Columns.of([(shard.shape, shard.dim) for shard in shards]), Unchanged()
    if all(isinstance(shard.wire, Unchanged) for shard in shards):
        return SmallLeaves(tuple(group), columns, wire)
    # Formats such as blocks of 8 bits send arrays of other shapes, which have other columns.
    sent = [jax.eval_shape(shard.wire.send, jax.ShapeDtypeStruct(shard.shape, shard.dtype)) for shard in shards]
    places = [(array.shape, shard.wire.along(shard.dim)) for array, shard in zip(sent, shards, strict=True)]
    packed = PackedWire(columns, Columns.of(places), tuple(shard.wire for shard in shards))
    return SmallLeaves(tuple(group), columns, packed)

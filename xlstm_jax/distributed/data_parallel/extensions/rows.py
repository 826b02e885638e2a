"""Row lookups: an embedding fetches the rows of its tokens if this sends fewer bytes than a gather of the table.

``wire/lookup`` sends the rows. A table is marked (``LOOKED_UP``) if a single lookup has read the table while the model
was initialised. A table that the head reads, too, is gathered for the head, and costs the lookup nothing more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from xlstm_jax.distributed.data_parallel.extension import Extension, register
from xlstm_jax.distributed.data_parallel.leaf import LOOKED_UP, Sharded, as_read, is_library_box
from xlstm_jax.distributed.data_parallel.partial_reads import bound_split, can_send_parts, shards_to_read
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes
from xlstm_jax.distributed.data_parallel.wire.lookup import by_rows, look_up
from xlstm_jax.introspection import is_unchanged
from xlstm_jax.program_names import LOOKUP_SCOPE

TABLE = "embedding"  # name of the parameter of an ``nn.Embed``


def can_send_rows(box: Sharded) -> bool:
    """Returns whether the rows that a lookup reads may be sent in place of the embedding table in ``box``.

    True if the table has the mark ``LOOKED_UP`` (a single lookup reads it), and if parts of the table can be sent: the
    table is a matrix of floats with exactly one split dim, sent as plain numbers.
    """
    return LOOKED_UP in box.marks and can_send_parts(box)


def look_up_rows(box: Sharded, indices: Any, path: str = "") -> jax.Array | None:
    """Returns the rows of a split table [rows, d] at ``indices`` [...], as [..., d], fetched from their devices.

    Only for an array of integer indices, inside ``shard_map``, over two or more devices. ``None`` otherwise; if
    ``can_send_rows`` is False; under ``vmap`` or in ``lax.cond``; and if a gather of the table sends fewer bytes.
    ``box`` has this device's shard of the table; ``path`` names the table in errors.
    """
    are_indices = isinstance(indices, jax.Array) and jnp.issubdtype(indices.dtype, jnp.integer) and indices.size
    split = bound_split(box, indices) if are_indices and can_send_rows(box) else None
    if split is None:
        return None
    (dim, over), communication = split, box.communication
    collectives.check_bound(communication.copied_axes, caller=f"the lookup of rows of '{path}', replicas of it")
    sent, summed = (jnp.dtype(dtype).itemsize for dtype in communication.dtypes(box.value, path))
    summed *= box.trainable
    counts = [collectives.axis_size(entry_axes(entry)) for entry in box.names]
    lookup = by_rows(
        box.shape_of_parts(counts),
        tuple(size * count for size, count in zip(box.value.shape, counts, strict=True)),
        dim,
        [(axis, collectives.axis_size((axis,))) for axis in over],
        communication,
        path,
        tokens=indices.size,
        index_bytes=indices.dtype.itemsize,
        table_bytes=sent + summed,
        row_bytes=sent + min(sent, summed),
    )
    if lookup is None:
        return None
    with jax.named_scope(LOOKUP_SCOPE):
        return look_up(as_read(box, box.value), indices, lookup)


@register
class RowLookups(Extension):
    """Computes the call of a wrapped ``nn.Embed`` by ``look_up_rows``, without a gather of the table."""

    modules = (nn.Embed,)

    def computes(self, module: Any, method: str) -> bool:
        return method == "__call__"

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not is_lookup(module, method):
            return None
        table = shards_to_read(policy, module.variables.get("params", {})).get(TABLE)
        rows = None if table is None else look_up_rows(table, args[0], "/".join((*module.path, TABLE)))
        return rows if rows is None else promote_dtype(rows, dtype=module.dtype, inexact=False)[0]

    @contextmanager
    def initialising(self, module: Any, method: str) -> Iterator[None]:
        """Enters a context around ``method`` of an ``nn.Embed``, which updates the mark of the table on exit.

        During ``init``, a table that this call has made gets the mark ``LOOKED_UP``: a single lookup has read the
        table. A later call in ``init``, or another method, removes the mark. Without a box around the table nothing
        changes.
        """
        before = _table(module) if module.is_initializing() else None
        yield
        if module.is_initializing() and (after := _table(module)) is not None:
            # A second lookup reads the table gathered for the first: together they may need more rows than the table
            # has.
            looked_up = is_lookup(module, method) and before is None
            marks = after.marks | {LOOKED_UP} if looked_up else after.marks - {LOOKED_UP}
            module.put_variable("params", TABLE, after.replace(marks=marks))

    def avoids_gather(self, box: Sharded) -> bool:
        return can_send_rows(box)


def _table(module: nn.Embed) -> Any:
    """Returns the library's box around the module's table; ``None`` if the table is bare or not yet made."""
    leaf = module.get_variable("params", TABLE) if module.scope is not None else None
    return leaf if is_library_box(leaf) else None


def is_lookup(module: nn.Embed, method: str) -> bool:
    """Returns whether ``method`` of ``module`` is Flax's own ``nn.Embed.__call__``: the rows suffice for the result.

    False also for a subclass with a ``setup`` of its own, which may scale or normalise the table that the call reads.
    """
    promotes_as_flax = getattr(module, "promote_dtype", promote_dtype) is promote_dtype
    is_flaxs = all(is_unchanged(module, name, nn.Embed) for name in ("setup", "__call__"))
    return method == "__call__" and is_flaxs and promotes_as_flax

"""Conditions under which parts of a split matrix can be sent instead of the full matrix.

Used by ``extensions/rows`` (lookups in a table) and ``extensions/pieces`` (chunks of a kernel), which read the shards
of a unit with its options: ``shards_to_read``.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.introspection import inside_branch
from xlstm_jax.private_names import BatchTracer


def can_send_parts(box: Sharded) -> bool:
    """Returns whether a leaf is a matrix of which parts can be sent in place of the full matrix.

    True for a matrix of floats that is sent as numbers (not as blocks of 8-bit codes with scales), has exactly one
    split dim, is stored with its dims in order, and is not split by the model itself.
    """
    is_float = box.communication.format_of(box.value) is None and jnp.issubdtype(value_dtype(box.value), jnp.inexact)
    is_stored_plainly = not box.model_axes and not box.read_as_stored and box.store.order(len(box.names)) == (0, 1)
    return is_float and is_stored_plainly and len(box.names) == 2 and sum(map(bool, box.names)) == 1


def bound_split(box: Sharded, *operands: jax.Array) -> tuple[int, tuple[str, ...]] | None:
    """Returns (split dim, axes of the split) of the matrix in ``box``; ``None`` if only a full gather is correct.

    The axes are bound, and axes of size 1 are left out. ``None`` outside of ``shard_map``; if every axis has size 1;
    inside ``lax.cond`` (where the gather raises an error); and if one of ``operands``, the arrays used together with
    the matrix, is under ``vmap``, where the number of examples is unknown. The matrix has exactly one split dim.
    """
    if not isinstance(box.value, Tracer) or not all(map(collectives.is_bound, box.axes)):
        return None
    over = collectives.spread_axes(box.axes)
    if not over or any(isinstance(operand, BatchTracer) for operand in operands) or inside_branch():
        return None
    return next(dim for dim, entry in enumerate(box.names) if entry), over


def shard_to_read(policy: ShardPolicy, box: Sharded) -> Sharded | None:
    """Returns the split leaf in ``box``, still a shard, in a box with the communication options of a unit.

    ``policy`` has the options of the unit. Options that the unit leaves ``None``, and the replicas, are read from
    ``box``. ``None`` is returned if the leaf is also split over axes that the unit does not gather.
    """
    if not all(map(policy.has_axis, box.axes)):
        return None
    # The box names the copies, as in ``gather_here``.
    return box.replace(communication=replace(policy.communication, replicas=None).filled_from(box.communication))


def shards_to_read(policy: ShardPolicy, params: Mapping[str, Any]) -> dict[str, Sharded]:
    """Returns the split parameters of a module by name: boxes with this device's shards and the options of the unit.

    ``policy`` has the options of the unit, ``params`` are the module's "params". Left out are entries of submodules,
    bare leaves, and leaves that are also split over axes that the unit does not gather.
    """
    shards = {name: shard_to_read(policy, leaf) for name, leaf in params.items() if isinstance(leaf, Sharded)}
    return {name: shard for name, shard in shards.items() if shard is not None}

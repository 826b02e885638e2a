"""A training state as people read it: in one line, and as a table for notebooks."""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer
from rich.console import RenderableType

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.data_parallel.wire.communication import value_dtype
from xlstm_jax.distributed.plan.leaf_plan import ByteCount
from xlstm_jax.wording import format_bytes, rich_table


def state_line(state: Any) -> str:
    """The step, and the number and bytes of the leaves of each part; a state in full has thousands of characters."""
    parts = [
        f"{name} {format_bytes(count.total)}, {format_bytes(count.per_device)} per device, leaves: {leaves}"
        for name, leaves, count in _parts(state)
    ]
    return f"<{type(state).__name__} {_step(state.step)}: {'; '.join(parts) or 'nothing'}>"


def state_table(state: Any) -> RenderableType:
    """The same, a row for each part."""
    rows = [
        [name, str(leaves), format_bytes(count.total), format_bytes(count.per_device)]
        for name, leaves, count in _parts(state)
    ]
    title = f"{type(state).__name__} {_step(state.step)}"
    return rich_table(title, ["part", "leaves", "bytes", "per device"], rows)


def _step(step: Any) -> str:
    """An abstract state, a traced one and one that a step has taken over have no number to show."""
    known = not isinstance(step, Tracer) and not (isinstance(step, jax.Array) and step.is_deleted())
    return f"at step {int(step)}" if known and hasattr(step, "__int__") else "without values"


def _parts(state: Any) -> Iterator[tuple[str, int, ByteCount]]:
    """Of each part that is not empty the name, the number of its leaves, and their bytes."""
    for name in ("params", "opt_state", "collections"):
        leaves = [leaf_of(leaf).value for _, leaf in leaves_with_path(getattr(state, name))]
        if leaves:
            yield name, len(leaves), sum(map(_bytes, leaves), ByteCount())


def _bytes(value: PyTree) -> ByteCount:
    """Of an array; on a mesh, whether there are devices or not, a device has its shard."""
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return ByteCount()
    sharding = None if isinstance(value, Tracer) else getattr(value, "sharding", None)
    shard = value.shape if sharding is None else sharding.shard_shape(value.shape)
    itemsize = value_dtype(value).itemsize
    return ByteCount(math.prod(value.shape) * itemsize, math.prod(shard) * itemsize)

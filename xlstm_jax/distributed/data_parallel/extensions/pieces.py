"""Kernels read in pieces: a module gathers successive parts of a kernel, never the full kernel.

``wire/pieces`` sends the pieces. A module that reads pieces is a subclass of ``ReadsShards``, as ``LMHead`` is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import jax
from flax import linen as nn

from xlstm_jax.distributed.data_parallel.extension import Extension, PartialGather, register
from xlstm_jax.distributed.data_parallel.leaf import Sharded, as_read
from xlstm_jax.distributed.data_parallel.partial_reads import bound_split, can_send_parts, shards_to_read
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.pieces import Pieces
from xlstm_jax.introspection import is_unchanged

Piece = tuple[int, int]  # the dim of a parameter that is cut into pieces, and the number of its entries per piece


def can_send_pieces(box: Sharded, along: int) -> bool:
    """Returns whether a split matrix can be gathered in successive pieces, each a range of its dim ``along``.

    The leaf must be a matrix of floats with exactly one split dim, sent as plain numbers (``can_send_parts``). A matrix
    that is stored with padding can be cut only along the split dim: False for another ``along``.
    """
    # Padding along the other dim would have to be cut off each piece.
    return can_send_parts(box) and (box.stores_value or bool(box.names[along]))


def pieces_of(box: Sharded, along: int, *operands: jax.Array, path: str = "") -> tuple[jax.Array, Pieces] | None:
    """Returns (shard, layout) to gather a matrix in pieces along dim ``along``; ``None`` if only a full gather works.

    A piece is a range of the dim. The shard is this device's array in ``box``, under ``stop_gradient`` if frozen. The
    layout is a ``Pieces``: the dims, axes and options of the gather. ``None`` is returned outside of ``shard_map``, on
    a single device, inside ``lax.cond``, if an operand is under ``vmap``, and if ``can_send_pieces`` is False.

    Args:
      box: the shard in its box.
      along: the dim that is cut into pieces.
      *operands: the arrays used together with the matrix.
      path: the name of the matrix in errors.
    Raises:
      ValueError: an axis along which shards have copies is not bound, or a dtype of the options does not fit the
        matrix.
    """
    communication = box.communication
    split = bound_split(box, box.value, *operands) if can_send_pieces(box, along) else None
    if split is None:
        return None
    named = f"'{path}'" if path else "a parameter"
    collectives.check_bound(communication.copied_axes, caller=f"pieces of {named}, replicas of it")
    communication.dtypes(box.value, path or None)  # raises here rather than in the backward pass
    (dim, over), held = split, box.value.shape[along]
    return as_read(box, box.value), Pieces(along, box.shape, held, dim, over, communication, box.trainable, path)


class ReadsShards:
    """Base of modules that can compute from shards of parameters, as ``LMHead`` does from pieces of a kernel.

    ``read_by`` maps each method that ``from_shards`` can replace to the methods called by it. If a subclass overrides
    any of the methods, parameters are gathered for the call, as for any other method.
    """

    read_by: ClassVar[dict[str, tuple[str, ...]]] = {}

    @nn.nowrap
    def pieces(self) -> dict[str, Piece]:
        """Returns (dim that is cut, number of entries in a piece) for each parameter that is read in pieces, by name.

        By default {}: no parameter is read in pieces.
        """
        return {}

    def from_shards(self, method: str, shards: dict[str, Sharded], *args: Any, **kwargs: Any) -> Any:
        """Returns the result of ``method`` for ``args`` and ``kwargs``, computed from the module's shards. Abstract.

        ``None``: the result cannot be computed without a gather. ``shards`` has the split parameters by name, each a
        box with this device's shard.
        """
        raise NotImplementedError


@register
class PieceReaders(Extension):
    """Calls ``ReadsShards.from_shards`` in place of the methods of a wrapped module, so that nothing is gathered."""

    modules = (ReadsShards,)

    def computes(self, module: Any, method: str) -> bool:
        return True

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        if not reads_shards(module, method):
            return None
        shards = shards_to_read(policy, module.variables.get("params", {}))
        return type(module).from_shards(module, method, shards, *args, **kwargs)

    @contextmanager
    def recording_parts(self, partial_gathers: dict[str, PartialGather]) -> Iterator[None]:
        def note(method: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            module = context.module
            if isinstance(module, ReadsShards) and any(reads_shards(module, name) for name in module.read_by):
                for name, (along, entries) in module.pieces().items():
                    part = PartialGather(along, entries, partial(can_send_pieces, along=along))
                    partial_gathers["/".join((*module.path, name))] = part
            return method(*args, **kwargs)

        with nn.intercept_methods(note):
            yield


def reads_shards(module: Any, method: str) -> bool:
    """Returns whether ``from_shards`` of a ``ReadsShards`` module may compute the result of ``method``.

    False if ``read_by`` does not list the method, or if a subclass overrides the method or a method called by it.
    """
    cls: Any = next(cls for cls in type(module).__mro__ if "from_shards" in vars(cls))
    made_of = cls.read_by.get(method)
    return made_of is not None and all(is_unchanged(module, name, cls) for name in (method, *made_of))

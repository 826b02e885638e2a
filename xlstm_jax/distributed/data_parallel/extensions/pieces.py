"""Kernels read by pieces: a module gathers parts of its kernel one after the other, and never all of it.

``wire/pieces`` sends them. A module that can do this has ``ReadsShards`` among its bases, as ``LMHead`` has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import jax
from flax import linen as nn

from xlstm_jax.distributed.data_parallel.extension import Extension, PartialGather
from xlstm_jax.distributed.data_parallel.leaf import Sharded, as_read
from xlstm_jax.distributed.data_parallel.modules import unit
from xlstm_jax.distributed.data_parallel.partial_reads import gives_parts, split_here
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.pieces import Pieces
from xlstm_jax.foreign import is_unchanged

Piece = tuple[int, int]  # the dim of a parameter that a piece is part of, and how many of its entries a piece has


def gives_pieces(box: Sharded, along: int) -> bool:
    """Returns whether a matrix may be gathered by pieces: parts of its dim ``along``."""
    # What is stored along the other dim besides the value (padding) would have to be cut off each piece.
    return gives_parts(box) and (box.stores_value or bool(box.names[along]))


def pieces_of(box: Sharded, along: int, *operands: jax.Array, path: str = "") -> tuple[jax.Array, Pieces] | None:
    """Returns the shard of a matrix, and how pieces of it are gathered: parts of its dim ``along``.

    None where all of it is gathered. ``operands`` are the arrays that it is read with.
    """
    how = box.communication
    split = split_here(box, box.value, *operands) if gives_pieces(box, along) else None
    if split is None:
        return None
    named = f"'{path}'" if path else "a parameter"
    collectives.check_bound(how.copied_axes, caller=f"pieces of {named}, replicas of it")
    how.dtypes(box.value, path or None)  # refused here, not in the backward pass
    (dim, over), held = split, box.value.shape[along]
    return as_read(box, box.value), Pieces(along, box.shape, held, dim, over, how, box.trainable, path)


class ReadsShards:
    """The base of modules that can compute from shards of their own parameters: ``LMHead``, by pieces of its kernel.

    ``read_by`` has the methods for which ``from_shards`` may stand, each with the methods that it is made of: where a
    subclass has changed one of these, parameters are gathered for the method, as for any other.
    """

    read_by: ClassVar[dict[str, tuple[str, ...]]] = {}

    @nn.nowrap
    def pieces(self) -> dict[str, Piece]:
        """The parameters that it reads by pieces, by name."""
        return {}

    def from_shards(self, method: str, shards: dict[str, Sharded], *args: Any, **kwargs: Any) -> Any:
        """What a method returns for its arguments, from shards by name; None where they are to be gathered for it."""
        raise NotImplementedError


class PieceReaders(Extension):
    """The methods of a unit whose module is a ``ReadsShards``."""

    modules = (ReadsShards,)

    def computes(self, module: Any, method: str) -> bool:
        return True

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        if not reads_shards(module, method):
            return None
        shards = unit.shards_to_read(policy, module.variables.get("params", {}))
        return type(module).from_shards(module, method, shards, *args, **kwargs)

    @contextmanager
    def noting_parts(self, found: dict[str, PartialGather]) -> Iterator[None]:
        def note(method: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            module = context.module
            if isinstance(module, ReadsShards) and any(reads_shards(module, name) for name in module.read_by):
                for name, (along, entries) in module.pieces().items():
                    part = PartialGather(along, entries, partial(gives_pieces, along=along))
                    found["/".join((*module.path, name))] = part
            return method(*args, **kwargs)

        with nn.intercept_methods(note):
            yield


def reads_shards(module: Any, method: str) -> bool:
    """Returns whether ``from_shards`` may replace a method: nobody has changed what the method computes."""
    cls: Any = next(cls for cls in type(module).__mro__ if "from_shards" in vars(cls))
    made_of = cls.read_by.get(method)
    return made_of is not None and all(is_unchanged(module, name, cls) for name in (method, *made_of))

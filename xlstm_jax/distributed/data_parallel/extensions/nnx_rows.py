"""Row lookups for a wrapped ``nnx.Embed``: devices send rows of the table, not the table (see ``rows``)."""

from typing import Any

from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from xlstm_jax.distributed.data_parallel.extension import Extension, register
from xlstm_jax.distributed.data_parallel.extensions.rows import look_up_rows
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.modules.nnx_module import is_flax_lookup, is_read_as_stored, is_split
from xlstm_jax.distributed.data_parallel.partial_reads import shard_to_read
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy


@register
class NnxRowLookups(Extension):
    """Computes the call of a wrapped ``nnx.Embed`` by ``rows.look_up_rows``, without a gather of the table."""

    modules = (nnx.Embed,)

    def computes(self, module: Any, method: str) -> bool:
        # A unit's class is a subclass of the user's class.
        return is_flax_lookup(type(module).__mro__[1], method)

    def from_shards(self, module: Any, method: str, policy: ShardPolicy, args: Any, kwargs: Any) -> Any:
        # A custom promotion may compute something else from the rows, and the variable from the table.
        variable = module.embedding
        is_flaxs = is_split(variable) and is_read_as_stored(variable) and module.promote_dtype is promote_dtype
        if kwargs or len(args) != 1 or not is_flaxs:
            return None
        table = shard_to_read(policy, leaf_of(variable))
        rows = None if table is None else look_up_rows(table, args[0])
        return rows if rows is None else promote_dtype((rows,), dtype=module.dtype, inexact=False)[0]

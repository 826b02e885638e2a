"""Embedding whose table is split over a mesh axis along the vocabulary.

With n devices along "tp" each stores V / n rows of the table [V, d]. A token's row is on a single device; the remaining
devices add zeros. The losses of a tied head, or of ``LMHead(vocab_axis=...)``, compute only the logits of a device's
entries: ``chunked_cross_entropy(hidden, embed.table(), labels, vocab_dim=0, vocab_axis="tp")``.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array
from jax.typing import DTypeLike

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import common_dtype
from xlstm_jax.distributed.model_parallel.activations import axis_devices, leave_split, scatter_tokens
from xlstm_jax.distributed.model_parallel.dense import DEFAULT_AXIS, column_products, split_param


def check_integers(tokens: Array, caller: str) -> None:
    """Raises a ``TypeError``, which names ``caller``, if tokens are not integers."""
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{caller}: tokens are {tokens.dtype.name}, and must be integers.")


def look_up_split_rows(
    table: Array, tokens: Array, num_embeddings: int, axis_name: str, sequence_dim: int | None = None, *, caller: str
) -> Array:
    """Looks tokens [b, t] up in a table [V, d] whose rows are split over the axis; returns the tokens' rows [b, t, d].

    The result is replicated; with ``sequence_dim`` the result is split along this dim, [b, t / n, d].

    Args:
      table: this device's rows [V / n, d].
      tokens: integers, replicated. Negative tokens count from the end of the table. The row of a token below -V or from
        V on is NaN.
      num_embeddings: V.
      axis_name: the mesh axis.
      sequence_dim: see above.
      caller: the function or layer, for errors.
    """
    size = table.shape[0]
    if axis_devices(axis_name, caller) == 1:
        return jnp.take(table, tokens, axis=0)
    # Widen narrow tokens before adding and comparing: in uint8 a size of 256 would overflow to 0.
    tokens = tokens.astype(common_dtype(tokens.dtype, jnp.int32))
    tokens = jnp.where(tokens < 0, tokens + num_embeddings, tokens)  # as jnp.take counts from the end
    known = (tokens >= 0) & (tokens < num_embeddings)
    # Each token's row is on a single device; the remaining devices add zeros, so the sum equals the row to the last
    # bit.
    local_tokens = tokens - collectives.axis_index((axis_name,)) * size
    is_here = (local_tokens >= 0) & (local_tokens < size)
    rows = jnp.take(table, jnp.where(is_here, local_tokens, 0), axis=0)
    rows = jnp.where(is_here[..., None], rows, jnp.where(known, 0, jnp.nan)[..., None].astype(rows.dtype))
    if sequence_dim is None:
        return leave_split(rows, axis_name, caller=caller)
    return scatter_tokens(rows, sequence_dim, axis_name, caller=caller)


class SplitEmbed(nn.Module):
    """``nn.Embed`` with rows split over ``axis_name``: the same parameter, initial values and result, bit for bit.

    >>> layer, tokens = SplitEmbed(100, 8, axis_name="fsdp"), jnp.ones((8, 5), int)
    >>> params = init_sharded(layer, mesh, jax.random.key(0), tokens, batch_axes="dp")["params"]
    >>> params["embedding"].names, params["embedding"].value.shape
    (('fsdp', None), (100, 8))

    Attributes:
      num_embeddings, features, dtype, param_dtype, embedding_init: as in ``nn.Embed``.
      axis_name: the mesh axis.
      sequence_dim: the dim of tokens along which the result, and the query of ``attend``, are split over the axis;
        None: both are replicated. The tokens are always replicated.
    """

    num_embeddings: int
    features: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    embedding_init: Callable[..., Any] = nn.linear.default_embed_init
    axis_name: str = DEFAULT_AXIS
    sequence_dim: int | None = None

    def __call__(self, tokens: Array) -> Array:
        """Returns the rows [b, t, d] of integers [b, t]; a row is NaN for an invalid token.

        With ``sequence_dim`` returns the rows of this device's tokens, [b, t / n, d].

        Raises:
          TypeError: the tokens are not integers.
        """
        caller = f"'{'/'.join(self.path)}'"
        check_integers(tokens, caller)
        (table,) = promote_dtype(self.table(), dtype=self.dtype, inexact=False)
        return look_up_split_rows(table, tokens, self.num_embeddings, self.axis_name, self.sequence_dim, caller=caller)

    def attend(self, query: Array) -> Array:
        """Returns the logits of this device's vocabulary entries for hidden [..., d]: [..., V / n].

        With ``sequence_dim`` the query has this device's tokens, and the logits are of all tokens.
        """
        # Logits stay on their device: the loss sums over devices, and no logits are sent.
        query, table = promote_dtype(query, self.table(), dtype=self.dtype)
        caller = f"'{'/'.join(self.path)}'"
        return column_products(query, [table.T], self.axis_name, sequence_dim=self.sequence_dim, caller=caller)[0]

    @nn.compact
    def table(self) -> Array:
        """Returns this device's rows of the parameter, [V / n, d]; in ``init`` or on a single device all rows."""
        shape = (self.num_embeddings, self.features)
        init = self.embedding_init
        return split_param(self, "embedding", init, shape, self.param_dtype, dim=0, axis_name=self.axis_name)

"""Attention with heads split over a mesh axis: each device computes some heads, over all tokens.

    x[b, t, d]  -->  q[b, t, h / n, e], k and v[b, t, g / n, e]  -->  y[b, t, h / n, e]  -->  z[b, t, d], summed

Queries, keys and values are column-split, and the product after the heads is row-split (see ``dense``): one gather, one
sum. With grouped queries (g < h) a device has the key heads of its query heads. With fewer key heads than devices (g <
n), n / g devices compute the same key head; the key and value kernels are small, and stay replicated along the axis.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax import Array

from xlstm_jax.distributed.model_parallel.dense import ColumnDense, RowDense, Split, columns_of


def causal_attention(query: Array, key: Array, value: Array) -> Array:
    """Returns the causal attention [b, t, h, e] of query [b, t, h, e], key and value [b, t, g, e].

    Calls ``jax.nn.dot_product_attention``; g divides h (grouped queries).
    """
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


class SplitAttention(Split):
    """Self-attention with heads split over ``axis_name``; on one device equal to ``nn.MultiHeadDotProductAttention``.

    Parameters have the names, shapes and initial values of ``nn.MultiHeadDotProductAttention``: ``query``, ``key``,
    ``value`` of [d, heads, e], and ``out`` of [h, e, d].

    >>> layer = SplitAttention(num_heads=8, num_kv_heads=2, head_dim=4)
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 5, 16)))["params"]
    >>> params["query"]["kernel"].shape, params["key"]["kernel"].shape, params["out"]["kernel"].shape
    ((16, 8, 4), (16, 2, 4), (8, 4, 16))

    Further fields as in ``ColumnDense`` and ``RowDense``.

    Attributes:
      num_heads, head_dim: the number h of query heads, and the size e of a head.
      num_kv_heads: the number g of key and value heads, for grouped queries; None: h. g must divide h, and the number
        of devices must divide g or be a multiple of g.
      attention_fn: ``(query, key, value, *args) -> y`` for this device's heads and all tokens. Rotary embeddings, masks
        and kernels belong here.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    attention_fn: Callable[..., Array] = causal_attention
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array, *args: Any) -> Array:
        """Applies attention: [b, t, d] -> [b, t, d]; with ``sequence_dim`` both have this device's tokens.

        ``args`` are passed to ``attention_fn``.

        Raises:
          ValueError: ``num_kv_heads`` does not divide ``num_heads``; or as ``ColumnDense`` and ``RowDense``.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % kv_heads:
            raise ValueError(
                f"{self._called}: num_kv_heads={kv_heads} key heads do not divide num_heads={heads} query "
                "heads. Choose a divisor of the query heads."
            )
        # Key heads may be fewer than devices, and are then copied; query heads are never copied.
        counts = {"query": heads, "key": kv_heads, "value": kv_heads}
        layers = [
            ColumnDense((count, self.head_dim), **self._shared_fields(), copied=name != "query", name=name)
            for name, count in counts.items()
        ]
        y = self.attention_fn(*columns_of(layers, x), *args)
        return RowDense(x.shape[-1], axis=(-2, -1), **self._shared_fields(), name="out")(y)

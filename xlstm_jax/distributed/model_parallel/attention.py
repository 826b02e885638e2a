"""Attention with its heads split over a mesh axis: each device attends with its own, to all tokens.

    x[b, t, d]  -->  q[b, t, h / n, e], k and v[b, t, g / n, e]  -->  y[b, t, h / n, e]  -->  z[b, t, d], summed

Queries, keys and values are columns, and the product after the heads is rows (see ``dense``): one gather, one sum. Of
grouped queries (g < h) a device has the key heads that its queries read. Where there are fewer than devices (g < n),
n / g devices compute the same key head; these kernels are small, and stay whole along the axis.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax import Array

from xlstm_jax.distributed.model_parallel.dense import ColumnDense, RowDense, Split, columns_of


def causal_attention(query: Array, key: Array, value: Array) -> Array:
    """``jax.nn.dot_product_attention``, each token looking back: [b, t, h, e], [b, t, g, e] twice -> [b, t, h, e]."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


class SplitAttention(Split):
    """Self-attention with its heads split over ``axis_name``; on one device as in ``nn.MultiHeadDotProductAttention``.

    Parameters have the names, shapes and initial values of that layer: ``query``, ``key``, ``value`` of [d, heads, e],
    and ``out`` of [h, e, d].

    >>> layer = SplitAttention(num_heads=8, num_kv_heads=2, head_dim=4)
    >>> params = layer.init(jax.random.key(0), jnp.ones((2, 5, 16)))["params"]
    >>> params["query"]["kernel"].shape, params["key"]["kernel"].shape, params["out"]["kernel"].shape
    ((16, 8, 4), (16, 2, 4), (8, 4, 16))

    The fields below come beside those of ``ColumnDense`` and ``RowDense``, which have the same meaning.

    Attributes:
      num_heads, head_dim: h and e.
      num_kv_heads: g, of grouped queries; None: h. It divides h, and the devices divide it, or it the devices.
      attention_fn: ``(query, key, value, *args) -> y`` of the device's own heads and all tokens: rotary embeddings,
        masks and kernels are its affair.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    attention_fn: Callable[..., Array] = causal_attention
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array, *args: Any) -> Array:
        """[b, t, d] -> [b, t, d]; with ``sequence_dim`` both are this device's tokens. ``args`` go to attention_fn."""
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % kv_heads:
            raise ValueError(
                f"{self._called}: num_kv_heads={kv_heads} key heads do not divide num_heads={heads} query "
                "heads, so no group of queries shares a key head."
            )
        # Key heads may be fewer than devices, which then compute the same; query heads never are.
        counts = {"query": heads, "key": kv_heads, "value": kv_heads}
        layers = [
            ColumnDense((count, self.head_dim), **self._how(), copied=name != "query", name=name)
            for name, count in counts.items()
        ]
        y = self.attention_fn(*columns_of(layers, x), *args)
        return RowDense(x.shape[-1], axis=(-2, -1), **self._how(), name="out")(y)

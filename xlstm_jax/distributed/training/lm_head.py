"""``LMHead``: the Linen layer from hidden values to logits, or to losses without logits."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from jax import Array, lax

from xlstm_jax.distributed.training.cross_entropy import DEFAULT_CHUNK_SIZE, TokenLosses, chunked_cross_entropy


class LMHead(nn.Module):
    """``nn.Dense(features, use_bias=False)`` that can also compute losses without its logits.

    The parameter, ``kernel[d, features]``, has the name and the initial values that it has in ``nn.Dense``, so that
    checkpoints of one fit the other. ``shard_module_params(LMHead, "fsdp")`` gathers it for either method.

    >>> head, hidden, labels = LMHead(1000), jnp.ones((2, 5, 8)), jnp.zeros((2, 5), int)
    >>> variables = head.init(jax.random.key(0), hidden)
    >>> head.apply(variables, hidden, labels, method="losses").loss.shape
    (2, 5)

    Attributes:
      features: V, the entries of the vocabulary.
      dtype: of the products, None: that of hidden and kernel; ``param_dtype``, ``kernel_init``: as in ``nn.Dense``.
      chunk_size: see ``chunked_cross_entropy``.
    """

    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    chunk_size: int = DEFAULT_CHUNK_SIZE

    def __call__(self, hidden: Array) -> Array:
        """Logits [..., V] for hidden [..., d], in ``dtype``: to sample from."""
        hidden, kernel = self._operands(hidden)
        return lax.dot_general(hidden, kernel, (((hidden.ndim - 1,), (0,)), ((), ())))

    def losses(self, hidden: Array, labels: Array) -> TokenLosses:
        """The losses of labels [...] given hidden [..., d]: to train on."""
        hidden, kernel = self._operands(hidden)
        return chunked_cross_entropy(hidden, kernel, labels, chunk_size=self.chunk_size)

    @nn.compact
    def _operands(self, hidden: Array) -> tuple[Array, Array]:
        kernel = self.param("kernel", self.kernel_init, (hidden.shape[-1], self.features), self.param_dtype)
        hidden, kernel = promote_dtype(hidden, kernel, dtype=self.dtype)
        return hidden, kernel

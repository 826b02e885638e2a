"""Workloads of the 1.3B and 7B configurations, built without devices.

  config   layers x d      vocabulary   parameters
  1.3B     24 x 2048       32,768       1.44e9
  7B       32 x 4096       50,176       7.39e9

Decoder-only Transformers of ``models``, with 2048 tokens per sequence and one sequence per device, computed in bfloat16
with float32 parameters and AdamW. The layers are an ``nn.scan``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import Attention, LanguageModel, RematPolicy
from xlstm_jax.distributed import shard_module_params
from xlstm_jax.forecast.training import Workload

CONTEXT = 2048


@dataclass(frozen=True)
class Size:
    """Dims of a configuration, and the kind of its blocks."""

    dim: int
    layers: int
    heads: int
    vocab_size: int
    block: str = "transformer"

    @property
    def causal(self) -> bool:
        """Whether attention is causal."""
        return True


SIZES = {"1.3B": Size(2048, 24, 16, 32_768), "7B": Size(4096, 32, 32, 50_176)}


def inputs_of(tokens):
    """Returns the abstract model inputs [b, t] of a batch [b, t + 1]; attention kernels take only full blocks of t."""
    return jax.ShapeDtypeStruct((tokens.shape[0], tokens.shape[1] - 1), tokens.dtype)


def next_token_loss(params, apply_fn, tokens, rng):
    """Computes the mean cross-entropy of the next tokens from the full logits."""
    del rng
    logits, labels = apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:]
    # For a batch dim of size 1 JAX turns the lookup of labels into a slice, and XLA on TPU then adds its gradient to a
    # second float32 copy of the logits gradient (docs/howto/slow_step.md). ``jit`` traces the global batch.
    if len(labels) == 1:
        logits, labels = logits[0], labels[0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def chunked_next_token_loss(params, apply_fn, tokens, rng):
    """Computes ``next_token_loss`` by chunks of the vocabulary, without storing the logits."""
    del rng
    return apply_fn({"params": params}, tokens[:, :-1], tokens[:, 1:], method="losses").loss.mean()


def language_model(
    size: Size,
    *,
    devices: int,
    shard_axes: tuple[str, ...] = (),
    remat: bool | RematPolicy = False,
    chunked_head: bool = False,
    by_pieces: bool = False,
    prefetch: bool = False,
    attention: Attention | None = None,
    constrain: Callable[[jax.Array], jax.Array] | None = None,
    min_weight_size: int = 2**18,
    **sharding: Any,
) -> Workload:
    """Creates the workload of a configuration; without ``shard_axes`` the model is not wrapped.

    Args:
      size: see ``SIZES``.
      devices: the number of devices, and of sequences in the batch.
      shard_axes: the ``axis_name`` of ``shard_module_params``.
      remat, prefetch, attention, constrain: fields of ``LanguageModel``.
      chunked_head: whether the loss is computed by chunks of the vocabulary, instead of from the full logits.
      by_pieces: option of the head, with ``chunked_head``.
      min_weight_size, **sharding: further options of ``shard_module_params``; the default gather dtype is bfloat16.
    """
    sharding = {"gather_dtype": jnp.bfloat16, "min_weight_size": min_weight_size} | sharding
    model = LanguageModel(
        size.block,
        size.dim,
        size.layers,
        size.heads,
        remat=remat,
        wrap=partial(shard_module_params, axis_name=shard_axes, **sharding) if shard_axes else None,
        dtype=jnp.bfloat16,
        vocab_size=size.vocab_size,
        constrain=constrain,
        prefetch=prefetch,
        attention=attention,
        by_pieces=by_pieces,
    )
    tokens = jax.ShapeDtypeStruct((devices, CONTEXT + 1), jnp.int32)
    loss = chunked_next_token_loss if chunked_head else next_token_loss
    return Workload(model, optax.adamw(3e-4), tokens, loss, inputs=(inputs_of(tokens),))

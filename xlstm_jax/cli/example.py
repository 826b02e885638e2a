"""Example of a factory: the function that describes a training to the command ``xlstm-jax``.

    xlstm-jax plan --factory xlstm_jax.cli.example:training --mesh fsdp=256
    xlstm-jax forecast --factory xlstm_jax.cli.example:training --topology v5e:16x16

A factory returns a ``Workload``: the model, the optimizer, an abstract batch and the loss. A factory allocates no
arrays, so it runs on a laptop. Your training script has each of these parts already: keep them in a module that the
script imports too, so that the forecast is of the training that runs. To begin with this example, copy the file.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from xlstm_jax.distributed import shard_module_params
from xlstm_jax.forecast.training import Workload

VOCAB, WIDTH, LAYERS, HEADS, CONTEXT = 32_768, 1024, 12, 8, 1024


class Block(nn.Module):
    """Causal attention and an MLP, computed in bfloat16."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        dense = partial(nn.Dense, dtype=jnp.bfloat16, use_bias=False)
        h = nn.RMSNorm(dtype=jnp.bfloat16, name="norm_1")(x)
        qkv = dense(3 * WIDTH, name="qkv")(h).reshape(*x.shape[:-1], 3, HEADS, WIDTH // HEADS)
        h = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, -3, 0), is_causal=True)
        x = x + dense(WIDTH, name="out")(h.reshape(x.shape))
        h = nn.RMSNorm(dtype=jnp.bfloat16, name="norm_2")(x)
        return x + dense(WIDTH, name="down")(nn.gelu(dense(4 * WIDTH, name="up")(h))), None


class LanguageModel(nn.Module):
    """Maps tokens [b, t] to logits [b, t, vocab]; a ``nn.scan`` compiles one layer in place of twelve."""

    shard_axes: tuple[str, ...]
    min_weight_size: int
    remat: bool
    keep_gathered: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> Any:
        def wrap(cls: Any) -> Any:
            if not self.shard_axes:
                return cls
            return shard_module_params(cls, self.shard_axes, self.min_weight_size, gather_dtype=jnp.bfloat16)

        block = wrap(Block)  # the wrapper inside, remat and scan outside: one layer is gathered at a time
        if self.remat:
            block = nn.remat(block, prevent_cse=False)  # keeps only the layer's input
        elif not self.keep_gathered:  # keeps results of matrix products, and gathers weights again in backward
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            block = nn.remat(block, prevent_cse=False, policy=policy)
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x = wrap(nn.Embed)(VOCAB, WIDTH, dtype=jnp.bfloat16, name="embed")(tokens)
        x, _ = layers(name="blocks")(x, None)
        x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return wrap(nn.Dense)(VOCAB, dtype=jnp.bfloat16, use_bias=False, name="head")(x)


def next_token_loss(params: Any, apply_fn: Any, tokens: jax.Array, rng: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the next tokens, a scalar, for ``make_train_step``.

    ``tokens`` [b, t + 1] is this device's part of the batch: the inputs are all tokens but the last. ``rng`` is not
    used.
    """
    del rng
    logits = apply_fn({"params": params}, tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# Every command passes the axes and the number of devices, and `xlstm-jax fit` also the other three options, over which
# the search runs; each as far as a factory declares the argument. Each argument has a default.
def training(
    *,
    shard_axes: tuple[str, ...] = ("fsdp",),  # mesh axes that parameters are split over; (): replicated
    min_weight_size: int = 2**18,  # leaves with fewer values stay replicated
    remat: bool = False,  # whether a block's activations are computed again in the backward pass
    keep_gathered: bool = True,  # whether gathered weights are kept from the forward to the backward pass
    devices: int = 8,  # devices of the mesh; here a sequence for each device
) -> Workload:
    """Returns the training of a decoder-only Transformer of 0.22 billion parameters with AdamW.

    The global batch has a sequence for each of ``devices`` devices. The further arguments choose the sharding and the
    activations that are kept, as the options of ``xlstm-jax fit``.
    """
    model = LanguageModel(shard_axes, min_weight_size, remat, keep_gathered)
    tokens = jax.ShapeDtypeStruct((devices, CONTEXT + 1), jnp.int32)  # global: the batch of all devices
    return Workload(model, optax.adamw(3e-4), tokens, next_token_loss)

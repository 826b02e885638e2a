"""The 1.3B and 7B configurations, as workloads: nothing here needs a device.

  config   layers x d      vocabulary   parameters
  1.3B     24 x 2048       32,768       1.44e9
  7B       32 x 4096       50,176       7.39e9

Decoder-only Transformers of ``models``, 2048 tokens per sequence and one sequence per device, computed in bfloat16 with
float32 parameters and AdamW. The layers are one ``nn.scan``.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import LanguageModel
from xlstm_jax.distributed import shard_module_params
from xlstm_jax.distributed.forecast import Workload

CONTEXT = 2048


@dataclass(frozen=True)
class Size:
    """The dims of a configuration."""

    dim: int
    layers: int
    heads: int
    vocab_size: int


SIZES = {"1.3B": Size(2048, 24, 16, 32_768), "7B": Size(4096, 32, 32, 50_176)}


def next_token_loss(params, apply_fn, tokens, rng):
    """Mean cross-entropy of each token given those before it."""
    del rng
    logits = apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def language_model(
    size: Size,
    *,
    devices: int,
    shard_axes: tuple[str, ...] = (),
    remat: bool = False,
    grad_scatter_dtype=None,
    min_weight_size: int = 2**18,
) -> Workload:
    """A configuration as a workload; without ``shard_axes`` it is replicated."""
    wrap = partial(
        shard_module_params,
        axis_name=shard_axes,
        min_weight_size=min_weight_size,
        gather_dtype=jnp.bfloat16,
        grad_scatter_dtype=grad_scatter_dtype,
    )
    model = LanguageModel(
        "transformer",
        size.dim,
        size.layers,
        size.heads,
        remat=remat,
        wrap=wrap if shard_axes else None,
        dtype=jnp.bfloat16,
        vocab_size=size.vocab_size,
    )
    tokens = jax.ShapeDtypeStruct((devices, CONTEXT + 1), jnp.int32)
    return Workload(model, optax.adamw(3e-4), tokens, next_token_loss)

"""Decoding with a cached model on the sharded parameters of a training, in a single ``jit``.

The option ``gather`` sets when weights are gathered. With P the bytes of the sharded parameters in the gather dtype:

  gather          a device receives                    and stores, beside its shards and the cache of its rows
  "each_token"    P for every token                    the weights of the current module
  "once"          P per generation                     the unsharded weights
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed import gather_params, partition_specs

GATHER = ("each_token", "once")


def make_generate(
    model: Any, mesh: Mesh, axes: tuple[str, ...], length: int, *, gather: str = GATHER[0], temperature: float = 0.0
) -> Callable[..., jax.Array]:
    """Returns ``generate(params, prompt, rng=None)``: integers [b, p] -> [b, length], split over ``axes``.

    For one token per row, [b, 1], ``model`` must return logits [b, 1, vocabulary] and store the history in the
    collection "cache". Negative tokens of a prompt are replaced by generated tokens. The most likely token is chosen,
    or with ``temperature`` a token is sampled; the text of a row depends neither on the mesh nor on other rows.
    """

    def decode(params: Any, prompt: jax.Array, rng: jax.Array) -> jax.Array:
        rows = len(prompt)
        given = jnp.pad(prompt, [(0, 0), (0, length - prompt.shape[1])], constant_values=-1)
        params = gather_params(params, axes) if gather == "once" else params
        numbers = jax.lax.axis_index(axes) * rows + jnp.arange(rows)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng, numbers)

        def next_token(carry: tuple[Any, jax.Array], inputs: tuple[Any, ...]) -> tuple[Any, jax.Array]:
            (cache, token), (position, given_next) = carry, inputs
            # A compiler may move loop-invariant operations, including gathers, out of the loop: every weight would then
            # be stored unsharded. The barrier makes the gathers depend on the token.
            weights, token = jax.lax.optimization_barrier((params, token)) if gather != "once" else (params, token)
            variables = {"params": weights, "cache": cache}
            logits, changed = model.apply(variables, token[:, None], mutable=["cache"])
            if temperature:
                of_position = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
                drawn = jax.vmap(jax.random.categorical)(of_position, logits[:, 0] / temperature)
            else:
                drawn = jnp.argmax(logits[:, 0], axis=-1)
            token = jnp.where(given_next < 0, drawn.astype(token.dtype), given_next)
            return (changed["cache"], token), token

        cache = model.init(jax.random.key(0), jnp.zeros_like(given))["cache"]
        _, drawn = jax.lax.scan(next_token, (cache, given[:, 0]), (jnp.arange(1, length), given.T[1:]))
        return jnp.concatenate([given[:, :1], drawn.T], axis=1)

    def generate(params: Any, prompt: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        specs = partition_specs(params, mesh), P(axes), P()
        on_mesh = jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=P(axes), check_vma=False)
        return on_mesh(params, prompt, jax.random.key(0) if rng is None else rng)

    return jax.jit(generate)

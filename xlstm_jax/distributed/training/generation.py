"""``make_generate``: decodes token after token with a model that has a cache, on sharded parameters, in one ``jit``.

    prompt[b, p]  -- one token at a time, each device its rows and their cache -->  tokens[b, length]

The parameters stay sharded, as training left them. The user chooses when they are gathered. With P the bytes of the
split parameters in the dtype in which they are gathered:

  gather          a device receives                    and holds, beside its shards and the cache of its rows
  "each_token"    P for every token                    the weights of the module that is being computed
  "once"          P for the whole generation           all weights

Nothing else travels. The tokens of a row depend neither on the mesh nor on the other rows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.common_types import AxisNames, Model, PyTree
from xlstm_jax.distributed.data_parallel import placement
from xlstm_jax.distributed.data_parallel.gather import gather_params
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.device_mesh.checks import auto_mesh, check_no_explicit_mesh, mesh_axes
from xlstm_jax.distributed.hardware.xla_options import resolved_on
from xlstm_jax.distributed.training.arguments import (
    CheckedStep,
    check_global_batch,
    check_keys,
    check_mesh_of,
    check_model,
)
from xlstm_jax.wording import kind_of

ARGUMENTS = ("params", "prompt", "rng")
GATHER = ("each_token", "once")
CACHE = "cache"
TO_DRAW = -1  # in a prompt: a token that is not given


class Generate(jax.stages.Wrapped, Protocol):
    """What ``make_generate`` returns: a ``jax.jit`` function, which has ``lower`` and ``trace``."""

    def __call__(self, params: PyTree, prompt: Any, rng: jax.Array | None = None, /) -> jax.Array: ...


def make_generate(
    model: Model,
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames,
    length: int,
    *,
    gather: str = GATHER[0],
    temperature: float = 0.0,
    check_vma: bool = True,
    compiler_options: str | Mapping[str, Any] | None = None,
) -> Generate:
    """A function that continues prompts, row by row as the plain model would on one device.

    >>> class Counter(nn.Module):  # the next token is the number of tokens so far, as its cache knows
    ...     @nn.compact
    ...     def __call__(self, tokens):
    ...         ready = self.has_variable("cache", "seen")
    ...         seen = self.variable("cache", "seen", lambda: jnp.zeros(tokens.shape[:1], int))
    ...         seen.value += tokens.shape[1] if ready else 0
    ...         return jax.nn.one_hot(seen.value, 16)[:, None]
    >>> generate = make_generate(Counter(), mesh, ("dp", "fsdp"), length=6)
    >>> prompt = jnp.array([[7, 7], [7, -1]]).repeat(4, axis=0)  # of the second kind one token is given
    >>> [row.tolist() for row in generate({}, prompt)[3:5]]
    [[7, 7, 2, 3, 4, 5], [7, 1, 2, 3, 4, 5]]

    Args:
      model: as for decoding (Flax's attention with ``decode=True``, say): given one token of each row, [b, 1], it
        returns logits [b, 1, vocabulary] and keeps what it has seen in the collection "cache". ``model.init`` on
        [b, length] makes the cache. Its parameters are those of the training.
      mesh, batch_axes, check_vma, compiler_options: as of ``make_train_step``. The axes of the wrappers are among
        ``batch_axes``.
      length: of what comes back, prompt included; the cache has room for it.
      gather: when weights are gathered, "each_token" or "once" for the whole generation; see the top of this file.
      temperature: 0 takes the likeliest token (the first of several); otherwise tokens are drawn with
        ``softmax(logits / temperature)``.
    Returns:
      ``generate(params, prompt, rng=None) -> tokens``, a ``jax.jit`` function. ``params`` are boxed as in the state of
      the training, which may be an average of them; they are not donated. ``prompt``, integers [b, p], is split over
      ``batch_axes``; a negative token is drawn, so rows may have prompts of different lengths (a row without its first
      token comes back as -1). ``rng`` is one key, from which each row and position gets its own. ``tokens`` are
      [b, length], in the prompt's dtype, split as the prompt.
    Raises:
      ValueError: ``length`` or ``temperature`` is out of range, ``gather`` unknown; or (at the call) the devices do not
        divide the rows, the prompt is longer than ``length``, the model has no cache or returns other shapes, a
        temperature needs ``rng``, or ``params`` lie on a mesh of other axes.
      TypeError: the model is none; or (at the call) the prompt is not of integers.
    """
    mesh = auto_mesh(mesh)
    axes = mesh_axes(mesh, batch_axes, "batch_axes")
    check_model(model)
    how = _Decoding(model, axes, length, gather, temperature)
    _check_options(how)
    split = placement.batch_spec(axes, mesh)

    def generate(params: PyTree, prompt: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        check_no_explicit_mesh()
        check_mesh_of({"params": params, "rng": rng}, mesh)
        check_global_batch({"prompt": prompt}, mesh, axes)
        _check_prompt(prompt, rng, how)
        key = jax.random.key(0) if rng is None else rng
        in_specs = (placement.partition_specs(params, mesh), split, PartitionSpec())
        on_mesh = jax.shard_map(how.decode, mesh=mesh, in_specs=in_specs, out_specs=split, check_vma=check_vma)
        return on_mesh(params, prompt, key)

    return CheckedStep(generate, mesh, ARGUMENTS, compiler_options=resolved_on(mesh, compiler_options))


def _check_options(how: "_Decoding") -> None:
    if not isinstance(how.length, int | np.integer) or how.length < 1:
        raise ValueError(f"length={how.length!r} is not a positive number of tokens.")
    if how.gather not in GATHER:
        raise ValueError(f"gather={how.gather!r} is none of {GATHER}.")
    if not how.temperature >= 0:
        raise ValueError(f"temperature={how.temperature!r} is not 0 (the likeliest token) or more.")


def _check_prompt(prompt: jax.Array, rng: Any, how: "_Decoding") -> None:
    if not jnp.issubdtype(prompt.dtype, jnp.integer) or prompt.ndim != 2:
        raise TypeError(f"the prompt is {kind_of(prompt)}, and must be integers [rows, tokens].")
    if not 1 <= prompt.shape[1] <= how.length:
        raise ValueError(f"the prompt of shape {prompt.shape} has {prompt.shape[1]} tokens, not 1 to {how.length=}.")
    if rng is not None:
        check_keys(rng, "generate(params, prompt, rng)", one=True)
    elif how.temperature:
        raise ValueError(
            f"temperature={how.temperature} draws tokens: pass generate(params, prompt, jax.random.key(0))."
        )


class _Decoding(NamedTuple):
    """How tokens are decoded; its methods run inside ``shard_map``, on the rows of this device."""

    model: Model
    axes: tuple[str, ...]
    length: int
    gather: str
    temperature: float

    def decode(self, params: PyTree, prompt: jax.Array, rng: jax.Array) -> jax.Array:
        """[b, p] -> [b, length]"""
        given = jnp.pad(prompt, [(0, 0), (0, self.length - prompt.shape[1])], constant_values=TO_DRAW)
        if self.gather == "once":
            params = gather_params(params, self.axes)
        keys = self._keys_of_rows(rng, len(prompt))

        def next_token(carry: tuple[PyTree, jax.Array], inputs: tuple[Any, ...]) -> tuple[Any, jax.Array]:
            (cache, token), (position, given_next) = carry, inputs
            # A compiler may move what a loop does not change out of the loop, gathers too: all weights would then be
            # held whole. The barrier makes them depend on the token.
            weights, token = jax.lax.optimization_barrier((params, token)) if self.gather != "once" else (params, token)
            logits, cache = self._apply(weights, cache, token)
            drawn = self._draw(logits, keys, position).astype(token.dtype)
            token = jnp.where(given_next < 0, drawn, given_next)
            return (cache, token), token

        start = self._empty_cache(prompt), given[:, 0]
        _, drawn = jax.lax.scan(next_token, start, (jnp.arange(1, self.length), given.T[1:]))
        tokens = jnp.concatenate([given[:, :1], drawn.T], axis=1)
        return jnp.where(given[:, :1] < 0, TO_DRAW, tokens)

    def _keys_of_rows(self, rng: jax.Array, rows: int) -> jax.Array:
        """A key for each row, by its place in the whole batch."""
        first = collectives.axis_index(self.axes) * rows
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, first + jnp.arange(rows))

    def _empty_cache(self, prompt: jax.Array) -> PyTree:
        """The cache that ``init`` makes; the compiler drops all other results of ``init``."""
        spread = collectives.spread_axes(self.axes)
        tokens = collectives.to_varying(jnp.zeros((len(prompt), self.length), prompt.dtype), spread)
        variables = self.model.init(jax.random.key(0), tokens)
        if CACHE not in variables:
            raise ValueError(
                f"model.init makes {sorted(variables)} and no {CACHE!r}, in which a model for decoding keeps what it "
                "has seen. Pass the model as it decodes: model.clone(decode=True), if it has such a field."
            )
        return collectives.to_varying(variables[CACHE], spread)

    def _apply(self, params: PyTree, cache: PyTree, token: jax.Array) -> tuple[jax.Array, PyTree]:
        """The model on one token [b] of each row: logits [b, v], and the cache after it."""
        logits, changed = self.model.apply({"params": params, CACHE: cache}, token[:, None], mutable=[CACHE])
        if np.ndim(logits) != 3 or logits.shape[:2] != (len(token), 1):
            raise ValueError(
                f"the model returned {kind_of(logits)} for tokens of shape {(len(token), 1)}, and logits "
                f"[{len(token)}, 1, vocabulary] are expected."
            )
        return logits[:, 0], changed[CACHE]

    def _draw(self, logits: jax.Array, keys: jax.Array, position: jax.Array) -> jax.Array:
        """[b, v] -> [b]"""
        if not self.temperature:
            return jnp.argmax(logits, axis=-1)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, position)
        return jax.vmap(jax.random.categorical)(keys, logits / self.temperature)

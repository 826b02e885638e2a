"""Keys with constant draws, which make a loss with dropout a function of its batch alone.

The loss of a batch can be compared with the losses of its slices only if both draw the same numbers, and an ordinary
key draws different numbers for 64 rows than for eight times 8. With ``constant_key`` each draw is the same fraction u
of its range, for any shape, device and number of splits before it. With the first u, 1/32,

  bernoulli(keep)   is true for keep > 1/32: dropout keeps every value, and scales
  normal            is -1.86
  permutation       is the identity
  rejection loops   end: after 64 splits draws vary from one split to the next

If the loss is not finite with this u, or has no gradient, the next u is tried. Dropout, noise and augmentation remain
in the loss, with their factors. Draws from other keys cannot be made constant: a key in a closure of the loss
function, or in the state of the step. ``Traced`` finds them.
"""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.wire.collectives import is_prng_key, value_dtype
from xlstm_jax.equations import all_equations, named_axes
from xlstm_jax.private_names import core, define_prng_impl

CHOICES = (1 / 32, 0.4, 31 / 32)
_WORDS = 2
_SAME_UNTIL = 64  # splits with constant draws: models nest less deeply, rejection loops soon split more often
_GOLDEN = 0x9E3779B9  # its multiples, modulo 2**32, are spread evenly
_DRAWING = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}


def constant_key(u: float = CHOICES[0]) -> jax.Array:
    """Returns a typed key (not uint32[2]) whose draws are the fraction ``u`` of their range.

    The same holds for draws of keys split or folded from this key. After 64 splits in sequence the draws vary, so that
    rejection loops end.
    """
    return jax.random.key(np.uint32(u * 2**32), impl=_constant())


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of typed keys, or a single old-style key, uint32[2]."""
    if not hasattr(leaf, "dtype"):
        return False
    return is_prng_key(leaf) or (leaf.dtype == jnp.uint32 and jnp.shape(leaf) == (_WORDS,))


def folded(rng: PyTree, data: Any) -> Any:
    """Returns the tree ``rng`` with ``jax.random.fold_in(key, data)`` in place of each key; other leaves unchanged."""
    return jax.tree.map(lambda leaf: jax.random.fold_in(leaf, data) if is_key(leaf) else leaf, rng)


def constant_like(rng: PyTree, u: float = CHOICES[0]) -> Any:
    """Returns the tree ``rng`` with ``constant_key(u)`` in place of each key; other leaves unchanged.

    An array of typed keys becomes an array of the same shape; an old-style key, uint32[2], becomes a single typed key.
    """

    def constant(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        shape = leaf.shape if is_prng_key(leaf) else ()
        return jnp.broadcast_to(constant_key(u), shape)

    return jax.tree.map(constant, rng)


@cache
def _constant() -> Any:
    return define_prng_impl(
        key_shape=(_WORDS,), seed=_seed, split=_split, fold_in=_fold_in, random_bits=_bits, name="constant", tag="same"
    )


def _seed(word: Any) -> jax.Array:
    """Returns a key's data, uint32[2]: the number of previous splits, 0, and ``word``, the 32 bits of each draw."""
    return jnp.stack([jnp.uint32(0), jnp.asarray(word, jnp.uint32)])


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # The keys of a split are equal, so that rows and devices draw alike; only the count of splits advances.
    return jnp.broadcast_to(key.at[0].add(jnp.uint32(1)), (*shape, _WORDS))


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
    del data
    return key


def _bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    splits, same = key
    word = jnp.where(splits < _SAME_UNTIL, same, splits * jnp.uint32(_GOLDEN))
    dtype = jnp.dtype(f"uint{bit_width}")
    # Uniform numbers are made from the highest bits.
    bits = (word >> (32 - bit_width)).astype(dtype) if bit_width <= 32 else word.astype(dtype) << (bit_width - 32)
    return jnp.full(shape, bits, dtype)


class Traced(NamedTuple):
    """Facts on a traced function, read off the equations of its jaxpr.

    ``draws``: whether the function draws random numbers; ``draws_from_other_keys``: whether it draws from keys other
    than constant keys. ``axes``: the mesh axes of its collectives and device indices. ``eps``: eps of its
    narrowest floating dtype, except float8.
    """

    draws: bool
    draws_from_other_keys: bool
    axes: frozenset[str]
    eps: float


def traced(jaxpr: core.Jaxpr) -> Traced:
    """Returns facts on a traced function, read off the equations of its jaxpr and of nested jaxprs.

    The facts: whether the function draws random numbers, and whether from keys other than constant keys; the mesh axes
    of its collectives and device indices; and the eps of its narrowest floating dtype, except float8.
    """
    draws = foreign = False
    axes: frozenset[str] = frozenset()
    eps = 0.0
    for eqn in all_equations(jaxpr.eqns):
        axes = axes.union(named_axes(eqn))
        # Constant keys show in their dtype; other keys were made by the loss, or the loss closes over them.
        if eqn.primitive.name in _DRAWING:
            draws, foreign = True, foreign or not any(map(_is_constant, eqn.invars))
        for var in eqn.outvars:
            dtype = value_dtype(var.aval) if hasattr(var.aval, "dtype") else None
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 16:
                eps = max(eps, float(jnp.finfo(dtype).eps))
    return Traced(draws, foreign, axes, eps)


def _is_constant(atom: Any) -> bool:
    return is_prng_key(atom.aval) and "same" in str(atom.aval.dtype) if hasattr(atom.aval, "dtype") else False

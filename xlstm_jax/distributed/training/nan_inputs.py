"""Names the arguments of a step that hold NaN, where JAX is to raise at the operation that makes the first one.

Under ``jax_debug_nans`` (and ``jax_debug_infs``) JAX runs a program again, operation by operation, when a result is
NaN. Where the NaN was in an argument no operation has made it, and JAX ends in a ``RecursionError``. A NaN that the
step replaces (a missing label, a mask of minus infinity) reaches no result, and nothing is said of it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.trees import named_leaf, sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype
from xlstm_jax.wording import joined

NAMED = 3  # leaves


@contextmanager
def naming_nans(arguments: Mapping[str, PyTree]) -> Iterator[None]:
    """A context for a call with ``arguments``, in which a ``ValueError`` that names their NaN is in JAX's place."""
    # Before the call, since it may take over the memory of its arguments.
    found = list(_found(arguments))
    try:
        yield
    except RecursionError:
        if not found:
            raise
        option, where = found[0]
        others = [place for _, place in found[1:NAMED]]
        raise ValueError(
            f"{option}: {where} before the step computes anything, and JAX could name no operation. Mend what made "
            f"this argument{f' (or {joined(others)})' if others else ''}; JAX then finds what the step itself makes."
        ) from None  # the RecursionError has hundreds of causes


def _found(arguments: Mapping[str, PyTree]) -> Iterator[tuple[str, str]]:
    """The leaves with a NaN or an infinity, if JAX is to look for these: the option that says so, and the place."""
    looked_for = {"jax_debug_nans": ("NaN", np.isnan), "jax_debug_infs": ("infinity", np.isinf)}
    for option, (what, is_one) in looked_for.items():
        if not getattr(jax.config, option):
            continue
        for name, tree in arguments.items():
            for path, leaf in sharded_leaves(tree):
                value = leaf.value
                at = [at for values, start in _values(value) for at in _first(is_one(values), start)]
                if at:
                    yield option, f"{named_leaf(name, path)} of shape {np.shape(value)} holds {what} at index {at[0]}"


def _values(value: Any) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """The parts of an array of floats that this process holds, each with the index of its first entry."""
    if isinstance(value, Tracer | jax.ShapeDtypeStruct) or not hasattr(value, "dtype"):
        return
    if not jnp.issubdtype(value_dtype(value), jnp.inexact):
        return
    if not isinstance(value, jax.Array):
        yield np.asarray(value), (0,) * np.ndim(value)
        return
    for shard in value.addressable_shards:
        yield np.asarray(shard.data), tuple(part.start or 0 for part in shard.index)


def _first(found: np.ndarray, start: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The index in the array of the first entry that is true, in a list; an empty one where none is."""
    if not found.any():
        return []
    first = np.unravel_index(int(found.argmax()), found.shape)
    return [tuple(int(i) + offset for i, offset in zip(first, start, strict=True))]

"""Names the argument of a step that holds a NaN, where JAX is to raise at the operation that makes the first one.

Under ``jax_debug_nans`` (and ``jax_debug_infs``) JAX runs a program again, operation by operation, when a result is
NaN. Where the NaN was in an argument no operation has made it, and JAX ends in a ``RecursionError``.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path, named_leaf
from xlstm_jax.distributed.data_parallel.wire.communication import value_dtype


def check_arguments_for_nans(arguments: Mapping[str, PyTree]) -> None:
    """Raises a ``ValueError`` that names the first leaf with a NaN or an infinity, if JAX is to look for these."""
    looked_for = {"jax_debug_nans": ("NaN", np.isnan), "jax_debug_infs": ("infinity", np.isinf)}
    for option, (what, is_one) in looked_for.items():
        if not getattr(jax.config, option):
            continue
        for name, tree in arguments.items():
            for path, leaf in leaves_with_path(tree):
                value = leaf_of(leaf).value
                found = [at for values, start in _values(value) for at in _first(is_one(values), start)]
                if found:
                    raise ValueError(
                        f"{option}: {named_leaf(name, path)} of shape {np.shape(value)} holds {what} at index "
                        f"{found[0]} before the step computes anything, and JAX could name no operation. Mend what "
                        "made this argument; JAX then finds what the step itself makes."
                    )


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

"""Errors that name NaN in the arguments of a step, for steps that run under ``jax_debug_nans``.

Under ``jax_debug_nans`` (and ``jax_debug_infs``) JAX reruns a program operation by operation when a result is NaN, to
find the operation that made the first NaN. If an argument already contained it, no operation is found, and JAX fails
with a ``RecursionError``. A NaN replaced within the step (a missing label, a mask of minus infinity) reaches no
result, and raises no error.
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
from xlstm_jax.distributed.data_parallel.wire.collectives import value_dtype
from xlstm_jax.formatting import joined

NAMED = 3  # maximum number of leaves named in the error
DELETED = "Array has been deleted"  # begin of JAX's error


def looks_for_nans() -> bool:
    """Returns whether JAX looks for NaN or infinities in results: ``jax_debug_nans`` or ``jax_debug_infs`` is set."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


@contextmanager
def naming_nans(arguments: Mapping[str, PyTree]) -> Iterator[None]:
    """Replaces the error of JAX's search for a NaN in this context by an error that names the NaN in ``arguments``.

    JAX repeats a step whose result has a NaN. The repetition ends in a ``RecursionError`` or, for a step that has
    donated its arguments, in an error about deleted arrays.

    Raises:
      ValueError: JAX's search fails, and an argument has a NaN or an infinity; names the leaf.
      FloatingPointError: JAX's search fails on donated arguments, and no argument has a NaN or an infinity: the step
        makes the value.
    """
    # Search before the call, since the call may donate the buffers of its arguments.
    lines = list(_found(arguments))
    try:
        yield
    except RuntimeError as error:  # RecursionError is one
        is_deleted = DELETED in str(error)
        if not (is_deleted or isinstance(error, RecursionError)) or not (lines or is_deleted):
            raise
        if not lines:
            raise FloatingPointError(
                "the step makes a NaN or an infinity, and none of batch and parameters has one. JAX cannot repeat a "
                "step that has donated its arguments, and so names no operation: differentiate the plain model with "
                "this batch on one device, docs/howto/find_a_nan.md."
            ) from None
        option, where = lines[0]
        others = [place for _, place in lines[1:NAMED]]
        raise ValueError(
            f"{option}: {where} before the step computes anything, and JAX could name no operation. Fix the source of "
            f"this argument{f' (or {joined(others)})' if others else ''}; JAX then finds values that the step makes."
        ) from None  # a RecursionError has hundreds of causes


def _found(arguments: Mapping[str, PyTree]) -> Iterator[tuple[str, str]]:
    """Yields (JAX option, description) for each leaf of ``arguments``, trees by name, with a NaN or an infinity.

    The option is "jax_debug_nans" for NaN, which are looked for if this option is set, and "jax_debug_infs" likewise
    for infinities. The description names the leaf, its shape and the index of an entry.
    """
    looked_for = {"jax_debug_nans": ("NaN", np.isnan), "jax_debug_infs": ("infinity", np.isinf)}
    for option, (noun, is_one) in looked_for.items():
        if not getattr(jax.config, option):
            continue
        for name, tree in arguments.items():
            for path, leaf in sharded_leaves(tree):
                value = leaf.value
                at = [at for values, start in _values(value) for at in _first(is_one(values), start)]
                if at:
                    yield option, f"{named_leaf(name, path)} of shape {np.shape(value)} holds {noun} at index {at[0]}"


def _values(value: Any) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """Yields (part, index of its first entry) for each part of a float array that this process has, as NumPy arrays.

    The index is in the full array. Nothing is yielded for traced or abstract values, and for other dtypes.
    """
    if isinstance(value, Tracer | jax.ShapeDtypeStruct) or not hasattr(value, "dtype"):
        return
    if not jnp.issubdtype(value_dtype(value), jnp.inexact):
        return
    if not isinstance(value, jax.Array):
        yield np.asarray(value), (0,) * np.ndim(value)
        return
    for shard in value.addressable_shards:
        yield np.asarray(shard.data), tuple(part.start or 0 for part in shard.index)


def _first(mask: np.ndarray, start: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns ``[index of the first true entry]``, or ``[]`` if no entry of ``mask`` is true.

    The index is in the full array, in which the part ``mask`` begins at ``start``.
    """
    if not mask.any():
        return []
    first = np.unravel_index(int(mask.argmax()), mask.shape)
    return [tuple(int(i) + offset for i, offset in zip(first, start, strict=True))]

"""A batch in zigzag order before a step, so that the step need not exchange chunks; and back."""

from collections.abc import Callable
from typing import Any

import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.trees import named_leaf
from xlstm_jax.distributed.model_parallel.sequence_layout import (
    ZIGZAG,
    LaidOut,
    is_laid_out,
    reordered,
    zigzag_order,
)


def to_zigzag(batch: PyTree, devices: int, dim: int = 1) -> PyTree:
    """Lays out the tokens of a global batch so that under a causal mask all devices have the same to compute.

    A step of ``make_train_step(..., layout="zigzag")`` does it by itself, of a batch in natural order. Laid out on the
    host before ``shard_batch`` the batch saves the step that exchange.

    >>> to_zigzag(np.arange(8)[None], devices=2).value  # the first device gets chunks 0 and 3 of 4, the second 1 and 2
    array([[0, 1, 6, 7, 2, 3, 4, 5]])

    Arrays become ``LaidOut`` leaves, which a ready step takes, and ``shard_batch`` splits as arrays. Those of a batch
    that are in natural order all the same (positions that are added afterwards) the step lays out. Shift labels before.
    Leaves without the dim (scalars, a number for each row) stay as they are.

    Args:
      batch: a tree of NumPy's or JAX's arrays, before they are split over the mesh.
      devices: along the axis of the sequence.
      dim: of the sequence, in every array that has it.
    Raises:
      ValueError: twice the devices do not divide the sequence, leaves differ in its length, or a leaf is laid out
        already; names the leaf.
    """
    for path, leaf in trees.flatten_with_path(batch, one_leaf=is_laid_out)[0]:
        if isinstance(leaf, LaidOut):
            raise ValueError(
                f"to_zigzag: {named_leaf('batch', path)} of shape {leaf.shape} is laid out in {leaf.layout} for "
                f"{leaf.devices} devices already. Hand it to the step as it is."
            )

    def laid_out(array: Any, length: int) -> LaidOut:
        return LaidOut(reordered(array, zigzag_order(length, devices), dim), ZIGZAG, devices, dim)

    return _of_tokens(batch, laid_out, dim)


def from_zigzag(batch: PyTree, devices: int, dim: int = 1) -> PyTree:
    """The inverse of ``to_zigzag``: of its ``LaidOut`` leaves, or of arrays in zigzag order, as of a result.

    >>> from_zigzag(np.array([[0, 1, 6, 7, 2, 3, 4, 5]]), devices=2)
    array([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    for path, leaf in trees.flatten_with_path(batch, one_leaf=is_laid_out)[0]:
        if isinstance(leaf, LaidOut) and leaf.devices != devices:
            raise ValueError(
                f"from_zigzag(batch, {devices}): {named_leaf('batch', path)} of shape {leaf.shape} is laid out for "
                f"{leaf.devices} devices. Pass that number."
            )

    def natural(array: Any, length: int) -> Any:
        return reordered(array, np.argsort(zigzag_order(length, devices)), dim)

    arrays = trees.map_leaves(lambda x: x.value if isinstance(x, LaidOut) else x, batch, one_leaf=is_laid_out)
    return _of_tokens(arrays, natural, dim)


def _of_tokens(batch: PyTree, fn: Callable[[Any, int], Any], dim: int) -> PyTree:
    """The batch with ``fn(array, length)`` in place of each array of tokens."""
    # What has no such dim has no tokens: it stays as it is.
    found = [(path, x) for path, x in trees.leaves_with_path(batch) if -np.ndim(x) <= dim < np.ndim(x)]
    for path, x in found:
        if x.shape[dim] != (length := found[0][1].shape[dim]):
            raise ValueError(
                f"batch['{path}'] of shape {x.shape} has {x.shape[dim]} entries along dim {dim}, and "
                f"batch['{found[0][0]}'] {length} tokens. Lay out what has an entry for each token, and leave other "
                "arrays out: batch | to_zigzag({'tokens': batch['tokens'], ...}, devices)."
            )
    if not found:
        raise ValueError(f"no leaf of the batch has a dim {dim}, of tokens; pass dim=, the dim of the sequence.")
    length = found[0][1].shape[dim]
    return trees.map_leaves(lambda x: fn(x, length) if -np.ndim(x) <= dim < np.ndim(x) else x, batch)

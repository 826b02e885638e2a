"""``to_zigzag`` and its inverse: reorder the tokens of a batch on the host, to save an exchange in the step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.trees import named_leaf
from xlstm_jax.distributed.model_parallel.sequence_layout import (
    ZIGZAG,
    ReorderedTokens,
    reordered,
    zigzag_order,
)


def to_zigzag(batch: PyTree, devices: int, dim: int = 1) -> PyTree:
    """Reorders the tokens of a global batch so that devices have equal work under a causal mask.

    A step of ``make_train_step(..., layout="zigzag")`` reorders a batch in natural order itself, by an exchange between
    devices. Reordering on the host, before ``shard_batch``, saves this exchange.

    >>> to_zigzag(np.arange(8)[None], devices=2).value  # the first device gets chunks 0 and 3 of 4, the second 1 and 2
    array([[0, 1, 6, 7, 2, 3, 4, 5]])

    Arrays become ``ReorderedTokens`` leaves, which ready-made steps accept and ``shard_batch`` splits like arrays. The
    step reorders leaves of the batch that are still in natural order (positions added afterwards, say). Shift labels
    before the call. Leaves that do not have the sequence dim (scalars, a number per row) stay unchanged.

    Args:
      batch: a tree of NumPy or JAX arrays, before they are split over the mesh.
      devices: the number of devices along the sequence axis.
      dim: the sequence dim, in every array that has this dim.
    Raises:
      ValueError: twice the devices do not divide the sequence, leaves differ in its length, or a leaf is already laid
        out; names the leaf.
    """
    for path, leaf in trees.flatten_with_path(batch, one_leaf=ReorderedTokens)[0]:
        if isinstance(leaf, ReorderedTokens):
            raise ValueError(
                f"to_zigzag: {named_leaf('batch', path)} of shape {leaf.shape} is laid out in {leaf.layout} for "
                f"{leaf.devices} devices already. Hand it to the step as it is."
            )

    def reordered_leaf(array: Any, length: int) -> ReorderedTokens:
        return ReorderedTokens(reordered(array, zigzag_order(length, devices), dim), ZIGZAG, devices, dim)

    return _of_tokens(batch, reordered_leaf, dim)


def from_zigzag(batch: PyTree, devices: int, dim: int = 1) -> PyTree:
    """Inverts ``to_zigzag``: returns the batch with plain arrays in natural token order.

    ``batch`` is a tree of ``ReorderedTokens`` leaves, the result of ``to_zigzag``, or of arrays in zigzag order, such
    as results of a step. ``devices`` is the number of devices along the sequence axis, and ``dim`` the sequence dim;
    arrays without this dim stay unchanged. Raises a ``ValueError`` if a leaf was reordered for a different number of
    devices.

    >>> from_zigzag(np.array([[0, 1, 6, 7, 2, 3, 4, 5]]), devices=2)
    array([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    for path, leaf in trees.flatten_with_path(batch, one_leaf=ReorderedTokens)[0]:
        if isinstance(leaf, ReorderedTokens) and leaf.devices != devices:
            raise ValueError(
                f"from_zigzag(batch, {devices}): {named_leaf('batch', path)} of shape {leaf.shape} is laid out for "
                f"{leaf.devices} devices. Pass that number."
            )

    def natural(array: Any, length: int) -> Any:
        return reordered(array, np.argsort(zigzag_order(length, devices)), dim)

    is_reordered = lambda node: isinstance(node, ReorderedTokens)  # noqa: E731
    arrays = trees.map_leaves(lambda x: x.value if is_reordered(x) else x, batch, one_leaf=is_reordered)
    return _of_tokens(arrays, natural, dim)


def _of_tokens(batch: PyTree, fn: Callable[[Any, int], Any], dim: int) -> PyTree:
    """Returns the batch with ``fn(array, size of dim)`` in place of each array for which ``dim`` is in range.

    Other leaves are unchanged. Raises a ``ValueError`` if these sizes differ, or if ``dim`` is out of range for every
    leaf.
    """
    # Leaves for which the dim is out of range have no tokens, and stay unchanged.
    leaves = [(path, x) for path, x in trees.leaves_with_path(batch) if -np.ndim(x) <= dim < np.ndim(x)]
    for path, x in leaves:
        if x.shape[dim] != (length := leaves[0][1].shape[dim]):
            raise ValueError(
                f"batch['{path}'] of shape {x.shape} has {x.shape[dim]} entries along dim {dim}, and "
                f"batch['{leaves[0][0]}'] {length} tokens. Pass the arrays with an entry for each token alone: batch | "
                "to_zigzag({'tokens': batch['tokens'], ...}, devices)."
            )
    if not leaves:
        raise ValueError(f"no leaf of the batch has a dim {dim}, of tokens; pass dim=, the dim of the sequence.")
    length = leaves[0][1].shape[dim]
    return trees.map_leaves(lambda x: fn(x, length) if -np.ndim(x) <= dim < np.ndim(x) else x, batch)

"""The order of tokens in which a causal mask gives all devices of a sequence the same to compute.

  natural   0 1 2 3 4 5 6 7     two devices: the second has most pairs of tokens that see each other
  zigzag    0 1 6 7 2 3 4 5     device i of n has chunks i and 2n - 1 - i of 2n, an early one and a late one

``to_zigzag`` lays out a global batch, before ``shard_batch`` splits it.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.model_parallel.context import zigzag_positions


def zigzag_order(length: int, devices: int) -> np.ndarray:
    """[length]: the position of each token in the zigzag layout; device i has chunks i and 2n - 1 - i of 2n."""
    if devices == 1:
        return np.arange(length)
    if length % (2 * devices):
        raise ValueError(
            f"{length} tokens do not divide into the {2 * devices} chunks of the zigzag layout on {devices} devices, "
            f"two for each. Pad the sequence to {-(-length // (2 * devices)) * 2 * devices} tokens."
        )
    return zigzag_positions(np.arange(devices)[:, None], devices, np.arange(length // devices)).ravel()


def to_zigzag(batch: PyTree, devices: int, dim: int = 1) -> PyTree:
    """Lays out the tokens of a global batch so that under a causal mask all devices have the same to compute.

    >>> to_zigzag(np.arange(8)[None], devices=2)  # the first device gets chunks 0 and 3 of 4, the second 1 and 2
    array([[0, 1, 6, 7, 2, 3, 4, 5]])

    Lay out everything that has an entry for each token: inputs, labels, weights, positions, segment ids. Shift labels
    before. Leaves without the dim (scalars, a number for each row) stay as they are.

    Args:
      batch: a tree of NumPy's or JAX's arrays, before they are split over the mesh.
      devices: along the axis of the sequence.
      dim: of the sequence, in every array that has it.
    Raises:
      ValueError: twice the devices do not divide the sequence, or leaves differ in its length; names the leaf.
    """
    return _reordered(batch, lambda length: zigzag_order(length, devices), dim)


def from_zigzag(batch: PyTree, devices: int, dim: int = 1) -> PyTree:
    """The inverse of ``to_zigzag``.

    >>> from_zigzag(np.array([[0, 1, 6, 7, 2, 3, 4, 5]]), devices=2)
    array([[0, 1, 2, 3, 4, 5, 6, 7]])
    """
    return _reordered(batch, lambda length: np.argsort(zigzag_order(length, devices)), dim)


def _reordered(batch: PyTree, order_of: Callable[[int], np.ndarray], dim: int) -> PyTree:
    """The batch in another order along a dim; the order is that of a sequence of this length."""
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
    order = order_of(found[0][1].shape[dim])

    def reordered(x: Any) -> Any:
        has_tokens = -np.ndim(x) <= dim < np.ndim(x)
        return x[(slice(None),) * (dim % x.ndim) + (order,)] if has_tokens else x

    return jax.tree.map(reordered, batch)

"""Check of ``check_step`` whether a loss depends on padded rows: computes the loss with changed values in padded rows.

Rows of weight 0 may have any values. Batch statistics, and losses that compare rows, depend on rows of weight 0 even if
the loss of each row is multiplied by its weight. Equations do not show this dependence, so the check compares numbers.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.device_mesh.batches import padded_rows_of
from xlstm_jax.distributed.training.step_check.draws import CHOICES, constant_like
from xlstm_jax.distributed.training.step_check.one_device import OneDevice

MIN_RELATIVE_CHANGE = 1e-4  # relative change of the loss; rounding is far smaller


def with_other_copies(batch: PyTree) -> PyTree | None:
    """Returns the batch with other rows in place of the rows that ``shard_batch`` appended as padding.

    ``shard_batch`` pads with copies of rows, which have weight 0; row i of the padding becomes row i + 1 of the true
    rows (modulo their number). None without padding, or with a single true row. Leaves without padding are unchanged.
    """
    counts = [of_leaf for leaf in jax.tree.leaves(batch) if (of_leaf := padded_rows_of(leaf))]
    if not counts or counts[0][0] < 2:
        return None
    rows, in_all = counts[0]
    taken = np.arange(in_all)
    taken[rows:] = (taken[rows:] + 1) % rows
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[taken]) if padded_rows_of(leaf) else leaf, batch)


def padded_row_findings(one_device: OneDevice, batch: PyTree, rng: PyTree) -> Iterator[str]:
    """Yields one sentence if the loss on a single device depends on the values of padded rows of ``batch``.

    Padded rows are the copies that ``shard_batch`` appended, with weight 0. The loss is computed again with copies of
    other rows, and must not change by more than 1e-4 of its value. Yields nothing without padding, or if a loss is not
    finite. Keys in ``rng`` are replaced by keys of constant draws.
    """
    other = with_other_copies(batch)
    if other is None:
        return
    key = constant_like(rng, CHOICES[0])
    loss, of_other = one_device.on_full_batch(key).loss, one_device.on_full_batch(key, other).loss
    if np.isfinite([loss, of_other]).all() and abs(of_other - loss) > MIN_RELATIVE_CHANGE * abs(loss):
        yield (
            f"the loss counts rows that only pad: it is {loss:.6g}, and {of_other:.6g} where the copies that "
            "shard_batch has appended are of other rows. Multiply the loss of each row by the weight from shard_batch, "
            "and mask copies in statistics and comparisons of rows: docs/processes.md#padding."
        )

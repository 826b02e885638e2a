"""``sync_gradients``: averages the gradients of the leaves that stay whole."""

import jax

from xlstm_jax.common_types import AxisNames, Parameter, PyTree
from xlstm_jax.distributed.data_parallel import collectives
from xlstm_jax.distributed.data_parallel.axes import as_axis_names
from xlstm_jax.distributed.data_parallel.boxes import copied_axes, leaf_value, rebox, reduced_axes, split_differentiable

# ----------------------------------------------------------------------------------------------- replicated gradients


def sync_gradients(grads: PyTree, axis_names: AxisNames) -> PyTree:
    """Averages gradients over the data axes that their leaves are not split over.

    Call it once, inside ``shard_map``, on what comes straight from ``jax.grad`` of a loss that is the mean over this
    device's batch. It is *not* for the gradients of ``training.value_and_grad``, which has done it.

    A leaf that is split over an axis, or has its copies along it (``Replicas``), has been averaged over it by the
    transpose of its gather. Under ``check_vma=True`` a leaf whose type does not vary over an axis has been summed over
    it by JAX (and, over the axis of its copies, by that transpose), and is divided; any other is averaged.

    Args:
      grads: boxed where the parameters are; leaves without gradient (float0) pass.
      axis_names: all mesh axes along which the batch or gathered weights differ (those of the wrappers among them), a
        string or a sequence. One that is left out goes unseen here.
    Returns:
      The tree with the same boxes and dtypes; sums run in float32 where the leaves are narrower.
    Raises:
      ValueError: an axis is not bound; lists those that are.
    """
    axes = as_axis_names(axis_names)
    collectives.check_bound(axes, caller="sync_gradients")
    live, put_back = split_differentiable(grads)
    over = [tuple(axis for axis in axes if axis not in reduced_axes(leaf)) for leaf in live]
    with jax.named_scope("sync_gradients"):
        divided = [
            _divide_summed(leaf_value(leaf), (*left, *copied_axes(leaf))) for leaf, left in zip(live, over, strict=True)
        ]
        synced = collectives.pmean(divided, over)
    return put_back([rebox(leaf, value) for leaf, value in zip(live, synced, strict=True)])


def _divide_summed(grad: Parameter, axes: tuple[str, ...]) -> jax.Array:
    """Divides by the sizes of those tracked axes over which JAX has already summed ``grad``."""
    varying = collectives.varying_axes(grad)
    parts = collectives.axis_size([a for a in axes if a not in varying and collectives.is_tracked(a)])
    return grad / parts if parts > 1 else grad

"""When the gradients of minibatches are reduced over devices: three strategies with the same result.

A step of m minibatches, with P the bytes of the split parameters, sends (two gathers and one scatter)

  "reduce_each"           m * 3P                 memory: that of one minibatch
  "reduce_once"           2P                     all weights and their float32 gradients whole on every device
  "reduce_replicas_once"  m * 3P, and the reduction over the copies of the shards once instead of m times
"""

from typing import Any

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.gather import gather_params
from xlstm_jax.distributed.data_parallel.leaf import frozen, leaf_of, rebox, with_communication
from xlstm_jax.distributed.data_parallel.wire.communication import dtype_name, wide_dtype
from xlstm_jax.distributed.data_parallel.wire.gather_array import reduce_over_replicas
from xlstm_jax.distributed.training.gradients import varying_leaves


class ReduceEach:
    """Every minibatch gathers the parameters and scatters their gradients."""

    def weights(self, params: PyTree, axes: tuple[str, ...]) -> PyTree:
        """What every minibatch computes with, and is differentiated with respect to."""
        return params

    def gradients(self, mean_grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> list[Any]:
        """Gradients of the parameters, made of the mean over minibatches of the gradients of the weights.

        Both lists have an entry for each leaf that takes a gradient.
        """
        return _as_gradients_of(trees.split_differentiable(params)[0], mean_grads)


class ReduceOnce(ReduceEach):
    """Parameters are gathered before the first minibatch, and their gradients scattered after the last."""

    def weights(self, params: PyTree, axes: tuple[str, ...]) -> PyTree:
        def still_frozen(leaf: Any, whole: Any) -> Any:
            return whole if leaf_of(leaf).trainable else frozen(whole)

        return trees.map_leaves(still_frozen, params, _gathered(params, axes))

    def gradients(self, mean_grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> list[Any]:
        live = varying_leaves(trees.split_differentiable(params)[0], axes)
        weights, transpose = jax.vjp(lambda live: _gathered(live, axes), [_gathered_wide(leaf) for leaf in live])
        (grads,) = transpose(_as_gradients_of(weights, mean_grads))
        return _as_gradients_of(live, grads)


class ReduceReplicasOnce(ReduceEach):
    """Every minibatch gathers and scatters; the mean over copies of the shards is taken after the last."""

    def weights(self, params: PyTree, axes: tuple[str, ...]) -> PyTree:
        if not any(leaf_of(leaf).copied_axes for leaf in trees.split_differentiable(params)[0]):
            raise ValueError(
                "accumulation='reduce_replicas_once': no parameter has copies of its shards. Wrap with "
                "shard_module_params(..., replicas=Replicas('dp')), or use accumulation='reduce_each'."
            )
        return trees.map_leaves(lambda leaf: with_communication(leaf, replicas=None), params)

    def gradients(self, mean_grads: list[Any], params: PyTree, axes: tuple[str, ...]) -> list[Any]:
        copies = [leaf_of(leaf).communication.replicas for leaf in trees.split_differentiable(params)[0]]
        values = [leaf_of(grad).value for grad in mean_grads]
        means = [reduce_over_replicas(g, over) if over else g for g, over in zip(values, copies, strict=True)]
        return super().gradients(means, params, axes)


DEFAULT_ACCUMULATION = "reduce_each"
STRATEGIES: dict[str, ReduceEach] = {
    DEFAULT_ACCUMULATION: ReduceEach(),
    "reduce_once": ReduceOnce(),
    "reduce_replicas_once": ReduceReplicasOnce(),
}


def _as_gradients_of(leaves: list[Any], grads: list[Any]) -> list[Any]:
    """The gradients in the boxes and dtypes of ``leaves``."""
    values = [leaf_of(g).value.astype(leaf_of(leaf).value.dtype) for leaf, g in zip(leaves, grads, strict=True)]
    return list(map(rebox, leaves, values))


def _gathered(params: PyTree, axes: tuple[str, ...]) -> PyTree:
    """``gather_params`` over those of ``axes`` over which the model itself does not split a leaf."""

    def gather(leaf: Any) -> Any:
        over = tuple(axis for axis in axes if axis in leaf_of(leaf).gathered_axes)
        return gather_params(leaf, over) if over else leaf

    return trees.map_leaves(gather, params)


def _gathered_wide(leaf: Any) -> Any:
    """The leaf, to be gathered in the dtype of summed gradients, which the transpose then does not narrow."""
    dtype, _ = leaf_of(leaf).communication.dtypes(leaf_of(leaf).value)
    return with_communication(leaf, gather_dtype=dtype_name(wide_dtype(dtype)))

"""Splits a batch into minibatches, runs a function on each in turn, and averages the results by weight.

  split_rows   leaves [b, ...] -> [m, b / m, ...]
  rows_at      minibatch j of the split batch
  mean_over    for j < m: result_j, carries = on_minibatch(j, carries);   sum_j W_j result_j / sum_j W_j

``accumulated`` uses it for the minibatches of a device, the reference on one device for slices (device, minibatch).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree, Scalar
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.dtypes import wide_dtype


def split_rows(batch: PyTree, *parts: int) -> PyTree:
    """Reshapes leaves [b, ...] to [*parts, b / product(parts), ...]; scalars stay unchanged."""
    count = math.prod(parts)
    return jax.tree.map(
        lambda x: jnp.reshape(x, (*parts, np.shape(x)[0] // count, *np.shape(x)[1:])) if np.ndim(x) else x, batch
    )


def rows_at(parts: PyTree, index: Scalar) -> PyTree:
    """Returns the minibatch ``index`` of leaves [m, b / m, ...], the output of ``split_rows``."""
    return jax.tree.map(lambda x: x[index] if np.ndim(x) else x, parts)


class MinibatchResult(NamedTuple):
    """Result of a minibatch on one device, or the mean over the minibatches.

    Attributes:
      values: numbers to average over minibatches by ``weight``; the means have the dtypes of the numbers.
      grads: gradients, averaged likewise; the means stay in float32 or wider.
      weight: the weight of the minibatch.
      carries: the states for the next minibatch.
      each: arrays that are not averaged. ``mean_over`` stacks them over minibatches along a leading dim.
    """

    values: PyTree
    grads: PyTree
    weight: Scalar
    carries: PyTree
    stacked: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """Running sums over minibatches: of weight times (values, grads), in float32 or wider.

    ``carries`` are the states after the last of these minibatches.
    """

    sums: PyTree
    weight: jax.Array
    carries: PyTree

    def __add__(self, result: MinibatchResult) -> "Partial":
        """Returns the sums with the result of the next minibatch added."""

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            return total + x.astype(total.dtype) * jnp.asarray(result.weight, total.dtype)

        sums = jax.tree.map(add, self.sums, (result.values, result.grads))
        return Partial(sums, self.weight + result.weight, result.carries)

    def mean(self) -> PyTree:
        """Returns the means of (values, grads); 0 if the total weight is 0."""
        # With total weight 0 the sums are 0: dividing by 1 returns 0 instead of NaN.
        weight = jnp.where(self.weight != 0, self.weight, 1)
        return jax.tree.map(lambda total: total / weight.astype(total.dtype), self.sums)


def mean_over(on_minibatch: Callable[[Scalar, PyTree], MinibatchResult], count: int, start: PyTree) -> MinibatchResult:
    """Runs ``on_minibatch(index, carries)`` for each index < ``count`` in turn, and averages the results by weight.

    The first minibatch receives the carries ``start``, each later minibatch those of the previous result. A single
    minibatch runs without a loop, so that the compiler sees a plain step; its result is returned unchanged.
    """
    if count == 1:
        return on_minibatch(0, start)
    # The scan needs the types of the sums, including the axes over which they vary, before it starts.
    like = jax.eval_shape(on_minibatch, jnp.int32(0), start)
    sums, weight = jax.tree.map(
        lambda x: collectives.zeros_of_type(x, wide_dtype(x.dtype)), ((like.values, like.grads), like.weight)
    )

    def add(total: Partial, index: jax.Array) -> tuple[Partial, PyTree]:
        result = on_minibatch(index, total.carries)
        return total + result, result.stacked

    total, each = jax.lax.scan(add, Partial(sums, weight, start), jnp.arange(count, dtype=jnp.int32))
    values, grads = total.mean()
    values = jax.tree.map(lambda mean, x: mean.astype(x.dtype), values, like.values)
    return MinibatchResult(values, grads, total.weight, total.carries, each)

"""Runs a function on one minibatch after another, and returns the mean of the results by weight.

  split_rows   leaves [b, ...] -> [m, b / m, ...]
  rows_at      minibatch j of the split batch
  mean_over    for j < m: result_j, carries = on_minibatch(j, carries);   sum_j W_j result_j / sum_j W_j

``accumulated`` runs the minibatches of a device so, and ``check_step`` the slices (device, minibatch) of a batch.
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
    """Leaves [b, ...] -> [*parts, b / their product, ...]; scalars stay as they are."""
    count = math.prod(parts)
    return jax.tree.map(
        lambda x: jnp.reshape(x, (*parts, np.shape(x)[0] // count, *np.shape(x)[1:])) if np.ndim(x) else x, batch
    )


def rows_at(parts: PyTree, index: Scalar) -> PyTree:
    """One part of what ``split_rows`` has split."""
    return jax.tree.map(lambda x: x[index] if np.ndim(x) else x, parts)


class MinibatchResult(NamedTuple):
    """The result of one minibatch on one device, or the mean over all minibatches.

    Attributes:
      values: numbers that are averaged over minibatches by ``weight``; the means have the dtypes of the numbers.
      grads: gradients, averaged in the same way; the means stay in float32 or wider.
      weight: the weight of the minibatch.
      carries: the states that the next minibatch gets.
      each: arrays that are not averaged. ``mean_over`` stacks those of several minibatches along a leading dim.
    """

    values: PyTree
    grads: PyTree
    weight: Scalar
    carries: PyTree
    each: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Partial:
    """The sums over the minibatches that have run: of weight times (values, grads), in float32 or wider.

    ``carries`` are the states after the last of these minibatches.
    """

    sums: PyTree
    weight: jax.Array
    carries: PyTree

    def __add__(self, result: MinibatchResult) -> "Partial":
        """Adds the result of the next minibatch."""

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            return total + x.astype(total.dtype) * jnp.asarray(result.weight, total.dtype)

        sums = jax.tree.map(add, self.sums, (result.values, result.grads))
        return Partial(sums, self.weight + result.weight, result.carries)

    def mean(self) -> PyTree:
        """Returns the means of (values, grads); 0 where no minibatch has a weight."""
        # Without any weight the sums are 0, and so are the means.
        weight = jnp.where(self.weight != 0, self.weight, 1)
        return jax.tree.map(lambda total: total / weight.astype(total.dtype), self.sums)


def mean_over(on_minibatch: Callable[[Scalar, PyTree], MinibatchResult], count: int, start: PyTree) -> MinibatchResult:
    """Runs ``on_minibatch(index, carries)`` for each index < ``count`` in turn, and averages the results by weight.

    The first minibatch gets the carries ``start``, each other the carries of the result before. A single minibatch runs
    without a loop, so that the compiler sees a plain step; its result is returned as it is.
    """
    if count == 1:
        return on_minibatch(0, start)
    # The types of the sums must be known before the loop: over which axes they vary, too.
    like = jax.eval_shape(on_minibatch, jnp.int32(0), start)
    sums, weight = jax.tree.map(
        lambda x: collectives.zeros_of_type(x, wide_dtype(x.dtype)), ((like.values, like.grads), like.weight)
    )

    def add(total: Partial, index: jax.Array) -> tuple[Partial, PyTree]:
        result = on_minibatch(index, total.carries)
        return total + result, result.each

    total, each = jax.lax.scan(add, Partial(sums, weight, start), jnp.arange(count, dtype=jnp.int32))
    values, grads = total.mean()
    values = jax.tree.map(lambda mean, x: mean.astype(x.dtype), values, like.values)
    return MinibatchResult(values, grads, total.weight, total.carries, each)

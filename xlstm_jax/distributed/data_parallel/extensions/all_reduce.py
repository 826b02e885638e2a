"""``AllReduceGradients``: sums gradients by an all-reduce, of which each device keeps its slice.

Over one axis of a TPU torus with several dims, XLA executes a reduce-scatter as an all-reduce and a slice. The operand
of a reduce-scatter must have the split dim outermost in memory, so a gradient of three or more dims is copied first,
because the product that computes the gradient writes another order. An all-reduce accepts every order.
"""

from dataclasses import dataclass

import jax

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.communication import Option


@dataclass(frozen=True)
class AllReduceGradients(Option):
    """Option of the wrappers: gradients are summed by an all-reduce, of which each device keeps its slice.

    Gradients equal those of a reduce-scatter, up to the order of the sum. Where XLA does not itself execute a
    reduce-scatter as an all-reduce, the option sends twice the bytes: compare both forecasts (docs/howto/flat_axis.md).

    >>> AllReduceGradients()
    AllReduceGradients()
    """

    def reduce_scatter(self, terms: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
        """Returns this device's shard of ``terms`` along ``dim``, [..., d, ...] -> [..., d / n, ...], summed over axes.

        The axes, the first outermost, have n devices in all.
        """
        spread = collectives.spread_axes(axes)
        if not spread:
            return terms
        total = collectives.all_reduce_sum(collectives.to_varying(terms, spread), spread)
        return collectives.local_shard(total, dim, spread)

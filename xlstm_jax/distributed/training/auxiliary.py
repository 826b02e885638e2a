"""``Auxiliary``: the numbers that a loss function returns beside the loss, reduced over minibatches and devices.

Each leaf is reduced according to its type:

  {"accuracy": jnp.mean(hit)}      a float or a bool is averaged like the loss: with ``weighted``, by weight
  {"tokens": Count.of(mask)}       a cell of ``metrics.cells`` is merged, and its value returned
  {"tokens": jnp.sum(mask)}        an integer raises: the mean of counts is not a count
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import common_dtype
from xlstm_jax.distributed.metrics.cells import Cell
from xlstm_jax.distributed.metrics.pure_metric import all_reduce_cells


class Auxiliary(struct.PyTreeNode):
    """Auxiliary output of a loss function: ``means`` are to be averaged, ``cells`` (of ``metrics``) to be merged."""

    means: list[jax.Array]
    cells: list[Cell]
    treedef: Any = struct.field(pytree_node=False)
    is_cell: tuple[bool, ...] = struct.field(pytree_node=False)
    mean_paths: tuple[str, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, aux: PyTree) -> Self:
        """Returns an ``Auxiliary`` with the leaves of ``aux``, a loss function's auxiliary output, in two lists.

        ``cells`` has the cells, such as ``metrics.Count``, which devices merge. ``means`` has the other leaves, to be
        averaged, cast to float32 or wider. Both lists are in the order of the tree.

        Raises:
          TypeError: a leaf is an integer or not a number; names the leaf.
        """
        # A cell is a pytree to JAX. Treat it as a single leaf here, merged by its own method.
        leaves, treedef = trees.flatten_with_path(aux, Cell)
        is_cell = tuple([isinstance(leaf, Cell) for _, leaf in leaves])
        means = {path: _as_mean(path, leaf) for path, leaf in leaves if not isinstance(leaf, Cell)}
        cells = [leaf for _, leaf in leaves if isinstance(leaf, Cell)]
        return cls([*means.values()], cells, treedef, is_cell, tuple(means))

    def scaled(self, scale: jax.Array | float) -> "Auxiliary":
        """Returns a copy with each array of ``means`` multiplied by ``scale``; ``cells`` are unchanged.

        For a weighted loss ``scale`` is N / W, W being the total weight on N devices: the average over devices of local
        sums times N / W is the global sum divided by W.
        """
        return self.replace(means=[mean * scale for mean in self.means])

    def merged(self) -> "Auxiliary":
        """Returns a copy with ``cells`` (such as ``metrics.Count``) merged over minibatches; ``means`` are unchanged.

        The arrays of the cells are stacked over minibatches along dim 0, which the merge removes.
        """
        return self.replace(cells=[cell.merged((0,)) for cell in self.cells])

    def over_devices(self, loss: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, PyTree]:
        """Returns the pair (mean loss, auxiliary output), combined over the devices along ``axes``.

        ``loss`` and ``means`` are averaged, ``cells`` (such as ``metrics.Count``) merged. The auxiliary output is in
        the tree that the loss function returned; in the place of a cell is its value, such as the count.
        """
        # Loss and means share one collective.
        loss, *averaged = collectives.pmean([loss, *self.means], [axes] * (1 + len(self.means)))
        means, cells = iter(averaged), iter(all_reduce_cells(self.cells, axes) if self.cells else ())
        leaves = [next(cells).value if is_cell else next(means) for is_cell in self.is_cell]
        return loss, jax.tree.unflatten(self.treedef, leaves)


def _as_mean(path: str, leaf: Any) -> jax.Array:
    """Returns ``leaf``, the leaf of the auxiliary output at ``path``, as an array of float32 or wider, for averages.

    Bools become 0 and 1.

    Raises:
      TypeError: the leaf is an integer, whose mean is no count, or not a number.
    """
    name, cell = f"aux['{path}']", "from xlstm_jax.distributed.metrics.cells import"
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
        raise TypeError(f"{name} is {leaf!r}, a {type(leaf).__name__}; the auxiliary output is made of numbers.")
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{name} is an integer ({dtype}{list(np.shape(leaf))}), and numbers beside the loss are averaged over "
            f"minibatches and devices. For the sum: `{cell} Count`, and Count.of(x); for the largest or smallest: "
            "Maximum.of(x), Minimum.of(x); for the mean: jnp.float32(x)."
        )
    # Bools become 0 and 1, whose mean is a fraction.
    return jnp.asarray(leaf, common_dtype(dtype, jnp.float32))

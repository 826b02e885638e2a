"""What a loss function returns beside the loss (``has_aux``), reduced over minibatches and devices.

{"accuracy": jnp.mean(hit)}      a float or a bool: averaged as the loss is, by weight with ``weighted``
{"tokens": Count.of(mask)}       a cell of ``metrics.cells``: merged, and its value returned
{"tokens": jnp.sum(mask)}        an integer: refused, as a mean of counts is no count
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.metrics.cells import Cell
from xlstm_jax.distributed.metrics.pure_metric import all_reduce_cells


class Auxiliary(struct.PyTreeNode):
    """The leaves of an auxiliary output: ``means``, to be averaged, with their paths, and ``cells``, to be merged."""

    means: list[jax.Array]
    cells: list[Cell]
    treedef: Any = struct.field(pytree_node=False)
    is_cell: tuple[bool, ...] = struct.field(pytree_node=False)
    mean_paths: tuple[str, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, aux: PyTree) -> Self:
        """The leaves of ``aux``; those to be averaged are float32 or wider.

        Raises:
          TypeError: a leaf that is an integer or no number at all; names it.
        """
        leaves, treedef = trees.flatten_with_path(aux, Cell)
        is_cell = tuple(isinstance(leaf, Cell) for _, leaf in leaves)
        means = {path: _as_mean(path, leaf) for path, leaf in leaves if not isinstance(leaf, Cell)}
        cells = [leaf for _, leaf in leaves if isinstance(leaf, Cell)]
        return cls([*means.values()], cells, treedef, is_cell, tuple(means))

    def scaled(self, scale: jax.Array | float) -> "Auxiliary":
        """With all that is averaged multiplied by ``scale``."""
        return self.replace(means=[mean * scale for mean in self.means])

    def merged(self) -> "Auxiliary":
        """With the cells of all minibatches, which a ``scan`` has stacked along a leading dim, merged into one each."""
        return self.replace(cells=[cell.merged((0,)) for cell in self.cells])

    def over_devices(self, loss: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, PyTree]:
        """The loss over devices, and the tree that the loss function returned, of means and values of merged cells."""
        loss, *averaged = collectives.pmean([loss, *self.means], [axes] * (1 + len(self.means)))
        means, cells = iter(averaged), iter(all_reduce_cells(self.cells, axes))
        leaves = [next(cells).value if is_cell else next(means) for is_cell in self.is_cell]
        return loss, jax.tree.unflatten(self.treedef, leaves)


def _as_mean(path: str, leaf: Any) -> jax.Array:
    name, cell = f"aux['{path}']", "from xlstm_jax.distributed.metrics.cells import"
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex):
        raise TypeError(f"{name} is {leaf!r}, a {type(leaf).__name__}; the auxiliary output is made of numbers.")
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{name} is an integer ({dtype}{list(np.shape(leaf))}), and numbers beside the loss are averaged over "
            f"minibatches and devices, which no count survives. For the sum: `{cell} Count`, and Count.of(x); for the "
            "largest or smallest: Maximum.of(x), Minimum.of(x); for the mean: jnp.float32(x)."
        )
    return jnp.asarray(leaf, jnp.promote_types(dtype, jnp.float32))

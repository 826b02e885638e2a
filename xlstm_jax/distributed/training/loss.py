"""``LossFunction``: calls a user's loss function, and converts the return value, in any of its forms, to a ``Loss``.

  mean                       the mean loss of the rows passed to the function
  (sum, weight)              ``weighted``: the weighted sum of their losses, and the sum of their weights
  (either, aux)              ``has_aux``: numbers to report, or observations for a metric
  (the above, collections)   ``has_collections``: the updated collections of the model

``LossFunction`` holds these options and calls the function. The step, its minibatches and the comparison with one
device read the result from the fields of a ``Loss``.

Leaves of aux are reduced over minibatches and devices according to their type (``Auxiliary``):

  {"accuracy": jnp.mean(hit)}      a float or a bool is averaged like the loss: with ``weighted``, by weight
  {"tokens": Count.of(mask)}       a cell of ``metrics.cells`` is merged, and its value returned
  {"tokens": jnp.sum(mask)}        an integer raises: the mean of counts is not a count
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from xlstm_jax.common_types import PyTree, Scalar
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import common_dtype
from xlstm_jax.distributed.metrics.cells import Cell
from xlstm_jax.distributed.metrics.pure_metric import all_reduce_cells
from xlstm_jax.formatting import kind_of

P = ParamSpec("P")
ApplyFn = Callable[..., PyTree]
LossOutput = Scalar | tuple[Any, Any]  # in any of the forms above


class LocalLossFn(Protocol[P]):
    """Loss function of ``value_and_grad``: the loss of this device's batch, ``loss_fn(params, ...)``."""

    def __call__(self, params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> LossOutput: ...


class MinibatchLossFn(Protocol):
    """Loss function of ``accumulate_gradients``: the loss of a minibatch.

    ``rng`` is None if the caller passed None; collections, if any, come last.
    """

    def __call__(
        self, params: PyTree, minibatch: PyTree, rng: PyTree, /, *collections: Any, **extra_trees: Any
    ) -> Any: ...


class LossFnWithKey(Protocol):
    """Loss function of ``make_train_step`` that draws random numbers: the loss of this device's shard of the batch.

    Collections of the state, if any, come last; further trees are passed by name.
    """

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, rng: jax.Array, /, *collections: Any, **extra_trees: Any
    ) -> Any: ...


class LossFnWithoutKey(Protocol):
    """Loss function of ``make_train_step`` that draws nothing; otherwise as ``LossFnWithKey``."""

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, /, *collections: Any, **extra_trees: Any
    ) -> Any: ...


LossFn = LossFnWithKey | LossFnWithoutKey


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """Return value of a user's loss function, in the form that the library reads.

    ``total`` is the mean, or the weighted sum if ``weight`` is given. ``aux`` and ``collections`` are as returned by
    the loss function, or None.
    """

    total: Scalar
    weight: Scalar | None = None
    aux: PyTree = None
    collections: PyTree = None


@dataclass(frozen=True)
class LossFunction:
    """User's loss function, with flags that describe the structure of its return value. Calls return a ``Loss``."""

    fn: Callable[..., Any]
    weighted: bool
    has_aux: bool = False
    has_collections: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """Calls the user's function; returns its loss, weight, auxiliary output and collections as a ``Loss``.

        The fields ``weighted``, ``has_aux`` and ``has_collections`` say which parts the function returns; others are
        None.

        Raises:
          TypeError: the return value has another structure, or the loss is not a real scalar of a floating dtype.
        """
        total: Any = self.fn(*args, **kwargs)
        weight: Any = None
        aux, collections = None, None
        # Unpack pairs from the outermost inwards.
        if self.has_collections:
            pair = "(what it returns without collections, updated collections)"
            total, collections = _pair(total, "with collections", pair)
        if self.has_aux:
            total, aux = _pair(total, "has_aux=True", "(loss, aux)")
        if self.weighted:
            total, weight = _pair(total, "weighted=True", "(sum, weight)")
        if total is None or (self.weighted and weight is None):
            raise TypeError("loss_fn returned None where a scalar loss is expected; does it end with a return?")
        for value in (total, weight) if self.weighted else (total,):
            is_number = hasattr(value, "dtype") or isinstance(value, int | float | complex)
            if not is_number or np.shape(value) != ():
                described = kind_of(value)
                with contextlib.suppress(TypeError):  # raised for a leaf that is no number, such as a string
                    described = jax.tree.map(jax.typeof, value)
                raise TypeError(
                    f"loss_fn returned {described} where a scalar loss is expected, with has_aux={self.has_aux} and "
                    f"weighted={self.weighted}. A pair (loss, aux) needs has_aux=True, a pair (sum, weight) "
                    "weighted=True."
                )
        if not jnp.issubdtype(dtype := jnp.result_type(total), jnp.floating):
            raise TypeError(f"loss_fn returned a loss of dtype {dtype}; only a real float has a gradient.")
        return Loss(total, weight, aux, collections)


def _pair(returned: Any, option: str, meaning: str) -> tuple[Any, Any]:
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise TypeError(f"{option}: loss_fn must return {meaning}, not {kind_of(returned)}.")
    return returned[0], returned[1]


# ------------------------------------------------------------------------------------------------------ beside the loss


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

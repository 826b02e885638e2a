"""What optimizers ask of a transform, and of gradients inside ``shard_map``."""

from typing import Any

import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import is_box, leaf_of
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.wording import kind_of


def check_transform(tx: Any, caller: str) -> None:
    """Raises a ``TypeError`` where ``tx`` is no optax transform: a pair of functions ``init`` and ``update``."""
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        called = f"Call it: {tx.__name__}(...) returns one" if hasattr(tx, "__name__") else "As optax.adamw(1e-3)"
        raise TypeError(f"{caller}: tx is {kind_of(tx)}, and no optimizer with init and update. {called}.")


def check_averaged(grads: PyTree, params: PyTree, caller: str) -> None:
    """Raises a ``ValueError`` where the type of a float leaf shows a gradient that was not averaged over all axes.

    Under ``check_vma=True`` it says over which axes a value differs between devices: for a gradient, those along which
    its parameter does. Else the parameter drifts apart, and JAX's error names neither leaf nor cause.
    """
    of_params = dict(trees.leaves_with_path(params))  # nothing where the optimizer was given no parameters
    for path, leaf in trees.leaves_with_path(grads):
        if leaf_of(leaf).is_differentiable and path in of_params:
            split = collectives.varying_axes(leaf_of(of_params[path]).value).union(leaf_of(leaf).axes)
            if stray := sorted(collectives.varying_axes(leaf_of(leaf).value) - split):
                raise ValueError(not_averaged(path, leaf, stray, caller))


def not_averaged(path: str, leaf: Any, stray: list[str], caller: str) -> str:
    """The text of a leaf that differs between devices along other axes than its box names."""
    declared = f"its box names {leaf_of(leaf).names}" if is_box(leaf) else "it is in no box"
    return (
        f"{caller}: '{path}' of shape {np.shape(leaf_of(leaf).value)} differs between devices along "
        f"{', '.join(map(repr, stray))}, but {declared}. If it is a gradient, "
        f"sync_gradients over {', '.join(map(repr, stray))} is missing, or ran over too few axes: name all that the "
        "batch is split over, in one call (value_and_grad does it for you). If it is a shard, it must come in its box."
    )

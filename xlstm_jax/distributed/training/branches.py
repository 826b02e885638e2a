"""Gathers in a branch that devices may take differently are refused: some would gather other weights, or wait."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.training.varying import Axes, parted_axes


def check_branches(
    paths: Sequence[str], loss_fn: Callable[..., Any], args: tuple[Any, ...], axes: tuple[str, ...]
) -> None:
    """Looks at the equations of ``loss_fn(*args)`` where it gathers the leaves at ``paths`` in a branch.

    Args:
      paths: of leaves that are gathered in a branch; empty for most models, of which nothing is looked at.
      loss_fn, args: the loss function, and what it is given, as for ``differing_args``.
      axes: those of the batch.
    Raises:
      ValueError: the predicate of the branch follows from what differs along the axes of a gather in it.
    """
    if not paths:
        return
    parted = parted_axes(lambda *args: jax.tree.leaves(loss_fn(*args)), args, differing_args(args, axes))
    if over := tuple(axis for axis in collectives.manual_axes() if axis in parted):
        raise ValueError(
            f"'{paths[0]}' is gathered in a branch (lax.cond, nn.cond, switch or while_loop) that devices along {over} "
            "may take differently: its predicate follows from the rows, the key or the index of each. All devices "
            "must take part in a gather, or weights are mixed up and gradients wrong. Make the predicate the same on "
            f"all, by pmax(flag, {over}) of jax.lax; or compute both branches and choose by jnp.where; or wrap the "
            "module that has the branch in it, which gathers before."
        )


def differing_args(args: tuple[PyTree, ...], axes: tuple[str, ...]) -> list[Axes]:
    """The axes along which the leaves of a loss function's arguments differ between devices."""
    params, minibatch, rng, *collections = args
    spread = Axes(collectives.spread_axes(axes))
    of_params, of_collections = (
        [Axes(leaf_of(leaf).axes) for _, leaf in trees.leaves_with_path(tree)] for tree in (params, collections)
    )
    of_minibatch = [spread if np.ndim(leaf) else Axes() for leaf in jax.tree.leaves(minibatch)]
    return [*of_params, *of_minibatch, *[spread] * len(jax.tree.leaves(rng)), *of_collections]

"""Checks that what leaves a step's ``shard_map`` as one value for all devices is equal on all devices.

  types       under ``check_vma=True`` JAX refuses a result that varies by its type along an axis that its spec leaves
              out. Types do not show branches: a result of ``lax.cond``, ``switch`` or ``while_loop`` is equal by its
              type where the operands are, whatever chooses the branch or ends the loop (jax#40823).
  equations   show branches, and show the same without types; ``varying`` reads them.

The loss, numbers beside it, gradients, collections and the state of a metric all pass here, in training and evaluation.
"""

import jax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.metrics.pure_metric import Local
from xlstm_jax.distributed.training.varying import Axes, Equations
from xlstm_jax.wording import listed


def check_equal_results(
    results: PyTree,
    equations: Equations,
    mesh: Mesh | AbstractMesh,
) -> None:
    """Checks the results of a ``shard_map`` by its equations.

    Args:
      results: the results of the call.
      equations: the axes along which these results differ, read off the equations of the call.
      mesh: the mesh of the ``shard_map``.
    Raises:
      ValueError: a result differs between devices along an axis that its spec does not name; names it, the axes and
        the cure.
    """
    spread = [axis for axis, size in mesh.shape.items() if size > 1]
    differing = _by_name(results, equations.of_results)
    refused = {name: of.intersection(spread) for name, of in differing.items() if of.intersection(spread)}
    if refused:
        along = tuple(axis for axis in spread if any(axis in of for of in refused.values()))
        raise ValueError(
            f"{listed(refused)} would differ from device to device along {along}, and the step returns one value for "
            "all devices: a sum over the axis is missing in the model, or a branch or loop (lax.cond, switch, "
            "while_loop) goes by what differs along it. Reduce the value where the model makes it, by psum or pmean of "
            f"jax.lax over {along}; choose a branch by what is the same on all devices, pmax(flag, {along})."
        )


def _by_name(results: PyTree, of_leaves: list[Axes]) -> dict[str, Axes]:
    """The axes of each leaf of ``results`` by its path; the state of a metric is one leaf."""
    found: dict[str, Axes] = {}
    left = iter(of_leaves)
    for path, node in trees.flatten_with_path(results, lambda node: isinstance(node, Local))[0]:
        name = "the state of the metric" if isinstance(node, Local) else path
        found[name] = Axes().union(*(next(left) for _ in jax.tree.leaves(node)))
    return found

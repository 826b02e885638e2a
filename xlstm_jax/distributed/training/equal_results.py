"""Check that replicated results of a step's ``shard_map`` are equal on all devices.

  types       under ``check_vma=True`` JAX rejects a result that varies by type along an axis missing from its spec.
              Types ignore predicates: a result of ``lax.cond``, ``switch`` or ``while_loop`` counts as equal if the
              operands are equal, even if devices choose different branches or numbers of rounds (jax#40823).
  equations   include predicates, and need no ``check_vma``; ``varying`` reads them.

The loss, auxiliary numbers, gradients, collections and metric state pass this check, in training and evaluation. The
equations are read only if the types prove nothing: ``Results.unproved``.
"""

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.metrics.pure_metric import Local
from xlstm_jax.distributed.training.moments import Results
from xlstm_jax.distributed.training.varying import Axes
from xlstm_jax.formatting import listed


def check_equal_results(context: Results) -> None:
    """Raises if a result of a traced ``shard_map`` differs between devices along an axis that its spec does not name.

    Raises also if devices may take different branches of the program, and a branch communicates: some devices would
    wait for others. A gather in a branch is noticed before, with its leaf, unless a function with a cache of its traces
    (``jax.jit``, ``jax.checkpoint``) has run outside of the branch before. ``context`` has the results, the mesh and
    the equations of the ``shard_map``, off which differences are read.

    Raises:
      ValueError: a result differs so, or a branch communicates; names the result, the axes and the cure.
    """
    spread = [axis for axis, size in context.mesh.shape.items() if size > 1]
    differing = _by_name(context.results, context.equations.of_results)
    refused = {
        name: differing_axes.intersection(spread)
        for name, differing_axes in differing.items()
        if differing_axes.intersection(spread)
    }
    if refused:
        along = tuple(axis for axis in spread if any(axis in differing_axes for differing_axes in refused.values()))
        raise ValueError(
            f"{listed(refused)} would differ from device to device along {along}, and the step returns one value for "
            f"all devices. Reduce the value in the model, by psum or pmean of jax.lax over {along}; make the predicate "
            f"of a branch or loop equal on all devices, by pmax(flag, {along})."
        )
    if over := tuple(axis for axis in spread if axis in context.equations.of_branches):
        raise ValueError(
            f"a collective over {over}, such as the gather of a parameter, is in a branch or loop (lax.cond, switch, "
            "while_loop) that these devices may take differently, and it needs all devices. Make the predicate equal "
            f"on all devices, by pmax(flag, {over}) of jax.lax, or compute both branches, by jnp.where."
        )


def _by_name(results: PyTree, of_leaves: list[Axes]) -> dict[str, Axes]:
    """Returns a dict from the path of each leaf of ``results`` to the mesh axes along which the leaf differs.

    ``of_leaves`` has these axes in the order of the leaves. The state of a metric counts as a single leaf, "the state
    of the metric", with the axes of all its leaves.
    """
    by_name: dict[str, Axes] = {}
    left = iter(of_leaves)
    for path, node in trees.flatten_with_path(results, Local)[0]:
        name = "the state of the metric" if isinstance(node, Local) else path
        by_name[name] = Axes().union(*(next(left) for _ in jax.tree.leaves(node)))
    return by_name

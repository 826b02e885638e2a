"""Checks of axes: replicated results of a step's ``shard_map`` must be equal on all devices, and a loss must not.

  types       under ``check_vma=True`` JAX rejects a result that varies by type along an axis missing from its spec.
              Types ignore predicates: a result of ``lax.cond``, ``switch`` or ``while_loop`` counts as equal if the
              operands are equal, even if devices choose different branches or numbers of rounds (jax#40823).
  equations   include predicates, and need no ``check_vma``; ``varying`` reads them.

The loss, auxiliary numbers, gradients, collections and metric state pass this check, in training and evaluation. Before
it is reduced, a loss or weight must vary, by its type, over the axes to average over and no others: ``check_axes``.
"""

import jax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.metrics.pure_metric import Local
from xlstm_jax.distributed.training.varying import OPAQUE, Axes, Equations
from xlstm_jax.equations import all_equations
from xlstm_jax.formatting import listed
from xlstm_jax.private_names import core

# Equations of which types do not prove enough: predicates, writes to references, and hidden programs.
BEYOND_TYPES = {"cond", "while", "swap", "addupdate", *OPAQUE}


def check_axes(value: jax.Array, axes: tuple[str, ...], subject: str) -> None:
    """Raises if the type of a loss or weight varies over other axes than the axes to average over."""
    varying = collectives.varying_axes(value)
    for axis in collectives.spread_axes(axes):
        if collectives.is_tracked(axis) and axis not in varying:
            raise ValueError(
                f"{subject} that loss_fn returned does not vary over {axis!r} (its type is {jax.typeof(value)}): it "
                "was reduced over that axis already, or depends on neither parameters nor batch. Return the local "
                "value of this device, which is averaged here, and a constant weight as a Python number."
            )
    # JAX would sum the gradients of leaves that do not vary over such an axis, and no later mean would divide them.
    for axis in collectives.spread_axes(sorted(varying - set(axes))):
        raise ValueError(
            f"the loss varies over {axis!r}, which the axes to average over, {axes}, leave out: gradients of "
            f"replicated leaves would be summed over its {collectives.axis_size([axis])} devices. Name all axes along "
            f"which the batch or gathered weights differ, or reduce over {axis!r} in the model (tensor parallel)."
        )


def types_prove_equal(jaxpr: core.Jaxpr) -> bool:
    """Returns whether JAX's types have proved that results without an axis in their specs are equal along the axis.

    True if every ``shard_map`` of the program has ``check_vma=True``, and no equation depends on a predicate or writes
    to a reference, of which types say nothing.
    """
    for eqn in all_equations(jaxpr.eqns):
        if eqn.primitive.name in BEYOND_TYPES or "_prim" in eqn.params:
            return False
        if eqn.primitive.name == "shard_map" and not eqn.params.get("check_vma"):
            return False
    return True


def check_equal_results(
    results: PyTree,
    equations: Equations,
    mesh: Mesh | AbstractMesh,
) -> None:
    """Raises if results of a ``shard_map`` that should be replicated differ between devices.

    Args:
      results: the results of the call.
      equations: the axes along which these results differ, read off the equations of the call.
      mesh: the mesh of the ``shard_map``.
    Raises:
      ValueError: a result differs between devices along an axis that its spec does not name; names the result, the axes
        and the cure.
    """
    spread = [axis for axis, size in mesh.shape.items() if size > 1]
    differing = _by_name(results, equations.of_results)
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


def _by_name(results: PyTree, of_leaves: list[Axes]) -> dict[str, Axes]:
    """Returns the axes of each leaf of ``results`` by path; the state of a metric counts as a single leaf."""
    by_name: dict[str, Axes] = {}
    left = iter(of_leaves)
    for path, node in trees.flatten_with_path(results, lambda node: isinstance(node, Local))[0]:
        name = "the state of the metric" if isinstance(node, Local) else path
        by_name[name] = Axes().union(*(next(left) for _ in jax.tree.leaves(node)))
    return by_name

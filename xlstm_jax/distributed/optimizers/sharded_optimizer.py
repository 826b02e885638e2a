"""``ShardedOptimizer``: an optax transform bound to boxed parameters and their mesh.

  tx.init, tx.update                      on arrays without boxes, as on one device
  sharded_optimizer(tx, params, mesh)     on the parts of a training state, on global arrays:
    init(params)                            the initial state of the optimizer, as stored
    update(grads, before, collections)      the parts after an update, in their boxes and places
    shardings(opt_state)                    the sharding of each leaf of a state

A wrapper takes a ``ShardedOptimizer`` and returns another. Wrappers add features that an optax transform cannot have,
such as other storage for moments, or changes of more than parameters. Each wrapper is in a separate file. ``WRAPPERS``
registers the wrappers of every optimizer, ``WRAPPERS_OF_STATES`` the wrappers of an update of states with a certain
kind of node or memory, and ``sharded_optimizer`` takes further wrappers.

A transform that needs to know how its arrays are split calls ``parameter_layout()``: optax passes arrays alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import NamedTuple, Protocol

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import default_registry

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.wire.tracing import set_context
from xlstm_jax.distributed.optimizers.extra_args import taking_extra_args
from xlstm_jax.distributed.optimizers.state import (
    given_state,
    leaves_and_specs,
    state_shardings,
    stored_state,
    trainable,
    with_trainable,
)


class Trained(NamedTuple):
    """Parts of a training state that an update replaces.

    Attributes:
      step: number of updates.
      params: in their boxes.
      opt_state: as stored, see ``optimizers.state``.
      collections: the model's collections beside the parameters; {} if the update must not change the collections.
    """

    step: jax.Array | int
    params: PyTree
    opt_state: PyTree
    collections: Mapping[str, PyTree]


class Update(Protocol):
    """Type of ``ShardedOptimizer.update``."""

    def __call__(
        self, grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]: ...


class ShardedOptimizer(NamedTuple):
    """Optimizer of boxed parameters on a mesh; all functions are traced, and arrays are global.

    Attributes:
      init: takes the parameters; returns the initial state, as stored.
      update: takes gradients without boxes and padding (``optimizers.state.trainable``), the parts before the update,
        the collections that the step computed, and the extra arguments of optax (``optimizers.extra_args``). Returns
        the parts after the update, and metrics of the step.
      shardings: takes a state as stored, arrays or abstract; returns a ``NamedSharding`` for each leaf.
    """

    init: Callable[[PyTree], PyTree]
    update: Update
    shardings: Callable[[PyTree], PyTree]


# Takes an optimizer, its parameters, and the mesh.
Wrapper = Callable[[ShardedOptimizer, PyTree, Mesh | AbstractMesh], ShardedOptimizer]


class Placement:
    """Choice of the memory that stores an optimizer's state: device memory here, host memory in ``Offload``."""

    def wrap(self, optimizer: ShardedOptimizer, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
        """Returns the optimizer, with shardings that place its state in the chosen memory; a ``Wrapper``."""
        del params, mesh
        return optimizer


ON_DEVICES = Placement()


class WrapperOfStates(NamedTuple):
    """Wrapper of ``update`` for some states alone.

    Attributes:
      needs: the class of a node of these states (as ``SkipNonfiniteState``), or the memory of a leaf.
      wrap: the wrapper.
    """

    needs: object
    wrap: Wrapper


# Registries; the first entry is the innermost wrapper. ``WRAPPERS_OF_STATES`` are around ``WRAPPERS``.
WRAPPERS: list[Wrapper] = []
WRAPPERS_OF_STATES: list[WrapperOfStates] = []  # filled by ``optimizers``


class ParameterLayout:
    """Layout of global parameters: the mesh, boxed parameters by path, and specs of their optimizer state.

    Parameters and specs are computed on the first access: transforms that do not read the layout pay nothing.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, tree: PyTree, shardings: Callable[[PyTree], PyTree]):
        self.mesh, self._tree, self._shardings = mesh, tree, shardings

    @cached_property
    def params(self) -> Mapping[str, Sharded]:
        return dict(trees.sharded_leaves(self._tree))

    @cached_property
    def specs(self) -> Mapping[str, PartitionSpec]:
        # Gradients, updates and moments have the shapes of the parameters, and the sharding of a state of this shape.
        return {path: sharding.spec for path, sharding in trees.leaves_with_path(self._shardings(self._tree))}


# A context variable, since optax's transforms (such as `chain`) between the step, which has the layout, and `muon` do
# not pass a layout on.
_LAYOUT: ContextVar[ParameterLayout | None] = ContextVar("layout of the parameters that are optimized", default=None)


def parameter_layout() -> ParameterLayout | None:
    """Returns the layout of the parameters while ``init`` or ``update`` of a ``ShardedOptimizer`` runs; else None."""
    return _LAYOUT.get()


def sharded_optimizer(
    tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh, *wrappers: Wrapper
) -> ShardedOptimizer:
    """Makes the optimizer of boxed parameters from an optax transform.

    Args:
      tx: the transform.
      params: boxed parameters, arrays or abstract: only boxes, shapes and dtypes are read.
      mesh: the mesh of the parameters.
      *wrappers: applied after the registered wrappers.
    """
    optimizer = _plain(tx, params, mesh)
    for wrap in WRAPPERS:
        optimizer = wrap(optimizer, params, mesh)
    of_any_state = optimizer

    def update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        found, of_this_state = _kinds(before.opt_state), of_any_state
        for needs, wrap in WRAPPERS_OF_STATES:
            if needs in found:
                of_this_state = wrap(of_this_state, params, mesh)
        return of_this_state.update(grads, before, collections, **extra_args)

    optimizer = optimizer._replace(update=update)
    for wrap in wrappers:
        optimizer = wrap(optimizer, params, mesh)
    return optimizer


def _kinds(opt_state: PyTree) -> set[object]:
    """Returns the classes of all nodes of an optimizer's state, and the memories of its arrays."""
    kinds: set[object] = set()
    waiting = [opt_state]
    while waiting:
        node = waiting.pop()
        if (below := default_registry.flatten_one_level(node)) is not None:
            kinds.add(type(node))
            waiting += below[0]
        elif isinstance(node, jax.Array):
            kinds.add(jax.typeof(node).memory_space)
    return kinds


def _plain(tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
    """Makes a ``ShardedOptimizer`` from an optax transform, without wrappers."""
    called = taking_extra_args(tx)
    by_path = leaves_and_specs(params, mesh)
    padded = [path for path, (leaf, _) in by_path.items() if not leaf.stores_value]

    def init(params: PyTree) -> PyTree:
        with set_context(_LAYOUT, layout):
            opt_state = tx.init(trainable(params))
        return stored_state(opt_state, params) if padded else opt_state

    def update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        bare = trainable(before.params)
        with set_context(_LAYOUT, layout):
            updates, opt_state = called.update(grads, given_state(before.opt_state), bare, **extra_args)
        opt_state = stored_state(opt_state, before.params) if padded else opt_state
        new_params = with_trainable(before.params, optax.apply_updates(bare, updates))
        after = Trained(
            step=before.step + 1,
            params=_placed_as(new_params, [spec for _, spec in by_path.values()], mesh),
            # Shardings of the new state, whose tree may differ from the initial state's: optax.monitor starts without
            # measures.
            opt_state=jax.lax.with_sharding_constraint(opt_state, shardings(opt_state)),
            collections=collections,
        )
        return after, {}

    def shardings(opt_state: PyTree) -> PyTree:
        return state_shardings(opt_state, by_path, mesh)

    layout = ParameterLayout(mesh, params, shardings)
    return ShardedOptimizer(init, update, shardings)


def _placed_as(tree: PyTree, specs: Sequence[PartitionSpec], mesh: Mesh | AbstractMesh) -> PyTree:
    """Returns a tree of global arrays, leaf i constrained to the sharding ``specs[i]``; a box is a leaf."""
    shardings = trees.with_leaves(tree, [NamedSharding(mesh, spec) for spec in specs])
    return jax.lax.with_sharding_constraint(tree, shardings)

"""``ShardedOptimizer``: an optax transform bound to boxed parameters and their mesh.

  tx.init, tx.update                      on arrays without boxes, as on one device
  sharded_optimizer(tx, params, mesh)     on the parts of a training state, on global arrays:
    init(params)                            the initial state of the optimizer, as stored
    update(grads, before, collections)      the parts after an update, in their boxes and places
    shardings(opt_state)                    the sharding of each leaf of a state

A wrapper takes a ``ShardedOptimizer`` and returns another. Wrappers add features that an optax transform cannot have,
such as other storage for moments, or changes of more than parameters. Each wrapper is in a separate file; ``WRAPPERS``
registers the wrappers of every optimizer, and ``sharded_optimizer`` takes further wrappers.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import Metrics, PyTree
from xlstm_jax.distributed.data_parallel import placement
from xlstm_jax.distributed.optimizers.extra_args import taking_extra_args
from xlstm_jax.distributed.optimizers.state import (
    given_state,
    optimizer_state_shardings,
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

WRAPPERS: list[Wrapper] = []  # filled by ``optimizers``, in the order of its lines: the first is the innermost


def sharded_optimizer(
    tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh, *wrappers: Wrapper
) -> ShardedOptimizer:
    """Makes the optimizer of boxed parameters from an optax transform.

    Args:
      tx: the transform.
      params: boxed parameters, arrays or abstract: only boxes, shapes and dtypes are read.
      mesh: the mesh of the parameters.
      *wrappers: applied after the registered ``WRAPPERS``.
    """
    optimizer = _plain(tx, params, mesh)
    for wrap in (*WRAPPERS, *wrappers):
        optimizer = wrap(optimizer, params, mesh)
    return optimizer


def _plain(tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
    """Makes a ``ShardedOptimizer`` from an optax transform, without wrappers."""
    called = taking_extra_args(tx)

    def init(params: PyTree) -> PyTree:
        return stored_state(tx.init(trainable(params)), params)

    def update(
        grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]:
        bare = trainable(before.params)
        updates, opt_state = called.update(grads, given_state(before.opt_state), bare, **extra_args)
        opt_state = stored_state(opt_state, before.params)
        new_params = with_trainable(before.params, optax.apply_updates(bare, updates))
        after = Trained(
            step=before.step + 1,
            params=jax.lax.with_sharding_constraint(new_params, placement.shardings(new_params, mesh)),
            # Shardings of the new state, whose tree may differ from the initial state's: optax.monitor starts without
            # measures.
            opt_state=jax.lax.with_sharding_constraint(opt_state, shardings(opt_state)),
            collections=collections,
        )
        return after, {}

    def shardings(opt_state: PyTree) -> PyTree:
        return optimizer_state_shardings(opt_state, params, mesh)

    return ShardedOptimizer(init, update, shardings)

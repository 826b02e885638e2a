"""``ShardedOptimizer``: an optax transform that has met parameters in boxes, and their mesh.

  tx.init, tx.update                      of arrays without boxes, as on one device
  sharded_optimizer(tx, params, mesh)     of the parts of a training state, on global arrays:
    init(params)                            the first state of the optimizer, as it is stored
    update(grads, before, collections)      the parts after an update, in their boxes and places
    shardings(opt_state)                    where each leaf of a state lies

A wrapper takes a ``ShardedOptimizer`` and returns another: a feature that an optax transform cannot be, as it stores
moments otherwise, or changes more than parameters. Each stands in a file of its own; ``WRAPPERS`` registers those that
are around every optimizer, and ``sharded_optimizer`` takes further ones.
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
    """The parts of a training state that an update replaces.

    Attributes:
      step: how many updates there were.
      params: in their boxes.
      opt_state: as it is stored, see ``optimizers.state``.
      collections: what the model keeps beside its parameters; empty where an update is not to change them.
    """

    step: jax.Array | int
    params: PyTree
    opt_state: PyTree
    collections: Mapping[str, PyTree]


class Update(Protocol):
    """The type of ``ShardedOptimizer.update``."""

    def __call__(
        self, grads: PyTree, before: Trained, collections: Mapping[str, PyTree], **extra_args: PyTree
    ) -> tuple[Trained, Metrics]: ...


class ShardedOptimizer(NamedTuple):
    """An optimizer of parameters in boxes on a mesh; all functions are traced, and arrays are global.

    Attributes:
      init: of the parameters; returns the first state, as it is stored.
      update: of gradients without boxes and padding (``optimizers.state.trainable``), the parts before the update, the
        collections that the step has computed, and the extra arguments of optax (``optimizers.extra_args``). Returns
        the parts after it, and metrics of the step.
      shardings: of a state as it is stored, arrays or abstract; returns a ``NamedSharding`` for each leaf.
    """

    init: Callable[[PyTree], PyTree]
    update: Update
    shardings: Callable[[PyTree], PyTree]


# Takes an optimizer, the parameters that it was made for, and the mesh.
Wrapper = Callable[[ShardedOptimizer, PyTree, Mesh | AbstractMesh], ShardedOptimizer]


class Placement:
    """Where an optimizer's state lies: all of it on the devices. A subclass says otherwise, as ``Offload``."""

    def wrap(self, optimizer: ShardedOptimizer, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
        """Returns the optimizer with shardings that place the state so; a ``Wrapper``."""
        del params, mesh
        return optimizer


ON_DEVICES = Placement()

WRAPPERS: list[Wrapper] = []  # filled by ``optimizers``, in the order of its lines: the first is the innermost


def sharded_optimizer(
    tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh, *wrappers: Wrapper
) -> ShardedOptimizer:
    """Makes the optimizer of parameters in boxes from a transform of optax.

    Args:
      tx: the transform.
      params: boxed parameters, arrays or abstract: only their boxes, shapes and dtypes are read.
      mesh: the mesh that they lie on.
      *wrappers: put around those that ``WRAPPERS`` registers.
    """
    optimizer = _plain(tx, params, mesh)
    for wrap in (*WRAPPERS, *wrappers):
        optimizer = wrap(optimizer, params, mesh)
    return optimizer


def _plain(tx: optax.GradientTransformation, params: PyTree, mesh: Mesh | AbstractMesh) -> ShardedOptimizer:
    """Returns the optimizer without wrappers."""
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
            # Of the new state, whose tree may be another than that of the first: optax.monitor begins without measures.
            opt_state=jax.lax.with_sharding_constraint(opt_state, shardings(opt_state)),
            collections=collections,
        )
        return after, {}

    def shardings(opt_state: PyTree) -> PyTree:
        return optimizer_state_shardings(opt_state, params, mesh)

    return ShardedOptimizer(init, update, shardings)

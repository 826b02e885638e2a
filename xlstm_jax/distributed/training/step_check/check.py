"""``check_step``: runs one step on the mesh, computes it on one device, and says what the difference means.

  the step         equals, to rounding, each device's rows computed one after another with the same draws
  its loss         is a mean over rows: the loss of the whole batch is the mean over its slices
  its parameters   each trainable parameter gets a gradient

A step that averages wrongly still trains, only worse, and no type shows it. But its gradients are then a multiple of
the right ones: which leaves, and which multiple, name the mistake (``report``).
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.device_mesh.checks import auto_mesh
from xlstm_jax.distributed.training.accumulation import Accumulation
from xlstm_jax.distributed.training.loss import LossFunction, LossOutput
from xlstm_jax.distributed.training.state import FlaxTrainState
from xlstm_jax.distributed.training.step import MadeStep, StepOptions
from xlstm_jax.distributed.training.step_check.one_device import OneDevice, count_of
from xlstm_jax.distributed.training.step_check.report import StepCheck
from xlstm_jax.distributed.training.step_check.verdicts import Comparison


def check_step(
    step: Callable[..., Any],
    state: FlaxTrainState,
    batch: PyTree,
    rng: jax.Array,
    *rest: Any,
    loss_fn: Callable[..., LossOutput] | None = None,
    weighted: bool = False,
    has_aux: bool = False,
) -> StepCheck:
    """Runs one step on the mesh, and compares its gradients with those of one device.

    Use it once, on a small model and batch, for a step of your own or after a change. The state is neither changed nor
    donated. While it runs, one device holds the whole model and batch; all devices must belong to this process.

    >>> loss_fn = lambda params, apply_fn, batch, rng: jnp.sum(apply_fn({"params": params}, batch) ** 2)  # not a mean
    >>> model, x = shard_module_params(nn.Dense, "fsdp", min_weight_size=64)(16), jnp.ones((8, 32))
    >>> state = create_train_state(model, optax.adam(1e-3), mesh, jax.random.key(0), x, batch_axes=("dp", "fsdp"))
    >>> found = check_step(make_train_step(loss_fn, mesh, ("dp", "fsdp")), state, x, jax.random.key(1))
    >>> found.verdict, [(leaf.path, round(leaf.ratio, 3)) for leaf in found.leaves]
    ('wrong', [('bias', 0.125), ('kernel', 0.125)])

    Args:
      step: ``step(state, batch, rng, *rest) -> (state, metrics, ...)``, of ``make_train_step`` or your own.
      state: a ``TrainState``, on a mesh.
      batch: a batch with global leaves, as the step takes it.
      rng: a key, as the step takes it. For a step of ``make_train_step`` one device draws what all devices draw. A
        step of your own gets a key whose draws are the same everywhere, however it folds the key; if it draws from
        other keys, means over many keys are compared.
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)``, what the step should minimise: the mean over the batch that it
        gets. None for the loss of ``make_train_step``. It takes and returns collections where the state has some.
      weighted, has_aux: what ``loss_fn`` returns, as for ``make_train_step``; not used without ``loss_fn``.
    Returns:
      A ``StepCheck``. Only for a step of your own can its verdict be "cannot tell".
    Raises:
      ValueError: ``loss_fn`` is missing, or the parameters are not on a mesh, or not all in this process.
    """
    options = _options_of(step)
    if options is None and loss_fn is None:
        raise ValueError(
            "check_step: this step is not of make_train_step. Pass loss_fn=, a loss_fn(params, apply_fn, batch, rng) "
            "that returns the mean loss over the batch that it is given."
        )
    mesh = _mesh_of(state.params)
    given = (batch, rng, *rest)
    loss = LossFunction(loss_fn, weighted, has_aux) if loss_fn is not None else None
    if options is not None:
        one = OneDevice(loss or options.loss, options.accumulation, state, batch, mesh)
        return Comparison(step, state, given, one).of_ready_step()
    assert loss is not None
    how = Accumulation(_likely_axes(state.params, batch, mesh))
    return Comparison(step, state, given, OneDevice(loss, how, state, batch, mesh)).of_own_step()


def _options_of(step: Callable[..., Any]) -> StepOptions | None:
    """What ``make_train_step`` was given to make the step, also where ``jit`` or a decorator has wrapped the step."""
    made = inspect.unwrap(step, stop=lambda wrapped: isinstance(wrapped, MadeStep))
    return made.options if isinstance(made, MadeStep) else None


def _mesh_of(params: PyTree) -> Mesh:
    for path, leaf in trees.leaves_with_path(params):
        sharding = getattr(leaf_of(leaf).value, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"check_step: '{path}' is on no mesh ({sharding}). Make the state with create_train_state."
            )
        if not sharding.is_fully_addressable:
            raise ValueError(
                f"check_step: '{path}' is on devices of several processes, and is compared whole on one. Check the "
                "step in one process: on its own devices, or on simulate_cpu_devices(8) with a small model."
            )
        if isinstance(sharding.mesh, Mesh):
            return auto_mesh(sharding.mesh)
    raise ValueError("check_step: state.params has no leaves.")


def _likely_axes(params: PyTree, batch: PyTree, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which a user's own step splits its batch: all but tensor-parallel ones, if they divide it."""
    own = {axis for _, leaf in trees.leaves_with_path(params) for axis in leaf_of(leaf).model_axes}
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in own)
    rows = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return axes if all(count % count_of(mesh, axes) == 0 for count in rows) else ()

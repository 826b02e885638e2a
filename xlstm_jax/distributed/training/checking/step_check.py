"""``check_step``: one step on the mesh beside one device, and what the difference says.

  the step         with the same draws as each device's rows on one device, one part after another: to rounding
  its loss         of the whole batch, and the mean of its slices: whether it is a mean over rows
  its parameters   whether each that is to be trained gets a gradient

A step that averages wrongly still trains, only worse, and no type shows it. But its gradients are then the right ones
times a number of devices, and which leaves and which number tell the mistake (``causes``).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import leaf_of
from xlstm_jax.distributed.device_mesh.checks import auto_mesh
from xlstm_jax.distributed.training.checking.comparing.one_device import OneDevice, StepLoss, count_of
from xlstm_jax.distributed.training.checking.comparing.verdicts import Comparison, StepCheck
from xlstm_jax.distributed.training.gradients import LossOutput
from xlstm_jax.distributed.training.state import FlaxTrainState


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

    Use it once, on a small model and batch, for a step of your own or after a change. The state is not changed, nor
    donated. One device holds the whole model and batch meanwhile; all devices must belong to this process.

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
      rng: a key, as the step takes it. One device draws what each device of a step of ``make_train_step`` draws. A step
        of your own is given a key whose draws are the same everywhere, so that it need not be known how it folds them;
        one that draws from other keys is compared by means over many.
      loss_fn: ``loss_fn(params, apply_fn, batch, rng)``, what the step is to minimise, the mean over whatever batch it
        is given; None: that of ``make_train_step``. It takes and returns collections where the state has some.
      weighted, has_aux: what ``loss_fn`` returns, as for ``make_train_step``; not used where it is None.
    Returns:
      A ``StepCheck``. "cannot tell" is said of steps of your own alone.
    Raises:
      ValueError: ``loss_fn`` is missing, the parameters are not on a mesh, or not all in this process.
    """
    ready = _loss_of(step)
    if ready is None and loss_fn is None:
        raise ValueError(
            "check_step: this step is not of make_train_step. Pass loss_fn=, a loss_fn(params, apply_fn, batch, rng) "
            "that returns the mean loss over the batch that it is given."
        )
    mesh = _mesh_of(state.params)
    if ready is not None:
        loss = ready if loss_fn is None else ready._replace(loss_fn=loss_fn, weighted=weighted, has_aux=has_aux)
        return Comparison(step, state, (batch, rng, *rest), OneDevice(loss, state, batch, mesh)).of_ready_step()
    assert loss_fn is not None
    loss = StepLoss(loss_fn, weighted, has_aux, _likely_axes(state.params, batch, mesh))
    return Comparison(step, state, (batch, rng, *rest), OneDevice(loss, state, batch, mesh)).of_own_step()


def _loss_of(step: Callable[..., Any]) -> StepLoss | None:
    loss = getattr(getattr(step, "__wrapped__", step), "loss", None)
    return loss if isinstance(loss, StepLoss) else None


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
    """The axes over which a step of somebody's own splits its batch: all but the model's own, where they divide it."""
    own = {axis for _, leaf in trees.leaves_with_path(params) for axis in leaf_of(leaf).model_axes}
    axes = tuple(axis for axis, size in mesh.shape.items() if size > 1 and axis not in own)
    rows = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return axes if all(count % count_of(mesh, axes) == 0 for count in rows) else ()

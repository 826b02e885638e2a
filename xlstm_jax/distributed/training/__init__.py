"""Training with sharded parameters: initialisation, gradients, and a ready-made step.

  init_sharded          initialises the model with the plain model's values; each device computes its shards
  value_and_grad        inside shard_map: loss and gradient of the mean over devices
  accumulate_gradients  value_and_grad over minibatches, in sequence
  TrainState            Flax's TrainState with a field for the model's collections
  create_train_state    init_sharded, plus an optimizer state split like the parameters
  abstract_train_state  shapes and shardings of the state: the target of a restore
  make_train_step       gradients inside shard_map, the optimizer outside, in the same jit
  replayed              the step with replays, which find devices that compute wrong numbers
  make_eval_step        forward pass on the same sharded state, accumulated into a metric
  default_batch_axes    every axis of the mesh, except the axes over which the model itself splits parameters
  create_nnx_module     makes an NNX module with split parameters, for a training script of NNX
  nnx_value_and_grad    nnx.value_and_grad of the mean over devices, for such a module
  check_step            compares the gradients of any step with the gradients of one device on the full batch
  LMHead                a layer that computes losses over a large vocabulary without all logits in memory

The optimizer receives global arrays without boxes. A norm is therefore the global norm, a factored moment covers its
full matrix, and any optax transform computes on shards the same as on one device; XLA adds the communication of the few
scalars or rows that this needs.
"""

from typing import TYPE_CHECKING

from xlstm_jax.deferred import names_when_used
from xlstm_jax.distributed.optimizers.sharded_optimizer import optimizer_state_shardings
from xlstm_jax.distributed.training import checks  # noqa: F401  # registers its rows
from xlstm_jax.distributed.training.accumulation import accumulate_gradients
from xlstm_jax.distributed.training.batch_axes import default_batch_axes
from xlstm_jax.distributed.training.cross_entropy import LMHead, TokenLosses, chunked_cross_entropy
from xlstm_jax.distributed.training.evaluation import make_eval_step
from xlstm_jax.distributed.training.gradients import fold_rng_over_axis, value_and_grad
from xlstm_jax.distributed.training.state import (
    TrainState,
    abstract_train_state,
    create_train_state,
    init_sharded,
    jitted_init,
)
from xlstm_jax.distributed.training.step import make_train_step
from xlstm_jax.distributed.training.varying_params import varying_params

if TYPE_CHECKING:
    from xlstm_jax.distributed.training.nnx_gradients import create_nnx_module, nnx_value_and_grad
    from xlstm_jax.distributed.training.replay.replayed_step import ReplayError, replayed
    from xlstm_jax.distributed.training.step_check.check import check_step
    from xlstm_jax.distributed.training.step_check.report import StepCheck
else:  # names that many programs do not use
    __getattr__ = names_when_used(
        __name__,
        {
            "create_nnx_module": "xlstm_jax.distributed.training.nnx_gradients",
            "nnx_value_and_grad": "xlstm_jax.distributed.training.nnx_gradients",
            "replayed": "xlstm_jax.distributed.training.replay.replayed_step",
            "ReplayError": "xlstm_jax.distributed.training.replay.replayed_step",
            "check_step": "xlstm_jax.distributed.training.step_check.check",
            "StepCheck": "xlstm_jax.distributed.training.step_check.report",
        },
    )

__all__ = [
    "LMHead",
    "ReplayError",
    "StepCheck",
    "TokenLosses",
    "TrainState",
    "abstract_train_state",
    "accumulate_gradients",
    "check_step",
    "chunked_cross_entropy",
    "create_nnx_module",
    "create_train_state",
    "default_batch_axes",
    "fold_rng_over_axis",
    "init_sharded",
    "jitted_init",
    "make_eval_step",
    "make_train_step",
    "nnx_value_and_grad",
    "optimizer_state_shardings",
    "replayed",
    "value_and_grad",
    "varying_params",
]

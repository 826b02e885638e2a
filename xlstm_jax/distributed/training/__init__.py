"""Training on sharded parameters: the model's start, its gradients, and a ready-made step.

  init_sharded          values of the plain model's init, each device computing the shards that it keeps
  value_and_grad        inside shard_map: loss and gradient of the mean over all devices
  accumulate_gradients  the same over minibatches, one after the other
  TrainState            Flax's, with the collections that a model keeps beside its parameters
  create_train_state    init_sharded, and an optimizer state that is split like the parameters
  abstract_train_state  the same without a value: what a checkpoint is restored into
  make_train_step       gradients inside shard_map, the optimizer outside of it in the same jit
  make_eval_step        forward only, into the state of a metric, on the same sharded state
  check_step            the gradients of a step, yours or ours, against one device on the whole batch
  LMHead                a layer whose losses over a large vocabulary need no logits: chunked_cross_entropy

The optimizer sees global arrays without boxes. A norm is then the norm, a factored moment sees its whole matrix, and
any optax transform does on shards what it does on one device; XLA adds the few scalars or rows that must travel for it.
"""

from xlstm_jax.distributed.optimizers.state import optimizer_state_shardings
from xlstm_jax.distributed.training import checks  # noqa: F401  # registers its rows
from xlstm_jax.distributed.training.accumulation import accumulate_gradients
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
from xlstm_jax.distributed.training.step_check.check import check_step
from xlstm_jax.distributed.training.step_check.report import StepCheck

__all__ = [
    "LMHead",
    "StepCheck",
    "TokenLosses",
    "TrainState",
    "abstract_train_state",
    "accumulate_gradients",
    "check_step",
    "chunked_cross_entropy",
    "create_train_state",
    "fold_rng_over_axis",
    "init_sharded",
    "jitted_init",
    "make_eval_step",
    "make_train_step",
    "optimizer_state_shardings",
    "value_and_grad",
]

"""Types of the loss functions that users pass: their arguments, and the forms of their return value.

  mean                       the mean loss of the rows passed to the function
  (sum, weight)              ``weighted``: the weighted sum of their losses, and the sum of their weights
  (either, aux)              ``has_aux``: numbers to report, or observations for a metric
  (the above, collections)   ``has_collections``: the updated collections of the model

``gradients.LossFunction`` calls such a function, and converts each form to a ``Loss``.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol

import jax

from xlstm_jax.common_types import PyTree, Scalar

P = ParamSpec("P")
ApplyFn = Callable[..., PyTree]
LossOutput = Scalar | tuple[Any, Any]  # in any of the forms above


class LocalLossFn(Protocol[P]):
    """Loss function of ``value_and_grad``: the loss of this device's batch, ``loss_fn(params, ...)``."""

    def __call__(self, params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> LossOutput: ...


class MinibatchLossFn(Protocol):
    """Loss function of ``accumulate_gradients``: the loss of a minibatch.

    ``rng`` is None if the caller passed None; collections, if any, come last.
    """

    def __call__(
        self, params: PyTree, minibatch: PyTree, rng: PyTree, /, *collections: Any, **extra_trees: Any
    ) -> Any: ...


class LossFnWithKey(Protocol):
    """Loss function of ``make_train_step`` that draws random numbers: the loss of this device's shard of the batch.

    Collections of the state, if any, come last; further trees are passed by name.
    """

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, rng: jax.Array, /, *collections: Any, **extra_trees: Any
    ) -> Any: ...


class LossFnWithoutKey(Protocol):
    """Loss function of ``make_train_step`` that draws nothing; otherwise as ``LossFnWithKey``."""

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, /, *collections: Any, **extra_trees: Any
    ) -> Any: ...


LossFn = LossFnWithKey | LossFnWithoutKey

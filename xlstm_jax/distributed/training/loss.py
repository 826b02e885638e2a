"""What a loss function returns, read in one place into one type.

  mean                      the mean loss of the rows that the function was given
  (sum, weight)             ``weighted``: the weighted sum of their losses, and the sum of their weights
  (one of these, aux)       ``has_aux``: numbers to report, or what a metric observes
  (all of it, collections)  ``has_collections``: what the model keeps beside its parameters, updated

``LossFunction`` knows which of these a function returns, and calls it. Training, evaluation of a step by ``check_step``
and forecasts all read the result from the fields of a ``Loss``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree
from xlstm_jax.wording import kind_of

P = ParamSpec("P")
ApplyFn = Callable[..., PyTree]
Scalar = jax.Array | float
LossOutput = Scalar | tuple[Any, Any]  # in any of the forms above


class LocalLossFn(Protocol[P]):
    """The loss of this device's batch, ``loss_fn(params, ...)``: what ``value_and_grad`` takes."""

    def __call__(self, params: PyTree, /, *args: P.args, **kwargs: P.kwargs) -> LossOutput: ...


class MinibatchLoss(Protocol):
    """The loss of a minibatch; ``rng`` is None where ``accumulate_gradients`` was given none."""

    def __call__(self, params: PyTree, minibatch: PyTree, rng: PyTree, /) -> LossOutput: ...


class MinibatchLossWithCollections(Protocol):
    """The loss of a minibatch, and updated collections, where ``accumulate_gradients`` was given collections."""

    def __call__(
        self, params: PyTree, minibatch: PyTree, rng: PyTree, collections: PyTree, /
    ) -> tuple[LossOutput, PyTree]: ...


class LossOfParams(Protocol):
    """The loss of this device's shard of the batch."""

    def __call__(self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, rng: jax.Array, /) -> LossOutput: ...


class LossWithCollections(Protocol):
    """The loss of this device's shard of the batch, and the updated collections of the model."""

    def __call__(
        self, params: PyTree, apply_fn: ApplyFn, batch: PyTree, rng: jax.Array, collections: PyTree, /
    ) -> tuple[LossOutput, PyTree]: ...


MinibatchLossFn = MinibatchLoss | MinibatchLossWithCollections  # what ``accumulate_gradients`` takes
LossFn = LossOfParams | LossWithCollections  # what ``make_train_step`` takes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Loss:
    """One loss.

    ``total`` is the mean, or the weighted sum where there is a ``weight``. ``aux`` and ``collections`` are as the loss
    function returned them, and None where it returns none.
    """

    total: Scalar
    weight: Scalar | None = None
    aux: PyTree = None
    collections: PyTree = None


@dataclass(frozen=True)
class LossFunction:
    """A loss function, and what it returns beside a number."""

    fn: Callable[..., Any]
    weighted: bool = False
    has_aux: bool = False
    has_collections: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Loss:
        """Calls the function, and reads what it returns.

        Raises:
          TypeError: it returned something else than the options say.
        """
        returned, weight, aux, collections = self.fn(*args, **kwargs), None, None, None
        if self.has_collections:
            what = "(what it returns without collections, updated collections)"
            returned, collections = _pair(returned, "with collections", what)
        if self.has_aux:
            returned, aux = _pair(returned, "has_aux=True", "(loss, aux)")
        total = returned
        if self.weighted:
            total, weight = _pair(returned, "weighted=True", "(sum, weight)")
        self._check_scalar(total, weight)
        return Loss(total, weight, aux, collections)

    def _check_scalar(self, total: Any, weight: Any) -> None:
        has_aux, weighted = self.has_aux, self.weighted
        if total is None or (weighted and weight is None):
            raise TypeError("loss_fn returned None where a scalar loss is expected; does it end with a return?")
        for value in (total, weight):
            if isinstance(value, tuple | list | dict) or np.shape(value) != ():
                raise TypeError(
                    f"loss_fn returned {jax.tree.map(jax.typeof, value)} where a scalar loss is expected, with "
                    f"{has_aux=} and {weighted=}. A pair (loss, aux) needs has_aux=True, a pair (sum, weight) "
                    "weighted=True."
                )
        if not jnp.issubdtype(dtype := jnp.result_type(total), jnp.floating):
            raise TypeError(f"loss_fn returned a loss of dtype {dtype}; only a real float has a gradient.")


def _pair(returned: Any, option: str, what: str) -> tuple[Any, Any]:
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise TypeError(f"{option}: loss_fn must return {what}, not {kind_of(returned)}.")
    return returned[0], returned[1]

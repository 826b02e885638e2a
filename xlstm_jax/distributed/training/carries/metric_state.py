"""Carry for the state of a metric, updated with the observations of the loss function in each minibatch.

Each device has a local state, and nothing is communicated. No observation outlives its minibatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.training.carries.carry import BatchResult, Carry, Inputs
from xlstm_jax.distributed.training.gradients import LocalResult, LossFunction


@dataclass(frozen=True)
class MetricState(Carry):
    """Carry for the state of a metric: after each minibatch ``state = fold(state, aux)``, from ``initial_state`` on."""

    fold: Callable[[PyTree, PyTree], PyTree]
    initial_state: PyTree
    takes_aux = True

    @classmethod
    def from_inputs(cls, inputs: Inputs) -> Self | None:
        return None if inputs.fold_aux is None else cls(inputs.fold_aux, inputs.metric_state)

    def start(self) -> PyTree:
        return self.initial_state

    def next(self, state: PyTree, loss: LossFunction, args: tuple[PyTree, ...], local: LocalResult) -> PyTree:
        return self.fold(state, local.aux)

    def finish(self, state: PyTree, result: BatchResult) -> BatchResult:
        return result._replace(aux=state)

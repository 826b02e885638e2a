"""The protocol of a carry: state that a device hands from one minibatch to the next.

  start    before the first minibatch   the state, of what the batch begins with (``Inputs``)
  read     in each minibatch            the collections that the loss function gets of the state
  next     after each minibatch         the state for the next minibatch
  finish   after the last minibatch     the state put into the result of the batch

``accumulated`` runs all carries in one loop, and knows none of them. ``carries`` registers each with one line.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.training.gradients import LocalResult
from xlstm_jax.distributed.training.loss import LossFunction

NO_COLLECTIONS: Mapping[str, PyTree] = MappingProxyType({})


class Inputs(NamedTuple):
    """What a batch begins with beside parameters, rows and key; each carry takes a part.

    Attributes:
      axes: the axes of the batch.
      collections: those of the state, by name.
      metric_state: the state of a metric on this device.
      fold_aux: ``metric_state = fold_aux(metric_state, aux)``, run after each minibatch; None where there is no metric.
      read_later: as of ``Accumulation``.
    """

    axes: tuple[str, ...]
    collections: Mapping[str, PyTree] = NO_COLLECTIONS
    metric_state: PyTree = None
    fold_aux: Callable[[PyTree, PyTree], PyTree] | None = None
    read_later: bool = False


class BatchResult(NamedTuple):
    """The result of a batch: the same on all devices, apart from split leaves and the state of a metric.

    ``aux`` is averaged and merged over devices, or the state of a metric.
    """

    loss: jax.Array
    aux: PyTree
    grads: PyTree
    collections: Mapping[str, PyTree]


class Carry:
    """One kind of state, of one batch. A method that a subclass does not write does nothing.

    Attributes:
      takes_aux: whether ``next`` takes the auxiliary output in; otherwise the output is averaged like the loss.
      of_terms: whether gradients must be those of this device's term of the mean over all devices, 1/N of the
        gradients of its own mean.
    """

    takes_aux = False
    of_terms = False

    @classmethod
    def of(cls, inputs: Inputs) -> Self | None:
        """Returns the carry for its part of ``inputs``, or None where there is no such part.

        ``inputs.collections`` are those that no carry before in the registry has taken.
        """
        raise NotImplementedError

    def takes(self) -> Collection[str]:
        """Returns the names of the collections that are handed on here."""
        return ()

    def start(self) -> PyTree:
        """Returns the state before the first minibatch."""
        raise NotImplementedError

    def read(self, state: PyTree) -> Mapping[str, PyTree]:
        """Returns the collections that the loss function gets of the state."""
        return NO_COLLECTIONS

    def differentiating(self, local_result: Callable[..., LocalResult]) -> Callable[..., LocalResult]:
        """Returns a function in place of ``local_result``, for a carry that needs more of a minibatch's gradient."""
        return local_result

    def next(self, state: PyTree, loss: LossFunction, args: tuple[PyTree, ...], local: LocalResult) -> PyTree:
        """Returns the state after a minibatch, in which ``loss(*args)`` was differentiated with the result ``local``.

        ``args`` are the weights, the rows, the key, and the collections if the loss function takes any.
        """
        raise NotImplementedError

    def finish(self, state: PyTree, result: BatchResult) -> BatchResult:
        """Returns the result of the batch with the state after the last minibatch in its place."""
        raise NotImplementedError

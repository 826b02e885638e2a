"""Protocol of a carry: state that a device passes from one minibatch to the next.

  start    before the first minibatch   returns the initial state, made from ``Inputs``
  read     in each minibatch            returns the collections for the loss function
  next     after each minibatch         returns the state for the next minibatch
  finish   after the last minibatch     puts the state into the result of the batch

``accumulated`` runs every carry in one loop, without knowledge of their kinds. ``carries`` registers each by a line.
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
    """Inputs of a batch besides parameters, rows and key; each carry takes a part.

    Attributes:
      axes: the axes of the batch.
      collections: the collections of the state, by name.
      metric_state: the state of a metric on this device.
      fold_aux: ``metric_state = fold_aux(metric_state, aux)``, run after each minibatch; None without a metric.
      read_later: see ``Accumulation``.
    """

    axes: tuple[str, ...]
    collections: Mapping[str, PyTree] = NO_COLLECTIONS
    metric_state: PyTree = None
    fold_aux: Callable[[PyTree, PyTree], PyTree] | None = None
    read_later: bool = False


class BatchResult(NamedTuple):
    """Result of a batch, equal on every device apart from split leaves and the state of a metric.

    ``aux`` is averaged and merged over devices, or is the state of a metric.
    """

    loss: jax.Array
    aux: PyTree
    grads: PyTree
    collections: Mapping[str, PyTree]


class Carry:
    """Base class of a kind of state, for one batch. Methods do nothing unless a subclass overrides them.

    Attributes:
      takes_aux: whether ``next`` consumes the auxiliary output; otherwise the output is averaged like the loss.
      of_terms: whether to differentiate this device's term of the global mean, 1/N of the local mean, instead of the
        local mean.
    """

    takes_aux = False
    of_terms = False

    @classmethod
    def of(cls, inputs: Inputs) -> Self | None:
        """Returns the carry for its part of ``inputs``, or None if ``inputs`` has no such part.

        ``inputs.collections`` excludes collections taken by carries earlier in the registry.
        """
        raise NotImplementedError

    def takes(self) -> Collection[str]:
        """Returns the names of the collections that this carry passes on."""
        return ()

    def start(self) -> PyTree:
        """Returns the state before the first minibatch."""
        raise NotImplementedError

    def read(self, state: PyTree) -> Mapping[str, PyTree]:
        """Returns the collections for the loss function, from the state."""
        return NO_COLLECTIONS

    def differentiating(self, local_result: Callable[..., LocalResult]) -> Callable[..., LocalResult]:
        """Returns a replacement of ``local_result``, for a carry that needs more from the gradient of a minibatch."""
        return local_result

    def next(self, state: PyTree, loss: LossFunction, args: tuple[PyTree, ...], local: LocalResult) -> PyTree:
        """Returns the state after a minibatch, in which ``loss(*args)`` was differentiated with the result ``local``.

        ``args`` are the weights, the rows, the key, and the collections if the loss function takes any.
        """
        raise NotImplementedError

    def finish(self, state: PyTree, result: BatchResult) -> BatchResult:
        """Returns the result of the batch with the final state inserted."""
        raise NotImplementedError

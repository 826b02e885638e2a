"""Protocol of a carry: state that a device passes from one minibatch to the next.

  start    before the first minibatch   returns the initial state, made from ``Inputs``
  read     in each minibatch            returns the collections for the loss function
  next     after each minibatch         returns the state for the next minibatch
  finish   after the last minibatch     puts the state into the result of the batch

``accumulated`` runs the carries in a loop, without knowledge of their kinds. ``carries`` has a line for each class.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Self

import jax

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.training.gradients import LocalResult, LossFunction

NO_COLLECTIONS: Mapping[str, PyTree] = MappingProxyType({})


class Inputs(NamedTuple):
    """Arguments of ``accumulated`` besides parameters, rows and key; each carry uses some of the fields.

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
    """Result of ``accumulated`` for a batch, equal on every device except split leaves and the state of a metric.

    ``aux`` is averaged and merged over devices, or is the state of a metric.
    """

    loss: jax.Array
    aux: PyTree
    grads: PyTree
    collections: Mapping[str, PyTree]


class Carry:
    """Base class of carries: a carry is a kind of state that a device passes from each minibatch to the next.

    Instances are made for each batch.

    Attributes:
      takes_aux: whether ``next`` consumes the auxiliary output; otherwise the output is averaged like the loss.
      overwritten: names of collections whose gradient is their next value, the maximum over devices. Each device then
        differentiates its term of the global mean, 1/N of the local mean, instead of the local mean.
    """

    takes_aux = False
    overwritten: Collection[str] = ()

    @classmethod
    def from_inputs(cls, inputs: Inputs) -> Self | None:
        """Returns a carry for the state in ``inputs`` that this class handles, or None if there is no such state.

        A carry passes state (collections of the model, or the state of a metric) from each minibatch to the next.
        ``inputs.collections`` excludes collections taken by classes earlier in the registry, ``CARRIES``.
        """
        raise NotImplementedError

    def collection_names(self) -> Collection[str]:
        """Returns the names of the model's collections that this carry passes from minibatch to minibatch.

        Returns () for a carry of other state, such as that of a metric.
        """
        return ()

    def start(self) -> PyTree:
        """Returns the state that the first minibatch receives, made from the ``Inputs`` of this carry."""
        raise NotImplementedError

    def read(self, state: PyTree) -> Mapping[str, PyTree]:
        """Returns the collections that the loss function of a minibatch receives, by name, read from ``state``.

        ``state`` is this carry's state before the minibatch. Returns {} for a carry of other state, such as a metric's.
        """
        return NO_COLLECTIONS

    def differentiating(self, local_result: Callable[..., LocalResult]) -> Callable[..., LocalResult]:
        """Returns the function that differentiates the loss of a minibatch; by default ``local_result`` itself.

        A subclass may return a different function with the arguments and the result of ``local_result``: for fp8 scales
        (``OverwrittenScales``) the function also differentiates with respect to the scales. ``accumulated`` calls this
        method for each carry (kind of state that passes from minibatch to minibatch) in turn. The first carry gets the
        function ``gradients.local_result``; each further carry gets the function that the carry before returned.
        """
        return local_result

    def next(self, state: PyTree, loss: LossFunction, args: tuple[PyTree, ...], local: LocalResult) -> PyTree:
        """Returns the state for the next minibatch, after a minibatch that began with ``state``.

        In the minibatch ``loss(*args)`` was differentiated, with the result ``local``. ``args`` are the weights, the
        rows, the key, and the collections if the loss function takes any.
        """
        raise NotImplementedError

    def finish(self, state: PyTree, result: BatchResult) -> BatchResult:
        """Returns ``result``, the result of the batch, with ``state``, the state after the last minibatch, inserted.

        The state becomes ``aux`` (the state of a metric), or goes into ``collections``.
        """
        raise NotImplementedError

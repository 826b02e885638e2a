"""Averages of gradients that the library has returned to the user, so that none is averaged again.

``sync_gradients`` recognises its averages when they are passed in again. Under ``check_vma=True`` an average has the
type of a sum that JAX has made: "equal on all devices". Nothing in the type says whether to divide. So averages are
remembered:

  the average itself        is found by its identity: ``averaged_axes``; ``sync_gradients`` returns it unchanged
  a value computed from it  (scaled, cast, clipped) is found by its equations, and refused: ``check_no_average``

Equations show a changed average only within one trace: inside a ``scan`` or ``jax.jit`` that receives an average, the
average is an argument without equations, and a second ``sync_gradients`` there divides it.

The library's own step does not remember its averages: no code of the user sees them.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
from jax.core import Tracer

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.leaf import Sharded
from xlstm_jax.distributed.data_parallel.trees import sharded_leaves
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.origins import TracedValue, is_gradient, origins


class _Averages(threading.local):
    """Traced averages that are still alive, with the axes over which each was averaged.

    JAX arrays cannot be annotated with their origin. A trace runs in one thread, and several threads may trace at a
    time.
    """

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[jax.Array], frozenset[str]]] = []


AVERAGES = _Averages()
_raises: ContextVar[bool] = ContextVar("_raises", default=True)


def wrong_averages_pass() -> AbstractContextManager[None]:
    """Returns a context in which wrong averages raise no errors, so that their gradients can be measured."""
    return set_context(_raises, False)


def wrong_averages_raise() -> bool:
    """Returns False inside the context ``wrong_averages_pass``, else True.

    True means that a proved mistake in averaging gradients raises an error.
    """
    return _raises.get()


def axes_of_average(grad: Sharded, axes: Sequence[str]) -> frozenset[str]:
    """Returns the axes over which the mean of a gradient over ``axes`` is an average.

    ``grad`` is the gradient in the box of its leaf. The result has ``axes``, the axes over which the backward pass of
    the leaf's gather has averaged, the axes of copies, and the axes of an earlier average.
    """
    gathered = frozenset(grad.axes).difference(grad.model_axes)
    return averaged_axes(grad.value).union(gathered, grad.communication.copied_axes, axes)


def remember_averages(averages: Sequence[jax.Array], over: Sequence[frozenset[str]]) -> None:
    """Remembers averages that are returned to the user, each with the axes in ``over``; only tracers are remembered."""
    # By weak references: a tracer must not outlive its trace. Tracers of ended traces are dropped here.
    alive = [(average, axes) for average, axes in AVERAGES.known if average() is not None]
    traced = [(value, axes) for value, axes in zip(averages, over, strict=True) if isinstance(value, Tracer)]
    AVERAGES.known = alive + [(weakref.ref(value), axes) for value, axes in traced]


def remember_gradients(grads: PyTree, axes: Sequence[str]) -> None:
    """Remembers the gradients in the boxed tree ``grads``, averages over ``axes``, which are returned to the user."""
    live = [leaf for _, leaf in sharded_leaves(grads) if leaf.is_differentiable]
    remember_averages([leaf.value for leaf in live], [axes_of_average(leaf, axes) for leaf in live])


def averaged_axes(value: jax.Array) -> frozenset[str]:
    """Returns the axes over which the library has averaged ``value``, an array compared by identity.

    An empty set for any other array, including an array computed from an average.
    """
    for average, axes in AVERAGES.known:
        if average() is value:
            return axes
    return frozenset()


def check_no_average(path: str, value: jax.Array, axes: Sequence[str]) -> None:
    """Raises if a gradient that would be divided by the number of devices over ``axes`` is an average over an axis.

    Nothing is checked inside the context ``wrong_averages_pass``.

    Args:
      path: the path of the leaf, for the error.
      value: a gradient that does not vary over ``axes`` by type.
      axes: axes over which the gradient counts as a sum.
    Raises:
      ValueError: the gradient was computed from averages over an axis in ``axes``, and not by a later ``jax.grad``;
        names the leaf.
    """
    if not AVERAGES.known or not wrong_averages_raise():
        return
    ends = lambda origin: bool(averaged_axes(origin.tracer_or_atom)) or is_gradient(origin)  # noqa: E731
    found = frozenset[str]().union(
        *[averaged_axes(origin.tracer_or_atom) for origin in origins(TracedValue(value), ends)]
    )
    if twice := tuple(axis for axis in axes if axis in found):
        raise ValueError(
            f"sync_gradients: '{path}' of shape {value.shape} was averaged over {twice} by an earlier sync_gradients "
            "or value_and_grad, then changed (scaled, cast, clipped), and would be divided by the number of devices a "
            "second time. Call sync_gradients once, on the result of jax.grad."
        )

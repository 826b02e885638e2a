"""Averages: gradients that ``sync_gradients`` returned, recognised when they are passed in again.

Under ``check_vma=True`` an average has the type of a sum that JAX has made: "equal on all devices". Nothing in the type
says whether to divide. So averages are remembered:

  the average itself        is found by its identity: ``averaged_axes``; ``sync_gradients`` returns it unchanged
  a value computed from it  (scaled, cast, clipped) is found by its equations, and refused: ``check_no_average``

Equations show a changed average only within one trace: inside a ``scan`` or ``jax.jit`` that receives an average, the
average is an argument without equations, and a second ``sync_gradients`` there divides it.
"""

import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
from jax.core import Tracer

from xlstm_jax.distributed.data_parallel.wire.tracing import set_context
from xlstm_jax.origins import TracedValue, is_gradient, origins


class _Averages(threading.local):
    """Traced arrays returned by ``sync_gradients`` and still alive, with the axes of the average.

    JAX arrays cannot be annotated with their origin. A trace runs in one thread, and several threads may trace at a
    time.
    """

    def __init__(self) -> None:
        self.known: list[tuple[weakref.ref[jax.Array], frozenset[str]]] = []


_averages = _Averages()
_raises: ContextVar[bool] = ContextVar("_raises", default=True)


def wrong_averages_pass() -> AbstractContextManager[None]:
    """Returns a context in which wrong averages raise no errors, so that their gradients can be measured."""
    return set_context(_raises, False)


def wrong_averages_raise() -> bool:
    """Returns whether a proved mistake in averaging raises an error here."""
    return _raises.get()


def averaged_axes(value: jax.Array) -> frozenset[str]:
    """Returns the axes over which ``value`` is known to be averaged: the same array, not a value computed from it."""
    for average, axes in _averages.known:
        if average() is value:
            return axes
    return frozenset()


def remember(values: Sequence[jax.Array], axes: Sequence[frozenset[str]]) -> None:
    """Remembers traced averages ``values[i]`` over ``axes[i]``."""
    # Weak references: a tracer must not outlive its trace. References to tracers of ended traces are dropped here.
    alive = [(average, over) for average, over in _averages.known if average() is not None]
    traced = [(value, over) for value, over in zip(values, axes, strict=True) if isinstance(value, Tracer)]
    _averages.known = alive + [(weakref.ref(value), over) for value, over in traced]


def check_no_average(path: str, value: jax.Array, axes: Sequence[str]) -> None:
    """Raises if a gradient that would be divided by the number of devices over ``axes`` is an average over an axis.

    Args:
      path: the path of the leaf, for the error.
      value: a gradient that does not vary over ``axes`` by type.
      axes: axes over which the gradient counts as a sum.
    Raises:
      ValueError: the gradient was computed from averages over an axis in ``axes``, and not by a later ``jax.grad``;
        names the leaf.
    """
    if not _averages.known or not wrong_averages_raise():
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

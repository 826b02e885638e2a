"""``RunningLoss``: facts on the loss function under trace, set by ``value_and_grad`` and read by each gather.

The facts are in a context variable, because the user's model runs between ``value_and_grad``, which has the axes, and
the gathers. The variable is read while a model is traced, never while a step runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flax.core.tracers import current_trace

from xlstm_jax.introspection import inside_branch

OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection whose gradient is its next value


@dataclass(frozen=True)
class RunningLoss:
    """Facts on the loss function under trace, whose gradient will be averaged over ``axes``.

    An evaluation has no ``axes``, since no gradient is averaged; its batch is split over ``evaluated_axes``.
    ``is_reference`` marks the loss of a comparison with one device: its values have no varying types, whatever the
    step has. ``overwrites``: the state of fp8 products is differentiated with the parameters.

    ``model_axes`` are the model's own axes in the boxes of the loss's parameters. (A model may put other boxes, without
    this information, around parameters.) Gathers append the paths of leaves gathered within a branch
    (``lax.cond``) to ``gathered_in_branches``, and (shard, (trace, options), gathered value) to ``gathers``.
    """

    axes: tuple[str, ...] = ()
    evaluated_axes: tuple[str, ...] = ()
    model_axes: frozenset[str] = frozenset()
    gathered_in_branches: list[str] = field(default_factory=list)
    gathers: list[tuple[Any, Any, Any]] = field(default_factory=list)
    is_reference: bool = False
    overwrites: bool = False

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which the batch of the loss or evaluation is split; () outside of both."""
        return self.axes or self.evaluated_axes

    def gathered_once(self, shard: Any, communication: Any, gather: Callable[[], Any], path: str) -> Any:
        """Returns ``gather()`` for the leaf at ``path``, or the earlier result for the same shard.

        A loss that reads a parameter twice (a tied embedding) then gathers it once, and JAX adds the gradients of both
        reads before a single reduce-scatter. An array made within a transformation (``nn.remat``, ``lax.scan``) does
        not exist outside of the transformation or in another one, so each transformation gathers separately.
        """
        # Outside of a loss, `self` is the context variable's default, which outlives every trace and must not hold
        # tracers.
        if not self.axes:
            return gather()
        if inside_branch():
            self.gathered_in_branches.append(path or "a parameter")
        key = (current_trace(), communication)
        # Compared by `is`, and the list holds the shards: the `id` of a deleted shard may be reused.
        for gathered_shard, gather_key, full in self.gathers:
            if gathered_shard is shard and gather_key == key:
                return full
        full = gather()
        self.gathers.append((shard, key, full))
        return full

    def has_gathered(self, shard: Any, how: Any) -> bool:
        """Returns whether ``gathered_once`` would return an earlier result."""
        key = (current_trace(), how)
        return any(gathered_shard is shard and gather_key == key for gathered_shard, gather_key, _ in self.gathers)


_running_loss: ContextVar[RunningLoss] = ContextVar("_running_loss", default=RunningLoss())  # noqa: B039  # never filled


def inside_loss(loss: RunningLoss) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which ``running_loss()`` returns ``loss``."""
    return set_context(_running_loss, loss)


def running_loss() -> RunningLoss:
    """Returns the facts on the loss function under trace; outside of a loss, a ``RunningLoss`` without axes."""
    return _running_loss.get()


@contextlib.contextmanager
def set_context(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets a context variable, and resets it at the end."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

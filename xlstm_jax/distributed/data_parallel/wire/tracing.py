"""The loss function that runs, which each gather reads while it is traced.

The loss function is a context variable: between ``value_and_grad``, which has the axes, and the gathers stands the
user's model. All of this happens while a model is traced, never while a step runs.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flax.core.tracers import current_trace

from xlstm_jax.foreign import inside_branch

OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection, of which the gradient is the next value


@dataclass(frozen=True)
class RunningLoss:
    """The loss function that runs: its gradient is averaged over ``axes`` afterwards.

    An evaluation has no ``axes``, since no gradient is averaged; its batch is split over ``evaluated_axes``. The loss
    that ``check_step`` compares with (``is_reference``) has no types, whatever the step has. Where the state of fp8
    products is differentiated with the parameters, the loss ``overwrites`` it.

    ``model_axes`` are the axes that the boxes of its parameters name as the model's own. (A model may put other boxes
    around its parameters, which do not name them.) Gathers add the paths of the leaves that they gather within a branch
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
        """The axes along which the batch of the loss or evaluation differs; () if none runs."""
        return self.axes or self.evaluated_axes

    def gathered_once(self, shard: Any, how: Any, gather: Callable[[], Any], path: str) -> Any:
        """``gather()`` of the leaf at ``path``, or its result from before, for the same shard.

        A loss that reads a parameter twice (a tied embedding) then gathers it once, and JAX adds up the gradients of
        both reads before a single reduce-scatter. An array that was made within a transformation (``nn.remat``,
        ``lax.scan``) does not exist outside of it or in another transformation: each of them gathers by itself.
        """
        # Outside of a loss `self` is the default of the context variable. It outlives every trace, and must hold no
        # tracer.
        if not self.axes:
            return gather()
        if inside_branch():
            self.gathered_in_branches.append(path or "a parameter")
        key = (current_trace(), how)
        # By `is`, and the list holds the shards: the `id` of a shard that is gone could be that of another by now.
        for known, of, whole in self.gathers:
            if known is shard and of == key:
                return whole
        whole = gather()
        self.gathers.append((shard, key, whole))
        return whole


_running_loss: ContextVar[RunningLoss] = ContextVar("_running_loss", default=RunningLoss())  # noqa: B039  # never filled


def inside_loss(loss: RunningLoss) -> contextlib.AbstractContextManager[None]:
    """A context in which ``loss`` is the loss function that runs."""
    return set_context(_running_loss, loss)


def running_loss() -> RunningLoss:
    """The loss function that runs; a ``RunningLoss`` without axes if none does."""
    return _running_loss.get()


@contextlib.contextmanager
def set_context(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets a context variable, and sets it back at the end."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

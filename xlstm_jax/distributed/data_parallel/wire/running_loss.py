"""``RunningLoss``: facts on the loss function under trace, set by ``value_and_grad`` and read by each gather.

The facts are in a context variable, because the user's model runs between ``value_and_grad``, which has the axes, and
the gathers. The variable is read while a model is traced, never while a step runs.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

OVERWRITTEN = "_overwrite_with_gradient"  # Flax's collection whose gradient is its next value


@dataclass(frozen=True)
class RunningLoss:
    """Facts on the loss function under trace, whose gradient will be averaged over ``axes``.

    An evaluation has no ``axes``, since no gradient is averaged; its batch is split over ``evaluated_axes``.
    ``is_reference`` marks the loss of a comparison with one device: its values have no varying types, whatever the
    step has. ``overwrites``: the state of fp8 products is differentiated with the parameters.

    ``model_axes`` are the model's own axes in the boxes of the loss's parameters. (A model may put other boxes, without
    this information, around parameters.) Gathers append the paths of leaves gathered within a branch
    (``lax.cond``) to ``gathered_in_branches``, and (shard, key, gathered value) to ``gathers``: ``leaf.earlier_gather``
    defines the key. ``trace`` is the trace in which the loss is called: a gather in another trace may be in a branch.
    """

    axes: tuple[str, ...] = ()
    evaluated_axes: tuple[str, ...] = ()
    model_axes: frozenset[str] = frozenset()
    gathered_in_branches: list[str] = field(default_factory=list)
    gathers: list[tuple[Any, Any, Any]] = field(default_factory=list)
    is_reference: bool = False
    overwrites: bool = False
    trace: Any = None

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes over which the batch of the loss or evaluation is split; () outside of both."""
        return self.axes or self.evaluated_axes


# Outside of a loss: a ``RunningLoss`` without axes.
RUNNING_LOSS: ContextVar[RunningLoss] = ContextVar("RUNNING_LOSS", default=RunningLoss())  # noqa: B039  # never filled

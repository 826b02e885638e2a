"""What surrounds a gather while it is traced: the loss function that runs, and the functions that are being called.

The loss function is a context variable: between ``value_and_grad``, which knows the axes, and the gathers stands the
user's model. Functions are read off the stack, as no trace tells of the branch that it belongs to. All of it is asked
while a model is traced, never in a step.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from flax.core.tracers import current_trace


@dataclass(frozen=True)
class RunningLoss:
    """The loss function that runs: its gradient is averaged over ``axes`` afterwards.

    An evaluation has ``evaluated_axes`` in their place, those of its batch: no gradient of it is averaged. The loss
    that ``check_step`` compares with (``is_reference``) has no types, whatever the step has. It runs on one device, on
    the step's batch, which may have been ``laid_out_for`` the sizes of the step's axes (zigzag).

    ``model_axes`` are those of its parameters, by the boxes that it is given: a model may put other boxes around them,
    which do not say it. Gathers add the paths of the leaves that they gather within a branch (``lax.cond``) to
    ``gathered_in_branches``. ``gathers`` has what each shard was gathered to, with how, and in which trace.
    """

    axes: tuple[str, ...] = ()
    evaluated_axes: tuple[str, ...] = ()
    model_axes: frozenset[str] = frozenset()
    gathered_in_branches: list[str] = field(default_factory=list)
    gathers: list[tuple[Any, Any, Any]] = field(default_factory=list)
    is_reference: bool = False
    laid_out_for: Mapping[str, int] = field(default_factory=dict)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which the batch differs, of a loss or of an evaluation; () where neither runs."""
        return self.axes or self.evaluated_axes

    def gathered_once(self, shard: Any, how: Any, gather: Callable[[], Any], path: str) -> Any:
        """``gather()`` of the leaf at ``path``, or what it returned for the same shard before.

        A loss that reads a parameter twice (a tied embedding) then has one gather of it, and JAX adds up the gradients
        of both reads before the one reduce-scatter. An array that was made within a transformation (``nn.remat``,
        ``lax.scan``) does not exist outside of it, nor in another one: each of them gathers by itself.
        """
        if not self.axes:
            return gather()
        if inside_branch():
            self.gathered_in_branches.append(path or "a parameter")
        key = (current_trace(), how)
        for known, of, whole in self.gathers:
            if known is shard and of == key:
                return whole
        whole = gather()
        self.gathers.append((shard, key, whole))
        return whole


_running_loss: ContextVar[RunningLoss] = ContextVar("_running_loss", default=RunningLoss())  # noqa: B039  # never filled


def inside_loss(loss: RunningLoss) -> contextlib.AbstractContextManager[None]:
    """While that loss function runs."""
    return set_context(_running_loss, loss)


def running_loss() -> RunningLoss:
    """The loss function that runs; with no axes where none does."""
    return _running_loss.get()


@contextlib.contextmanager
def set_context(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Sets a context variable, and sets it back at the end."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Functions of JAX, with the files that they are in.
BRANCHES = {
    ("cond", "conditionals.py"),
    ("_cond", "conditionals.py"),
    ("switch", "conditionals.py"),
    ("_switch", "conditionals.py"),
    ("while_loop", "loops.py"),
}
_NAMES_OF_BRANCHES = frozenset(name for name, _ in BRANCHES)


def running_functions() -> Iterator[FrameType]:
    """The frames of the functions that are being called, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def inside_branch() -> bool:
    """Whether this code is traced as a branch of ``lax.cond`` or ``lax.switch``, or within ``lax.while_loop``."""
    return any(
        (code.co_name, os.path.basename(code.co_filename)) in BRANCHES
        for code in (frame.f_code for frame in running_functions())
        if code.co_name in _NAMES_OF_BRANCHES
    )

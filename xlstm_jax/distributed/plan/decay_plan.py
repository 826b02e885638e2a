"""Column of a plan about weight decay: finds the parameters that the optimizer shrinks if their gradient is 0.

With a gradient of 0 and new moments an update is -lr * wd * p for a decaying parameter p, and 0 for a parameter without
decay. The section traces ``tx.init`` and ``tx.update`` at the shapes of the parameters, and evaluates the program on
arrays with equal entries (``uniform_arrays``): with gradients of 0 for two values of p, and with a gradient of 0.5,
which shows whether the step moves the parameter at all. Steps are repeated, because a schedule may begin at a learning
rate of 0. So masks, ``inject_hyperparams``, ``partition`` and users' transforms are recognised by effect, not by name.

Tracing takes seconds for hundreds of leaves, so a plan traces when its text or ``decay`` is first read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from rich.console import RenderableType

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel.trees import leaves_with_path
from xlstm_jax.distributed.optimizers.transforms import call_update
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan
from xlstm_jax.distributed.plan.section import Section, WhenRead
from xlstm_jax.distributed.plan.uniform_arrays import evaluate
from xlstm_jax.formatting import listed, path_pattern, rich_table

MAX_STEPS = 32


@dataclass(frozen=True)
class DecayPlan:
    """Weight decay of some parameters.

    Attributes:
      decays: "yes", "no", or "?" if the optimizer's program does not decide.
      leaves: paths of the parameters.
      reason: the reason for "?"; else "".

    >>> print(DecayPlan("yes", ("mlp/kernel",), ""))
    yes: mlp/kernel
    """

    decays: str
    leaves: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.decays}{why}: {', '.join(self.leaves)}"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "DecayPlan":
        return cls(**{**fields, "leaves": tuple(fields["leaves"])})


def decay_plans(tx: optax.GradientTransformation, params: PyTree) -> tuple[DecayPlan, ...]:
    """Returns which parameters an optax transform decays: a ``DecayPlan`` for each verdict with its reason.

    A ``DecayPlan`` has the verdict ("yes", "no", or "?" with a reason), and the paths of the parameters with this
    verdict and reason. The order is that of the first parameters in the tree. If the transform raises an error, the
    verdict is "?" for every parameter.

    Args:
      tx: the transform.
      params: arrays or abstract, without boxes: only shapes and dtypes are read.
    """
    paths = [path for path, _ in leaves_with_path(params)]
    try:
        verdicts = _verdicts(tx, params, len(paths))
    # A user's transform may raise anything: it may need extra arguments, or values. Other columns of the plan remain.
    except Exception as error:
        verdicts = [("?", f"tx.update raised {type(error).__name__}")] * len(paths)
    by_verdict: dict[tuple[str, str], list[str]] = {}
    for path, verdict in zip(paths, verdicts, strict=True):
        by_verdict.setdefault(verdict, []).append(path)
    return tuple(DecayPlan(decays, tuple(leaves), reason) for (decays, reason), leaves in by_verdict.items())


def _verdicts(tx: optax.GradientTransformation, params: PyTree, count: int) -> list[tuple[str, str]]:
    """Returns (decays, reason) for each of the ``count`` leaves of ``params``, in tree order.

    ``decays`` is "yes", "no" or "?"; ``reason`` explains "?", else "". Evaluates up to ``MAX_STEPS`` steps of the
    optimizer, until a step decides every leaf. A leaf that no step decides has the verdict "?".
    """
    init = jax.make_jaxpr(tx.init)(params)
    state = jax.eval_shape(tx.init, params)
    update = jax.make_jaxpr(partial(call_update, tx))(params, state, params)
    verdicts: list[tuple[str, str]] = [("?", f"no update in the first {MAX_STEPS} steps")] * count
    open_leaves = set(range(count))
    runs = [(0.0, 1.0), (0.0, 2.0), (0.5, 1.0)]  # gradient, parameter
    states = [evaluate(init.jaxpr, init.consts, [np.float64(p)] * count) for _, p in runs]
    for _ in range(MAX_STEPS):
        updates = []
        for run, (gradient, p) in enumerate(runs):
            args = [*[np.float64(gradient)] * count, *states[run], *[np.float64(p)] * count]
            results = evaluate(update.jaxpr, update.consts, args)
            updates.append(results[:count])
            states[run] = results[count:]
        for leaf in sorted(open_leaves):
            verdict = _verdict(*(of_run[leaf] for of_run in updates))
            if verdict is not None:
                verdicts[leaf] = verdict
                open_leaves.remove(leaf)
        if not open_leaves:
            break
    return verdicts


def _verdict(of_one: Any, of_two: Any, moved: Any) -> tuple[str, str] | None:
    """Returns (decays, reason) by the updates of a leaf in one step; None if the step moves nothing.

    ("yes", "") if the updates without gradient are negative and proportional to the parameter; ("no", "") if both are
    0, and ``moved`` is not 0; None if all three are 0; else ("?", reason).

    Args:
      of_one, of_two: the updates of parameters of value 1 and of value 2, with gradient 0.
      moved: the update of a parameter of value 1 with gradient 0.5. Each update is a float, or ``UNKNOWN`` or
        ``FINITE`` if the update cannot be evaluated.
    """
    if not isinstance(of_one, float) or not isinstance(of_two, float) or not np.isfinite([of_one, of_two]).all():
        return "?", "the update without a gradient cannot be evaluated"
    if of_one == of_two == 0:
        # A step with a learning rate of 0 does not show whether the parameter decays.
        return None if isinstance(moved, float) and moved == 0 else ("no", "")
    if of_one < 0 and np.isclose(of_two, 2 * of_one, rtol=1e-4):
        return "yes", ""
    return "?", "the update without a gradient is not proportional to the parameter"


class DecaySection(Section[DecayPlan]):
    """Plan section, and column, of weight decay; empty for a plan without an optimizer."""

    name = "decay"
    column = "decays"

    def __init__(self) -> None:
        self.plans: Sequence[DecayPlan] = ()

    def optimizer(self, tx: optax.GradientTransformation, params: PyTree) -> None:
        self.plans = WhenRead(partial(decay_plans, tx, params))

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> Sequence[DecayPlan]:
        return self.plans

    @staticmethod
    def cells(entries: Sequence[DecayPlan]) -> Mapping[str, str]:
        return {path: entry.decays for entry in entries for path in entry.leaves}

    @staticmethod
    def table(entries: Sequence[DecayPlan]) -> RenderableType | None:
        unclear = [entry for entry in entries if entry.reason]
        rows = [[listed(dict.fromkeys(map(path_pattern, e.leaves))).replace("'", ""), e.reason] for e in unclear]
        return rich_table("Leaves whose weight decay is unknown", ["leaves", "why"], rows, left=2) if rows else None

    from_json = staticmethod(DecayPlan.from_json)

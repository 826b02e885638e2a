"""Lint of a step: compares the step's forecast with its plan, and reports needless costs.

    forecast(step, *args), plan_sharding(model, ...)  --lint-->  [Finding(rule, where, text, cure, bytes), ...]
    lint.raise_if(findings)                                      a refusal, for scripts

The plan describes what the model requests, the forecast what the compiler made. The rules that compare both are in the
table ``rules.RULES``. Leaves that differ only in the number of their module (``block_0``, ``block_1``, ...) share a
finding. Findings of a rule that differ only in numbers, with the same cure, are merged.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.forecast.forecasting import Forecast
from xlstm_jax.forecast.training.linting.rules import RULES
from xlstm_jax.forecast.training.linting.step import Rule, Step
from xlstm_jax.formatting import format_bytes, listed, rich_table

_NUMBER = re.compile(r"\d[\d.,]*\d|\d|\b(?:[KMGT]iB|B|ms|us)\b")  # numbers and units


@dataclass(frozen=True)
class Finding:
    """A needless cost of a step.

    Attributes:
      rule: name of the rule in ``RULES``.
      where: path of a leaf, ``block_*/up/kernel`` for several equal leaves; else a module, or the compiler's name of
        an operation.
      text: description of the cost, with numbers.
      cure: suggested change.
      bytes: cost per device: traffic per step for communication, memory for kept arrays; 0 for FLOP.

    >>> str(Finding("wide-gather", "head/kernel", "travels as f32.", "Pass gather_dtype=bfloat16.", bytes=2**20))
    'wide-gather: head/kernel: travels as f32. Pass gather_dtype=bfloat16.'
    """

    rule: str
    where: str
    text: str
    cure: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.text} {self.cure}"


class LintError(ValueError):
    """Error of a step with findings; the text lists the findings, ``findings`` is a tuple of ``Finding``.

    >>> from xlstm_jax.forecast.training import lint
    >>> found = Finding("wide-gather", "head/kernel", "travels as f32.", "Pass gather_dtype=bfloat16.", bytes=2**20)
    >>> lint.raise_if([found])
    Traceback (most recent call last):
    xlstm_jax.forecast.training.linting.lint.LintError: 1 finding
    wide-gather: head/kernel: travels as f32. Pass gather_dtype=bfloat16.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join([_counted(findings), *map(str, findings)]))
        self.findings = tuple(findings)

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is unpickled (in another process, say) by a call with its text, unless the arguments are given.
        return type(self), (self.findings,), self.__dict__


def table(findings: Sequence[Finding]) -> RenderableType:
    """Returns a table for ``rich`` with a row for each finding: rule, place, text and cure, bytes."""
    rows = [
        [finding.rule, finding.where, f"{finding.text} {finding.cure}", format_bytes(finding.bytes)]
        for finding in findings
    ]
    return rich_table(_counted(findings), ["rule", "where", "finding, and cure", "bytes"], rows, left=3)


def _counted(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' * (len(findings) != 1)}"


def lint(
    forecast: Forecast,
    plan: ShardingPlan,
    *,
    num_minibatches: int = 1,
    keep_gathered: bool = False,
    imbalance: float = 1.0,
) -> list[Finding]:
    """Finds needless costs of a step, compared with its sharding plan.

    >>> from xlstm_jax.forecast import forecast
    >>> from xlstm_jax.forecast.training import Workload
    >>> model, x = nn.Dense(1021), jax.ShapeDtypeStruct((8, 1023), jnp.float32)
    >>> loss_fn = lambda params, apply_fn, x, rng: apply_fn({"params": params}, x).mean()
    >>> step, args = Workload(model, optax.sgd(0.1), x, loss_fn).build_step(mesh)
    >>> [(found.where, found.cure) for found in lint(forecast(step, *args), plan_sharding(model, mesh.shape, x))]
    [('kernel', "Pass uneven='pad', or give its dim of 1023 the size 1024, which 8 divides.")]

    Args:
      forecast: forecast of the training step.
      plan: plan of the same model on the same mesh.
      num_minibatches: number of minibatches of the step, each of which gathers anew; as for ``make_train_step``.
      keep_gathered: whether gathered weights are kept from forward to backward on purpose, to save the second gather.
      imbalance: imbalance of experts, as for ``dispatch``: rows of the busiest device over the mean.
    Returns:
      The findings by rule, within a rule the largest first; empty for a well-made step.
    Raises:
      ValueError: the plan is for another mesh or another model than the forecast, or ``num_minibatches`` is below 1.
    """
    step = Step(forecast, plan, num_minibatches, keep_gathered, imbalance)
    _check_same_step(step)
    # Findings with the same cause differ only in numbers, for example for layers of several sizes.
    causes = defaultdict(list)
    for finding in (finding for rule in RULES.values() for finding in findings_of(rule, step)):
        causes[finding.rule, _NUMBER.sub("", finding.text), finding.cure].append(finding)
    merged = []
    for first, *others in causes.values():
        if others:
            sizes = [f"{other.where} ({format_bytes(other.bytes)})" if other.bytes else other.where for other in others]
            where = ", ".join(dict.fromkeys(other.where for other in (first, *others)))
            text = f"{first.text} These are the numbers of {first.where}; likewise {', '.join(sizes)}."
            nbytes = sum(other.bytes for other in (first, *others))
            first = dataclasses.replace(first, where=where, text=text, bytes=nbytes)
        merged.append(first)
    return merged


def findings_of(rule: Rule, step: Step) -> list[Finding]:
    """Runs a rule on a step, and returns a ``Finding`` for each defect that the rule yields, most bytes first.

    A defect without a cure gets the rule's default cure.
    """
    findings = [Finding(rule.name, f.where, f.text, f.cure or rule.cure, round(f.bytes)) for f in rule.find(step)]
    return sorted(findings, key=lambda finding: -finding.bytes)


def raise_if(findings: Iterable[Finding], rules: Iterable[str] | None = None) -> None:
    """Raises if there are findings: the last line of a script that guards a step. Also ``lint.raise_if``.

    Args:
      findings: result of ``lint``.
      rules: names of the rules that count; None: every rule.
    Raises:
      LintError: a finding counts; the text lists each finding that counts.
      ValueError: a name in ``rules`` is unknown; the error lists the known names.
    """
    # A single string is a name, not a list of letters.
    wanted = list(RULES) if rules is None else [rules] if isinstance(rules, str) else list(rules)
    if unknown := [name for name in wanted if name not in RULES]:
        raise ValueError(f"rules: there is no rule {unknown[0]!r}; there are {', '.join(RULES)}.")
    if refused := [finding for finding in findings if finding.rule in wanted]:
        raise LintError(refused)


lint.raise_if = raise_if  # type: ignore[attr-defined] # functions have attributes, types of functions have none


def _check_same_step(step: Step) -> None:
    """Raises a ``ValueError`` if the forecast and the plan of ``step`` do not belong together.

    They must have the same mesh, and the plan must have at least one of the leaves that the step gathers, if it gathers
    any. Also raised if ``num_minibatches`` is below 1.
    """
    # The caller makes forecast and plan separately, so they may belong to different steps.
    forecast_mesh, plan_mesh = dict(step.forecast.axis_sizes), dict(step.plan.axis_sizes)
    if forecast_mesh != plan_mesh:
        raise ValueError(
            f"the forecast is of the mesh {forecast_mesh}, the plan of {plan_mesh}. "
            "Make the plan for the mesh of the step."
        )
    if step.num_minibatches < 1:
        raise ValueError(f"num_minibatches={step.num_minibatches} must be 1 or more; pass that of the step.")
    # A single common leaf suffices: a plan may lack the leaves of other trees that a step gathers.
    if step.gathers and not any(path in step.rows for path in step.gathers):
        raise ValueError(
            f"the step gathers {listed(step.gathers)}, but the plan has none of these leaves; its parameters are "
            f"{listed(step.rows)}. Make the plan of the model that the step trains."
        )

"""What the lint finds: a finding, the error that refuses a step for its findings, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType

from xlstm_jax.wording import format_bytes, rich_table


@dataclass(frozen=True)
class Finding:
    """Something that costs more than it must.

    Attributes:
      rule: its name, as in ``RULES``.
      where: the path of a leaf, ``block_*/up/kernel`` for several that are alike; else a module, or the name that the
        compiler gives an operation.
      text: what was found, with the numbers.
      cure: what to change.
      bytes: that it costs each device: of a step's traffic for what travels, of memory for what is kept; 0 for FLOP.

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
    """A step has findings; its text lists them, ``findings`` has them as data.

    >>> from xlstm_jax.distributed.forecast import lint
    >>> found = Finding("wide-gather", "head/kernel", "travels as f32.", "Pass gather_dtype=bfloat16.", bytes=2**20)
    >>> lint.raise_if([found])
    Traceback (most recent call last):
    xlstm_jax.distributed.forecast.linting.findings.LintError: 1 finding
    wide-gather: head/kernel: travels as f32. Pass gather_dtype=bfloat16.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("\n".join([_counted(findings), *map(str, findings)]))
        self.findings = tuple(findings)


def table(findings: Sequence[Finding]) -> RenderableType:
    """The findings as a table for ``rich``."""
    rows = [
        [finding.rule, finding.where, f"{finding.text} {finding.cure}", format_bytes(finding.bytes)]
        for finding in findings
    ]
    return rich_table(_counted(findings), ["rule", "where", "what, and what to do", "bytes"], rows, left=3)


def _counted(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' * (len(findings) != 1)}"

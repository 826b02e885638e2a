"""Optimizers that need whole matrices, in a plan: the matrices, their owners, and why other leaves are no matrices."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from xlstm_jax.distributed.optimizers.matrices.layout import MatrixReport, noting_matrices
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan
from xlstm_jax.distributed.plan.section import Section
from xlstm_jax.wording import listed, path_pattern, rich_table


@dataclass(frozen=True)
class MatrixPlan:
    """Matrices of one form, or leaves that are none for one reason.

    Attributes:
      rule: of the optimizer, as "muon".
      leaves: paths.
      count: how many matrices; 0 where the leaves are none.
      rows, columns: of each, rows being the shorter side; 0 where the leaves are none.
      owners: devices that share the work, each with ``per_owner`` places; the other devices do the same work again.
      reason: why the leaves are no matrices, "" where they are.

    >>> print(MatrixPlan("muon", ("blocks/up/kernel",), 24, 2048, 8192, owners=16, per_owner=2, reason=""))
    24 matrices of 2048 x 8192, muon: 2 places on each of 16 owners, 25% of them idle; the busiest has 1.33 x the mean
    """

    rule: str
    leaves: tuple[str, ...]
    count: int
    rows: int
    columns: int
    owners: int
    per_owner: int
    reason: str

    @property
    def idle_fraction(self) -> float:
        """Of the owners' places those that hold no matrix, and cost as much as the others: 0 to 1."""
        return 1 - self.count / (self.owners * self.per_owner) if self.count else 0.0

    @property
    def workless_fraction(self) -> float:
        """Of the owners those that have no matrix of this form, though maybe one of another: 0 to 1."""
        # Owners fill their places in order, so that those without a matrix are the last ones.
        return 1 - -(-self.count // self.per_owner) / self.owners if self.count else 0.0

    def __str__(self) -> str:
        if not self.count:
            return f"no matrices: {self.reason}"
        what = f"{self.count} matrices" if self.count > 1 else "1 matrix"
        what += f" of {self.rows} x {self.columns}, {self.rule}"
        if self.owners == 1:
            return f"{what}: every device does the same work"
        places = f"{self.per_owner} place{'s' * (self.per_owner > 1)}"
        spread = f", {self.workless_fraction:.0%} of them idle" if self.workless_fraction else ""
        # All wait for the owner whose places are all taken.
        spread += f"; the busiest has {1 / (1 - self.idle_fraction):.3g} x the mean" if self.idle_fraction else ""
        return f"{what}: {places} on each of {self.owners} owners{spread}"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "MatrixPlan":
        return cls(**{**fields, "leaves": tuple(fields["leaves"])})


def matrix_plans(reports: Iterable[MatrixReport]) -> tuple[MatrixPlan, ...]:
    """For each optimizer its matrices by form, those with the most work first, then the leaves that are no matrices."""
    plans = []
    for report in reports:
        for group in report.groups:
            leaves = tuple(leaf.path for leaf in group.leaves)
            # Where layers are split over devices, a group has the matrices of one part of the mesh; a plan counts all.
            parts = sum(report.choices[path].count for path in leaves) // group.count
            size = (group.form.rows, group.form.columns)
            plans.append(
                MatrixPlan(report.rule, leaves, parts * group.count, *size, parts * group.owners, group.per_owner, "")
            )
        by_reason = defaultdict(list)
        for path, choice in report.choices.items():
            if not choice.dims:
                by_reason[choice.reason].append(path)
        plans += [MatrixPlan(report.rule, tuple(paths), 0, 0, 0, 0, 0, why) for why, paths in by_reason.items()]
    return tuple(plans)


def matrices_table(plans: Sequence[MatrixPlan]) -> RenderableType:
    """A line for each form of matrices, and for each reason of leaves that are none."""
    rows = [[listed(dict.fromkeys(map(path_pattern, plan.leaves))).replace("'", ""), str(plan)] for plan in plans]
    return rich_table("Matrices that are updated whole", ["leaves", "what they are, and who owns them"], rows, left=2)


class MatrixSection(Section[MatrixPlan]):
    """What optimizers that need whole matrices report while they are initialised."""

    name = "matrices"

    def __init__(self) -> None:
        self.reports: list[MatrixReport] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        with noting_matrices() as self.reports:
            yield

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> tuple[MatrixPlan, ...]:
        return matrix_plans(self.reports)

    table = staticmethod(matrices_table)
    from_json = staticmethod(MatrixPlan.from_json)

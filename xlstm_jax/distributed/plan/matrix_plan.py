"""Section of a sharding plan about optimizers that update unsharded matrices, such as ``muon``.

The section lists the matrices, the devices that compute the updates (owners), and the reason for each leaf that the
optimizer does not treat as a matrix.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from xlstm_jax.distributed.optimizers.matrices.layout import MatrixReport, recording_matrices
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan
from xlstm_jax.distributed.plan.section import Section
from xlstm_jax.formatting import listed, path_pattern, rich_table


@dataclass(frozen=True)
class MatrixPlan:
    """Entry for matrices of equal shape, or for leaves that for the same reason are not matrices.

    Attributes:
      rule: name of the optimizer, such as "muon".
      leaves: paths of the leaves that contain the matrices, or are not matrices.
      count: number of matrices; 0 for leaves that are not matrices.
      rows, columns: sizes of each matrix, ``rows`` the shorter side; 0 for leaves that are not matrices.
      owners: number of devices that share the updates; the remaining devices repeat the same work.
      per_owner: number of places for matrices on each owner; places may be empty.
      reason: why the leaves are not matrices; "" for matrices.

    >>> print(MatrixPlan("muon", ("blocks/up/kernel",), 32, 2048, 8192, owners=16, per_owner=2, reason=""))
    32 matrices of 2048 x 8192 (muon): at most 2 on each of 16 devices
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
        """Fraction of places without a matrix among the places of the owners (devices that compute updates): 0 to 1.

        Each owner has ``per_owner`` places, each for the update of a matrix. An empty place costs as much as a full
        place. 0 for an entry without matrices.
        """
        return 1 - self.count / (self.owners * self.per_owner) if self.count else 0.0

    @property
    def workless_fraction(self) -> float:
        """Fraction of the owners (devices that compute updates) without a matrix of this shape: 0 to 1.

        Such an owner may have a matrix of a different shape. 0 for an entry without matrices.
        """
        # Owners fill their places in order, so the owners without a matrix are the last.
        return 1 - -(-self.count // self.per_owner) / self.owners if self.count else 0.0

    def __str__(self) -> str:
        if not self.count:
            return f"no matrices: {self.reason}"
        text = f"{self.count} matrices" if self.count > 1 else "1 matrix"
        text += f" of {self.rows} x {self.columns} ({self.rule})"
        if self.owners == 1:
            return f"{text}: every device computes every update"
        spread = f", {self.workless_fraction:.0%} of which have none" if self.workless_fraction else ""
        # All owners wait for an owner whose places are full.
        spread += f"; the busiest computes {1 / (1 - self.idle_fraction):.3g} x the mean" if self.idle_fraction else ""
        return f"{text}: at most {self.per_owner} on each of {self.owners} devices{spread}"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "MatrixPlan":
        return cls(**{**fields, "leaves": tuple(fields["leaves"])})


def matrix_plans(reports: Iterable[MatrixReport]) -> tuple[MatrixPlan, ...]:
    """Converts the reports of optimizers for unsharded matrices to entries of a plan, in the order of the reports.

    For each report: an entry per group of matrices of equal shape, in the order of the report's groups (the group with
    the most work per device first); then an entry per reason for leaves that the optimizer does not treat as matrices.
    """
    plans = []
    for report in reports:
        for group in report.groups:
            leaves = tuple(leaf.path for leaf in group.leaves)
            # If layers are split over devices, a group has the matrices of one part of the mesh; a plan counts all
            # parts.
            parts = sum(report.choices[path].count for path in leaves) // group.count
            size = (group.form.rows, group.form.columns)
            plans.append(
                MatrixPlan(
                    report.rule,
                    leaves,
                    parts * group.count,
                    *size,
                    parts * group.num_owners,
                    group.places_per_owner,
                    "",
                )
            )
        by_reason = defaultdict(list)
        for path, choice in report.choices.items():
            if not choice.dims:
                by_reason[choice.reason].append(path)
        plans += [MatrixPlan(report.rule, tuple(paths), 0, 0, 0, 0, 0, why) for why, paths in by_reason.items()]
    return tuple(plans)


def matrices_table(plans: Sequence[MatrixPlan]) -> RenderableType:
    """Returns a table with a line for each entry: matrices of equal shape, or leaves that are not matrices.

    A line has the paths of the leaves, and a sentence: the number of matrices and the devices that update them, or the
    reason why the leaves are not matrices.
    """
    rows = [[listed(dict.fromkeys(map(path_pattern, plan.leaves))).replace("'", ""), str(plan)] for plan in plans]
    return rich_table(
        "Optimizer updates of unsharded matrices", ["leaves", "matrices, and devices that update them"], rows, left=2
    )


class MatrixSection(Section[MatrixPlan]):
    """Plan section of optimizers that update unsharded matrices; records the report of each optimizer's ``tx.init``."""

    name = "matrices"

    def __init__(self) -> None:
        self.reports: list[MatrixReport] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        with recording_matrices() as self.reports:
            yield

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> tuple[MatrixPlan, ...]:
        return matrix_plans(self.reports)

    table = staticmethod(matrices_table)
    from_json = staticmethod(MatrixPlan.from_json)

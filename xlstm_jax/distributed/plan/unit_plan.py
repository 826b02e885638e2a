"""Plan section of units chosen by a rule: modules that gather all their parameters to run, with the rule's reasons."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from xlstm_jax.distributed.data_parallel.modules.default_units import recording_units
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan
from xlstm_jax.distributed.plan.section import Section
from xlstm_jax.formatting import TIMES, format_bytes, path_pattern, rich_table


@dataclass(frozen=True)
class UnitPlan:
    """A module that gathers its parameters together, chosen by the rule of ``shard_modules`` without ``where``.

    Attributes:
      path: path of the module; "" for the model.
      reason: why the rule chose the module.
      leaves: number of parameters that the module gathers.
      gathered_bytes: bytes of gathered parameters on a device while the module runs; for stacked layers, of a layer.

    >>> print(UnitPlan("h_0", "one of 12 blocks of a loop", 8, 2**24))
    h_0: one of 12 blocks of a loop; gathers 8 leaves, 16 MiB
    """

    path: str
    reason: str
    leaves: int
    gathered_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.path or '(top)'}: {self.reason}; gathers {self.leaves} leaves, {format_bytes(self.gathered_bytes)}"
        )


def units_table(plans: Sequence[UnitPlan]) -> RenderableType:
    """Returns a table with a line for each unit, a module that gathers its parameters together.

    Units share a line if their paths differ only in the first number, and their reasons and bytes are equal.
    """
    alike: dict[tuple[str, str, int], list[UnitPlan]] = {}
    for plan in plans:
        alike.setdefault((path_pattern(f"{plan.path}/")[:-1], plan.reason, plan.gathered_bytes), []).append(plan)
    rows = []
    for (pattern, reason, size), units in alike.items():
        name = units[0].path or "(top)" if len(units) == 1 else f"{pattern} {TIMES}{len(units)}"
        rows.append([name, format_bytes(size), reason])
    return rich_table(
        "Modules that gather their parameters together, and why", ["module", "gathers", "reason"], rows, right=1
    )


class UnitSection(Section[UnitPlan]):
    """Plan section of units chosen by a rule; empty for a model whose units the user chose."""

    name = "units"

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        with recording_units() as self.reasons:
            yield

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> tuple[UnitPlan, ...]:
        gathered: dict[str, list[int]] = {path: [] for path in self.reasons}
        for row in rows:
            if row.gathered_with in gathered:
                gathered[row.gathered_with].append(row.gathered_bytes)
        # A unit with only small, replicated parameters gathers nothing.
        return tuple(
            UnitPlan(path, self.reasons[path], len(sizes), sum(sizes)) for path, sizes in gathered.items() if sizes
        )

    table = staticmethod(units_table)

    @staticmethod
    def from_json(fields: Mapping[str, Any], /) -> UnitPlan:
        return UnitPlan(**fields)

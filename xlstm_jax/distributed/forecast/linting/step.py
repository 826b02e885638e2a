"""What the lint's rules look at: a forecast and a plan of the same step, leaf by leaf, and what they find."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from xlstm_jax.distributed.forecast.cost.traffic import Collective
from xlstm_jax.distributed.forecast.forecasting import Forecast
from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS, LeafPlan
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.distributed.wording import path_pattern

_FLOAT = re.compile(r"(?:bf|f)(\d+)")


@dataclass(frozen=True)
class Finding:
    """Something that costs more than it must.

    Attributes:
      rule: its name, as in ``RULES``.
      where: the path of a leaf, ``block_*/up/kernel`` for several that are alike; else a module, or the name that the
        compiler gives an operation.
      text: what was found, with the numbers.
      cure: what to change.
      bytes: that it costs each device: of a step's traffic for what travels, of memory for what is kept.
    """

    rule: str
    where: str
    text: str
    cure: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.where}: {self.text} {self.cure}"


@dataclass(frozen=True)
class Step:
    """A compiled step beside the plan of its model."""

    forecast: Forecast
    plan: ShardingPlan
    num_minibatches: int
    keep_gathered: bool

    @cached_property
    def rows(self) -> dict[str, LeafPlan]:
        return {row.path: row for row in self.plan.rows if row.collection == PARAMETERS}

    @cached_property
    def gathers(self) -> dict[str, list[Collective]]:
        """By the path of a leaf the collectives that gather it, one that gathers it twice standing there twice."""
        found = defaultdict(list)
        for collective in self.forecast.collectives:
            for path in collective.leaves:
                found[path].append(collective)
        return dict(found)

    @cached_property
    def groups(self) -> list[tuple[str, list[LeafPlan]]]:
        """The parameters that are gathered, by name, those together that differ in the number of their module alone."""
        found = defaultdict(list)
        for path, row in self.rows.items():
            if path in self.gathers:
                found[path_pattern(path), row.use_shape].append(row)
        return [(shared_name(rows), rows) for rows in found.values()]

    def owned_by(self, modules: Iterable[str]) -> list[LeafPlan]:
        """The parameters that lie directly in one of the modules."""
        inside = set(modules)
        return [row for path, row in self.rows.items() if path.rpartition("/")[0] in inside]

    def is_gathered_over(self, row: LeafPlan, axes: Sequence[str] | None) -> bool:
        """Whether the step gathers a leaf over one of the axes."""
        return any(set(gather.axes or ()) & set(axes or ()) for gather in self.gathers.get(row.path, ()))


def shared_name(rows: Sequence[LeafPlan]) -> str:
    return rows[0].path if len(rows) == 1 else path_pattern(rows[0].path)


def values_carried(collective: Collective) -> float | None:
    """How many values one execution carries; None where arrays of several dtypes travel together."""
    width = width_of(collective.dtype)
    return collective.payload_bytes / width if width else None


def width_of(dtype: str) -> float | None:
    """Bytes of a value, of a dtype as compilers write it; None of what is no float."""
    match = _FLOAT.match(dtype)
    return int(match[1]) / 8 if match else None


def use_elements(row: LeafPlan) -> float:
    """How many values of a leaf one use gathers on each device."""
    return row.gathered_bytes / np.dtype(row.gather_dtype).itemsize


def layers(row: LeafPlan) -> int:
    """How many layers share the leaf's array, each with a part of its own."""
    return math.prod(row.shape) // max(math.prod(row.use_shape), 1)


def times_at_once(step: Step, gather: Collective) -> float:
    """How many uses of its leaves one execution of a gather serves; below 1 in a stage of several."""
    rows = [step.rows[path] for path in gather.leaves if path in step.rows]
    need, elements = sum(use_elements(row) for row in rows if row.uses), values_carried(gather)
    return elements / need if need and elements else 0.0


def sum_wire_bytes(collectives: Iterable[Collective]) -> float:
    return sum(collective.wire_bytes_per_step for collective in collectives)

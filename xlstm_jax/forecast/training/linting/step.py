"""Input of the lint's rules: a forecast and a plan of the same step, matched leaf by leaf."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS, LeafPlan
from xlstm_jax.distributed.plan.sharding_plan import ShardingPlan
from xlstm_jax.forecast.cost.collective_traffic import Collective
from xlstm_jax.forecast.forecasting import Forecast
from xlstm_jax.forecast.hlo.text import float_bytes_of
from xlstm_jax.formatting import format_fraction, path_pattern


class Defect(NamedTuple):
    """Result of a rule: place, sentence, bytes, and cure; cure "" means the rule's cure."""

    where: str
    text: str
    bytes: float
    cure: str = ""


@dataclass(frozen=True)
class Step:
    """A compiled step with the plan of its model; ``imbalance`` is the imbalance of experts, see ``dispatch``."""

    forecast: Forecast
    plan: ShardingPlan
    num_minibatches: int
    keep_gathered: bool
    imbalance: float = 1.0

    @cached_property
    def rows(self) -> dict[str, LeafPlan]:
        """Rows of the plan for the model's parameters, by path of the parameter."""
        return {row.path: row for row in self.plan.rows if row.collection == PARAMETERS}

    @cached_property
    def gathers(self) -> dict[str, list[Collective]]:
        """Collectives that gather each parameter, by path of the parameter; parameters without a gather are missing.

        A collective that gathers several leaves is listed under each of them, and twice if it gathers the leaf twice.
        """
        by_path = defaultdict(list)
        for collective in self.forecast.collectives:
            for path in collective.leaves:
                by_path[path].append(collective)
        return dict(by_path)

    @cached_property
    def groups(self) -> list[tuple[str, list[LeafPlan]]]:
        """Gathered parameters in groups, each as (name, rows of the plan).

        A group has the parameters whose shapes are equal and whose paths differ only in a module's number. The name is
        the path, with ``*`` for the number if the group has several members: "block_*/up/kernel".
        """
        alike = defaultdict(list)
        for path, row in self.rows.items():
            if path in self.gathers:
                alike[path_pattern(path), row.use_shape].append(row)
        return [(shared_name(rows), rows) for rows in alike.values()]

    @property
    def on_cpu(self) -> bool:
        """Whether the step was compiled for CPU: the CPU compiler merges, widens and never hides collectives."""
        return self.forecast.platform == "cpu"

    def gathers_of(self, rows: Iterable[LeafPlan]) -> list[tuple[LeafPlan, Collective]]:
        """Returns (row, gather) for each gather of each leaf in ``rows``.

        Raises:
          KeyError: the step does not gather a leaf.
        """
        return [(row, gather) for row in rows for gather in self.gathers[row.path]]

    def uses_at_once(self, gather: Collective) -> float:
        """Returns how many uses of its leaves one execution of a gather serves: gathered values / values of one use.

        Above 1 if the weights of several layers are gathered at once; below 1 if several gathers, over an axis each,
        gather a leaf in stages; 0 if the plan does not have the leaves.
        """
        # Computed from sizes, because a gather may carry several leaves, and a leaf may take several stages.
        rows = [self.rows[path] for path in gather.leaves if path in self.rows]
        return size_of(gather) / (sum(row.gathered_size for row in rows) or math.inf)

    def layers_at_once(self, gather: Collective) -> int:
        """Returns the number of layers whose weights an execution of a gather brings; 1 for a single layer.

        The larger of two numbers counts: by the sizes in the plan, and by the pieces that a later loop slices from the
        result.
        """
        return max(round(self.uses_at_once(gather)), gather.slices)

    @property
    def seconds(self) -> float:
        """Expected time of the step; 0 if unknown."""
        return self.forecast.step_seconds or 0.0

    def share_of_traffic(self, sent: float) -> str:
        """Formats ``sent`` bytes as a percentage of all bytes that a device sends in the step: "31%"."""
        return format_fraction(sent / self.forecast.wire_bytes)

    def merged(self, collectives: Iterable[Collective]) -> Iterator[tuple[str, list[Collective]]]:
        """Groups collectives that serve the same leaves or modules; yields (name, collectives) for each group.

        Groups are in the order of their first members. Members have the same kind and the same ``stands_for`` (the kind
        that an all-reduce replaces). Without leaves they serve the same modules. Leaves or modules that differ only in
        a number count as the same. The name lists the leaves or modules, separated by commas, with ``*`` for the number
        if members differ: "block_*/up/kernel". Without leaves and modules the name is that of the first instruction.
        """
        alike = defaultdict(list)
        for collective in collectives:
            served = tuple(dict.fromkeys(collective.leaves or (collective.module,)))
            names = served if any(served) else tuple(dict.fromkeys(collective.modules))
            patterns = tuple(dict.fromkeys(path_pattern(f"{name}/")[:-1] for name in names))
            alike[patterns, collective.kind, collective.stands_for].append((names, collective))
        for (patterns, *_), members in alike.items():
            names = members[0][0]
            is_one = len(names) == 1 and all(others == names for others, _ in members)
            where = ", ".join(filter(None, names if is_one else patterns)) or members[0][1].name
            yield where, [collective for _, collective in members]


def shared_name(rows: Sequence[LeafPlan]) -> str:
    """Returns the path of the leaf of a single row; of several rows the first path, with ``*`` for its first number.

    Rows are rows of a plan, whose paths differ only in this number.
    """
    return rows[0].path if len(rows) == 1 else path_pattern(rows[0].path)


def size_of(collective: Collective) -> float:
    """Returns the number of unsharded values (not bytes) per execution of a collective.

    0 if unknown: for dtypes other than floats, and for arrays of several dtypes.
    """
    width = float_bytes_of(collective.dtype)
    return collective.payload_bytes / width if width else 0.0


class Rule(NamedTuple):
    """A name, a function that checks a step, and the default cure of its defects."""

    name: str
    find: Callable[[Step], Iterator[Defect]]
    cure: str = ""

"""What a step does that its sharding does not need: the lint of a forecast against the plan of the same model.

    forecast(step, *args), plan_sharding(model, ...)  --lint-->  [Finding(rule, where, text, cure, bytes), ...]
    lint.raise_if(findings)                                      a refusal, for scripts

  repeated-gather        a leaf is gathered more often than forward and backward need
  wide-gather            a leaf travels in a wider dtype than its wrapper asked for
  all-reduce-of-shards   an all-reduce where a reduce-scatter or an all-gather of half the bytes would do
  hoisted-gather         all layers of a loop are gathered at once, in front of it
  kept-gathered          the gathered weights of all layers live from forward to backward
  exposed-collective     nothing is scheduled beside a collective
  replicated-leaf        a large leaf stays whole on every device

The plan says what the model asked for, the forecast what the compiler made of it. Leaves that are alike but for the
number of their module (``block_0``, ``block_1``, ...) are one finding.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from xlstm_jax.distributed.forecast.estimate import Forecast
from xlstm_jax.distributed.forecast.names import FORWARD
from xlstm_jax.distributed.forecast.report import rich_table
from xlstm_jax.distributed.forecast.traffic import Collective
from xlstm_jax.distributed.plan_leaves import PARAMETERS, LeafPlan, format_bytes, format_fraction
from xlstm_jax.distributed.sharding_plan import ShardingPlan

# What a leaf of the default min_weight_size takes in float32: below, a step's time hardly tells.
MIN_KEPT_BYTES = 2**20
MIN_REPLICATED_BYTES = 2**20
# Of the bytes that a device sends in a step. Where a TPU's compiler reduces small arrays by an all-reduce whatever the
# mesh, they are up to 7% of a well-made step.
MAX_ALL_REDUCED_FRACTION = 0.075
MIN_EXPOSED_FRACTION = 0.05
SPARSECORE_CHIPS = ("v5p", "v6e")  # chips whose SparseCores can run collectives

_FLOAT = re.compile(r"(?:bf|f)(\d+)")
_VMAP = "vmap(gather_params)"  # members of nn.vmap run together, so they are gathered together


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


class LintError(ValueError):
    """A step has findings; its text lists them, ``findings`` has them as data."""

    def __init__(self, findings: Sequence[Finding]):
        super().__init__("\n".join([_counted(findings), *map(str, findings)]))
        self.findings = tuple(findings)


def lint(
    forecast: Forecast, plan: ShardingPlan, *, num_minibatches: int = 1, keep_gathered: bool = False
) -> list[Finding]:
    """Finds where a step costs more than its sharding needs.

    Args:
      forecast: of the training step.
      plan: of the same model on the same mesh.
      num_minibatches: of the step, each of which gathers anew; as for ``make_train_step``.
      keep_gathered: gathered weights are kept from forward to backward on purpose, which saves the second gather.
    Returns:
      The findings by rule, within a rule the largest first; empty for a step that is well made.
    Raises:
      ValueError: the plan is of another mesh or another model than the forecast, or ``num_minibatches`` is below 1.
    """
    step = _Step(forecast, plan, num_minibatches, keep_gathered)
    _check(step)
    return [finding for rule in RULES.values() for finding in sorted(rule(step), key=lambda finding: -finding.bytes)]


def raise_if(findings: Iterable[Finding], rules: Iterable[str] | None = None) -> None:
    """Raises where there is a finding: the last line of a script that guards a step. Also ``lint.raise_if``.

    Args:
      findings: as ``lint`` returns them.
      rules: names of the rules that count; None: all.
    Raises:
      LintError: there is one; its text lists all that count.
      ValueError: a rule of that name does not exist; lists those that do.
    """
    wanted = list(RULES) if rules is None else [rules] if isinstance(rules, str) else list(rules)
    if unknown := [name for name in wanted if name not in RULES]:
        raise ValueError(f"rules: there is no rule {unknown[0]!r}; there are {', '.join(RULES)}.")
    if found := [finding for finding in findings if finding.rule in wanted]:
        raise LintError(found)


lint.raise_if = raise_if


def table(findings: Sequence[Finding]) -> Any:
    """The findings as a ``rich`` renderable.

    Raises:
      ImportError: rich is not installed.
    """
    rows = [
        [finding.rule, finding.where, f"{finding.text} {finding.cure}", format_bytes(finding.bytes)]
        for finding in findings
    ]
    return rich_table(_counted(findings), ["rule", "where", "what, and what to do", "bytes"], rows, left=3)


# ----------------------------------------------------------------------------------------------- what the rules look at


@dataclass(frozen=True)
class _Step:
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
                found[_pattern(path), row.use_shape].append(row)
        return [(_name(rows), rows) for rows in found.values()]

    def owned_by(self, modules: Iterable[str]) -> list[LeafPlan]:
        """The parameters that lie directly in one of the modules."""
        inside = set(modules)
        return [row for path, row in self.rows.items() if path.rpartition("/")[0] in inside]

    def is_gathered_over(self, row: LeafPlan, axes: Sequence[str] | None) -> bool:
        """Whether the step gathers a leaf over one of the axes."""
        return any(set(gather.axes or ()) & set(axes or ()) for gather in self.gathers.get(row.path, ()))


def _check(step: _Step) -> None:
    mesh, planned = dict(step.forecast.axis_sizes), dict(step.plan.axis_sizes)
    if mesh != planned:
        raise ValueError(
            f"the forecast is of the mesh {mesh}, the plan of {planned}. Make the plan for the mesh of the step."
        )
    if step.num_minibatches < 1:
        raise ValueError(f"num_minibatches={step.num_minibatches} must be 1 or more; pass that of the step.")
    if step.gathers and not any(path in step.rows for path in step.gathers):
        raise ValueError(
            f"the step gathers {_listed(step.gathers)}, of which the plan knows none; its parameters are "
            f"{_listed(step.rows)}. Make the plan of the model that the step trains."
        )


def _counted(findings: Sequence[Finding]) -> str:
    return f"{len(findings)} finding{'s' * (len(findings) != 1)}"


def _pattern(path: str) -> str:
    return re.sub(r"\d+(?=/)", "*", path, count=1)


def _name(rows: Sequence[LeafPlan]) -> str:
    return rows[0].path if len(rows) == 1 else _pattern(rows[0].path)


def _listed(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + more


def _elements(collective: Collective) -> float | None:
    """How many values one execution carries; None where arrays of several dtypes travel together."""
    width = _width(collective.dtype)
    return collective.payload_bytes / width if width else None


def _width(dtype: str) -> float | None:
    """Bytes of a value, of a dtype as compilers write it; None of what is no float."""
    match = _FLOAT.match(dtype)
    return int(match[1]) / 8 if match else None


def _use_elements(row: LeafPlan) -> float:
    """How many values of a leaf one use gathers on each device."""
    return row.gathered_bytes / np.dtype(row.gather_dtype).itemsize


def _layers(row: LeafPlan) -> int:
    """How many layers share the leaf's array, each with a part of its own."""
    return math.prod(row.shape) // max(math.prod(row.use_shape), 1)


def _times_at_once(step: _Step, gather: Collective) -> float:
    """How many uses of its leaves one execution of a gather serves; below 1 in a stage of several."""
    rows = [step.rows[path] for path in gather.leaves if path in step.rows]
    need, elements = sum(_use_elements(row) for row in rows if row.uses), _elements(gather)
    return elements / need if need and elements else 0.0


def _wire(collectives: Iterable[Collective]) -> float:
    return sum(collective.wire_bytes_per_step for collective in collectives)


# -------------------------------------------------------------------------------------------------------------- gathers


def _repeated_gathers(step: _Step) -> Iterator[Finding]:
    for name, rows in step.groups:
        counts = [found for row in rows if (found := _repeats(step, row))]
        if counts:
            executed, need, wasted = (sum(column) for column in zip(*counts, strict=True))
            planned = f"{step.num_minibatches} x {sum(row.uses for row in rows)}"
            yield Finding(
                "repeated-gather",
                name,
                f"is gathered {executed} times in a step, where {planned} uses need {need}: at most one gather in "
                f"forward and one in backward each. The rest sends {format_bytes(wasted)} per device.",
                _repeat_cure(rows, step.num_minibatches),
                round(wasted),
            )


def _repeats(step: _Step, row: LeafPlan) -> tuple[int, int, float] | None:
    """(executed, needed, bytes wasted) of the mesh axis over which a leaf is gathered too often, the worst of them."""
    if row.parts > 1 and not row.uses:
        return None  # a box of the model's own, which no wrapper gathers: how often it must be is not known
    worst = None
    for axes in {gather.axes for gather in step.gathers[row.path]}:
        gathers = [gather for gather in step.gathers[row.path] if gather.axes == axes]
        forward = [gather for gather in gathers if gather.direction == FORWARD]
        need = row.uses * step.num_minibatches
        for found, allowed in ((forward, need), (gathers, 2 * need)):
            executed = sum(gather.count for gather in found)
            wasted = _wire(found) * (1 - allowed / executed) if executed > allowed else 0
            if wasted and (worst is None or wasted > worst[2]):
                worst = (executed, allowed, wasted)
    return worst


def _repeat_cure(rows: Sequence[LeafPlan], num_minibatches: int) -> str:
    if not any(row.uses for row in rows):
        return "By the plan it stays whole: make the plan of the model that the step trains."
    return (
        "Call the module once in a step, put only one nn.remat around it, or wrap the loop around it rather than its "
        f"body; if the step goes through more than {num_minibatches} minibatches, tell lint, as num_minibatches."
    )


def _wide_gathers(step: _Step) -> Iterator[Finding]:
    for name, rows in step.groups:
        gathers = [(row, gather) for row in rows for gather in step.gathers[row.path] if _is_wide(step, row, gather)]
        if gathers:
            dtype, asked = gathers[0][1].dtype, gathers[0][0].gather_dtype
            sent = _wire(gather for _, gather in gathers)
            extra = sum(
                gather.wire_bytes_per_step * (1 - np.dtype(row.gather_dtype).itemsize / _width(gather.dtype))
                for row, gather in gathers
            )
            yield Finding(
                "wide-gather",
                name,
                f"travels as {dtype}, where its wrapper asked for {asked}: {format_bytes(sent)} per device and step "
                f"instead of {format_bytes(sent - extra)}.",
                f"Pass gather_dtype={asked} to the shard_module_params around it in the step too, and compute in it.",
                round(extra),
            )


def _is_wide(step: _Step, row: LeafPlan, gather: Collective) -> bool:
    width = _width(gather.dtype)
    if not (row.uses and width):
        return False
    # The CPU backend sends bfloat16 as float32, whoever asks.
    told = step.forecast.platform != "cpu" or row.gather_dtype != "bfloat16"
    return told and width > np.dtype(row.gather_dtype).itemsize


def _hoisted_gathers(step: _Step) -> Iterator[Finding]:
    for name, rows in step.groups:
        gathers = [gather for row in rows for gather in step.gathers[row.path] if _is_hoisted(step, gather)]
        if not gathers:
            continue
        layers, times = (max(count(step, gather) for gather in gathers) for count in (_layers_at_once, _times_at_once))
        whole = max(map(_use_elements, rows)) * max(times, 1) * max(_width(gather.dtype) for gather in gathers)
        per_layer = round(whole / layers)
        if (extra := (layers - 1) * per_layer) >= MIN_KEPT_BYTES:
            yield Finding(
                "hoisted-gather",
                name,
                f"is gathered for {layers} layers at once, {format_bytes(layers * per_layer)} that live as long as "
                f"the loop, where a layer needs {format_bytes(per_layer)}.",
                "Put the loop outside of the wrapper: nn.scan(nn.remat(shard_module_params(Block, axis_name)), ...).",
                extra,
            )


def _is_hoisted(step: _Step, gather: Collective) -> bool:
    return _layers_at_once(step, gather) > 1 and _VMAP not in gather.op_name


def _layers_at_once(step: _Step, gather: Collective) -> int:
    """Of how many layers one execution of a gather brings the weights: by the plan, or by a loop that reads slices."""
    return max(round(_times_at_once(step, gather)), gather.slices)


# --------------------------------------------------------------------------------------------------------------- memory


def _kept_gathered(step: _Step) -> Iterator[Finding]:
    if step.keep_gathered:
        return
    for name, rows in step.groups:
        layers = sum(_kept_layers(step, row) for row in rows)
        each = _kept_bytes(step, rows[0])
        kept = layers * each
        if layers > 1 and kept >= MIN_KEPT_BYTES:
            yield Finding(
                "kept-gathered",
                name,
                f"is gathered in forward and not again in backward, so that {layers} layers of {format_bytes(each)} "
                f"live from one to the other: {format_bytes(kept)} per device.",
                "Put nn.remat around the wrapped module, nn.remat(shard_module_params(Block, axis_name)): its default "
                "policy, and those that save only the results of products, gather again. Where memory is there and "
                "the wire is short, pass keep_gathered=True to lint.",
                kept,
            )


def _kept_bytes(step: _Step, row: LeafPlan) -> int:
    """What one use leaves: in the dtype that was asked for, or that of the wire where the compiler has narrowed it."""
    widths = [_width(gather.dtype) for gather in step.gathers[row.path]]
    asked = np.dtype(row.gather_dtype).itemsize
    return round(_use_elements(row) * min(asked, *filter(None, widths)))


def _kept_layers(step: _Step, row: LeafPlan) -> int:
    """In how many layers a leaf's gathered weights are left over from forward for backward.

    Vectors do not count: the backward pass of a sum does not read them. Nor does one layer alone, as an embedding,
    which a step gathers once.
    """
    gathers = step.gathers[row.path]
    again = any(gather.direction != FORWARD for gather in gathers)
    # In one piece of the program the CPU's compiler merges the gathers that nn.remat keeps apart; in loops it cannot.
    told = step.forecast.platform != "cpu" or _layers(row) > 1
    if again or not told or len(row.use_shape) < 2 or not row.gradients.total:
        return 0
    by_axes = defaultdict(int)
    for gather in gathers:
        by_axes[gather.axes] += 0 if round(_times_at_once(step, gather)) > 1 else gather.count
    return min(max(by_axes.values()) // step.num_minibatches or 1, _layers(row)) if any(by_axes.values()) else 0


_DIVIDES_NOT = re.compile(r"(\d+) divides no free dim")
_TOO_SMALL = re.compile(r"fewer than min_weight_size=(\d+)")
_UNWRAPPED = "no wrapped module owns it"


def _replicated_leaves(step: _Step) -> Iterator[Finding]:
    found = defaultdict(list)
    for row in step.plan.replicated:
        # Small leaves of many layers are large together, but splitting them is many small gathers.
        size = row.parameters.total // (_layers(row) if _TOO_SMALL.search(row.reason) else 1)
        if size >= MIN_REPLICATED_BYTES:
            found[_pattern(row.path), row.shape].append(row)
    for rows in found.values():
        kept, devices = sum(row.all_bytes.per_device for row in rows), step.plan.devices
        yield Finding(
            "replicated-leaf",
            _name(rows),
            f"stays whole on each of {devices} devices ({rows[0].reason}): {format_bytes(kept)} with gradient and "
            f"optimizer state, where split evenly a device would keep {format_bytes(kept / devices)}.",
            _replication_cure(rows[0]),
            kept,
        )


def _replication_cure(row: LeafPlan) -> str:
    if parts := _DIVIDES_NOT.search(row.reason):
        size, count = max(row.use_shape), int(parts[1])
        return f"Pad its dim of size {size} to {-(-size // count) * count}, which {count} divides."
    if _TOO_SMALL.search(row.reason):
        return f"Lower min_weight_size to {math.prod(row.use_shape)} or less."
    if row.reason == _UNWRAPPED:
        return "Put shard_module_params around the module that owns it."
    return "Split it over another axis, or give it a dim that the axis divides."


# -------------------------------------------------------------------------------------------------------------- traffic


def _all_reduces_of_shards(step: _Step) -> Iterator[Finding]:
    stand_ins = [c for c in step.forecast.collectives if c.stands_for]
    if _wire(stand_ins) > MAX_ALL_REDUCED_FRACTION * step.forecast.wire_bytes:
        yield from _merged(stand_ins, step, _stand_in)
    for collective in step.forecast.collectives:
        if rows := _whole_gradients(step, collective):
            yield _whole_gradient(collective, rows)


def _merged(
    collectives: Iterable[Collective], step: _Step, finding: Callable[[_Step, str, list[Collective]], Finding]
) -> Iterator[Finding]:
    """A finding for each kind of collective and what it serves, whatever the number of the module."""
    found = defaultdict(list)
    for collective in collectives:
        served = tuple(dict.fromkeys(collective.leaves or (collective.module,)))
        names = served if any(served) else tuple(dict.fromkeys(collective.modules))
        alike = tuple(dict.fromkeys(_pattern(f"{name}/")[:-1] for name in names))
        found[alike, collective.kind, collective.stands_for].append((names, collective))
    for (alike, *_), members in found.items():
        names = members[0][0] if len({names for names, _ in members}) == 1 and len(members[0][0]) == 1 else alike
        where = ", ".join(filter(None, names)) or members[0][1].name
        yield finding(step, where, [collective for _, collective in members])


def _stand_in(step: _Step, where: str, members: list[Collective]) -> Finding:
    first, sent = members[0], _wire(members)
    share = format_fraction(sent / step.forecast.wire_bytes)
    return Finding(
        "all-reduce-of-shards",
        where,
        f"the compiler does the {first.stands_for} over {first.axes} by an all-reduce of the whole, "
        f"{sum(c.count for c in members)} times in a step: {format_bytes(sent)} per device, {share} of the "
        f"step's traffic, where {format_bytes(sent / 2)} would do.",
        "Give the mesh one axis for each axis of the torus, and axis_name the tuple of them: a collective over one "
        "axis of the torus is what was asked for.",
        round(sent / 2),
    )


def _whole_gradients(step: _Step, reduce: Collective) -> list[LeafPlan]:
    """The leaves whose whole gradient an all-reduce averages over an axis that they are gathered over.

    Many arrays travel in one all-reduce, so its size decides: what it carries beyond the leaves that belong in it.
    """
    if reduce.kind != "all-reduce" or "sync_gradients" not in reduce.op_name or not (total := _elements(reduce)):
        return []
    owned = step.owned_by(reduce.modules)
    split = [row for row in owned if step.is_gathered_over(row, reduce.axes)]
    rest = total - sum(math.prod(row.shape) / row.parts for row in owned if row not in split)
    found = []
    for row in sorted(split, key=lambda row: -row.parameters.total):
        if (size := math.prod(row.shape)) <= rest:
            found.append(row)
            rest -= size
    return found


def _whole_gradient(reduce: Collective, rows: Sequence[LeafPlan]) -> Finding:
    share = sum(math.prod(row.shape) for row in rows) * _width(reduce.dtype) / reduce.payload_bytes
    sent = reduce.wire_bytes_per_step * share
    return Finding(
        "all-reduce-of-shards",
        ", ".join(row.path for row in rows) if len(rows) < 4 else _listed(row.path for row in rows).replace("'", ""),
        f"the whole gradient is averaged over {reduce.axes} by an all-reduce, {format_bytes(sent)} per device and "
        f"step, though the leaf is gathered over one of these axes: a reduce-scatter sends half, and leaves a device "
        "its own part.",
        "Differentiate with respect to the split parameters, as value_and_grad does, with the gather inside of the "
        "loss: its transpose is the reduce-scatter.",
        round(sent / 2),
    )


def _exposed_collectives(step: _Step) -> Iterator[Finding]:
    if step.forecast.platform == "cpu":
        return  # nothing is asynchronous there
    exposed = [c for c in step.forecast.collectives if not (c.asynchronous and c.overlapped.instructions)]
    smallest = MIN_EXPOSED_FRACTION * step.forecast.wire_bytes
    yield from (finding for finding in _merged(exposed, step, _exposed) if finding.bytes >= max(smallest, 1))


def _exposed(step: _Step, where: str, members: list[Collective]) -> Finding:
    kind, sent, forecast = members[0].kind, _wire(members), step.forecast
    share = sent / forecast.wire_bytes
    seconds = f", some {share * forecast.roofline.wire_s * 1e3:.2g} ms of the links" if forecast.roofline else ""
    return Finding(
        "exposed-collective",
        where,
        f"the step waits for its {kind}, with nothing scheduled beside it: {sum(c.count for c in members)} times in a "
        f"step, {format_bytes(sent)} per device, {format_fraction(share)} of the step's traffic{seconds}.",
        _overlap_cure(forecast.chip.name if forecast.chip else "", kind),
        round(sent),
    )


def _overlap_cure(chip: str, kind: str) -> str:
    more = "More tokens per device make it a smaller part of the step."
    if chip in SPARSECORE_CHIPS:
        return f"Offload collectives to the SparseCore, a set of compiler options. {more}"
    if chip == "v5e" and kind == "all-gather":
        return f"Compile with xla_tpu_enable_ici_ag_pipelining. {more}"
    return more


RULES: dict[str, Callable[[_Step], Iterator[Finding]]] = {
    "repeated-gather": _repeated_gathers,
    "wide-gather": _wide_gathers,
    "all-reduce-of-shards": _all_reduces_of_shards,
    "hoisted-gather": _hoisted_gathers,
    "kept-gathered": _kept_gathered,
    "exposed-collective": _exposed_collectives,
    "replicated-leaf": _replicated_leaves,
}

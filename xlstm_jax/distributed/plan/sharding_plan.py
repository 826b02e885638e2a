"""``ShardingPlan``: a row for each leaf, totals over the rows, limits, differences, and output as text and JSON."""

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import RenderableType

from xlstm_jax.distributed.plan.leaf_plan import COUNTED, PARAMETERS, ByteCount, LeafPlan
from xlstm_jax.distributed.plan.section import SECTIONS
from xlstm_jax.distributed.plan.table import plan_bars, plan_table
from xlstm_jax.formatting import format_bytes, format_fraction, format_mesh, notebook_html, parse_json_as, plain_text

FORMAT_VERSION = 3
MAX_REPLICATED_FRACTION = 0.02
WORST_SHOWN = 3


class Difference(NamedTuple):
    """Difference between two plans in the leaf at ``path``, in the mesh, or in the assumed wrapper; ``str`` formats it.

    ``before`` and ``after`` map the names of the changed fields to values. ``before`` is None for an added leaf,
    ``after`` for a removed leaf.

    >>> print(Difference("head/kernel", {"parts": 64}, {"parts": 32}))
    head/kernel:
      parts: 64 -> 32
    """

    path: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    def __str__(self) -> str:
        before, after = self.before or {}, self.after or {}
        if before and after:
            lines = (f"  {field}: {_readable(old)} -> {_readable(after[field])}" for field, old in before.items())
            return "\n".join([f"{self.path}:", *lines])
        leaf = before or after
        return f"{self.path}: {'removed' if before else 'added'}, {leaf['dtype']}{list(leaf['shape'])}"


def _readable(value: Any) -> str:
    if isinstance(value, ByteCount):
        return f"{format_bytes(value.total)}, {format_bytes(value.per_device)} per device"
    return str(value)


@dataclass(frozen=True)
class ShardingPlan:
    """Result of ``plan_sharding``: a row for each leaf, and totals over the rows.

    Attributes:
      axis_sizes: the mesh: axes, outermost first, with their sizes.
      assumed: the wrapper assumed for a model without wrappers; "" for a model with wrappers.
      rows: the parameters in tree order, then the leaves of further collections, then optimizer state that belongs to
        no parameter.
      matrices: the matrices that an optimizer updates unsharded, and the devices that update them.
      experts: the mixtures of experts, and the device that stores each expert.
      units: the modules that ``shard_modules`` without ``where`` has chosen to gather their parameters, and why.
      decay: the parameters to which the optimizer applies weight decay. The optimizer is traced when ``decay`` or the
        plan's text is first read, seconds for hundreds of leaves.
      roles: how the parameters use each axis: "fsdp" (parameters are gathered over the axis), "tensor" (layers are
        split over the axis), "experts", or several roles; () if all devices along the axis have equal parameters, as
        along a batch axis ("dp") or a sequence axis.

    >>> plan = plan_sharding(nn.Dense(256), mesh.shape, jnp.ones((8, 1024)))
    >>> plan
    <ShardingPlan on dp=2,fsdp=4: 1 of 2 replicated; parameters 1 MiB, 129 KiB per device; all 258 KiB per device>
    >>> plan.parameters, [row.path for row in plan.replicated]
    (ByteCount(total=1049600, per_device=132096), ['bias'])
    """

    axis_sizes: Mapping[str, int]
    assumed: str
    rows: tuple[LeafPlan, ...]
    # Fields of the sections: each has the name of a section.
    matrices: Sequence[Any] = ()
    experts: Sequence[Any] = ()
    units: Sequence[Any] = ()
    decay: Sequence[Any] = ()
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.axis_sizes.values())

    @property
    def parameters(self) -> ByteCount:
        """Bytes of all parameters, in total and per device."""
        return sum((row.parameters for row in self.rows), ByteCount())

    @property
    def gradients(self) -> ByteCount:
        """Bytes of the gradients of all parameters that have a gradient, in total and per device."""
        return sum((row.gradients for row in self.rows), ByteCount())

    @property
    def optimizer(self) -> ByteCount:
        """Bytes of the optimizer state in device memory, in total and per device; 0 for a plan without optimizer."""
        return sum((row.optimizer for row in self.rows), ByteCount())

    @property
    def host(self) -> ByteCount:
        """Bytes of the optimizer state in host memory, in total and per device; 0 without offload."""
        return sum((row.host for row in self.rows), ByteCount())

    @property
    def other(self) -> ByteCount:
        """Bytes of the model's further collections, such as ``batch_stats``, in total and per device."""
        return sum((row.other for row in self.rows), ByteCount())

    @property
    def bytes_per_device(self) -> int:
        """Bytes of parameters, gradients, optimizer state and further collections in the memory of each device.

        Host memory and activations are not included.
        """
        return sum(row.all_bytes.per_device for row in self.rows)

    @property
    def replicated_fraction(self) -> float:
        """Fraction of the parameters' bytes replicated on every device: 0 to 1; 0 on a single device."""
        replicated = sum(row.parameters.total for row in self.replicated)
        # A model may have no parameters, or parameters of 0 bytes.
        return replicated / self.parameters.total if replicated else 0.0

    @property
    def replicated(self) -> tuple[LeafPlan, ...]:
        """Rows of the parameters stored unsharded on every device, largest first; () on a single device."""
        rows = [row for row in self.rows if row.collection == PARAMETERS and row.parts == 1 and self.devices > 1]
        return tuple(sorted(rows, key=lambda row: -row.parameters.total))

    def row(self, path: str) -> LeafPlan:
        """Returns the ``LeafPlan`` of the leaf at ``path``: sharding, reason, bytes and gathers.

        Raises:
          ValueError: the plan has no leaf at ``path``; the error lists the nearest paths.
        """
        by_path = {row.path: row for row in self.rows}
        if path not in by_path:
            nearest = difflib.get_close_matches(path, by_path, n=3, cutoff=0.3) or list(by_path)[:3]
            raise ValueError(f"{path!r} is none of the plan's {len(by_path)} leaves; the nearest are {nearest}.")
        return by_path[path]

    def explain(self, path: str) -> str:
        """Returns the row of a leaf as a sentence: sharding, reason, bytes on a device, and gathers.

        Raises:
          ValueError: the plan has no leaf at ``path``; the error lists the nearest paths.
        """
        return self.row(path).sentence(self.devices)

    def __repr__(self) -> str:
        parameters, per_device = map(format_bytes, self.parameters)
        return (
            f"<ShardingPlan on {format_mesh(self.axis_sizes)}: {len(self.replicated)} of {len(self.rows)} replicated;"
            f" parameters {parameters}, {per_device} per device; all {format_bytes(self.bytes_per_device)} per device>"
        )

    def _repr_html_(self) -> str:
        title = "Bytes stored on each device, by leaf: value, gradient, optimizer state; replicated leaves in orange"
        return notebook_html(self.table(), title, plan_bars(self))

    def __str__(self) -> str:
        return plain_text(self.table())

    def table(self) -> RenderableType:
        """Returns the plan for ``rich``: leaves by module, largest first, then replicated leaves with reasons.

        Modules whose paths differ in a number alone (``block_0``, ``block_1``, ...) share a line for each leaf that is
        alike.
        """
        return plan_table(self)

    def check(
        self, *, max_replicated_fraction: float = MAX_REPLICATED_FRACTION, max_bytes_per_device: int | None = None
    ) -> None:
        """Raises if too large a part of the parameters is replicated, or if a device stores too many bytes.

        Args:
          max_replicated_fraction: the largest fraction of the parameters' bytes that may be replicated; 0 to 1.
          max_bytes_per_device: limit for parameters, gradients, optimizer state and further collections. Leave room
            for activations, which a plan does not count. None: no limit.
        Raises:
          ValueError: a limit is exceeded (the error names the worst leaves, both numbers and the cure), or a limit is
            out of range or NaN.
        """
        # Test that the limit is in range, not that it is out of range: comparisons with NaN are always false.
        if not 0 <= max_replicated_fraction <= 1:
            raise ValueError(
                f"max_replicated_fraction={max_replicated_fraction} is no fraction from 0 to 1; pass 0.02 for 2%."
            )
        if max_bytes_per_device is not None and not max_bytes_per_device > 0:
            raise ValueError(
                f"max_bytes_per_device={max_bytes_per_device} is no positive number of bytes; pass 14 * 2**30, or None "
                "for any number."
            )
        if self.replicated_fraction > max_replicated_fraction:
            replicated = sum(row.parameters.total for row in self.replicated)
            raise ValueError(
                f"{format_fraction(self.replicated_fraction)} of the parameters' bytes ({format_bytes(replicated)} of "
                f"{format_bytes(self.parameters.total)}) are replicated on each of {self.devices} devices; "
                f"max_replicated_fraction={max_replicated_fraction} allows {format_fraction(max_replicated_fraction)}. "
                f"The largest: {_worst(self.replicated)}. Wrap their modules with shard_module_params, lower "
                "min_weight_size, or choose sizes that the axis divides."
            )
        if max_bytes_per_device is not None and self.bytes_per_device > max_bytes_per_device:
            largest = sorted(self.rows, key=lambda row: -row.all_bytes.per_device)
            raise ValueError(
                f"each of {self.devices} devices keeps {format_bytes(self.bytes_per_device)} ({self.bytes_per_device} "
                f"bytes); max_bytes_per_device={max_bytes_per_device} allows {format_bytes(max_bytes_per_device)}. "
                f"The largest per device: {_worst(largest)}. Split over more devices, wrap the modules of replicated "
                "leaves, or use an optimizer with less state."
            )

    def diff(self, other: "ShardingPlan") -> list[Difference]:
        """Returns the changes from this plan to ``other``: the mesh, the wrapper, leaves added, removed or changed.

        In the order of this plan's rows, then of added leaves; a changed mesh or wrapper comes first. [] for equal
        plans.
        """
        before, after, changes = _compared(self), _compared(other), []
        # Paths of this plan first: a removed leaf keeps its place in the list.
        for path in before | after:
            old, new = before.get(path), after.get(path)
            if old and new:
                # For a leaf in both plans, keep only the changed fields.
                changed = [field for field in old if old[field] != new[field]]
                old, new = ({field: row[field] for field in changed} for row in (old, new))
            if old != new:
                changes.append(Difference(path, old, new))
        return changes

    def to_json(self) -> str:
        """Returns the plan as JSON for review in a diff: a few lines for each leaf, in the order of the rows."""
        head = {"format": FORMAT_VERSION, "axis_sizes": dict(self.axis_sizes), "assumed": self.assumed}
        head |= {"totals": _totals(self)}
        head |= {section.name: [vars(entry) for entry in getattr(self, section.name)] for section in SECTIONS}
        head |= {"roles": dict(self.roles)}
        # Built line by line: json.dumps with an indent would put each number on a separate line.
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        leaves = ",\n".join(row.to_json() for row in self.rows)
        return "\n".join(["{", *lines, '  "leaves": {', leaves, "  }", "}"]) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ShardingPlan":
        """Returns the plan written by ``to_json`` as ``text``.

        Raises:
          ValueError: the text is not a plan, has another format version, or has totals that differ from the sums over
            its leaves.
        """
        return parse_json_as(text, "a plan", cls._of_json)

    @classmethod
    def _of_json(cls, data: Any) -> "ShardingPlan":
        """Returns the plan whose JSON, parsed, is ``data``.

        Raises:
          ValueError: ``data`` is not a dict of this format version, or its totals are not the sums over its leaves.
          KeyError, TypeError: a field is missing or has another type, say; ``from_json`` converts the error.
        """
        version = data.get("format") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"a plan of format {version!r}; this release reads format {FORMAT_VERSION}. Write it again with "
                "plan_sharding(...).to_json()."
            )
        rows = tuple(LeafPlan.from_json(path, leaf) for path, leaf in data["leaves"].items())
        entries = {kind.name: tuple(map(kind.from_json, data.get(kind.name, ()))) for kind in SECTIONS}
        plan = cls(
            axis_sizes=data["axis_sizes"],
            assumed=data["assumed"],
            rows=rows,
            roles={axis: tuple(roles) for axis, roles in data.get("roles", {}).items()},
            **entries,
        )
        # Reviewers of a stored plan read its totals, so the totals must be the sums over the leaves.
        if data["totals"] != (totals := _totals(plan)):
            raise ValueError(
                f"the plan's totals are {data['totals']}, but its leaves add up to {totals}: it was edited."
            )
        return plan


def _worst(rows: Sequence[LeafPlan]) -> str:
    worst = [f"{row.description}, {format_bytes(row.all_bytes.per_device)} per device: {row.reason}" for row in rows]
    more = [f"and {len(worst) - WORST_SHOWN} more"] if len(worst) > WORST_SHOWN else []
    return "; ".join(worst[:WORST_SHOWN] + more)


def _compared(plan: ShardingPlan) -> dict[str, dict[str, Any]]:
    sizes = [*plan.axis_sizes.items()]
    rows = {row.path: {**vars(row), "reason": str(row.reason)} for row in plan.rows}
    # A mesh of different sizes changes all rows, so the mesh comes first, as a row.
    return {"(mesh)": {"axis_sizes": sizes}, "(wrapper)": {"assumed": plan.assumed or None}, **rows}


def _totals(plan: ShardingPlan) -> dict[str, Any]:
    counts = {kind: list(getattr(plan, kind)) for kind in COUNTED}
    return counts | {"bytes_per_device": plan.bytes_per_device, "replicated_fraction": plan.replicated_fraction}

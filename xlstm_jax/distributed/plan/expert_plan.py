"""Section of a sharding plan about mixtures of experts: the device of each expert, and the size of an expert."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.modules.holders import seeing_calls
from xlstm_jax.distributed.data_parallel.wire.collectives import as_axis_names
from xlstm_jax.distributed.model_parallel.experts import Experts
from xlstm_jax.distributed.plan.leaf_plan import PARAMETERS, LeafPlan
from xlstm_jax.distributed.plan.section import Section
from xlstm_jax.formatting import format_axes, format_bytes, path_pattern, rich_table


@dataclass(frozen=True)
class ExpertPlan:
    """Placement of the experts of an ``Experts`` module, the same for all layers if ``nn.scan`` stacks the module.

    Attributes:
      path: path of the module in the model.
      num_experts, top_k, capacity_factor: as in ``Experts``.
      axes: the axes that experts are split over; () if each device has all experts.
      devices: number of devices along ``axes``.
      layers: number of layers that a scan stacks, each with separate experts; 1 without a scan.
      expert_bytes: bytes of the stored parameters of a single expert of a single layer.
      expert_size: number of elements of the parameters of a single expert of a single layer.

    >>> mixture = ExpertPlan("moe", 8, 2, None, ("ep",), devices=4, layers=1, expert_bytes=2**20, expert_size=2**18)
    >>> mixture.experts_of(3), mixture.owner(7)  # experts of the device at position 3; position of expert 7
    (range(6, 8), 3)
    """

    path: str
    num_experts: int
    top_k: int
    capacity_factor: float | None
    axes: tuple[str, ...]
    devices: int
    layers: int
    expert_bytes: int
    expert_size: int

    @property
    def per_device(self) -> int:
        """Number of experts of a layer on each device."""
        return self.num_experts // self.devices

    def experts_of(self, device: int) -> range:
        """Returns the range of experts that a device stores.

        ``device`` is the index of the device along ``axes``, from 0 to ``devices`` - 1; the first axis is outermost.
        """
        return range(device * self.per_device, (device + 1) * self.per_device)

    def owner(self, expert: int) -> int:
        """Returns the index along ``axes`` of the device that stores an expert: ``expert`` // ``per_device``.

        Experts count from 0 to ``num_experts`` - 1.
        """
        return expert // self.per_device

    @property
    def padding(self) -> float:
        """Ratio of sent rows to chosen rows (``top_k`` per token), if a device sends equal parts to each device.

        A row is the vector of a token for an expert. A part has room for the capacity or, without a capacity, for the
        worst case. (A ragged exchange, on TPUs except v5e, sends only the chosen rows: ``Dispatch.padding`` is 1.)
        """
        if self.capacity_factor is not None:
            return self.capacity_factor
        return self.devices * min(self.top_k, self.per_device) / self.top_k

    def __str__(self) -> str:
        layers = f" in each of {self.layers} layers" if self.layers > 1 else ""
        sentence = f"{self.num_experts} experts of {format_bytes(self.expert_bytes)}{layers}, {self.top_k} for a token"
        if self.devices == 1:
            return f"{sentence}: each device has them all"
        last = self.experts_of(self.devices - 1)
        owned = f"{self.per_device} on each of {self.devices} devices along {format_axes(self.axes)}"
        return f"{sentence}: {owned}, the first has 0 to {self.per_device - 1}, the last {last[0]} to {last[-1]}"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ExpertPlan":
        return cls(**{**fields, "axes": tuple(fields["axes"])})


def expert_plan(
    path: str, module: Any, of_layer: int, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]
) -> ExpertPlan:
    """Returns the ``ExpertPlan`` of the ``Experts`` module at ``path``: axes, devices, layers, and sizes of an expert.

    The number of layers (stacked by ``nn.scan``) and the sizes are computed from the rows of the experts' parameters.

    Args:
      path: path of the module in the model.
      module: the ``Experts`` module, with its options.
      of_layer: the number of elements of all experts of a single layer.
      axis_sizes: the axes of the mesh with their sizes.
      rows: the rows of the sharding plan, for every leaf of the model.
    """
    axes = () if module.axis is None else as_axis_names(module.axis)
    devices = math.prod(axis_sizes[axis] for axis in axes)
    expert_rows = [row for row in rows if row.collection == PARAMETERS and row.path.startswith(_experts_of(path))]
    size, stored = sum(math.prod(row.shape) for row in expert_rows), sum(row.parameters.total for row in expert_rows)
    # A scan stacks the experts of all its layers in a leaf and traces the module once, so the number of layers follows
    # from sizes.
    layers = max(size // max(of_layer, 1), 1)
    count = layers * module.num_experts
    options = (module.num_experts, module.top_k, module.capacity_factor)
    return ExpertPlan(path, *options, axes, devices, layers, stored // count, size // count)


def _experts_of(path: str) -> str:
    """Returns the path prefix of the experts' parameters for the module at ``path``: "moe" -> "moe/experts/"."""
    return f"{path}/experts/".lstrip("/")


def experts_table(plans: Sequence[ExpertPlan]) -> RenderableType:
    """Returns a table with a line for each mixture of experts; mixtures with equal placements share a line.

    A shared line has the path of the first mixture, with ``*`` for its first number.
    """
    # Layers of a Python loop are alike, and differ in the number in their path.
    named: dict[str, list[str]] = {}
    for plan in plans:
        named.setdefault(str(plan), []).append(plan.path)
    rows = [[path_pattern(paths[0]) if len(paths) > 1 else paths[0], text] for text, paths in named.items()]
    return rich_table("Experts, and the devices that store them", ["module", "experts on each device"], rows, left=2)


class ExpertSection(Section[ExpertPlan]):
    """Plan section of the mixtures of experts; records each ``Experts`` module that ``model.init`` calls."""

    name = "experts"
    role = "experts"

    def __init__(self) -> None:
        # By path: the module, and the size of the parameters of a layer's experts.
        self.found: dict[str, tuple[Experts, int]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        def note(module: Any) -> None:
            if isinstance(module, Experts):
                leaves = trees.sharded_leaves(module.variables["params"]["experts"])
                size = sum(math.prod(leaf.true_shape) for _, leaf in leaves)
                self.found["/".join(module.path)] = module, size

        with seeing_calls(note):
            yield

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> tuple[ExpertPlan, ...]:
        return tuple(expert_plan(path, *mixture, axis_sizes, rows) for path, mixture in self.found.items())

    def axes_within(self, entries: Sequence[ExpertPlan]) -> Mapping[str, tuple[str, ...]]:
        return {_experts_of(plan.path): plan.axes for plan in entries}

    table = staticmethod(experts_table)
    from_json = staticmethod(ExpertPlan.from_json)

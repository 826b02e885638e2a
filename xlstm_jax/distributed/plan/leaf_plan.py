"""What a sharding plan says of one leaf, and in which words and units.

LeafPlan      a row: where the leaf lies, why, and what that costs
ByteCount         bytes of something in all, and on each device
format_bytes  bytes as people read them
"""

from dataclasses import dataclass
from typing import NamedTuple

from xlstm_jax.distributed.data_parallel.axes import AxisEntry, entry_axes
from xlstm_jax.distributed.data_parallel.reasons import Reason
from xlstm_jax.distributed.wording import format_axes, format_bytes, joined

PARAMETERS, OPTIMIZER = "params", "optimizer"  # collections of rows; the others are the model's own, as "batch_stats"


class ByteCount(NamedTuple):
    """Bytes of one kind: ``total`` of the one whole, and ``per_device`` of what each device keeps of it."""

    total: int = 0
    per_device: int = 0

    def __add__(self, other: "ByteCount") -> "ByteCount":
        return ByteCount(self.total + other.total, self.per_device + other.per_device)


@dataclass(frozen=True)
class LeafPlan:
    """One leaf of a plan: a parameter with its gradient and its optimizer state, or what is kept beside parameters.

    Attributes:
      path: of a parameter, below its collection: ``blocks/mlp/up/kernel``. What is no parameter has its collection
        before it: ``(batch_stats) norm/mean``, ``(optimizer) 0/count``.
      collection: "params", the name of another collection of the model, or "optimizer".
      shape, dtype: of the whole leaf.
      names: an entry for each dim: None, a mesh axis, or a tuple of axes, outermost first.
      parts: into how many different parts it is split; 1: every device has all of it.
      reason: why it is split along this dim, or why it is not.
      use_shape: the shape that its wrapped module sees; the leaf's, but for the dims that ``nn.scan`` has added.
      uses: how often a forward pass gathers it: calls of its module, times layers; 0 where nothing is gathered.
      gathered_bytes: what one such gather leaves on each device, in ``gather_dtype``; 0 where nothing is gathered.
      gather_dtype, grad_scatter_dtype: what travels; None where nothing is gathered.
      parameters, gradients, optimizer, other: bytes; ``other`` are those of further collections.
    """

    path: str
    collection: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[AxisEntry, ...]
    parts: int
    reason: Reason
    use_shape: tuple[int, ...]
    uses: int = 0
    gathered_bytes: int = 0
    gather_dtype: str | None = None
    grad_scatter_dtype: str | None = None
    parameters: ByteCount = ByteCount()
    gradients: ByteCount = ByteCount()
    optimizer: ByteCount = ByteCount()
    other: ByteCount = ByteCount()

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that are split; usually one."""
        return tuple(dim for dim, entry in enumerate(self.names) if entry_axes(entry))

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that it is split over, in the order of its dims."""
        return tuple(axis for entry in self.names for axis in entry_axes(entry))

    @property
    def all_bytes(self) -> ByteCount:
        """Everything that is kept for this leaf between two steps, and its gradient."""
        return self.parameters + self.gradients + self.optimizer + self.other

    @property
    def description(self) -> str:
        """``'head/kernel' float32[4096, 50257] (785 MiB)``"""
        size = next((share.total for share in (self.parameters, self.other, self.optimizer) if share.total), 0)
        return f"'{self.path}' {self.dtype}{list(self.shape)} ({format_bytes(size)})"

    def sentence(self, devices: int) -> str:
        """All of this in one sentence."""
        return f"{self.description} {self._where(devices)}{self._kept()}{self._gathers()}."

    def _where(self, devices: int) -> str:
        seen = f"; its module sees {list(self.use_shape)}" if self.use_shape != self.shape else ""
        if not self.dims:
            where = "the one device" if devices == 1 else f"each of {devices} devices"
            return f"stays whole on {where}: {self.reason}{seen}"
        split = " and ".join(f"dim {dim} over {format_axes(entry_axes(self.names[dim]))}" for dim in self.dims)
        return f"is split along {split} into {self.parts} part{'s' * (self.parts > 1)} ({self.reason}{seen})"

    def _kept(self) -> str:
        kinds = {
            "of it": self.parameters.per_device + self.other.per_device,
            "of its gradient": self.gradients.per_device,
            "of optimizer state": self.optimizer.per_device,
        }
        kept = [f"{format_bytes(count)} {kind}" for kind, count in kinds.items() if count]
        return f"; a device keeps {joined(kept)}" if kept else ""

    def _gathers(self) -> str:
        if not self.uses:
            return ""
        times = "once" if self.uses == 1 else f"{self.uses} times"
        return f", and gathers {format_bytes(self.gathered_bytes)} in {self.gather_dtype} {times} in a forward pass"

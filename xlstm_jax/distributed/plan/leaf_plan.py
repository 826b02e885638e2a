"""What a sharding plan says of one leaf: where it lies, why, and what that costs."""

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from xlstm_jax.distributed.data_parallel.reasons import Reason, reason_from_json
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.formats import sent_itemsize
from xlstm_jax.wording import format_axes, format_bytes, joined

PARAMETERS, OPTIMIZER = "params", "optimizer"  # collections of rows; the others are the model's own, as "batch_stats"
COUNTED = ("parameters", "gradients", "optimizer", "other")  # of what a row counts the bytes
LINES = (  # of the JSON, each with the fields in it: what it is, where it lies, why, what it takes, and what travels
    ("collection", "dtype", "shape", "trainable"),
    ("names", "parts"),
    ("reason",),
    (*COUNTED, "host"),
    (
        *("use_shape", "uses", "gathered_bytes", "row_bytes", "piece_bytes"),
        *("gather_dtype", "grad_scatter_dtype", "gathered_with"),
    ),
)


class ByteCount(NamedTuple):
    """Bytes: ``total`` of the global array, and ``per_device`` of what each device keeps of it.

    >>> ByteCount(1024, 256) + ByteCount(64, 64)
    ByteCount(total=1088, per_device=320)
    """

    total: int = 0
    per_device: int = 0

    def __add__(self, other: tuple[Any, ...], /) -> "ByteCount":
        total, per_device = other
        return ByteCount(self.total + total, self.per_device + per_device)


NO_BYTES = ByteCount()


@dataclass(frozen=True)
class LeafPlan:
    """One leaf of a plan: a parameter with its gradient and its optimizer state, or what is kept beside parameters.

    Attributes:
      path: of a parameter, below its collection: ``blocks/mlp/up/kernel``. What is no parameter has its collection
        before it: ``(batch_stats) norm/mean``, ``(optimizer) 0/count``.
      collection: "params", the name of another collection of the model, or "optimizer".
      shape, dtype: of the global array.
      names: an entry for each dim: None, a mesh axis, or a tuple of axes, outermost first.
      parts: into how many different shards it is split; 1: every device has all of it.
      reason: why it is split along this dim, or why it is not.
      use_shape: the shape that its wrapped module sees; the leaf's, but for the dims that ``nn.scan`` has added.
      uses: how often a forward pass gathers it: calls of its module, times layers; 0 where nothing is gathered.
      gathered_bytes: what one such gather leaves on each device, in ``gather_dtype``; 0 where nothing is gathered.
        Packed blocks ("int8", say) count as they are sent; unpacked, the leaf takes what its own dtype takes.
      row_bytes: of the table of an embedding that nothing but lookups reads, what a row takes while it travels: a
        lookup sends rows instead of the table where these are fewer bytes. 0 where the leaf is gathered in any case.
      piece_bytes: of a kernel that its head reads by pieces (``LMHead(by_pieces=True)``), what a piece takes on each
        device: a loss gathers pieces instead of the kernel, in forward and again in backward. Else 0.
      gather_dtype, grad_scatter_dtype: of communication; None where nothing is gathered.
      gathered_with: the path of the module with whose parameters it is gathered, "" for the model itself; None where
        nothing is gathered.
      parameters, gradients, optimizer, other: bytes; ``other`` are those of further collections.
      host: bytes of the optimizer's state that offload keeps in the memory of the host; they are not in ``optimizer``.
      trainable: False for a frozen parameter, which has no gradient and no optimizer state.

    >>> row = plan_sharding(nn.Dense(256), {"fsdp": 8}, jnp.ones((8, 1024))).row("kernel")
    >>> row.shape, row.names, row.parts, row.parameters
    ((1024, 256), ('fsdp', None), 8, ByteCount(total=1048576, per_device=131072))
    >>> row.reason
    Largest(dim=0, size=1024, parts=8)
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
    row_bytes: int = 0
    piece_bytes: int = 0
    gather_dtype: str | None = None
    grad_scatter_dtype: str | None = None
    gathered_with: str | None = None
    parameters: ByteCount = NO_BYTES
    gradients: ByteCount = NO_BYTES
    optimizer: ByteCount = NO_BYTES
    other: ByteCount = NO_BYTES
    trainable: bool = True
    host: ByteCount = NO_BYTES

    def to_json(self) -> str:
        """The leaf with its path, in a few lines of a plan's JSON."""
        fields = vars(self) | {"reason": self.reason.to_json()}
        if not self.piece_bytes:
            del fields["piece_bytes"]  # which version 0.3.0 does not know
        lines = ({name: fields[name] for name in line if name in fields} for line in LINES)
        body = ",\n".join("      " + json.dumps(line)[1:-1] for line in lines)
        return f"    {json.dumps(self.path)}: {{\n{body}\n    }}"

    @classmethod
    def from_json(cls, path: str, leaf: dict[str, Any]) -> "LeafPlan":
        """The leaf at a path, of what ``json`` has read there."""
        counts = {kind: ByteCount(*leaf[kind]) for kind in (*COUNTED, "host")}
        shapes = {name: tuple(leaf[name]) for name in ("shape", "use_shape")}
        names = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in leaf["names"])
        fields: dict[str, Any] = leaf | counts | shapes | {"names": names, "reason": reason_from_json(leaf["reason"])}
        return cls(path=path, **fields)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that are split; usually one."""
        return tuple(dim for dim, entry in enumerate(self.names) if entry_axes(entry))

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that it is split over, in the order of its dims."""
        return tuple(axis for entry in self.names for axis in entry_axes(entry))

    @property
    def layers(self) -> int:
        """How many layers share the array, each with weights of its own: what ``nn.scan`` has stacked; else 1."""
        return math.prod(self.shape) // max(math.prod(self.use_shape), 1)

    @property
    def gather_itemsize(self) -> float:
        """Bytes of a value while it is gathered, with its part of a block's scale; 0 where nothing is."""
        return sent_itemsize(self.gather_dtype) if self.gather_dtype else 0

    @property
    def gathered_size(self) -> float:
        """How many values one gather leaves on each device; 0 where nothing is gathered."""
        return self.gathered_bytes / self.gather_itemsize if self.uses else 0.0

    @property
    def all_bytes(self) -> ByteCount:
        """Everything that devices keep for this leaf between two steps, and its gradient; not what lies on the host."""
        return sum((getattr(self, kind) for kind in COUNTED), NO_BYTES)

    @property
    def description(self) -> str:
        """``'head/kernel' float32[4096, 50257] (785 MiB)``"""
        # One of these kinds is the leaf itself, by its collection.
        size = self.parameters.total or self.other.total or self.optimizer.total or self.host.total
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
        return f"is split along {split} into {self.parts} shard{'s' * (self.parts > 1)} ({self.reason}{seen})"

    def _kept(self) -> str:
        counts = {
            "of it": self.parameters.per_device + self.other.per_device,
            "of its gradient": self.gradients.per_device,
            "of optimizer state": self.optimizer.per_device,
        }
        kept = [f"{format_bytes(count)} {what}" for what, count in counts.items() if count]
        # Why there is neither gradient nor optimizer state is said where their bytes are missed.
        frozen = "" if self.trainable else "; it is frozen, without gradient and optimizer state"
        on_host = f", its host {format_bytes(self.host.per_device)} of optimizer state" if self.host.total else ""
        return f"; a device keeps {joined(kept)}{on_host}{frozen}" if kept else ""

    def _gathers(self) -> str:
        if not self.uses:
            return ""
        times = "once" if self.uses == 1 else f"{self.uses} times"
        with_what = f", with all of the module {self.gathered_with!r}" if self.gathered_with else ""
        size = format_bytes(self.gathered_bytes)
        rows = f", or looks up rows of {format_bytes(self.row_bytes)} where it sends less so" if self.row_bytes else ""
        pieces = f", or, for losses, pieces of {format_bytes(self.piece_bytes)} in forward and again in backward"
        parts = rows + pieces * bool(self.piece_bytes)
        return f", and gathers {size} in {self.gather_dtype} {times} in a forward pass{with_what}{parts}"

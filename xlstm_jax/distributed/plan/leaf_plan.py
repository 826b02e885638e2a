"""The row of a leaf in a sharding plan: the sharding of the leaf, the reason, bytes per device and gathers."""

import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from xlstm_jax.distributed.data_parallel.reasons import Reason, reason_from_json
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.formats import sent_itemsize
from xlstm_jax.formatting import format_axes, format_bytes, joined

PARAMETERS, OPTIMIZER = "params", "optimizer"  # collections of rows; further ones are the model's, as batch_stats
COUNTED = ("parameters", "gradients", "optimizer", "other")  # the fields of a row that count bytes
LINES = (  # the fields on each line of the JSON: the leaf, its sharding, the reason, its bytes, its gathers
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
    """Bytes: ``total`` of the model's global array, and ``per_device`` of the part stored on each device, with padding.

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
    """Row of a plan: a parameter with its gradient and optimizer state, or any further leaf.

    Attributes:
      path: for a parameter, the path below its collection: ``blocks/mlp/up/kernel``. The path of any further leaf
        begins with the collection: ``(batch_stats) norm/mean``, ``(optimizer) 0/count``.
      collection: "params", the name of a further collection of the model, or "optimizer".
      shape, dtype: of the global array.
      names: an entry for each dim: None, a mesh axis, or a tuple of axes, outermost first.
      parts: number of different shards; 1: the leaf is replicated on every device.
      reason: the reason for the split dim, or for leaving the leaf unsharded.
      use_shape: the shape in the wrapped module: ``shape`` without the dims that ``nn.scan`` added.
      uses: gathers of the leaf in a forward pass: calls of its module, times layers; 0 if the leaf is not gathered.
      gathered_bytes: bytes of the result of a gather on each device, in ``gather_dtype``; 0 if the leaf is not
        gathered. Packed blocks (such as "int8") count as they are sent; the unpacked leaf takes the bytes of its
        stored dtype.
      row_bytes: bytes of a row in communication, for an embedding table that only lookups read: a lookup sends rows
        instead of the table if the rows have fewer bytes. 0 if the table is always gathered.
      piece_bytes: bytes of a piece on each device, for a kernel that its head reads in pieces
        (``by_pieces=True``): a loss gathers pieces instead of the kernel, in forward and again in backward.
        Else 0.
      gather_dtype, grad_scatter_dtype: dtypes of communication; None if the leaf is not gathered.
      gathered_with: path of the module whose parameters are gathered together with the leaf, "" for the model itself;
        None if the leaf is not gathered.
      parameters, gradients, optimizer, other: bytes in device memory; ``other`` counts further collections.
      host: bytes of the optimizer state in host memory (offload); not part of ``optimizer``.
      trainable: False for a frozen parameter, without gradient and optimizer state.

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
        """Returns the row as a few indented lines of a plan's JSON, ``"path": {fields}``, without a last comma."""
        fields = vars(self) | {"reason": self.reason.to_json()}
        if not self.piece_bytes:
            del fields["piece_bytes"]  # version 0.3.0 cannot read this field
        lines = ({name: fields[name] for name in line if name in fields} for line in LINES)
        body = ",\n".join("      " + json.dumps(line)[1:-1] for line in lines)
        return f"    {json.dumps(self.path)}: {{\n{body}\n    }}"

    @classmethod
    def from_json(cls, path: str, leaf: dict[str, Any]) -> "LeafPlan":
        """Returns the row of the leaf at ``path``; ``leaf`` has the fields as parsed from the JSON of ``to_json``."""
        counts = {kind: ByteCount(*leaf[kind]) for kind in (*COUNTED, "host")}
        shapes = {name: tuple(leaf[name]) for name in ("shape", "use_shape")}
        names = tuple(tuple(entry) if isinstance(entry, list) else entry for entry in leaf["names"])
        fields: dict[str, Any] = leaf | counts | shapes | {"names": names, "reason": reason_from_json(leaf["reason"])}
        return cls(path=path, **fields)

    @property
    def dims(self) -> tuple[int, ...]:
        """Indices of the dims that are split over mesh axes; usually a single dim."""
        return tuple(dim for dim, entry in enumerate(self.names) if entry_axes(entry))

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which the leaf is split, in the order of the dims."""
        return tuple(axis for entry in self.names for axis in entry_axes(entry))

    @property
    def layers(self) -> int:
        """Number of layers that ``nn.scan`` has stacked in the leaf; 1 without a scan."""
        return math.prod(self.shape) // max(math.prod(self.use_shape), 1)

    @property
    def gather_itemsize(self) -> float:
        """Bytes of an element in a gather (for packed blocks, with a share of the block's scale); 0 without gathers."""
        return sent_itemsize(self.gather_dtype) if self.gather_dtype else 0

    @property
    def gathered_size(self) -> float:
        """Number of elements in the result of a gather on each device; 0 if the leaf is not gathered."""
        return self.gathered_bytes / self.gather_itemsize if self.uses else 0.0

    @property
    def all_bytes(self) -> ByteCount:
        """Bytes of the leaf, the gradient and the optimizer state in device memory, in total and per device.

        Host memory is not counted.
        """
        return sum((getattr(self, kind) for kind in COUNTED), NO_BYTES)

    @property
    def description(self) -> str:
        """Path, dtype, shape and bytes as text: ``'head/kernel' float32[4096, 50257] (785 MiB)``."""
        # Exactly one kind counts the leaf itself, depending on the collection.
        size = self.parameters.total or self.other.total or self.optimizer.total or self.host.total
        return f"'{self.path}' {self.dtype}{list(self.shape)} ({format_bytes(size)})"

    def sentence(self, devices: int) -> str:
        """Returns a sentence with the sharding of the leaf, the reason, the bytes per device and the gathers.

        ``devices`` is the number of devices of the mesh.
        """
        return f"{self.description} {self._where(devices)}{self._kept()}{self._gathers()}."

    def _where(self, devices: int) -> str:
        seen = f"; its module sees {list(self.use_shape)}" if self.use_shape != self.shape else ""
        if not self.dims:
            where = "the only device" if devices == 1 else f"each of {devices} devices"
            return f"is replicated on {where}: {self.reason}{seen}"
        split = " and ".join(f"dim {dim} over {format_axes(entry_axes(self.names[dim]))}" for dim in self.dims)
        return f"is split along {split} into {self.parts} shard{'s' * (self.parts > 1)} ({self.reason}{seen})"

    def _kept(self) -> str:
        """Returns the clause on the bytes of leaf, gradient and optimizer state that a device stores.

        As "; a device keeps 128 KiB of it and 128 KiB of its gradient"; "" if a device stores no bytes of the leaf.
        """
        counts = {
            "of it": self.parameters.per_device + self.other.per_device,
            "of its gradient": self.gradients.per_device,
            "of optimizer state": self.optimizer.per_device,
        }
        parts = [f"{format_bytes(count)} {kind}" for kind, count in counts.items() if count]
        # A frozen leaf has no bytes of gradient and optimizer state: give the reason in their place.
        frozen = "" if self.trainable else "; it is frozen, without gradient and optimizer state"
        on_host = f", its host {format_bytes(self.host.per_device)} of optimizer state" if self.host.total else ""
        return f"; a device keeps {joined(parts)}{on_host}{frozen}" if parts else ""

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

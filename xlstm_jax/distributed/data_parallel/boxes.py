"""Boxes: which mesh axes split which dim of a parameter, and how its shards travel.

A parameter that is split over mesh axes is a leaf in a box, ``nn.Partitioned(value, names)``. ``names`` has an entry
for each dim of the value, which is ``None`` (the dim is whole), a mesh axis, or a tuple of axes, outermost first:
``("dp", "fsdp")`` on a dim of size 8 over a 2x4 mesh gives device (i, j) the row ``4 i + j``, as in ``PartitionSpec``.

Everything that must know about boxes asks here; ``trees`` walks trees with boxes as leaves. Which dim is split,
``shard_choice`` decides. A box that is read in ``shard_map`` gathers itself.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import meta
from jax.core import Tracer
from typing_extensions import TypeIs

from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import (
    DEFAULT_COMMUNICATION,
    Communication,
    value_dtype,
)
from xlstm_jax.distributed.data_parallel.wire.gather_array import (
    GATHER_SCOPE,
    ReadAsArray,
    gather_dims,
    gathered_by_hand,
    in_loss,
    note_branch,
    whole_value,
)
from xlstm_jax.distributed.data_parallel.wire.packing import PackedAlong


class Box(Protocol):
    """What the library asks of a box: ``nn.Partitioned`` and ``BoxedVariable`` have it.

    A box is a pytree node whose one child is the array; what else it holds is static. How a leaf travels, and its
    padding, are asked of a ``Sharded`` and a ``BoxedVariable`` only: the leaf of any other box travels as it is stored.
    How boxes meet modules (Linen calls their ``unbox`` and ``add_axis``) is up to the front.
    """

    @property
    def names(self) -> Sequence[AxisEntry]: ...  # for each dim of the value, the axes that split it

    def replace_boxed(self, val: Any) -> "Box": ...  # the same box around another value

    def replace(self, **fields: Any) -> Any: ...  # the same with other fields


class Sharded(ReadAsArray, meta.Partitioned[Any]):
    """The box that this library makes: an ``nn.Partitioned`` that is at home inside ``shard_map``.

    ``communication`` says how the leaf travels. ``true_sizes`` has an entry for each dim, or is empty: the size without
    padding where the dim was padded so that the axes divide it, else None.

    ``unit_depth`` says which module gathers it: how many of the last names of the leaf's path lie below that module; 0
    where none is known. ``model_axes`` are those over which the model itself splits it, and no wrapper gathers it
    (tensor parallel, experts).
    ``trainable`` is False of a frozen leaf: whoever reads it, it has no gradient. One that is whole has a box for that
    alone, whose names are all None. ``packed`` says how a frozen leaf is stored in blocks of bytes, which travel as
    they are, and are unpacked where they are read.

    It differs from its parent in two more ways. ``nn.scan`` and ``nn.vmap`` may add their layer dim without giving a
    name for it in ``metadata_params``; the layer dim is then whole. And ``unbox``, by which Linen reads a parameter,
    gathers a shard that no wrapped module has gathered before: over all axes that are bound, but for ``model_axes``.
    (The parent would constrain its sharding, which is an error where the mesh axes are manual.) Read as an array
    (``jnp.dot(x, box)``, ``box.T``, ``box[0]``) it is what ``unbox`` returns. Each such read is a gather of its own.
    """

    names: tuple[AxisEntry, ...] = struct.field(pytree_node=False)  # type: ignore[assignment]  # Flax: no tuples in it
    communication: Communication = struct.field(default=DEFAULT_COMMUNICATION, pytree_node=False)
    true_sizes: tuple[int | None, ...] = struct.field(default=(), pytree_node=False)
    unit_depth: int = struct.field(default=0, pytree_node=False)
    model_axes: tuple[str, ...] = struct.field(default=(), pytree_node=False)
    trainable: bool = struct.field(default=True, pytree_node=False)
    packed: PackedAlong | None = struct.field(default=None, pytree_node=False)

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        axes = self._axes_to_read()
        if not axes:
            return read_value(self)
        is_whole = isinstance(self.value, jax.Array | np.ndarray) and not isinstance(self.value, Tracer)
        if is_whole and (spread := collectives.spread_axes(axes)):
            raise whole_value("a parameter that is read", np.shape(self.value), spread)
        collectives.check_bound(copied_axes(self), caller="a parameter that is read, replicas of it")
        with jax.named_scope(GATHER_SCOPE):
            return leaf_value(gather_leaf(self, axes, self.communication))

    def _axes_to_read(self) -> tuple[str, ...]:
        """The axes over which it is gathered when it is read here; outside of ``shard_map`` values are global."""
        axes = tuple(axis for entry in self.names for axis in entry_axes(entry))
        bound = tuple(axis for axis in axes if axis not in self.model_axes and collectives.is_bound(axis))
        if bound and len(self.names) != np.ndim(self.value):
            raise ValueError(
                f"a parameter is read that has the shape {np.shape(self.value)} on this device, and a box for "
                f"{len(self.names)} dims, {self.names}: it was stacked or sliced without its box, by jax.vmap or "
                "jax.lax.scan, say. Use nn.vmap or nn.scan, or call gather_params before."
            )
        return bound

    @property
    def dtype(self) -> Any:
        if self.packed:
            return self.packed.arrival_dtype(self.communication if self._axes_to_read() else None)
        return self.communication.dtypes(self.value)[0] if self._axes_to_read() else value_dtype(self.value)

    @property
    def ndim(self) -> int:
        return np.ndim(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        read = self._axes_to_read()
        parts = [collectives.axis_size([a for a in entry_axes(entry) if a in read]) for entry in leaf_names(self)]
        stored = np.shape(self.value)
        dims = zip(self.packed.true_shape(stored) if self.packed else stored, parts, true_sizes(self), strict=True)
        return tuple(size * count if true is None else true for size, count, true in dims)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        index = index % (len(self.names) + 1)
        sizes = self.true_sizes and (*self.true_sizes[:index], None, *self.true_sizes[index:])
        return self.replace(names=super().add_axis(index, params).names, true_sizes=sizes)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        index = index % len(self.names)
        if self.packed and index >= len(self.names) + self.packed.dim:
            raise ValueError(
                f"a frozen parameter with the names {self.names} is packed as {self.packed.format_name} along dim "
                f"{len(self.names) + self.packed.dim}, and dim {index} is that of its layers. Give nn.scan its layers "
                "along dim 0, or freeze this parameter in a floating dtype."
            )
        sizes = self.true_sizes and self.true_sizes[:index] + self.true_sizes[index + 1 :]
        return self.replace(names=super().remove_axis(index, params).names, true_sizes=sizes)

    def _get_partition_name(self, params: dict[Any, Any]) -> str | None:  # type: ignore[override]  # Flax: no None
        return params.get(meta.PARTITION_NAME)


class PartlyGathered(Sharded):
    """The box of a leaf that a gather over other axes has left split; its module reads the shard (tensor parallel)."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        return self.value

    def _axes_to_read(self) -> tuple[str, ...]:
        return ()


def gather_leaf(leaf: Box, axes: tuple[str, ...], how: Communication, path: str = "") -> Any:
    """The value of a leaf gathered over ``axes``, without padding; in a box where it is split over others still."""
    note_branch(path)
    value, names = gather_dims(shard_to_gather(leaf, axes, path), leaf_names(leaf), axes, how, path)
    return as_gathered(leaf, value, names, axes, how)


def shard_to_gather(leaf: Box, axes: tuple[str, ...], path: str = "") -> Any:
    """The shard of a leaf for a gather over ``axes``; see ``gathered_by_hand`` where the model itself splits it."""
    says = isinstance(leaf, Sharded | BoxedVariable)
    own = set(model_axes(leaf)) if says else in_loss.get().own & set(leaf_axes(leaf))
    return gathered_by_hand(_as_read(leaf, leaf_value(leaf)), tuple(axis for axis in axes if axis in own), path)


def as_gathered(leaf: Box, value: Any, names: tuple[AxisEntry, ...], axes: tuple[str, ...], how: Communication) -> Any:
    """``value``, gathered over ``axes`` with the ``names`` that are left, as ``gather_leaf`` returns it."""
    value = _unpacked(leaf, value, how)
    sizes = true_sizes(leaf)
    whole = tuple(slice(size if entry is None else None) for size, entry in zip(sizes, names, strict=True))
    value = value[whole] if any(sizes) else value
    if not any(names):
        return value
    gathered = set(leaf_axes(leaf)) & set(axes)
    return PartlyGathered(
        value,
        names,
        communication=replace(how, replicas=None) if gathered else how,
        true_sizes=sizes if any(sizes) else (),
        unit_depth=unit_depth(leaf),
        trainable=is_trainable(leaf),
    )


class BoxedVariable:
    """A variable of NNX that is a box itself: all that a ``Sharded`` is, but for ``value``, which its modules read.

    Whoever reads ``value`` wants the whole parameter, and gets it gathered; the library reads ``stored``.
    """

    __slots__ = ()

    @property
    def stored(self) -> Any:
        """The array, or whatever a transformed tree holds instead of it."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[AxisEntry, ...]:
        raise NotImplementedError

    @property
    def communication(self) -> Communication:
        raise NotImplementedError

    @property
    def true_sizes(self) -> tuple[int | None, ...]:
        raise NotImplementedError

    @property
    def model_axes(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def trainable(self) -> bool:
        raise NotImplementedError

    def replace(self, **fields: Any) -> "BoxedVariable":
        raise NotImplementedError

    def replace_boxed(self, val: Any) -> "BoxedVariable":
        raise NotImplementedError


def is_box(leaf: Any) -> TypeIs[Box]:
    """Whether ``leaf`` is a value in a box that carries axis names."""
    return isinstance(leaf, meta.Partitioned | BoxedVariable)


def leaf_value(leaf: Any) -> Any:
    """The array of a leaf, in a box or not."""
    if isinstance(leaf, BoxedVariable):
        return leaf.stored
    return leaf.value if isinstance(leaf, meta.Partitioned) else leaf


def leaf_names(leaf: Any) -> tuple[AxisEntry, ...]:
    """The leaf's names, one for each dim of its value: filled up with ``None`` where there are fewer.

    More than dims there are around the scalar that an optimizer keeps for each leaf of a boxed tree; they are left out.
    """
    names, ndim = tuple(leaf.names) if is_box(leaf) else (), np.ndim(leaf_value(leaf))
    return (names + (None,) * ndim)[:ndim]


def with_layer_names(leaf: Any) -> Any:
    """The leaf in a box whose names say that the leading dims, those that it has no names for, are whole."""
    if not isinstance(leaf, meta.Partitioned):
        return leaf
    layers = (None,) * (np.ndim(leaf.value) - len(leaf.names))
    boxed = leaf.replace(names=layers + tuple(leaf.names))
    return (
        boxed.replace(true_sizes=layers + leaf.true_sizes) if isinstance(leaf, Sharded) and leaf.true_sizes else boxed
    )


def with_last_names(leaf: Any, ndim: int) -> Any:
    """The leaf in a box that has names for the last ``ndim`` dims only: those of a layer."""
    return leaf.replace(names=tuple(leaf.names)[-ndim:]) if is_box(leaf) else leaf


def leaf_axes(leaf: Any) -> tuple[str, ...]:
    """All mesh axes that a leaf is split over, in the order of its dims; () for a leaf without a box."""
    return tuple(axis for entry in leaf_names(leaf) for axis in entry_axes(entry))


def model_axes(leaf: Any) -> tuple[str, ...]:
    """Those of ``leaf_axes`` over which the model itself splits a leaf: no wrapper gathers it over them."""
    own = leaf.model_axes if isinstance(leaf, Sharded | BoxedVariable) else ()
    return tuple(axis for axis in leaf_axes(leaf) if axis in own)


def gathered_axes(leaf: Any) -> tuple[str, ...]:
    """Those of ``leaf_axes`` over which wrappers, or ``gather_params``, gather a leaf."""
    return tuple(axis for axis in leaf_axes(leaf) if axis not in model_axes(leaf))


def split_by_model(leaf: Any, gathered: Collection[str] = ()) -> Any:
    """A leaf that its model has boxed, in a box that says so; ``gathered`` are the axes of a wrapper around the model.

    An ``nn.Partitioned`` does not tell experts, of which each device has its own, from shards that are to be gathered.
    """
    if not is_box(leaf) or not leaf_axes(leaf) or isinstance(leaf, BoxedVariable):
        return leaf
    own = model_axes(leaf) if isinstance(leaf, Sharded) else leaf_axes(leaf)
    left = tuple(axis for axis in own if axis not in gathered)
    if isinstance(leaf, Sharded):
        return leaf.replace(model_axes=left)
    return Sharded(leaf_value(leaf), tuple(leaf.names), model_axes=left)


def rebox(leaf: Any, value: Any) -> Any:
    """``value`` in the box of ``leaf``, or bare where ``leaf`` has none."""
    return leaf.replace_boxed(value) if is_box(leaf) else value


def is_trainable(leaf: Any) -> bool:
    """False for a leaf that its box says is frozen."""
    return leaf.trainable if isinstance(leaf, Sharded | BoxedVariable) else True


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf takes a gradient: floats do, unless they are frozen; integers, bools and PRNG keys do not."""
    return is_trainable(leaf) and jnp.issubdtype(value_dtype(leaf_value(leaf)), jnp.inexact)


def frozen(leaf: Any) -> Any:
    """The leaf in a box that says that it is frozen; itself where it takes no gradient anyway."""
    if not is_differentiable(leaf):
        return leaf
    if isinstance(leaf, Sharded | BoxedVariable):
        return leaf.replace(trainable=False)
    return Sharded(leaf_value(leaf), leaf_names(leaf), model_axes=leaf_axes(leaf), trainable=False)


def box_dim(
    leaf: Any, value: Any, dim: int, axes: tuple[str, ...], communication: Communication, true_size: int | None
) -> Sharded:
    """``value`` in a box that splits ``dim`` over ``axes`` and keeps what the box of ``leaf`` says of other dims.

    ``true_size`` is the size of ``dim`` without padding, where ``value`` was padded.
    """
    names, sizes = list(leaf_names(leaf)), list(true_sizes(leaf))
    names[dim], sizes[dim] = axes_entry(axes), true_size
    split = {axis for entry in names for axis in entry_axes(entry)}
    replicas = communication.replicas or leaf_communication(leaf).replicas
    how = replace(communication, replicas=replicas).not_copied_along(split)
    true = tuple(sizes) if any(sizes) else ()
    box = Sharded(value, tuple(names), communication=how, true_sizes=true, model_axes=model_axes(leaf))
    return box.replace(trainable=is_trainable(leaf))


def unit_depth(leaf: Any) -> int:
    """How many of the last names of a leaf's path lie below the module that gathers it; 0: not known."""
    return leaf.unit_depth if isinstance(leaf, Sharded) else 0


def true_sizes(leaf: Any) -> tuple[int | None, ...]:
    """For each dim its size without padding where it was padded, else None."""
    sizes = leaf.true_sizes if isinstance(leaf, Sharded | BoxedVariable) else ()
    return sizes or (None,) * np.ndim(leaf_value(leaf))


def is_padded(leaf: Any) -> bool:
    """Whether a leaf is stored with padding."""
    return any(true_sizes(leaf))


def true_shape(leaf: Any) -> tuple[int, ...]:
    """The global shape that the plain model's leaf has, for a leaf of global shape, padded or not."""
    shape = np.shape(leaf_value(leaf))
    shape = leaf.packed.true_shape(shape) if is_packed(leaf) else shape
    return tuple(size if true is None else true for size, true in zip(shape, true_sizes(leaf), strict=True))


def true_value(leaf: Any) -> Any:
    """The value, whole or global, of a leaf without its padding, and unpacked."""
    value = _unpacked(leaf, leaf_value(leaf))
    return value[tuple(slice(size) for size in true_shape(leaf))] if is_padded(leaf) else value


def read_value(leaf: Any) -> Any:
    """``true_value`` for a module to compute with; of a frozen leaf it has no gradient."""
    return _as_read(leaf, true_value(leaf))


def _as_read(leaf: Any, value: Any) -> Any:
    return value if is_trainable(leaf) else jax.lax.stop_gradient(value)


def is_packed(leaf: Any) -> bool:
    """Whether a leaf is stored in blocks of bytes."""
    return isinstance(leaf, Sharded) and leaf.packed is not None


def unpacked(leaf: Any) -> Any:
    """The leaf as it was before it was packed, but for what was rounded."""
    return leaf.replace(value=leaf.packed.unpack(leaf.value), packed=None) if is_packed(leaf) else leaf


def _unpacked(leaf: Any, value: Any, how: Communication | None = None) -> Any:
    return leaf.packed.unpack(value, how) if is_packed(leaf) else value


def with_padding(leaf: Any, value: Any) -> Any:
    """``value``, which has the true shape of ``leaf``, with zeros up to the shape in which ``leaf`` is stored."""
    if not is_padded(leaf):
        return value
    stored = np.shape(leaf_value(leaf))
    return jnp.pad(value, [(0, size - true) for size, true in zip(stored, np.shape(value), strict=True)])


def copied_axes(leaf: Any) -> tuple[str, ...]:
    """The axes along which a leaf has copies, by its box."""
    return leaf_communication(leaf).copied_axes


def reduced_axes(leaf: Any) -> tuple[str, ...]:
    """The axes over which the gather of a leaf reduces its gradient: those that split it, and those of its copies."""
    return gathered_axes(leaf) + copied_axes(leaf)


def leaf_communication(leaf: Any) -> Communication:
    """How a leaf travels, by its box; ``DEFAULT_COMMUNICATION`` where that does not say."""
    return leaf.communication if isinstance(leaf, Sharded | BoxedVariable) else DEFAULT_COMMUNICATION


def with_communication(leaf: Any, **fields: Any) -> Any:
    """The leaf with other fields of its box's ``Communication``; itself where the box has none."""
    if not isinstance(leaf, Sharded | BoxedVariable):
        return leaf
    return leaf.replace(communication=replace(leaf.communication, **fields))


def leaf_bytes(leaf: Any) -> int:
    """Bytes of a leaf as it is stored: of the global array or, inside ``shard_map``, of this device's shard."""
    value = leaf_value(leaf)
    return math.prod(np.shape(value)) * value_dtype(value).itemsize

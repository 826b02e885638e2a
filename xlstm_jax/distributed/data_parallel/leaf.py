"""A leaf: one array of a tree, with what is known of it.

A parameter that is split over mesh axes stands in a tree in a box, ``nn.Partitioned(value, names)``. ``names`` has an
entry for each dim of the value, which is ``None`` (the dim is whole), a mesh axis, or a tuple of axes, outermost first:
``("dp", "fsdp")`` on a dim of size 8 over a 2x4 mesh gives device (i, j) the row ``4 i + j``, as in ``PartitionSpec``.

``Sharded`` is the library's own box: all else that is known of a leaf are its fields and properties. Trees hold other
leaves too: bare arrays, boxes of Flax, variables of NNX. ``leaf_of`` is the one place that reads these, as ``Sharded``:

  leaf_of(leaf).value, .names, .axes, .communication, .trainable, ...      what is known
  rebox(leaf, value), frozen(leaf), with_communication(leaf, ...)          another leaf, for the tree
  true_value(leaf), read_value(leaf), gather_leaf(leaf, axes, how)         its values
  stored_value(leaf, value)                                                a value, as the leaf stores values

``trees`` walks trees with boxes as leaves. Which dim is split, ``policy`` decides. A box that is read inside
``shard_map`` gathers itself.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import meta
from jax.core import Tracer
from jax.typing import DTypeLike

from xlstm_jax.distributed.data_parallel.dim_names import reader
from xlstm_jax.distributed.data_parallel.quick_box import QuickBox
from xlstm_jax.distributed.data_parallel.store import AS_IT_IS, Kept, Store
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Communication
from xlstm_jax.distributed.data_parallel.wire.dtypes import value_dtype
from xlstm_jax.distributed.data_parallel.wire.gather_array import gather_dims, gathered_by_hand
from xlstm_jax.distributed.data_parallel.wire.tracing import running_loss
from xlstm_jax.distributed.data_parallel.wire.wires import Wire
from xlstm_jax.program_names import GATHER_SCOPE

# --------------------------------------------------------------------------------------------------------- one leaf


LOOKED_UP = "looked_up"  # the mark of an embedding's table that one lookup alone has read while the model initialised


class Sharded(QuickBox):
    """An array and what is known of it: the box that this library makes, and what ``leaf_of`` makes of any leaf.

    Fields, all static but ``value``:
      names: for each dim the axes that split it.
      communication: how the leaf travels.
      store: what the stored array has to do with the value: see ``store``.
      unit_depth: tells the wrapped module that gathers the leaf: the number of names in the leaf's path after that
        module's own path. 1 for "blocks/mlp/kernel" gathered by "blocks/mlp"; 0 where no module is known.
      model_axes: axes over which the model itself splits the leaf, and no wrapper gathers it (tensor parallel,
        experts).
      trainable: False for a frozen leaf, which has no gradient wherever it is read. A frozen leaf that is whole has a
        box only to say this; its names are all None.
      read_as_stored: True for what is left after a gather over some of the axes: the module reads the shard (tensor
        parallel).
      marks: what extensions note on the leaf, by names of their own.

    A box that is read gathers itself. Linen reads a parameter by ``unbox``: where no wrapped module has gathered the
    shard, ``unbox`` gathers it, over all bound axes except ``model_axes``. (``nn.Partitioned.unbox`` constrains the
    sharding instead, which is an error where the mesh axes are manual.) A box also reads as an array
    (``jnp.dot(x, box)``, ``box.T``, ``box[0]``), which calls ``unbox``. Each read is one more gather.

    A layer dim that ``nn.scan`` or ``nn.vmap`` adds is whole, unless ``metadata_params`` has a name for it.
    """

    names: tuple[AxisEntry, ...] = struct.field(pytree_node=False)  # type: ignore[assignment]  # Flax: no tuples in it
    communication: Communication = struct.field(default=DEFAULT_COMMUNICATION, pytree_node=False)
    store: Store = struct.field(default=AS_IT_IS, pytree_node=False)
    unit_depth: int = struct.field(default=0, pytree_node=False)
    model_axes: tuple[str, ...] = struct.field(default=(), pytree_node=False)
    trainable: bool = struct.field(default=True, pytree_node=False)
    read_as_stored: bool = struct.field(default=False, pytree_node=False)
    marks: frozenset[str] = struct.field(default=frozenset(), pytree_node=False)

    # ------------------------------------------------------------------------------------------------ what is known

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that the leaf is split over, in the order of its dims; () where it is whole."""
        return sum(map(entry_axes, self.names), ())

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """``axes`` without ``model_axes``: wrapped modules, or ``gather_params``, gather the leaf over these."""
        return tuple(axis for axis in self.axes if axis not in self.model_axes)

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """The axes over which the backward pass of the gather averages: the gathered axes, and the axes of copies."""
        return self.gathered_axes + self.communication.copied_axes

    @property
    def is_differentiable(self) -> bool:
        """Whether it takes a gradient: floats do, unless they are frozen; integers, bools and PRNG keys do not."""
        return self.trainable and jnp.issubdtype(value_dtype(self.value), jnp.inexact)

    @property
    def stores_value(self) -> bool:
        """Whether the stored array is the value itself."""
        return self.store == AS_IT_IS

    @property
    def true_shape(self) -> tuple[int, ...]:
        """The global shape that the plain model's leaf has, of a leaf that is stored whole."""
        return self.shape_of_parts([1] * np.ndim(self.value))

    def shape_of_parts(self, counts: list[int]) -> tuple[int, ...]:
        """Returns the shape of the value, of ``counts`` such parts along each dim."""
        return self.store.shape(np.shape(self.value), counts)

    @property
    def stored_bytes(self) -> int:
        """Bytes as it is stored: of the global array or, inside ``shard_map``, of this device's shard."""
        return math.prod(np.shape(self.value)) * value_dtype(self.value).itemsize

    def __repr__(self) -> str:
        """Dtype, shape and names of what is stored, and the fields that are not the default."""
        has_shape = hasattr(self.value, "shape") and hasattr(self.value, "dtype")
        value = f"{self.value.dtype}{list(self.value.shape)}" if has_shape else repr(self.value)
        rest = [(f.name, getattr(self, f.name), f.default) for f in fields(self) if f.name not in ("value", "names")]
        said = [f"{name}={found!r}" for name, found, default in rest if found != default]
        return f"{type(self).__name__}({', '.join([value, str(self.names), *said])})"

    # ------------------------------------------------------------------------------------------- it is read as an array

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        if self.read_as_stored:
            return self.value
        axes = self._axes_to_read()
        if not axes:
            return read_value(self)
        is_whole = isinstance(self.value, jax.Array | np.ndarray) and not isinstance(self.value, Tracer)
        if is_whole and (spread := collectives.spread_axes(axes)):
            raise whole_value("a parameter that is read", np.shape(self.value), spread)
        collectives.check_bound(self.communication.copied_axes, caller="a parameter that is read, replicas of it")
        with jax.named_scope(GATHER_SCOPE):
            found = gather_leaf(self, axes, self.communication)
            return found.value if isinstance(found, Sharded) else found  # other axes may split it still

    def _axes_to_read(self) -> tuple[str, ...]:
        """The axes over which a read gathers here; () outside of ``shard_map``, where values are global."""
        if self.read_as_stored:
            return ()
        bound = tuple(axis for axis in self.gathered_axes if collectives.is_bound(axis))
        if bound and len(self.names) != np.ndim(self.value):
            raise ValueError(
                f"a parameter is read that has the shape {np.shape(self.value)} on this device, and a box for "
                f"{len(self.names)} dims, {self.names}: it was stacked or sliced without its box, by jax.vmap or "
                "jax.lax.scan, say. Use nn.vmap or nn.scan, or call gather_params before."
            )
        return bound

    @property
    def dtype(self) -> Any:
        return self.communication.dtypes(self.value)[0] if self._axes_to_read() else value_dtype(self.value)

    @property
    def ndim(self) -> int:
        return np.ndim(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        read, leaf = self._axes_to_read(), leaf_of(self)
        counts = [collectives.axis_size([a for a in entry_axes(entry) if a in read]) for entry in leaf.names]
        return leaf.shape_of_parts(counts)

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.unbox(), dtype, copy=copy)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.unbox()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.unbox())

    @property
    def T(self) -> jax.Array:  # noqa: N802  # as arrays have it
        return self.unbox().T

    def astype(self, dtype: DTypeLike) -> jax.Array:
        return self.unbox().astype(dtype)

    # ------------------------------------------------------------------------------------ Flax adds and takes layers

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        index = index % (len(self.names) + 1)
        return self.replace(names=super().add_axis(index, params).names, store=self.store.with_dim(index))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        index = index % len(self.names)
        # Flax's own compares with the name that was added, which rules may have changed.
        return self.replace(names=self.names[:index] + self.names[index + 1 :], store=self.store.without_dim(index))

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        for name in Store.OF_OLD_FIELDS.keys() & state.keys():
            state["store"] = Store.OF_OLD_FIELDS[name](state.pop(name))
        # Boxes that were pickled before boxes had marks had a field for this one.
        if state.pop(LOOKED_UP, False):
            state["marks"] = frozenset({LOOKED_UP})
        super().__setstate__(state)

    def _get_partition_name(self, params: dict[Any, Any]) -> AxisEntry:  # type: ignore[override]  # Flax: no None
        return reader().layer_name(params.get(meta.PARTITION_NAME))


# -------------------------------------------------------------------------------------------------- leaves of others


class SplitVariable:
    """A variable of NNX that is split: a leaf of a tree as a box is, which its module reads as the whole array."""

    __slots__ = ()

    @property
    def as_sharded(self) -> Sharded:
        """The stored array, or whatever a transformed tree holds instead of it, and what is known of it."""
        raise NotImplementedError

    @property
    def names(self) -> tuple[AxisEntry, ...]:
        return self.as_sharded.names

    def replace(self, **fields: Any) -> "SplitVariable":
        """The same with other fields of ``as_sharded``."""
        raise NotImplementedError

    def replace_boxed(self, val: Any) -> "SplitVariable":
        """The same with another stored array."""
        raise NotImplementedError


BOXES = (meta.Partitioned, SplitVariable)  # values in boxes that carry axis names


def is_box(leaf: Any) -> bool:
    """Whether ``leaf`` is a value in a box that carries axis names."""
    return _is_of_boxes(type(leaf))  # type: ignore[arg-type]  # mypy: a class might not be hashable


@cache  # walks ask it of each node of a tree, and Flax's box is an abstract class, whose answers are slow
def _is_of_boxes(cls: type[Any]) -> bool:
    return issubclass(cls, BOXES)


@cache
def _whole(ndim: int) -> Any:
    """The structure of a tree that is a bare array in a box."""
    return jax.tree.structure(Sharded(0, (None,) * ndim))


def is_ours(leaf: Any) -> bool:
    """Whether ``leaf`` is in a box of the library, which tells how it travels and which axes are the model's own."""
    return isinstance(leaf, Sharded | SplitVariable)


def leaf_of(leaf: Any) -> Sharded:
    """What is known of any leaf of a tree: a bare value, a box of Flax, a variable of NNX, a ``Sharded``.

    ``names`` has an entry for each dim, None where the box has none for it. A box has more names than dims around the
    scalar that an optimizer keeps for each leaf of a boxed tree; they are left out.
    """
    # As nearly all are, and thousands of times in a trace: ``np.ndim`` would take as long as all the rest.
    if type(leaf) is Sharded and not leaf.model_axes and len(leaf.names) == getattr(leaf.value, "ndim", None):
        return leaf
    if not is_box(leaf):
        ndim = getattr(leaf, "ndim", None)
        return _whole(np.ndim(leaf) if ndim is None else ndim).unflatten((leaf,))
    if isinstance(leaf, SplitVariable):
        return leaf.as_sharded
    ndim = np.ndim(leaf.value)
    names = (reader().mesh_names(leaf) + (None,) * ndim)[:ndim]
    # A box of Flax does not say which axes are the model's own: within a loss, the parameters of the loss say it.
    known = leaf.model_axes if isinstance(leaf, Sharded) else running_loss().model_axes
    own = tuple(axis for entry in names for axis in entry_axes(entry) if axis in known) if known else ()
    if not isinstance(leaf, Sharded):
        return Sharded(leaf.value, names, model_axes=own)
    return leaf if (leaf.names, leaf.model_axes) == (names, own) else leaf.replace(names=names, model_axes=own)


# ---------------------------------------------------------------------------------------------- other leaves for trees


def rebox(leaf: Any, value: Any) -> Any:
    """``value`` in the box of ``leaf``, or bare where ``leaf`` has none."""
    return leaf.replace_boxed(value) if is_box(leaf) else value


def split_by_model(leaf: Any, gathered: Collection[str] = ()) -> Any:
    """The leaf with the axes in its box as ``model_axes``, except the axes in ``gathered``, which a wrapper gathers.

    An ``nn.Partitioned`` does not say whether its shards are to be gathered, or are the model's own (experts).
    """
    box = leaf_of(leaf)
    if reader().has_rules_for(leaf):  # of a model that knows whole parameters alone
        return box if box.axes else box.value
    if not box.axes or isinstance(leaf, SplitVariable):
        return leaf
    own = box.model_axes if is_ours(leaf) else box.axes
    return box.replace(model_axes=tuple(axis for axis in own if axis not in gathered))


def frozen(leaf: Any) -> Any:
    """The leaf in a box that says that it is frozen; itself where it takes no gradient anyway."""
    if not leaf_of(leaf).is_differentiable:
        return leaf
    boxed = split_by_model(leaf)
    return (boxed if is_ours(boxed) else leaf_of(boxed)).replace(trainable=False)


def with_communication(leaf: Any, **fields: Any) -> Any:
    """The leaf with other fields of its box's ``Communication``; itself where its box has none."""
    return leaf.replace(communication=replace(leaf_of(leaf).communication, **fields)) if is_ours(leaf) else leaf


def with_layer_names(leaf: Any) -> Any:
    """The leaf with None in front of its names, for leading dims (layers) that have no name yet."""
    if not isinstance(leaf, meta.Partitioned):
        return leaf
    layers = (None,) * (np.ndim(leaf.value) - len(leaf.names))
    stores = {}
    if isinstance(leaf, Sharded):
        store = leaf.store
        for _ in layers:
            store = store.with_dim(0)
        stores = {"store": store}
    return leaf.replace(names=layers + tuple(leaf.names), **stores)


def with_last_names(leaf: Any, ndim: int) -> Any:
    """The leaf with names for its last ``ndim`` dims only, which are the dims of one layer."""
    return leaf.replace(names=tuple(leaf.names)[-ndim:]) if is_box(leaf) else leaf


def split_along(box: Sharded, kept: Kept, axes: tuple[str, ...], communication: Communication) -> Sharded:
    """Returns ``kept``, as which the leaf ``box`` is stored, in a box that splits its dim over ``axes``."""
    names = list(kept.names)
    names[kept.dim] = axes_entry(axes)
    split = {axis for entry in names for axis in entry_axes(entry)}
    replicas = communication.replicas or box.communication.replicas
    return Sharded(
        kept.value,
        tuple(names),
        communication=replace(communication, replicas=replicas).not_copied_along(split),
        store=kept.store,
        model_axes=box.model_axes,
        trainable=box.trainable,
    )


# --------------------------------------------------------------------------------------------------- whose to gather


def path_in_model(module: tuple[str, ...] | None, path: str) -> str:
    """The path of a leaf from the top of the model, for one of the Linen module at a path; itself without a module."""
    return path if module is None else "/".join((*module, path.removeprefix("params/")))


def is_gathered_here(path: str, leaf: Sharded) -> bool:
    """Whether a leaf at this path among a module's variables is its own to gather, and not that of a module inside."""
    # The first name of the path is that of the collection.
    return not 0 < leaf.unit_depth < path.count("/")


# -------------------------------------------------------------------------------------------------------- its values


def true_value(leaf: Any) -> Any:
    """Returns the value of a leaf, replicated or global, as the plain model has it."""
    box = leaf_of(leaf)
    return box.store.read(box.value, (False,) * np.ndim(box.value))


def stored_value(leaf: Any, value: Any) -> Any:
    """Returns ``value``, of the true shape of ``leaf``, as ``leaf`` stores values."""
    box = leaf_of(leaf)
    return box.store.write(value, np.shape(box.value))


def read_value(leaf: Sharded) -> Any:
    """``true_value``, without gradient where the leaf is frozen: what a module computes with."""
    return as_read(leaf, true_value(leaf))


def as_read(leaf: Sharded, value: Any) -> Any:
    """Returns ``value`` as that of the leaf: without gradient where the leaf is frozen."""
    return value if leaf.trainable else jax.lax.stop_gradient(value)


def gather_leaf(
    leaf: Sharded, axes: tuple[str, ...], how: Communication, path: str = "", wire: Wire | None = None
) -> Any:
    """Returns the value gathered over ``axes``; in a box where other axes still split it.

    What ``how`` leaves open, the box of the leaf says. A ``wire`` replaces the wire of these options.
    """
    how = how.or_else(leaf.communication)
    if set(leaf.axes) & set(axes):
        collectives.check_bound(how.copied_axes, caller=f"gather_params, replicas of '{path}'")
        how.dtypes(leaf.value, path)  # refused here, with the leaf's name

    def gather() -> Any:
        value, names = gather_dims(shard_to_gather(leaf, axes, path), leaf.names, axes, how, path, wire)
        return as_gathered(leaf, value, names, axes, how)

    # The box but for its shard says how the shard is gathered, and what becomes of it then.
    key = leaf.replace(value=None), axes, how, type(wire)
    return running_loss().gathered_once(leaf.value, key, gather, path)


def shard_to_gather(leaf: Sharded, axes: tuple[str, ...], path: str) -> Any:
    """The shard that a gather over ``axes`` sends; ``gathered_by_hand`` corrects its gradient for ``model_axes``."""
    return gathered_by_hand(as_read(leaf, leaf.value), tuple(axis for axis in axes if axis in leaf.model_axes), path)


def as_gathered(
    leaf: Sharded, value: Any, names: tuple[AxisEntry, ...], axes: tuple[str, ...], how: Communication
) -> Any:
    """What ``gather_leaf`` returns for ``value``, which was gathered over ``axes``; ``names`` still split it."""
    value = leaf.store.read(value, [entry is not None for entry in names])
    if not any(names):
        return value
    return Sharded(
        value,
        leaf.store.of_value(names),
        communication=replace(how, replicas=None) if set(leaf.axes) & set(axes) else how,
        store=leaf.store.after_read(),
        unit_depth=leaf.unit_depth,
        trainable=leaf.trainable,
        read_as_stored=True,
    )


def whole_value(what: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> ValueError:
    """The error for a leaf, named by ``what``, with a whole value in a box that says it is split."""
    return ValueError(
        f"{what} is split over {axes} by its box, and its value of shape {shape} is whole on each device: a function "
        "inside shard_map closes over it, where it must be passed in to be a shard. Parameters that a loss does not "
        "train (LoRA) belong into state.params, too, where they are frozen: create_train_state(..., trainable=lambda "
        "path: 'lora' in path), or freeze_params."
    )

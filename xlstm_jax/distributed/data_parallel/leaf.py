"""Leaves: the arrays of a parameter tree, with their axes, communication options and storage format.

A parameter that is split over mesh axes is stored in the tree in a box, ``nn.Partitioned(value, names)``. ``names``
has an entry for each dim of the value: ``None`` (not split), a mesh axis, or a tuple of axes, outermost first.
``("dp", "fsdp")`` on a dim of size 8 over a 2x4 mesh gives device (i, j) the row ``4 i + j``, as in ``PartitionSpec``.

``Sharded`` is the library's box; its fields and properties hold the metadata of a leaf. Trees also contain bare arrays,
boxes of Flax, and variables of NNX. Only ``leaf_of`` reads these, and returns a ``Sharded``:

  leaf_of(leaf).value, .names, .axes, .communication, .trainable, ...      metadata of any leaf
  rebox(leaf, value), frozen(leaf), split_by_model(leaf)                   a changed leaf for the tree
  true_value(leaf), read_value(leaf), gather_leaf(leaf, axes, ...)         values of a leaf
  stored_value(leaf, value)                                                a value in the leaf's storage format

``trees`` walks trees with boxes as leaves. ``policy`` chooses the dim to split. A box that is read inside
``shard_map`` gathers itself.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import meta
from flax.core.tracers import current_trace
from jax.core import Tracer

from xlstm_jax.distributed.data_parallel.boxes import QuickBox, ReadAsArray, reader
from xlstm_jax.distributed.data_parallel.store import UNCHANGED_STORE, Store
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, entry_axes, value_dtype
from xlstm_jax.distributed.data_parallel.wire.communication import DEFAULT_COMMUNICATION, Communication, gather_dims
from xlstm_jax.distributed.data_parallel.wire.gradient_rules import with_equal_type, with_summed_gradient
from xlstm_jax.distributed.data_parallel.wire.running_loss import RUNNING_LOSS
from xlstm_jax.distributed.data_parallel.wire.wire import Wire
from xlstm_jax.introspection import inside_branch
from xlstm_jax.program_names import GATHER_SCOPE

# --------------------------------------------------------------------------------------------------------- one leaf


LOOKED_UP = "looked_up"  # mark of an embedding table that exactly one lookup read while the model was initialised
SPLIT_BY_RULES = "split_by_rules"  # mark of a leaf that rules for logical names split: the module reads all values


class Sharded(ReadAsArray, QuickBox):
    """Array with sharding metadata: the library's box, and the form in which ``leaf_of`` returns any leaf.

    Fields, all static except ``value``:
      names: for each dim of the stored array the axes that split the dim.
      communication: dtypes and axes of the leaf's gather and of its gradient.
      store: relation between the stored array and the value: see ``store``.
      unit_depth: identifies the wrapped module that gathers the leaf: the number of names in the leaf's path below
        that module's path. 1 for "blocks/mlp/kernel" gathered by "blocks/mlp"; 0 if no module is known.
      model_axes: axes over which the model itself splits the leaf (tensor parallel, experts). No wrapper gathers over
        these axes.
      trainable: False for a frozen leaf, which has no gradient wherever it is read. A replicated frozen leaf has a box
        only for this field, with the names ``(None, ...)``.
      read_as_stored: True after a gather over some of the axes: the module reads the remaining shard (tensor
        parallel).
      marks: notes of extensions on the leaf, as strings.

    A box that is read gathers itself. Linen reads a parameter by ``unbox``: if no wrapped module has gathered the
    shard, ``unbox`` gathers over the bound axes except ``model_axes``. (``nn.Partitioned.unbox`` constrains the
    sharding instead, which is an error where the mesh axes are manual.) A box can also be read as an array
    (``jnp.dot(x, box)``, ``box.T``, ``box[0]``) by a call of ``unbox``. Reads in the same loss share
    a gather, other reads gather each.

    A layer dim that ``nn.scan`` or ``nn.vmap`` adds is not split, unless ``metadata_params`` names an axis for the
    dim.
    """

    names: tuple[AxisEntry, ...] = struct.field(pytree_node=False)  # type: ignore[assignment]  # Flax: no tuples in it
    communication: Communication = struct.field(default=DEFAULT_COMMUNICATION, pytree_node=False)
    store: Store = struct.field(default=UNCHANGED_STORE, pytree_node=False)
    unit_depth: int = struct.field(default=0, pytree_node=False)
    model_axes: tuple[str, ...] = struct.field(default=(), pytree_node=False)
    trainable: bool = struct.field(default=True, pytree_node=False)
    read_as_stored: bool = struct.field(default=False, pytree_node=False)
    marks: frozenset[str] = struct.field(default=frozenset(), pytree_node=False)

    # ------------------------------------------------------------------------------------------------------ properties

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that split the leaf, in the order of dims, outermost first within a dim; () for an unsplit leaf."""
        return tuple([axis for entry in self.names if entry is not None for axis in entry_axes(entry)])

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """``axes`` without ``model_axes``: wrapped modules and ``gather_params`` gather the leaf over these axes."""
        axes = self.axes
        return tuple([axis for axis in axes if axis not in self.model_axes]) if self.model_axes else axes

    @property
    def is_differentiable(self) -> bool:
        """True for floats that are not frozen. Integers, bools and PRNG keys take no gradient."""
        return self.trainable and jnp.issubdtype(value_dtype(self.value), jnp.inexact)

    @property
    def stores_value(self) -> bool:
        """True if the stored array is the value itself; False if the store adds padding, say."""
        return self.store is UNCHANGED_STORE or self.store == UNCHANGED_STORE  # an unpickled store is another object

    @property
    def true_shape(self) -> tuple[int, ...]:
        """Global shape of the plain model's leaf. Valid if ``value`` is the full (replicated or global) array."""
        shape = np.shape(self.value)
        return shape if self.stores_value else self.store.shape(shape, [1] * len(shape))

    def shape_of_parts(self, counts: list[int]) -> tuple[int, ...]:
        """Returns the shape of a value that consists of ``counts[i]`` stored shards along each dim i, without padding.

        A stored shard has the shape of ``self.value``: shards [16, 8] and ``counts`` [1, 4] give (16, 32), or (16, 30)
        if the last two columns are padding.
        """
        return self.store.shape(np.shape(self.value), counts)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored array: global, or of this device's shard inside ``shard_map``."""
        return math.prod(np.shape(self.value)) * value_dtype(self.value).itemsize

    def __repr__(self) -> str:
        """Returns dtype, shape and names of the stored array, and the fields that differ from their defaults."""
        has_shape = hasattr(self.value, "shape") and hasattr(self.value, "dtype")
        value = f"{self.value.dtype}{list(self.value.shape)}" if has_shape else repr(self.value)
        rest = [(f.name, getattr(self, f.name), f.default) for f in fields(self) if f.name not in ("value", "names")]
        options = [f"{name}={current!r}" for name, current, default in rest if current != default]
        return f"{type(self).__name__}({', '.join([value, str(self.names), *options])})"

    # ----------------------------------------------------------------------------------------------- reads as an array

    def unbox(self, apply_constraint: bool = True) -> Any:
        """Returns the array that a module reads: in ``shard_map`` gathered over the bound axes except ``model_axes``.

        The array is without padding, and under ``stop_gradient`` if the leaf is frozen. Outside of ``shard_map`` the
        value is global, and nothing is gathered; a leaf with ``read_as_stored`` is returned as stored.
        ``apply_constraint`` is ignored.

        Raises:
          ValueError: inside ``shard_map`` the value is a full array, where a shard was expected; or an axis of copies
            is not bound; or the value has another number of dims than the box.
        """
        del apply_constraint
        if self.read_as_stored:
            return self.value
        axes = self._axes_to_read()
        if not axes:
            return read_value(self)
        is_whole = isinstance(self.value, jax.Array | np.ndarray) and not isinstance(self.value, Tracer)
        if is_whole and (spread := collectives.spread_axes(axes)):
            raise full_value_error("a parameter that is read", np.shape(self.value), spread)
        collectives.check_bound(self.communication.copied_axes, caller="a parameter that is read, replicas of it")
        with jax.named_scope(GATHER_SCOPE):
            full = gather_leaf(self, axes, self.communication)
            return full.value if isinstance(full, Sharded) else full  # a ``Sharded`` is still split over other axes

    def _axes_to_read(self) -> tuple[str, ...]:
        """Returns the axes over which ``unbox`` gathers the leaf: the bound axes in ``gathered_axes``, in order.

        () outside of ``shard_map``, where values are global, and for a leaf that modules read as a shard
        (``read_as_stored``).

        Raises:
          ValueError: the value has another number of dims than the box: it was stacked or sliced without its box.
        """
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

    # --------------------------------------------------------------------------------------- layer dims that Flax adds

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        index = index % (len(self.names) + 1)
        return self.replace(names=super().add_axis(index, params).names, store=self.store.with_dim(index))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Sharded":
        index = index % len(self.names)
        # Flax's ``remove_axis`` compares with the name that was added; rules may have changed that name.
        return self.replace(names=self.names[:index] + self.names[index + 1 :], store=self.store.without_dim(index))

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        for name in Store.OF_OLD_FIELDS.keys() & state.keys():
            state["store"] = Store.OF_OLD_FIELDS[name](state.pop(name))
        # Boxes pickled before boxes had ``marks`` have a field for this mark.
        if state.pop(LOOKED_UP, False):
            state["marks"] = frozenset({LOOKED_UP})
        super().__setstate__(state)

    def _get_partition_name(self, params: dict[Any, Any]) -> AxisEntry:  # type: ignore[override]  # Flax: no None
        return reader().layer_name(params.get(meta.PARTITION_NAME))


# ----------------------------------------------------------------------------------------- leaves of other libraries


class SplitVariable:
    """Base of NNX variables that hold a shard: a leaf of the tree, like a box. A module reads the unsharded array."""

    __slots__ = ()

    @property
    def as_sharded(self) -> Sharded:
        """The variable as a ``Sharded``, with the stored array as ``value``. Abstract.

        In a tree that a function such as ``jax.tree.map`` has changed, ``value`` is the replacement of the array.
        """
        raise NotImplementedError

    @property
    def names(self) -> tuple[AxisEntry, ...]:
        return self.as_sharded.names

    def replace(self, **fields: Any) -> "SplitVariable":
        """Returns a copy of the variable, with new values of some fields of its box (see ``as_sharded``). Abstract.

        The fields are given by name, as ``trainable=False``.
        """
        raise NotImplementedError

    def replace_boxed(self, val: Any) -> "SplitVariable":
        """Returns a copy of the variable with ``val`` as its stored array; names and options stay. Abstract."""
        raise NotImplementedError


BOXES = (meta.Partitioned, SplitVariable)  # boxes with axis names


def is_box(leaf: Any) -> bool:
    """Returns whether ``leaf`` is in a box with axis names: ``nn.Partitioned``, ``Sharded`` or a split NNX variable."""
    # Tree walks call this for each node, and ``isinstance`` with Flax's box, an abstract class, is slow.
    cls = type(leaf)
    if cls not in _IS_BOX:
        _IS_BOX[cls] = issubclass(cls, BOXES)
    return _IS_BOX[cls]


_IS_BOX: dict[type[Any], bool] = {}  # by class, filled by ``is_box``


def is_library_box(leaf: Any) -> bool:
    """Returns whether ``leaf`` is in a box of the library: a ``Sharded``, or a split NNX variable.

    Such boxes have ``communication`` and ``model_axes``; a plain ``nn.Partitioned`` of Flax does not.
    """
    return isinstance(leaf, Sharded | SplitVariable)


def leaf_of(leaf: Any) -> Sharded:
    """Returns a leaf of a tree as a ``Sharded``, the library's box: a bare value, a box of Flax, a variable of NNX.

    A ``Sharded`` is returned unchanged if its names fit. ``names`` of the result has an entry for each dim of the
    value: ``None`` is added for unnamed dims, and surplus names are dropped. (An optimizer may store a scalar per leaf
    of a boxed tree, in a box with the leaf's names.) Inside a loss the result for a box of Flax has the loss's
    ``model_axes``.
    """
    # Nearly all leaves return here, thousands of times in a trace: ``np.ndim`` alone would double the time.
    if type(leaf) is Sharded and not leaf.model_axes and len(leaf.names) == getattr(leaf.value, "ndim", None):
        return leaf
    if not is_box(leaf):
        ndim = getattr(leaf, "ndim", None)
        ndim = np.ndim(leaf) if ndim is None else ndim
        if ndim not in _UNSPLIT:
            _UNSPLIT[ndim] = jax.tree.structure(Sharded(0, (None,) * ndim))
        return _UNSPLIT[ndim].unflatten((leaf,))
    if isinstance(leaf, SplitVariable):
        return leaf.as_sharded
    ndim = np.ndim(leaf.value)
    names = (reader().mesh_names(leaf) + (None,) * ndim)[:ndim]
    # A box of Flax does not list the model's own axes. Within a loss, the boxes of the loss's parameters list them.
    known = leaf.model_axes if isinstance(leaf, Sharded) else RUNNING_LOSS.get().model_axes
    mesh_axes = tuple(axis for entry in names for axis in entry_axes(entry) if axis in known) if known else ()
    if not isinstance(leaf, Sharded):
        return Sharded(leaf.value, names, model_axes=mesh_axes)
    return (
        leaf if (leaf.names, leaf.model_axes) == (names, mesh_axes) else leaf.replace(names=names, model_axes=mesh_axes)
    )


# By number of dims, filled by ``leaf_of``: the ``PyTreeDef`` of a ``Sharded`` with default fields, for a bare value.
_UNSPLIT: dict[int, Any] = {}


# -------------------------------------------------------------------------------------------- changed leaves for trees


def rebox(leaf: Any, value: Any) -> Any:
    """Returns ``value`` in a box like the box of ``leaf``, with equal names and options; bare if ``leaf`` is bare."""
    return leaf.replace_boxed(value) if is_box(leaf) else value


def split_by_model(leaf: Any, gathered: Collection[str] = ()) -> Any:
    """Returns the leaf in a ``Sharded`` box whose ``model_axes`` are the axes over which the model splits the leaf.

    No wrapped module gathers over ``model_axes``; axes in ``gathered`` are left out. By the kind of ``leaf``:
    - a box of Flax: every axis in the box is an axis of the model. ``nn.Partitioned`` does not say whether a shard is
      to be gathered or the model computes with the shard itself (experts).
    - a box of Flax with logical names that rules map to axes: the box gets the mark ``SPLIT_BY_RULES`` instead; without
      axes the bare value is returned.
    - a ``Sharded``: the axes in ``model_axes`` stay, without ``gathered``.
    - a bare value, a box without axes, a split NNX variable: unchanged.
    """
    if not is_box(leaf) or isinstance(leaf, SplitVariable):
        return leaf
    box = leaf_of(leaf)
    is_foreign = not isinstance(leaf, Sharded)
    if is_foreign and (marks := marks_of_rules(leaf)):  # the model uses unsharded parameters
        return box.replace(marks=box.marks | marks) if box.axes else box.value
    if not any(box.names):
        return leaf
    model_axes = tuple([axis for axis in (box.axes if is_foreign else box.model_axes) if axis not in gathered])
    return box if model_axes == box.model_axes else box.replace(model_axes=model_axes)


def marks_of_rules(leaf: Any) -> frozenset[str]:
    """Returns {``SPLIT_BY_RULES``} if rules map the names in the box ``leaf``, as logical names, to axes; else {}."""
    return frozenset({SPLIT_BY_RULES} if reader().has_rules_for(leaf) else ())


def frozen(leaf: Any) -> Any:
    """Returns the leaf in a box of the library with ``trainable=False``.

    A leaf that takes no gradient, such as integers or a leaf that is frozen already, is returned unchanged.
    """
    if not leaf_of(leaf).is_differentiable:
        return leaf
    boxed = split_by_model(leaf)
    return (boxed if is_library_box(boxed) else leaf_of(boxed)).replace(trainable=False)


# ----------------------------------------------------------------------------------------- which module gathers a leaf


def path_in_model(module: tuple[str, ...] | None, path: str) -> str:
    """Returns the path of a leaf in the model, from ``path`` in the variables of the module at ``module``.

    ("h_0", "mlp") and "params/kernel" give "h_0/mlp/kernel". With ``module`` ``None``, ``path`` is returned unchanged.
    """
    return path if module is None else "/".join((*module, path.removeprefix("params/")))


def is_gathered_here(path: str, leaf: Sharded) -> bool:
    """Returns whether the module that reads a leaf also gathers it; if not, a wrapped submodule gathers the leaf.

    ``path`` is the leaf's path in the module's variables, which begins with the collection: "params/mlp/kernel". The
    box of the leaf names its unit (``unit_depth``); a leaf without a known unit is gathered here.
    """
    # The first name of the path is the collection.
    return not 0 < leaf.unit_depth < path.count("/")


# -------------------------------------------------------------------------------------------------------------- values


def true_value(leaf: Any) -> Any:
    """Returns the value of a leaf in the shape of the unwrapped model: the stored array without padding, say.

    ``leaf`` is a box or a bare value, and holds the full (replicated or global) array, not a shard.
    """
    box = leaf if isinstance(leaf, Sharded) else leaf_of(leaf)
    return box.value if box.stores_value else box.store.read(box.value, (False,) * np.ndim(box.value))


def stored_value(leaf: Any, value: Any) -> Any:
    """Returns ``value``, shaped as in the unwrapped model, in the format in which ``leaf`` stores values.

    The format may have padding, for example. ``leaf`` is a box or a bare value; a bare value is stored unchanged.
    """
    box = leaf if isinstance(leaf, Sharded) else leaf_of(leaf)
    return value if box.stores_value else box.store.write(value, np.shape(box.value))


def read_value(leaf: Sharded) -> Any:
    """Returns the value in ``leaf``, a full array, as a module reads the value: without padding.

    The value of a frozen leaf is under ``stop_gradient``.
    """
    return as_read(leaf, true_value(leaf))


def as_read(leaf: Sharded, value: Any) -> Any:
    """Returns ``value``: under ``stop_gradient`` if ``leaf`` is frozen, else unchanged."""
    return value if leaf.trainable else jax.lax.stop_gradient(value)


def gather_leaf(
    leaf: Sharded,
    axes: tuple[str, ...],
    communication: Communication,
    path: str = "",
    wire: Wire | None = None,
    together: Callable[[], tuple[Any, tuple[AxisEntry, ...]]] | None = None,
) -> Any:
    """Returns the array of a leaf, gathered over ``axes``; in a box if it is still split over further axes.

    Inside a loss, equal gathers of a leaf run once.

    Args:
      leaf: the shard in its box.
      axes: bound axes; the leaf is gathered over those that split it.
      communication: options of the gather; options that are ``None`` are read from the leaf's box.
      path: the path of the leaf for errors.
      wire: the format in which shards are sent, in place of the format that the options select.
      together: returns the gathered array and the axes that still split its dims, from a gather together with other
        leaves, in place of a gather of this leaf alone.
    Raises:
      ValueError: an axis of copies is not bound, or a dtype of the options does not fit the leaf; names the leaf.
    """
    # Options that the call leaves open are those of the box. Options that do not fit raise here, with the leaf's path.
    if communication != leaf.communication:
        communication = communication.filled_from(leaf.communication)
    if not set(axes).isdisjoint(leaf.axes):
        if communication.replicas:
            collectives.check_bound(communication.copied_axes, caller=f"gather_params, replicas of '{path}'")
        communication.dtypes(leaf.value, path)
    # A loss that reads a parameter twice (a tied embedding) gathers it once, and JAX adds the gradients of both reads
    # before a single reduce-scatter. Outside of a loss the facts are a default, which outlives every trace and must not
    # hold tracers.
    loss, key = RUNNING_LOSS.get(), None
    if loss.axes:
        if current_trace() != loss.trace and inside_branch():  # a branch has a trace of its own
            loss.gathered_in_branches.append(path or "a parameter")
        key, full = earlier_gather(leaf, axes, communication, wire)
        if full is not None:
            return full
    if together is not None:
        full, names = together()
    else:
        shard = leaf.value if leaf.trainable and not leaf.model_axes else shard_to_gather(leaf, axes, path)
        full, names = gather_dims(shard, leaf.names, axes, communication, path, wire)
    # The array alone, without marks, padding and further axes, is the result as it is.
    if leaf.marks or any(names) or not leaf.stores_value:
        full = as_gathered(leaf, full, names, axes, communication)
    if loss.axes:
        loss.gathers.append((leaf.value, key, full))
    return full


def earlier_gather(
    leaf: Sharded, axes: tuple[str, ...], communication: Communication, wire: Wire | None = None
) -> tuple[Any, Any]:
    """Returns (key of the gather, its result), for a gather of the leaf that the running loss has run before.

    The result is None if the loss has not run such a gather, and outside of a loss. Gathers of the same shard object
    with equal keys have the same result; ``RunningLoss.gathers`` has the key of each gather. The key has the trace, the
    box of ``leaf`` without its array, the axes, the options, and the class of ``wire``. An array made within a
    transformation (``nn.remat``, ``lax.scan``) does not exist outside of the transformation or in another one, so each
    transformation gathers separately.

    ``communication`` are the options after ``filled_from`` has read missing options from the leaf's box.
    """
    key = current_trace(), leaf.replace(value=None), axes, communication, type(wire)
    # Compared by `is`, and the list holds the shards: the `id` of a deleted shard may be reused.
    for gathered_shard, gather_key, full in RUNNING_LOSS.get().gathers:
        if gathered_shard is leaf.value and gather_key == key:
            return key, full
    return key, None


def shard_to_gather(leaf: Sharded, axes: tuple[str, ...], path: str) -> Any:
    """Returns the array in the box ``leaf``, this device's shard, prepared as the input of a gather over ``axes``.

    The shard of a frozen leaf is under ``stop_gradient``. If the model itself splits the leaf over some of ``axes``,
    the gradient of the shard becomes a sum over these axes, where the gradient of a gather is a mean (see
    ``with_summed_gradient``). ``path`` names the leaf in errors.
    """
    shard = as_read(leaf, leaf.value)
    model_axes = tuple([axis for axis in axes if axis in leaf.model_axes])
    return with_summed_gradient(shard, model_axes, path) if model_axes else shard


def _axes_of_equal_reads(leaf: Sharded, value: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes of a gather along which all devices have the same part of the batch, and so compute the same.

    These are the ``gathered_axes`` of ``leaf`` that are in ``axes``, are no axes of the batch of the running loss, and
    over which ``value``, the gathered array, varies by type. () outside of a loss.
    """
    if not (batch_axes := RUNNING_LOSS.get().batch_axes):  # outside of a loss nothing is known of the batch
        return ()
    varying = collectives.varying_axes(value)
    return tuple([axis for axis in leaf.gathered_axes if axis in axes and axis in varying and axis not in batch_axes])


def as_gathered(
    leaf: Sharded, value: Any, names: tuple[AxisEntry, ...], axes: tuple[str, ...], communication: Communication
) -> Any:
    """Returns the result of ``gather_leaf`` for ``value``, an array of the leaf that was gathered over ``axes``.

    ``value`` is converted from the storage format (padding is cut off, say). The result is the bare array if no axis is
    left in ``names``, else a ``Sharded``. ``names`` has the axes that still split each dim of ``value``;
    ``communication`` has the options of the gather.
    """
    if SPLIT_BY_RULES in leaf.marks and (equal := _axes_of_equal_reads(leaf, value, axes)):
        value = with_equal_type(value, equal)
    if not leaf.stores_value:
        value = leaf.store.read(value, [entry is not None for entry in names])
    if not any(names):
        return value
    return Sharded(
        value,
        leaf.store.of_value(names),
        communication=replace(communication, replicas=None) if set(leaf.axes) & set(axes) else communication,
        store=leaf.store.after_read(),
        unit_depth=leaf.unit_depth,
        trainable=leaf.trainable,
        read_as_stored=True,
    )


def full_value_error(subject: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> ValueError:
    """Returns the ``ValueError`` for a leaf with a full array in a box that names axes, where a shard was expected.

    ``subject`` names the leaf, ``shape`` is the shape of the array, ``axes`` are the axes in the box.
    """
    return ValueError(
        f"{subject} is split over {axes} by its box, and its value of shape {shape} is unsharded on each device: a "
        "function inside shard_map closes over it. Pass the tree as an argument; parameters that a loss does not train "
        "(LoRA) belong into state.params, frozen by trainable= or freeze_params: docs/frozen.md."
    )

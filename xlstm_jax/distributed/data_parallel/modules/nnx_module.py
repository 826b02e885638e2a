"""NNX modules as units, and the leaves of their variables.

  module.kernel = Param(W[d, f])            a module holds variables; one that is split is a ``SplitVariable``
  {"params": {"kernel": Sharded(W)}}        the library holds a dict of collections, of boxes and bare values, by path

A split variable knows its names, how it travels, and the policy of its unit. A chosen module gets another class of the
same name, and is not changed otherwise. When a public method is entered, ``gathered`` gives the variables below it,
except those of units within, their whole values; when the method returns, they are dropped. Read at any other time, a
split variable gathers itself, once for each read. ``nnx.split`` keeps classes, so a model that ``nnx.jit``,
``nnx.remat`` or ``nnx.scan`` splits and merges still has its units.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta
from flax.nnx.bridge import variables as bridge

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.dim_names import reader
from xlstm_jax.distributed.data_parallel.extension import computed_from_shards
from xlstm_jax.distributed.data_parallel.leaf import Sharded, SplitVariable, leaf_of, read_value
from xlstm_jax.distributed.data_parallel.modules.unit import (
    Method,
    ModuleSystem,
    dropping,
    entered,
    gather_here,
    public_methods,
    running,
)
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives

COLLECTIONS = {nnx.Param: "params", nnx.BatchStat: "batch_stats", nnx.Cache: "cache", nnx.Intermediate: "intermediates"}
OF_ARRAYS = "arrays"  # the collection of what a module holds without a variable around it
NAMES_IN_METADATA = ("out_sharding", "sharding_names", "sharding")  # in this and in earlier releases of Flax
BOX, POLICY = "split_box", "shard_policy"  # in ours: the box without its value, and the policy that gathers it
OF_LINEN = "linen_meta_type"  # in those of ``nnx.bridge``: the class of a box that a Linen module has made
# In the metadata of a variable: a function that a unit calls with the shape that it sees, and whether it looks up rows.
NOTE_SHAPE = "note_shape"


# ------------------------------------------------------------------------------------------------- variables of a shard


class _Changed:
    """A variable while its value is the library's: what a model writes then would be lost."""

    __slots__ = ()

    def set_value(self: Any, value: Any, *, index: Any = ...) -> None:
        del value, index
        raise ValueError(
            f"the model writes a parameter that is split as {self.get_metadata(BOX).names}. Write it outside of the "
            "model: by the optimizer, or in the variables that the model is applied to."
        )


class _Whole(_Changed):
    """A variable while its module runs: its value is gathered."""

    __slots__ = ()


class _Split(_Changed, SplitVariable):
    """A variable whose value is a shard: a leaf of the library, and gathered wherever it is read as an array."""

    __slots__ = ()

    @property
    def as_sharded(self: Any) -> Sharded:
        return _box(self).replace(unit_depth=0)  # the variable itself has the policy that gathers it

    def replace(self: Any, **fields: Any) -> Any:
        return self.copy(**{BOX: self.get_metadata(BOX).replace(**fields)})

    def replace_boxed(self: Any, val: Any) -> Any:
        return self.from_metadata(val, self.get_metadata())

    def get_value(self: Any, **index: Any) -> Any:
        if not hasattr(self.get_raw_value(), "ndim"):  # NNX prints a variable with a text in place of its array
            return self.get_raw_value()
        with jax.named_scope("read.sharded"):
            (whole,) = _whole_values({".": self}).values()
        # By its plain type, whose hooks (on_get_value) are the model's own.
        return _plain_type(self).from_metadata(whole, self.get_metadata()).get_value(**index)

    def __getattr__(self: Any, name: str) -> Any:
        metadata = self.get_metadata()
        if name in metadata:
            return metadata[name]
        # All else is read from the gathered array (shape, T). NNX asks each variable for methods of modules by
        # ``hasattr``, as ``nnx.view`` does, for which nothing is gathered.
        if not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.get_value(), name)


def _box(variable: Any) -> Sharded:
    """The stored value of a split variable in its box, with an entry for each dim."""
    box, value = variable.get_metadata(BOX), variable.get_raw_value()
    names = _of_last_dims(box.names, np.ndim(value))
    store = box.store.of_last_dims(np.ndim(value))
    return leaf_of(box.replace(value=value, names=names, store=store))


def _of_last_dims(entries: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """An entry for each dim, of entries for the last ones; leading dims are layers, which nnx.scan and nnx.vmap take.

    Raises:
      ValueError: they have taken a dim that is split.
    """
    extra = max(0, len(entries) - ndim)
    if any(entries[:extra]):
        raise ValueError(
            f"a parameter split as {entries} has {ndim} dims where it is read: nnx.scan or nnx.vmap has taken a dim "
            "that is split. Initialise with example inputs, by which the model sees what a layer is, and scan over dim "
            "0 of the parameters."
        )
    return (None,) * (ndim - len(entries)) + entries[extra:]


# Cached, since NNX compares the structures of models by their classes.
@functools.cache
def _type_like(cls: type[nnx.Variable[Any]], state: type[_Changed]) -> Any:
    """The variables of class ``cls`` in a state, ``_Split`` or ``_Whole``; the class keeps its name."""
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (state, cls), {"__module__": cls.__module__, "plain_type": cls})


def _plain_type(variable: Any) -> Any:
    return getattr(type(variable), "plain_type", type(variable))


def _turn_into(variable: Any, state: Any) -> None:
    object.__setattr__(variable, "__class__", _type_like(_plain_type(variable), state))


def is_split(variable: Any) -> bool:
    """Whether the value of a variable is a shard."""
    return issubclass(type(variable), _Split)


def _whole_values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The whole values of split variables by path; what other axes split (tensor parallel) stays so."""
    whole: dict[str, Any] = {}
    # Units that were sharded by several calls have several policies, each with axes and dtypes of its own.
    for policy in dict.fromkeys(variable.get_metadata(POLICY) for variable in variables.values()):
        whole |= gather_here(policy, {path: v for path, v in variables.items() if v.get_metadata(POLICY) == policy})
    return trees.stored_values(whole)


@contextmanager
def gathered(variables: Mapping[str, Any]) -> Iterator[None]:
    """A context in which split variables (by path) have their whole values."""

    def write(values: Mapping[str, Any], state: type[_Changed]) -> None:
        # NNX refuses to write a variable that was made under another trace. This write is undone: nobody sees it later.
        for path, variable in variables.items():
            object.__setattr__(variable, "_raw_value", values[path])
            _turn_into(variable, state)

    shards = {path: variable.get_raw_value() for path, variable in variables.items()}
    write(_whole_values(variables), _Whole)
    try:
        yield
    finally:
        write(shards, _Split)


# ----------------------------------------------------------------------------------------------- collections by path


def contents(module: nnx.Module) -> dict[str, Any]:
    """The variables and bare arrays of a module, by path as in ``blocks/0/kernel``."""
    # A module may also hold arrays without a variable around them, which its state must not lose.
    arrays = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    leaves = ((path, x) for path, x in nnx.iter_graph(module) if is_variable(x) or isinstance(x, arrays))
    return {path_of(path): leaf for path, leaf in leaves}


def is_variable(leaf: Any) -> bool:
    """``isinstance`` of ``nnx.Variable``, for which NNX has a slow rule of its own."""
    return issubclass(type(leaf), nnx.Variable)


def path_of(parts: tuple[Any, ...]) -> str:
    """A path of NNX, whose parts are names and numbers, as one text."""
    return "/".join(map(str, parts))


def collection_of(leaf: Any) -> str | None:
    """The name of the collection that a variable belongs to; None for the state of random numbers."""
    if not is_variable(leaf):
        return OF_ARRAYS
    if isinstance(leaf, nnx.RngState):
        return None
    known = next((name for cls, name in COLLECTIONS.items() if isinstance(leaf, cls)), None)
    return known or nnx.variable_name_from_type(_plain_type(leaf), allow_register=True)


def leaves_of(module: nnx.Module) -> dict[str, Any]:
    """The leaves of a module as the library has them, by path as in ``params/blocks/0/kernel``."""
    found = ((collection_of(leaf), path, leaf) for path, leaf in contents(module).items())
    return {f"{name}/{path}": _leaf(leaf) for name, path, leaf in found if name is not None}


def _leaf(variable: Any) -> Any:
    """The bare value of a variable; in a box where it is split, or where its metadata name mesh axes for its dims."""
    if not is_variable(variable):
        return variable
    metadata, value = variable.get_metadata(), variable.get_raw_value()
    if is_split(variable):
        return _box(variable)
    if OF_LINEN in metadata:
        box = bridge.to_linen_var(variable)
        return box if leaf_of(box).axes else value
    names = next((metadata[key] for key in NAMES_IN_METADATA if metadata.get(key)), ())
    own, are_logical = reader().names_in_metadata(tuple(names), metadata.get("sharding_rules"))
    if not any(own):
        return value
    # Axes of the mesh are the model's own (tensor parallel); logical names are of a model that knows whole parameters.
    return Sharded(value, own) if are_logical else meta.Partitioned(value, own)  # type: ignore[arg-type]  # Flax: no tuples


def with_leaf(variable: Any, leaf: Any, policy: ShardPolicy | None) -> Any:
    """The variable with the value of ``leaf``, which its unit gathers where a box splits it over axes of ``policy``."""
    box, metadata = leaf_of(leaf), variable.get_metadata()
    if policy is None and OF_LINEN not in metadata and any(metadata.get(key) for key in NAMES_IN_METADATA):
        # Split by the rules for its logical names, and by no unit: it is gathered where it is read.
        policy = ShardPolicy(box.gathered_axes, 0) if box.gathered_axes and isinstance(leaf, Sharded) else None
    if policy and set(box.axes) & set(policy.axes):
        how = box.communication.or_else(policy.communication)
        split = variable.copy(box.value, **{BOX: box.replace(value=None, communication=how), POLICY: policy})
        _turn_into(split, _Split)
        return split
    if not box.axes and OF_LINEN not in variable.get_metadata():
        return variable.copy(read_value(box))
    # Of a Linen module under ``nnx.bridge.ToNNX``, which gathers by itself what it finds in such boxes.
    box = box if isinstance(leaf, Sharded) else Sharded(box.value, (None,) * np.ndim(box.value))
    metadata = {name: value for name, value in box.to_nnx_metadata().items() if name != "value"}
    return variable.copy(box.value, **metadata | {OF_LINEN: type(box)})


# ------------------------------------------------------------------------------------------------------------- units


def _is_method(attribute: Any) -> bool:
    """Whether an attribute of a class is a method, be it transformed, by ``nnx.jit`` say."""
    return hasattr(type(attribute), "__get__") and callable(attribute) and not isinstance(attribute, type)


NNX = ModuleSystem(nnx.Module, nnx.remat, _is_method, (nnx.Pytree, nnx.Variable))


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """All modules by path, the model itself at ``""``; lists and dicts of modules are none."""
    containers = (nnx.List, nnx.Dict)
    found = ((path_of(path), node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
    return {path: node for path, node in sorted(found, key=lambda item: item[0]) if not isinstance(node, containers)}


def make_unit(module: nnx.Module, policy: ShardPolicy) -> None:
    """Turns a module into a unit."""
    # In place: other attributes of the model may hold this very object.
    object.__setattr__(module, "__class__", _unit_type(type(module), policy))


def own_variables(module: nnx.Module) -> dict[str, Any]:
    """The variables that a unit gathers, by path from it: those below it, but for those of units within."""
    nodes = list(nnx.iter_graph(module))
    within = [path for path, node in nodes if path and hasattr(type(node), "_shard_policy")]
    own = ((path, leaf) for path, leaf in nodes if is_variable(leaf))
    return {path_of(path): leaf for path, leaf in own if not any(path[: len(unit)] == unit for unit in within)}


def _split_variables(module: nnx.Module) -> dict[str, Any]:
    return {path: leaf for path, leaf in own_variables(module).items() if is_split(leaf)}


@functools.cache
def _unit_type(cls: type[nnx.Module], policy: ShardPolicy) -> Any:
    """A subclass that gathers in every public method. Like classes give one type: layers can still be stacked."""
    methods = {name: _gathering(cls, name, policy) for name in public_methods(cls, NNX)}
    return _subclass(cls, methods | {"_shard_policy": policy})


def _subclass(cls: type[Any], fields: dict[str, Any]) -> Any:
    """A subclass of a module's class that differs in ``fields`` alone."""
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), same | fields, pytree=getattr(cls, "_pytree__is_pytree", True))


def _gathering(cls: type[nnx.Module], name: str, policy: ShardPolicy) -> Method:
    plain: Any = inspect.getattr_static(cls, name)
    notes_lookup = is_flax_lookup(cls, name)

    def whole(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with gathered(_split_variables(module)):
            return plain.__get__(module, cls)(*args, **kwargs)

    @functools.wraps(plain)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        # Somebody may ask for the shapes that a unit sees: those of one layer, where the model scans over layers.
        for leaf in own_variables(self).values():
            if note := leaf.get_metadata(NOTE_SHAPE, None):
                note(np.shape(leaf.get_raw_value()), notes_lookup)
        if not _split_variables(self):  # none was ever split, or another method of the module has gathered them
            return plain.__get__(self, cls)(*args, **kwargs)
        return entered(NNX, cls.__name__, run, self, args, kwargs)

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        is_sharded = running(policy.axes) == "manual"
        found = computed_from_shards(module, name, policy, args, kwargs) if is_sharded else None
        return dropping(whole, NNX, policy)(module, *args, **kwargs) if found is None else found

    return method


def is_flax_lookup(cls: type[nnx.Module], method: str) -> bool:
    """Returns whether a method of a class of the user's is the lookup of ``nnx.Embed``, as nobody has changed it."""
    is_embed = issubclass(cls, nnx.Embed) and method == "__call__"
    return is_embed and inspect.getattr_static(cls, method) is inspect.getattr_static(nnx.Embed, method)


def let_carries_vary(model: nnx.Module, axes: frozenset[str]) -> None:
    """Makes the first carries of recurrent cells vary over axes (see ``carry_axes``), by a class that casts them."""
    for cell in modules_of(model).values() if axes else ():
        if isinstance(cell, nnx.RNNCellBase):
            object.__setattr__(cell, "__class__", _varying_cell_type(type(cell), axes))


@functools.cache
def _varying_cell_type(cls: type[nnx.RNNCellBase], axes: frozenset[str]) -> Any:
    @functools.wraps(cls.initialize_carry)
    def initialize_carry(self: nnx.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        return collectives.to_varying(cls.initialize_carry(self, *args, **kwargs), axes)

    return _subclass(cls, {"initialize_carry": initialize_carry})

"""NNX modules as units, and the leaves of their variables.

  module.kernel = Param(W[d, f])            a module holds variables; a split variable is a ``SplitVariable``
  {"params": {"kernel": Sharded(W)}}        the library holds a dict of collections, of boxes and bare values, by path

A split variable stores axis names, communication options, and the policy of the unit. The class of a chosen module is
replaced by a subclass of the same name; nothing else changes. When a public method is entered, ``gathered`` replaces
the values of the variables below the module, except variables of units within, by unsharded values, which are dropped
when the method returns. A split variable read at any other time gathers itself; the reads within a loss share one
gather (``leaf.earlier_gather``). ``nnx.split`` keeps classes, so units survive when ``nnx.jit``, ``nnx.remat`` or
``nnx.scan`` splits and merges a model.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta
from flax.nnx.bridge import variables as bridge
from jax.core import Tracer

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.boxes import reader
from xlstm_jax.distributed.data_parallel.extension import computed_from_shards
from xlstm_jax.distributed.data_parallel.leaf import SPLIT_BY_RULES, Sharded, SplitVariable, leaf_of, read_value
from xlstm_jax.distributed.data_parallel.modules.dropping import dropping
from xlstm_jax.distributed.data_parallel.modules.unit import (
    OF_ARRAYS,
    Method,
    ModuleSystem,
    entered,
    gather_here,
    public_methods,
    running,
)
from xlstm_jax.distributed.data_parallel.policy import ShardPolicy
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes

COLLECTIONS = {nnx.Param: "params", nnx.BatchStat: "batch_stats", nnx.Cache: "cache", nnx.Intermediate: "intermediates"}
NAMES_IN_METADATA = ("out_sharding", "sharding_names", "sharding")  # in this and in earlier releases of Flax
BOX, POLICY = "split_box", "shard_policy"  # metadata of a split variable: its box without value, the gathering policy
OF_LINEN = "linen_meta_type"  # metadata of an ``nnx.bridge`` variable: the class of a box that a Linen module has made
OWN_AXES = "axes_of_split_modules"  # metadata: axes among the names over which the module computes with shards
# Metadata of a variable: a function that a unit calls with the parameter's shape in the unit, and whether the method is
# a row lookup.
NOTE_SHAPE = "note_shape"


# ------------------------------------------------------------------------------------------------- variables of a shard


class _Changed:
    """Variable that holds a shard or a gathered value. Raises if the model writes a value, which would be lost."""

    __slots__ = ()

    def set_value(self: Any, value: Any, *, index: Any = ...) -> None:
        del value, index
        raise ValueError(
            f"the model writes a parameter that is split as {self.get_metadata(BOX).names}. Write it outside of the "
            "model, by the optimizer, and leave layers that write their kernel (nnx.WeightNorm, nnx.SpectralNorm) out "
            "of where=: docs/nnx.md."
        )


class _Whole(_Changed):
    """Variable that holds the gathered value, while a method of its unit runs."""

    __slots__ = ()


class _Split(_Changed, SplitVariable):
    """Variable that holds a shard (of a parameter), and gathers the shards when read as an array."""

    __slots__ = ()

    @property
    def as_sharded(self: Any) -> Sharded:
        return _box(self).replace(unit_depth=0)  # the variable stores the policy that gathers it

    def replace(self: Any, **fields: Any) -> Any:
        return self.copy(**{BOX: self.get_metadata(BOX).replace(**fields)})

    def replace_boxed(self: Any, val: Any) -> Any:
        return self.from_metadata(val, self.get_metadata())

    def get_value(self: Any, **index: Any) -> Any:
        if not hasattr(self.get_raw_value(), "ndim"):  # NNX prints a variable with a text in place of the array
            return self.get_raw_value()
        with jax.named_scope("read.sharded"):
            (value,) = _full_values({".": self}).values()
        # The plain type has the model's own hooks (on_get_value).
        return _plain_type(self).from_metadata(value, self.get_metadata()).get_value(**index)

    def __getattr__(self: Any, name: str) -> Any:
        metadata = self.get_metadata()
        if name in metadata:
            return metadata[name]
        # Other attributes (shape, T) are read from the gathered array. NNX tests variables for methods of modules by
        # ``hasattr`` (in ``nnx.view``, say); these tests must not gather.
        if not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.get_value(), name)


def _box(variable: Any) -> Sharded:
    """Returns the box of a split variable, with its stored value (a shard or a global array) and a name for each dim.

    If NNX has stacked the value along layer dims, or has taken a layer out, the names fit the dims of the value:
    ``None`` is added in front for layer dims, or removed.
    """
    box, value = variable.get_metadata(BOX), variable.get_raw_value()
    names = _of_last_dims(box.names, np.ndim(value))
    store = box.store.of_last_dims(np.ndim(value))
    layers = {"communication": replace(box.communication, of_layers=True)} if len(box.names) > np.ndim(value) else {}
    return leaf_of(box.replace(value=value, names=names, store=store, **layers))


def _of_last_dims(entries: tuple[Any, ...], ndim: int) -> tuple[Any, ...]:
    """Returns a tuple of ``ndim`` entries (the axes that split each dim), from entries for the last dims of an array.

    Leading (layer) dims without an entry get ``None``; surplus leading entries, of dims that a scan has taken, are cut
    off: (None, "fsdp") gives (None, None, "fsdp") for 3 dims, and ("fsdp",) for 1 dim.

    Raises:
      ValueError: a surplus entry has axes: ``nnx.scan`` or ``nnx.vmap``, which take leading dims, took a split dim.
    """
    extra = max(0, len(entries) - ndim)
    if any(entries[:extra]):
        raise ValueError(
            f"a parameter split as {entries} has {ndim} dims where it is read: nnx.scan or nnx.vmap has taken a "
            "split dim. Initialise with example inputs, which show the shape of a layer, and scan over dim 0."
        )
    return (None,) * (ndim - len(entries)) + entries[extra:]


# Cached: NNX compares the structures of models by the classes of their variables.
@functools.cache
def _type_like(cls: type[nnx.Variable[Any]], state: type[_Changed]) -> Any:
    """Returns a subclass of ``state`` and ``cls`` (bases in this order) with the name of the variable's class ``cls``.

    ``state`` is ``_Split``, for a variable that holds a shard, or ``_Whole``, for a variable with a gathered value. The
    result is cached.
    """
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (state, cls), {"__module__": cls.__module__, "plain_type": cls})


def _plain_type(variable: Any) -> Any:
    return getattr(type(variable), "plain_type", type(variable))


def _change_class(variable: Any, state: Any) -> None:
    object.__setattr__(variable, "__class__", _type_like(_plain_type(variable), state))


def is_split(variable: Any) -> bool:
    """Returns whether a variable is a ``_Split``: a parameter that a unit of the library has split, and gathers.

    While a method of the unit runs, the variable holds the gathered value, and the result is False.
    """
    return issubclass(type(variable), _Split)


def _full_values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the unsharded values of split variables, as bare arrays by the paths of ``variables``.

    Each shard is gathered over the axes of its unit, with the unit's options. A dim that the model itself splits
    (tensor parallel) stays split.
    """
    full_values: dict[str, Any] = {}
    # Units sharded by different ``shard_modules`` calls have different policies, with different axes and dtypes.
    for policy in dict.fromkeys(variable.get_metadata(POLICY) for variable in variables.values()):
        full_values |= gather_here(
            policy, {path: v for path, v in variables.items() if v.get_metadata(POLICY) == policy}
        )
    return trees.stored_values(full_values)


@contextmanager
def gathered(variables: Mapping[str, Any]) -> Iterator[None]:
    """Replaces, inside the context, the values of split variables by unsharded values; restores the shards on exit.

    ``variables`` are split variables by path, changed in place; the paths name the leaves in errors. Inside the context
    the model must not write the variables: a write raises a ``ValueError``.
    """

    def write(values: Mapping[str, Any], state: type[_Changed]) -> None:
        # NNX refuses to write a variable made under another trace. This write is undone before NNX could notice.
        for path, variable in variables.items():
            object.__setattr__(variable, "_raw_value", values[path])
            _change_class(variable, state)

    shards = {path: variable.get_raw_value() for path, variable in variables.items()}
    write(_full_values(variables), _Whole)
    try:
        yield
    finally:
        write(shards, _Split)


# ----------------------------------------------------------------------------------------------- collections by path


def contents(module: nnx.Module) -> dict[str, Any]:
    """Returns all variables of a module and its submodules, by path as in ``blocks/0/kernel``.

    Arrays (or shapes) that a module holds without a variable are included.
    """
    # The module's state must include arrays without a variable around them.
    arrays = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    leaves = ((path, x) for path, x in nnx.iter_graph(module) if is_variable(x) or isinstance(x, arrays))
    return {path_of(path): leaf for path, leaf in leaves}


def with_arrays_as_data(module: nnx.Module) -> nnx.Module:
    """Returns ``module``, in which tracers that are bare attributes have been marked as ``nnx.data``, in place.

    Submodules are included. NNX takes an array for data when it is set as an attribute, and a tracer for a static
    value, which would stay in the definition of the graph after the trace has ended.
    """
    for node in modules_of(module).values():
        traced = [name for name, value in vars(node).items() if isinstance(value, Tracer)]
        for name in traced:
            setattr(node, name, nnx.data(vars(node)[name]))
    return module


def is_variable(leaf: Any) -> bool:
    """Returns whether ``leaf`` is an ``nnx.Variable``; faster than ``isinstance``, which NNX overrides."""
    return issubclass(type(leaf), nnx.Variable)


def path_of(parts: tuple[Any, ...]) -> str:
    """Returns a path of NNX as text: ("blocks", 0, "kernel") gives "blocks/0/kernel"."""
    return "/".join(map(str, parts))


def collection_of(leaf: Any) -> str | None:
    """Returns the name of the collection of a variable, as "params"; ``None`` for the state of random numbers.

    A bare array, which is no variable, is in the collection "arrays". Variables of other types than ``COLLECTIONS`` are
    in the collection of NNX's name for the type.
    """
    if not is_variable(leaf):
        return OF_ARRAYS
    if isinstance(leaf, nnx.RngState):
        return None
    known = next((name for cls, name in COLLECTIONS.items() if isinstance(leaf, cls)), None)
    return known or nnx.variable_name_from_type(_plain_type(leaf), allow_register=True)


def leaves_of(module: nnx.Module) -> dict[str, Any]:
    """Returns the boxes and bare values of a module's variables, by path as in ``params/blocks/0/kernel``.

    The first name of a path is the collection. The state of random numbers is left out.
    """
    leaves = ((collection_of(leaf), path, leaf) for path, leaf in contents(module).items())
    return {f"{name}/{path}": boxed_leaf(leaf) for name, path, leaf in leaves if name is not None}


def boxed_leaf(variable: Any) -> Any:
    """Returns the value of a variable in a box, if the variable is split or its metadata name mesh axes; else bare.

    The box is a ``Sharded`` for parameters that a unit or rules for logical names have split, ``meta.Partitioned`` for
    axes in metadata (tensor parallel), and the class of Linen's box for variables of ``nnx.bridge``. A bare array that
    is no variable is returned unchanged.
    """
    if not is_variable(variable):
        return variable
    metadata, value = variable.get_metadata(), variable.get_raw_value()
    if is_split(variable):
        return _box(variable)
    if OF_LINEN in metadata:
        box = bridge.to_linen_var(variable)
        return box if leaf_of(box).axes else value
    names = next((metadata[key] for key in NAMES_IN_METADATA if metadata.get(key)), ())
    mesh_names, are_logical = reader().names_in_metadata(tuple(names), metadata.get("sharding_rules"))
    if not any(mesh_names):
        return value
    # Mesh axes in metadata are the model's own (tensor parallel). Logical names: the model uses unsharded parameters,
    # except along the axes that ``split_modules`` has entered.
    if not are_logical:
        return meta.Partitioned(value, mesh_names)  # type: ignore[arg-type]  # Flax: no tuples
    own = [axis for entry in mesh_names for axis in entry_axes(entry) if axis in metadata.get(OWN_AXES, ())]
    return Sharded(value, mesh_names, model_axes=tuple(own), marks=frozenset({SPLIT_BY_RULES}))


def policy_of_reads(leaf: Any) -> ShardPolicy | None:
    """Returns options to gather, when it is read, a split leaf without a unit: over ``leaf.gathered_axes``.

    ``None`` if ``leaf`` is not a ``Sharded`` box, or has no axes to gather over. A split leaf is without a unit (a
    module that gathers its parameters to run) if rules for logical names have split the leaf, or if units of another
    model have initialised the variables.
    """
    axes = leaf.gathered_axes if isinstance(leaf, Sharded) else ()
    return ShardPolicy(axes, 0) if axes else None


def with_leaf(variable: Any, leaf: Any, policy: ShardPolicy | None) -> Any:
    """Returns a copy of ``variable`` with the value of ``leaf`` (a box or bare value), in one of three forms.

    1. If ``policy`` gathers over an axis that splits the leaf: a split variable, which is gathered when read.

    2. If no axis splits the leaf: a plain variable with the bare value.

    3. Otherwise: a variable in the form of ``nnx.bridge``, which carries the box in its metadata. The leaf belongs to a
    Linen module, or is split by the model itself (tensor parallel), and then read as a shard.

    Args:
      variable: variable of the abstract module; its value is not used.
      leaf: the value, bare or in a box.
      policy: the options of the unit that gathers the leaf; ``None`` without such a unit.
    """
    box = leaf_of(leaf)
    if policy and isinstance(leaf, Sharded) and not all(map(policy.has_axis, box.gathered_axes)):
        # Rules have split the leaf over further axes, and the module reads the unsharded parameter.
        policy = replace(policy, axis_name=box.gathered_axes)
    if policy and any(map(policy.has_axis, box.axes)):
        communication = box.communication.filled_from(policy.communication)
        split = variable.copy(box.value, **{BOX: box.replace(value=None, communication=communication), POLICY: policy})
        _change_class(split, _Split)
        return split
    if not box.axes and OF_LINEN not in variable.get_metadata():
        return variable.copy(read_value(box))
    box = box if isinstance(leaf, Sharded) else Sharded(box.value, (None,) * np.ndim(box.value))
    metadata = {name: value for name, value in box.to_nnx_metadata().items() if name != "value"}
    return variable.copy(box.value, **metadata | {OF_LINEN: type(box)})


# ------------------------------------------------------------------------------------------------------------- units


def _is_method(attribute: Any) -> bool:
    """Returns whether a class attribute is a method, possibly under a transformation such as ``nnx.jit``."""
    return hasattr(type(attribute), "__get__") and callable(attribute) and not isinstance(attribute, type)


NNX = ModuleSystem(nnx.Module, nnx.remat, _is_method, (nnx.Pytree, nnx.Variable))


def modules_of(model: nnx.Module) -> dict[str, nnx.Module]:
    """Returns a model and all its submodules by path, sorted by path, as "blocks/0"; the model itself is at ``""``.

    Lists and dicts of modules (``nnx.List``, ``nnx.Dict``) are not included; the modules inside are.
    """
    containers = (nnx.List, nnx.Dict)
    modules = ((path_of(path), node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))
    return {path: node for path, node in sorted(modules, key=lambda item: item[0]) if not isinstance(node, containers)}


def make_unit(module: nnx.Module, policy: ShardPolicy) -> None:
    """Turns ``module`` into a unit, in place: its class becomes a subclass whose public methods gather first.

    ``policy`` has the options of the unit. Parameters of units inside the module are left to these units.
    """
    # In place: other attributes of the model may refer to this object.
    object.__setattr__(module, "__class__", _unit_type(type(module), policy))


def unit_variables(module: nnx.Module) -> dict[str, Any]:
    """Returns the variables of a module and its submodules, by path relative to the module, without inner units.

    An inner unit is a submodule that gathers its variables itself.
    """
    nodes = list(nnx.iter_graph(module))
    within = [path for path, node in nodes if path and hasattr(type(node), "_shard_policy")]
    variables = ((path, leaf) for path, leaf in nodes if is_variable(leaf))
    return {path_of(path): leaf for path, leaf in variables if not any(path[: len(unit)] == unit for unit in within)}


def _split_variables(module: nnx.Module) -> dict[str, Any]:
    return {path: leaf for path, leaf in unit_variables(module).items() if is_split(leaf)}


@functools.cache
def _unit_type(cls: type[nnx.Module], policy: ShardPolicy) -> Any:
    """Returns a subclass of ``cls`` with the same name, whose public methods gather the module's split variables first.

    The result is cached: equal layers share a class and can be stacked.
    """
    methods = {name: _gathering(cls, name, policy) for name in public_methods(cls, NNX)}
    return subclass_of(cls, methods | {"_shard_policy": policy})


def subclass_of(cls: type[Any], fields: dict[str, Any], *bases: type[Any]) -> Any:
    """Returns a subclass of ``cls`` with the attributes ``fields`` (name -> value); name, module and doc stay.

    ``bases`` are further base classes, after ``cls``.
    """
    same = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls, *bases), same | fields, pytree=getattr(cls, "_pytree__is_pytree", True))


def _gathering(cls: type[nnx.Module], name: str, policy: ShardPolicy) -> Method:
    """Returns the method ``name`` of ``cls``, changed to gather the module's split variables, run, and drop the values.

    An extension that can compute the result from shards, as a row lookup, replaces the gather. Without split variables
    the method runs unchanged. In either case the method first calls the function ``note(shape, is_lookup)`` in the
    metadata of each variable of the unit (``NOTE_SHAPE``), if there is one. ``policy`` has the options of the unit.
    """
    plain: Any = inspect.getattr_static(cls, name)
    notes_lookup = is_flax_lookup(cls, name)

    def with_full_values(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with gathered(_split_variables(module)):
            return plain.__get__(module, cls)(*args, **kwargs)

    @functools.wraps(plain)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        # ``NOTE_SHAPE`` callbacks get the shapes in this unit: one layer's, if the model scans over layers.
        for leaf in unit_variables(self).values():
            if note := leaf.get_metadata(NOTE_SHAPE, None):
                note(np.shape(leaf.get_raw_value()), notes_lookup and is_read_as_stored(leaf))
        if not _split_variables(self):  # no variable is split, or another method of the module has gathered them
            return plain.__get__(self, cls)(*args, **kwargs)
        return entered(NNX, cls.__name__, run, self, args, kwargs)

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        is_sharded = running(policy.axes) == "manual"
        result = computed_from_shards(module, name, policy, args, kwargs) if is_sharded else None
        return dropping(with_full_values, NNX, policy)(module, *args, **kwargs) if result is None else result

    return method


def is_flax_lookup(cls: type[nnx.Module], method: str) -> bool:
    """Returns whether ``method`` is "__call__" of ``nnx.Embed`` or of a subclass that does not override the method."""
    is_embed = issubclass(cls, nnx.Embed) and method == "__call__"
    return is_embed and inspect.getattr_static(cls, method) is inspect.getattr_static(nnx.Embed, method)


def is_read_as_stored(variable: Any) -> bool:
    """Returns whether the model reads the value of ``variable`` unchanged.

    False if the class of the variable overrides ``get_value`` of NNX, or if the variable has a hook ``on_get_value``.
    """
    is_flaxs = _plain_type(variable).get_value is nnx.Variable.get_value
    return is_flaxs and not variable.get_metadata().get("on_get_value")


def let_carries_vary(model: nnx.Module, axes: frozenset[str]) -> None:
    """Replaces the classes of recurrent cells in a model, in place, so that first carries vary over ``axes`` by type.

    Types are those of ``check_vma=True``. Without axes nothing changes.
    """
    for cell in modules_of(model).values() if axes else ():
        if isinstance(cell, nnx.RNNCellBase):
            object.__setattr__(cell, "__class__", _varying_cell_type(type(cell), axes))


@functools.cache
def _varying_cell_type(cls: type[nnx.RNNCellBase], axes: frozenset[str]) -> Any:
    @functools.wraps(cls.initialize_carry)
    def initialize_carry(self: nnx.RNNCellBase, *args: Any, **kwargs: Any) -> Any:
        return collectives.to_varying(cls.initialize_carry(self, *args, **kwargs), axes)

    return subclass_of(cls, {"initialize_carry": initialize_carry})

"""Variables of NNX modules and trees of boxes: the same parameters, as modules hold them and as the library does.

  module.kernel = Param(W[d, f])            a module holds variables; one that is split is a ``BoxedVariable``
  {"params": {"kernel": Sharded(W)}}        the library holds a dict of collections, of boxes and bare values, by path

A variable that is split knows its names, how it travels, and the axes over which it is gathered. ``Gathered`` gives it
its whole value while its module runs; read at any other time, it gathers itself, once for each read.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import boxes
from xlstm_jax.distributed.data_parallel.axes import AxisEntry
from xlstm_jax.distributed.data_parallel.fronts.entering import gather_here
from xlstm_jax.distributed.data_parallel.shard import ShardRule

COLLECTIONS = {nnx.Param: "params", nnx.BatchStat: "batch_stats", nnx.Cache: "cache", nnx.Intermediate: "intermediates"}
OF_ARRAYS = "arrays"  # the collection of what a module holds without a variable around it
NAMES_IN_METADATA = ("out_sharding", "sharding_names", "sharding")  # in this and in earlier releases of Flax
NAMES, SIZES, HOW, AXES = "split_names", "split_true_sizes", "split_communication", "split_axes"  # in ours

# ------------------------------------------------------------------------------------------------- variables of a shard


class _Changed:
    """A variable while its value is the library's: what a model writes then would be lost."""

    __slots__ = ()

    def set_value(self: Any, value: Any, *, index: Any = ...) -> None:
        del value, index
        raise ValueError(
            f"the model writes a parameter that is split as {self.get_metadata(NAMES)}. Write it outside of the model: "
            "by the optimizer, or in the variables that the model is applied to."
        )


class _Whole(_Changed):
    """A variable while its module runs: its value is gathered."""

    __slots__ = ()


class _Split(_Changed, boxes.BoxedVariable):
    """A variable whose value is a shard: a box, and gathered wherever it is read as an array."""

    __slots__ = ()

    @property
    def stored(self: Any) -> Any:
        return self.get_raw_value()

    @property
    def names(self: Any) -> tuple[AxisEntry, ...]:
        return _of_last_dims(self.get_metadata(NAMES), np.ndim(self.stored))

    @property
    def true_sizes(self: Any) -> tuple[int | None, ...]:
        sizes = _of_last_dims(self.get_metadata(SIZES), np.ndim(self.stored))
        return sizes if any(sizes) else ()

    @property
    def communication(self: Any) -> Any:
        return self.get_metadata(HOW)

    def replace(self: Any, **fields: Any) -> Any:
        return self.copy(**{HOW if name == "communication" else name: value for name, value in fields.items()})

    def replace_boxed(self: Any, val: Any) -> Any:
        return self.from_metadata(val, self.get_metadata())

    def get_value(self: Any, **index: Any) -> Any:
        with jax.named_scope("read.sharded"):
            (whole,) = _whole_values({".": self}).values()
        return _plain_type(self).from_metadata(whole, self.get_metadata()).get_value(**index)

    def __getattr__(self: Any, name: str) -> Any:
        metadata = self.get_metadata()
        return metadata[name] if name in metadata else getattr(self.get_value(), name)


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


@functools.cache
def _type_like(cls: type[nnx.Variable[Any]], state: type[_Changed]) -> Any:
    """The variables of class ``cls`` in a state, ``_Split`` or ``_Whole``; the class keeps its name."""
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (state, cls), {"__module__": cls.__module__, "plain_type": cls})


def _plain_type(variable: Any) -> Any:
    return getattr(type(variable), "plain_type", type(variable))


def _turn_into(variable: Any, state: type[_Changed]) -> None:
    kind: Any = state
    object.__setattr__(variable, "__class__", _type_like(_plain_type(variable), kind))


def is_split(variable: Any) -> bool:
    """Whether the value of a variable is a shard."""
    return isinstance(variable, _Split)


def _whole_values(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The whole values of split variables by path; what other axes split (tensor parallel) stays so."""
    whole: dict[str, Any] = {}
    for axes in {variable.get_metadata(AXES) for variable in variables.values()}:
        over_axes = {path: v for path, v in variables.items() if v.get_metadata(AXES) == axes}
        whole |= gather_here(axes, ShardRule(), over_axes)
    return {path: boxes.leaf_value(whole[path]) for path in variables}


class Gathered:
    """While a module runs, its variables (by path) have their whole values; and then their shards again.

    NNX refuses to write a variable that was made under another trace. Nobody sees this write after it is undone.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = {path: variable for path, variable in variables.items() if is_split(variable)}

    def __enter__(self) -> None:
        self._shards = {path: variable.get_raw_value() for path, variable in self._variables.items()}
        self._set(_whole_values(self._variables), _Whole)

    def __exit__(self, *error: object) -> None:
        self._set(self._shards, _Split)

    def _set(self, values: Mapping[str, Any], state: type[_Changed]) -> None:
        for path, variable in self._variables.items():
            object.__setattr__(variable, "_raw_value", values[path])
            _turn_into(variable, state)


# ----------------------------------------------------------------------------------------------- collections by path


def contents(found: Iterable[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
    """Of what ``nnx.iter_graph`` finds, variables and bare arrays, by path as in ``blocks/0/kernel``."""
    kinds = (nnx.Variable, jax.Array, np.ndarray, jax.ShapeDtypeStruct)
    return {path_of(path): leaf for path, leaf in found if isinstance(leaf, kinds)}


def path_of(parts: tuple[Any, ...]) -> str:
    """A path of NNX, whose parts are names and numbers, as one text."""
    return "/".join(map(str, parts))


def collection_of(leaf: Any) -> str | None:
    """The name of the collection that a variable belongs to; None for the state of random numbers."""
    if not isinstance(leaf, nnx.Variable):
        return OF_ARRAYS
    if isinstance(leaf, nnx.RngState):
        return None
    known = next((name for cls, name in COLLECTIONS.items() if isinstance(leaf, cls)), None)
    return known or nnx.variable_name_from_type(_plain_type(leaf), allow_register=True)


def variables_of(module: nnx.Module) -> dict[str, Any]:
    """The variables of a module as a dict of collections: bare values, and boxes around those that are split."""
    collections: dict[str, Any] = {}
    for path, leaf in contents(nnx.iter_graph(module)).items():
        if (name := collection_of(leaf)) is not None:
            set_at(collections, f"{name}/{path}", _boxed(leaf))
    return collections


def _boxed(leaf: Any) -> Any:
    if not is_split(leaf):
        return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return boxes.Sharded(leaf.stored, leaf.names, communication=leaf.communication, true_sizes=leaf.true_sizes)


def with_own_names(variable: Any, ndim: int) -> Any:
    """The value of a variable, in a box where its metadata name mesh axes for its last ``ndim`` dims."""
    metadata, value = variable.get_metadata(), variable.get_raw_value()
    names = next((metadata[key] for key in NAMES_IN_METADATA if metadata.get(key)), ())
    rules = dict(metadata.get("sharding_rules") or ())
    own = tuple(rules.get(name, name) for name in tuple(names)[-ndim:])
    return meta.Partitioned(value, own) if any(own) else value


def put(variable: Any, leaf: Any, axes: tuple[str, ...], rule: ShardRule) -> None:
    """Gives a variable the value of ``leaf``; where a box splits it over ``axes``, it is to be gathered over these."""
    variable.set_raw_value(boxes.leaf_value(leaf))
    if not set(boxes.leaf_axes(leaf)) & set(axes):
        return
    how = boxes.leaf_communication(leaf).or_else(rule.communication)
    fields = {NAMES: boxes.leaf_names(leaf), SIZES: boxes.true_sizes(leaf), HOW: how, AXES: axes}
    variable.set_metadata(**fields)
    _turn_into(variable, _Split)


def set_at(tree: dict[str, Any], path: str, value: Any) -> None:
    """``tree["a"]["b"] = value`` for the path ``a/b``."""
    *parents, last = path.split("/")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def get_at(tree: Mapping[str, Any], path: str) -> PyTree:
    """``tree["a"]["b"]`` for the path ``a/b``.

    Raises:
      KeyError: there is none.
    """
    for name in path.split("/"):
        tree = tree[name]
    return tree


def rename_leaves(tree: PyTree, names: Mapping[str, str]) -> dict[str, Any]:
    """The tree with its leaves at other paths: for the parameters of one model under the names of another.

    >>> linen = {"Dense_0": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "Dense_1": {"kernel": jnp.ones((3, 2))}}
    >>> nnx = rename_leaves(linen, {"Dense_0": "up", "Dense_1": "mlp/down"})
    >>> jax.tree.map(jnp.shape, nnx)
    {'mlp': {'down': {'kernel': (3, 2)}}, 'up': {'bias': (3,), 'kernel': (2, 3)}}

    Args:
      tree: nested dicts; a box is one leaf.
      names: for the beginning of a path (whole parts of it), what stands there instead; the longest that fits counts,
        and a path that none fits stays. ``{new: old for old, new in names.items()}`` leads back.
    Raises:
      ValueError: two leaves would lie at one path, or a name fits no leaf.
    """
    renamed: dict[str, Any] = {}
    used: set[str] = set()
    new_paths: set[str] = set()
    for path, leaf in boxes.leaves_with_path(tree):
        fitting = [name for name in names if path == name or path.startswith(f"{name}/")]
        old = max(fitting, key=len, default="")
        new = names[old] + path[len(old) :] if fitting else path
        if new in new_paths:
            raise ValueError(f"'{path}' would lie at '{new}', where another leaf lies; give it a name of its own.")
        used, new_paths = used | set(fitting), new_paths | {new}
        set_at(renamed, new, leaf)
    if unused := sorted(names.keys() - used):
        paths = ", ".join(path for path, _ in boxes.leaves_with_path(tree))
        raise ValueError(f"no path begins with {unused[0]!r}; the paths are {paths}.")
    return renamed

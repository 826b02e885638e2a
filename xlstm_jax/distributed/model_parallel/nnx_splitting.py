"""``split_modules`` for an NNX model: splits layers when the model is made, by a subclass and a name in the metadata.

A chosen ``nnx.Linear``, ``nnx.LinearGeneral`` or ``nnx.Embed`` gets a subclass of the same name with the product of
``ColumnDense``, ``RowDense`` or ``SplitEmbed``; the metadata of its kernel name the split dim, as ``out_sharding`` of a
user's own layer does. The class stores the kind of the split, the axis, and the path without the layer's number, so
that equal layers have equal classes, and can be stacked.

Layers that are not split, and have parameters, get a subclass, too, which refuses to run where the gradients of the
parameters would be wrong: between a layer that is split by columns and a layer that is split by rows.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import Array

from xlstm_jax.distributed.data_parallel.boxes import reader
from xlstm_jax.distributed.data_parallel.modules.default_units import is_within
from xlstm_jax.distributed.data_parallel.modules.nnx_model import NnxModel
from xlstm_jax.distributed.data_parallel.modules.nnx_module import (
    NAMES_IN_METADATA,
    NNX,
    OWN_AXES,
    gathered,
    is_split,
    is_variable,
    modules_of,
    path_of,
    subclass_of,
)
from xlstm_jax.distributed.data_parallel.modules.unit import public_methods
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import entry_axes, is_prng_key
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.model_parallel.activations import axis_devices, enter_split, param_shards
from xlstm_jax.distributed.model_parallel.dense import (
    FUSED,
    check_features_divide,
    column_products,
    contracted,
    fused_features_error,
    last_dims,
    row_product,
)
from xlstm_jax.distributed.model_parallel.embedding import check_integers, look_up_split_rows
from xlstm_jax.distributed.model_parallel.splitting import BETWEEN, SPLITTERS, check_not_split_by_rules, joined_logits
from xlstm_jax.formatting import listed, path_pattern

Kinds = Mapping[re.Pattern[str], str]
Method = Callable[..., Any]
DENSE = (nnx.Linear, nnx.LinearGeneral)
LAYERS: dict[str, tuple[type[nnx.Module], ...]] = {
    "column": DENSE,
    "row": DENSE,
    "vocabulary": (nnx.Linear, nnx.Embed),
}
SPLIT = "_split_over"  # attribute of a subclass: the ``_Split``


@dataclass(frozen=True)
class _Split:
    """Split of a layer: the kind, the mesh axis, and the path of the layer without its number, for errors."""

    kind: str
    axis_name: str
    path: str

    @property
    def quoted_path(self) -> str:
        return f"'{self.path}'"

    @property
    def devices(self) -> int:
        return axis_devices(self.axis_name, self.quoted_path)


@dataclass
class _Run:
    """State of a running method of the model: the last column-split layer without a row-split layer after it."""

    column: str | None = None


_run: ContextVar[_Run | None] = ContextVar("the running method of a split NNX model", default=None)


def split_nnx(model: NnxModel, kinds: Kinds, axis_name: str) -> NnxModel:
    """Returns a copy of the model whose ``make`` splits the chosen layers; implements ``split_modules`` for NNX models.

    ``kinds`` maps patterns for the last names of a layer's path to kinds, such as "column", and ``axis_name`` is the
    mesh axis of the split. Layers are split whenever ``make`` makes a module.

    Raises:
      ValueError: a pattern matches nothing, or a layer that cannot be split.
    """
    modules = {path: module for path, module in model.modules.items() if path}
    chosen = _chosen(modules, kinds, type(model.modules[""]).__name__)
    plain_make = model.make

    def make(rngs: nnx.Rngs) -> nnx.Module:
        module = plain_make(rngs)
        for path, inner in modules_of(module).items():
            split = _Split(chosen.get(path, ""), axis_name, path_pattern(f"{path}/")[:-1])
            if path in chosen and split.kind not in BETWEEN:
                _name_axis(inner, split)
            if not path:
                _change_class(inner, _starting_run(type(inner)))
            elif path in chosen or _is_checked(inner):
                _change_class(inner, _split_class(type(inner), split))
        return module

    return dataclasses.replace(model, make=make)


SPLITTERS[NnxModel] = split_nnx


def _change_class(module: nnx.Module, cls: type[nnx.Module]) -> None:
    # In place: other attributes of the model may refer to this object.
    object.__setattr__(module, "__class__", cls)


def _own_params(module: nnx.Module) -> list[str]:
    """Returns the names of a module's trained parameters, without those of submodules.

    Trained is an ``nnx.Param`` of a floating dtype. The names are those of the module's attributes.
    """
    variables = ((name, value) for name, value in vars(module).items() if is_variable(value))
    return [name for name, x in variables if isinstance(x, nnx.Param) and jnp.issubdtype(x.dtype, jnp.inexact)]


def _is_checked(module: nnx.Module) -> bool:
    """Returns whether an unsplit module gets a class (``_checked``) that raises an error for input with split features.

    True for a module with trained parameters; parameters of submodules do not count. False for a module whose class has
    been changed already. False also for an ``nnx.Embed``, for two reasons: its input is tokens, which have no features;
    and FSDP sends rows of an ``nnx.Embed`` only if the ``__call__`` of the class is unchanged.
    """
    return bool(_own_params(module)) and not isinstance(module, nnx.Embed) and not hasattr(type(module), SPLIT)


# ------------------------------------------------------------------------------------------------------------- choose


def _chosen(modules: Mapping[str, nnx.Module], kinds: Kinds, model: str) -> dict[str, str]:
    """Returns a dict from the path of each chosen module to its kind, such as "column".

    The kind is that of the first pattern in ``kinds`` that matches the path. Modules that no pattern matches are left
    out, and so are modules below a module of kind "inside", which handles their parameters. ``modules`` are all modules
    by path. ``model`` is the name of the model's class, for errors.

    Raises:
      ValueError: a pattern matches nothing, or a layer that cannot be split.
    """
    chosen: dict[str, str] = {}
    matched = set()
    for path, module in modules.items():
        is_layer = bool(_own_params(module))
        candidates = ((pattern, kind) for pattern, kind in kinds.items() if is_layer or kind in BETWEEN)
        pattern, kind = next(((pattern, kind) for pattern, kind in candidates if pattern.search(path)), (None, ""))
        if pattern is not None:
            matched.add(pattern)
            chosen[path] = kind
            if kind not in BETWEEN:
                _check_plain(path, module, kind)
    for pattern, kind in kinds.items():
        if pattern not in matched:
            layers = [path for path, module in modules.items() if kind in BETWEEN or isinstance(module, LAYERS[kind])]
            noun = "modules" if kind in BETWEEN else "dense layers"
            raise ValueError(
                f"split_modules: {pattern.pattern[6:-2]!r} matches none of the {noun} of {model}: "
                f"{listed(sorted(layers), 12) or 'it has none'}. Patterns are of the last names of these paths."
            )
    inside = [path for path, kind in chosen.items() if kind == "inside"]
    # An "inside" module handles the parameters of all modules within.
    return {path: kind for path, kind in chosen.items() if not _is_below(path, inside)}


def _is_below(path: str, others: list[str]) -> bool:
    return any(path != other and is_within(path, other) for other in others)


def _check_plain(path: str, module: Any, kind: str) -> None:
    """Raises a ``ValueError`` if ``kind``, "column", "row" or "vocabulary", cannot split the layer at ``path``.

    The layer ``module`` is split already, ``kind`` is not for the layer's class, or the layer has a custom product or
    batch dims (``dot_general``, ``batch_axis``, ...).
    """
    if hasattr(type(module), SPLIT):
        raise ValueError(f"split_modules: '{path}' is split already. Name each layer once, in a single split=.")
    if type(module) not in LAYERS[kind]:
        raise ValueError(
            f"split_modules: '{path}' is of the class {type(module).__name__}, and {kind!r} is for "
            f"{listed([f'nnx.{cls.__name__}' for cls in LAYERS[kind]])}. For another layer enter the axis in the "
            "metadata of its parameters (out_sharding), and call enter_split and leave_split around it: docs/nnx.md."
        )
    plain = {
        "dot_general": (None, jax.lax.dot_general),
        "dot_general_cls": (None,),
        "preferred_element_type": (None,),
        "promote_dtype": (dtypes.promote_dtype,),
    }
    for name, values in plain.items():
        if getattr(module, name, values[0]) not in values:
            raise ValueError(
                f"split_modules: '{path}' has {name}={getattr(module, name)!r}, and a split layer has the product of "
                "Flax. Leave this layer out of split=."
            )
    if batch_axis := getattr(module, "batch_axis", None):
        raise ValueError(
            f"split_modules: '{path}' has batch_axis={dict(batch_axis)}, and a split layer has no batch dims. Leave "
            "this layer out of split=."
        )


def _dims(layer: Any) -> tuple[int, int]:
    """Returns (number of input dims, number of output dims) of a dense layer's kernel.

    ``nnx.Linear``: (1, 1). Dims of stacked layers do not count.
    """
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.in_features), len(layer.out_features)
    return 1, 1


def _name_axis(layer: Any, split: _Split) -> None:
    """Enters the mesh axis of ``split`` in the metadata of a layer's parameters, for the dim that the kind splits.

    For an ``nnx.Embed`` this is the vocabulary dim; for "row" the first input dim of the kernel; for "column" and
    "vocabulary" the first output dim of kernel and bias.
    """
    if isinstance(layer, nnx.Embed):
        _name_dim(layer.embedding, 0, 2, split, "embedding")
        return
    inputs, outputs = _dims(layer)
    by_columns = split.kind != "row"
    _name_dim(layer.kernel, inputs if by_columns else 0, inputs + outputs, split, "kernel")
    if by_columns and layer.bias is not None:
        _name_dim(layer.bias, 0, outputs, split, "bias")


def _name_dim(variable: Any, dim: int, ndim: int, split: _Split, name: str) -> None:
    """Names the mesh axis of ``split`` in a variable's metadata (``out_sharding``), for dim ``dim`` of ``ndim`` dims.

    If the variable has more dims, these are leading dims of stacked layers: ``dim`` is counted after them. A logical
    name of the dim is replaced: the layer computes with its share of this dim, whatever the rules say. ``name`` is the
    variable's name, for errors.

    Raises:
      ValueError: the metadata name another axis for the dim, or the split axis for another dim.
    """
    metadata = variable.get_metadata()
    chosen = next((tuple(metadata[key]) for key in NAMES_IN_METADATA if metadata.get(key)), ())
    # nnx.vmap adds leading dims of layers.
    names = (None,) * (variable.get_raw_value().ndim - len(chosen)) + chosen
    dim += len(names) - ndim
    # Logical names are mapped by rules. Without a mesh (the model is only inspected) rules need not be in force, and
    # any name may be a logical one.
    entries, _ = reader().names_in_metadata(names, metadata.get("sharding_rules"))
    taken = {axis for entry in (*entries[:dim], *entries[dim + 1 :]) for axis in entry_axes(entry)}
    of_mesh = jax.sharding.get_abstract_mesh().shape
    others = [axis for axis in entry_axes(entries[dim]) if axis != split.axis_name and axis in of_mesh]
    if split.axis_name in taken or others:
        mapped = "" if entries == names else f", by their rules {entries}"
        raise ValueError(
            f"'{split.path}/{name}' is split along dim {dim} over {split.axis_name!r} by split_modules, and the names "
            f"of its metadata are {names}{mapped}. Other dims may have other axes: leave dim {dim} and "
            f"{split.axis_name!r} to split_modules."
        )
    out_sharding = (*names[:dim], split.axis_name, *names[dim + 1 :])
    variable.set_metadata(**{"out_sharding": out_sharding, OWN_AXES: (split.axis_name,)})


# ------------------------------------------------------------------------------------------------------------- classes


# Cached: NNX compares the structures of models by the classes of their modules.
@functools.cache
def _split_class(cls: type[nnx.Module], split: _Split) -> Any:
    """Returns a subclass of ``cls`` with the same name, whose methods treat the split that ``split`` describes.

    By ``split.kind``: for "column", "row" and "vocabulary" the methods compute with this device's share of the kernel.
    For "inside" and "replicated", modules between split layers, public methods run in the context ``_entered`` or
    ``_without_split_input``. For "", unsplit modules, ``__call__`` checks its input (``_checked``).
    """
    methods: dict[str, Method] = {}
    if split.kind in BETWEEN:
        around = _entered if split.kind == "inside" else _without_split_input
        methods = {name: _within(getattr(cls, name), around, split) for name in public_methods(cls, NNX)}
    elif split.kind == "vocabulary" and issubclass(cls, nnx.Embed):
        methods = {"__call__": _looked_up, "attend": _attended}
    elif split.kind:
        methods = {"__call__": {"column": _by_columns, "row": _by_rows, "vocabulary": _logits}[split.kind]}
    elif "__call__" in public_methods(cls, NNX):
        methods = {"__call__": _checked(cls.__call__, split)}
    return subclass_of(cls, {**methods, SPLIT: split})


@functools.cache
def _starting_run(cls: type[nnx.Module]) -> Any:
    """Returns a subclass of ``cls``, the model's class, with the same name, whose public methods begin a ``_Run``.

    A ``_Run`` is a record of the last column-split layer, which the layers of the model read and write. A method that
    is called by another method of the model begins no record: its layers continue the record of the calling method.
    """

    def starting(plain: Method) -> Method:
        @functools.wraps(plain)
        def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            if _run.get() is not None:  # called by another method of the model
                return plain(self, *args, **kwargs)
            with set_context(_run, _Run()):
                return plain(self, *args, **kwargs)

        return method

    return subclass_of(cls, {name: starting(getattr(cls, name)) for name in public_methods(cls, NNX)})


def _within(plain: Method, around: Callable[[nnx.Module, _Split], Any], split: _Split) -> Method:
    @functools.wraps(plain)
    def method(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        with around(self, split):
            return plain(self, *args, **kwargs)

    return method


@contextmanager
def _without_split_input(module: nnx.Module, split: _Split) -> Iterator[None]:
    """Context for a method of a module whose input and output are unsplit (kind "replicated").

    In the context no column-split layer counts as run, so that layers inside are not checked for split inputs. After
    the context the last column-split layer of the run is as before. The arguments have no effect.
    """
    del module, split
    run = _run.get() or _Run()
    before, run.column = run.column, None
    try:
        yield
    finally:
        run.column = before


@contextmanager
def _entered(module: nnx.Module, split: _Split) -> Iterator[None]:
    """Context for a method of an "inside" module: gradients are summed over the axis, and random keys differ by device.

    In the context the variables of ``module`` that are split are gathered, its trained parameters pass ``enter_split``,
    which sums gradients in backward, and the index of the device is folded into random keys. Afterwards parameters and
    keys have their former values. On a single device only the checks of split inputs are off, as in
    ``_without_split_input``.
    """
    if split.devices == 1:
        with _without_split_input(module, split):
            yield
        return
    variables = {path_of(path): leaf for path, leaf in nnx.iter_graph(module) if is_variable(leaf)}
    trained = [x.get_raw_value() for x in variables.values() if isinstance(x, nnx.Param)]
    check_not_split_by_rules(split.path, module, trained, split.axis_name)
    with (
        _without_split_input(module, split),
        gathered({path: leaf for path, leaf in variables.items() if is_split(leaf)}),
    ):
        before = {path: leaf.get_raw_value() for path, leaf in variables.items()}
        for path, leaf in variables.items():
            # NNX refuses to write a variable of another trace. This write is undone before NNX could notice.
            object.__setattr__(leaf, "_raw_value", _local_value(leaf, before[path], split))
        try:
            yield
        finally:
            for path, leaf in variables.items():
                if isinstance(leaf, nnx.Param | nnx.RngKey):
                    object.__setattr__(leaf, "_raw_value", before[path])


def _local_value(leaf: Any, value: Any, split: _Split) -> Any:
    if isinstance(leaf, nnx.Param) and jnp.issubdtype(value.dtype, jnp.inexact):
        with jax.named_scope("sync_gradients"):  # a gradient is sent, not an activation
            return enter_split(value, split.axis_name, caller=split.quoted_path)
    if isinstance(leaf, nnx.RngKey) and is_prng_key(value):
        return jax.random.fold_in(value, collectives.axis_index((split.axis_name,)))
    return value


# ------------------------------------------------------------------------------------------------------------ products


def _operands(layer: Any, x: Array, split: _Split) -> tuple[Array, Array, Array | None, int]:
    """Returns (x, kernel, bias, number of contracted dims) of a dense layer, arrays in the dtype of its products.

    The contracted dims are the last dims of x and the first dims of the kernel. Kernel and bias are this device's
    shards; the bias is None for a layer without a bias.

    Raises:
      ValueError: the layer's field ``axis`` is not the last dims of x.
    """
    count = last_dims(getattr(layer, "axis", -1), x, split.quoted_path)
    bias = None if layer.bias is None else layer.bias[...]
    x, kernel, bias = layer.promote_dtype((x, layer.kernel[...], bias), dtype=layer.dtype)
    return x, kernel, bias, count


def _by_columns(self: Any, inputs: Array, out_sharding: None = None) -> Array:
    """Returns this device's output features of a column-split layer: [b, t, d] -> [b, t, f / n], on n devices.

    Replaces the layer's ``__call__``; ``out_sharding`` is ignored. The ``_Run``, which follows a call of the model,
    then has this layer as the latest column-split layer.

    Raises:
      ValueError: the input has only this device's share of the d features, or n does not divide the f output features.
    """
    split: _Split = getattr(self, SPLIT)
    run, n, outputs = _run.get(), split.devices, self.out_features
    del out_sharding  # for meshes with explicit axes
    features = outputs if isinstance(outputs, tuple) else (outputs,)
    _check_features(features, split)
    x, kernel, bias, count = _operands(self, inputs, split)
    if n > 1 and x.shape[x.ndim - count] * n == kernel.shape[0]:
        raise ValueError(
            f"split_modules: '{split.path}' is split by columns, and runs on what "
            f"'{(run and run.column) or 'a layer before it'}' returned, which is split by columns, too: its input of "
            f"shape {x.shape} has {x.shape[x.ndim - count]} of {kernel.shape[0]} features on each of the {n} devices "
            f"along {split.axis_name!r}. Split {split.quoted_path} by 'row'."
        )
    (y,) = column_products(
        x,
        [kernel],
        split.axis_name,
        product=functools.partial(contracted, count=count, precision=self.precision),
        caller=split.quoted_path,
    )
    if run is not None and split.kind == "column":
        run.column = split.path
    return y if bias is None else y + bias


def _check_features(features: tuple[int, ...], split: _Split) -> None:
    """Raises a ``ValueError`` if the devices along the axis of ``split`` do not divide the first dim of ``features``.

    ``features`` are the sizes of a layer's output dims. Raises as well if the first dim counts fused layers, such as
    the 3 of (3, heads, dim) for queries, keys and values.
    """
    count = param_shards(split.axis_name, split.quoted_path)
    check_features_divide(features, count, split.axis_name, split.quoted_path)
    if len(features) == 3 and count > 1 and count == features[0] in FUSED and features[1] not in FUSED:
        raise fused_features_error(features, count, split.axis_name, f"split_modules: {split.quoted_path}")
    if features[0] % count:
        raise ValueError(
            f"split_modules: '{split.path}' has {features[0]} features (or heads), which the {count} devices along "
            f"{split.axis_name!r} do not divide. Choose a multiple of {count}, or fewer devices along "
            f"{split.axis_name!r}."
        )


def _logits(self: Any, inputs: Array, out_sharding: None = None) -> Array:
    """Returns the logits of the full vocabulary, replicated: [..., d] -> [..., V].

    This is the ``__call__`` of a head (``nnx.Linear``) whose kernel is split along the vocabulary; ``out_sharding`` is
    ignored.
    """
    return joined_logits(_by_columns(self, inputs, out_sharding), getattr(self, SPLIT).axis_name)


def _by_rows(self: Any, inputs: Array, out_sharding: None = None) -> Array:
    """Returns the output of a row-split layer, summed over the devices and replicated: [b, t, f / n] -> [b, t, d].

    Replaces the layer's ``__call__``; ``out_sharding`` is ignored. The bias is added once, to the sum. The ``_Run``,
    which follows a call of the model, then has no column-split layer that waits for a row-split layer.

    Raises:
      ValueError: the input has the features of all devices.
    """
    split: _Split = getattr(self, SPLIT)
    del out_sharding
    x, kernel, bias, count = _operands(self, inputs, split)
    if (n := split.devices) > 1 and x.shape[x.ndim - count] == kernel.shape[0] * n:
        raise ValueError(
            f"split_modules: '{split.path}' is split by rows, and its input of shape {x.shape} has all "
            f"{x.shape[x.ndim - count]} features, not the {kernel.shape[0]} of each of the {n} devices along "
            f"{split.axis_name!r}. Split the layer before {split.quoted_path} by 'column', or leave "
            f"{split.quoted_path} out of split=."
        )
    product = functools.partial(contracted, count=count, precision=self.precision)
    y = row_product(x, kernel, split.axis_name, product=product, caller=split.quoted_path)
    if (run := _run.get()) is not None:
        run.column = None
    return y if bias is None else y + bias


def _looked_up(self: Any, inputs: Array, out_sharding: None = None) -> Array:
    """Returns the table's rows for integers [b, t], replicated: [b, t, d].

    This is the ``__call__`` of an ``nnx.Embed`` whose table is split along the vocabulary; ``out_sharding`` is ignored.
    """
    split: _Split = getattr(self, SPLIT)
    del out_sharding
    check_integers(inputs, split.quoted_path)
    _check_features((self.num_embeddings,), split)
    (table,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
    return look_up_split_rows(table, inputs, self.num_embeddings, split.axis_name, caller=split.quoted_path)


def _attended(self: Any, query: Array, out_sharding: None = None) -> Array:
    """Returns the logits of the full vocabulary, replicated: [..., d] -> [..., V].

    This is the ``attend`` of an ``nnx.Embed`` whose table is split along the vocabulary; ``out_sharding`` is ignored.
    """
    split: _Split = getattr(self, SPLIT)
    del out_sharding
    query, table = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
    (logits,) = column_products(query, [table.T], split.axis_name, caller=split.quoted_path)
    return joined_logits(logits, split.axis_name)


def _checked(plain: Method, split: _Split) -> Method:
    """Returns a method for an unsplit module that runs ``_check_between``, and then ``plain``, the module's method.

    The check runs only after a column-split layer without a row-split layer since, and on several devices.
    """

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _run.get()
        if run is not None and run.column is not None and split.devices > 1:
            _check_between(self, run.column, args, split)
        return plain(self, *args, **kwargs)

    return method


def _check_between(module: Any, column: str, args: tuple[Any, ...], split: _Split) -> None:
    """Raises a ``ValueError`` if an unsplit module gives a wrong result or gradient after a column-split layer.

    A dense layer raises if its input, ``args[0]``, has a device's share of the features. A module raises if rules for
    logical names split a parameter over the axis of ``split``; and under ``check_vma=False`` always, as the gradients
    of its parameters are not summed. ``column`` is the path of the column-split layer.
    """
    axis, n = split.axis_name, split.devices
    if isinstance(module, DENSE) and args:
        count = len(module.axis) if isinstance(module, nnx.LinearGeneral) else 1
        features, rows = args[0].shape[args[0].ndim - count], module.kernel.get_raw_value().shape[0]
        if features * n == rows:
            raise ValueError(
                f"split_modules: '{split.path}' is not split, and runs on what '{column}' returned, split by columns: "
                f"its input of shape {args[0].shape} has {features} of {rows} features on each of the {n} devices "
                f"along {axis!r}. Split {split.quoted_path} by 'row', which sums over these devices."
            )
    trained = [getattr(module, name).get_raw_value() for name in _own_params(module)]
    check_not_split_by_rules(split.path, module, trained, axis)
    # With check_vma=True JAX sums the gradients.
    if not collectives.is_tracked(axis):
        raise ValueError(
            f"split_modules: '{split.path}' ({type(module).__name__}) has replicated parameters, and runs after "
            f"'{column}' is split by columns, before a layer is split by rows. Add it to split= as 'inside' if its "
            f"input is split over {axis!r}, or as 'replicated' if its input and output are replicated."
        )

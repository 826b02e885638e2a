"""``split_modules``: splits dense layers of a model from outside, without an edit of the model's source.

The public methods of the new model class run under an interceptor, which Linen calls on entry to each module. A chosen
``nn.Dense`` or ``nn.DenseGeneral`` becomes a subclass with the product of ``ColumnDense`` or ``RowDense``. A module
between the two is converted by ``on_split_input``.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flax import linen as nn
from jax import Array

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.modules.linen_module import (
    RUNS_AROUND,
    active_interceptors_of,
    class_and_fields,
    methods_to_lift,
)
from xlstm_jax.distributed.data_parallel.modules.other_systems import ShardsItself, other_system
from xlstm_jax.distributed.data_parallel.modules.unit import Method
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.model_parallel.activations import axis_devices, join_tokens, param_shards
from xlstm_jax.distributed.model_parallel.dense import (
    DEFAULT_AXIS,
    FUSED,
    ColumnDense,
    RowDense,
    fused_features_error,
    share_of_input,
)
from xlstm_jax.distributed.model_parallel.embedding import SplitEmbed
from xlstm_jax.distributed.model_parallel.split_input import is_on_split_input, on_split_input
from xlstm_jax.formatting import kind_of, listed

Model = TypeVar("Model", bound=nn.Module | type[nn.Module] | ShardsItself)
Splitter = Callable[[Any, Mapping[re.Pattern[str], str], str], Any]  # of the model, the kinds by pattern, the axis
SPLITTERS: dict[type[Any], Splitter] = {}  # of models that are no Linen modules, by class: NNX (``nnx_splitting``)


class _SplitLogits(ColumnDense):
    """Head with split columns, whose logits are gathered on every device."""

    def __call__(self, x: Array) -> Array:
        return joined_logits(super().__call__(x), self.axis_name)


class _SplitTable(SplitEmbed):
    """Embedding with a split vocabulary, whose ``attend`` (a tied head) gathers the logits on every device."""

    def setup(self) -> None:
        """Does nothing; overrides the ``setup`` of ``nn.Embed``, which would make the unsharded table."""

    def attend(self, query: Array) -> Array:
        return joined_logits(super().attend(query), self.axis_name)


def joined_logits(logits: Array, axis_name: str) -> Array:
    """Gathers the logits of all devices' vocabulary entries, on every device: [..., V / n] -> [..., V].

    ``axis_name`` is the mesh axis that splits the vocabulary.
    """
    return join_tokens(logits, logits.ndim - 1, axis_name, caller="split_modules")


BETWEEN = ("inside", "replicated")  # kinds for any module
# The split class for each class of Flax, by kind.
KINDS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "column": {nn.Dense: ColumnDense, nn.DenseGeneral: ColumnDense},
    "row": {nn.Dense: RowDense, nn.DenseGeneral: RowDense},
    "vocabulary": {nn.Dense: _SplitLogits, nn.Embed: _SplitTable},
}
PLAIN = (nn.Dense, nn.DenseGeneral, nn.Embed)


def split_modules(model: Model, split: Mapping[str, str], axis_name: str = DEFAULT_AXIS) -> Model:
    """Splits dense layers of a model over a mesh axis, by columns or by rows.

    >>> mlp = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(16)])
    >>> mlp = split_modules(mlp, {"layers_0": "column", "layers_2": "row"})
    >>> jax.tree.map(jnp.shape, mlp.init(jax.random.key(0), jnp.ones((8, 16)))["params"]["layers_0"])
    {'bias': (64,), 'kernel': (16, 64)}

    Between a column-split layer and the next row-split layer, each device has a share of the last dim or of the
    heads of an activation. The model's code in between must work for any number of features or heads. Flax's
    attention does: ``{"query|key|value": "column", "out": "row"}``. A module in between that has parameters or drops
    values is "inside", such as norms of queries and keys: ``"query_ln|key_ln": "inside"``. The gradients of an
    "inside" module are summed over the axis, and each device drops different values. Parameters that a module in
    between reads directly (``self.param("scale", ...)``) cannot be handled, and have wrong gradients under
    ``check_vma=False``.

    Apply ``shard_modules`` first, as ``split_modules(shard_modules(...), ...)``: in the reverse order ``shard_modules``
    would treat split layers as plain layers. (For an NNX model any order is right.)

    Args:
      model: a Linen module, or a class of Linen modules; or an NNX model, made by ``nnx_model``, with layers of NNX in
        the place of the Linen layers named below (``nnx.Linear`` for ``nn.Dense``, ``nnx.LinearGeneral``).
      split: maps regular expressions for the last names of a layer's path, such as "attention/(query|key|value)", to
        kinds. The first expression that matches counts. Kinds: "column" or "row"; "vocabulary" for an ``nn.Embed``, or
        for the ``nn.Dense`` of the head, whose logits are gathered because the model expects replicated logits (the
        logits of ``LMHead`` stay split). For another module between a column-split and a row-split layer: "inside" if
        its input is split, "replicated" if its input and output are replicated.
      axis_name: the mesh axis.
    Raises:
      ValueError: an unknown kind; in ``init``, a pattern that matches no dense layer (or no module), with a list of
        layers, or a layer with a product other than Flax's; under ``check_vma=False``, a module with parameters that
        runs between a column-split and a row-split layer, and is neither "inside" nor "replicated".
      TypeError: the model is neither a Linen module nor made by ``nnx_model``.
    """
    kinds = {re.compile(f"(^|/)({pattern})$"): kind for pattern, kind in split.items()}
    if wrong := [kind for kind in split.values() if kind not in (*KINDS, *BETWEEN)]:
        raise ValueError(
            f"split_modules: {wrong[0]!r} is none of 'column', 'row', 'vocabulary', 'inside' and 'replicated'."
        )
    for of_models, splitter in SPLITTERS.items():
        if isinstance(model, of_models):
            return splitter(model, kinds, axis_name)
    splitting = _Splitting(kinds, axis_name)
    if isinstance(model, nn.Module):
        cls, fields = class_and_fields(model, "split_modules({}, split)")
        return _subclass(cls, splitting)(**fields)
    if isinstance(model, type) and issubclass(model, nn.Module):
        return _subclass(model, splitting)
    cure = ""
    if system := other_system(model):
        cure = f" For {system.package}: split_modules({system.passed_as}, split)."
    raise TypeError(f"split_modules takes a Linen module or its class, not {kind_of(model)}.{cure}")


@dataclass(frozen=True)
class _Splitting:
    """Arguments of a ``split_modules`` call; also records module paths and matched patterns in ``init``, for errors."""

    kinds: Mapping[re.Pattern[str], str]
    axis_name: str
    dense: set[str] = field(default_factory=set)
    other_modules: set[str] = field(default_factory=set)
    matched: set[re.Pattern[str]] = field(default_factory=set)
    # Kinds of the split layers by path, in call order.
    kinds_in_call_order: dict[str, str] = field(default_factory=dict)

    def kind_of(self, path: str, is_dense: bool) -> str | None:
        """Returns the kind, such as "column", of the first of the user's patterns that matches the path of a module.

        None if no pattern matches. A module that is no ``nn.Dense``, ``nn.DenseGeneral`` or ``nn.Embed``
        (``is_dense=False``) can only match a pattern of a kind in ``BETWEEN``, "inside" or "replicated". Records path
        and pattern for ``check_matched``.
        """
        (self.dense if is_dense else self.other_modules).add(path)
        kinds = {pattern: kind for pattern, kind in self.kinds.items() if is_dense or kind in BETWEEN}
        pattern = next((pattern for pattern in kinds if pattern.search(path)), None)
        if pattern is None:
            return None
        self.matched.add(pattern)
        return kinds[pattern]

    def check_matched(self, model: nn.Module) -> None:
        """Raises a ``ValueError`` if a pattern of the user has matched no module since this object was made.

        ``model`` gives the class name for the error, which lists the recorded paths.
        """
        for pattern, kind in self.kinds.items():
            if pattern not in self.matched:
                seen = self.dense | self.other_modules if kind in BETWEEN else self.dense
                noun = "modules" if kind in BETWEEN else "dense layers"
                raise ValueError(
                    f"split_modules: {pattern.pattern[6:-2]!r} matches none of the {noun} of "
                    f"{type(model).__name__}: {listed(sorted(seen), 12) or 'it has none'}. Patterns are of the "
                    "last names of these paths."
                )


class _Run:
    """Interceptor for a single call of a model's method; ``root`` is the number of names in the model's path."""

    def __init__(self, splitting: _Splitting, root: int) -> None:
        self.splitting, self.root = splitting, root
        self._column: str | None = None  # the last column-split layer without a row-split layer after it

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Runs the method of a module, and returns its result; an interceptor for ``nn.intercept_methods``.

        Before, the class of a module whose path matches a pattern is changed in place: to a split layer, or for the
        kind "inside" to a class of ``on_split_input``. A module of the kind "replicated" just runs, and inputs of
        modules inside are not checked. For split layers, and modules that no pattern chooses, the input is checked.
        Only ``__call__`` of modules inside of the model is treated so (of an ``nn.Embed`` also ``setup`` and
        ``attend``); other methods just run.

        Raises:
          ValueError: a chosen layer cannot be split, or a module would compute a wrong result or gradient.
        """
        module: Any = context.module
        cls: Any = type(module)
        name, path = context.method_name, "/".join(module.path[self.root :]) if module.scope else ""
        if not path or name not in ("__call__", *(("setup", "attend") if cls is nn.Embed else ())):
            return method(*args, **kwargs)
        if self in RUNS_AROUND.get():
            return method(*args, **kwargs)
        if isinstance(module, ColumnDense | RowDense | SplitEmbed):
            if isinstance(module, ColumnDense | RowDense) and args:
                self._check_pair(path, module, args[0])
            if not isinstance(module, SplitEmbed | _SplitLogits):
                self._column = path if isinstance(module, ColumnDense) else None
            return method(*args, **kwargs)
        kind = None if is_on_split_input(cls) else self.splitting.kind_of(path, cls in PLAIN)
        if is_on_split_input(cls) or kind == "replicated":
            # No check until the method returns: the gradients of these modules' parameters are handled.
            before, self._column = self._column, None
            try:
                return method(*args, **kwargs)
            finally:
                self._column = before
        if kind is None:
            if name != "setup":
                self._check_not_left_out(path, module, args)
                self._check_between(path, module)
            return method(*args, **kwargs)
        if name == "setup":  # an nn.Embed to be split: its setup would make the unsharded table
            return None
        # Change the class in place: the parent has already named and registered this object.
        if kind == "inside":
            check_not_split_by_rules(path, module, _trained(module), self.splitting.axis_name)
            object.__setattr__(module, "__class__", _inside_class(cls, self.splitting.axis_name))
        else:
            _check_plain(path, module, kind)
            _check_heads(path, module, kind, self.splitting.axis_name)
            self.splitting.kinds_in_call_order.setdefault(path, kind)
            object.__setattr__(module, "__class__", _split_class(cls, kind))
            object.__setattr__(module, "axis_name", self.splitting.axis_name)
        return getattr(module, name)(*args, **kwargs)

    def _check_pair(self, path: str, module: Any, x: Array) -> None:
        """Raises a ``ValueError`` if ``module``, a split layer, gets an input ``x`` with a wrong number of features.

        A ``RowDense`` needs this device's share of the features, and raises for the features of all devices. A
        ``ColumnDense`` needs the features of all devices, and raises for this device's share, from a column-split layer
        before. ``path`` is the path of the layer.
        """
        axis, ran = self.splitting.axis_name, self.splitting.kinds_in_call_order
        n, count = axis_devices(axis, f"'{path}'"), 1 if isinstance(module.axis, int) else len(module.axis)
        share = share_of_input(module, x, count, n)
        if isinstance(module, RowDense) and share == "all":
            order, parent = list(ran), path.rpartition("/")[0]
            later = order[order.index(path) + 1 :] if path in ran else []
            columns = [other for other in later if ran[other] == "column" and other.rpartition("/")[0] == parent]
            if columns:
                cure = (
                    f"Are they swapped? Split '{path}' by 'column' and '{columns[0]}', which runs after it, by 'row'."
                )
            else:
                cure = f"Split the layer before '{path}' by 'column', or leave '{path}' out of split=."
            raise ValueError(
                f"split_modules: '{path}' is split by rows, and its input of shape {x.shape} has all "
                f"{x.shape[-count]} features, not the {x.shape[-count] // n} of each of the {n} devices "
                f"along {axis!r}: no column-split layer runs before it, or a row-split layer runs in between. {cure}"
            )
        if isinstance(module, ColumnDense) and share == "share" and self._column is not None:
            cure = f"Split '{path}' by 'row'."
            if isinstance(module, _SplitLogits):
                cure = f"Split a layer between the two by 'row', or leave '{self._column}' out of split=."
            raise ValueError(
                f"split_modules: '{path}' is split by columns, and runs on what '{self._column}' returned, which is "
                f"split by columns, too: its input of shape {x.shape} has {x.shape[-count]} of "
                f"{x.shape[-count] * n} features on each of the {n} devices along {axis!r}. {cure}"
            )

    def _check_not_left_out(self, path: str, module: Any, args: Any) -> None:
        """Raises a ``ValueError`` if a dense layer that no pattern chose gets only a device's share of input features.

        Patterns are the keys of ``split=`` in ``split_modules``. The share (1 / n of the features that the layer's
        kernel has, on n devices) comes from a column-split layer before. ``module`` is the module at ``path``; a module
        that is not dense does not raise. ``args`` are the arguments of its call, the input first.
        """
        axis, is_dense = self.splitting.axis_name, isinstance(module, nn.Dense | nn.DenseGeneral)
        if self._column is None or not is_dense or not args:
            return
        n, axes = axis_devices(axis, f"'{path}'"), getattr(module, "axis", -1)
        count = 1 if isinstance(axes, int) else len(axes)
        if share_of_input(module, args[0], count, n) == "share":
            shape = args[0].shape
            raise ValueError(
                f"split_modules: '{path}' is not split, and runs on what '{self._column}' returned, split by columns: "
                f"its input of shape {shape} has {shape[-count]} of {shape[-count] * n} features on each of the {n} "
                f"devices along {axis!r}. Split '{path}' by 'row', which sums over these devices."
            )

    def _check_between(self, path: str, module: nn.Module) -> None:
        """Raises a ``ValueError`` if a module that no pattern chose runs between a column-split and a row-split layer.

        Under ``check_vma=False`` each module with trained parameters raises, since their gradients would be wrong.
        Under ``check_vma=True`` a module raises only if rules for logical names split a parameter of the module over
        the axis. On a single device nothing raises.
        """
        axis = self.splitting.axis_name
        if self._column is None or axis_devices(axis, f"'{path}'") == 1 or not (trained := _trained(module)):
            return
        check_not_split_by_rules(path, module, trained, axis)
        # With check_vma=True JAX sums the gradients.
        if not collectives.is_tracked(axis):
            raise ValueError(
                f"split_modules: '{path}' ({type(module).__name__}) has replicated parameters, and runs after "
                f"'{self._column}' is split by columns, before a layer is split by rows. Add it to split= as "
                f"'inside' if its input is split over {axis!r}, or as 'replicated' if its input and output are "
                "replicated."
            )


def check_not_split_by_rules(path: str, module: Any, trained: list[Array], axis: str) -> None:
    """Raises a ``ValueError`` if rules for logical names have split a parameter in ``trained`` over the axis.

    ``trained`` are the trained parameters of ``module``, at ``path``. The gradient of a parameter split so is a mean
    over the axis, and not a sum. Only types under ``check_vma=True`` show the split; otherwise nothing is raised.
    """
    if any(axis in collectives.varying_axes(value) for value in trained):
        raise ValueError(
            f"split_modules: '{path}' ({type(module).__name__}) runs on features that are split over {axis!r}, and "
            "rules for logical names split one of its parameters over the same axis. Map the name of the dim to "
            "None, or to another axis."
        )


def _trained(module: nn.Module) -> list[Array]:
    """Returns a list of the arrays of a module's differentiable parameters, without the parameters of submodules."""
    arrays = {name: x for name, x in module.variables.get("params", {}).items() if not isinstance(x, Mapping)}
    return [leaf.value for leaf in trees.differentiable(arrays)]


def _check_plain(path: str, module: Any, kind: str) -> None:
    """Raises a ``ValueError`` if ``kind``, "column", "row" or "vocabulary", cannot split the layer at ``path``.

    Either ``kind`` is not for the class of the layer ``module``, or the layer has a custom product or batch dims
    (``dot_general``, ``batch_dims``, ...).
    """
    if type(module) not in KINDS[kind]:
        raise ValueError(
            f"split_modules: '{path}' is of the class {type(module).__name__}, and {kind!r} is for "
            f"{listed([cls.__name__ for cls in KINDS[kind]])}. An embedding, and the head over its vocabulary, are "
            "'vocabulary'; other layers 'column' or 'row'."
        )
    defaults = {"dot_general": None, "dot_general_cls": None, "batch_dims": (), "promote_dtype": nn.Dense.promote_dtype}
    for name, default in defaults.items():
        if getattr(module, name, default) != default:
            raise ValueError(
                f"split_modules: '{path}' has {name}={getattr(module, name)!r}, and a split layer has the product of "
                "Flax. Leave this layer out of split=."
            )


def _check_heads(path: str, module: Any, kind: str, axis_name: str) -> None:
    """Raises a ``ValueError`` if "column" would divide the fused layers in the first of three feature dims.

    For features (3, heads, dim) of queries, keys and values, 3 devices along the axis would split the 3, not the heads.
    Layers of other kinds, and of one or two feature dims, pass. ``module`` is the layer at ``path``.
    """
    features = getattr(module, "features", 0)
    if kind != "column" or isinstance(features, int) or len(features) != 3:
        return
    count, (first, heads) = param_shards(axis_name, f"'{path}'"), features[:2]
    if count > 1 and count == first and first in FUSED and heads not in FUSED:
        raise fused_features_error(tuple(features), count, axis_name, f"split_modules: '{path}'")


_inside_class = functools.cache(on_split_input)


# Cached, since JAX traces again for each new class.
@functools.cache
def _split_class(plain: Any, kind: str) -> type[nn.Module]:
    """Returns the class that replaces ``plain``, a layer class of Flax, for a kind, such as ``nn.Dense`` for "column".

    The class is a subclass of the split layer (``ColumnDense``) and of ``plain``, and has the name of ``plain``, by
    which ``shard_modules`` may choose layers.
    """
    return type(plain.__name__, (KINDS[kind][plain], plain), {"__module__": plain.__module__})


def _subclass(cls: type[nn.Module], splitting: _Splitting) -> Any:
    new: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name in methods_to_lift(cls):
        setattr(new, name, _intercepted(getattr(cls, name), splitting))
    new.__init__ = vars(cls)["__init__"]  # a decorator may have replaced the method
    return new


def _intercepted(plain: Callable[..., Any], splitting: _Splitting) -> Callable[..., Any]:
    """Returns a method for a model's class: it runs ``plain``, in which chosen modules run as tensor-parallel layers.

    ``splitting`` has the user's patterns, which choose the modules. In ``init`` the method checks at its end that every
    pattern matched a module (a ``ValueError`` otherwise). A method called within another method of the model only runs
    ``plain``, since the outer method splits already.
    """

    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Unbound, or within another method of this model: nothing to intercept, or already intercepted.
        if self.scope is None or any(run.splitting is splitting for run in active_interceptors_of(_Run)):
            return plain(self, *args, **kwargs)
        with nn.intercept_methods(_Run(splitting, len(self.path)).intercept):
            result = plain(self, *args, **kwargs)
        # A parent model may next call another method, with the remaining layers.
        if self.is_initializing() and (not self.path or plain.__name__ == "__call__"):
            splitting.check_matched(self)
        return result

    return method

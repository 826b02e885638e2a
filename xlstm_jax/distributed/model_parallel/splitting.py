"""``split_modules``: dense layers of a model are split from outside, without an edit of its source.

The new model has a class that differs in one thing: its public methods run under an interceptor, which Linen calls
where a module is entered. A chosen ``nn.Dense`` or ``nn.DenseGeneral`` becomes a subclass that multiplies as a
``ColumnDense`` or ``RowDense`` does, and a module between the two becomes what ``on_split_input`` makes of it.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flax import linen as nn
from jax import Array

from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.modules.linen_module import is_nnx, methods_to_lift, taken_apart, watching
from xlstm_jax.distributed.data_parallel.modules.unit import Method, ShardsItself
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.model_parallel.activations import devices_here, join_tokens, parts_of_params
from xlstm_jax.distributed.model_parallel.dense import (
    DEFAULT_AXIS,
    FUSED,
    ColumnDense,
    RowDense,
    several_in_one,
    share_of_input,
)
from xlstm_jax.distributed.model_parallel.embedding import SplitEmbed
from xlstm_jax.distributed.model_parallel.split_input import is_on_split_input, on_split_input
from xlstm_jax.wording import kind_of, listed

Model = TypeVar("Model", bound=nn.Module | type[nn.Module])


class _SplitLogits(ColumnDense):
    """A head whose result is whole."""

    def __call__(self, x: Array) -> Array:
        return _joined(super().__call__(x), self.axis_name)


class _SplitTable(SplitEmbed):
    """A tied head's logits are whole."""

    def setup(self) -> None:
        """Not that of ``nn.Embed``, which makes the whole table."""

    def attend(self, query: Array) -> Array:
        return _joined(super().attend(query), self.axis_name)


def _joined(logits: Array, axis_name: str) -> Array:
    return join_tokens(logits, logits.ndim - 1, axis_name, caller="split_modules")


BETWEEN = ("inside", "whole")  # of any modules
# What a layer of Flax becomes, by its kind.
KINDS: dict[str, dict[type[nn.Module], type[nn.Module]]] = {
    "column": {nn.Dense: ColumnDense, nn.DenseGeneral: ColumnDense},
    "row": {nn.Dense: RowDense, nn.DenseGeneral: RowDense},
    "vocabulary": {nn.Dense: _SplitLogits, nn.Embed: _SplitTable},
}
PLAIN = (nn.Dense, nn.DenseGeneral, nn.Embed)


def split_modules(model: Model, split: Mapping[str, str], axis_name: str = DEFAULT_AXIS) -> Model:
    """Splits dense layers of a model over a mesh axis, by columns or by rows, as its author might have.

    >>> mlp = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(16)])
    >>> mlp = split_modules(mlp, {"layers_0": "column", "layers_2": "row"})
    >>> jax.tree.map(jnp.shape, mlp.init(jax.random.key(0), jnp.ones((8, 16)))["params"]["layers_0"])
    {'bias': (64,), 'kernel': (16, 64)}

    Between a column-split layer and the row-split one after it lies an activation of which each device has its share of
    the last dim, or of the heads: what the model computes there may not depend on how many there are. Flax's attention
    is such a model: ``{"query|key|value": "column", "out": "row"}``. A module there that has parameters, or drops
    values, is "inside", as norms of queries and keys: ``"query_ln|key_ln": "inside"``. Its gradients are then summed
    over the axis, and each device drops other values. Parameters that a module reads there itself, as an
    ``self.param("scale", ...)``, are out of reach: they have wrong gradients under ``check_vma=False``.

    ``shard_modules`` goes inside: around this it would take layers for what they were.

    Args:
      model: a Linen module, or its class.
      split: for a pattern (``re``) of the last names of a layer's path, as "attention/(query|key|value)", "column" or
        "row"; "vocabulary", of an ``nn.Embed``, or of the ``nn.Dense`` that is the head, whose logits are joined, as
        the model expects them whole (those of ``LMHead`` never are); "inside", of another module between the two; or
        "whole", of a module that runs between the two, and whose input and output are whole. Of several patterns that
        match the first counts.
      axis_name: the mesh axis.
    Raises:
      ValueError: another word than these; in ``init``, a pattern that matches no dense layer (no module), which lists
        them, or a layer whose product is not Flax's own; under ``check_vma=False``, a module with parameters that runs
        between a column-split and a row-split layer, and is neither "inside" nor "whole".
      TypeError: the model is no Linen module.
    """
    splitting = _Splitting({re.compile(f"(^|/)({pattern})$"): kind for pattern, kind in split.items()}, axis_name)
    if wrong := [kind for kind in split.values() if kind not in (*KINDS, *BETWEEN)]:
        raise ValueError(f"split_modules: {wrong[0]!r} is none of 'column', 'row', 'vocabulary', 'inside' and 'whole'.")
    if isinstance(model, nn.Module):
        cls, fields = taken_apart(model, "split_modules({}, split)")
        return _subclass(cls, splitting)(**fields)
    if isinstance(model, type) and issubclass(model, nn.Module):
        return _subclass(model, splitting)
    cure = ""
    if isinstance(model, ShardsItself) or is_nnx(model if isinstance(model, type) else type(model)):
        cure = (
            " A layer of flax.nnx is split by the metadata of its kernel, kernel_metadata={'out_sharding': (None, "
            f"{axis_name!r})}}, with enter_split before the layers by columns and leave_split after those by rows."
        )
    raise TypeError(f"split_modules takes a Linen module or its class, not {kind_of(model)}.{cure}")


@dataclass(frozen=True)
class _Splitting:
    """The arguments of one ``split_modules``; and the paths of modules, and patterns that matched, in ``init``."""

    kinds: Mapping[re.Pattern[str], str]
    axis_name: str
    dense: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    matched: set[re.Pattern[str]] = field(default_factory=set)
    ran: dict[str, str] = field(default_factory=dict)  # the kind of each split layer, in the order of their runs

    def kind_of(self, path: str, is_dense: bool) -> str | None:
        """What a module is to become: any kind of a dense layer, one of ``BETWEEN`` of another module."""
        (self.dense if is_dense else self.others).add(path)
        kinds = {pattern: kind for pattern, kind in self.kinds.items() if is_dense or kind in BETWEEN}
        pattern = next((pattern for pattern in kinds if pattern.search(path)), None)
        if pattern is None:
            return None
        self.matched.add(pattern)
        return kinds[pattern]

    def check_matched(self, model: nn.Module) -> None:
        """Raises where a pattern has matched nothing."""
        for pattern, kind in self.kinds.items():
            if pattern not in self.matched:
                found = self.dense | self.others if kind in BETWEEN else self.dense
                what = "modules" if kind in BETWEEN else "dense layers"
                raise ValueError(
                    f"split_modules: {pattern.pattern[6:-2]!r} matches none of the {what} of "
                    f"{type(model).__name__}: {listed(sorted(found), 12) or 'it has none'}. Patterns are of the "
                    "last names of these paths."
                )


class _Run:
    """One call of a method of the model; ``root`` is the number of names in the path of the model."""

    def __init__(self, splitting: _Splitting, root: int) -> None:
        self.splitting, self.root = splitting, root
        self._column: str | None = None  # a column-split layer that has run, and no row-split one since

    def intercept(self, method: Method, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """For ``nn.intercept_methods``."""
        module: Any = context.module
        cls: Any = type(module)
        name, path = context.method_name, "/".join(module.path[self.root :]) if module.scope else ""
        if not path or name not in ("__call__", *(("setup", "attend") if cls is nn.Embed else ())):
            return method(*args, **kwargs)
        if isinstance(module, ColumnDense | RowDense | SplitEmbed):
            if isinstance(module, ColumnDense | RowDense) and args:
                self._check_pair(path, module, args[0])
            if not isinstance(module, SplitEmbed | _SplitLogits):
                self._column = path if isinstance(module, ColumnDense) else None
            return method(*args, **kwargs)
        kind = None if is_on_split_input(cls) else self.splitting.kind_of(path, cls in PLAIN)
        if is_on_split_input(cls) or kind == "whole":
            # Until it returns, modules run of which it is known how their parameters get their gradients.
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
        if name == "setup":  # of an nn.Embed that is to be split, which would make the whole table
            return None
        # In place: the parent has named and registered this very object already.
        if kind == "inside":
            object.__setattr__(module, "__class__", _inside_class(cls, self.splitting.axis_name))
        else:
            _check_plain(path, module, kind)
            _check_heads(path, module, kind, self.splitting.axis_name)
            self.splitting.ran.setdefault(path, kind)
            object.__setattr__(module, "__class__", _split_class(cls, kind))
            object.__setattr__(module, "axis_name", self.splitting.axis_name)
        return getattr(module, name)(*args, **kwargs)

    def _check_pair(self, path: str, module: Any, x: Array) -> None:
        """Raises where a row-split layer has no column-split one before it, or a column-split one has, by its input."""
        axis, ran = self.splitting.axis_name, self.splitting.ran
        n, count = devices_here(axis, f"'{path}'"), 1 if isinstance(module.axis, int) else len(module.axis)
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
                f"{x.shape[-count]} features, where each of the {n} devices along {axis!r} should have "
                f"{x.shape[-count] // n}: no layer is split by columns before it, or another one by rows since. {cure}"
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
        """Raises where a dense layer that is not split runs on a device's share of the features."""
        axis, is_dense = self.splitting.axis_name, isinstance(module, nn.Dense | nn.DenseGeneral)
        if self._column is None or not is_dense or not args:
            return
        n, axes = devices_here(axis, f"'{path}'"), getattr(module, "axis", -1)
        count = 1 if isinstance(axes, int) else len(axes)
        if share_of_input(module, args[0], count, n) == "share":
            shape = args[0].shape
            raise ValueError(
                f"split_modules: '{path}' is not split, and runs on what '{self._column}' returned, which is split by "
                f"columns: its input of shape {shape} has {shape[-count]} of {shape[-count] * n} features on each of "
                f"the {n} devices along {axis!r}. Split '{path}' by 'row', which sums over these devices."
            )

    def _check_between(self, path: str, module: nn.Module) -> None:
        axis = self.splitting.axis_name
        is_split = self._column is not None and devices_here(axis, f"'{path}'") > 1
        # Its own parameters alone: those of a module within are looked at when that one runs.
        own = {name: x for name, x in module.variables.get("params", {}).items() if not isinstance(x, Mapping)}
        has_params = bool(trees.differentiable(own))
        # With types JAX sums the gradients itself.
        if is_split and not collectives.is_tracked(axis) and has_params:
            raise ValueError(
                f"split_modules: '{path}' ({type(module).__name__}) has whole parameters, and runs after "
                f"'{self._column}' is split by columns, before a layer is split by rows. Where its input is each "
                f"device's share, add it to split= as 'inside': under check_vma=False nothing else sums its gradients "
                f"over {axis!r}. Where its input and output are whole, add it as 'whole'."
            )


def _check_plain(path: str, module: Any, kind: str) -> None:
    if type(module) not in KINDS[kind]:
        raise ValueError(
            f"split_modules: '{path}' is of the class {type(module).__name__}, and {kind!r} is for "
            f"{listed([cls.__name__ for cls in KINDS[kind]])}. An embedding, and the head over its vocabulary, are "
            "'vocabulary'; other layers 'column' or 'row'."
        )
    own = {"dot_general": None, "dot_general_cls": None, "batch_dims": (), "promote_dtype": nn.Dense.promote_dtype}
    for name, default in own.items():
        if getattr(module, name, default) != default:
            raise ValueError(
                f"split_modules: '{path}' has {name}={getattr(module, name)!r}, and a split layer has the product of "
                "Flax. Leave this layer out of split=."
            )


def _check_heads(path: str, module: Any, kind: str, axis_name: str) -> None:
    """Raises where each device would have one of the layers that are fused in the first of three feature dims."""
    features = getattr(module, "features", 0)
    if kind != "column" or isinstance(features, int) or len(features) != 3:
        return
    count, (first, heads) = parts_of_params(axis_name, f"'{path}'"), features[:2]
    if count > 1 and count == first and first in FUSED and heads not in FUSED:
        raise several_in_one(tuple(features), count, axis_name, f"split_modules: '{path}'")


_inside_class = functools.cache(on_split_input)


# Cached, since JAX traces anew for each new class.
@functools.cache
def _split_class(plain: Any, kind: str) -> type[nn.Module]:
    """A subclass of the plain layer, as which ``shard_modules`` may choose it, with the name that it had."""
    return type(plain.__name__, (KINDS[kind][plain], plain), {"__module__": plain.__module__})


def _subclass(cls: type[nn.Module], splitting: _Splitting) -> Any:
    new: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name in methods_to_lift(cls):
        setattr(new, name, _intercepted(getattr(cls, name), splitting))
    new.__init__ = vars(cls)["__init__"]  # which a decorator may have replaced
    return new


def _intercepted(plain: Callable[..., Any], splitting: _Splitting) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Unbound, or within another method of this model: there is nothing to intercept, or it is already.
        if self.scope is None or any(run.splitting is splitting for run in watching(_Run)):
            return plain(self, *args, **kwargs)
        with nn.intercept_methods(_Run(splitting, len(self.path)).intercept):
            result = plain(self, *args, **kwargs)
        # A model around this may call another method next, with the other layers.
        if self.is_initializing() and (not self.path or plain.__name__ == "__call__"):
            splitting.check_matched(self)
        return result

    return method

"""``split_modules``: dense layers of a model are split from outside, without an edit of its source.

The new model has a class that differs in one thing: its public methods run under an interceptor, which Linen calls
where a module is entered. A chosen ``nn.Dense`` or ``nn.DenseGeneral`` then becomes a subclass that multiplies as a
``ColumnDense`` or a ``RowDense`` does, under the same name and with the same parameters.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flax import linen as nn

from xlstm_jax.distributed.data_parallel.modules.linen_module import methods_to_lift, taken_apart
from xlstm_jax.distributed.model_parallel.dense import DEFAULT_AXIS, ColumnDense, RowDense
from xlstm_jax.wording import kind_of, listed

Model = TypeVar("Model", bound=nn.Module | type[nn.Module])

KINDS = {"column": ColumnDense, "row": RowDense}
PLAIN = (nn.Dense, nn.DenseGeneral)


def split_modules(model: Model, split: Mapping[str, str], axis_name: str = DEFAULT_AXIS) -> Model:
    """Splits dense layers of a model over a mesh axis, by columns or by rows, as its author might have.

    >>> mlp = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(16)])
    >>> mlp = split_modules(mlp, {"layers_0": "column", "layers_2": "row"})
    >>> jax.tree.map(jnp.shape, mlp.init(jax.random.key(0), jnp.ones((8, 16)))["params"]["layers_0"])
    {'bias': (64,), 'kernel': (16, 64)}

    Between a column-split layer and the row-split one after it lies an activation of which each device has its share of
    the last dim, or of the heads: what the model computes there may not depend on how many there are. Flax's attention
    is such a model: ``{"query|key|value": "column", "out": "row"}``. ``shard_modules`` goes inside: around this
    it would take layers for what they were.

    Args:
      model: a Linen module, or its class.
      split: for a pattern (``re``) of the last names of a layer's path, as "attention/(query|key|value)", "column" or
        "row". Of several that match the first counts.
      axis_name: the mesh axis.
    Raises:
      ValueError: another word than these; in ``init``, a pattern that matches no dense layer, which lists these, or a
        layer whose product is not Flax's own.
      TypeError: the model is no Linen module.
    """
    splitting = _Splitting({re.compile(f"(^|/)({pattern})$"): kind for pattern, kind in split.items()}, axis_name)
    if wrong := [kind for kind in split.values() if kind not in KINDS]:
        raise ValueError(f"split_modules: {wrong[0]!r} is neither 'column' nor 'row'.")
    if isinstance(model, nn.Module):
        cls, fields = taken_apart(model, "split_modules({}, split)")
        return _subclass(cls, splitting)(**fields)
    if isinstance(model, type) and issubclass(model, nn.Module):
        return _subclass(model, splitting)
    raise TypeError(f"split_modules takes a Linen module or its class, not {kind_of(model)}.")


@dataclass(frozen=True)
class _Splitting:
    """The arguments of one ``split_modules``; and the paths of dense layers, and patterns that matched, in ``init``."""

    kinds: Mapping[re.Pattern[str], str]
    axis_name: str
    dense: set[str] = field(default_factory=set)
    matched: set[re.Pattern[str]] = field(default_factory=set)

    def intercept(self, root: int, method: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """For ``nn.intercept_methods``; ``root`` is the number of names in the path of the model."""
        module: Any = context.module
        cls: Any = type(module)
        if module.scope is None or context.method_name != "__call__" or cls not in PLAIN:
            return method(*args, **kwargs)
        path = "/".join(module.path[root:])
        self.dense.add(path)
        pattern = next((pattern for pattern in self.kinds if pattern.search(path)), None)
        if pattern is None:
            return method(*args, **kwargs)
        self.matched.add(pattern)
        _check_product(path, module)
        # In place: the parent has named and registered this very object already.
        object.__setattr__(module, "__class__", _split_class(cls, self.kinds[pattern]))
        object.__setattr__(module, "axis_name", self.axis_name)
        return module(*args, **kwargs)

    def check_matched(self, model: nn.Module) -> None:
        """Raises where a pattern has matched nothing."""
        for pattern in self.kinds:
            if pattern not in self.matched:
                raise ValueError(
                    f"split_modules: {pattern.pattern[6:-2]!r} matches none of the dense layers of "
                    f"{type(model).__name__}: {listed(sorted(self.dense), 12) or 'it has none'}. Patterns are of the "
                    "last names of these paths."
                )


def _check_product(path: str, module: Any) -> None:
    own = {"dot_general": None, "dot_general_cls": None, "batch_dims": (), "promote_dtype": nn.Dense.promote_dtype}
    for name, default in own.items():
        if getattr(module, name, default) != default:
            raise ValueError(
                f"split_modules: '{path}' has {name}={getattr(module, name)!r}, and a split layer has the product of "
                "Flax. Leave this layer out of split=."
            )


@functools.cache
def _split_class(plain: Any, kind: str) -> type[nn.Module]:
    """A subclass of the plain layer, as which ``shard_modules`` may choose it, with the name that it had."""
    return type(plain.__name__, (KINDS[kind], plain), {"__module__": plain.__module__})


def _subclass(cls: type[nn.Module], splitting: _Splitting) -> Any:
    new: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    for name in methods_to_lift(cls):
        setattr(new, name, _intercepted(getattr(cls, name), splitting))
    new.__init__ = vars(cls)["__init__"]  # which a decorator may have replaced
    return new


def _intercepted(plain: Callable[..., Any], splitting: _Splitting) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.scope is None:
            return plain(self, *args, **kwargs)
        with nn.intercept_methods(functools.partial(splitting.intercept, len(self.path))):
            result = plain(self, *args, **kwargs)
        if self.is_initializing():
            splitting.check_matched(self)
        return result

    return method

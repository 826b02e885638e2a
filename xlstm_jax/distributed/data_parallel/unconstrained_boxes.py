"""Boxes of a model's initialisers, read without a sharding constraint.

Where a mesh is set, Flax constrains the value of a box whenever the box is read. ``nn.DenseGeneral`` reads a box before
the value has the dims of the names: it initialises a flat matrix in a box with the names of the kernel, and reshapes.
JAX refuses this constraint (and inside ``shard_map`` every constraint along a manual axis). So initialisers that run
under ``boxes_without_constraints`` make boxes without constraints, and ``with_flax_box`` converts the boxes of the
result back to Flax's.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax import linen as nn
from flax.core import meta

from xlstm_jax.distributed.data_parallel.dim_names import reader


@contextmanager
def boxes_without_constraints() -> Iterator[None]:
    """Enters a context in which the initialisers of Linen modules make boxes that are read without a constraint."""
    with reader().rules_of_mesh(), nn.intercept_methods(_boxing_without_constraints):
        yield


class Unconstrained:
    """Mixin for classes of boxes: ``unbox`` returns the value, without a sharding constraint."""

    value: Any

    def unbox(self, apply_constraint: bool = True) -> Any:
        del apply_constraint
        return self.value


class _Named(Unconstrained, meta.Partitioned[Any]):
    """``nn.Partitioned`` whose ``unbox`` returns the value without a sharding constraint."""


# For each class of boxes the class without constraints, and the other way round.
_UNCONSTRAINED_BOX_OF: dict[type[Any], type[Any]] = {}
_FLAX_BOX_OF: dict[type[Any], type[Any]] = {}


def read_without_constraints(boxes: type[Any], unconstrained: type[Any]) -> None:
    """Registers ``unconstrained`` as the class that replaces the class ``boxes`` while a model is initialised."""
    _UNCONSTRAINED_BOX_OF[boxes], _FLAX_BOX_OF[unconstrained] = unconstrained, boxes


read_without_constraints(nn.Partitioned, _Named)


def with_flax_box(leaf: Any) -> Any:
    """Returns the leaf with a box without constraints replaced by Flax's box; any other leaf unchanged."""
    return _in_box_of(leaf, _FLAX_BOX_OF)


def _in_box_of(leaf: Any, classes: dict[type[Any], type[Any]]) -> Any:
    cls = classes.get(type(leaf))
    if cls is None:
        return leaf
    return cls(**{field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)})


# A dataclass, since Linen compares modules, and so their initialisers, where it looks into the cache of ``nn.jit``.
@dataclasses.dataclass(frozen=True)
class _Initialiser:
    """Initialiser that calls ``plain``, an initialiser of the model, and returns boxes without constraints."""

    plain: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _in_box_of(self.plain(*args, **kwargs), _UNCONSTRAINED_BOX_OF)


def _boxing_without_constraints(
    method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
) -> Any:
    """Interceptor for ``nn.intercept_methods``: runs a method with the module's initialisers as ``_Initialiser``."""
    module = context.module
    fields = {field.name: getattr(module, field.name, None) for field in dataclasses.fields(module)}
    # ``kernel_init``, ``embedding_init``: Flax has them as fields, and passes them to the modules within as fields.
    plain = {
        name: value
        for name, value in fields.items()
        if "init" in name and callable(value) and not isinstance(value, nn.Module | type | _Initialiser)
    }
    for name, value in plain.items():
        object.__setattr__(module, name, _Initialiser(value))
    try:
        return method(*args, **kwargs)
    finally:
        for name, value in plain.items():
            object.__setattr__(module, name, value)

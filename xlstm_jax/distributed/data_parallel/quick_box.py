"""Boxes that JAX takes apart and makes anew quickly, as each call of a jitted function does with all leaves of a state.

``flax.struct.dataclass`` registers classes by ``jax.tree_util.register_dataclass``: JAX then reads all fields, one by
one, whenever it takes a box apart, and makes one by a call of the class with each field by its name: several
microseconds of Python. Here a box keeps what JAX takes it apart into, and all boxes that are made of one structure of a
tree share the dict of their fields. They can, because a box is frozen.
"""

import dataclasses
import operator
from functools import partial
from typing import Any

from flax import serialization, struct
from flax.core import meta
from jax.tree_util import GetAttrKey, register_pytree_with_keys

VALUE = "value"  # the only field that is no part of a tree's structure


class _Fields(dict[str, Any]):
    """All fields of a box but its value: what the structure of a tree holds of it."""

    def __hash__(self) -> int:  # type: ignore[override]  # nothing changes it
        return hash(frozenset(self.items()))


class QuickBox(meta.Partitioned[Any]):
    """``nn.Partitioned``, of which each subclass is a frozen dataclass as Flax makes it, but registered as above."""

    # What JAX takes a box apart into: the value, and the other fields. These are in a tuple, since tuples compare what
    # they hold by identity first, and each call of a jitted function compares the structures of its arguments.
    __slots__ = (VALUE, "_parts")

    def __init_subclass__(cls, **options: Any) -> None:
        # Not ``super()``: Flax would register the class its own way, and JAX takes one registration.
        dataclasses.dataclass(frozen=True, **options)(cls)
        cls.replace = _replaced  # type: ignore[assignment]
        register_pytree_with_keys(cls, _parts_with_key, partial(_of_parts, cls), _parts_of)
        serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict)

    def __post_init__(self) -> None:
        _set_parts(self, ((self.value,), (_Fields(vars(self)),)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _called, (type(self), {VALUE: self.value, **vars(self)})

    def to_nnx_metadata(self) -> dict[str, Any]:
        return {VALUE: self.value, **super().to_nnx_metadata()}


def _replaced(box: QuickBox, **updates: Any) -> Any:
    """A new box with other values of some fields."""
    if updates.keys() == {VALUE}:  # shares its fields with this one
        return _of_parts(type(box), _parts_of(box)[1], (updates[VALUE],))
    return dataclasses.replace(box, **updates)


def _called(cls: type[QuickBox], fields: dict[str, Any]) -> QuickBox:
    return cls(**fields)


# A frozen class does not refuse these.
_new, _set_attribute = object.__new__, object.__setattr__
_set_value, _set_parts = (vars(QuickBox)[name].__set__ for name in QuickBox.__slots__)
_parts_of = operator.attrgetter("_parts")


def _of_parts(cls: type[QuickBox], fields: tuple[_Fields], values: Any) -> QuickBox:
    box = _new(cls)
    _set_attribute(box, "__dict__", fields[0])
    _set_value(box, values[0])
    _set_parts(box, (values, fields))
    return box


def _parts_with_key(box: QuickBox) -> tuple[tuple[tuple[Any, Any]], tuple[_Fields]]:
    (value,), fields = _parts_of(box)
    return ((GetAttrKey(VALUE), value),), fields


@struct.dataclass
class _OfStateDict:
    """A box as Flax's state dicts have it; its errors are Flax's."""

    value: Any


def _to_state_dict(box: QuickBox) -> Any:
    return serialization.to_state_dict(_OfStateDict(box.value))


def _from_state_dict(box: QuickBox, state: dict[str, Any]) -> Any:
    restored: Any = serialization.from_state_dict(_OfStateDict(box.value), state)
    return box.replace(value=restored.value)

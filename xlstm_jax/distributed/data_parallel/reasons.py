"""Why a leaf is split along its dim, or why it stays whole: a closed set of reasons.

A reason is data. A plan shows its text; the lint and scripts ask which reason it is, and with which numbers:

>>> reason = Largest(dim=1, size=64, parts=4)
>>> str(reason)
'dim 1 of size 64 is the largest that 4 divides'
"""

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry


@dataclass_transform(frozen_default=True)
class Reason:
    """One of the classes below: each is a frozen dataclass of its numbers, and ``text`` is how ``str`` shows them."""

    text: ClassVar[str]

    # Decorates each subclass; `dataclass_transform` above tells type checkers so.
    def __init_subclass__(cls, text: str = "") -> None:
        cls.text = text
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        return self.text.format(**vars(self))

    @property
    def each(self) -> "tuple[Reason, ...]":
        """The reasons that an ``OfSeveral`` holds; any other reason holds itself."""
        return (self,)

    def to_json(self) -> dict[str, Any]:
        """The name of its class and its numbers, for ``json``."""
        return {"kind": type(self).__name__, **vars(self)}


class Largest(Reason, text="dim {dim} of size {size} is the largest that {parts} divides"):
    dim: int
    size: int
    parts: int


class Indivisible(Reason, text="{parts} divides no free dim of shape {shape}"):
    parts: int
    shape: tuple[int, ...]


class TooSmall(Reason, text="{size} values are fewer than min_weight_size={minimum}"):
    size: int
    minimum: int


class AlreadySplit(Reason, text="already split over {axes}"):
    """The leaf's box names one of the axes already: another wrapper, or the model, has split the leaf."""

    axes: str


class Taken(Reason, text="every dim of shape {shape} is taken by {names}"):
    """Other axes (tensor parallel) split every dim of the leaf."""

    shape: tuple[int, ...]
    names: tuple[AxisEntry, ...]


class NoValues(Reason, text="holds no values (shape {shape})"):
    shape: tuple[int, ...]


class Scalar(Reason, text="is a scalar"):
    """The leaf has no dim, and ``min_weight_size`` is 1 or less; with a larger threshold it is ``TooSmall``."""


class PrngKeys(Reason, text="holds PRNG keys, which are never split"):
    pass


class Unwrapped(Reason, text="no wrapped module owns it"):
    """A parameter of a module that is outside of every ``shard_module_params``."""


class BoxedByModel(Reason, text="boxed by the model as {names}"):
    names: tuple[AxisEntry, ...]


class NoParameter(Reason, text="only parameters are split"):
    """A variable of the model outside of "params", such as batch statistics."""


class OfNoParameter(Reason, text="belongs to no parameter"):
    """A value of the optimizer's state that has no parameter's shape, such as a count of steps."""


class OfSeveral(Reason):
    """The reasons of several wrappers, each with the axes that it splits over."""

    reasons: tuple[tuple[str, Reason], ...]

    def __str__(self) -> str:
        return "; ".join(f"over {axes}: {reason}" for axes, reason in self.reasons)

    @property
    def each(self) -> tuple[Reason, ...]:
        return tuple(reason for _, reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "OfSeveral", "reasons": [[axes, reason.to_json()] for axes, reason in self.reasons]}


def reason_from_json(data: Any) -> Reason:
    """The inverse of ``Reason.to_json``, of what ``json`` has read."""
    if data["kind"] == "OfSeveral":
        return OfSeveral(tuple((axes, reason_from_json(reason)) for axes, reason in data["reasons"]))
    classes = {cls.__name__: cls for cls in Reason.__subclasses__()}
    return classes[data["kind"]](**{name: _tuples(value) for name, value in data.items() if name != "kind"})


# JSON has lists alone, and a reason with lists would be neither equal to the original nor hashable.
def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

"""Why a leaf is split along its dim, or why it stays whole: a closed set of reasons.

A reason is data. A plan shows its text; the lint and scripts ask which reason it is, and with which numbers:

>>> reason = Largest(dim=1, size=64, parts=4)
>>> str(reason)
'dim 1 of size 64 is the largest that 4 divides'
>>> reason_from_json(reason.to_json()) == reason
True
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from xlstm_jax.distributed.data_parallel.axes import AxisEntry


@dataclass(frozen=True)
class Reason:
    """Why a leaf is split along its dim, or why it is not: one of the classes below; ``str`` of it says it in words."""

    TEXT: ClassVar[str] = ""

    def __str__(self) -> str:
        return self.TEXT.format(**vars(self))

    @property
    def each(self) -> "tuple[Reason, ...]":
        """The reasons that it is made of, where there are several; else itself."""
        return (self,)

    def to_json(self) -> dict[str, Any]:
        """Its kind and its numbers, for ``json``."""
        return {"kind": type(self).__name__, **vars(self)}


@dataclass(frozen=True)
class Largest(Reason):
    TEXT = "dim {dim} of size {size} is the largest that {parts} divides"
    dim: int
    size: int
    parts: int


@dataclass(frozen=True)
class Padded(Reason):
    TEXT = "dim {dim} of size {size} is the largest, padded to {padded} for {parts} parts"
    dim: int
    size: int
    padded: int
    parts: int


@dataclass(frozen=True)
class Indivisible(Reason):
    TEXT = "{parts} divides no free dim of shape {shape}"
    parts: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TooSmall(Reason):
    TEXT = "{size} values are fewer than min_weight_size={minimum}"
    size: int
    minimum: int


@dataclass(frozen=True)
class AlreadySplit(Reason):
    TEXT = "already split over {axes}"
    axes: str


@dataclass(frozen=True)
class Taken(Reason):
    TEXT = "every dim of shape {shape} is taken by {names}"
    shape: tuple[int, ...]
    names: tuple[AxisEntry, ...]


@dataclass(frozen=True)
class NoValues(Reason):
    TEXT = "holds no values (shape {shape})"
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Scalar(Reason):
    TEXT = "is a scalar"


@dataclass(frozen=True)
class PrngKeys(Reason):
    TEXT = "holds PRNG keys, which are never split"


@dataclass(frozen=True)
class Unwrapped(Reason):
    TEXT = "no wrapped module owns it"


@dataclass(frozen=True)
class BoxedByModel(Reason):
    TEXT = "boxed by the model as {names}"
    names: tuple[AxisEntry, ...]


@dataclass(frozen=True)
class NoParameter(Reason):
    TEXT = "only parameters are split"


@dataclass(frozen=True)
class OfNoParameter(Reason):
    TEXT = "belongs to no parameter"


@dataclass(frozen=True)
class InWords(Reason):
    """A reason of which only the words were kept: that of a plan that an older release wrote."""

    TEXT = "{words}"
    words: str


@dataclass(frozen=True)
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


_KINDS = {kind.__name__: kind for kind in Reason.__subclasses__()}


def reason_from_json(data: Any) -> Reason:
    """The inverse of ``Reason.to_json``, of what ``json`` has read; of a text, too, as older plans have it."""
    if isinstance(data, str):
        return InWords(data)
    fields = {name: _tuples(value) for name, value in data.items() if name != "kind"}
    if data["kind"] == "OfSeveral":
        return OfSeveral(tuple((axes, reason_from_json(reason)) for axes, reason in data["reasons"]))
    return _KINDS[data["kind"]](**fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

"""Classes of the reasons why a leaf is split along a dim, or stays replicated; ``choose_shard_dim`` returns reasons.

A reason is data: a plan shows the text; the lint and scripts read class and numbers:

>>> reason = Largest(dim=1, size=64, parts=4)
>>> str(reason)
'dim 1 of size 64 is the largest that 4 divides'
"""

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry


@dataclass_transform(frozen_default=True)
class Reason:
    """Base of the reasons below. Each is a frozen dataclass of its numbers; ``text`` is the format of ``str``."""

    text: ClassVar[str]

    # Decorates each subclass; `dataclass_transform` above declares this to type checkers.
    def __init_subclass__(cls, text: str = "") -> None:
        cls.text = text
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        return self.text.format(**vars(self))

    @property
    def all_reasons(self) -> "tuple[Reason, ...]":
        """The reasons that this reason consists of: ``(self,)``.

        A subclass with a reason for each of several wrappers (``OfSeveral``) returns the reasons of the wrappers, in
        order.
        """
        return (self,)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for ``json``: the class name under "kind", and each field under its name."""
        return {"kind": type(self).__name__, **vars(self)}


class Largest(Reason, text="dim {dim} of size {size} is the largest that {parts} divides"):
    """The leaf is split along its largest free dim that the number of devices divides."""

    dim: int
    size: int
    parts: int


class Indivisible(Reason, text="{parts} divides no free dim of shape {shape}"):
    """The leaf stays replicated: the number of devices, ``parts``, divides no free dim."""

    parts: int
    shape: tuple[int, ...]


class TooSmall(Reason, text="{size} values are fewer than min_weight_size={minimum}"):
    """The leaf stays replicated: it has fewer values than ``min_weight_size``."""

    size: int
    minimum: int


class AlreadySplit(Reason, text="already split over {axes}"):
    """The leaf's box already names one of the axes: another wrapper, or the model, has split the leaf."""

    axes: str


class Taken(Reason, text="every dim of shape {shape} is taken by {names}"):
    """Other axes (tensor parallel) split every dim of the leaf."""

    shape: tuple[int, ...]
    names: tuple[AxisEntry, ...]


class NoValues(Reason, text="holds no values (shape {shape})"):
    """The leaf stays replicated: a dim has size 0."""

    shape: tuple[int, ...]


class Scalar(Reason, text="is a scalar"):
    """The leaf has no dim, and ``min_weight_size`` is 1 or less; with a larger threshold it is ``TooSmall``."""


class PrngKeys(Reason, text="holds PRNG keys, which are never split"):
    pass


class Unwrapped(Reason, text="no wrapped module owns it"):
    """The parameter's module is outside of every ``shard_module_params``."""


class BoxedByModel(Reason, text="boxed by the model as {names}"):
    """The model itself has put the leaf into a box with axes; no wrapper splits it."""

    names: tuple[AxisEntry, ...]


class NoParameter(Reason, text="only parameters are split"):
    """The leaf is a variable outside of "params", batch statistics for example."""


class OfNoParameter(Reason, text="belongs to no parameter"):
    """The leaf is a value of the optimizer's state without a parameter's shape, a count of steps for example."""


class OfSeveral(Reason):
    """Reasons of several wrappers, each with the axes of the wrapper."""

    reasons: tuple[tuple[str, Reason], ...]

    def __str__(self) -> str:
        return "; ".join(f"over {axes}: {reason}" for axes, reason in self.reasons)

    @property
    def all_reasons(self) -> tuple[Reason, ...]:
        return tuple(reason for _, reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "OfSeveral", "reasons": [[axes, reason.to_json()] for axes, reason in self.reasons]}


def reason_from_json(data: Any) -> Reason:
    """Returns the ``Reason`` for ``data``, the output of its ``to_json`` after a round trip through ``json``."""
    if data["kind"] == "OfSeveral":
        return OfSeveral(tuple((axes, reason_from_json(reason)) for axes, reason in data["reasons"]))
    classes = {cls.__name__: cls for cls in Reason.__subclasses__()}
    return classes[data["kind"]](**{name: _tuples(value) for name, value in data.items() if name != "kind"})


# JSON has only lists; a reason with lists would be neither equal to the original nor hashable.
def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

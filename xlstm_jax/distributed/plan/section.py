"""The protocol by which a feature adds a section to a sharding plan, in a separate file.

A plan has a row for each leaf. A section holds what the rows do not: the device that stores each expert, the device
that updates each matrix. Hooks of ``Section``, in the order of their calls:

  trace     noting       a context around ``model.init`` and ``tx.init``, in which the section records what the
                         feature does
            optimizer    receives the optax transform, and the parameters as the transform receives them
  rows      entries      the entries of the section, made from the records and the rows
            axes_within  the axes over which parameters are split, for ``ShardingPlan.roles``
  text      table        the entries for people
            cells        the texts of a column of the plan's table, by path, for a section that has a ``column``
            from_json    an entry from JSON, which stores the fields of the entry, a dataclass

``plan/__init__`` registers each section with one line. Without sections a plan has rows alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

import optax
from rich.console import RenderableType

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan

Entry = TypeVar("Entry")  # a frozen dataclass


class Section(Generic[Entry]):
    """Base class of a section of a plan under construction; an instance stores what ``recording`` records."""

    name: ClassVar[str]  # the field of ``ShardingPlan``, and the key of its JSON
    role: ClassVar[str] = ""  # the role of the axes that ``axes_within`` returns
    column: ClassVar[str] = ""  # the name of the column that ``cells`` fills; "" for a section without a column

    def recording(self) -> AbstractContextManager[None]:
        """Returns a context in which the section records what its feature does, such as calls of ``Experts``.

        A plan enters the context around the initialisation of the model and of the optimizer.
        """
        return nullcontext()

    def optimizer(self, tx: optax.GradientTransformation, params: PyTree, /) -> None:
        """Receives the transform of a plan with an optimizer, and the trained parameters without boxes, abstract."""

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> tuple[Entry, ...]:
        """Builds the entries from what was recorded; ``rows`` are the plan's rows of parameters and collections."""
        raise NotImplementedError

    def axes_within(self, entries: Sequence[Entry]) -> Mapping[str, tuple[str, ...]]:
        """Returns the axes over which the feature splits parameters, by path prefix of the parameters."""
        return {}

    @staticmethod
    def cells(entries: Sequence[Entry], /) -> Mapping[str, str]:
        """Returns by path the texts of the section's column; leaves without a text have an empty cell."""
        return {}

    @staticmethod
    def table(entries: Sequence[Entry], /) -> RenderableType | None:
        """Returns the entries (at least one) as a table for ``rich``; None if the column says everything."""
        raise NotImplementedError

    @staticmethod
    def from_json(fields: Mapping[str, Any], /) -> Entry:
        """Returns the entry with these fields, read from JSON."""
        raise NotImplementedError


SECTIONS: list[type[Section[Any]]] = []  # filled by ``plan/__init__``, in the order of its lines


@contextmanager
def noting(sections: Sequence[Section[Any]]) -> Iterator[None]:
    """Enters the context ``recording`` of every section, in which ``model.init`` and ``tx.init`` are then called."""
    with ExitStack() as stack:
        for section in sections:
            stack.enter_context(section.recording())
        yield

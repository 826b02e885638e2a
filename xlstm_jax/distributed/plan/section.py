"""The protocol by which a feature adds a section to a sharding plan, in a file of its own.

A plan has a row for each leaf. A section holds what a feature knows beside the rows: which device owns which expert,
which device updates which matrix. Hooks of ``Section`` in the order in which they run:

  trace     noting       a context around ``model.init`` and ``tx.init``, in which the feature notes what runs
  rows      entries      the entries of the section, of what was noted and of the rows
            axes_within  the axes that the feature splits parameters over, for the roles of axes
  text      table        the entries for people
            from_json    an entry of the JSON; the fields of an entry, a dataclass, are what is written

``plan/__init__`` registers each section with one line. Without any, a plan has rows alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import RenderableType

from xlstm_jax.distributed.plan.leaf_plan import LeafPlan

Entry = TypeVar("Entry")  # a frozen dataclass


class Section(Generic[Entry]):
    """One section while one plan is made: an instance may keep what it notes."""

    name: ClassVar[str]  # the field of ``ShardingPlan``, and the key of its JSON
    role: ClassVar[str] = ""  # of the axes that ``axes_within`` returns

    def noting(self) -> AbstractContextManager[None]:
        """Returns a context around the initialisation of the model and of the optimizer."""
        return nullcontext()

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> tuple[Entry, ...]:
        """Returns the entries of a plan with these rows of parameters and other collections."""
        raise NotImplementedError

    def axes_within(self, entries: Sequence[Entry]) -> Mapping[str, tuple[str, ...]]:
        """Returns the axes that split parameters for this feature, by what the paths of the parameters begin with."""
        return {}

    @staticmethod
    def table(entries: Sequence[Entry], /) -> RenderableType:
        """Returns the entries, of which there is one at least, for ``rich``."""
        raise NotImplementedError

    @staticmethod
    def from_json(fields: Mapping[str, Any], /) -> Entry:
        """Returns the entry whose fields JSON has kept."""
        raise NotImplementedError


SECTIONS: list[type[Section[Any]]] = []  # filled by ``plan/__init__``, in the order of its lines


@contextmanager
def noting(sections: Sequence[Section[Any]]) -> Iterator[None]:
    """Enters the contexts in which all sections note what runs."""
    with ExitStack() as stack:
        for section in sections:
            stack.enter_context(section.noting())
        yield

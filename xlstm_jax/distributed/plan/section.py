"""The protocol by which a feature adds a section to a sharding plan, in a separate file.

A plan has a row for each leaf. A section holds facts about a feature that no row holds: the device that stores each
expert, the device that updates each matrix. Hooks of ``Section``, in the order of their calls:

  trace     recording    a context around ``model.init`` and ``tx.init``, in which the section records the actions of
                         its feature
            optimizer    receives the optax transform, and the parameters as the transform receives them
  rows      entries      builds the entries of the section from the records and the rows
            axes_within  returns the axes over which parameters are split, for ``ShardingPlan.roles``
  text      table        returns the entries as a table for people
            cells        returns the texts of a column of the plan's table, by path, for a section with a ``column``
            from_json    builds an entry, a dataclass, from its fields in JSON

``plan/__init__`` registers each section with one line. Without sections a plan has only rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, overload

import optax
from rich.console import RenderableType

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.plan.leaf_plan import LeafPlan

Entry = TypeVar("Entry")  # a frozen dataclass


class WhenRead(Sequence[Entry]):
    """Entries that are computed when they are first read, for a section whose entries take long to compute.

    >>> entries = WhenRead(lambda: print("computing") or (1, 2))
    >>> len(entries), entries == (1, 2), tuple(entries)
    computing
    (2, True, (1, 2))
    """

    def __init__(self, compute: Callable[[], tuple[Entry, ...]]) -> None:
        self._compute = compute

    @cached_property
    def _entries(self) -> tuple[Entry, ...]:
        return self._compute()

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | Sequence[Entry]:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return self._entries == (other._entries if isinstance(other, WhenRead) else other)

    def __hash__(self) -> int:
        return hash(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self._entries,)  # the function may hold objects that cannot be pickled


class Section(Generic[Entry]):
    """Base class of a section of a plan under construction; an instance stores what ``recording`` records."""

    name: ClassVar[str]  # the field of ``ShardingPlan``, and the key of its JSON
    role: ClassVar[str] = ""  # the role of the axes that ``axes_within`` returns
    column: ClassVar[str] = ""  # the name of the column that ``cells`` fills; "" for a section without a column

    def recording(self) -> AbstractContextManager[None]:
        """Returns a context in which a section of a plan records actions of its feature, such as calls of ``Experts``.

        A section is the part of a plan about a feature (experts, say). The caller runs the initialisation of the model
        and of the optimizer in the context.
        """
        return nullcontext()

    def optimizer(self, tx: optax.GradientTransformation, params: PyTree, /) -> None:
        """Receives the optax transform of the plan, and the trained parameters as abstract arrays without boxes.

        Called by the plan once, after ``recording``; not called for a plan without an optimizer. Does nothing unless a
        subclass overrides the method.
        """

    def entries(self, axis_sizes: Mapping[str, int], rows: Sequence[LeafPlan]) -> Sequence[Entry]:
        """Returns the entries of this section of a plan (on experts, say), from the records made in ``recording``.

        Args:
          axis_sizes: the axes of the mesh with their sizes.
          rows: the plan's rows of parameters and further collections, without rows of optimizer state.
        Returns:
          A tuple, or ``WhenRead`` for entries that are computed when first read.
        """
        raise NotImplementedError

    def axes_within(self, entries: Sequence[Entry]) -> Mapping[str, tuple[str, ...]]:
        """Returns the mesh axes over which the section's feature, such as experts, splits parameters.

        The result is {prefix of the parameters' paths: axes}; {} for a feature that splits no parameters. ``entries``
        are the result of the method ``entries``.
        """
        return {}

    @staticmethod
    def cells(entries: Sequence[Entry], /) -> Mapping[str, str]:
        """Returns the column that this section (on weight decay, say) adds to the plan's table: {path of a leaf: text}.

        ``entries`` are the entries of this section. Leaves without a text have an empty cell; {} without a column.
        """
        return {}

    @staticmethod
    def table(entries: Sequence[Entry], /) -> RenderableType | None:
        """Returns a table of the entries of this section (at least one), for ``rich``, shown below the plan's table.

        None if the section's column in the plan's table shows every fact.
        """
        raise NotImplementedError

    @staticmethod
    def from_json(fields: Mapping[str, Any], /) -> Entry:
        """Returns the entry of this section whose attributes are ``fields``.

        ``fields`` are read from JSON, and so have lists where the entry has tuples.
        """
        raise NotImplementedError


SECTIONS: list[type[Section[Any]]] = []  # filled by ``plan/__init__``, in the order of its lines


@contextmanager
def noting(sections: Sequence[Section[Any]]) -> Iterator[None]:
    """Returns a context within which each of ``sections`` records the actions of its feature.

    Enters ``section.recording()`` of every section. The caller runs ``model.init`` and ``tx.init`` within the context,
    so that the sections see their calls.
    """
    with ExitStack() as stack:
        for section in sections:
            stack.enter_context(section.recording())
        yield

"""Converts the dim names in the boxes of a model to mesh axes: ``DimNames``.

A box of Flax (``nn.Partitioned``) has a name for each dim. By default each name is a mesh axis. A feature with another
meaning of names (``extensions/logical_names``) is a subclass of ``DimNames`` in a separate file, and appends an
instance to ``READERS``. The core calls the methods on ``reader()``.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry


class DimNames:
    """Converts the names of dims to mesh axes. By default each name is the name of an axis."""

    def has_rules_for(self, leaf: Any) -> bool:
        """Returns whether the names in the box ``leaf`` are logical names, which rules map to mesh axes."""
        del leaf
        return False

    def mesh_names(self, box: Any) -> tuple[AxisEntry, ...]:
        """Returns, for each dim of the value in ``box``, the mesh axes that split the dim."""
        return tuple(box.names)

    def layer_name(self, name: str | None) -> AxisEntry:
        """Returns the mesh axes of the layer dim that ``nn.scan`` adds; ``name`` is from its ``metadata_params``."""
        return name

    def names_in_metadata(self, names: tuple[Any, ...], rules: Any) -> tuple[tuple[AxisEntry, ...], bool]:
        """Returns the mesh axes for the dim names in an NNX variable's metadata, and whether the names are logical.

        ``rules`` are the variable's ``sharding_rules``, or ``None``.
        """
        del rules
        return names, False

    def names_from_collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables of ``model.init``; names in a collection are moved into boxes around parameters."""
        return dict(variables)

    def rules_of_mesh(self) -> AbstractContextManager[None]:
        """Returns a context for ``model.init`` in which logical rules name only axes of the current mesh."""
        return nullcontext()


READERS: list[DimNames] = [DimNames()]


def reader() -> DimNames:
    """Returns the ``DimNames`` in use: the last entry of ``READERS``."""
    return READERS[-1]

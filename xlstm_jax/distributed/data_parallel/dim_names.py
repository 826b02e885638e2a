"""Names of dims in the boxes of a model, read as axes of a mesh: ``DimNames``.

A box of Flax (``nn.Partitioned``) names a mesh axis for each dim. ``reader()`` returns the object that reads the names
of boxes; here each name is an axis. A feature that reads names otherwise is a subclass in a file of its own, set as
``READERS[-1]`` (``extensions/logical_names``).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry


class DimNames:
    """Reads each name of a dim as a mesh axis."""

    def has_rules_for(self, leaf: Any) -> bool:
        """Returns whether rules map the names of this box to mesh axes."""
        del leaf
        return False

    def mesh_names(self, box: Any) -> tuple[AxisEntry, ...]:
        """Returns the mesh axes of each dim of a box."""
        return tuple(box.names)

    def layer_name(self, name: str | None) -> AxisEntry:
        """Returns the mesh axes of the dim that ``nn.scan`` adds, from its name in ``metadata_params``."""
        return name

    def names_in_metadata(self, names: tuple[Any, ...], rules: Any) -> tuple[tuple[AxisEntry, ...], bool]:
        """Returns the mesh axes in the metadata of an NNX variable, and whether rules have mapped names to axes."""
        del rules
        return names, False

    def names_from_collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables of ``model.init``, with names that a collection holds in boxes around parameters."""
        return dict(variables)

    def rules_of_mesh(self) -> AbstractContextManager[None]:
        """Returns a context in which rules name axes of the mesh that is set, and no others."""
        return nullcontext()


READERS: list[DimNames] = [DimNames()]


def reader() -> DimNames:
    """Returns the object that reads the names of dims in boxes."""
    return READERS[-1]

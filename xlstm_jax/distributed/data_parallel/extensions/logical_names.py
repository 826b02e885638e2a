"""Logical names of dims, by which models in the style of MaxText, T5X and Flax's examples are split over a mesh.

    kernel_init = nn.with_logical_partitioning(init, ("embed", "mlp"))          names of the dims of a parameter
    param_with_axes("kernel", init, shape, axes=("embed", "mlp"))               the same of flax.linen.partitioning
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", None))): ...         the mesh axis that splits each name

Names are read as Flax reads them, except that an axis that the mesh does not have splits nothing. The rules in force
when the model is initialised count. ``LogicalNames`` is the reader that the core asks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta
from flax.core.spmd import composite_rules
from flax.linen.partitioning import AxisMetadata
from flax.linen.spmd import logical_to_mesh_axes

from xlstm_jax.distributed.data_parallel.dim_names import READERS, DimNames
from xlstm_jax.distributed.data_parallel.unconstrained_boxes import Unconstrained, read_without_constraints
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes


class _LogicallyNamed(Unconstrained, nn.LogicallyPartitioned):
    """Box of logical names, read without a constraint."""


class LogicalNames(DimNames):
    """Reads logical names by the rules of a box, or by the rules in force; all other names as mesh axes."""

    def has_rules_for(self, leaf: Any) -> bool:
        return isinstance(leaf, nn.LogicallyPartitioned) and bool(leaf.rules or nn.get_logical_axis_rules())

    def mesh_names(self, box: Any) -> tuple[AxisEntry, ...]:
        return _by_rules(tuple(box.names), box.rules) if self.has_rules_for(box) else tuple(box.names)

    def layer_name(self, name: str | None) -> AxisEntry:
        return _by_rules((name,), None)[0] if nn.get_logical_axis_rules() else name

    def names_in_metadata(self, names: tuple[Any, ...], rules: Any) -> tuple[tuple[AxisEntry, ...], bool]:
        """Maps the names in the metadata of an NNX variable by the rules of the variable and the rules in force.

        NNX takes a name without a rule for an axis. Where there are rules, such a name splits nothing if the mesh has
        no axis of this name.
        """
        by_name = dict(composite_rules(nn.get_logical_axis_rules(), rules))
        mesh = jax.sharding.get_abstract_mesh()
        # Without a mesh, a model that is bound or inspected keeps the names that have no rule.
        entries = tuple(by_name.get(name, name) for name in names)
        if by_name and not mesh.empty:
            entries = tuple(_on_mesh(entry, mesh.shape) for entry in entries)
        return entries, any(name in by_name for name in names)

    def names_from_collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Moves the names in collections such as ``params_axes`` into boxes around the parameters.

        Models in the style of T5X have their names there. A collection of nothing but names is left out; without rules
        its names are ignored. What a wrapped module has split stays as it is.
        """
        of_names = {name for name, tree in variables.items() if name.endswith(_AXES) and _holds_names(tree)}
        rest = {name: tree for name, tree in variables.items() if name not in of_names}
        for collection in of_names:
            name = collection.removesuffix(_AXES)
            if name in rest and nn.get_logical_axis_rules():
                rest[name] = _boxed_by(rest[name], variables[collection])
        return rest

    @contextmanager
    def rules_of_mesh(self) -> Iterator[None]:
        """Enters a context in which rules name only axes of the mesh that is set; in ``shard_map`` there are none.

        By the rules Flax constrains parameters and activations. JAX refuses a constraint along an axis that the mesh
        does not have, and along a manual axis.
        """
        mesh = jax.sharding.get_abstract_mesh()
        rules = () if mesh.manual_axes else nn.get_logical_axis_rules()
        with nn.logical_axis_rules([(name, _on_mesh(entry, mesh.shape)) for name, entry in rules]):
            yield


READERS.append(LogicalNames())
read_without_constraints(nn.LogicallyPartitioned, _LogicallyNamed)


def _on_mesh(entry: AxisEntry, sizes: Mapping[str, int]) -> AxisEntry:
    """Returns the axes of an entry that the mesh has."""
    return axes_entry(tuple(axis for axis in entry_axes(entry) if axis in sizes))


def _by_rules(names: tuple[Any, ...], rules: Any) -> tuple[AxisEntry, ...]:
    """Returns names as axes of the mesh that is set, by ``rules`` or by the rules in force."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_on_mesh(entry, sizes) for entry in logical_to_mesh_axes(names, rules) or ())


# --------------------------------------------------------------------------------------------- names in a collection

_AXES = "_axes"  # ``flax.linen.partitioning`` names the collection, and each entry of it, by this suffix


def _holds_names(tree: Any) -> bool:
    """Returns whether a collection has names for all of its leaves, and has leaves."""
    if isinstance(tree, Mapping):
        return bool(tree) and all(map(_holds_names, tree.values()))
    return isinstance(tree, AxisMetadata)


def _boxed_by(tree: Any, names: Any) -> Any:
    """Returns the tree with a box of logical names around each bare value for which ``names`` has an entry."""
    if not isinstance(tree, Mapping):
        return tree
    boxed = {}
    for key, value in tree.items():
        entry = names.get(f"{key}{_AXES}")
        is_named = isinstance(entry, AxisMetadata) and not isinstance(value, meta.AxisMetadata)
        boxed[key] = nn.LogicallyPartitioned(value, tuple(entry.names)) if is_named else value
        if isinstance(value, Mapping) and isinstance(names.get(key), Mapping):
            boxed[key] = _boxed_by(value, names[key])
    return boxed

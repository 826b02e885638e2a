"""Logical names of dims, by which models in the style of MaxText, T5X and Flax's examples are split over a mesh.

    kernel_init = nn.with_logical_partitioning(init, ("embed", "mlp"))          names of the dims of a parameter
    param_with_axes("kernel", init, shape, axes=("embed", "mlp"))               such names, by flax.linen.partitioning
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", None))): ...         the mesh axis that splits each name

Rules map names to axes as in Flax, except that axes missing in the mesh are ignored. The rules in force during
``model.init`` count. ``LogicalNames`` is the subclass of ``DimNames`` that applies the rules.
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

from xlstm_jax.distributed.data_parallel.boxes import READERS, DimNames, Unconstrained, read_without_constraints
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, axes_entry, entry_axes


class _LogicallyNamed(Unconstrained, nn.LogicallyPartitioned):
    """``nn.LogicallyPartitioned`` whose ``unbox`` returns the value without a sharding constraint."""


class LogicalNames(DimNames):
    """Maps logical names to mesh axes, by rules in the box, else by the rules in force. Other names are axes."""

    def has_rules_for(self, leaf: Any) -> bool:
        return isinstance(leaf, nn.LogicallyPartitioned) and bool(leaf.rules or nn.get_logical_axis_rules())

    def mesh_names(self, box: Any) -> tuple[AxisEntry, ...]:
        return _by_rules(tuple(box.names), box.rules) if self.has_rules_for(box) else tuple(box.names)

    def layer_name(self, name: str | None) -> AxisEntry:
        return _by_rules((name,), None)[0] if nn.get_logical_axis_rules() else name

    def names_in_metadata(self, names: tuple[Any, ...], rules: Any) -> tuple[tuple[AxisEntry, ...], bool]:
        """Returns (axes, is_logical) for the dim names in an NNX variable's metadata.

        ``axes`` has the mesh axes of each dim, ``is_logical`` says whether a rule applies to any name. A name without a
        rule is an axis, as in NNX. If there are rules and a mesh, a name of no axis does not split the dim (``None``).

        Args:
          names: a name, or ``None``, for each dim of the variable.
          rules: the rules of the variable, or ``None``; they have precedence over the rules in force.
        """
        by_name = dict(composite_rules(nn.get_logical_axis_rules(), rules))
        mesh = jax.sharding.get_abstract_mesh()
        # Without a mesh, a model that is bound or inspected keeps the names that have no rule.
        entries = tuple(by_name.get(name, name) for name in names)
        if by_name and not mesh.empty:
            entries = tuple(_on_mesh(entry, mesh.shape) for entry in entries)
        return entries, any(name in by_name for name in names)

    def names_from_collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the variables, with names in collections such as ``params_axes`` moved into boxes of parameters.

        Models in the style of T5X keep names of dims in such collections. A collection that consists of names is
        removed from the result; without rules the names are ignored. Parameters that already have a box keep the box.
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
        """Enters a context in which the rules in force refer only to axes of the current mesh.

        Under a mesh with manual axes (in ``shard_map``) there are no rules in the context. Flax constrains the sharding
        of parameters and activations by the rules. JAX refuses a constraint along an axis that the mesh does not have,
        or along a manual axis.
        """
        mesh = jax.sharding.get_abstract_mesh()
        rules = () if mesh.manual_axes else nn.get_logical_axis_rules()
        with nn.logical_axis_rules([(name, _on_mesh(entry, mesh.shape)) for name, entry in rules]):
            yield


READERS.append(LogicalNames())
read_without_constraints(nn.LogicallyPartitioned, _LogicallyNamed)


def _on_mesh(entry: AxisEntry, sizes: Mapping[str, int]) -> AxisEntry:
    """Returns ``entry``, the axes that split a dim, without the axes that are missing in ``sizes``.

    ("dp", "fsdp") gives "fsdp" if ``sizes``, the axis sizes of the mesh by name, has no "dp". ``None`` if no axis is
    left.
    """
    return axes_entry(tuple(axis for axis in entry_axes(entry) if axis in sizes))


def _by_rules(names: tuple[Any, ...], rules: Any) -> tuple[AxisEntry, ...]:
    """Returns, for each logical name, the axes of the current mesh that split the dim; ``None`` for no axis.

    ``rules`` are pairs (name, axes); ``None``: the rules in force (``nn.logical_axis_rules``). Axes missing in the mesh
    are ignored.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_on_mesh(entry, sizes) for entry in logical_to_mesh_axes(names, rules) or ())


# --------------------------------------------------------------------------------------------- names in a collection

_AXES = "_axes"  # ``flax.linen.partitioning`` names the collection, and each entry of it, by this suffix


def _holds_names(tree: Any) -> bool:
    """Returns whether a collection is a nested dict, not empty at any level, with names of dims as leaves.

    A leaf of names is an ``AxisMetadata`` of ``flax.linen.partitioning``, without a value.
    """
    if isinstance(tree, Mapping):
        return bool(tree) and all(map(_holds_names, tree.values()))
    return isinstance(tree, AxisMetadata)


def _boxed_by(tree: Any, names: Any) -> Any:
    """Returns the parameters ``tree``, with a box of logical names around each bare value with an entry in ``names``.

    ``names`` is nested like ``tree``; the entry for "kernel" is "kernel_axes". Values in a box, and values without an
    entry, are unchanged.
    """
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

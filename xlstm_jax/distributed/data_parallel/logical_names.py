"""Logical names of dims, by which models in the style of MaxText, T5X and Flax's examples say how they are split.

    kernel_init = nn.with_logical_partitioning(init, ("embed", "mlp"))          what the dims of a parameter are
    with nn.logical_axis_rules((("embed", "fsdp"), ("mlp", None))): ...         which mesh axis splits them

Names are read as Flax reads them, except that an axis that the mesh does not have splits nothing. The rules in force
when the model is initialised count.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from flax import linen as nn
from flax.linen.spmd import logical_to_mesh_axes

from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, axes_entry, entry_axes


def is_logical(leaf: Any) -> bool:
    """Whether ``leaf`` is in a box of logical names, and there are rules; without rules its names are mesh axes."""
    return isinstance(leaf, nn.LogicallyPartitioned) and bool(leaf.rules or nn.get_logical_axis_rules())


def rules_of_mesh() -> AbstractContextManager[None]:
    """A context in which rules name only axes of the mesh that is set, and in which ``shard_map`` has no rules."""
    # By the rules Flax constrains parameters and activations. JAX refuses a constraint along an axis that the mesh does
    # not have, and along a manual axis.
    mesh = jax.sharding.get_abstract_mesh()
    rules = () if mesh.manual_axes else nn.get_logical_axis_rules()
    return nn.logical_axis_rules([(name, _there(entry, mesh.shape)) for name, entry in rules])


def _there(entry: AxisEntry, sizes: Mapping[str, int]) -> AxisEntry:
    return axes_entry(tuple(axis for axis in entry_axes(entry) if axis in sizes))


def mesh_names(box: Any) -> tuple[AxisEntry, ...]:
    """A box's names as axes of the mesh that is set: logical names by the box's own rules, or by the rules in force."""
    return _by_rules(tuple(box.names), box.rules) if is_logical(box) else tuple(box.names)


def _by_rules(names: tuple[Any, ...], rules: Any) -> tuple[AxisEntry, ...]:
    sizes = jax.sharding.get_abstract_mesh().shape
    return tuple(_there(entry, sizes) for entry in logical_to_mesh_axes(names, rules) or ())


def layer_name(name: str | None) -> AxisEntry:
    """The entry for a dim that ``nn.scan`` adds and ``metadata_params`` names: read by the rules, if there are any."""
    return _by_rules((name,), None)[0] if nn.get_logical_axis_rules() else name

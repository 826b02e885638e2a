"""Tells optimizers for matrices how leaves are split over devices, and runs functions on groups of matrices.

Inside ``shard_map`` the boxes of the leaves have the layout. Outside, an optimizer gets global arrays without boxes,
whose types have no layout: ``parameter_layout`` returns the layout during ``tx.update`` and ``tx.init`` of every
``ShardedOptimizer``. Without a layout an optimizer runs on unsharded arrays, as on one device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, stored_value
from xlstm_jax.distributed.data_parallel.store import Store, with_zeros_behind
from xlstm_jax.distributed.data_parallel.trees import partition_specs
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.collectives import AxisEntry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.communication import set_context
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, grouped, matrix_leaf
from xlstm_jax.distributed.optimizers.sharded_optimizer import ParameterLayout, StateBox, parameter_layout

Values = dict[str, jax.Array]
OfGroups = Callable[[Sequence[MatrixGroup], Values, Mapping[str, PyTree]], tuple[Values, dict[str, PyTree]]]


@dataclass(frozen=True)
class MatrixReport:
    """Report of an optimizer for unsharded matrices: its name, the groups with their owners, a choice by leaf."""

    rule: str
    groups: tuple[MatrixGroup, ...]
    choices: Mapping[str, MatrixChoice]


# ------------------------------------------------------------------------------------------------------------- reports

_REPORTS: ContextVar[list[MatrixReport] | None] = ContextVar("reports of optimizers for matrices", default=None)


@contextmanager
def recording_matrices() -> Iterator[list[MatrixReport]]:
    """Context that yields a list, to which each optimizer for matrices adds a ``MatrixReport`` in ``init``."""
    reports: list[MatrixReport] = []
    with set_context(_REPORTS, reports):
        yield reports


def report_matrices(rule: str, params: PyTree, choices: Mapping[str, MatrixChoice], any_order: bool) -> None:
    """Adds a ``MatrixReport`` to the list of ``recording_matrices``; does nothing outside of this context.

    An optimizer's ``init`` calls this function.

    Args:
      rule: name of the optimizer, as "muon".
      params: the parameters that ``init`` gets.
      choices: whether each leaf is a matrix, by path.
      any_order: True if the optimizer's rule does not depend on the order of rows and columns; more leaves are then in
        a group.
    """
    reports = _REPORTS.get()
    if reports is not None:
        groups = place_of(params).groups(choices, any_order)
        reports.append(MatrixReport(rule, tuple(groups), choices))


# ----------------------------------------------------------------------------------------------------- places of leaves


@dataclass(frozen=True)
class FirstPlaces(Store):
    """Stores ``count`` matrices [count, ...] with zeros appended along dim 0, so that owners have equal parts."""

    count: int

    def shape(self, stored: tuple[int, ...], counts: Sequence[int]) -> tuple[int, ...]:
        return self.count, *super().shape(stored, counts)[1:]

    def read(self, stored: jax.Array, is_split: Sequence[bool]) -> jax.Array:
        return stored if is_split[0] else stored[: self.count]

    def write(self, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return with_zeros_behind(value, shape)


class Owned(StateBox, repr=False):
    """Box of optimizer state [matrices, ...] that is split over the owners of the matrices, with ``FirstPlaces``."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        sizes = state.get("true_sizes", ())  # a box pickled before boxes had a store
        store = {"store": FirstPlaces(sizes[0])} if sizes else {}
        super().__setstate__({name: field for name, field in state.items() if name != "true_sizes"} | store)


@dataclass(frozen=True)
class Place:
    """Layout of the leaves of a tree by path: values, shapes of the shards, names; and the mesh.

    ``mesh`` is None if the values are shards already: inside ``shard_map``, or on one device.
    """

    values: Values
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, Sequence[AxisEntry]]
    sizes: Mapping[str, int]
    mesh: Mesh | AbstractMesh | None

    def groups(self, choices: Mapping[str, MatrixChoice], any_order: bool) -> list[MatrixGroup]:
        """Returns the groups (matrices of equal form, with owner devices) of all matrices, largest work first.

        ``choices`` has the decision whether each leaf is a matrix, by path. ``any_order`` is True if the optimizer's
        rule does not depend on the order of rows and columns; more leaves are then in a group.
        """
        matrices = []
        for path, value in self.values.items():
            if choices[path].dims:
                where = (self.shapes[path], self.names[path], self.sizes, value.dtype.name, any_order)
                matrices.append(matrix_leaf(choices[path], *where))
        return grouped(matrices, self.sizes)


def place_of(tree: PyTree) -> Place:
    """Returns values and layout (shapes of shards, axes of dims, axis sizes) of a tree's leaves, by path.

    Inside ``shard_map`` the layout is from the boxes, and values are shards. Outside the layout is from
    ``parameter_layout``, and values are global arrays. Without ``parameter_layout``, on a mesh of a single device, or
    if a path is not a path of a parameter, values are treated as unsharded arrays of a single device.
    """
    leaves = trees.sharded_leaves(tree)
    values = {path: _in_order(leaf.value, leaf.store) for path, leaf in leaves}
    # Inside `shard_map` arrays are shards already, even if a step around the call has set a layout.
    layout = None if collectives.manual_axes() else parameter_layout()
    if layout and layout.mesh.size > 1 and values.keys() <= layout.params.keys():
        return _on_mesh(layout, values)
    names = {path: _bound(leaf.store.of_value(leaf.names)) for path, leaf in leaves}
    axes = [axis for entries in names.values() for entry in entries for axis in entry_axes(entry)]
    sizes = {axis: collectives.axis_size([axis]) for axis in dict.fromkeys((*collectives.manual_axes(), *axes))}
    return Place(values, {path: value.shape for path, value in values.items()}, names, sizes, None)


def _in_order(stored: jax.Array, store: Store) -> jax.Array:
    """Returns a stored array with its dims in the order of the value: the reverse of ``_in_stored_order``.

    A ``Store`` says how a value is stored, possibly with its dims in another order. For a value [d, f] that is stored
    transposed, as an array [f, d], the result has the shape [d, f]. The dims of a ``MatrixChoice`` are those of a
    value.
    """
    order = store.order(stored.ndim)
    return stored if order == tuple(range(stored.ndim)) else jnp.transpose(stored, order)


def _in_stored_order(value: jax.Array, store: Store) -> jax.Array:
    """Returns a value with its dims in the order in which ``store`` stores them.

    For a value [d, f] that is stored transposed the result has the shape [f, d].
    """
    order = store.order(value.ndim)
    return value if order == tuple(range(value.ndim)) else jnp.transpose(value, tuple(map(int, np.argsort(order))))


def _bound(names: Sequence[AxisEntry]) -> list[AxisEntry]:
    return [tuple(axis for axis in entry_axes(entry) if collectives.is_bound(axis)) for entry in names]


def _on_mesh(layout: ParameterLayout, values: Values) -> Place:
    """Returns values and layout (a ``Place``) of global arrays that are split like the parameters in ``layout``.

    ``values`` are arrays by path, without padding; each path is the path of a parameter. In the result the values are
    padded to the shapes in which parameters are stored.
    """
    stores = {path: layout.params[path].store for path in values}
    padded = {path: _in_order(stored_value(layout.params[path], value), stores[path]) for path, value in values.items()}
    specs = {path: layout.specs[path] for path in values}
    stored = {path: [*spec, *[None] * (values[path].ndim - len(spec))] for path, spec in specs.items()}
    names = {path: stores[path].of_value(entries) for path, entries in stored.items()}
    of_value = {path: NamedSharding(layout.mesh, PartitionSpec(*entries)) for path, entries in names.items()}
    shapes = {path: of_value[path].shard_shape(padded[path].shape) for path in values}
    return Place(padded, shapes, names, dict(layout.mesh.shape), layout.mesh)


def map_groups(
    fn: OfGroups,
    tree: PyTree,
    choices: Mapping[str, MatrixChoice],
    state: Mapping[str, PyTree] | None = None,
    any_order: bool = False,
) -> tuple[PyTree, dict[str, PyTree]]:
    """Calls ``fn`` for the matrices of a tree; returns the tree with the new values of ``fn``, and the new state.

    Inside ``shard_map`` the leaves are shards already, and ``fn`` gets these shards. Outside, with a layout of the
    parameters (``parameter_layout``), ``fn`` is called in a ``shard_map`` that this function enters; without a layout
    ``fn`` gets unsharded arrays.

    Args:
      fn: ``fn(groups, values, state)`` with the groups of matrices, this device's shards by path and its state by name
        of the group. Returns new shards by path (leaves that are missing stay unchanged) and the new state by name.
      tree: the tree, for example of momentum.
      choices: whether each leaf is a matrix, by path.
      state: state by name of the group; None for {}.
      any_order: True if the optimizer's rule does not depend on the order of rows and columns; more leaves are then in
        a group.
    """
    place, state = place_of(tree), state or {}
    groups = place.groups(choices, any_order)

    def on_device(values: Values, state: Mapping[str, PyTree]) -> tuple[Values, dict[str, PyTree]]:
        new, new_state = fn(groups, values, state)
        return values | new, new_state

    if place.mesh is not None:
        specs = {path: PartitionSpec(*names) for path, names in place.names.items()}
        state_specs = partition_specs(dict(state), place.mesh) if state else PartitionSpec()
        spec = (specs, state_specs)
        on_device = jax.shard_map(on_device, mesh=place.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    new, new_state = on_device(place.values, state)

    def put_back(path: str, leaf: Sharded) -> jax.Array:
        # Remove the padding that was added.
        return _in_stored_order(new[path], leaf.store)[tuple(map(slice, leaf.value.shape))]

    return trees.map_values_with_path(put_back, tree), new_state


def named_groups(groups: Sequence[MatrixGroup]) -> dict[str, MatrixGroup]:
    """Returns the groups by name, in order: rows x columns, and a number for a further group of this size.

    For example "64x256", "64x256_1", "64x256_2".
    """
    by_name: dict[str, MatrixGroup] = {}
    for group in groups:
        number = sum(other.name == group.name for other in by_name.values())
        by_name[f"{group.name}_{number}" if number else group.name] = group
    return by_name

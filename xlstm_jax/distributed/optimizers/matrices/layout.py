"""Where the leaves of an optimizer's trees lie: known of boxes inside ``shard_map``, told outside of it.

Outside, an optimizer sees global arrays without boxes, and their types do not say how they are split.
``make_train_step`` and ``create_train_state`` know, and say so around ``tx.update`` and ``tx.init``. Without that an
optimizer runs on whole arrays, as on one device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import trees
from xlstm_jax.distributed.data_parallel.leaf import Sharded, leaf_of, rebox, with_padding
from xlstm_jax.distributed.data_parallel.placement import partition_specs
from xlstm_jax.distributed.data_parallel.wire import collectives
from xlstm_jax.distributed.data_parallel.wire.axes import AxisEntry, entry_axes
from xlstm_jax.distributed.data_parallel.wire.tracing import set_context
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, grouped, matrix_leaf

Values = dict[str, jax.Array]
OfGroups = Callable[[Sequence[MatrixGroup], Values, Mapping[str, PyTree]], tuple[Values, dict[str, PyTree]]]


@dataclass(frozen=True)
class ParameterLayout:
    """The mesh, and by path the boxed parameters and the specs of what an optimizer keeps of each."""

    mesh: Mesh | AbstractMesh
    params: Mapping[str, Any]
    specs: Mapping[str, PartitionSpec]


_KNOWN: ContextVar[ParameterLayout | None] = ContextVar("layout of the parameters that are optimized", default=None)
_WATCHED: ContextVar[list["Told"] | None] = ContextVar("choices of matrix optimizers", default=None)


def laid_out(layout: ParameterLayout) -> AbstractContextManager[None]:
    """Optimizers that run within know where their leaves lie."""
    return set_context(_KNOWN, layout)


@dataclass(frozen=True)
class Told:
    """What an optimizer takes its leaves for: its name, the groups of matrices with their owners, and all choices."""

    rule: str
    groups: tuple[MatrixGroup, ...]
    choices: Mapping[str, MatrixChoice]


@contextmanager
def watching_matrices() -> Iterator[list[Told]]:
    """Collects what matrix optimizers that are initialised within take their leaves for."""
    seen: list[Told] = []
    with set_context(_WATCHED, seen):
        yield seen


def tell(rule: str, params: PyTree, choices: Mapping[str, MatrixChoice], any_order: bool) -> None:
    """Hands what an optimizer decides about parameters to whoever is watching."""
    if (watched := _WATCHED.get()) is not None:
        live = {path: choice for path, choice in choices.items() if choice.dims}
        kept = trees.map_leaves_with_path(lambda path, leaf: leaf if path in live else None, params)
        watched.append(Told(rule, tuple(place_of(kept).groups(choices, any_order)), choices))


class Owned(Sharded, repr=False):
    """The box of what owners keep of their matrices: [matrices, ...], split over owners, padded to all places."""


def is_owned(leaf: Any) -> bool:
    """Whether a leaf of a state is kept by owners, and handed to its optimizer as it is stored."""
    return isinstance(leaf, Owned)


@dataclass(frozen=True)
class Place:
    """Where the leaves of a tree lie at a call, by path: their values here, shapes of shards, names; and the mesh.

    ``mesh`` is None where shards are at hand already: inside ``shard_map``, or on one device.
    """

    values: Values
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, Sequence[AxisEntry]]
    sizes: Mapping[str, int]
    mesh: Mesh | AbstractMesh | None

    def groups(self, choices: Mapping[str, MatrixChoice], any_order: bool) -> list[MatrixGroup]:
        """The groups of all matrices among the leaves."""
        found = []
        for path, value in self.values.items():
            if dims := choices[path].dims:
                where = (self.shapes[path], self.names[path], self.sizes, value.dtype.name, any_order)
                found.append(matrix_leaf(choices[path], dims, *where))
        return grouped(found, self.sizes)


def place_of(tree: PyTree) -> Place:
    """Where the leaves of a tree lie: by their boxes inside ``shard_map``, by the layout that was told outside."""
    leaves = trees.leaves_with_path(tree)
    layout = None if collectives.manual_axes() else _KNOWN.get()
    if layout and layout.mesh.size > 1 and dict(leaves).keys() <= layout.params.keys():
        return _on_mesh(layout, {path: leaf_of(leaf).value for path, leaf in leaves})
    names = {path: _bound(leaf_of(leaf).names) for path, leaf in leaves}
    axes = [axis for entries in names.values() for entry in entries for axis in entry_axes(entry)]
    sizes = {axis: collectives.axis_size([axis]) for axis in dict.fromkeys((*collectives.manual_axes(), *axes))}
    values = {path: leaf_of(leaf).value for path, leaf in leaves}
    return Place(values, {path: value.shape for path, value in values.items()}, names, sizes, None)


def _bound(names: Sequence[AxisEntry]) -> list[AxisEntry]:
    return [tuple(axis for axis in entry_axes(entry) if collectives.is_bound(axis)) for entry in names]


def _on_mesh(layout: ParameterLayout, values: Values) -> Place:
    padded = {path: with_padding(layout.params[path], value) for path, value in values.items()}
    specs = {path: layout.specs[path] for path in values}
    shapes = {path: NamedSharding(layout.mesh, specs[path]).shard_shape(padded[path].shape) for path in values}
    names = {path: [*spec, *[None] * (values[path].ndim - len(spec))] for path, spec in specs.items()}
    return Place(padded, shapes, names, dict(layout.mesh.shape), layout.mesh)


def map_groups(
    fn: OfGroups,
    tree: PyTree,
    choices: Mapping[str, MatrixChoice],
    state: Mapping[str, PyTree] | None = None,
    any_order: bool = False,
) -> tuple[PyTree, dict[str, PyTree]]:
    """``fn`` of the groups of matrices in a tree, the shards by path, and the state by group, wherever this is called.

    Inside ``shard_map`` shards are at hand. Outside, where the layout is known, this enters one of its own.
    """
    place, state = place_of(tree), state or {}
    groups = place.groups(choices, any_order)

    def on_device(values: Values, state: Mapping[str, PyTree]) -> tuple[Values, dict[str, PyTree]]:
        new, new_state = fn(groups, values, state)
        return values | new, new_state

    if place.mesh is not None:
        specs = {path: PartitionSpec(*names) for path, names in place.names.items()}
        kept = partition_specs(dict(state), place.mesh) if state else PartitionSpec()
        spec = (specs, kept)
        on_device = jax.shard_map(on_device, mesh=place.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    new, new_state = on_device(place.values, state)

    def put_back(path: str, leaf: Any) -> Any:
        shape = leaf_of(leaf).value.shape  # without the padding that was added
        return rebox(leaf, new[path][tuple(map(slice, shape))])

    return trees.map_leaves_with_path(put_back, tree), new_state


def named_groups(groups: Sequence[MatrixGroup]) -> dict[str, MatrixGroup]:
    """The groups by name, those of one size with a number."""
    found: dict[str, MatrixGroup] = {}
    for group in groups:
        number = sum(other.name == group.name for other in found.values())
        found[f"{group.name}_{number}" if number else group.name] = group
    return found

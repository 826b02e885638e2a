"""Where the leaves of an optimizer's trees lie: known of boxes inside ``shard_map``, told outside of it.

Outside, an optimizer sees global arrays without boxes, and their types do not say how they are split.
``make_train_step`` and ``create_train_state`` know, and say so around ``tx.update`` and ``tx.init``. Without that an
optimizer runs on whole arrays, as on one device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import boxes, collectives
from xlstm_jax.distributed.data_parallel.axes import AxisEntry, entry_axes
from xlstm_jax.distributed.optimizers.matrices.dimensions import MatrixChoice
from xlstm_jax.distributed.optimizers.matrices.groups import MatrixGroup, grouped, matrix_leaf

Values = dict[str, jax.Array]
OfGroup = Callable[[MatrixGroup, Values], Values]


@dataclass(frozen=True)
class Layout:
    """The mesh, and by path the boxed parameters and the specs of what an optimizer keeps of each."""

    mesh: Mesh | AbstractMesh
    params: Mapping[str, Any]
    specs: Mapping[str, PartitionSpec]


_KNOWN: ContextVar[Layout | None] = ContextVar("layout of the parameters that are optimized", default=None)
_WATCHED: ContextVar[list[MatrixChoice] | None] = ContextVar("choices of matrix optimizers", default=None)


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Optimizers that run within know where their leaves lie."""
    token = _KNOWN.set(layout)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@contextmanager
def watching_choices() -> Iterator[list[MatrixChoice]]:
    """Collects what matrix optimizers that are initialised within take their leaves for."""
    token = _WATCHED.set(seen := [])
    try:
        yield seen
    finally:
        _WATCHED.reset(token)


def tell_choices(choices: Mapping[str, MatrixChoice]) -> None:
    """Hands choices to whoever is watching."""
    if (watched := _WATCHED.get()) is not None:
        watched.extend(choices.values())


def groups_of(
    choices: Mapping[str, MatrixChoice],
    shards: Mapping[str, tuple[tuple[int, ...], Sequence[AxisEntry], str]],
    sizes: Mapping[str, int],
) -> list[MatrixGroup]:
    """The groups of all matrices among the leaves; of each leaf the shape of its shards, its names and its dtype."""
    found = []
    for path, (shape, names, dtype) in shards.items():
        if dims := choices[path].dims:
            found.append(matrix_leaf(choices[path], dims, shape, names, sizes, dtype))
    return grouped(found, sizes)


def map_groups(fn: OfGroup, tree: PyTree, choices: Mapping[str, MatrixChoice]) -> PyTree:
    """``fn`` of each group of matrices in a tree, and of its shards by path, wherever it is called.

    Inside ``shard_map`` boxes say how leaves are split. Outside, where the layout is known, this enters one of its own.
    """
    values = {path: boxes.leaf_value(leaf) for path, leaf in boxes.leaves_with_path(tree)}
    layout = _KNOWN.get()
    outside = layout and layout.mesh.size > 1 and not collectives.manual_axes()
    if not (layout and outside and values.keys() <= layout.params.keys()):
        names = {path: _bound(boxes.leaf_names(leaf)) for path, leaf in boxes.leaves_with_path(tree)}
        axes = [axis for entries in names.values() for entry in entries for axis in entry_axes(entry)]
        bound = dict.fromkeys((*collectives.manual_axes(), *axes))
        new = _on_device(fn, values, choices, names, {axis: collectives.axis_size([axis]) for axis in bound})
    else:
        new = _on_mesh(fn, values, choices, layout)
    return boxes.map_leaves_with_path(lambda path, leaf: boxes.rebox(leaf, new[path]), tree)


def _bound(names: Sequence[AxisEntry]) -> list[AxisEntry]:
    return [tuple(axis for axis in entry_axes(entry) if collectives.is_bound(axis)) for entry in names]


def _on_device(
    fn: OfGroup,
    values: Values,
    choices: Mapping[str, MatrixChoice],
    names: Mapping[str, Sequence[AxisEntry]],
    sizes: Mapping[str, int],
) -> Values:
    shards = {path: (value.shape, names[path], value.dtype.name) for path, value in values.items()}
    new = dict(values)
    for group in groups_of(choices, shards, sizes):
        new |= fn(group, values)
    return new


def _on_mesh(fn: OfGroup, values: Values, choices: Mapping[str, MatrixChoice], layout: Layout) -> Values:
    specs = {path: layout.specs[path] for path in values}
    names = {path: [*spec, *[None] * (values[path].ndim - len(spec))] for path, spec in specs.items()}
    sizes = dict(layout.mesh.shape)

    def local(shards: Values) -> Values:
        return _on_device(fn, shards, choices, names, sizes)

    padded = {path: boxes.with_padding(layout.params[path], value) for path, value in values.items()}
    on_mesh = jax.shard_map(local, mesh=layout.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    new = on_mesh(padded)
    return {path: value[tuple(slice(size) for size in values[path].shape)] for path, value in new.items()}

"""Layout of a metric state: its cells concatenated into one vector per dtype.

Every array that a program takes or returns costs time on every device, even a small array. Twenty means stored as
eighty scalars cost ten times as much as the same means in one vector. So metrics name their cells, and states hold
vectors. Cells of the same type and dtypes form a group; a group is contiguous in its vectors and is merged at once::

    cells     {"loss": {"total": Total [], "weight": Total []}, "hits": Total [3], "top": Maximum [], "seen": Count []}

    vectors   float32-6b1f27   | top | high of hits, loss/total, loss/weight | low of these cells |     [11]
              uint32-6b1f27    | high of seen | low of seen |                                           [2]

The name of a vector ends in a digest of the names, types and shapes of all cells in the state. So a state that was
saved by a metric with different cells, or with the same cells under different names, is rejected even if its vectors
have the same length.
"""

import hashlib
import math
from collections import defaultdict
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from xlstm_jax.distributed.metrics.cells import Cell, loses_parts

Cells = Any  # a Cell, or a dict of Cells
Vectors = dict[str, jax.Array]  # [..., k] each; leading dims count devices
Path = tuple[str, ...]  # path of a cell in nested dicts, such as ("loss", "total")
Group = tuple[type, tuple[str, ...]]  # the type of the cells, and the dtypes of their arrays

DIGEST_LENGTH = 6


class Entry(NamedTuple):
    """Description of one cell: its path and type, and the shape and dtypes of its arrays."""

    path: Path
    cell_type: type
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        return "/".join(self.path) or "the state"

    @property
    def group(self) -> Group:
        return self.cell_type, self.dtypes


class Span(NamedTuple):
    """Range of a vector: ``vectors[vector][..., start:end]``."""

    vector: str
    start: int
    end: int


class Layout:
    """Positions of the cells in the vectors of a state.

    Two layouts are equal, with equal hashes, if their cells have the same names, types, shapes and dtypes.
    """

    def __init__(self, identity: Cells) -> None:
        """Builds the layout of a metric state from ``identity``: a cell or a (nested) dict of cells.

        Only shapes, dtypes and types are read, so the arrays may be abstract (from ``jax.eval_shape``).
        """
        entries = []
        for path, cell in _by_path(identity).items():
            arrays = jax.tree.leaves(cell)
            entries.append(Entry(path, type(cell), tuple(arrays[0].shape), tuple(str(x.dtype) for x in arrays)))
        # Sorted, so that a group is contiguous and the order of dict keys does not change the layout.
        self.entries = sorted(entries, key=lambda entry: (entry.cell_type.__name__, entry.dtypes, entry.path))
        text = "\n".join(f"{e.path} {e.cell_type.__name__} {e.shape} {e.dtypes}" for e in self.entries)
        # Not `hash`: Python salts string hashes, and a state may be restored by a different process.
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{e.name}: {e.cell_type.__name__} {list(e.shape)}' for e in self.entries)})"

    @cached_property
    def spans(self) -> dict[Group, list[Span]]:
        """Positions of the groups of cells in the vectors: for each group a list of spans, one per array of a cell.

        A group has all cells of one type and dtypes (say, every ``Total``), and a cell has one or more arrays ("high"
        and "low"). A span (vector name, start, end) holds this array of all cells of the group, end to end.
        """
        sizes: dict[Group, int] = defaultdict(int)
        for entry in self.entries:
            sizes[entry.group] += math.prod(entry.shape)
        ends: dict[str, int] = defaultdict(int)
        spans: dict[Group, list[Span]] = {group: [] for group in sizes}
        for group, size in sizes.items():
            for dtype in group[1]:
                name = f"{dtype}-{self.digest[:DIGEST_LENGTH]}"
                spans[group].append(Span(name, ends[name], ends[name] + size))
                ends[name] += size
        return spans

    def pack(self, cells: Cells, identity: Cells) -> Vectors:
        """Returns ``cells`` packed into vectors: a dict with a vector [k] for each dtype, by vector name.

        Cells are accumulators: ``cells`` is a single cell or a nested dict of cells. Cells missing from ``cells`` are
        taken from ``identity``, the neutral cells of the layout.

        Raises:
          ValueError: a cell is not in the layout, or its shape differs from the layout.
          TypeError: the type of a cell differs from the layout.
        """
        by_path, neutral = _by_path(cells), _by_path(identity)
        if unknown := sorted(by_path.keys() - neutral.keys()):
            names = [entry.name for entry in self.entries]
            raise ValueError(f"the state has no {'/'.join(unknown[0])!r}; it has {sorted(names)}.")
        groups = defaultdict(list)
        for entry in self.entries:
            groups[entry.group].append(_fitted(by_path.get(entry.path, neutral[entry.path]), entry))

        def end_to_end(*arrays: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.ravel(array) for array in arrays])

        return self.vectors_of({group: jax.tree.map(end_to_end, *some) for group, some in groups.items()})

    def unpack(self, vectors: Vectors) -> Cells:
        """Returns the cells (accumulators) in ``vectors``, the inverse of ``pack``: a cell or a nested dict of cells.

        The structure is the structure from which the layout was built. Leading dims of the vectors, which count
        devices, are kept: [..., k] -> [..., *shape of the cell].
        """
        groups, cells = self.groups_of(vectors), {}
        ends: dict[Group, int] = defaultdict(int)
        for entry in self.entries:
            start = ends[entry.group]
            ends[entry.group] = end = start + math.prod(entry.shape)
            # A cell has the same range in each array of its group, such as `high` and `low`.
            arrays = [x[..., start:end] for x in jax.tree.leaves(groups[entry.group])]
            cells[entry.path] = entry.cell_type(*(x.reshape((*x.shape[:-1], *entry.shape)) for x in arrays))
        return unflatten_dict({("", *path): cell for path, cell in cells.items()}).get("", {})

    def groups_of(self, vectors: Vectors) -> dict[Group, Any]:
        """Returns a dict from group (type and dtypes of cells) to one long cell: all cells of the group end to end.

        ``vectors`` are the packed cells of a state, [..., k] by vector name. The arrays of a long cell are ranges of
        the vectors: [..., total size of the group's cells].
        """
        return {
            group: group[0](*(vectors[span.vector][..., span.start : span.end] for span in spans))
            for group, spans in self.spans.items()
        }

    def vectors_of(self, groups: dict[Group, Cell]) -> Vectors:
        """Returns the vectors [..., k] of a state, by vector name: the inverse of ``groups_of``.

        ``groups`` has, by group (type and dtypes of cells), one long cell: all cells of the group end to end. The
        arrays of the long cells are joined along the last dim, a vector for each dtype.
        """
        arrays = defaultdict(list)
        for group, spans in self.spans.items():
            for span, array in zip(spans, jax.tree.leaves(groups[group]), strict=True):
                arrays[span.vector].append(array)
        return {name: jnp.concatenate(some, axis=-1) for name, some in arrays.items()}

    def merge(self, a: Vectors, b: Vectors) -> Vectors:
        """Returns the merge of two states, ``a`` and ``b``, as vectors: each cell merges by its rule, such as a sum.

        Leading dims of the vectors, if any, count devices and stay: row i of the result merges row i of ``a`` and of
        ``b``.
        """
        others = self.groups_of(b)
        return self.vectors_of({group: cell.merge(others[group]) for group, cell in self.groups_of(a).items()})

    def merge_rows(self, rows: Vectors) -> Vectors:
        """Returns the merge of n states as vectors [k], by vector name; each cell merges by its rule, such as a sum.

        ``rows`` has the n states as vectors [n, k]: row i has the packed cells (accumulators) of state i.
        """
        return self.vectors_of({group: cell.merged((0,)) for group, cell in self.groups_of(rows).items()})


def _by_path(cells: Cells) -> dict[Path, Cell]:
    """Flattens nested dicts of cells into a dict from path, a tuple of names, to cell; a bare cell has the path ()."""
    # Wrapped in a dict, because `flatten_dict` takes only dicts and a state may be a single cell.
    flat: dict[Path, Any] = flatten_dict({"": cells})
    return {path[1:]: cell for path, cell in flat.items()}


def _fitted(cell: Cell, entry: Entry) -> Cell:
    """Returns ``cell`` with its arrays cast to the dtypes of ``entry``, the description of this cell in a layout.

    Raises a ``TypeError`` if the type of the cell differs from ``entry``, or if a cast would truncate its values, and a
    ``ValueError`` if its shape differs.
    """
    # Not isinstance: `Minimum` is a subclass of `Maximum`, and merging it as a `Maximum` keeps the wrong extremum.
    if type(cell) is not entry.cell_type:
        raise TypeError(f"{entry.name} is a {entry.cell_type.__name__}, and {type(cell).__name__} was observed for it.")
    arrays = jax.tree.leaves(cell)
    if wrong := [x.shape for x in arrays if x.shape != entry.shape]:
        raise ValueError(
            f"{entry.name} has the shape {entry.shape}, and {wrong[0]} was observed for it. Reduce the observed "
            "values over the dims of the batch."
        )
    if lost := [x.dtype for x, dtype in zip(arrays, entry.dtypes, strict=True) if loses_parts(x.dtype, dtype)]:
        kind = f"{entry.cell_type.__name__} of dtype {entry.dtypes[0]}"
        raise TypeError(
            f"{entry.name} is a {kind}, and {lost[0].name} was observed for it, which would be truncated. Give the "
            "cell of identity() the dtype of the values."
        )
    return entry.cell_type(*(jnp.asarray(x, dtype) for x, dtype in zip(arrays, entry.dtypes, strict=True)))

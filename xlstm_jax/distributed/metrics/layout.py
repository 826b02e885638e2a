"""The vectors of a state: its cells laid end to end, one vector per dtype.

Every array that goes in and out of a program costs time on every device, however small. Twenty means as eighty scalars
cost ten times what they cost as one vector. So metrics name their cells, and states hold vectors. Cells of the same
type and dtypes form a group; they lie side by side and are merged at once::

    cells     {"loss": {"total": Total [], "weight": Total []}, "hits": Total [3], "top": Maximum [], "seen": Count []}

    vectors   float32-6b1f27   | top | high of hits, loss/total, loss/weight | low of the same |        [11]
              uint32-6b1f27    | high of seen | low of seen |                                           [2]

The end of a vector's name is a digest of the names, types and shapes of all cells. So a saved state of a metric with
other cells, or with the same cells under other names, is refused, even if its vectors have the same length.
"""

import hashlib
import math
from collections import defaultdict
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from xlstm_jax.distributed.metrics.cells import Cell

Cells = Any  # a Cell, or a dict of Cells
Vectors = dict[str, jax.Array]  # [..., k] each; leading dims count devices
Path = tuple[str, ...]  # of a cell in nested dicts, such as ("loss", "total")
Group = tuple[type, tuple[str, ...]]  # the type of the cells, and the dtypes of their arrays

DIGEST_LENGTH = 6


class Entry(NamedTuple):
    """A cell of a state: its path, its type, and the shape and dtypes of its arrays."""

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
    """A range of a vector: ``vectors[vector][..., start:end]``."""

    vector: str
    start: int
    end: int


class Layout:
    """Where each cell of a state lies. Layouts of the same names, types and shapes are equal, and hash so."""

    def __init__(self, identity: Cells) -> None:
        """``identity`` may be abstract, as ``jax.eval_shape`` returns it."""
        entries = []
        for path, cell in _by_path(identity).items():
            arrays = jax.tree.leaves(cell)
            entries.append(Entry(path, type(cell), tuple(arrays[0].shape), tuple(str(x.dtype) for x in arrays)))
        # Sorted, so that cells of one group lie side by side and the order of a dict's keys changes nothing.
        self.entries = sorted(entries, key=lambda entry: (entry.cell_type.__name__, entry.dtypes, entry.path))
        text = "\n".join(f"{e.path} {e.cell_type.__name__} {e.shape} {e.dtypes}" for e in self.entries)
        # Not `hash`: Python salts the hashes of strings, and another process restores what this one has saved.
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{e.name}: {e.cell_type.__name__} {list(e.shape)}' for e in self.entries)})"

    @cached_property
    def spans(self) -> dict[Group, list[Span]]:
        """Where the arrays of each group lie; in each the cells of the group are end to end."""
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
        """The vectors of ``cells``; the cell of ``identity`` stands for a cell that they leave out.

        Raises:
          ValueError: a cell that the state does not have, or of another shape.
          TypeError: a cell of another type.
        """
        given, neutral = _by_path(cells), _by_path(identity)
        if unknown := sorted(given.keys() - neutral.keys()):
            names = [entry.name for entry in self.entries]
            raise ValueError(f"the state has no {'/'.join(unknown[0])!r}; it has {sorted(names)}.")
        groups = defaultdict(list)
        for entry in self.entries:
            groups[entry.group].append(_fitted(given.get(entry.path, neutral[entry.path]), entry))

        def end_to_end(*arrays: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.ravel(array) for array in arrays])

        return self.vectors_of({group: jax.tree.map(end_to_end, *some) for group, some in groups.items()})

    def unpack(self, vectors: Vectors) -> Cells:
        """The cells in their nested dict; leading dims stay: [..., k] -> [..., *shape]."""
        groups, cells = self.groups_of(vectors), {}
        ends: dict[Group, int] = defaultdict(int)
        for entry in self.entries:
            start = ends[entry.group]
            ends[entry.group] = end = start + math.prod(entry.shape)
            # A cell lies in the same range of each array of its group: of `high` and `low`, say.
            arrays = [x[..., start:end] for x in jax.tree.leaves(groups[entry.group])]
            cells[entry.path] = entry.cell_type(*(x.reshape((*x.shape[:-1], *entry.shape)) for x in arrays))
        return unflatten_dict({("", *path): cell for path, cell in cells.items()}).get("", {})

    def groups_of(self, vectors: Vectors) -> dict[Group, Any]:
        """One cell for each group, which holds all cells of the group end to end."""
        return {
            group: group[0](*(vectors[span.vector][..., span.start : span.end] for span in spans))
            for group, spans in self.spans.items()
        }

    def vectors_of(self, groups: dict[Group, Cell]) -> Vectors:
        """The vectors of the cells that ``groups_of`` returns."""
        arrays = defaultdict(list)
        for group, spans in self.spans.items():
            for span, array in zip(spans, jax.tree.leaves(groups[group]), strict=True):
                arrays[span.vector].append(array)
        return {name: jnp.concatenate(some, axis=-1) for name, some in arrays.items()}

    def merge(self, a: Vectors, b: Vectors) -> Vectors:
        """Merges all cells of two states."""
        others = self.groups_of(b)
        return self.vectors_of({group: cell.merge(others[group]) for group, cell in self.groups_of(a).items()})

    def merge_rows(self, rows: Vectors) -> Vectors:
        """[n, k] -> [k]: merges n states."""
        return self.vectors_of({group: cell.merged((0,)) for group, cell in self.groups_of(rows).items()})


def _by_path(cells: Cells) -> dict[Path, Cell]:
    """The cells of nested dicts by their paths; a cell that stands alone has the empty path."""
    # Under a key of its own: `flatten_dict` takes only dicts, and a state may be a single cell.
    flat: dict[Path, Any] = flatten_dict({"": cells})
    return {path[1:]: cell for path, cell in flat.items()}


def _fitted(cell: Cell, entry: Entry) -> Cell:
    """The cell in the dtypes of the state's, checked to be of its type and shape."""
    # Not isinstance: `Minimum` is a subclass of `Maximum`, and merged as one it would keep the wrong end.
    if type(cell) is not entry.cell_type:
        raise TypeError(f"{entry.name} is a {entry.cell_type.__name__}, and {type(cell).__name__} was observed for it.")
    arrays = jax.tree.leaves(cell)
    if wrong := [x.shape for x in arrays if x.shape != entry.shape]:
        raise ValueError(
            f"{entry.name} has the shape {entry.shape}, and {wrong[0]} was observed for it. Reduce the observed "
            "values over the dims of the batch."
        )
    return entry.cell_type(*(jnp.asarray(x, dtype) for x, dtype in zip(arrays, entry.dtypes, strict=True)))

"""States laid end to end: one vector per dtype, so that a state of many metrics is an array or two.

Every array that goes in and out of a program costs time on every device, however small. Twenty means as eighty scalars
cost ten times what they cost as one vector. So metrics name their cells, and states hold vectors, in which cells of one
kind lie side by side and are merged at once::

    cells     {"loss": {"total": Total [], "weight": Total []}, "hits": Total [3], "top": Maximum [], "seen": Count []}

    vectors   float32-6b1f27   | top | high of hits, loss/total, loss/weight | low of the same |        [11]
              uint32-6b1f27    | high of seen | low of seen |                                           [2]

The end of a vector's name is a digest of the layout: the names, types and shapes. So a state that was saved by a metric
with other parts, or with the same under other names, is not taken for this one's, even if the vectors are as long.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Cells = Any  # a cell of ``monoids``, or a dict of Cells
Vectors = dict[str, jax.Array]  # [..., k] each; leading dims are those of devices

DIGEST_LENGTH = 6


class Entry(NamedTuple):
    """A cell of a state: its path such as ``("loss", "total")``, its class, and the shape and dtypes of its arrays."""

    path: tuple[str, ...]
    type: type
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def name(self) -> str:
        return "/".join(self.path) or "the state"

    @property
    def kind(self) -> tuple[type, tuple[str, ...]]:
        """Cells of one kind are merged as one."""
        return self.type, self.dtypes

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Part(NamedTuple):
    """A stretch of a vector."""

    vector: str
    start: int
    end: int


class Layout:
    """Where each cell of a state lies. Layouts of the same names, types and shapes are equal, and hash so."""

    def __init__(self, identity: Cells) -> None:
        """``identity`` may be abstract, as ``jax.eval_shape`` returns it."""
        entries = [_entry(path, cell) for path, cell in _by_path(identity)]
        self.entries = sorted(entries, key=lambda entry: (entry.type.__name__, entry.dtypes, entry.path))
        text = "\n".join(f"{e.path} {e.type.__name__} {e.shape} {e.dtypes}" for e in self.entries)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'{e.name}: {e.type.__name__} {list(e.shape)}' for e in self.entries)})"

    @cached_property
    def parts(self) -> dict[Any, list[Part]]:
        """By kind: where its arrays lie, the cells of the kind end to end in each."""
        sizes, ends, parts = defaultdict(int), defaultdict(int), {}
        for entry in self.entries:
            sizes[entry.kind] += entry.size
        for kind, size in sizes.items():
            parts[kind] = []
            for dtype in kind[1]:
                name = f"{dtype}-{self.digest[:DIGEST_LENGTH]}"
                parts[kind].append(Part(name, ends[name], ends[name] + size))
                ends[name] += size
        return parts

    def pack(self, cells: Cells, identity: Cells) -> Vectors:
        """The vectors of ``cells``; what they leave out is that of ``identity``.

        Raises:
          ValueError: a cell that the state does not have, or of another shape.
          TypeError: a cell of another type.
        """
        given, whole = dict(_by_path(cells)), dict(_by_path(identity))
        if unknown := sorted(given.keys() - whole.keys()):
            names = [entry.name for entry in self.entries]
            raise ValueError(f"the state has no {'/'.join(unknown[0])!r}; it has {sorted(names)}.")
        kinds = defaultdict(list)
        for entry in self.entries:
            kinds[entry.kind].append(_fitted(given.get(entry.path, whole[entry.path]), entry))
        return self.vectors_of({kind: _end_to_end(some) for kind, some in kinds.items()})

    def unpack(self, vectors: Vectors) -> Cells:
        """The cells in their nested dict; leading dims stay: [..., k] -> [..., *shape]."""
        kinds, ends, cells = self.kinds_of(vectors), defaultdict(int), {}
        for entry in self.entries:
            start = ends[entry.kind]
            ends[entry.kind] = end = start + entry.size
            arrays = [x[..., start:end] for x in jax.tree.leaves(kinds[entry.kind])]
            cells[entry.path] = entry.type(*(x.reshape((*x.shape[:-1], *entry.shape)) for x in arrays))
        return _nested(cells)

    def kinds_of(self, vectors: Vectors) -> dict[Any, Any]:
        """One cell of each kind: all cells of that kind, end to end."""
        return {
            kind: kind[0](*(vectors[part.vector][..., part.start : part.end] for part in parts))
            for kind, parts in self.parts.items()
        }

    def vectors_of(self, kinds: dict[Any, Any]) -> Vectors:
        """The other way round."""
        arrays = defaultdict(list)
        for kind, parts in self.parts.items():
            for part, array in zip(parts, jax.tree.leaves(kinds[kind]), strict=True):
                arrays[part.vector].append(array)
        return {name: jnp.concatenate(some, axis=-1) for name, some in arrays.items()}

    def merge(self, a: Vectors, b: Vectors) -> Vectors:
        """Merges all cells of two states."""
        kinds = self.kinds_of(b)
        return self.vectors_of({kind: cell.merge(kinds[kind]) for kind, cell in self.kinds_of(a).items()})

    def merge_rows(self, rows: Vectors) -> Vectors:
        """[n, k] -> [k]: merges n states."""
        return self.vectors_of({kind: cell.merged() for kind, cell in self.kinds_of(rows).items()})


def merge_cells(a: Cells, b: Cells) -> Cells:
    """Merges cell by cell; both have the same names."""
    return {name: merge_cells(a[name], b[name]) for name in a} if isinstance(a, dict) else a.merge(b)


def _entry(path: tuple[str, ...], cell: Any) -> Entry:
    arrays = jax.tree.leaves(cell)
    return Entry(path, type(cell), tuple(arrays[0].shape), tuple(str(x.dtype) for x in arrays))


def _by_path(cells: Cells, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The cells with their paths."""
    if not isinstance(cells, dict):
        yield path, cells
        return
    for name, part in cells.items():
        yield from _by_path(part, (*path, name))


def _nested(cells: dict[tuple[str, ...], Any]) -> Cells:
    """Cells by their paths as a nested dict; the one with the empty path is all there is."""
    if () in cells:
        return cells[()]
    nested: dict[str, Any] = {}
    for path in sorted(cells):
        *outer, name = path
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[name] = cells[path]
    return nested


def _fitted(cell: Any, entry: Entry) -> Any:
    """The cell in the dtypes of the state's, checked to be of its type and shape."""
    if type(cell) is not entry.type:
        raise TypeError(f"{entry.name} is a {entry.type.__name__}, and {type(cell).__name__} was observed for it.")
    arrays = jax.tree.leaves(cell)
    if wrong := [x.shape for x in arrays if x.shape != entry.shape]:
        raise ValueError(
            f"{entry.name} has the shape {entry.shape}, and {wrong[0]} was observed for it. Reduce what is observed "
            "over the dims of the batch."
        )
    return entry.type(*(jnp.asarray(x, dtype) for x, dtype in zip(arrays, entry.dtypes, strict=True)))


def _end_to_end(cells: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate([jnp.ravel(part) for part in parts]), *cells)

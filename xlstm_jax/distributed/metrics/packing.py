"""States laid end to end: one vector per kind of cell, so that a state of many metrics is a handful of arrays.

Every array that goes in and out of a program costs time on every device, however small. Twenty means as eighty scalars
cost ten times what they cost as two vectors. So metrics name their cells, and states hold them by kind::

    named    {"loss": {"total": Total [], "weight": Total []}, "hits": {"tp": Total [3]}, "seen": Count []}
    packed   {"Total-float32-6b1f": Total [5], "Count-uint32-09ac": Count [1]}

The end of a kind's name is a digest of the names and shapes that lie in it. So a state that was saved by a metric with
other parts, or with the same under other names, is not taken for this one's, even if the vectors are as long.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Cells = Any  # a cell of ``monoids``, or a dict of Cells
Packed = dict[str, Any]  # kind -> cell of vectors

DIGEST_LENGTH = 6


def merge_cells(a: Cells, b: Cells) -> Cells:
    """Merges cell by cell; both have the same names."""
    return {name: merge_cells(a[name], b[name]) for name in a} if isinstance(a, dict) else a.merge(b)


def pack(cells: Cells, identity: Cells) -> Packed:
    """Lays the cells of each kind end to end; what ``cells`` leaves out is that of ``identity``.

    Raises:
      ValueError: a cell that ``identity`` does not have, or of another shape.
      TypeError: a cell of another type.
    """
    given, names = dict(_by_path(cells)), dict(_by_path(identity))
    if unknown := sorted(given.keys() - names.keys()):
        raise ValueError(f"the state has no {unknown[0]!r}; it has {sorted(names)}.")
    whole = {path: _fitted(path, given.get(path, nothing), nothing) for path, nothing in names.items()}
    return {kind: _end_to_end([whole[path] for path in paths]) for kind, paths in _kinds(identity).items()}


def unpack(packed: Packed, identity: Cells) -> Cells:
    """The cells by their names; ``identity`` may be abstract. Leading dims stay: [..., k] -> [..., *shape].

    Raises:
      ValueError: the state is that of another metric.
    """
    check_kinds(packed, identity)
    names, cells = dict(_by_path(identity)), {}
    for kind, paths in _kinds(identity).items():
        ends = np.cumsum([math.prod(_shape(names[path])) for path in paths])
        for path, end, start in zip(paths, ends, [0, *ends[:-1]], strict=True):
            shape = _shape(names[path])
            cells[path] = jax.tree.map(
                lambda x, a=start, b=end, shape=shape: x[..., a:b].reshape((*x.shape[:-1], *shape)), packed[kind]
            )
    return _with_cells(identity, cells)


def check_kinds(packed: Packed, identity: Cells) -> None:
    """Raises a ``ValueError`` where ``packed`` is not laid out as the cells of ``identity`` are."""
    kinds = _kinds(identity)
    if packed.keys() != kinds.keys():
        raise ValueError(
            f"the state is that of another metric: it holds {sorted(packed)}, and {sorted(kinds)} is the layout of "
            f"{[path or 'the one cell' for path, _ in _by_path(identity)]}. A state goes with the metric, and the "
            "names and shapes, that it was made by."
        )


def _by_path(cells: Cells, path: str = "") -> Iterator[tuple[str, Any]]:
    """The cells with their paths, such as ``loss/total``, in a fixed order."""
    if not isinstance(cells, dict):
        yield path, cells
        return
    for name in sorted(cells):
        yield from _by_path(cells[name], f"{path}/{name}" if path else name)


def _with_cells(like: Cells, cells: dict[str, Any], path: str = "") -> Cells:
    """Cells by their paths, in the nested dict that they come from."""
    if not isinstance(like, dict):
        return cells[path]
    return {name: _with_cells(part, cells, f"{path}/{name}" if path else name) for name, part in like.items()}


def _kinds(identity: Cells) -> dict[str, list[str]]:
    """The paths of the cells of each kind, in the order in which they lie."""
    kinds, layouts = defaultdict(list), defaultdict(str)
    for path, cell in _by_path(identity):
        dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(cell)})
        kind = "-".join([type(cell).__name__, *dtypes])
        kinds[kind].append(path)
        layouts[kind] += f"{path} {_shape(cell)}\n"
    digests = {kind: hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH] for kind, text in layouts.items()}
    return {f"{kind}-{digests[kind]}": kinds[kind] for kind in sorted(kinds)}


def _shape(cell: Any) -> tuple[int, ...]:
    return tuple(jax.tree.leaves(cell)[0].shape)


def _fitted(path: str, cell: Any, nothing: Any) -> Any:
    """The cell in the dtypes of the state's, checked to be of its type and shape."""
    if type(cell) is not type(nothing):
        raise TypeError(
            f"{path or 'the state'} is a {type(nothing).__name__}, and {type(cell).__name__} was observed for it."
        )
    if _shape(cell) != _shape(nothing):
        raise ValueError(
            f"{path or 'the state'} has the shape {_shape(nothing)}, and {_shape(cell)} was observed for it. Reduce "
            "what is observed over the dims of the batch."
        )
    return jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), cell, nothing)


def _end_to_end(cells: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: jnp.concatenate([jnp.ravel(part) for part in parts]), *cells)

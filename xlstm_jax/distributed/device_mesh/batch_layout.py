"""Which part of a batch each device has: examples over axes of a mesh, or any dim of any leaf over any axes.

  batch_axes=("dp", "fsdp")                  tokens[b, t] -> [b / n, t]        all leaves by their examples
  batch_spec=P(("dp", "fsdp"), "cp")         tokens[b, t] -> [b / n, t / c]    and each example over "cp"
  batch_spec={"tokens": P("dp", "cp"), "label": P("dp")}                       leaf by leaf; a prefix of the batch

Dim 0 of every leaf holds examples, and is split over the same axes in all leaves, ``row_axes``. Scalars are whole on
all devices. Losses, weights and gradients are reduced over ``axes``, those of all dims. Whoever takes a batch asks a
``BatchLayout``: the ready steps, ``shard_batch``, ``abstract_batch`` and ``check_step``.

A batch is in natural order, and its tokens are contiguous on devices. A step of another layout (zigzag) brings the
tokens of each device there, by the dims that its specs split, before it computes (``entered``).
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from xlstm_jax.common_types import AxisNames, PyTree
from xlstm_jax.distributed.data_parallel.placement import spread_spec
from xlstm_jax.distributed.data_parallel.policy import next_multiple
from xlstm_jax.distributed.data_parallel.trees import flatten_with_path, leaves_with_path, named_leaf, path_string
from xlstm_jax.distributed.data_parallel.wire.axes import entry_axes
from xlstm_jax.distributed.device_mesh.checks import check_mesh, mesh_axes
from xlstm_jax.distributed.model_parallel.sequence_layout import (
    CONTIGUOUS,
    ZIGZAG,
    LaidOut,
    SequenceLayout,
    check_even,
    check_laid_out,
    check_layout,
    exchanged,
    is_laid_out,
    reordered,
    said,
    zigzag_order,
)
from xlstm_jax.wording import kind_of, listed


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """How a batch lies on a mesh; see the top of this file.

    Attributes:
      mesh: the mesh.
      axes: all axes that split a leaf, in the order in which specs name them.
      row_axes: those that split dim 0.
      spec: a ``PartitionSpec``, or a tree of them that is a prefix of the batch.
      tokens: in which layout a step computes, "contiguous" or "zigzag"; None: as its batch says, see ``of_batch``.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    spec: PyTree
    tokens: str | None = None

    def __str__(self) -> str:
        return str(self.axes if self.axes == self.row_axes else self.spec)

    def specs(self, batch: PyTree) -> PyTree:
        """A ``PartitionSpec`` in place of each leaf. Dim 0 is not checked: on a host it may be a process's part.

        Raises:
          ValueError: the specs are no prefix of the batch, a leaf has fewer dims than its spec, or the axes of a dim do
            not divide it; names the leaf and both numbers.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(batch)
        shapes = [(path_string(path), np.shape(leaf)) for path, leaf in leaves]
        found = zip(shapes, self._by_leaf(batch), strict=True)
        return jax.tree.unflatten(treedef, [self._of(path, shape, spec) for (path, shape), spec in found])

    def in_specs(self, batch: PyTree) -> PyTree:
        """``specs`` for ``shard_map``: without axes of one device, which split nothing."""
        return jax.tree.map(partial(spread_spec, mesh=self.mesh), self.specs(batch))

    def part(self, batch: PyTree, device: Any) -> PyTree:
        """What the device with this number along ``axes`` has of a global batch; the number may be traced."""
        places: dict[str, Any] = {}
        # The last axis runs fastest over the devices.
        for axis in reversed(self.axes):
            places[axis], device = device % self.mesh.shape[axis], device // self.mesh.shape[axis]

        def own(leaf: Any, spec: PartitionSpec) -> Any:
            for dim, entry in enumerate(spec):
                # The numbers along the axes of a dim are digits, that of the outermost axis the first.
                place = 0
                for axis in entry_axes(entry):
                    place = place * self.mesh.shape[axis] + places[axis]
                size = np.shape(leaf)[dim] // num_shards(self.mesh, entry_axes(entry))
                leaf = jax.lax.dynamic_slice_in_dim(leaf, place * size, size, dim)
            return leaf

        return jax.tree.map(own, batch, self.specs(batch))

    def of_batch(self, batch: PyTree) -> "BatchLayout":
        """The layout with ``tokens`` decided: as given, else zigzag where leaves are ``LaidOut``, else contiguous.

        Raises:
          ValueError: a leaf was laid out in another way, or for other devices than those that split it; or a sequence
            has no two chunks of one size for each device.
        """
        leaves = flatten_with_path(batch, one_leaf=is_laid_out)[0]
        is_zigzag = any(isinstance(leaf, LaidOut) and leaf.devices > 1 for _, leaf in leaves)
        tokens = self.tokens or (ZIGZAG if is_zigzag else CONTIGUOUS)
        for (path, leaf), spec in zip(leaves, self._by_leaf(batch), strict=True):
            if isinstance(leaf, LaidOut):
                entry = dict(enumerate(spec)).get(leaf.dim % leaf.ndim)
                split = f"its spec is {spec}"
                check_laid_out(named_leaf("batch", path), leaf, tokens, num_shards(self.mesh, entry_axes(entry)), split)
        found = replace(self, tokens=tokens)
        devices = num_shards(self.mesh, found.sequence.axes)
        if tokens == ZIGZAG and devices > 1:
            for (path, leaf), dim in zip(leaves, found._token_dims(batch), strict=True):
                if dim is not None:
                    check_even(np.shape(leaf)[dim], devices, f"{named_leaf('batch', path)} of shape {np.shape(leaf)}")
        return found

    @property
    def sequence(self) -> SequenceLayout:
        """What layers that exchange tokens must know, by axes of more than one device."""
        columns = [axis for axis in self.axes if axis not in self.row_axes]
        axes, rows = (tuple(axis for axis in of if self.mesh.shape[axis] > 1) for of in (columns, self.row_axes))
        return SequenceLayout(self.tokens or CONTIGUOUS, axes, rows)

    @contextlib.contextmanager
    def entered(self, batch: PyTree) -> Iterator[PyTree]:
        """Inside ``shard_map``: this device's part of a batch, laid out as ``tokens`` says, which layers then read."""
        leaves, treedef = flatten_with_path(batch, one_leaf=is_laid_out)
        values = [leaf.value if isinstance(leaf, LaidOut) else leaf for _, leaf in leaves]
        if self.tokens == ZIGZAG:
            dims = [
                None if isinstance(leaf, LaidOut) else dim
                for (_, leaf), dim in zip(leaves, self._token_dims(batch), strict=True)
            ]
            values = exchanged(values, dims, self.sequence.axes)
        with said(self.sequence):
            yield jax.tree.unflatten(treedef, values)

    def laid_out(self, batch: PyTree) -> PyTree:
        """A global batch in natural order, with its tokens in the order in which devices have them in the step."""
        if self.tokens != ZIGZAG:
            return batch
        devices = num_shards(self.mesh, self.sequence.axes)
        leaves, treedef = jax.tree.flatten(batch)
        ordered = [
            leaf if dim is None else reordered(leaf, zigzag_order(leaf.shape[dim], devices), dim)
            for leaf, dim in zip(leaves, self._token_dims(batch), strict=True)
        ]
        return jax.tree.unflatten(treedef, ordered)

    def _token_dims(self, batch: PyTree) -> list[int | None]:
        """The dim of each leaf that is split over the axes of the sequence; None of leaves without."""
        found = []
        for spec in self._by_leaf(batch):
            dims = [dim for dim, axes in _columns(spec, self.mesh).items() if axes == self.sequence.axes]
            found.append(dims[0] if dims else None)
        return found

    def misplaced(self, batch: PyTree, shardings: Sequence[Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """The leaves with a dim beside that of examples split in another way than the spec says, and by which axes."""
        # Most batches lie on no mesh, or are split by rows alone: then the specs are not needed.
        leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
        splits = [_columns(its.spec, its.mesh) if isinstance(its, NamedSharding) else {} for its in shardings]
        specs = self._by_leaf(batch) if any(splits) else [PartitionSpec()] * len(leaves)
        for (path, leaf), split, spec in zip(leaves, splits, specs, strict=True):
            if split and split != _columns(spec, self.mesh):
                yield path_string(path), leaf, tuple(axis for axes in split.values() for axis in axes)

    def _by_leaf(self, batch: PyTree) -> list[PartitionSpec]:
        """The spec of each leaf of the batch."""
        # JAX's own errors are of tree structures, and name no leaf.
        try:
            return jax.tree.leaves(jax.tree.broadcast(self.spec, batch))
        except (ValueError, TypeError, KeyError):
            here, there = ([path for path, _ in leaves_with_path(tree)] for tree in (self.spec, batch))
            raise ValueError(
                f"batch_spec has specs at {listed(here)}, and the batch has leaves at {listed(there)}: the specs must "
                "be a prefix of the batch. Give each leaf its spec, or one PartitionSpec for all of them."
            ) from None

    def _of(self, path: str, shape: tuple[int, ...], spec: PartitionSpec) -> PartitionSpec:
        name = named_leaf("batch", path)
        if not shape:
            return PartitionSpec()
        if not len(spec):
            raise ValueError(
                f"{name} of shape {shape} has the spec {spec}, which splits nothing, and dim 0 of a batch holds "
                f"examples, split over {self.row_axes}. Give it that spec. What all devices get whole is a scalar, or "
                "goes with the state, in its collections."
            )
        if len(spec) > len(shape):
            raise ValueError(
                f"{name} of shape {shape} has {len(shape)} dims, and its spec {spec} is of {len(spec)}. Give each leaf "
                "a spec of its own, as batch_spec={'tokens': P('dp', 'cp'), 'label': P('dp')}."
            )
        # Dim 0 holds rows, whose number `check_batch` compares; on a host it is that of a process.
        for dim in range(1, len(spec)):
            if shape[dim] % (count := num_shards(self.mesh, entry_axes(spec[dim]))):
                raise ValueError(
                    f"{name} of shape {shape} has the spec {spec}: the {count} devices over {entry_axes(spec[dim])} do "
                    f"not divide dim {dim} of size {shape[dim]}. Pad it to {next_multiple(shape[dim], count)} (tokens "
                    "of weight 0, weighted=True), or split another dim."
                )
        return spec


def batch_layout(
    mesh: Mesh | AbstractMesh,
    batch_axes: AxisNames | None,
    batch_spec: PyTree | None = None,
    tokens: str | None = None,
) -> BatchLayout:
    """The layout of one of two arguments; ``tokens`` is the ``layout`` that a step was given, if any.

    Raises:
      ValueError: both or none is given; specs name an axis that the mesh lacks, an axis twice, or no axis at all; or
        they split dim 0 of one leaf over other axes than that of another; or tokens are to be in zigzag, and no dim or
        several are split as a sequence.
      TypeError: something else than a ``PartitionSpec`` stands in ``batch_spec``, or ``mesh`` is no mesh.
    """
    check_mesh(mesh)
    check_layout(tokens)
    if isinstance(batch_axes, PartitionSpec) or (batch_axes is None) == (batch_spec is None):
        raise ValueError(
            f"{batch_axes=} and {batch_spec=}: pass one of them. batch_axes are the names of the axes over which the "
            "examples of a batch are split, ('dp', 'fsdp'); batch_spec is a PartitionSpec of all dims of its leaves, "
            "P(('dp', 'fsdp'), 'cp'), or a tree of them."
        )
    if batch_spec is None:
        axes = mesh_axes(mesh, batch_axes or (), "batch_axes")
        _check_sequence([], f"{batch_axes=}", tokens)
        return BatchLayout(mesh, axes, axes, PartitionSpec(axes), tokens)
    specs = {path: _named(path, spec, mesh) for path, spec in leaves_with_path(batch_spec)}
    axes = tuple(dict.fromkeys(axis for entries in specs.values() for entry in entries for axis in entry))
    rows = {path: entries[0] for path, entries in specs.items() if entries}
    if not axes:
        raise ValueError(f"batch_spec={batch_spec} splits nothing; name an axis, as P('fsdp') or P('fsdp', 'cp').")
    # Rows of all leaves are the same examples, and one weight stands for each of them.
    first = next(iter(rows))
    for path, of_rows in rows.items():
        if of_rows != rows[first]:
            raise ValueError(
                f"batch_spec splits dim 0, the examples, over {rows[first]} at '{first}' and over {of_rows} at "
                f"'{path}': a device would have other examples of one leaf than of another. Split dim 0 of all leaves "
                "over the same axes; a leaf with an entry for each token has examples before tokens, [b, t]."
            )
    columns = dict.fromkeys(entry for entries in specs.values() for entry in entries[1:] if entry)
    _check_sequence(list(columns), f"batch_spec={batch_spec}", tokens)
    return BatchLayout(mesh, axes, rows[first], batch_spec, tokens)


def _check_sequence(columns: list[tuple[str, ...]], given: str, tokens: str | None) -> None:
    """Raises where tokens are to be in zigzag, and other dims than that of rows are not split over one set of axes."""
    if tokens == ZIGZAG and len(columns) != 1:
        what = f"other dims over {' and over '.join(map(str, columns))}" if columns else "no sequence"
        raise ValueError(
            f"layout='zigzag', and {given} splits {what}; the tokens of one sequence are laid out, over the axes that "
            "split it. Pass batch_spec=P(('dp', 'fsdp'), 'cp'), say, of tokens [b, t]."
        )


def num_shards(mesh: Mesh | AbstractMesh, axes: tuple[str, ...]) -> int:
    """The number of devices along the axes, which is that of the parts into which they split a dim."""
    return math.prod(mesh.shape[axis] for axis in axes)


def _named(path: str, spec: Any, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of a spec, all of them axes of the mesh."""
    name = named_leaf("batch_spec", path)
    if not isinstance(spec, PartitionSpec) or PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise TypeError(
            f"{name} is {kind_of(spec) if not isinstance(spec, PartitionSpec) else spec}, and a PartitionSpec of names "
            "of axes and None is needed: P(('dp', 'fsdp'), 'cp'), with P = jax.sharding.PartitionSpec."
        )
    entries = tuple(map(entry_axes, spec))
    # `shard_map` refuses both of the following too, and names neither the argument nor the leaf.
    axes = [axis for entry in entries for axis in entry]
    if missing := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(
            f"{name}={spec}: the mesh has no axis {missing[0]!r}; its axes are {dict(mesh.shape)}. Name one of these."
        )
    if twice := [axis for axis in axes if axes.count(axis) > 1]:
        raise ValueError(f"{name}={spec} names the axis {twice[0]!r} twice; an axis splits one dim of a leaf.")
    return entries


def _columns(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> dict[int, tuple[str, ...]]:
    """The axes of more than one device that split other dims than the first, by dim."""
    found = {}
    for dim, entry in enumerate(spec):
        names = () if entry is PartitionSpec.UNCONSTRAINED else entry_axes(entry)
        if dim and (axes := tuple(axis for axis in names if mesh.shape[axis] > 1)):
            found[dim] = axes
    return found
